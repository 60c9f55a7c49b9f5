"""Convolutional backbones of detectors, and the feature pyramid that can follow one.

A backbone turns images into maps, one for each of its strides. `ResNet` is that of arXiv 1512.03385
with the stride in a bottleneck's 3 x 3 convolution, as torchvision has it. `Chain` is a list of
convolutions and poolings: ZF (arXiv 1311.2901), VGG-M-1024 (arXiv 1405.3531) and VGG16 (arXiv
1409.1556), as far as Faster R-CNN uses them, and a small one for CPUs. All are plain code on
complete weights: they run on one device or inside a shard_map. Arithmetic is in the type of the
kernels; norms compute in float32.

Absent: local response normalisation, in whose place a norm can stand, and batch norm with
statistics that change: a device has one or two images.

Legend: B images, H rows, W columns, C channels, O filters, G groups of channels.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from megajax.layers import param
from megajax.layers.ops import convolution

Array = jax.Array
Maps = dict[int, Array]  # stride -> (B, H, W, C)
NormKind = Literal["group", "frozen", "none"]
Network = Literal["small", "zf", "vgg_m", "vgg16", "resnet18", "resnet50", "resnet101"]

EPS = 1e-5  # (torchvision's BatchNorm2d and GroupNorm)
GROUPS = 32  # (arXiv 1803.08494, section 4.1)
SMALLEST_GROUP = 4  # channels (chosen: a group of one channel would lose the channel's level)
STEP = 4  # narrow backbones have a multiple of this many channels (chosen)
FINEST = 4  # stride of a pyramid's first level (arXiv 1612.03144, section 3)


def narrow(channels: int, width: float) -> int:
    """Returns a number of channels times a width factor, as a multiple of STEP."""
    return channels if width == 1 else max(STEP, STEP * round(channels * width / STEP))


def as_input(x: Array, dtype: jnp.dtype) -> Array:
    """Returns x in the type of the kernel that it meets, in 16 bits as an array of its own.

    The CPU backend of jax 0.11.2 (YNNPACK) gives garbage of finite values where it fuses a pooling
    or a mean with two convolutions or products in bfloat16. Libraries of GPUs read arrays anyway.
    """
    x = x.astype(dtype)
    return jax.lax.optimization_barrier(x) if x.dtype.itemsize == 2 else x


class Convolution(nnx.Module):
    """A convolution with half a window of padding on each side."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        channels: int,
        filters: int,
        window: int = 3,
        stride: int = 1,
        bias: bool = True,
        std: float | None = None,
    ):
        """std: of the initial kernel; None: that of arXiv 1502.01852 for a ReLU after it."""
        self.window, self.stride = window, stride
        shape = (window, window, channels, filters)
        std = math.sqrt(2 / (window * window * channels)) if std is None else std
        self.kernel = param.normal(rngs, None, shape, (None,) * 4, std)
        self.bias = param.constant(None, (filters,), (None,), 0.0) if bias else None

    def __call__(self, x_BHWC: Array) -> Array:
        """Returns the result in the type of the kernel."""
        kernel, half = self.kernel[...], self.window // 2
        padding = ((half, half), (half, half))
        y_BHWO = convolution(as_input(x_BHWC, kernel.dtype), kernel, (self.stride,) * 2, padding)
        return y_BHWO if self.bias is None else y_BHWO + _spread(self.bias[...], y_BHWO)


class GroupNorm(nnx.Module):
    """Normalises groups of channels over all places of a map (arXiv 1803.08494)."""

    def __init__(self, channels: int):
        """Makes the parameters: scale 1, shift 0."""
        groups = math.gcd(channels, GROUPS)
        while groups > 1 and channels // groups < SMALLEST_GROUP:
            groups //= 2
        self.groups = groups
        self.scale = param.constant(None, (channels,), (None,), 1.0)
        self.shift = param.constant(None, (channels,), (None,), 0.0)

    def __call__(self, x_BHWC: Array) -> Array:
        """Returns x normalised, in x's dtype."""
        y_BHWC = x_BHWC.astype(jnp.float32)
        # Statistics of channels first, then of groups: XLA's CPU backend takes 3 times as long for
        # means of an array in which the groups are a dimension.
        y_BHWC = y_BHWC - self._of_groups(y_BHWC.mean((1, 2)))
        variance_B11C = self._of_groups((y_BHWC * y_BHWC).mean((1, 2)))
        scale_B11C = jax.lax.rsqrt(variance_B11C + EPS) * _spread(self.scale[...], y_BHWC)
        return (y_BHWC * scale_B11C + _spread(self.shift[...], y_BHWC)).astype(x_BHWC.dtype)

    def _of_groups(self, mean_BC: Array) -> Array:
        B, C = mean_BC.shape
        mean_BG1 = mean_BC.reshape(B, self.groups, -1).mean(-1, keepdims=True)
        return jnp.repeat(mean_BG1, C // self.groups, -1).reshape(B, 1, 1, C)


class FrozenNorm(nnx.Module):
    """A batch norm whose statistics and parameters never change: a scale and a shift a channel.

    Imported weights have scale = weight / sqrt(variance + EPS) and shift = bias - mean * scale.
    """

    def __init__(self, channels: int):
        """Makes what leaves x as it is."""
        self.scale = param.constant(None, (channels,), (None,), 1.0)
        self.shift = param.constant(None, (channels,), (None,), 0.0)

    def __call__(self, x_BHWC: Array) -> Array:
        """Returns x scaled and shifted, in x's dtype; scale and shift have no gradient."""
        scale, shift = (jax.lax.stop_gradient(w[...]) for w in (self.scale, self.shift))
        y_BHWC = x_BHWC.astype(jnp.float32)
        return (y_BHWC * _spread(scale, y_BHWC) + _spread(shift, y_BHWC)).astype(x_BHWC.dtype)


class Unit(nnx.Module):
    """A convolution, its norm and a ReLU; the convolution has a bias if there is no norm."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        channels: int,
        filters: int,
        norm: NormKind,
        window: int = 3,
        stride: int = 1,
        relu: bool = True,
    ):
        """relu: whether there is one."""
        self.relu = relu
        self.conv = Convolution(rngs, channels, filters, window, stride, bias=norm == "none")
        kinds = {"group": GroupNorm, "frozen": FrozenNorm}
        self.norm = kinds[norm](filters) if norm in kinds else None

    def __call__(self, x_BHWC: Array) -> Array:
        """Returns what the next layer reads."""
        x_BHWC = self.conv(x_BHWC)
        x_BHWC = x_BHWC if self.norm is None else self.norm(x_BHWC)
        return jax.nn.relu(x_BHWC) if self.relu else x_BHWC


def max_pool(x_BHWC: Array, window: int, stride: int) -> Array:
    """Returns the largest values of windows, which reach over the borders by a half if they
    overlap, as those of torchvision's ResNet do."""
    half = window // 2 if window > stride else 0
    padding = ((0, 0), (half, half), (half, half), (0, 0))
    least = np.array(-np.inf, x_BHWC.dtype)  # NumPy's, or a traced constant hides that it is max
    return jax.lax.reduce_window(
        x_BHWC, least, jax.lax.max, (1, window, window, 1), (1, stride, stride, 1), padding
    )


# ---- chains of convolutions


class Layer(NamedTuple):
    """One layer of a chain. residual: a unit whose input is added to its result."""

    kind: Literal["conv", "pool", "residual"]
    filters: int = 0
    window: int = 3
    stride: int = 1


def _convs(*filters: int) -> tuple[Layer, ...]:
    return tuple(Layer("conv", n) for n in filters)


OVERLAPPING, HALF = Layer("pool", 0, 3, 2), Layer("pool", 0, 2, 2)
CHAINS: Mapping[str, tuple[Layer, ...]] = {
    # The widths were chosen for images of 128 pixels on two CPU cores.
    "small": (
        *(Layer("conv", n, 3, 2) for n in (16, 32, 64, 96)),
        Layer("residual", 96),
    ),
    # ZF, "fast" VGG-M and VGG16 up to their last convolution (table 1 of each paper's network).
    "zf": (
        Layer("conv", 96, 7, 2),
        OVERLAPPING,
        Layer("conv", 256, 5, 2),
        OVERLAPPING,
        *_convs(384, 384, 256),
    ),
    "vgg_m": (
        Layer("conv", 96, 7, 2),
        OVERLAPPING,
        Layer("conv", 256, 5, 2),
        OVERLAPPING,
        *_convs(512, 512, 512),
    ),
    "vgg16": (
        *_convs(64, 64),
        HALF,
        *_convs(128, 128),
        HALF,
        *_convs(256, 256, 256),
        HALF,
        *_convs(512, 512, 512),
        HALF,
        *_convs(512, 512, 512),
    ),
}


class Chain(nnx.Module):
    """Convolutions and poolings, one after the other."""

    def __init__(self, rngs: nnx.Rngs, name: str, width: float, norm: NormKind, stride: int):
        """stride: of the last map; reductions after it has been reached have a stride of 1."""
        self.layers, channels, reached = [], 3, 1
        self.units, self.channels = nnx.Dict({}), {}
        for i, layer in enumerate(CHAINS[name]):
            step = layer.stride if reached < stride else 1
            reached *= step
            self.layers.append((layer.kind, layer.window, step))
            if layer.kind != "pool":
                filters = narrow(layer.filters, width)
                self.units[str(i)] = Unit(rngs, channels, filters, norm, layer.window, step)
                channels = filters
            self.channels[reached] = channels

    def __call__(self, x_BHWC: Array) -> Maps:
        """Returns the last map of each stride."""
        maps, stride = {}, 1
        for i, (kind, window, step) in enumerate(self.layers):
            if kind == "pool":
                x_BHWC = max_pool(x_BHWC, window, step) if step > 1 else x_BHWC
            else:
                y_BHWC = self.units[str(i)](x_BHWC)
                x_BHWC = x_BHWC + y_BHWC if kind == "residual" else y_BHWC
            stride *= step
            maps[stride] = x_BHWC
        return maps


# ---- residual networks (arXiv 1512.03385, table 1)


BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}
EXPANSION = 4  # of a bottleneck's channels


class Block(nnx.Module):
    """Two convolutions of 3 x 3, or a bottleneck's 1 x 1, 3 x 3 and 1 x 1, beside a shortcut."""

    def __init__(
        self, rngs: nnx.Rngs, channels: int, width: int, norm: NormKind, stride: int, deep: bool
    ):
        """width: filters of the 3 x 3 convolutions. deep: whether it is a bottleneck."""
        filters = width * EXPANSION if deep else width
        shapes = [(1, width, 1), (3, width, stride), (1, filters, 1)]  # window, filters, stride
        shapes = shapes if deep else [(3, width, stride), (3, filters, 1)]
        self.units, inner = nnx.Dict({}), channels
        for i, (window, outer, step) in enumerate(shapes):
            last = i == len(shapes) - 1
            self.units[str(i)] = Unit(rngs, inner, outer, norm, window, step, relu=not last)
            inner = outer
        same = stride == 1 and channels == filters
        self.shortcut = None if same else Unit(rngs, channels, filters, norm, 1, stride, relu=False)

    def __call__(self, x_BHWC: Array) -> Array:
        """Returns the sum of both branches after its ReLU."""
        y_BHWC = x_BHWC
        for i in range(len(self.units)):
            y_BHWC = self.units[str(i)](y_BHWC)
        return jax.nn.relu(y_BHWC + (x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)))


class ResNet(nnx.Module):
    """ResNet 18, 50 or 101 without its classifier."""

    def __init__(self, rngs: nnx.Rngs, name: str, width: float, norm: NormKind, stride: int):
        """stride: of the last map: 32 has all four stages, 16 and 8 have three."""
        deep, depths = name != "resnet18", BLOCKS[name][: 4 if stride > 16 else 3]
        channels, reached = narrow(64, width), 4
        self.stem = Unit(rngs, 3, channels, norm, 7, 2)
        self.stages, self.channels, self.strides = nnx.Dict({}), {}, []
        for stage, depth in enumerate(depths):
            inner, blocks = narrow(64 * 2**stage, width), nnx.Dict({})
            for i in range(depth):
                step = 2 if stage and not i and reached < stride else 1
                reached *= step
                blocks[str(i)] = Block(rngs, channels, inner, norm, step, deep)
                channels = inner * EXPANSION if deep else inner
            self.stages[str(stage)] = blocks
            self.channels[reached] = channels
            self.strides.append(reached)

    def __call__(self, x_BHWC: Array) -> Maps:
        """Returns the last map of each stride."""
        x_BHWC, maps = max_pool(self.stem(x_BHWC), 3, 2), {}
        for stage, stride in enumerate(self.strides):
            blocks = self.stages[str(stage)]
            for i in range(len(blocks)):
                x_BHWC = blocks[str(i)](x_BHWC)
            maps[stride] = x_BHWC
        return maps


def backbone(
    rngs: nnx.Rngs, name: Network, width: float, norm: NormKind, stride: int
) -> Chain | ResNet:
    """Returns a backbone. width: a factor of all its channels. stride: of its last map.

    Its `channels` are {stride: channels of the map}.
    """
    return (ResNet if name in BLOCKS else Chain)(rngs, name, width, norm, stride)


# ---- feature pyramid


class Pyramid(nnx.Module):
    """Maps of equal width at all strides, the finer ones with what the coarser ones saw (arXiv
    1612.03144). The last level is every second place of the one before it."""

    def __init__(self, rngs: nnx.Rngs, channels: Mapping[int, int], width: int, norm: NormKind):
        """channels: of the backbone's maps by stride. norm: of its units, which have no ReLU."""
        self.strides = sorted(channels)

        def units(window: int, inputs: Mapping[int, int]) -> nnx.Dict:
            return nnx.Dict(
                {
                    str(stride): Unit(rngs, inputs[stride], width, norm, window, relu=False)
                    for stride in self.strides
                }
            )

        self.lateral = units(1, channels)
        self.output = units(3, dict.fromkeys(self.strides, width))

    def __call__(self, maps: Maps) -> Maps:
        """Returns the levels by stride."""
        levels, above = {}, None
        for stride in reversed(self.strides):
            x_BHWC = self.lateral[str(stride)](maps[stride])
            if above is not None:
                _, H, W, _ = x_BHWC.shape
                x_BHWC = x_BHWC + jnp.repeat(jnp.repeat(above, 2, 1), 2, 2)[:, :H, :W]
            levels[stride], above = self.output[str(stride)](x_BHWC), x_BHWC
        last = self.strides[-1]
        return dict(sorted((levels | {2 * last: levels[last][:, ::2, ::2]}).items()))


def _spread(vector_C: Array, x_BHWC: Array) -> Array:
    return vector_C.astype(x_BHWC.dtype)[None, None, None]
