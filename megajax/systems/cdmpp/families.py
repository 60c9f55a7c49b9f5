"""Families of real programs to time: our networks, optimizers, their pieces, and random mixtures.

A function of this module draws one computation with random shapes, and its arguments. A family
groups similar computations, and a split of a data set holds out complete families. A seed always
gives the same programs.

Sizes at `scale` 1 are for a CPU: at most about 2 GFLOP and 64 MiB a computation. With a larger
scale, for a GPU, the scale of each program is drawn between 1 and it, most of them large, and half
of the programs compute in bfloat16.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.layers.losses import LossSums
from megajax.layers.moe import MoeConfig
from megajax.models import decoder, encoder, lstm_vae
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.parts import ModelParts
from megajax.training.optim import OptimConfig, make_optimizer
from megajax.training.task import Objective

# ---- random sizes and arrays
#
# A `Draw` gives the random sizes and the random input arrays of a computation. Its scale is a
# factor on the number of elements: 1 for programs that suit a CPU, more for programs that suit a
# GPU.


# (chosen) Random values that are drawn for one array, which takes 0.1 s; a larger array repeats
# them. At scale 1 no array is larger.
DRAWN = 2**23
# (chosen) The largest number of elements of an array: 1 GiB of float32, so that the arrays of a
# batch of programs fit into a GPU.
LARGEST = 2**28
POWERS = 1 / 3  # (chosen) share of the sizes that are a power of two


class TooLarge(Exception):
    """A program would have an array of more than LARGEST elements."""


class Draw:
    """Draws sizes and arrays.

    scale: factor on the elements and rows of what it draws. dtype: in which the program computes.
    """

    def __init__(self, rng: np.random.Generator, scale: float, dtype: Any = jnp.float32):
        """Takes the random numbers from rng."""
        self.rng, self.scale, self.dtype = rng, scale, dtype

    def size(self, low: float, high: float, multiple: int = 1) -> int:
        """Returns a multiple of `multiple` between two bounds, log-uniformly distributed.

        The bounds grow with the scale: high with its square root, and low, for scales above 1, with
        its fourth root. A share of the sizes (POWERS) is the power of two that is nearest to such a
        number, which may lie a little outside the bounds: the sizes of real models often are powers
        of two, and strides of them are slow in caches.
        """
        low = low * max(self.scale, 1.0) ** 0.25
        top = max(high * self.scale**0.5, low)
        drawn = np.exp(self.rng.uniform(np.log(low), np.log(top)))
        if self.rng.uniform() < POWERS:
            drawn = 2.0 ** round(np.log2(drawn))
        return max(round(drawn / multiple), 1) * multiple

    def pick(self, *options: Any) -> Any:
        """Returns one of the options."""
        return options[self.rng.integers(len(options))]

    def count(self, *options: int) -> int:
        """Returns one of the options, doubled for each factor of 16 of the scale."""
        return self.pick(*options) * 2 ** max(int(math.log2(self.scale) / 4), 0)

    def limit(self, *shape: int) -> None:
        """Checks an array that a program makes. Raises: TooLarge."""
        if math.prod(shape) > LARGEST:
            raise TooLarge(f"{shape}")

    def _normal(self, shape: Sequence[int]) -> np.ndarray:
        """Returns normal float32; those of a large array repeat. Raises: TooLarge."""
        self.limit(*shape)
        if math.prod(shape) <= DRAWN:
            return self.rng.standard_normal(shape, np.float32)
        return np.resize(self.rng.standard_normal(DRAWN, np.float32), shape)

    def floats(self, *shape: int) -> jax.Array:
        """Returns normal floats. Raises: TooLarge."""
        return jnp.asarray(self._normal(shape), self.dtype)

    def below(self, bound: int, *shape: int) -> jax.Array:
        """Returns int32 from 0 to bound - 1."""
        return jnp.asarray(self.rng.integers(0, bound, shape), jnp.int32)

    def like(self, abstract: Any) -> Any:
        """Returns arrays of these shapes: small positive floats, integers of 0.

        Raises: TooLarge.
        """

        def filled(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                return jnp.zeros(leaf.shape, leaf.dtype)
            drawn = np.abs(self._normal(leaf.shape)) * 0.02
            return jnp.asarray(drawn, leaf.dtype)

        return jax.tree.map(filled, abstract)


# ---- pieces of networks
#
# Attention, products, convolutions and single operations.


Built = tuple[Callable, tuple]


def several(piece: Callable[[Draw], Built], most: int) -> Callable[[Draw], Built]:
    """Returns a function that draws 1, most / 2 or most independent computations in one program.

    A program of one operation gives one measured row, for which a compilation is much work.
    """

    def drawn(draw: Draw) -> Built:
        built, elements = [], 0
        for _ in range(draw.pick(1, max(most // 2, 1), most)):
            built.append(piece(draw))
            elements += sum(math.prod(x.shape) for x in built[-1][1])
            draw.limit(elements)  # before the next arrays take memory

        def all_of(*args: tuple) -> tuple:
            return tuple(f(*part) for (f, _), part in zip(built, args, strict=True))

        return all_of, tuple(args for _, args in built)

    return drawn


def attention(draw: Draw) -> Built:
    """Draws attention as XLA computes it, or its gradients."""
    rows, heads, width = draw.pick(1, 2, 4), draw.count(2, 4, 8), draw.pick(16, 32, 64, 128)
    queries = draw.size(16, 384, 8)
    draw.limit(rows, heads, queries, queries)
    keys, is_causal = queries, draw.pick(True, False)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * width**-0.5
        if is_causal:
            seen = jnp.arange(queries)[:, None] >= jnp.arange(keys)
            scores = jnp.where(seen, scores, -1e30)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

    args = tuple(draw.floats(rows, n, heads, width) for n in (queries, keys, keys))
    if draw.pick(True, False):
        return attend, args
    return jax.grad(lambda *a: attend(*a).sum(), argnums=(0, 1, 2)), args


def mlp(draw: Draw) -> Built:
    """Draws two products with an activation and a residual, or the weights' gradients."""
    rows, width, hidden = (draw.size(16, 512, 4), draw.size(32, 512, 8), draw.size(64, 1536, 16))
    draw.limit(rows, hidden)
    act = draw.pick(jax.nn.gelu, jax.nn.relu, jax.nn.silu, jnp.tanh)

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return x + act(x @ up) @ down

    args = draw.floats(rows, width), draw.floats(width, hidden), draw.floats(hidden, width)
    if draw.pick(True, False):
        return block, args
    return jax.grad(lambda *a: block(*a).sum(), argnums=(1, 2)), args


def product(draw: Draw) -> Built:
    """Draws a product or a batch of products, of any layout, with or without a bias."""
    m, k, n = draw.size(1, 1024), draw.size(8, 1024), draw.size(8, 1024)
    batch = draw.pick(1, 1, 2, 4, 8)
    spelled = draw.pick("mk,kn->mn", "km,kn->mn", "mk,nk->mn")
    if batch > 1:
        m, k, n = m // 4 + 1, k // 2 + 1, n // 2 + 1
        spelled = draw.pick("bmk,bkn->bmn", "bkm,bkn->bmn", "bmk,bnk->bmn")
    sizes = {"b": batch, "m": m, "k": k, "n": n}
    draw.limit(batch, m, n)
    args = [draw.floats(*(sizes[c] for c in a)) for a in spelled.split("->")[0].split(",")]
    if draw.pick(True, False):
        return functools.partial(jnp.einsum, spelled), tuple(args)
    return lambda x, w, bias: jnp.einsum(spelled, x, w) + bias, (*args, draw.floats(n))


def norm(draw: Draw) -> Built:
    """Draws a norm or softmax, or its gradients."""
    rows, width = draw.size(8, 4096), draw.size(16, 2048)

    def rms(x: jax.Array, g: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g

    def layer(x: jax.Array, g: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * g

    def softmax(x: jax.Array, g: jax.Array) -> jax.Array:
        return jax.nn.softmax(x * g)

    def clipped(x: jax.Array, g: jax.Array) -> jax.Array:  # as gradients are clipped
        return x * jax.lax.rsqrt((x * x).mean() + 1e-6) * g

    how = draw.pick(rms, layer, softmax, clipped)
    args = draw.floats(rows, width), draw.floats(width)
    if draw.pick(True, False):
        return how, args
    return jax.grad(lambda *a: (how(*a) ** 2).sum(), argnums=(0, 1)), args


def convolution(draw: Draw) -> Built:
    """Draws a convolution of images with a ReLU, or its gradients."""
    side, rows, inner = draw.size(8, 64, 2), draw.pick(1, 2, 4), draw.size(3, 48)
    outer, kernel, stride = draw.size(4, 64), draw.pick(1, 3, 5), draw.pick(1, 2)
    draw.limit(rows, side, side, outer)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        order = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, w, (stride,) * 2, "SAME", dimension_numbers=order)
        return jax.nn.relu(y)

    args = draw.floats(rows, side, side, inner), draw.floats(kernel, kernel, inner, outer)
    if draw.pick(True, True, False):
        return convolve, args
    return jax.grad(lambda *a: convolve(*a).sum(), argnums=(0, 1)), args


def layout(draw: Draw) -> Built:
    """Draws an operation that moves elements: transpose, concatenate, pad, roll, slice, repeat."""
    a, b, c = draw.size(4, 512), draw.size(4, 512), draw.size(2, 16)
    x = draw.floats(a, b, c)
    moves: Sequence[Callable] = (
        lambda x: x.transpose(draw_order),
        lambda x: x.reshape(a, b * c).T + 1.0,
        lambda x: jnp.concatenate([x, x[::-1]], axis),
        lambda x: jnp.pad(x, ((1, 2), (3, 4), (0, 1))) * 2.0,
        lambda x: jnp.roll(x, 3, axis),
        lambda x: x[:, ::2] * x[:, : (b + 1) // 2],
        lambda x: jnp.repeat(x, 2, axis),
        lambda x: jnp.stack([x, x + 1.0], axis),
        lambda x: x.swapaxes(0, 1) + x.swapaxes(0, 1) * 2.0,
    )
    draw_order, axis = draw.pick((1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0)), draw.pick(0, 1, 2)
    return draw.pick(*moves), (x,)


def elements(draw: Draw) -> Built:
    """Draws a chain of elementwise operations, some of whose values are results too."""
    rows, width = draw.size(4, 4096), draw.size(8, 2048)
    one: Sequence[Callable] = (
        jnp.tanh,
        jnp.exp,
        jnp.abs,
        jax.nn.gelu,
        jax.nn.silu,
        jnp.sqrt,
        jnp.sin,
        jnp.log1p,
        lambda v: jnp.maximum(v, 0.0),
        lambda v: v.astype(jnp.bfloat16).astype(jnp.float32),
    )
    two: Sequence[Callable] = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, jnp.divide)
    steps = [(draw.pick(*one), draw.pick(*two)) for _ in range(draw.pick(1, 1, 2, 3, 5, 8, 12))]
    # An optimizer's update reads and writes several arrays of one shape in one loop.
    is_kept = [draw.pick(False, False, True) for _ in steps]

    def chain(x: jax.Array, *others: jax.Array) -> list[jax.Array]:
        outputs = []
        for place, (unary, binary) in enumerate(steps):
            x = binary(unary(x), others[place % len(others)])
            outputs += [x] if is_kept[place] else []
        return [*outputs, x]

    count = draw.pick(1, 2, 3, 5)
    shapes = [draw.pick((rows, width), (rows, width), (width,), (rows, 1)) for _ in range(count)]
    return chain, (draw.floats(rows, width), *(draw.floats(*s) for s in shapes))


def reduction(draw: Draw) -> Built:
    """Draws a reduction over some axes, or an argmax with a cumulative sum."""
    x = draw.floats(draw.size(4, 1024), draw.size(4, 512), draw.pick(1, 2, 4, 8))
    axes = draw.pick((0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2))
    how: Callable = draw.pick(
        jnp.sum, jnp.max, jnp.mean, jnp.var, jax.nn.logsumexp, lambda x, axis: jnp.sum(x * x, axis)
    )
    if draw.pick(True, True, True, False):
        return lambda x: how(x, axis=axes), (x,)
    return lambda x: (jnp.argmax(x, axis=axes[0]), jnp.cumsum(x, axis=axes[0])), (x,)


def gather(draw: Draw) -> Built:
    """Draws a lookup of rows, their scatter, the largest values, or a sort."""
    table, width, count = draw.size(16, 8192), draw.size(4, 512), draw.size(8, 4096)
    draw.limit(count, width)
    x, places = draw.floats(table, width), draw.below(table, count)
    if draw.pick(True, False):
        return lambda x, i: x[i] * 2.0, (x, places)
    if draw.pick(True, False):
        return lambda x, i, y: x.at[i].add(y), (x, places, draw.floats(count, width))
    if draw.pick(True, False):
        return lambda x: jax.lax.top_k(x, min(4, width)), (x,)
    if draw.pick(True, False):
        return lambda x: jnp.argsort(x, axis=0), (x[:, 0],)
    return lambda x: jnp.sort(x, axis=0), (x[:1024, :64],)


def random(draw: Draw) -> Built:
    """Draws random numbers, or dropout."""
    shape = draw.size(4, 2048), draw.size(8, 512)
    draw.limit(*shape)
    make = draw.pick(jax.random.normal, jax.random.uniform)
    if draw.pick(True, False):
        return lambda key: make(key, shape), (jax.random.key(0),)

    def drop(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, shape), x / 0.9, 0.0)

    return drop, (jax.random.key(0), draw.floats(*shape))


# ---- mixtures
#
# Random mixtures of operations, so that a predictor knows fusions of unknown networks.
#
# The compiler's fusions of a network mix elementwise operations, movements, reductions and products
# in ways that no list of pieces foresees: sums of padded slices, reductions of computed values,
# updates in a loop. A mixture draws such a graph step by step. Each step makes one more array from
# one of the last arrays before it; all arrays have three dimensions, and the last one is the
# result. (CDMPP's data set, Tenset, holds random schedules of real operators; here the operators
# are random and the schedule is the compiler's.)


Step = Callable[[Sequence[jax.Array]], jax.Array]
# (chosen) bounds of a mixture's steps, and of the elements of one array at scale 1
STEPS = (2, 3, 5, 8, 12, 16)
LARGE = 2**18
TURNS = (2, 4, 8, 16)  # (chosen) of a mixture that is the body of a loop
_UNARY: Sequence[Callable] = (
    jnp.tanh,
    jnp.exp,
    jnp.abs,
    jax.nn.sigmoid,
    jax.nn.relu,
    jnp.negative,
    jnp.square,
    lambda v: jnp.sqrt(jnp.abs(v) + 1.0),
    lambda v: jnp.log1p(jnp.abs(v)),
    lambda v: v * 0.5,
    lambda v: v + 1.0,
    lambda v: v.astype(jnp.bfloat16).astype(v.dtype),
    lambda v: jax.lax.rsqrt(v * v + 1e-6),
    lambda v: (v.astype(jnp.int32) >> 3).astype(v.dtype),
)
_BINARY: Sequence[Callable] = (
    jnp.add,
    jnp.add,
    jnp.multiply,
    jnp.multiply,
    jnp.subtract,
    jnp.maximum,
    jnp.minimum,
    lambda a, b: a / (jnp.abs(b) + 1.0),
    lambda a, b: jnp.where(a > b, a, 0.0),
)
_SUMS: Sequence[Callable] = (
    jnp.sum,
    jnp.mean,
    jnp.max,
    lambda v, axis, keepdims: jnp.sum(v * v, axis, keepdims=keepdims),
)


def mixture(draw: Draw) -> Built:
    """Draws a mixture, its gradient by the inputs, or a loop with a mixture as its body."""
    shapes: list[tuple[int, ...]] = [_shape(draw)]
    shapes += [
        draw.pick(shapes[0], (1, *shapes[0][1:]), (*shapes[0][:2], 1))
        for _ in range(draw.pick(0, 1, 2))
    ]
    count = len(shapes)
    steps: list[Step] = []
    for _ in range(draw.pick(*STEPS)):
        step, shape = _step(draw, shapes)
        steps.append(step)
        shapes.append(shape)

    def run(*args: jax.Array) -> jax.Array:
        values = list(args)
        for step in steps:
            values.append(step(values))
        return values[-1]

    args = tuple(draw.floats(*shape) for shape in shapes[:count])
    how = draw.pick("forward", "forward", "gradient", "gradient", "loop")
    if how == "gradient":
        return jax.grad(lambda *a: jnp.tanh(run(*a)).sum(), argnums=tuple(range(count))), args
    if how == "loop":
        turns = draw.pick(*TURNS)

        def body(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
            result = run(*carry)
            scale = jnp.tanh(result.mean())
            return (carry[0] * scale, *carry[1:]), result[:1]

        return lambda *a: jax.lax.scan(body, a, None, length=turns), args
    return run, args


def _shape(draw: Draw) -> tuple[int, int, int]:
    most = LARGE * draw.scale
    while True:
        shape = draw.size(1, 64), draw.size(2, 256), draw.size(4, 512)
        if math.prod(shape) <= most:
            return shape


def _step(draw: Draw, shapes: Sequence[tuple[int, ...]]) -> tuple[Step, tuple[int, ...]]:
    """Draws one operation on some of the values so far; returns it and its result's shape."""
    recent = max(len(shapes) - 3, 0)
    at = int(draw.rng.integers(recent, len(shapes)))  # mostly chains: fusions are chains
    shape, axis = shapes[at], draw.pick(0, 1, 2)
    kind = draw.pick(
        "unary", "unary", "binary", "binary", "binary", "sum", "norm", "move", "move", "dot"
    )
    fits = [i for i, other in enumerate(shapes) if i != at and _broadcast(shape, other)]
    if kind == "binary" and fits:  # of two values: XLA would simplify one of a value with itself
        other, how = fits[int(draw.rng.integers(len(fits)))], draw.pick(*_BINARY)
        return lambda v: how(v[at], v[other]), jnp.broadcast_shapes(shape, shapes[other])
    if kind == "sum":
        how = draw.pick(*_SUMS)
        return lambda v: how(v[at], axis=axis, keepdims=True), (
            *shape[:axis],
            1,
            *shape[axis + 1 :],
        )
    if kind == "norm":
        how = draw.pick(*_SUMS)
        return lambda v: v[at] - how(v[at], axis=axis, keepdims=True), shape
    if kind == "move":
        return _move(draw, at, shape, axis)
    if kind == "dot":
        width = draw.size(4, 256)
        if math.prod(shape[:2]) * width <= LARGE * draw.scale and shape[2] > 1:
            weight = draw.floats(shape[2], width) * shape[2] ** -0.5
            return lambda v: v[at] @ weight, (*shape[:2], width)
    how = draw.pick(*_UNARY)
    return lambda v: how(v[at]), shape


def _broadcast(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a == b or a == 1 or b == 1 for a, b in zip(one, other, strict=True))


def _move(draw: Draw, at: int, shape: tuple[int, ...], axis: int) -> tuple[Step, tuple[int, ...]]:
    """Draws an operation that moves elements."""
    size = shape[axis]
    start = int(draw.rng.integers(size))
    stop = int(draw.rng.integers(start + 1, size + 1))
    kind = draw.pick("transpose", "roll", "slice", "pad", "join", "sliced sum", "lookup", "update")
    if kind == "transpose":
        order = draw.pick((1, 0, 2), (0, 2, 1), (2, 1, 0), (1, 2, 0), (2, 0, 1))
        return lambda v: v[at].transpose(order), tuple(shape[i] for i in order)
    if kind == "roll":
        return lambda v: jnp.roll(v[at], start, axis), shape
    if kind == "slice":
        result = (*shape[:axis], stop - start, *shape[axis + 1 :])
        return lambda v: jax.lax.slice_in_dim(v[at], start, stop, axis=axis), result
    if kind == "pad":
        pads = [(0, 0, 0)] * 3
        pads[axis] = (start, size - stop, 0)

        def padded(v: Sequence[jax.Array]) -> jax.Array:
            part = jax.lax.slice_in_dim(v[at], start, stop, axis=axis)
            return jax.lax.pad(part * 2.0, jnp.zeros((), part.dtype), pads)

        return padded, shape
    if kind == "join":

        def joined(v: Sequence[jax.Array]) -> jax.Array:
            low, high = jnp.split(v[at], [start], axis)
            return jnp.concatenate([-high, low], axis)

        return joined, shape
    if kind == "sliced sum":  # as a product over a short dimension is written out
        few = min(size, draw.pick(2, 4, 8, 16))

        def summed(v: Sequence[jax.Array]) -> jax.Array:
            parts = [jax.lax.slice_in_dim(v[at], i, i + 1, axis=axis) for i in range(few)]
            return sum(part * (0.5 + i) for i, part in enumerate(parts)) * jnp.ones_like(v[at])

        return summed, shape
    if kind == "lookup":
        count = draw.pick(max(size // 2, 1), size)
        places = draw.below(size, count)
        result = (*shape[:axis], count, *shape[axis + 1 :])
        return lambda v: jnp.take(v[at], places, axis), result

    def updated(v: Sequence[jax.Array]) -> jax.Array:
        part = jax.lax.slice_in_dim(v[at], 0, stop - start, axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(v[at], part * 2.0, start, axis)

    return updated, shape


# ---- detector
#
# The computation of a two-stage detector. These are the operations of Faster R-CNN (arXiv
# 1506.01497) with a feature pyramid (arXiv 1612.03144) and RoIAlign (arXiv 1703.06870), in that
# order: strided residual convolutions, 1x1 laterals with upsampling, scores of anchors, the best
# boxes without their overlaps, bilinear samples inside each box, and a dense head. They stand for
# models/faster_rcnn.py, which trains: the latencies that a GPU measured are of these programs, and
# a change of the trained network must not change them.


STRIDES = (4, 8, 16)  # of the pyramid's levels
BOX = 4
CELLS = 7  # samples on each side of a box
OVERLAP = 0.7  # intersection over union from which the worse of two boxes is dropped


@dataclasses.dataclass(frozen=True)
class _DetectorSizes:
    """_DetectorSizes of a detector.

    side: pixels, a multiple of the last stride. depth: residual blocks of a level. boxes: kept
    proposals of an image. classes: with the background.
    """

    rows: int
    side: int
    width: int
    depth: int
    anchors: int
    boxes: int
    hidden: int
    classes: int

    @classmethod
    def of(cls, draw: Draw) -> "_DetectorSizes":
        """Draws sizes."""
        side = STRIDES[-1] * draw.count(3, 4, 6)
        anchors = draw.pick(1, 3)
        most = anchors * (side // STRIDES[-1]) ** 2  # the coarsest level alone has as many
        return cls(
            rows=draw.pick(1, 2),
            side=side,
            width=draw.size(8, 32, 4),
            depth=draw.pick(1, 2),
            anchors=anchors,
            boxes=min(draw.pick(8, 16, 32), most),
            hidden=draw.size(32, 256, 8),
            classes=draw.pick(2, 8, 21),
        )


def detector(draw: Draw) -> tuple[Callable, tuple]:
    """Draws a detector's loss, or its gradient by the weights, with the arguments."""
    sizes = _DetectorSizes.of(draw)
    args = _detector_weights(draw, sizes), draw.floats(sizes.rows, sizes.side, sizes.side, 3)
    loss = functools.partial(_detector_loss, sizes=sizes)
    return (loss if draw.pick(False, True) else jax.grad(loss)), args


def _detector_weights(draw: Draw, sizes: _DetectorSizes) -> dict[str, jax.Array]:
    """Draws a detector's weights. Convolutions are (height, width, inner, outer)."""

    def matrix(*shape: int) -> jax.Array:
        return draw.floats(*shape) * float(np.prod(shape[:-1])) ** -0.5

    width, weights = sizes.width, {"stem": matrix(3, 3, 3, sizes.width)}
    for level in range(len(STRIDES)):
        weights[f"down{level}"] = matrix(3, 3, width, width)
        weights[f"lateral{level}"] = matrix(1, 1, width, width)
        for block in range(sizes.depth):
            weights[f"first{level}.{block}"] = matrix(3, 3, width, width)
            weights[f"second{level}.{block}"] = matrix(3, 3, width, width)
            weights[f"scale{level}.{block}"] = draw.floats(2, width)
    weights["rpn"] = matrix(3, 3, width, width)
    weights["rpn_out"] = matrix(1, 1, width, sizes.anchors * (1 + BOX))
    weights["dense"] = matrix(CELLS * CELLS * width, sizes.hidden)
    weights["head"] = matrix(sizes.hidden, sizes.classes * (1 + BOX))
    return weights


def _detector_loss(
    weights: dict[str, jax.Array], images: jax.Array, sizes: _DetectorSizes
) -> jax.Array:
    """Returns a scalar of the head's and the anchors' outputs. images: (rows, side, side, 3)."""
    levels = _pyramid(weights, images, sizes)
    scores, boxes = _proposals(weights, levels, sizes)
    stays, best = jax.vmap(lambda s, b: _without_overlaps(s, b, sizes.boxes))(
        jax.lax.stop_gradient(scores), jax.lax.stop_gradient(boxes)
    )
    inside = jax.vmap(_samples)(levels[0], best / STRIDES[0])
    hidden = jax.nn.relu(inside.reshape(sizes.rows, sizes.boxes, -1) @ weights["dense"])
    out = hidden @ weights["head"]
    named, moved = out[..., : sizes.classes], out[..., sizes.classes :]
    apart = -jax.nn.log_softmax(named)[..., 0] + jnp.abs(moved).mean(-1)
    return (apart * stays).mean() + jax.nn.softplus(scores).mean() + jnp.tanh(boxes / 32).mean()


def _convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    order = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=order
    )


def _pyramid(weights: dict[str, jax.Array], x: jax.Array, sizes: _DetectorSizes) -> list[jax.Array]:
    """Returns each level's features: (rows, side / stride, side / stride, width)."""
    x, levels = jax.nn.relu(_convolve(x, weights["stem"], 2)), []
    for level in range(len(STRIDES)):
        x = _convolve(x, weights[f"down{level}"], 2)
        for block in range(sizes.depth):
            scale, shift = weights[f"scale{level}.{block}"]  # a batch norm of fixed statistics
            y = jax.nn.relu(_convolve(x, weights[f"first{level}.{block}"]) * scale + shift)
            x = jax.nn.relu(x + _convolve(y, weights[f"second{level}.{block}"]))
        levels.append(_convolve(x, weights[f"lateral{level}"]))
    for level in range(len(STRIDES) - 1)[::-1]:
        coarse = jnp.repeat(jnp.repeat(levels[level + 1], 2, 1), 2, 2)
        levels[level] = levels[level] + coarse
    return levels


def _proposals(
    weights: dict[str, jax.Array], levels: Sequence[jax.Array], sizes: _DetectorSizes
) -> tuple[jax.Array, jax.Array]:
    """Returns (rows, anchors) scores and (rows, anchors, BOX) corners in pixels, of all levels."""
    scores, boxes = [], []
    for stride, x in zip(STRIDES, levels, strict=True):
        out = _convolve(jax.nn.relu(_convolve(x, weights["rpn"])), weights["rpn_out"])
        out = out.reshape(sizes.rows, -1, 1 + BOX)
        grid = (np.arange(sizes.side // stride) + 0.5) * stride
        places = np.stack(np.meshgrid(grid, grid, indexing="ij"), -1).reshape(-1, 1, 2)
        edges = 2.0 * stride * 2.0 ** np.arange(sizes.anchors)
        centres = jnp.asarray(np.repeat(places, sizes.anchors, 1).reshape(-1, 2), x.dtype)
        edge = jnp.asarray(np.tile(edges, len(places)), x.dtype)[:, None]
        middle = centres + edge * jnp.tanh(out[..., 1:3])
        half = 0.5 * edge * jnp.exp(jnp.clip(out[..., 3:], -1.0, 1.0))
        scores.append(out[..., 0])
        boxes.append(jnp.clip(jnp.concatenate([middle - half, middle + half], -1), 0, sizes.side))
    return jnp.concatenate(scores, 1), jnp.concatenate(boxes, 1)


def _without_overlaps(
    scores: jax.Array, boxes: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Returns (count,) 1 where a box stays, and the (count, BOX) best boxes, the best first."""
    best = boxes[jax.lax.top_k(scores, count)[1]]
    low = jnp.maximum(best[:, None, :2], best[None, :, :2])
    high = jnp.minimum(best[:, None, 2:], best[None, :, 2:])
    common = jnp.prod(jnp.maximum(high - low, 0), -1)
    area = jnp.prod(best[:, 2:] - best[:, :2], -1)
    overlap = common / jnp.maximum(area[:, None] + area - common, 1e-3)
    worse = (overlap > OVERLAP) & (jnp.arange(count)[:, None] < jnp.arange(count))

    def drop(place: jax.Array, stays: jax.Array) -> jax.Array:
        return stays & ~(worse[place] & stays[place])

    return jax.lax.fori_loop(0, count, drop, jnp.ones(count, bool)).astype(boxes.dtype), best


def _samples(x: jax.Array, boxes: jax.Array) -> jax.Array:
    """Returns (boxes, CELLS, CELLS, width) bilinear samples of one image's features."""
    cells = (jnp.arange(CELLS, dtype=x.dtype) + 0.5) / CELLS
    places = boxes[:, None, :2] + (boxes[:, None, 2:] - boxes[:, None, :2]) * cells[:, None]
    places = jnp.clip(places, 0, x.shape[0] - 1.001)
    corner = places.astype(jnp.int32)  # (boxes, CELLS, 2): row, column
    part = places - corner
    samples = jnp.zeros((len(boxes), CELLS, CELLS, x.shape[-1]), x.dtype)
    for row in (0, 1):
        for column in (0, 1):
            down = part[..., 0] if row else 1 - part[..., 0]
            right = part[..., 1] if column else 1 - part[..., 1]
            value = x[corner[:, :, None, 0] + row, corner[:, None, :, 1] + column]
            samples += value * down[:, :, None, None] * right[:, None, :, None]
    return samples


# ---- families


BFLOAT16 = 0.5  # (chosen) share of a GPU's programs


@dataclasses.dataclass(frozen=True)
class Program:
    """A function with its arguments. number: position in the sequence, from 0; family: its name."""

    number: int
    family: str
    function: Callable
    args: tuple


def _cross_entropy(sums: LossSums, total: jax.Array) -> jax.Array:
    return sums.cross_entropy / total


def _trained(
    parts: ModelParts,
    batch: dict,
    draw: Draw,
    forward: bool,
    objective: Objective = _cross_entropy,
) -> Built:
    """A network's loss with its gradient, or the loss alone."""

    def loss(params: Any, batch: dict, key: jax.Array) -> jax.Array:
        sums = parts.loss(params, batch, key)
        return objective(sums, jnp.maximum(sums.count, 1).astype(jnp.float32))

    args = draw.like(parts.abstract), batch, jax.random.key(1)
    return (loss if forward else jax.value_and_grad(loss)), args


def _tokens(draw: Draw, rows: int, length: int, vocab: int, heads: int) -> dict:
    draw.limit(rows, heads, length, length)
    draw.limit(rows, length, vocab)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    return {
        "tokens": draw.below(vocab, rows, length),
        "targets": draw.below(vocab, rows, length),
        "positions": positions,
    }


def _decoder_config(draw: Draw, **more: Any) -> DecoderConfig:
    heads = draw.count(2, 4, 8)
    return DecoderConfig(
        layers=draw.pick(1, 2, 3),
        width=draw.size(48, 256, 16),
        heads=heads,
        kv_heads=draw.pick(1, 2, heads),
        head_width=draw.count(16, 32, 64),
        mlp=draw.size(64, 768, 16),
        vocab=draw.size(256, 2048, 128),
        block=draw.pick("serial", "parallel"),
        norm=draw.pick("rms", "layer"),
        position=draw.pick("rope", "none"),
        activation=draw.pick("swiglu", "gelu"),
        bias="none",
        qk_norm=draw.pick(False, True),
        window=draw.pick(None, None, 16),
        **more,
    )


def _of_decoder(draw: Draw, **more: Any) -> Built:
    cfg = _decoder_config(draw, **more)
    batch = _tokens(draw, draw.pick(1, 2, 4), draw.size(16, 192, 8), cfg.vocab, cfg.heads)
    return _trained(
        decoder.parts(cfg, dtype=draw.dtype), batch, draw, draw.pick(False, False, True)
    )


def _of_experts(draw: Draw) -> Built:
    experts = draw.pick(4, 8)
    moe = MoeConfig(
        experts=experts,
        top_k=draw.pick(1, 2),
        width=draw.size(32, 256, 16),
        shared=draw.pick(0, 1),
        mode=draw.pick("dropless", "capacity"),
    )
    return _of_decoder(draw, moe=moe)


def _encoder_config(draw: Draw, vocab: int) -> EncoderConfig:
    heads = draw.count(2, 4, 8)
    return EncoderConfig(
        layers=draw.pick(1, 2, 3),
        width=heads * draw.count(16, 24, 32, 48),
        heads=heads,
        mlp=draw.size(64, 1024, 16),
        vocab=vocab,
        activation=draw.pick("gelu", "gelu_tanh"),
    )


def _of_encoder(draw: Draw) -> Built:
    cfg = _encoder_config(draw, draw.size(256, 2048, 128))
    batch = _tokens(draw, draw.pick(1, 2, 4), draw.size(16, 192, 8), cfg.vocab, cfg.heads)
    return _trained(
        encoder.parts(cfg, dtype=draw.dtype), batch, draw, draw.pick(False, False, True)
    )


def _of_images(draw: Draw) -> Built:
    """A vision transformer: patches by a convolution, then the encoder's blocks."""
    cfg = _encoder_config(draw, 128)
    parts, patch = encoder.parts(cfg, dtype=draw.dtype), draw.pick(4, 8, 16)
    side, rows = patch * draw.count(4, 6, 8, 12), draw.pick(1, 2, 4)
    cells = (side // patch) ** 2
    draw.limit(rows, cfg.heads, cells, cells)
    positions = jnp.broadcast_to(jnp.arange(cells, dtype=jnp.int32), (rows, cells))
    context = parts.context({"positions": positions}, None)

    def loss(weights: tuple, images: jax.Array) -> jax.Array:
        kernel, blocks, head = weights
        x = jax.lax.conv_general_dilated(
            images, kernel, (patch, patch), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x.reshape(rows, cells, cfg.width)
        x, _ = jax.lax.scan(lambda x, w: (parts.block(w, x, context)[0], None), x, blocks)
        return jax.nn.log_softmax(x.mean(1) @ head).mean()

    blocks = draw.like(parts.abstract[parts.stack])
    weights = draw.floats(patch, patch, 3, cfg.width), blocks, draw.floats(cfg.width, 10)
    images = draw.floats(rows, side, side, 3)
    return (loss if draw.pick(False, True) else jax.grad(loss)), (weights, images)


def _of_series(draw: Draw) -> Built:
    """Minder's LSTM autoencoder of metrics."""
    cfg = lstm_vae.LstmVaeConfig(draw.pick(2, 4, 8), draw.pick(8, 16), draw.pick(4, 8, 16))
    metrics = draw.floats(draw.size(8, 256), cfg.window, cfg.metrics).astype(jnp.float32)
    batch = {"targets": jnp.abs(metrics)}
    return _trained(lstm_vae.parts(cfg), batch, draw, draw.pick(False, True), lstm_vae.objective)


def _of_update(draw: Draw) -> Built:
    """One update of an optimizer on a decoder's parameters."""
    name = draw.pick("adamw", "lamb", "muon")
    parts = decoder.parts(_decoder_config(draw))
    rule = make_optimizer(OptimConfig(name=name), 100, parts.axes)
    params = draw.like(parts.abstract)

    def update(grads: Any, state: Any, params: Any) -> Any:
        changes, state = rule.update(grads, state, params)
        return jax.tree.map(jnp.add, params, changes), state

    return update, (params, draw.like(jax.eval_shape(rule.init, params)), params)


FAMILIES: dict[str, Callable[[Draw], Built]] = {
    "decoder": _of_decoder,
    "experts": _of_experts,
    "encoder": _of_encoder,
    "vit": _of_images,
    "lstm": _of_series,
    "update": _of_update,
    "attention": attention,
    "mlp": mlp,
    "product": several(product, 8),
    "norm": several(norm, 12),
    "convolution": several(convolution, 12),
    "layout": several(layout, 16),
    "elementwise": several(elements, 24),
    "reduction": several(reduction, 16),
    "gather": several(gather, 12),
    "random": several(random, 2),
    "detector": detector,
}
# Programs that predictors may be fitted on as well, but that no split judges: nobody runs them.
SYNTHETIC: dict[str, Callable[[Draw], Built]] = {"mixture": several(mixture, 8)}


def program(
    number: int,
    names: Sequence[str] = tuple(FAMILIES),
    *,
    seed: int = 0,
    scale: float = 1.0,
    bfloat16: float | None = None,
) -> Program:
    """Returns the program of this number, a function of (seed, number), of a family of `names`.

    names: names of FAMILIES or SYNTHETIC. scale: the largest factor on the sizes; a program with an
    array of more than LARGEST elements is drawn again, smaller. bfloat16: share of the programs
    that compute in it if the scale is above 1; None: BFLOAT16.
    """
    family = names[number % len(names)]
    factor, dtype = scale, jnp.float32
    if scale > 1:
        apart = np.random.default_rng([seed, number, 1])
        factor = scale ** apart.uniform() ** 0.5  # half of them are above scale ** 0.7
        share = BFLOAT16 if bfloat16 is None else bfloat16
        dtype = jnp.bfloat16 if apart.uniform() < share else jnp.float32
    while True:
        try:
            draw = Draw(np.random.default_rng([seed, number]), factor, dtype)
            function, args = (FAMILIES | SYNTHETIC)[family](draw)
            return Program(number, family, function, args)
        except TooLarge:
            factor /= 4


def programs(
    names: Sequence[str] = tuple(FAMILIES), *, seed: int = 0, start: int = 0, scale: float = 1.0
) -> Iterator[Program]:
    """Yields programs without end, a family after the other; see `program`.

    start: the first program's number.
    """
    for number in itertools.count(start):
        yield program(number, names, seed=seed, scale=scale)
