"""Hashes of arrays that do not depend on the order in which their elements are added up.

The hash of an array is sum(h(place, word)) modulo 2^32 over the words of its elements, twice with
different functions h. For a given place, h is a bijection of the word, so a change of one word
always changes the hash; any other change goes unseen with a probability of 2^-64. Checkpoints seal
arrays with it (checkpoint/sealing.py), and replicas compare their copies by it (parallel/zero.py).

Terms: a word is the bits of an element as uint32; an element of more than four bytes has several
words, along one more dimension. The place of a word is a uint32 number that stands for its indices
in the whole array: their sum, each index times the stride of its dimension, modulo 2^32. A stride
is an odd constant.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Odd numbers without a pattern, one a dimension. A place is a sum of multiples of them modulo 2^32:
# a shard needs only the indices at which it begins, and an array may have more than 2^32 elements.
STRIDES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5)
WORD_STRIDE = 0xB55A4F09
# Devices have no bitcast for parts of a byte; these widen without loss, so as such they count.
SMALL = {
    "int2": jnp.int32,
    "uint2": jnp.int32,
    "int4": jnp.int32,
    "uint4": jnp.int32,
    "float4_e2m1fn": jnp.float32,
}


def _scramble(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit depends on every bit (MurmurHash3's finaliser)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def words(x: jax.Array) -> jax.Array:
    """Returns the bits as uint32; elements of more than four bytes get a dimension of words."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.name in SMALL:
        return x.astype(SMALL[x.dtype.name]).view(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


def host_words(x: np.ndarray) -> np.ndarray:
    """Returns what `words` does, for types that devices may not have (float64 and the like)."""
    if x.dtype == np.bool_:
        return x.astype(np.uint32)
    if x.dtype.name in SMALL:
        return x.astype(SMALL[x.dtype.name]).view(np.uint32)
    x = np.ascontiguousarray(x).reshape(x.shape)  # the former makes a scalar a row
    if x.dtype.itemsize > 4:
        return x.reshape(*x.shape, 1).view(np.uint32)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]).astype(np.uint32)


def place_hashes(bits: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (h1, h2) of each word, uint32 in the shape of `bits`. place: of each word, uint32."""
    key = _scramble(place)
    one = _scramble(bits ^ key)
    two = _scramble(bits * jnp.uint32(0x2545F491) + (key ^ jnp.uint32(0x5BD1E995)))
    return one, two


@jax.jit
def sum_words(bits: jax.Array, start: jax.Array, rows: jax.Array | None = None) -> jax.Array:
    """Returns the two sums (2,) of a shard that begins at `start` (rank,) of the whole array.

    rows: uint32, the place of each of its rows in the model's order; None: they follow `start`.
    """
    place = jnp.zeros(bits.shape, jnp.uint32)
    for d in range(bits.ndim):
        inside = d < start.shape[0]  # else: the dimension of words
        stride = STRIDES[d % len(STRIDES)] if inside else WORD_STRIDE
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, d)
        along = along + start[d] if inside else along
        if d == 0 and rows is not None:
            along = jnp.broadcast_to(rows.reshape(-1, *[1] * (bits.ndim - 1)), bits.shape)
        place += along * jnp.uint32(stride)
    one, two = place_hashes(bits, place)
    zero = jnp.uint32(0)
    # One reduction of both: as two, XLA's CPU compiler hashes twice and does not vectorise (6
    # times slower, measured, 2-core CPU).
    sums = jax.lax.reduce(
        (one, two), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), range(bits.ndim)
    )
    return jnp.stack(sums)
