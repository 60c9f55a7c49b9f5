"""Quantization of groups in plain JAX: the one rule that kernels, codecs and QTensor share.

A line of N numbers is cut into groups of neighbours; each group has a float32 scale (SDP4Bit, arXiv
2410.15526; ZeRO++, arXiv 2306.10209). With Q the largest code (7 of 4 bits, 448 of e4m3):

    s = amax * float32(1/Q)                       1 where that is below the smallest normal number
    y = clip(x * float32(1/s), -Q, Q)
    code = rint(y), ties to even                  or floor(y) + [u < y - floor(y)], u in [0, 1)
    x' = code * s

Products by reciprocals, not quotients: XLA on CPUs replaces some quotients by such products, and so
all programs have the same bits. Integers are two's complement, and -2^(b-1) is not used. A group
that holds inf or NaN has the scale NaN and codes of 0, so that all of it is decoded as NaN: a cast
of NaN to an integer differs between backends and would hide it.

A payload is one row of bytes: the packed codes, then the scales. The last group of a line may be
short: what is missing counts as zeros, which change no scale and are not sent.

Legend: N elements of a line, G its groups, C elements of a group, P bytes, x any leading dims.
Not here: zero points, other types of scales (megajax/quant/qtensor.py), what is sent to whom.
"""

import functools
import operator
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Bits = int | Literal["e4m3", "e5m2"]
INTEGERS = (2, 3, 4, 8)
# Of the floating types: bits of the mantissa, exponent of the smallest normal number.
FLOATS = {"e4m3": (3, -6), "e5m2": (2, -14)}
DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
SCALE_BYTES = 4
TINY = float(np.finfo(np.float32).tiny)


def flops(op: str, payloads: int, random: bool) -> int:
    """Returns the operations of an element of a fused kernel, on float32 and on words.

    Counted from registers.py: a transform's sums and product; a scale and a code; a sum's term;
    what random rounding adds, most of it the counter's integers.
    """
    transform, code, term, noise = 6, 7, 6, 22
    each = {
        "hadamard_quantize": transform + code,
        "reduce_requantize": term * payloads + code,
        "reduce_hadamard": term * payloads + transform,
        "subtract_quantize": 1 + code,
        "dequantize_add": term,
    }[op]
    return each + noise * random


def largest(bits: Bits) -> float:
    """Returns Q: the largest code; of a floating type its largest finite number."""
    if isinstance(bits, str):
        return float(jnp.finfo(DTYPES[bits]).max)
    return float(2 ** (bits - 1) - 1)


def width(bits: Bits) -> int:
    """Returns the bits of a code."""
    return 8 if isinstance(bits, str) else bits


def unit(bits: Bits) -> tuple[int, int]:
    """Returns (codes, bytes) of the smallest packed piece of whole bytes: (8, 3) of 3 bits."""
    codes_of = {2: 4, 3: 8, 4: 2, 8: 1}
    codes = codes_of[width(bits)]
    return codes, codes * width(bits) // 8


def code_bytes(n: int, bits: Bits) -> int:
    """Returns the bytes of the packed codes of a line."""
    codes, size = unit(bits)
    return -(-n // codes) * size


def groups_of(n: int, group: int) -> int:
    """Returns the groups of a line, the last of which may be short."""
    return -(-n // group)


def payload_bytes(n: int, bits: Bits, group: int) -> int:
    """Returns P: the bytes of a line's packed codes and scales."""
    return code_bytes(n, bits) + SCALE_BYTES * groups_of(n, group)


def split(x_xN: Array, group: int) -> Array:
    """Returns x_xGC; zeros fill the last group."""
    groups = groups_of(x_xN.shape[-1], group)
    missing = groups * group - x_xN.shape[-1]
    x_xN = jnp.pad(x_xN, [(0, 0)] * (x_xN.ndim - 1) + [(0, missing)])
    return x_xN.reshape(*x_xN.shape[:-1], groups, group)


def join(x_xGC: Array, n: int) -> Array:
    """Returns x_xN, the inverse of `split`, without the zeros that filled the last group."""
    return x_xGC.reshape(*x_xGC.shape[:-2], -1 if x_xGC.size else 0)[..., :n]


def amax(x_xGC: Array) -> Array:
    """Returns the largest magnitude of each group, float32; NaN where it holds one."""
    return jnp.max(jnp.abs(x_xGC.astype(jnp.float32)), -1)


def scales(amax_xG: Array, bits: Bits) -> Array:
    """Returns the float32 scales of groups with these largest magnitudes."""
    scale_xG = amax_xG * jnp.float32(1 / largest(bits))
    scale_xG = jnp.where(scale_xG >= TINY, scale_xG, 1.0)
    return jnp.where(amax_xG < jnp.inf, scale_xG, jnp.nan)


def codes(x_xGC: Array, scale_xG: Array, bits: Bits, noise_xGC: Array | None = None) -> Array:
    """Returns the codes: int8, or the floating type itself.

    noise_xGC: from counter.noise; None: round to nearest. Stochastic rounding of y, a fraction f
    above the code below it, is unbiased with variance f(1 - f) (in units of the distance of two
    codes): at most 1/4, in the mean of all f 1/6. A number that is a code is not changed.
    """
    q, scale_xG1 = largest(bits), scale_xG[..., None]
    y_xGC = divide(x_xGC.astype(jnp.float32), scale_xG1, wide=q < 4)
    # Between the product here and the difference in round_to_integers, clip prevents a fused
    # multiply-add: the fraction would depend on what a compiler fuses.
    y_xGC = jnp.where(jnp.isnan(scale_xG1), 0.0, jnp.clip(y_xGC, -q, q))
    if not isinstance(bits, str):
        return round_to_integers(y_xGC, noise_xGC).astype(jnp.int8)
    # By steps of the type around y: a cast alone rounds twice on some backends, and not at random.
    step_xGC, inverse_xGC = steps(y_xGC, *FLOATS[bits])
    return (round_to_integers(y_xGC * inverse_xGC, noise_xGC) * step_xGC).astype(DTYPES[bits])


def divide(x: Array, scale: Array, *, wide: bool = False) -> Array:
    """Returns x * float32(1 / scale).

    wide: scales may exceed 2^126, whose reciprocals are no normal numbers (codes of 2 and 3 bits).
    Powers of two shrink both sides then, which changes no other bit.
    """
    if not wide:
        return x * (1.0 / scale)
    shrink = jnp.where(scale > 2.0**100, jnp.float32(2.0**-30), jnp.float32(1))
    return (x * shrink) * (1.0 / (scale * shrink))


def round_to_integers(y: Array, noise: Array | None = None) -> Array:
    """Returns float32 integers: the nearest, ties to even, or with noise one of the two beside."""
    if noise is None:
        return jnp.rint(y)
    below = jnp.floor(y)
    return below + (noise < y - below).astype(jnp.float32)


def steps(y: Array, mantissa: int, least: int) -> tuple[Array, Array]:
    """Returns the distance of neighbours of a floating type at y, and its reciprocal."""
    raised = (jax.lax.bitcast_convert_type(y, jnp.int32) >> 23) & 255
    exponent = jnp.maximum(raised - 127, least) - mantissa
    powers = ((127 + exponent) << 23, (127 - exponent) << 23)
    step, inverse = (jax.lax.bitcast_convert_type(p, jnp.float32) for p in powers)
    return step, inverse


def quantize(
    x_xN: Array, bits: Bits, group: int, noise_xN: Array | None = None
) -> tuple[Array, Array]:
    """Returns (code_xN int8 or of the floating type, scale_xG float32). x_xN: any floating type."""
    x_xGC = split(x_xN, group)
    scale_xG = scales(amax(x_xGC), bits)
    noise_xGC = None if noise_xN is None else split(noise_xN, group)
    return join(codes(x_xGC, scale_xG, bits, noise_xGC), x_xN.shape[-1]), scale_xG


def dequantize(code_xN: Array, scale_xG: Array, group: int) -> Array:
    """Returns float32 x_xN."""
    code_xGC, scale_xG1 = split(code_xN, group).astype(jnp.float32), scale_xG[..., None]
    return join(rounded(code_xGC * scale_xG1), code_xN.shape[-1])


def rounded(product: Array) -> Array:
    """Returns a product as it is, rounded to float32 in every program.

    Compilers fuse a product with the sum that follows into one instruction, which rounds once, or
    do not: of decoded payloads' sums, up to a third then differed in their last bit between two
    programs (XLA on CPUs, jax 0.11.2). A choice by the product itself stands between the two, and
    that compiler keeps it; other backends were not tried.
    """
    return jnp.where(jnp.isnan(product), jnp.nan, product)


def pack(code_xN: Array, bits: Bits) -> Array:
    """Returns uint8 (x, code_bytes): code i of a piece in bits i * bits and up, low byte first.

    So of 4 bits, an even code is in the low half of its byte, as lax.bitcast_convert_type has it.
    code_xN: int8, uint8 or of the floating type.
    """
    if code_xN.dtype != jnp.uint8:
        code_xN = jax.lax.bitcast_convert_type(code_xN, jnp.uint8)
    count, size = unit(bits)
    if count == 1:
        return code_xN
    code_xUC = split(code_xN, count)
    word = jnp.uint8 if size == 1 else jnp.uint32
    lanes = [(code_xUC[..., i] & (2 ** width(bits) - 1)).astype(word) for i in range(count)]
    word_xU = functools.reduce(
        operator.or_, (lane << (width(bits) * i) for i, lane in enumerate(lanes))
    )
    if size == 1:
        return word_xU
    byte_xUS = jnp.stack([((word_xU >> 8 * i) & 255).astype(jnp.uint8) for i in range(size)], -1)
    return join(byte_xUS, byte_xUS.shape[-2] * size)


def unpack(packed_xP: Array, n: int, bits: Bits, *, signed: bool = True) -> Array:
    """Returns code_xN as `pack` took it: int8 (uint8 unless signed) or of the floating type."""
    if isinstance(bits, str):
        return jax.lax.bitcast_convert_type(packed_xP, DTYPES[bits])
    count, size = unit(bits)
    if count > 1:
        byte_xUS = split(packed_xP, size)
        word = jnp.uint8 if size == 1 else jnp.uint32
        parts = (byte_xUS[..., i].astype(word) << 8 * i for i in range(size))
        word_xU = functools.reduce(operator.or_, parts)
        lanes = [((word_xU >> bits * i) & (2**bits - 1)).astype(jnp.uint8) for i in range(count)]
        packed_xP = join(jnp.stack(lanes, -1), n)
    if not signed:
        return packed_xP
    # The sign bit goes to the top, and comes back with copies of itself.
    return jax.lax.bitcast_convert_type(packed_xP << (8 - bits), jnp.int8) >> (8 - bits)


def encode(x_xN: Array, bits: Bits, group: int, noise_xN: Array | None = None) -> Array:
    """Returns payload_xP, uint8: packed codes, then scales, low byte first."""
    code_xN, scale_xG = quantize(x_xN, bits, group, noise_xN)
    return join_payload(pack(code_xN, bits), scale_xG)


def decode(payload_xP: Array, n: int, bits: Bits, group: int) -> Array:
    """Returns float32 x_xN of payloads of `encode`."""
    packed_xP, scale_xG = split_payload(payload_xP, n, bits)
    return dequantize(unpack(packed_xP, n, bits), scale_xG, group)


def join_payload(packed_xP: Array, scale_xG: Array) -> Array:
    """Returns packed codes and the bytes of float32 scales as one row."""
    byte_xGS = jax.lax.bitcast_convert_type(scale_xG, jnp.uint8)
    flat_xP = join(byte_xGS, SCALE_BYTES * scale_xG.shape[-1])
    return jnp.concatenate([packed_xP, flat_xP], -1)


def split_payload(payload_xP: Array, n: int, bits: Bits) -> tuple[Array, Array]:
    """Returns (packed codes, float32 scales) of payloads."""
    end = code_bytes(n, bits)
    byte_xGS = split(payload_xP[..., end:], SCALE_BYTES)
    return payload_xP[..., :end], jax.lax.bitcast_convert_type(byte_xGS, jnp.float32)


def hadamard(x_xN: Array, size: int = 32) -> Array:
    """Returns x H / sqrt(size) of each `size` neighbours, H of Sylvester; it is its own inverse.

    By butterflies, log2(size) additions an element in one fixed order: a product with a matrix adds
    in an order that depends on its shape. Computed in float32, returned in x's type.
    size: a power of two that divides N.
    """
    y, n = x_xN.astype(jnp.float32), x_xN.shape[-1]
    half = 1
    while half < size:
        pair = y.reshape(*x_xN.shape[:-1], n // (2 * half), 2, half)
        a, b = pair[..., 0, :], pair[..., 1, :]
        y, half = jnp.stack([a + b, a - b], -2), 2 * half
    return rounded(y.reshape(x_xN.shape) * jnp.float32(size**-0.5)).astype(x_xN.dtype)
