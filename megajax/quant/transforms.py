"""Transforms that make numbers easier to quantize: the Hadamard transform of neighbours.

The transform spreads an outlier over its block, so that the other numbers of the group keep
precise codes. It is linear, so a gradient is transformed once before the first quantization, is
summed and quantized again in this form, and is transformed back once after the last sum (SDP4Bit,
arXiv 2410.15526, with blocks of 32).
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError, nearest_multiples
from pallas_kernels.quantize import reference

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
        found = 0 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        found = 0
    if found < 1 or found & (found - 1):
        near = ""
        if found > 0:
            low = 1 << (found.bit_length() - 1)
            near = f"; nearest: {low}, {2 * low}"
        raise UserError(f"hadamard: size={size!r} must be a power of two from 1 on{near}")
    return found


def floating(op: str, x: Any) -> Array:
    """Returns an array of a floating type as jax has it. Raises: UserError."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise UserError(
            f"{op}: x must be a jax or NumPy array, got {type(x).__name__}; write "
            "jnp.asarray(x, jnp.float32)"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise UserError(
            f"{op}: x must be of a floating type, got {x.dtype}; write x.astype(jnp.float32)"
        )
    return jnp.asarray(x)
