"""How sums leave a warpgroup: from registers through shared memory, by TMA, in small pieces.

A piece has 64 rows and 128 bytes of columns. While TMA reads one buffer of it, the next piece is
computed and written to another. That buffer may still be read by a copy that was started before:
`Staging.put` is the one place of all kernels that writes such a buffer, and waits first.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.cards import ROWS
from pallas_kernels.hopper.memory import SWIZZLE, Int, Shape, share

SLOTS = 2  # buffers of a piece, at most
WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Staging:
    """A warpgroup's buffers between registers and memory.

    buffers: one for each result, (warpgroups, slots, rows, columns). warpgroup: its number.
    """

    buffers: tuple[Any, ...]
    warpgroup: Int

    def put(self, p: int, values: tuple[Any, ...], copy: Callable[..., None]) -> None:
        """Writes piece p of a tile to shared memory, and starts its copies.

        p: the pieces of a tile count from 0; only the last ones may be left out. values: one for
        each result. copy(a buffer of each): starts one group of copies, of any number.
        """
        slots = self.buffers[0].shape[1]
        slot = p % slots
        # A buffer that TMA may still read is not written: what was put there `slots` pieces ago
        # has left it, or, as a tile may have had fewer pieces, all of the tile before.
        plgpu.wait_smem_to_gmem(slots - 1 if p else 0, wait_read_only=True)
        for buffer, value in zip(self.buffers, values, strict=True):
            buffer[self.warpgroup, slot] = value.astype(buffer.dtype)
        plgpu.commit_smem()
        copy(*(buffer.at[self.warpgroup, slot] for buffer in self.buffers))

    def pieces(self, shape: tuple[int, int]) -> list[tuple[int, int, slice, slice]]:
        """Returns (first row, first column, rows, columns) of the pieces of (rows, columns)."""
        height, width = self.buffers[0].shape[2:]
        corners = [(m, n) for m in range(0, shape[0], height) for n in range(0, shape[1], width)]
        return [(m, n, slice(m, m + height), slice(n, n + width)) for m, n in corners]

    def clear(self, y: Any, end: Int, me: Int, everyone: int) -> None:
        """Warpgroup `me` of `everyone` stores its share of zeros to y from row `end` on."""
        rows, across = self.buffers[0].shape[2:]
        zeros = plgpu.layout_cast(jnp.zeros((rows, across), self.buffers[0].dtype), WGMMA)
        columns = y.shape[1] // across
        jobs = lax.div(y.shape[0] - end + rows - 1, jnp.int32(rows)) * columns

        def store(piece: Any) -> None:
            @pl.loop(0, share(jobs, me, everyone))
            def _(j):
                job = me + j * everyone
                row = end + lax.div(job, jnp.int32(columns)) * rows
                span = pl.ds(lax.rem(job, jnp.int32(columns)) * across, across)
                store_rows(piece, y, row, span, row, jnp.int32(y.shape[0]))

        self.put(0, (zeros,), store)
        plgpu.wait_smem_to_gmem(0)


def staging_shape(
    warpgroups: int, sums: tuple[int, int], out_dtype: Any, count: int = 1
) -> tuple[Shape, Any]:
    """Returns (shape, type) of a result's staging buffers: no more of them than pieces.

    sums: rows and columns of a warpgroup's sums, of which it has `count`.
    """
    dtype = jnp.dtype(out_dtype)
    columns = min(SWIZZLE // dtype.itemsize, sums[1])
    pieces = count * math.prod(sums) // (ROWS * columns)
    return (warpgroups, min(SLOTS, pieces), ROWS, columns), dtype


def store_rows(piece: Any, y: Any, row: Int, columns: Any, lo: Int, hi: Int) -> None:
    """Starts copies of those rows of a piece, the first of which is `row` of y, that are lo .. hi.

    A copy's size is static: the number of rows is put together from powers of two. All are one
    group, which should not be empty: the interpreter does not count such.
    """
    rows = piece.shape[0]
    begin = jnp.clip(lo - row, 0, rows)
    stop = jnp.clip(hi - row, begin, rows)
    size = 1 << (min(rows, y.shape[0]).bit_length() - 1)
    while size:
        some = (stop - begin) & size

        @pl.when(some != 0)
        def _(begin=begin, size=size):
            target = y.at[pl.ds(row + begin, size), columns]
            plgpu.copy_smem_to_gmem(piece.at[pl.ds(begin, size)], target, commit_group=False)

        begin, size = begin + some, size // 2
    plgpu.commit_smem_to_gmem_group()


def add_bias(z: Any, bias: Any, columns: Any) -> Any:
    """Returns z + bias[columns], the same in each row; bias is in memory."""
    part = plgpu.load(bias.at[columns], layout=WGMMA.reduce(0), optimized=False)
    return z + lax.broadcast_in_dim(part, z.shape, [1])
