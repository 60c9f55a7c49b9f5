"""What hiding communication is worth: schedules on a simulated GPU, and what they stand beside.

SIMULATED times only; nothing here was measured. One rank of many equal ones: its thread blocks take
tiles in turn and wait for flags, a few blocks move chunks over a link that they share, flags are
seen a latency later. Copies are timed by the simulator of schedules (megajax/schedule). The same
schedules drive the fused kernels (first section). Beside them: the product and its collective one
after the other, and XLA's rings, step by step.

Measures (Flux, arXiv 2406.06858, equations 1 and 2): the effective communication time of a way to
do it is ECT = T - T_gemm, with the best product that is not split, on all SMs, in both terms; its
overlap efficiency is E = 1 - ECT / ECT(one after the other): 1 hides all, 0 gains nothing, below 0
is slower; there is none where the baseline has nothing to hide.

Not modelled: clocks that throttle, L2, contention in the switch, the ramp of a tile's pipeline (so
small tiles look as good as large ones), barriers around a kernel, SMs that a collective of XLA
takes. Peers are in step, so what a rank receives mirrors what it sends.

Legend: T tiles, C chunks, F flags, R ranks, E experts.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from megajax.schedule import simulator
from megajax.schedule.ir import Task
from pallas_kernels.collective.cases import Product
from pallas_kernels.expert.cases import Mixture
from pallas_kernels.hopper import schedule
from pallas_kernels.hopper.schedule import Chunk, Split, Tile

# ---- schedules
#
# What one rank does in order, as tables: the tiles and copies that the simulated GPU times.
#
# Flux (arXiv 2406.06858, sections 3 and 4), one matrix: the tiles and chunks that the fused kernels
# compute from a loop index (pallas_kernels/hopper/schedule.py), all of them at once, and what each
# flag waits for. COMET (arXiv 2502.19811, section 3), experts:
#
# - First product: the rows of an expert are sorted by source, own rank first, then the rotation; a
#   tile's stage is its last source, and tiles are taken stage by stage.
# - Second product: all experts' tiles of one block of columns, then of the next, so that a block of
#   columns can be added up and sent while the next is computed.
#
# Legend: T tiles, C chunks, F flags, R ranks, E experts.


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
        "gather",
        rank,
        split.ranks,
        _live(tiles),
        chunks,
        np.bincount(chunks.flag, minlength=split.ranks * split.chunks).astype(np.int32),
    )


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
    """Returns the steps of a rotation that starts at `start`, from rank 0 on."""
    per_rank = split.row_tiles * columns
    return ((i // per_rank - start) % split.ranks * per_rank + i % per_rank).astype(np.int32)


def _ceil(a: Any, b: int) -> Any:
    return -(-a // b)


def _rank(rank: int, ranks: int) -> int:
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} must be one of 0 .. {ranks - 1}")
    return rank


def _live(table: Any) -> Any:
    """Returns a table without its rows that do nothing."""
    keep = table.rows > 0
    return type(table)(*(np.asarray(column)[keep].astype(np.int32) for column in table))


# ---- experts


class ExpertTiles(NamedTuple):
    """Tiles over the rows of the experts, in the order in which they are taken; int32 (T,).

    group: the expert. row: the tile's first row among the sorted rows of the expert. rows: number
    of rows of the tile. stage: number of other ranks whose rows must have arrived; 0: none.
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
    tiles = ExpertTiles(group_T, row_T, live_T, stage_T)
    order_T = np.argsort(stage_T, stable=True) if by_stage else slice(None)
    return ExpertTiles(*(x[order_T].astype(np.int32) for x in tiles))


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
        rank * one,
        rows.group[row_tile],
        rows.row[row_tile],
        rows.rows[row_tile],
        column,
        one,
        1 + rows.stage[row_tile],
    )
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
    """
    ranks = len(tokens_R)
    owner_R = (np.arange(ranks) + 1 + _rank(rank, ranks)) % ranks
    rows = expert_tiles(np.asarray(rows_E, np.int32)[None], tile, by_stage=False)
    count = len(rows.row)
    i = np.arange(count * columns, dtype=np.int32)
    column, row_tile = schedule.raster(i, columns, max(count, 1), width)
    block = column // width
    tiles = Tile(
        rank + 0 * i,
        rows.group[row_tile],
        rows.row[row_tile],
        rows.rows[row_tile],
        column,
        block,
        block + 1,
    )
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


# ---- the simulated GPU


TILES = ((128, 256), (256, 128), (128, 192), (128, 128))  # rows x columns
CHUNKS = (32, 64, 128, 256, 512)  # rows under one flag
TIE = 1e-9  # (chosen) a relative difference of times that is none: many ways are equally fast


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU and its link.

    sms: number of multiprocessors, with one thread block each. flops: rate that a product sustains,
    FLOP/s. link_bytes_per_s: usable rate of the link into one GPU, and also out of it.
    memory_bytes_per_s: rate of HBM. block_bytes_per_s: rate at which one thread block copies.
    latency_s: time from the last byte of a copy until its flag is seen. launch_s: time between two
    kernels of a ring. call_s: time that XLA takes to start one collective. switched: all peers are
    behind one switch, so that both directions of a ring share the link.
    """

    name: str
    sms: int
    flops: float
    link_bytes_per_s: float
    memory_bytes_per_s: float
    block_bytes_per_s: float = math.inf
    latency_s: float = 2e-6
    launch_s: float = 6e-6
    call_s: float = 10e-6
    switched: bool = True


# (estimates) 660 TFLOP/s and 400 GB/s: two thirds of an H100's dense bf16 peak, and 0.89 of its
# NVLink; 3 TB/s: 0.9 of its HBM. A block copies what it keeps in flight, 200 KiB of shared memory,
# each round trip of about 2 us (Little's law). H800: an H100 with NVLink cut to 200 GB/s.
H100 = Machine("H100", 132, 660e12, 400e9, 3e12, block_bytes_per_s=100e9)
H800 = dataclasses.replace(H100, name="H800", link_bytes_per_s=178e9)
MACHINES = {machine.name: machine for machine in (H100, H800)}


# ---- measures


def effective_comm_s(overall_s: float, gemm_s: float) -> float:
    """Returns ECT = T - T_gemm (Flux, equation 1)."""
    return overall_s - gemm_s


def efficiency(overall_s: float, gemm_s: float, serial_s: float) -> float | None:
    """Returns E = 1 - ECT / ECT(serial) (Flux, equation 2); None where the baseline hides nothing.

    gemm_s: the best product that is not split, on all SMs; the same for both.
    """
    baseline = effective_comm_s(serial_s, gemm_s)
    return 1 - effective_comm_s(overall_s, gemm_s) / baseline if baseline > 0 else None


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of one product with its collective, simulated.

    gemm_s: the best product alone, all SMs. comm_s: the collective alone. serial_s: one after the
    other. fused_s: one kernel.
    """

    gemm_s: float
    comm_s: float
    serial_s: float
    fused_s: float

    @property
    def floor_s(self) -> float:
        """Seconds that no overlap can be faster than."""
        return max(self.gemm_s, self.comm_s)

    @property
    def efficiency(self) -> float | None:
        """The overlap efficiency of the fused kernel."""
        return efficiency(self.fused_s, self.gemm_s, self.serial_s)


# ---- the events of one rank


def run_tiles(tile_s: float, ready_T: np.ndarray, blocks: int) -> np.ndarray:
    """Returns when each tile ends (T,): block j takes tiles j, j + blocks, ... and waits for each.

    tile_s: duration of a tile. ready_T: time at which a tile can start.
    """
    end_T = np.zeros(len(ready_T))
    free = np.zeros(blocks)
    for i in range(0, len(ready_T), blocks):
        ready = ready_T[i : i + blocks]
        free[: len(ready)] = np.maximum(free[: len(ready)], ready) + tile_s
        end_T[i : i + blocks] = free[: len(ready)]
    return end_T


def run_copies(
    bytes_C: np.ndarray,
    ready_C: np.ndarray,
    linked_C: np.ndarray,
    blocks: int,
    machine: Machine,
) -> np.ndarray:
    """Returns when each copy's last byte has gone (C,): block j takes copies j, j + blocks, ...

    ready_C: when a copy may start; linked_C: False uses no link. Copies that run share the link
    evenly, each at most at its block's rate; 0 blocks: a copy engine, one copy at a time at the
    link's rate.
    """
    most = machine.block_bytes_per_s if blocks else math.inf
    link = machine.link_bytes_per_s
    alone = min(most, link)
    tasks = [
        Task(
            name=str(copy),
            resource=f"block {copy % (blocks or 1)}",
            deps=(),
            duration=nbytes / (alone if linked else most),
            kind="COMM" if linked else "COPY",
            release=ready,
        )
        for copy, (nbytes, ready, linked) in enumerate(
            zip(bytes_C.tolist(), ready_C.tolist(), linked_C.tolist(), strict=True)
        )
    ]

    def slowdown(task: Task, others: Sequence[Task]) -> float:
        if task.kind != "COMM":
            return 1.0
        sharers = 1 + sum(other.kind == "COMM" for other in others)
        return alone / min(most, link / sharers)

    timeline = simulator.run(tasks, (), slowdown)
    return np.array([span.end for span in timeline.spans])


@dataclasses.dataclass(frozen=True)
class Run:
    """When each tile ended (T,) and each copy's data was seen (C,), in seconds."""

    tile_end_T: np.ndarray
    copy_end_C: np.ndarray

    @property
    def end_s(self) -> float:
        """Time of the last event."""
        return float(max(self.tile_end_T.max(initial=0), self.copy_end_C.max(initial=0)))


def run(
    schedule: Schedule, tile_s: float, bytes_C: np.ndarray, comm_blocks: int, machine: Machine
) -> Run:
    """Returns the events of one rank.

    tile_s: duration of a tile. bytes_C: size of each chunk. comm_blocks: number of SMs that copy;
    the others compute tiles. 0: a copy engine copies, and all SMs compute.
    Raises: ValueError where no SM is left for tiles.
    """
    blocks = machine.sms - comm_blocks
    if blocks < 1:
        raise ValueError(f"comm_blocks={comm_blocks} must be at most {machine.sms - 1}")
    tiles, chunks = schedule.tiles, schedule.chunks
    linked_C = chunks.peer != schedule.rank
    flag_F = np.zeros(len(schedule.need_F))
    spans = int((tiles.last_flag - tiles.first_flag).max(initial=0))
    spanned = [(tiles.first_flag + f, tiles.first_flag + f < tiles.last_flag) for f in range(spans)]
    ready_T, ready_C = np.zeros(len(tiles.row)), np.zeros(len(chunks.row))
    if schedule.kind == "gather":
        end_C = run_copies(bytes_C, ready_C, linked_C, comm_blocks, machine) + machine.latency_s
        np.maximum.at(flag_F, chunks.flag, end_C)
        for flag_T, in_T in spanned:
            ready_T[in_T] = np.maximum(ready_T[in_T], flag_F[flag_T[in_T]])
        return Run(run_tiles(tile_s, ready_T, blocks), end_C)
    end_T = run_tiles(tile_s, ready_T, blocks)
    for flag_T, in_T in spanned:
        np.maximum.at(flag_F, flag_T[in_T], end_T[in_T])
    ready_C = flag_F[chunks.flag]
    end_C = run_copies(bytes_C, ready_C, linked_C, comm_blocks, machine)
    return Run(end_T, end_C + machine.latency_s * linked_C)


# ---- one matrix


@dataclasses.dataclass(frozen=True)
class Fused:
    """How a fused kernel works.

    tile: rows and columns. chunk: rows under one flag. comm_blocks: SMs that copy, 0: a copy
    engine. swizzle: tiles go by the rotation of the ranks. width: tiles of a block of columns, in
    the experts' second product only.
    """

    tile: tuple[int, int]
    chunk: int
    comm_blocks: int
    swizzle: bool = True
    width: int = 1


def tile_s(tile: tuple[int, int], k: int, machine: Machine) -> float:
    """Returns seconds of one tile on one SM."""
    return 2 * tile[0] * tile[1] * k / (machine.flops / machine.sms)


def gemm_s(m: int, n: int, k: int, machine: Machine) -> float:
    """Returns seconds of the product alone with the best of TILES, in full waves."""
    return min(
        math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / machine.sms)
        * tile_s((rows, columns), k, machine)
        for rows, columns in TILES
    )


def comm_s(product: Product, machine: Machine) -> float:
    """Returns seconds of the collective alone: (R - 1) / R of the rows through the link."""
    sent = product.m * (product.ranks - 1) / product.ranks * product.row_bytes
    return sent / machine.link_bytes_per_s + machine.call_s


def serial_s(product: Product, machine: Machine) -> float:
    """Returns seconds of the product and its collective one after the other."""
    return gemm_s(product.m, product.n, product.k, machine) + comm_s(product, machine)


def ring_s(product: Product, machine: Machine, both_ways: bool = False) -> float:
    """Returns seconds of XLA's ring in lockstep: a shard's product beside a shard's hop, R times.

    both_ways: half of each shard goes round either way. Behind a switch both halves share a GPU's
    link and nothing is gained; on a ring of wires a hop takes half as long. A scatter adds the
    partial sum that came to its own, in a pass of its own.
    """
    hop = product.shard * product.row_bytes / machine.link_bytes_per_s
    if both_ways and not machine.switched:
        hop /= 2
    part = gemm_s(product.shard, product.n, product.k, machine)
    add = 0.0
    if product.kind == "scatter":
        add = 3 * product.shard * product.row_bytes / machine.memory_bytes_per_s
    return (product.ranks - 1) * (max(hop, part) + machine.launch_s + add) + part


def reduce_s(product: Product, machine: Machine) -> float:
    """Returns seconds of the owner's last pass of a scatter: R partial sums read, one written."""
    nbytes = product.shard * product.row_bytes
    return (product.ranks + 1) * nbytes / machine.memory_bytes_per_s


def fused_s(product: Product, machine: Machine, how: Fused) -> float:
    """Returns seconds of one fused kernel, a scatter's last pass included.

    Without the swizzle every rank writes to the same owner at once, whose link they share; a gather
    without it still copies in the order of the rotation. Rank 3 stands for all: without a swizzle
    its place matters.
    """
    split = Split(product.m, product.ranks, how.tile[0], min(how.chunk, product.shard))
    columns, rank = math.ceil(product.n / how.tile[1]), min(3, product.ranks - 1)
    make = all_gather_gemm if product.kind == "gather" else gemm_reduce_scatter
    schedule = make(rank, split, columns, swizzle=how.swizzle)
    if product.kind == "scatter" and not how.swizzle:
        shared = machine.link_bytes_per_s / max(product.ranks - 1, 1)
        machine = dataclasses.replace(machine, link_bytes_per_s=shared)
    duration = tile_s(how.tile, product.k, machine)
    result = run(
        schedule, duration, schedule.chunks.rows * product.row_bytes, how.comm_blocks, machine
    )
    return result.end_s + (reduce_s(product, machine) if product.kind == "scatter" else 0.0)


def candidates(product: Product, comm_blocks: Iterable[int], swizzle: bool = True) -> list[Fused]:
    """Returns ways to fuse: every tile that a shard fills, a whole shard or parts of it a flag."""
    shard = product.shard
    chunks = {shard} | {c for c in CHUNKS if c < shard}
    return [
        Fused(tile, chunk, blocks, swizzle)
        for tile, chunk, blocks in itertools.product(TILES, sorted(chunks), comm_blocks)
        if chunk <= shard and (tile[0] == 128 or tile[0] <= shard)
    ]


def fastest(ways: Sequence[Fused], seconds: Callable[[Fused], float]) -> tuple[float, Fused]:
    """Returns (seconds, how) of the fastest of `ways`; of those within `TIE` of it the first."""
    times = [seconds(how) for how in ways]
    limit = min(times) * (1 + TIE)
    return next(t for t in zip(times, ways, strict=True) if t[0] <= limit)


def best_fused(product: Product, machine: Machine, ways: Sequence[Fused]) -> tuple[float, Fused]:
    """Returns (seconds, how) of the fastest of `ways` for a product."""
    return fastest(ways, lambda how: fused_s(product, machine, how))


def simulate(product: Product, machine: Machine, ways: Sequence[Fused]) -> tuple[Times, Fused]:
    """Returns the times of a product, and how the fastest of `ways` works."""
    best, how = best_fused(product, machine, ways)
    gemm = gemm_s(product.m, product.n, product.k, machine)
    return Times(gemm, comm_s(product, machine), serial_s(product, machine), best), how


# ---- products of experts
#
# Both products of a mixture of experts with their communication, on the simulated GPU.
#
# SIMULATED times only, from the events of the simulated GPU. First product (dispatch): tokens
# come from all ranks to the experts, rows sorted by source, tiles stage by stage. Second product
# (combine): a block of columns of all experts at a time; a few blocks add up each token's answers
# (top-k) and send the sums to the token's owner (COMET, arXiv 2502.19811, section 3). The rank with
# the most work decides, as the next collective waits for it.
#
# Beside each stands what runs one thing after the other: the grouped product, and everything else
# (the pass over memory that adds up, the collective, the owner's last sum).
#
# Not modelled: sorting, the activation between the products, what the simulated GPU leaves out.
# A token with several experts on a rank travels once, in both directions.
#
# Legend: E experts of one rank, R ranks.


WIDTHS = (1, 2, 4)  # of a block of columns, in tiles
CHUNK = {"dispatch": 128, "combine": 512}  # rows, tokens of one copy
Part = Literal["dispatch", "combine"]


@dataclasses.dataclass(frozen=True)
class Load:
    """What the routing gives one rank.

    counts_RE: rows of each of its experts by source rank. tokens_R: tokens of each source that have
    a row here.
    """

    rank: int
    counts_RE: np.ndarray
    tokens_R: np.ndarray

    @property
    def remote_tokens(self) -> int:
        """Tokens that cross the link."""
        return int(self.tokens_R.sum() - self.tokens_R[self.rank])


@dataclasses.dataclass(frozen=True)
class ExpertProduct:
    """The first product (tokens, width) x (width, n) or the second (rows, k) x (k, width).

    width: width of a token. hidden: columns of the first product or depth of the second on one
    rank; with a gated activation the first has the columns of both matrices. wire_bytes: size of an
    element that crosses ranks: 2 for tokens of 16 bits, 4 for partial sums in float32.
    """

    part: Part
    width: int
    hidden: int
    wire_bytes: int

    @property
    def n(self) -> int:
        """Columns of the result."""
        return self.hidden if self.part == "dispatch" else self.width

    @property
    def k(self) -> int:
        """Depth."""
        return self.width if self.part == "dispatch" else self.hidden


def product_of(mixture: Mixture, part: Part, tensor: int, sum_bytes: int = 4) -> ExpertProduct:
    """Returns a rank's product where `tensor` ranks share each expert.

    sum_bytes: size of a partial sum that crosses ranks.
    """
    if part == "dispatch":
        hidden = mixture.inputs * mixture.hidden // tensor
        return ExpertProduct(part, mixture.width, hidden, 2)
    return ExpertProduct(part, mixture.width, mixture.hidden // tensor, sum_bytes)


def expert_gemm_s(product: ExpertProduct, load: Load, machine: Machine) -> float:
    """Returns seconds of the grouped product alone with the best of TILES, in full waves."""
    rows_E = load.counts_RE.sum(axis=0)
    return min(
        math.ceil(int((-(-rows_E // rows)).sum()) * math.ceil(product.n / columns) / machine.sms)
        * tile_s((rows, columns), product.k, machine)
        for rows, columns in TILES
    )


def expert_comm_s(product: ExpertProduct, load: Load, machine: Machine) -> float:
    """Returns seconds of everything beside the product when nothing is hidden."""
    token = product.width * product.wire_bytes
    seconds = machine.call_s + load.remote_tokens * token / machine.link_bytes_per_s
    if product.part == "dispatch":
        return seconds
    # Top-k answers of 16 bits are read, their sum is written; then the owners add up.
    read = int(load.counts_RE.sum()) * product.width * 2 + int(load.tokens_R.sum()) * token
    return seconds + read / machine.memory_bytes_per_s + owner_s(product, load, machine)


def owner_s(product: ExpertProduct, load: Load, machine: Machine) -> float:
    """Returns the seconds of the last pass of a combine, which adds up the rows of all ranks.

    A rank is taken to receive as many sums as it sends.
    """
    return (
        int(load.tokens_R.sum()) * product.width * product.wire_bytes / (machine.memory_bytes_per_s)
    )


def expert_fused_s(product: ExpertProduct, load: Load, machine: Machine, how: Fused) -> float:
    """Returns seconds of one fused kernel, a combine's last pass included. how.chunk: rows."""
    rows, columns = how.tile
    duration = tile_s(how.tile, product.k, machine)
    across = math.ceil(product.n / columns)
    if product.part == "dispatch":
        schedule = dispatch_gemm(load.rank, load.counts_RE, rows, across, how.chunk)
        sent_R = load.counts_RE.sum(axis=1)
        token_R = product.width * product.wire_bytes * load.tokens_R / np.maximum(sent_R, 1)
        bytes_C = schedule.chunks.rows * token_R[schedule.chunks.peer]
        return run(schedule, duration, bytes_C, how.comm_blocks, machine).end_s
    rows_E = load.counts_RE.sum(axis=0)
    schedule = gemm_combine(
        load.rank, rows_E, load.tokens_R, rows, across, width=how.width, chunk=how.chunk
    )
    chunks = schedule.chunks
    wide_C = np.minimum(chunks.columns * columns, product.n - chunks.column * columns)
    # A block that reads several answers of a token for each sum is slower by what it reads.
    answers = float(rows_E.sum()) / max(float(load.tokens_R.sum()), 1.0)
    slower = max(1.0, 2 * answers / product.wire_bytes)
    adding = dataclasses.replace(machine, block_bytes_per_s=machine.block_bytes_per_s / slower)
    bytes_C = chunks.rows * wide_C * product.wire_bytes
    result = run(schedule, duration, bytes_C, how.comm_blocks, adding)
    return result.end_s + owner_s(product, load, machine)


def expert_candidates(product: ExpertProduct, comm_blocks: Sequence[int]) -> list[Fused]:
    """Returns ways to fuse; the second product also by the width of its blocks of columns."""
    widths = WIDTHS if product.part == "combine" else (1,)
    chunk = CHUNK[product.part]
    return [
        Fused(tile, chunk, blocks, width=width)
        for tile, blocks, width in itertools.product(TILES, comm_blocks, widths)
        if width * tile[1] <= max(product.n, tile[1])
    ]


def expert_simulate(
    product: ExpertProduct, loads: Sequence[Load], machine: Machine, ways: Sequence[Fused]
) -> tuple[Times, Fused]:
    """Returns the times of the slowest rank, and how the best of `ways` works.

    loads: those of the ranks that may be the slowest. How to fuse is chosen for the rank with the
    most rows.
    Raises: ValueError without a load or a way.
    """
    if not loads or not ways:
        raise ValueError("simulate needs at least one load and one way to fuse")
    busiest = max(loads, key=lambda load: int(load.counts_RE.sum()))
    _, how = fastest(ways, lambda how: expert_fused_s(product, busiest, machine, how))
    gemm = max(expert_gemm_s(product, load, machine) for load in loads)
    comm = max(expert_comm_s(product, load, machine) for load in loads)
    fused = max(expert_fused_s(product, load, machine, how) for load in loads)
    return Times(gemm, comm, gemm + comm, fused), how
