"""What one rank does in order, as tables: the tiles and copies that overlap_simulator.py times.

Flux (arXiv 2406.06858, sections 3 and 4), one matrix: the tiles and chunks that the fused kernels
compute from a loop index (pallas_kernels/hopper/schedule.py), all of them at once, and what
each flag waits for. COMET (arXiv 2502.19811, section 3), experts:

- First product: the rows of an expert are sorted by source, own rank first, then the rotation; a
  tile's stage is its last source, and tiles are taken stage by stage.
- Second product: all experts' tiles of one block of columns, then of the next, so that a block of
  columns can be added up and sent while the next is computed.

Legend: T tiles, C chunks, F flags, R ranks, E experts.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import numpy as np

from pallas_kernels.hopper import schedule
from pallas_kernels.hopper.schedule import Chunk, Split, Tile


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


def most_comm_blocks(tiles: int, blocks: int) -> int:
    """Returns c_max = B - ceil(T / ceil(T / B)): more blocks for communication add a wave of tiles.

    tiles: T. blocks: B, that run at once (the SMs, for one block an SM).
    """
    return blocks - _ceil(tiles, _ceil(tiles, blocks))


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
    tiles = schedule.gather_tile(order, rank, split, columns, band)
    copies = np.arange((split.ranks - 1) * split.chunks, dtype=np.int32)
    chunks = _live(schedule.gather_chunk(copies, rank, split))
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
    tiles = _live(schedule.scatter_tile(order, rank, split, columns, band))
    copies = np.arange((split.ranks - 1) * split.chunks, dtype=np.int32)
    chunks = _live(schedule.scatter_chunk(copies, rank, split, columns))
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


def _ceil(a: Any, b: int) -> Any:
    return -(-a // b)


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
    """Tiles over the rows of the experts, in the order in which they are taken; int32 (T,).

    group: the expert. row: first of its sorted rows. rows: of the tile. stage: how many sources
    after the own rank must have landed, 0: none.
    """

    group: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    stage: np.ndarray


def expert_tiles(counts_RE: np.ndarray, tile: int, *, by_stage: bool) -> ExpertTiles:
    """Returns the tiles over sorted rows of experts.

    counts_RE: int32, rows of each expert by distance of their source after the own rank (row 0 is
    the own rank's). by_stage: stage by stage, inside a stage expert by expert (first product);
    False: expert by expert (second product).
    """
    landed_RE = np.cumsum(counts_RE, axis=0)
    rows_E = landed_RE[-1]
    tiles_E = _ceil(rows_E, tile)
    group_T = np.repeat(np.arange(len(rows_E)), tiles_E)
    row_T = (np.arange(len(group_T)) - (np.cumsum(tiles_E) - tiles_E)[group_T]) * tile
    live_T = np.minimum(rows_E[group_T] - row_T, tile)
    # The last row's source: every source before it has landed no row at or past that row.
    stage_T = (landed_RE[:, group_T] < (row_T + live_T)[None]).sum(axis=0)
    found = ExpertTiles(group_T, row_T, live_T, stage_T)
    order_T = np.argsort(stage_T, stable=True) if by_stage else slice(None)
    return ExpertTiles(*(x[order_T].astype(np.int32) for x in found))


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
    rows = expert_tiles(counts, tile, by_stage=True)
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
    rows = expert_tiles(np.asarray(rows_E, np.int32)[None], tile, by_stage=False)
    count = len(rows.row)
    i = np.arange(count * columns, dtype=np.int32)
    column, row_tile = schedule.raster(i, columns, max(count, 1), width)
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


def _chunks(chunks: list[tuple[int, ...]]) -> Chunk:
    return Chunk(*np.array(chunks, np.int32).reshape(-1, 6).T)
