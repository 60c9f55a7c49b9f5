"""The rule of reference.py for numbers in registers: scales, codes, and codes in 32-bit words.

Written in operations that Mosaic GPU lowers, few an element, and with the bits of plain JAX:

* 1/s: the GPU's quick reciprocal may be off by one, which an exact integer remainder corrects.
* rint(y): y + 1.5 * 2^23 holds it in its low bits, as two's complement. Between that sum and the
  product before it lies the rule's clip, so that ptxas cannot fuse the two and round once.
* a code as float32: its bits, the sign bit flipped, below those of 2^23; a sum takes both off.
* code * s is rounded before it is added (reference.rounded): LLVM made one instruction of the two
  (PTX for sm_90a: fma.rn.f32), which rounds once, and sums had other bits than plain JAX's.

Legend: x any dimensions. Words are int32 here, whatever they hold.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.quantize.reference import TINY, rounded

RAISE = np.float32(1.5 * 2**23)  # sums with it have no bits below 1
EXPONENT = np.int32(0x4B000000)  # of float32 from 2^23 to 2^24
FRACTION, HIDDEN = np.int32(0x7FFFFF), np.int32(0x800000)
SIGNS = {4: np.uint32(0x88888888).astype(np.int32), 8: np.uint32(0x80808080).astype(np.int32)}
Values = Any  # a traced array in registers


def scales(amax: Values, q: int) -> tuple[Values, Values]:
    """Returns (float32 scales, words that are -1 where a group can be coded and 0 elsewhere)."""
    scale = amax * np.float32(1 / q)
    scale = jnp.where(scale >= np.float32(TINY), scale, np.float32(1))
    finite = amax < np.float32(np.inf)
    return jnp.where(finite, scale, np.float32(np.nan)), jnp.where(finite, -1, 0)


def reciprocal(scale: Values) -> Values:
    """Returns float32(1 / scale), rounded to nearest; scales are normal numbers, or NaN."""
    return corrected(scale, 1.0 / scale)


def corrected(scale: Values, quick: Values) -> Values:
    """Returns float32(1 / scale), given that or one of its two neighbours.

    With mantissas m of the scale and r of the quotient, integers of 24 bits, m r is a power of two
    of at least 2^46 less a remainder below 2^26, which is all that 32 bits of the product hold.
    """
    bits = _bits(quick)
    mantissa, quotient = ((x & FRACTION) | HIDDEN for x in (_bits(scale), bits))
    left = -(mantissa * quotient)
    up, down = (jnp.where(over, 1, 0) for over in (left + left > mantissa, left + left < -mantissa))
    return lax.bitcast_convert_type(bits + up - down, jnp.float32)


def codes(x: Values, inverse: Values, q: int, noise: Values | None) -> Values:
    """Returns words whose low bits are the codes of x, rounded to nearest or with noise."""
    y = jnp.minimum(jnp.maximum(x * inverse, np.float32(-q)), np.float32(q))
    raised = y + RAISE
    if noise is None:
        return _bits(raised)
    # The nearest integer may lie above y. XLA makes y of raised - RAISE, so it is rounded again.
    over = y - lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN)
    negative = over < 0
    above = jnp.where(negative, over + 1.0, over)
    return _bits(raised) - jnp.where(negative, 1, 0) + jnp.where(noise < above, 1, 0)


def flipped(word: Values, bits: int) -> Values:
    """Returns packed codes with their sign bits flipped, as `numbers` takes them."""
    return word ^ SIGNS[bits]


def numbers(word: Values, shift: Any, bits: int) -> Values:
    """Returns the float32 numbers of the codes that start at bit `shift` of words of `flipped`."""
    field = lax.shift_right_logical(word, _like(word, shift)) & np.int32(2**bits - 1)
    raised = lax.bitcast_convert_type(field | EXPONENT, jnp.float32)
    return raised - np.float32(2**23 + 2 ** (bits - 1))


def scaled(number: Values, scale: Values) -> Values:
    """Returns the products of codes and scales, each rounded to float32."""
    return rounded(number * scale)


def placed(code: Values, shift: Any, bits: int) -> Values:
    """Returns words with the codes at bit `shift` and 0 elsewhere."""
    return lax.shift_left(code & np.int32(2**bits - 1), _like(code, shift))


def _like(x: Values, value: Any) -> Values:
    return value if hasattr(value, "shape") and value.shape else jnp.full_like(x, value)


def _bits(x: Values) -> Values:
    return lax.bitcast_convert_type(x, jnp.int32)
