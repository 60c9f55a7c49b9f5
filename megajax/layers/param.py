"""Birth of a parameter: shape, logical words, initial values, already where it will live.

`axes` is our own metadata (flax reads only `out_sharding`), so a module builds with or without a
mesh. Random numbers are partitionable threefry: a leaf has the same values on every mesh, and each
device makes only its own piece.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.layout import Layout, Words


def broadcast(vector: nnx.Param | jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """Returns a bias or scale in `dtype` with leading dims of size 1, ready to meet x."""
    value = vector[...].astype(dtype)
    return jnp.expand_dims(value, tuple(range(x.ndim - value.ndim)))


def normal(
    rngs: nnx.Rngs, layout: Layout | None, shape: tuple[int, ...], axes: Words, std: float
) -> nnx.Param:
    """Returns a float32 parameter drawn from N(0, std^2)."""
    spec = layout.stored(*axes) if layout else None
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, out_sharding=spec), axes=axes)


def constant(layout: Layout | None, shape: tuple[int, ...], axes: Words, value: float) -> nnx.Param:
    """Returns a float32 parameter that starts at one value (norm scales, biases)."""
    spec = layout.stored(*axes) if layout else None
    return nnx.Param(jnp.full(shape, value, jnp.float32, out_sharding=spec), axes=axes)
