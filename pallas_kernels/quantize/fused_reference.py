"""The fused kernels' computations in plain JAX: the rule of reference.py, step after step.

SDP4Bit (arXiv 2410.15526) sends a gradient through two all-to-alls: in 8 bits inside a node, the
sum of that in 4 bits between nodes, between one Hadamard transform and its inverse; and a weight as
the 4-bit difference from the copy that all ranks hold. Each function is what a rank does between
two messages.

Legend: N elements of a gradient or a weight, R payloads (a row for a rank that sends or receives),
P bytes of a payload, W two words of a key (counter.key_words).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.quantize import counter, reference
from pallas_kernels.quantize.reference import Bits

Array = jax.Array
BLOCK = 32  # neighbours that a Hadamard transform mixes (SDP4Bit section 3)


def hadamard_quantize(
    x_N: Array,
    key_W: Array | None,
    *,
    rows: int,
    nodes: int,
    bits: Bits,
    group: int,
    hadamard: bool,
) -> Array:
    """Returns payload_RP; chunk i * rows + j of x is the i-th part of row j."""
    exact_N = x_N.astype(jnp.float32)
    if hadamard:
        exact_N = reference.hadamard(exact_N, BLOCK)
    exact_RN = exact_N.reshape(nodes, rows, -1).transpose(1, 0, 2).reshape(rows, -1)
    noise_RN = None if key_W is None else counter.noise_of(key_W, exact_RN.shape)
    return reference.encode(exact_RN, bits, group, noise_RN)


def reduce_requantize(
    payload_RP: Array,
    key_W: Array | None,
    *,
    n: int,
    rows: int,
    bits: Bits,
    new_bits: Bits,
    group: int,
) -> Array:
    """Returns the payloads (rows, P) of equal pieces of the sum of R payloads."""
    sum_N = reduce(payload_RP, n, bits, group)
    noise_N = None if key_W is None else counter.noise_of(key_W, sum_N.shape)
    noise_RN = None if noise_N is None else noise_N.reshape(rows, -1)
    return reference.encode(sum_N.reshape(rows, -1), new_bits, group, noise_RN)


def reduce_hadamard(payload_RP: Array, *, n: int, bits: Bits, group: int, hadamard: bool) -> Array:
    """Returns the float32 sum_N of R payloads, transformed back."""
    sum_N = reduce(payload_RP, n, bits, group)
    return reference.hadamard(sum_N, BLOCK) if hadamard else sum_N


def reduce(payload_RP: Array, n: int, bits: Bits, group: int) -> Array:
    """Returns the float32 sum_N of the numbers in R payloads, added in their order."""
    total_N = reference.decode(payload_RP[0], n, bits, group)
    for r in range(1, payload_RP.shape[0]):
        total_N += reference.decode(payload_RP[r], n, bits, group)
    return total_N


def subtract_quantize(
    main_N: Array, copy_N: Array, key_W: Array | None, *, bits: Bits, group: int
) -> Array:
    """Returns payload_P of main - copy, the difference in float32."""
    noise_N = None if key_W is None else counter.noise_of(key_W, main_N.shape)
    return reference.encode(main_N - copy_N.astype(jnp.float32), bits, group, noise_N)


def dequantize_add(payload_RP: Array, copy_N: Array, *, bits: Bits, group: int) -> Array:
    """Returns copy_N plus the numbers in R payloads, one after the other, in copy's type."""
    n = copy_N.shape[0] // payload_RP.shape[0]
    change_N = reference.decode(payload_RP, n, bits, group).reshape(-1)
    return (copy_N.astype(jnp.float32) + change_N).astype(copy_N.dtype)
