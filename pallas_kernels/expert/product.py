"""Fusions, shared memory and stores of one expert's rows, for both expert kernels.

Legend: as in tables.py; F columns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.expert import rows
from pallas_kernels.expert.tables import ALIGN, GROUP, HI, LO, ROW
from pallas_kernels.hopper import epilogue, fused, tiles
from pallas_kernels.hopper.memory import Int, by_row, number
from pallas_kernels.hopper.tiles import Tile


@dataclasses.dataclass(frozen=True)
class ExpertFusion(fused.Fusion):
    """How an expert kernel runs; tile, comm as of any fused kernel.

    chunk: rows of a job. rotated: tiles are in the order of their farthest source. band: visits
    that are taken before the next tile of columns. width: tiles of columns of a block of columns,
    which leaves when all experts' tiles of it are there.
    """

    band: int = 8
    width: int = 4


def height(rows: int, tile: Tile) -> int:
    """Returns rows of an array that tiles of `rows` are read from."""
    return max(tile.block_m, -(-rows // ALIGN) * ALIGN)


def scratch(
    op: str, fusion: fused.Fusion, shared: tiles.Buffers, width: int, piece_dtype: Any
) -> dict[str, Any]:
    """Returns fused.scratch for pieces of the epilogue that may be stored from any row on.

    width: columns of the rows, or parts of rows, that are sent, in piece_dtype.
    """
    columns = rows.part(width, jnp.dtype(piece_dtype).itemsize)
    ring = functools.partial(rows.scratch, columns, piece_dtype, fusion.chunk)
    memory = fused.scratch(op, fusion, shared, ring, by_row)
    if not fusion.comm:
        return memory
    begun = (
        plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=1)
        if fusion.tile.cluster > 1
        else plgpu.Barrier(num_arrivals=1)
    )
    return memory | {"begun": begun}


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
    group, row, lo, hi = (number(visits, visit, i) for i in (GROUP, ROW, LO, HI))
    return Place(visit, group, row, lo, hi, column)


def rows_of(place: Place, block: Int, tile: Tile, height: int) -> Any:
    """The rows that a block of the cluster reads.

    A second block may lie below all of them; what it reads it does not store.
    """
    row = place.row + block * tile.block_m
    return pl.ds(pl.multiple_of(jnp.where(row < height, row, 0), ALIGN), tile.block_m)


def when_live(place: Place, top: Int, tile: Tile, store: Callable[[], None]) -> None:
    """Runs a store if any of the rows of a warpgroup, the first of which is `top`, is of the visit.

    Else there would be groups of no copies, which the interpreter does not count.
    """
    pl.when((top < place.hi) & (top + tile.rows > place.lo))(store)


def store_rows(piece: Any, y: Any, row: Int, column: Int, lo: Int, hi: Int) -> None:
    """Starts copies of those of a piece's rows, the first of which is `row`, that are lo .. hi."""
    epilogue.store_rows(piece, y, row, pl.ds(column, piece.shape[1]), lo, hi)
