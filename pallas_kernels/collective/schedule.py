"""Who computes which tile when, and which rows travel when: schedules as data.

One persistent kernel does a whole product; its tiles wait for flags, or arrive at them, and a few
thread blocks move chunks of rows meanwhile (Flux, arXiv 2406.06858, sections 3 and 4; COMET, arXiv
2502.19811, section 3). Thread block j of n takes tiles j, j + n, ... of the order given here.

- Gather: a rank starts with its own rows, then takes those of rank r + 1, r + 2, ...; the chunks
  travel in that order, so what is needed first comes first.
- Scatter: a rank starts with the rows that r + 1 owns and ends with its own. At every step the
  ranks write to different owners, so that no owner's link is shared.
- Experts, first product: the rows of an expert are sorted by source, own rank first, then the
  rotation; a tile's stage is its last source, and tiles are taken stage by stage.
- Experts, second product: all experts' tiles of one block of columns, then of the next, so that a
  block of columns can be added up and sent while the next is computed.

A kernel computes its tile from a loop index by the functions below (`gather_tile`, `scatter_tile`,
`gather_chunk`, `scatter_chunk`, `raster`); they take Python ints, NumPy arrays and traced values
alike, and the tables are made by them. `expert_tiles` and `sort_rows` are given `xp=jnp` where the
sizes of the groups are traced. Who waits for what here is simulated in simulator.py.

Legend: T tiles, C chunks, F flags, R ranks, E experts, N rows (pairs of token and expert).
"""

import dataclasses
from typing import Any, Literal, NamedTuple

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
    """Where a tile lies, and its flags; members are ints or int32 arrays.

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


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What one rank does, in order.

    kind: 'gather': tiles wait for chunks; 'scatter': chunks wait for tiles. tiles: int32 (T,) each,
    live ones only. chunks: int32 (C,) each, live ones only. need_F: arrivals that fulfil a flag; 0
    where nobody waits. Flags count upwards from 0 and are never reset inside a call.
    """

    kind: Literal["gather", "scatter"]
    rank: int
    ranks: int
    tiles: Tile
    chunks: Chunk
    need_F: np.ndarray


# ---- arithmetic that ints, NumPy and traced values share


def _xp(value: Ints) -> Any:
    return jnp if isinstance(value, jax.Array) else np


def _ceil(a: Ints, b: Ints) -> Ints:
    return (a + b - 1) // b


def _clip(value: Ints, low: Ints, high: Ints) -> Ints:
    xp = _xp(value)
    return xp.minimum(xp.maximum(value, low), high)


def most_comm_blocks(tiles: int, blocks: int) -> int:
    """Returns c_max = B - ceil(T / ceil(T / B)): more blocks for communication add a wave of tiles.

    tiles: T. blocks: B, that run at once (the SMs, for one block an SM).
    """
    return blocks - _ceil(tiles, _ceil(tiles, blocks))


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
        peer, 0 * peer, row, rows, column,
        first + row // split.chunk, first + _ceil(row + rows, split.chunk),
    )  # fmt: skip


def gather_tile(i: Ints, rank: Ints, split: Split, columns: int, band: int = 1) -> Tile:
    """Returns the i-th tile of an all-gather + product on `rank`.

    i: 0 .. ranks * row_tiles * columns - 1. columns: tiles of columns. band: see `raster`; at most
    the row tiles of a chunk, or tiles wait for chunks that come later. Own rows need no wait.
    """
    tile = _tile(i, rank, split, columns, band)
    own = _xp(tile.peer).where(tile.peer == rank, tile.first_flag, tile.last_flag)
    return tile._replace(last_flag=own)


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


def all_gather_gemm(
    rank: int, split: Split, columns: int, band: int = 1, *, swizzle: bool = True
) -> Schedule:
    """Returns `rank`'s schedule of all_gather(x) @ w, x: (shard, k) a rank, w: (k, n_local).

    columns: tiles of columns of n_local. swizzle=False takes tiles from row 0 on whatever the rank
    (to see what the rotation is worth).
    """
    i = np.arange(split.ranks * split.row_tiles * columns, dtype=np.int32)
    rank = _rank(rank, split.ranks)
    order = i if swizzle else _unrotated(i, rank, split, columns)
    tiles = gather_tile(order, rank, split, columns, band)
    copies = np.arange((split.ranks - 1) * split.chunks, dtype=np.int32)
    chunks = _live(gather_chunk(copies, rank, split))
    return Schedule(
        "gather", rank, split.ranks, _live(tiles), chunks,
        np.bincount(chunks.flag, minlength=split.ranks * split.chunks).astype(np.int32),
    )  # fmt: skip


def gemm_reduce_scatter(
    rank: int, split: Split, columns: int, band: int = 1, *, swizzle: bool = True
) -> Schedule:
    """Returns `rank`'s schedule of reduce_scatter(x @ w), x: (m, k_local), w: (k_local, n).

    swizzle=False: tiles and copies go through the owners from rank 0 on, on every rank.
    """
    i = np.arange(split.ranks * split.row_tiles * columns, dtype=np.int32)
    rank = _rank(rank, split.ranks)
    order = i if swizzle else _unrotated(i, rank + 1, split, columns)
    tiles = _live(scatter_tile(order, rank, split, columns, band))
    copies = np.arange((split.ranks - 1) * split.chunks, dtype=np.int32)
    chunks = _live(scatter_chunk(copies, rank, split, columns))
    if not swizzle:
        chunks = Chunk(*(x[np.argsort(chunks.flag)] for x in chunks))
    need_F = np.zeros(split.ranks * split.chunks, np.int32)
    for f in range(int((tiles.last_flag - tiles.first_flag).max())):
        touched = tiles.first_flag + f < tiles.last_flag
        np.add.at(need_F, tiles.first_flag[touched] + f, 1)
    return Schedule("scatter", rank, split.ranks, tiles, chunks, need_F)


def _unrotated(i: np.ndarray, start: int, split: Split, columns: int) -> np.ndarray:
    """The steps of a rotation that starts at `start`, from rank 0 on."""
    per_rank = split.row_tiles * columns
    return ((i // per_rank - start) % split.ranks * per_rank + i % per_rank).astype(np.int32)


def _rank(rank: int, ranks: int) -> int:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be one of 0 .. {ranks - 1}")
    return rank


def _live(table: Any) -> Any:
    """A table without its rows that do nothing."""
    keep = table.rows > 0
    return type(table)(*(np.asarray(column)[keep].astype(np.int32) for column in table))


# ---- experts


class ExpertTiles(NamedTuple):
    """Tiles over the rows of the experts, in the order in which they are taken; int32 (capacity,).

    group: the expert. row: first of its sorted rows. start: first row of the expert among all its
    rank's sorted rows. rows: live rows; 0 in the dead tail. stage: how many sources after the own
    rank must have landed, 0: none; `ranks` in the dead tail.
    """

    group: Ints
    row: Ints
    start: Ints
    rows: Ints
    stage: Ints


def sort_rows(expert_N: Ints, source_N: Ints, rank: Ints, ranks: int, xp: Any = np) -> Ints:
    """Returns the stable order of rows by (expert, distance of the source after `rank`), (N,).

    expert_N, source_N: int32; rows that are not to be computed have an expert past the last.
    Source: Flux's repository, AgScatterSortOp; COMET section 3.1.
    """
    distance = (source_N - rank) % ranks
    return xp.argsort(expert_N * ranks + distance, stable=True).astype(xp.int32)


def tile_capacity(rows: int, experts: int, tile: int) -> int:
    """Returns tiles that are enough for `rows` rows whatever expert they go to."""
    return min(rows, rows // tile + experts) if rows else 0


def expert_tiles(
    counts_RE: Ints, tile: int, capacity: int, *, by_stage: bool = True, xp: Any = np
) -> ExpertTiles:
    """Returns the tiles over sorted rows of experts, `capacity` of them, dead ones last.

    counts_RE: int32, rows of each expert by distance of their source after the own rank (row 0 is
    the own rank's). by_stage: stage by stage, inside a stage expert by expert (first product);
    False: expert by expert (second product). capacity: from `tile_capacity`; with fewer tiles than
    rows need, rows are left out. xp: np, or jnp where the counts are traced.
    """
    ranks, experts = counts_RE.shape
    i_T = xp.arange(capacity, dtype=xp.int32)
    landed_RE = xp.cumsum(counts_RE, axis=0)
    rows_E = landed_RE[-1]
    ends_E = xp.cumsum(_ceil(rows_E, tile))
    group_T = xp.searchsorted(ends_E, i_T, side="right")
    dead_T = group_T >= experts
    group_T = xp.where(dead_T, experts - 1, group_T)
    row_T = (i_T - (ends_E - _ceil(rows_E, tile))[group_T]) * tile
    start_T = (xp.cumsum(rows_E) - rows_E)[group_T]
    live_T = xp.where(dead_T, 0, _clip(rows_E[group_T] - row_T, 0, tile))
    # The last row's source: every source before it has landed no row at or past that row.
    last_T = row_T + live_T - 1
    stage_T = (landed_RE[:, group_T] <= last_T[None]).sum(axis=0)
    stage_T = xp.where(dead_T, ranks, stage_T)
    found = ExpertTiles(group_T, xp.where(dead_T, 0, row_T), start_T, live_T, stage_T)
    order_T = xp.argsort(stage_T if by_stage else dead_T, stable=True)
    return ExpertTiles(*(x[order_T].astype(xp.int32) for x in found))


def dispatch_gemm(
    rank: int, counts_RE: np.ndarray, tile: int, columns: int, chunk: int
) -> Schedule:
    """Returns `rank`'s schedule of the experts' first product over rows that come from all ranks.

    counts_RE: rows of each of the rank's experts by source rank (not by distance). Flag d counts
    the chunks of up to `chunk` rows that came from rank (rank + d) % ranks: a source's rows travel
    together, whichever expert they go to. Tiles are in the order (stage, expert, row, column) and
    wait for the flags 1 .. stage.
    """
    ranks, experts = counts_RE.shape
    source_R = (np.arange(ranks) + _rank(rank, ranks)) % ranks
    counts = np.asarray(counts_RE, np.int32)[source_R]
    rows = _row_tiles(counts, tile, by_stage=True)
    i = np.arange(len(rows.row) * columns, dtype=np.int32)
    row_tile, column = i // columns, i % columns
    one = np.ones_like(i)
    tiles = Tile(
        rank * one, rows.group[row_tile], rows.row[row_tile], rows.rows[row_tile], column,
        one, 1 + rows.stage[row_tile],
    )  # fmt: skip
    chunks, need_F = [], np.zeros(ranks, np.int32)
    for distance, sent in enumerate(counts.sum(axis=1)[1:], 1):
        for row in range(0, int(sent), chunk):
            moved = min(chunk, int(sent) - row)
            chunks.append((source_R[distance], row, moved, 0, 0, distance))
            need_F[distance] += 1
    return Schedule("gather", rank, ranks, tiles, _chunks(chunks), need_F)


def gemm_combine(
    rank: int,
    rows_E: np.ndarray,
    tokens_R: np.ndarray,
    tile: int,
    columns: int,
    *,
    width: int,
    chunk: int,
) -> Schedule:
    """Returns `rank`'s schedule of the experts' second product with its sum over top-k and ranks.

    rows_E: rows of each of the rank's experts. tokens_R: tokens of each owner that have rows here.
    columns: tiles of columns of the result, of which `width` make a block; flag b counts the tiles
    of block b. Tiles are in the order (block, expert, row, column); copies in the order (block,
    owner, row), each of the sums of up to `chunk` tokens. Own tokens, last, are added up here but
    use no link.
    """  # fmt: skip
    ranks = len(tokens_R)
    owner_R = (np.arange(ranks) + 1 + _rank(rank, ranks)) % ranks
    rows = _row_tiles(np.asarray(rows_E, np.int32)[None], tile, by_stage=False)
    count = len(rows.row)
    i = np.arange(count * columns, dtype=np.int32)
    column, row_tile = raster(i, columns, max(count, 1), width)
    block = column // width
    tiles = Tile(
        rank + 0 * i, rows.group[row_tile], rows.row[row_tile], rows.rows[row_tile], column,
        block, block + 1,
    )  # fmt: skip
    chunks, need_F = [], np.zeros(_ceil(columns, width), np.int32)
    for b in range(len(need_F)):
        wide = min(width, columns - b * width)
        need_F[b] = count * wide
        for owner in owner_R:
            for row in range(0, int(tokens_R[owner]), chunk):
                moved = min(chunk, int(tokens_R[owner]) - row)
                chunks.append((owner, row, moved, b * width, wide, b))
    return Schedule("scatter", rank, ranks, tiles, _chunks(chunks), need_F)


def _row_tiles(counts_RE: np.ndarray, tile: int, by_stage: bool) -> ExpertTiles:
    capacity = tile_capacity(int(counts_RE.sum()), counts_RE.shape[1], tile)
    found = expert_tiles(counts_RE, tile, capacity, by_stage=by_stage)
    return ExpertTiles(*(x[found.rows > 0] for x in found))


def _chunks(chunks: list[tuple[int, ...]]) -> Chunk:
    return Chunk(*np.array(chunks, np.int32).reshape(-1, 6).T)
