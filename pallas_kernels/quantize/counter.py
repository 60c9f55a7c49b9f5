"""Random bits that are a function of a key and of an element's index, cheap enough for a kernel.

Stochastic rounding inside a kernel needs the bits where the numbers are, in registers, and the
same bits from plain JAX. Both call `words`: Threefry-2x32 with 13 rounds, the fewest that pass all
tests of BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, table 2);
jax.random runs 20. One call gives four neighbours 16 bits each, 12 instructions an element.

Legend: N elements, x any dimensions, W two words.
Not here: the key of a step, a rank and a level, which the caller derives with jax.random.fold_in.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
ROUNDS = 13
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)  # of Threefry-2x32, round by round
PARITY = 0x1BD11BDA  # of the third word of its key
CALL = 4  # elements that share a call
MOST = 2**32  # elements that an index can name


def key_words(key: Array) -> Array:
    """Returns the uint32 key_W of a jax.random key of any implementation."""
    return jax.random.bits(key, (2,), jnp.uint32)


def words(key_0: Array, key_1: Array, counter: Array) -> tuple[Array, Array]:
    """Returns two random words for each counter. All are uint32, or all int32 of the same bits."""
    parity = np.uint32(PARITY).astype(counter.dtype)
    keys = (key_0, key_1, key_0 ^ key_1 ^ parity)
    one, other = counter + key_0, jnp.zeros_like(counter) + key_1
    for i in range(ROUNDS):
        one = one + other
        bits = ROTATIONS[i % 8]
        high = lax.shift_left(other, jnp.full_like(other, bits))
        other = (high | lax.shift_right_logical(other, jnp.full_like(other, 32 - bits))) ^ one
        if i % 4 == 3:
            n = i // 4 + 1
            one = one + keys[n % 3]
            other = other + (keys[(n + 1) % 3] + np.asarray(n, counter.dtype))
    return one, other


def uniform(word: Array, half: int) -> Array:
    """Returns float32 odd multiples of 2^-17 in (0, 1) of the low (0) or high (1) half of words.

    The centres of 2^16 equal parts: their mean is 1/2, so rounding with them has no drift. Written
    into the mantissa of a number in [1, 2), which costs less than a conversion.
    """
    if half:
        word = lax.shift_right_logical(word, jnp.full_like(word, 16))
    else:
        word = word & np.asarray(0xFFFF, word.dtype)
    raised = lax.shift_left(word, jnp.full_like(word, 7)) | np.asarray(0x3F800040, word.dtype)
    return lax.bitcast_convert_type(raised, jnp.float32) - 1.0


def noise(key: Array, shape: tuple[int, ...]) -> Array:
    """Returns the u of stochastic rounding of each element of an array, by its row-major index.

    Raises: ValueError for more than 2^32 elements.
    """
    return noise_of(key_words(key), shape)


def noise_of(key_W: Array, shape: tuple[int, ...]) -> Array:
    """Returns what `noise` does, given the words of a key."""
    n = math.prod(shape)
    if n > MOST:
        raise ValueError(f"noise: {shape} has {n} elements, an index names {MOST} at most")
    counter_C = lax.iota(jnp.uint32, -(-n // CALL))
    pair = words(key_W[0], key_W[1], counter_C)
    u_C4 = jnp.stack([uniform(word, half) for word in pair for half in (0, 1)], -1)
    return u_C4.reshape(-1)[:n].reshape(shape)
