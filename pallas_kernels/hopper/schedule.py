"""Schedules as data: the order of a rank's tiles, and the order in which rows travel.

One persistent kernel does a whole product; its tiles wait for flags, or arrive at them, and a few
thread blocks move chunks of rows meanwhile (Flux, arXiv 2406.06858, sections 3 and 4). Thread
block j of n takes tiles j, j + n, ... of the order given here.

- Gather: a rank starts with its own rows, then takes those of rank r + 1, r + 2, ...; the chunks
  travel in that order, so what is needed first comes first.
- Scatter: a rank starts with the rows that r + 1 owns and ends with its own. At every step the
  ranks write to different owners, so that no owner's link is shared.

A kernel computes its tile from a loop index by the functions below (`gather_tile`, `scatter_tile`,
`gather_chunk`, `scatter_chunk`, `raster`); they take Python ints, NumPy arrays and traced values
alike. experiments/reports/overlap_simulator.py makes tables of
them and simulates which rank waits for which.

Legend: T tiles, C chunks, F flags, R ranks.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Ints = Any  # an int, or an array of int32: NumPy's, jax's or traced


@dataclasses.dataclass(frozen=True)
class Split:
    """Rows spread over ranks, cut in tiles and in chunks.

    m: rows of all ranks. Rank p has rows p * shard ... of them, the last ranks fewer or none where
    `ranks` does not divide m. tile: rows of a tile of the product; tiles never cross ranks, so the
    last one of a rank may be ragged. chunk: rows that travel under one flag, at most a shard.
    Raises: ValueError unless all are at least 1.
    """

    m: int
    ranks: int
    tile: int
    chunk: int

    def __post_init__(self):
        """Refuses what has no tiles."""
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")

    @property
    def shard(self) -> int:
        """Rows of a full rank."""
        return _ceil(self.m, self.ranks)

    @property
    def row_tiles(self) -> int:
        """Tiles over the rows of a full rank."""
        return _ceil(self.shard, self.tile)

    @property
    def chunks(self) -> int:
        """Chunks, and flags, of a full rank."""
        return _ceil(self.shard, self.chunk)

    def live(self, peer: Ints) -> Ints:
        """Rows that `peer` has, 0 .. shard."""
        return _clip(self.m - peer * self.shard, 0, self.shard)


class Tile(NamedTuple):
    """The place of a tile, and its flags; members are ints or int32 arrays.

    peer: the rank whose rows these are: the source of a gather, the owner of a scatter. group: the
    expert, 0 without experts. row: first row, in the peer's shard, or of an expert's sorted rows.
    rows: live rows; 0: nothing to compute, skip it. column: index of the tile of columns. It waits
    for the flags first_flag <= f < last_flag (gather), or arrives at each of them when it is stored
    (scatter).
    """

    peer: Ints
    group: Ints
    row: Ints
    rows: Ints
    column: Ints
    first_flag: Ints
    last_flag: Ints


class Chunk(NamedTuple):
    """What one copy moves, and its flag; members are ints or int32 arrays.

    peer: the rank it comes from (gather) or goes to (scatter). row, rows: in that rank's shard;
    0 rows: nothing to move. column, columns: tiles of columns. Its copy arrives at `flag` when the
    data is there (gather), or waits for it before it starts (scatter).
    """

    peer: Ints
    row: Ints
    rows: Ints
    column: Ints
    columns: Ints
    flag: Ints


# ---- arithmetic that ints, NumPy and traced values share


def _xp(value: Ints) -> Any:
    return jnp if isinstance(value, jax.Array) else np


def _ceil(a: Ints, b: Ints) -> Ints:
    return (a + b - 1) // b


def _clip(value: Ints, low: Ints, high: Ints) -> Ints:
    xp = _xp(value)
    return xp.minimum(xp.maximum(value, low), high)


def raster(i: Ints, rows: Ints, columns: Ints, band: int = 1) -> tuple[Ints, Ints]:
    """Returns (row, column) of step i of an order over rows x columns tiles.

    Bands of `band` rows one after the other; inside a band column by column, so that the tiles that
    run together share operands in L2. band=1: row by row. i: 0 .. rows * columns - 1.
    """
    first = i // (band * columns) * band
    height = _clip(rows - first, 1, band)
    inside = i - first * columns
    return first + inside % height, inside // height


# ---- one matrix: gather and scatter


def _tile(i: Ints, start: Ints, split: Split, columns: int, band: int) -> Tile:
    per_rank = split.row_tiles * columns
    peer = (start + i // per_rank) % split.ranks
    row_tile, column = raster(i % per_rank, split.row_tiles, columns, band)
    row = row_tile * split.tile
    rows = _clip(split.live(peer) - row, 0, split.tile)
    first = peer * split.chunks
    return Tile(
        peer,
        0 * peer,
        row,
        rows,
        column,
        first + row // split.chunk,
        first + _ceil(row + rows, split.chunk),
    )


def gather_tile(i: Ints, rank: Ints, split: Split, columns: int, band: int = 1) -> Tile:
    """Returns the i-th tile of an all-gather + product on `rank`.

    i: 0 .. ranks * row_tiles * columns - 1. columns: tiles of columns. band: see `raster`; at most
    the row tiles of a chunk, or tiles wait for chunks that come later. Own rows need no wait.
    """
    tile = _tile(i, rank, split, columns, band)
    last = _xp(tile.peer).where(tile.peer == rank, tile.first_flag, tile.last_flag)
    return tile._replace(last_flag=last)


def scatter_tile(i: Ints, rank: Ints, split: Split, columns: int, band: int = 1) -> Tile:
    """Returns the i-th tile of a product + reduce-scatter on `rank`; as `gather_tile`.

    A tile of own rows arrives at its flags as well: the owner adds up when all ranks' parts came.
    """
    return _tile(i, rank + 1, split, columns, band)


def _chunk(i: Ints, rank: Ints, split: Split, columns: int) -> Chunk:
    peer = (rank + 1 + i // split.chunks) % split.ranks
    index = i % split.chunks
    row = index * split.chunk
    rows = _clip(split.live(peer) - row, 0, split.chunk)
    return Chunk(peer, row, rows, 0 * peer, columns + 0 * peer, peer * split.chunks + index)


def gather_chunk(i: Ints, rank: Ints, split: Split) -> Chunk:
    """Returns the i-th copy into `rank`, i: 0 .. (ranks - 1) * chunks - 1; whole rows of x."""
    return _chunk(i, rank, split, 0)


def scatter_chunk(i: Ints, rank: Ints, split: Split, columns: int) -> Chunk:
    """Returns the i-th copy out of `rank`, i: 0 .. (ranks - 1) * chunks - 1.

    It waits for `chunk_tiles` arrivals at its flag. At the owner, rank r's chunk f arrives at flag
    r * chunks + f % chunks, so that an owner sees each source apart.
    """
    return _chunk(i, rank, split, columns)


def chunk_tiles(chunk: Chunk, split: Split, columns: int) -> Ints:
    """Returns how many tiles hold rows of a scatter's chunk: the arrivals that it waits for."""
    return columns * (_ceil(chunk.row + chunk.rows, split.tile) - chunk.row // split.tile)
