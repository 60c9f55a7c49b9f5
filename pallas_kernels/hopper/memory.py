"""Shared memory and arrays in the layouts that TMA and wgmma need, and indices of tiles."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

SWIZZLE = 128  # bytes of a row of a buffer's tiling, at most
PIECE = 8  # rows of it: what TMA reads starts at a multiple
Int = Any  # traced int32
Shape = tuple[int, ...]


def swizzled(shape: Shape, dtype: Any, most: int = SWIZZLE) -> Any:
    """Returns shared memory that wgmma reads and TMA writes.

    most: bytes of the swizzle, which is the widest that the rows allow.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = min(most, plgpu.find_swizzle(shape[-1] * itemsize * 8))
    tiling = plgpu.TilingTransform((PIECE, swizzle // itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def by_row(shape: Shape, dtype: Any) -> Any:
    """Returns shared memory whose rows may be stored from any row on, each of SWIZZLE bytes.

    A tiling of 8 rows could not be cut there.
    """
    tiling = plgpu.TilingTransform((1, shape[-1]))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(SWIZZLE)))


def up(size: int, multiple: int) -> int:
    """Returns the next multiple."""
    return pl.cdiv(size, multiple) * multiple


def pad(x: jax.Array, shape: Shape) -> jax.Array:
    """Returns x with zeros at the ends; there is no copy where nothing is missing."""
    return jnp.pad(x, [(0, padded - size) for padded, size in zip(shape, x.shape, strict=True)])


def varying_as(like: jax.Array, outputs: Any) -> Any:
    """Returns a kernel's outputs as varying over the mesh axes of a shard_map that `like` does.

    The outputs themselves say over none.
    """
    axes = tuple(jax.typeof(like).mat.varying)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(x).mat.varying)
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, outputs)


def number(table: Any, *index: Int) -> Int:
    """Returns one entry of a table in memory.

    Inside a shard_map what is read varies over mesh axes and what is computed of it does not: the
    sum makes loop bounds and counters alike.
    """
    return table[index] + 0


def span(step: Int, size: int) -> Any:
    """Returns the indices of a tile: size * step and what follows."""
    return pl.ds(pl.multiple_of(step * size, size), size)


def share(total: Int, first: Int, stride: int) -> Int:
    """Returns how many of first, first + stride, ... are below total."""
    return jnp.maximum(lax.div(total - first + stride - 1, jnp.int32(stride)), 0)
