"""Quantized arrays: QTensor, `quantize` and `dequantize`.

A QTensor is a pytree of packed codes, scales and zero points, so it goes through jit, vmap, scans,
meshes and checkpoints as arrays do. If the format has an axis, codes and scales keep the array's
dimensions, of which only that one is shorter, and shard like the array along all others.

The arithmetic is that of pallas_kernels/quantize/reference.py. This module adds the lines of an
array, zero points and scales of 16 bits. For a group from lo to hi, with Q = 2^bits - 1,

    zero = lo, rounded down; s = (hi - zero) / Q, rounded up; code = round((x - zero) / s)
    x' = zero + code * s

so a group of equal values is exact. The missing elements of a short last group do not count.

Legend: N elements of a line, G its groups, C elements of a group, x any leading dims.
"""

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError, nearest_multiples
from megajax.quant.formats import Format
from pallas_kernels.quantize import counter, reference

# ---- transforms
#
# Transforms that make numbers easier to quantize: the Hadamard transform of neighbours.
#
# The transform spreads an outlier over its block, so that the other numbers of the group keep
# precise codes. It is linear, so a gradient is transformed once before the first quantization, is
# summed and quantized again in this form, and is transformed back once after the last sum (SDP4Bit,
# arXiv 2410.15526, with blocks of 32).


Array = jax.Array


def hadamard(x: Array, size: int = 32) -> Array:
    """Returns the Hadamard transform of each `size` neighbours of the last dimension.

    y = x H / sqrt(size) with H symmetric, of +1 and -1 (Sylvester's order). So the transform is its
    own inverse and keeps the sum of squares. It is computed by float32 additions in a fixed order,
    so the bits depend neither on the shape nor on how the array is sharded between blocks.

    Args: x: (..., N) of a floating type. size: a power of two that divides N; codecs pad
        (Codec.transform).
    Returns: an array of x's shape and type.
    Raises: UserError if size is no power of two or does not divide N, or for another type.
    """
    size, x = power_of_two(size), floating("hadamard", x)
    if x.ndim == 0 or x.shape[-1] % size:
        last = x.shape[-1] if x.ndim else 0
        rule = nearest_multiples(last, size) if x.ndim else "the array has no dimension"
        raise UserError(
            f"hadamard: the last dimension of x {x.shape} must be a multiple of size={size}; {rule}"
        )
    return reference.hadamard(x, size)


def power_of_two(size: Any) -> int:
    """Returns the size of a transform. Raises: UserError."""
    try:
        power = 0 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        power = 0
    if power < 1 or power & (power - 1):
        near = ""
        if power > 0:
            low = 1 << (power.bit_length() - 1)
            near = f"; nearest: {low}, {2 * low}"
        raise UserError(f"hadamard: size={size!r} must be a power of two from 1 on{near}")
    return power


def floating(op: str, x: Any, name: str = "x") -> Array:
    """Returns an array of a floating type as jax has it. Raises: UserError."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise UserError(
            f"{op}: {name} must be a jax or NumPy array, got {type(x).__name__}; write "
            f"jnp.asarray({name}, jnp.float32)"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(
            f"{op}: {name} must be of a floating type, got {x.dtype}; write "
            f"{name}.astype(jnp.float32)"
        )
    return jnp.asarray(x)


# ---- qtensor


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QTensor:
    """A quantized array.

    values: uint8, packed codes (reference.pack). Without an axis (bytes,); with one the shape of
    the array, in which the axis counts bytes. scales: in scale_dtype; (groups,), or the shape of
    the array, in which the axis counts groups. zeros: like scales; None if symmetric. Under vmap
    and in a stack of layers, the arrays have more leading dimensions, which `shape` does not have.
    format, shape, dtype: static; shape and dtype are those of the array that was quantized.
    """

    values: Array
    scales: Array
    zeros: Array | None
    format: Format = field(metadata={"static": True})
    shape: tuple[int, ...] = field(metadata={"static": True})
    dtype: np.dtype = field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array that was quantized."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of the array that was quantized."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))


def quantize(x: Array, fmt: Format, *, key: Array | None = None) -> QTensor:
    """Quantizes an array: |x - dequantize(q)| <= s/2 if rounded to nearest, < s if stochastic.

    s is the scale of the group: amax/Q, with zero points (hi - lo)/Q. For e4m3 and e5m2 the bound
    is s times the distance of neighbouring codes. Groups whose scale would be below the smallest
    normal number become zeros. A group that holds inf or NaN, or whose scale does not fit
    scale_dtype, is decoded as NaN.

    Args: x: an array of a floating type and any shape; the arithmetic is in float32. key: for
        stochastic rounding (jax.random.key); the same key and shape give the same codes, compiled
        or not, however x is sharded. Not used by 'nearest'.
    Raises: UserError for another type, a shape without the axis, or a missing key.
    """
    if not isinstance(fmt, Format):
        raise UserError(
            f"quantize: fmt must be a megajax.quant.Format, got {fmt!r}; for example Format(8)"
        )
    x = floating("quantize", x)
    n, axis = fmt.lines(x.shape)
    group = fmt.group_of(n)
    noise_xGC = None
    if fmt.stochastic:
        noise = counter.noise(need_key("quantize", key), x.shape)
        noise_xGC = reference.split(_to_lines(noise, axis), group)
    x_xGC = reference.split(_to_lines(x, axis).astype(jnp.float32), group)
    if fmt.symmetric:
        scale_xG, zero_xG = symmetric_scales(x_xGC, fmt), None
        code_xGC = reference.codes(x_xGC, scale_xG, fmt.bits, noise_xGC)
    else:
        scale_xG, zero_xG = zero_points(x_xGC, n, fmt)
        code_xGC = unsigned_codes(x_xGC, scale_xG, zero_xG, fmt, noise_xGC)
    return _packed(reference.join(code_xGC, n), scale_xG, zero_xG, fmt, axis, x.shape, x.dtype)


def from_codes(
    code: Array, scale: Array, zero: Array | None, fmt: Format, dtype: Any = "float32"
) -> QTensor:
    """Returns a QTensor of given codes, for formats with an axis.

    Args: code: in the array's shape: int8 from -Q to Q, or uint8 with zero points. scale, zero: the
        same shape with groups along fmt.axis; values must be exact in scale_dtype. dtype: that of
        the array that the QTensor represents.
    Raises: UserError if a shape does not fit.
    """
    n, axis = fmt.lines(code.shape)
    if axis is None:
        raise UserError("from_codes needs a format with an axis, got axis=None")
    groups = reference.groups_of(n, fmt.group_of(n))
    shape = (*code.shape[:axis], groups, *code.shape[axis + 1 :])
    if fmt.symmetric != (zero is None):
        raise UserError(f"from_codes: zero points must be there with symmetric=False only: {fmt}")
    for name, x in {"scale": scale, "zero": zero}.items():
        if x is not None and x.shape != shape:
            raise UserError(f"from_codes: {name} must have the shape {shape}, got {x.shape}")
    zero_xG = None if zero is None else _to_lines(zero, axis)
    lines = _to_lines(code, axis), _to_lines(scale, axis), zero_xG
    return _packed(*lines, fmt, axis, code.shape, dtype)


def _packed(code_xN: Array, scale_xG: Array, zero_xG: Array | None, *described: Any) -> QTensor:
    """described: format, axis, shape and dtype."""
    fmt, axis, shape, dtype = described
    return QTensor(
        values=_from_lines(reference.pack(code_xN, fmt.bits), axis),
        scales=_from_lines(scale_xG, axis).astype(fmt.scale_dtype),
        zeros=None if zero_xG is None else _from_lines(zero_xG, axis).astype(fmt.scale_dtype),
        format=fmt,
        shape=shape,
        dtype=np.dtype(dtype),
    )


def dequantize(q: QTensor, dtype: Any = None) -> Array:
    """Returns the array that a QTensor represents, in its shape.

    It is computed in float32: code * s, or zero + code * s.
    Args: dtype: that of the result; None: that of the array that was quantized.
    Raises: UserError if q is no QTensor, or a stack of several.
    """
    if not isinstance(q, QTensor):
        raise UserError(f"dequantize: q must be a QTensor, got {type(q).__name__}")
    fmt = q.format
    n, axis = fmt.lines(q.shape)
    dims = 1 if axis is None else q.ndim
    if q.values.ndim != dims:
        raise UserError(
            f"dequantize: q stands for the shape {q.shape}, so its codes must have {dims} "
            f"dimensions, and they have the shape {q.values.shape}; of a stack take one "
            "(jax.tree.map(lambda x: x[0], q)), or all with jax.vmap(dequantize)"
        )
    group = fmt.group_of(n)
    packed = _to_lines(q.values, axis, packed=True)
    code_xN = reference.unpack(packed, n, fmt.bits, signed=fmt.symmetric)
    scale_xG = _to_lines(q.scales, axis, packed=True).astype(jnp.float32)
    if q.zeros is None:
        x_xN = reference.dequantize(code_xN, scale_xG, group)
    else:
        zero_xG = _to_lines(q.zeros, axis, packed=True).astype(jnp.float32)
        # Float32 zero + code * s, in halves.
        code_xGC = reference.split(code_xN, group).astype(jnp.float32)
        above_xGC = reference.rounded(code_xGC * (scale_xG[..., None] * 0.5))
        x_xGC = (above_xGC + zero_xG[..., None] * 0.5) * 2.0
        x_xN = reference.join(x_xGC, code_xN.shape[-1])
    x = x_xN.reshape(q.shape) if axis is None else _from_lines(x_xN, axis)
    return x.astype(q.dtype if dtype is None else dtype)


def need_key(op: str, key: Array | None) -> Array:
    """Returns the key of stochastic rounding. Raises: UserError where there is none."""
    if key is None:
        raise UserError(
            f"{op}: stochastic rounding needs a random key: give key=jax.random.key(seed), another "
            "one for each step, rank and level (jax.random.fold_in), or use rounding='nearest'"
        )
    return key


def _to_lines(x: Array, axis: int | None, *, packed: bool = False) -> Array:
    """Returns x_xN: lines in the last dimension. packed: flat ones are so already."""
    if axis is not None:
        return jnp.moveaxis(x, axis, -1)
    return x if packed else x.reshape(-1)


def _from_lines(x_xN: Array, axis: int | None) -> Array:
    return x_xN if axis is None else jnp.moveaxis(x_xN, -1, axis)


def symmetric_scales(x_xGC: Array, fmt: Format) -> Array:
    """Returns float32 scales that scale_dtype can hold, so rounded up."""
    scale_xG = reference.scales(reference.amax(x_xGC), fmt.bits)
    # Rounded up, the largest number of a group could be decoded as inf.
    most = np.float32(float(jnp.finfo(jnp.float32).max) / fmt.largest)
    most = _representable(jnp.asarray(most), fmt.scale_dtype, up=False)
    return _fitting(jnp.minimum(_representable(scale_xG, fmt.scale_dtype, up=True), most), fmt)


def zero_points(x_xGC: Array, n: Any, fmt: Format) -> tuple[Array, Array]:
    """Returns float32 (scale_xG, zero_xG) that scale_dtype can hold.

    In halves, because hi - lo may exceed float32.
    """
    G, C = x_xGC.shape[-2:]
    live_GC = (jnp.arange(G * C) < n).reshape((1,) * (x_xGC.ndim - 2) + (G, C))
    lo_xG = jnp.min(jnp.where(live_GC, x_xGC, jnp.inf), -1)
    hi_xG = jnp.max(jnp.where(live_GC, x_xGC, -jnp.inf), -1)
    finite_xG = (lo_xG > -jnp.inf) & (hi_xG < jnp.inf)  # False of NaN
    zero_xG = _representable(lo_xG, fmt.scale_dtype, up=False)
    scale_xG = (hi_xG * 0.5 - zero_xG * 0.5) * jnp.float32(2 / fmt.largest)
    # Halves of smaller ones would not be normal numbers.
    scale_xG = jnp.where(scale_xG >= 4 * reference.TINY, scale_xG, 1.0)
    scale_xG = _fitting(_representable(scale_xG, fmt.scale_dtype, up=True), fmt)
    finite_xG &= jnp.abs(zero_xG) <= float(jnp.finfo(fmt.scale_dtype).max)
    return jnp.where(finite_xG, scale_xG, jnp.nan), jnp.where(finite_xG, zero_xG, jnp.nan)


def unsigned_codes(
    x_xGC: Array, scale_xG: Array, zero_xG: Array, fmt: Format, noise_xGC: Array | None
) -> Array:
    """Returns uint8 codes from 0 to Q."""
    q, scale_xG1, zero_xG1 = fmt.largest, scale_xG[..., None], zero_xG[..., None]
    y_xGC = reference.divide(x_xGC * 0.5 - zero_xG1 * 0.5, scale_xG1 * 0.5, wide=q < 4)
    y_xGC = jnp.where(jnp.isnan(scale_xG1), 0.0, jnp.clip(y_xGC, 0, q))
    return reference.round_to_integers(y_xGC, noise_xGC).astype(jnp.uint8)


def _fitting(scale_xG: Array, fmt: Format) -> Array:
    """Returns NaN for scales that exceed scale_dtype."""
    most = float(jnp.finfo(fmt.scale_dtype).max)
    return jnp.where(scale_xG <= most, scale_xG, jnp.nan)


def _representable(x: Array, dtype: str, *, up: bool) -> Array:
    """Returns float32 numbers that a cast to `dtype` does not change: the next from x up or down.

    By bits and by steps: compilers may leave out a cast to 16 bits and back.
    """
    if dtype == "float32":
        return x
    if dtype == "float16":
        step, inverse = reference.steps(x, 10, -14)
        return (jnp.ceil if up else jnp.floor)(x * inverse) * step
    word = jax.lax.bitcast_convert_type(x, jnp.uint32)
    away = (x > 0) == up  # from 0
    word = jnp.where(away, word + 0xFFFF, word) >> 16 << 16
    return jax.lax.bitcast_convert_type(word, jnp.float32)
