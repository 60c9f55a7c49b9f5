"""What the experts' kernels share: how they run, and stores of rows that are one expert's.

Legend: as in tables.py; F columns.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tiles
from pallas_kernels.collective import core
from pallas_kernels.expert import rows
from pallas_kernels.expert.tables import ALIGN, GROUP, HI, LO, ROW
from pallas_kernels.gemm import hopper
from pallas_kernels.grouped import hopper as grouped

PIECE = 64  # rows of an epilogue's piece
Int = Any  # traced int32


@dataclasses.dataclass(frozen=True)
class Plan(core.Plan):
    """How an expert kernel runs; tile, comm as of any fused kernel.

    chunk: rows of a job. rotated: tiles are in the order of their farthest source. band: visits
    that are taken before the next tile of columns. width: tiles of columns of a block of columns,
    which leaves when all experts' tiles of it are there.
    """

    band: int = 8
    width: int = 4


def height(rows: int, tile: hopper.Tile) -> int:
    """Returns rows of an array that tiles of `rows` are read from."""
    return max(tile.block_m, -(-rows // ALIGN) * ALIGN)


def scratch(
    plan: Plan, dtype: Any, out_dtype: Any, turned: bool, width: int, piece_dtype: Any
) -> dict[str, Any]:
    """As core.scratch, but rows of the epilogue's pieces may be stored from any row on.

    width: of the rows, or parts of rows, that are sent, of piece_dtype.
    """
    found = core.scratch(dataclasses.replace(plan, comm=0), dtype, out_dtype, turned, 0, dtype)
    tile = plan.tile
    buffers = core.buffers(tile, dtype, out_dtype, turned)
    shape, kind = buffers["y_smem"]
    a_smem, b_smem, _ = found["smem"]
    transforms = plgpu.TilingTransform((1, shape[-1])), plgpu.SwizzleTransform(hopper.SWIZZLE)
    smem = a_smem, b_smem, plgpu.SMEM(shape, kind, transforms=transforms)
    if not plan.comm:
        return found | {"smem": smem}
    columns = rows.part(width, jnp.dtype(piece_dtype).itemsize)
    ring, barriers = rows.scratch(columns, piece_dtype, plan.chunk, tiles.shared_bytes(buffers))
    begun = (
        plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=1)
        if tile.cluster > 1
        else plgpu.Barrier(num_arrivals=1)
    )
    return found | {"smem": plgpu.RefUnion(smem, ring), "arrived": barriers, "begun": begun}


class Place(NamedTuple):
    """A tile: its visit, expert, the cluster's first row, rows of the expert, tile of columns."""

    visit: Int
    group: Int
    row: Int
    lo: Int
    hi: Int
    column: Int


def place(visits: Any, visit: Int, column: Int) -> Place:
    """Returns a tile of the table of visits."""
    group, row, lo, hi = (visits[visit, i] + 0 for i in (GROUP, ROW, LO, HI))
    return Place(visit, group, row, lo, hi, column)


def rows_of(place: Place, block: Int, tile: hopper.Tile, height: int) -> Any:
    """The rows that a block of the cluster reads.

    A second block may lie below all of them; what it reads it does not store.
    """
    row = place.row + block * tile.block_m
    return pl.ds(pl.multiple_of(jnp.where(row < height, row, 0), ALIGN), tile.block_m)


def when_live(place: Place, top: Int, tile: hopper.Tile, store: Callable[[], None]) -> None:
    """Stores what a warpgroup has, if any of its rows, the first of which is `top`, is the visit's.

    Else there would be groups of no copies, which the interpreter does not count.
    """
    pl.when((top < place.hi) & (top + tile.rows > place.lo))(store)


def store_rows(piece: Any, y: Any, row: Int, column: Int, lo: Int, hi: Int) -> None:
    """Starts copies of those of a piece's rows, the first of which is `row`, that are lo .. hi."""
    begin = jnp.clip(lo - row, 0, piece.shape[0])
    stop = jnp.clip(hi - row, begin, piece.shape[0])
    grouped.store_rows(piece, (), y, row, pl.ds(column, piece.shape[1]), begin, stop)


def clear(y_smem: Any, y: Any, end: Int, me: Int, everyone: int) -> None:
    """Warpgroup `me` of `everyone` stores its share of zeros from row `end` on."""
    warpgroup, (rows, across) = lax.axis_index("warpgroup"), y_smem.shape[2:]
    plgpu.wait_smem_to_gmem(0)
    y_smem[warpgroup, 0] = plgpu.layout_cast(
        jnp.zeros((rows, across), y_smem.dtype), plgpu.Layout.WGMMA
    )
    plgpu.commit_smem()
    columns = y.shape[1] // across

    @pl.loop(0, core.share(lax.div(y.shape[0] - end + rows - 1, jnp.int32(rows)) * columns, me,
                           everyone))  # fmt: skip
    def _(j):
        job = me + j * everyone
        row = end + lax.div(job, jnp.int32(columns)) * rows
        column = lax.rem(job, jnp.int32(columns)) * across
        store_rows(y_smem.at[warpgroup, 0], y, row, column, row, jnp.int32(y.shape[0]))

    plgpu.wait_smem_to_gmem(0)
