"""Dropout whose mask lies like the array it drops from, equal on every mesh."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp


def drop(x: jax.Array, rate: float, key: jax.Array) -> jax.Array:
    """Returns x with each element zeroed with probability `rate`, the rest scaled by 1/(1-rate)."""
    sharding = jax.typeof(x).sharding
    spec = None if sharding.mesh.empty else sharding.spec
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape, out_sharding=spec)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def dropper(key: jax.Array | None, rate: float, place: int) -> Callable | None:
    """Returns the dropout of one place in a block, x -> x, or None without a key."""
    if key is None:
        return None
    return functools.partial(drop, rate=rate, key=jax.random.fold_in(key, place))
