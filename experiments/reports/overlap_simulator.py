"""What hiding communication is worth: schedules on a simulated GPU, and what they stand beside.

SIMULATED times only; nothing here was measured. One rank of many equal ones: its thread blocks take
tiles in turn and wait for flags, a few blocks move chunks over a link that they share, flags are
seen a latency later. The same schedules drive the fused kernels (overlap_schedules.py). Beside
them: the product and its collective one after the other, and XLA's rings, step by step.

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
import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from experiments.reports import overlap_schedules as schedules
from experiments.reports.overlap_schedules import Schedule
from pallas_kernels.collective.cases import Product
from pallas_kernels.hopper.schedule import Split

TILES = ((128, 256), (256, 128), (128, 192), (128, 128))  # rows x columns
CHUNKS = (32, 64, 128, 256, 512)  # rows under one flag


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU and its link.

    sms: multiprocessors, a thread block on each. flops: that a product sustains, FLOP/s.
    link_bytes_per_s: into one GPU, usable; as much out of it. memory_bytes_per_s: HBM. block_
    bytes_per_s: that one thread block copies. latency_s: from a copy's last byte until its flag is
    seen. launch_s: between two kernels of a ring. call_s: of one collective of XLA's. switched: all
    peers behind one switch, so that both directions of a ring share the link.
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
        """No overlap is faster."""
        return max(self.gemm_s, self.comm_s)

    @property
    def efficiency(self) -> float | None:
        """The overlap efficiency of the fused kernel."""
        return efficiency(self.fused_s, self.gemm_s, self.serial_s)


# ---- the events of one rank


def run_tiles(tile_s: float, ready_T: np.ndarray, blocks: int) -> np.ndarray:
    """Returns when each tile ends (T,): block j takes tiles j, j + blocks, ... and waits for each.

    tile_s: duration of a tile. ready_T: when what a tile waits for is there.
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
    """  # fmt: skip
    most = machine.block_bytes_per_s if blocks else math.inf
    blocks = blocks or 1
    queues = [iter(range(j, len(bytes_C), blocks)) for j in range(blocks)]
    # Copies on the link all move at one rate, so their order is that of what they end at: the bytes
    # that each running copy will have moved since time 0, `moved` now.
    starts: list[tuple[float, int, int]] = []
    linked: list[tuple[float, int, int]] = []
    unlinked: list[tuple[float, int, int]] = []
    end_C, now, moved = np.zeros(len(bytes_C)), 0.0, 0.0

    def follow(block: int) -> None:
        copy = next(queues[block], None)
        if copy is not None:
            heapq.heappush(starts, (max(now, float(ready_C[copy])), copy, block))

    for block in range(blocks):
        follow(block)
    while starts or linked or unlinked:
        rate = min(most, machine.link_bytes_per_s / max(len(linked), 1))
        link_s = now + max(linked[0][0] - moved, 0.0) / rate if linked else math.inf
        at = min(link_s, *(queue[0][0] for queue in (starts, unlinked) if queue), math.inf)
        moved, now = moved + rate * (at - now), at
        if starts and starts[0][0] == at:
            _, copy, block = heapq.heappop(starts)
            nbytes = float(bytes_C[copy])
            if linked_C[copy]:
                heapq.heappush(linked, (moved + nbytes, copy, block))
            else:
                heapq.heappush(unlinked, (now + nbytes / most, copy, block))
            continue
        _, copy, block = heapq.heappop(linked if link_s == at else unlinked)
        end_C[copy] = now
        follow(block)
    return end_C


@dataclasses.dataclass(frozen=True)
class Run:
    """When each tile ended (T,) and each copy's data was seen (C,), in seconds."""

    tile_end_T: np.ndarray
    copy_end_C: np.ndarray

    @property
    def end_s(self) -> float:
        """The last event."""
        return float(max(self.tile_end_T.max(initial=0), self.copy_end_C.max(initial=0)))


def run(
    schedule: Schedule, tile_s: float, bytes_C: np.ndarray, comm_blocks: int, machine: Machine
) -> Run:
    """Returns the events of one rank.

    tile_s: duration of a tile. bytes_C: of each chunk. comm_blocks: SMs that copy; the others take
    tiles. 0: a copy engine beside all SMs.
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
    make = schedules.all_gather_gemm if product.kind == "gather" else schedules.gemm_reduce_scatter
    schedule = make(rank, split, columns, swizzle=how.swizzle)
    if product.kind == "scatter" and not how.swizzle:
        shared = machine.link_bytes_per_s / max(product.ranks - 1, 1)
        machine = dataclasses.replace(machine, link_bytes_per_s=shared)
    duration = tile_s(how.tile, product.k, machine)
    found = run(
        schedule, duration, schedule.chunks.rows * product.row_bytes, how.comm_blocks, machine
    )
    return found.end_s + (reduce_s(product, machine) if product.kind == "scatter" else 0.0)


def candidates(product: Product, comm_blocks: Iterable[int], swizzle: bool = True) -> list[Fused]:
    """Returns ways to fuse: every tile that a shard fills, a whole shard or parts of it a flag."""
    shard = product.shard
    chunks = {shard} | {c for c in CHUNKS if c < shard}
    return [
        Fused(tile, chunk, blocks, swizzle)
        for tile, chunk, blocks in itertools.product(TILES, sorted(chunks), comm_blocks)
        if chunk <= shard and (tile[0] == 128 or tile[0] <= shard)
    ]


def best_fused(product: Product, machine: Machine, ways: Sequence[Fused]) -> tuple[float, Fused]:
    """Returns (seconds, how) of the fastest of `ways`; of equal ones the first."""
    return min(((fused_s(product, machine, way), way) for way in ways), key=lambda t: t[0])


def simulate(product: Product, machine: Machine, ways: Sequence[Fused]) -> tuple[Times, Fused]:
    """Returns the times of a product, and how the fastest of `ways` works."""
    best, how = best_fused(product, machine, ways)
    gemm = gemm_s(product.m, product.n, product.k, machine)
    return Times(gemm, comm_s(product, machine), serial_s(product, machine), best), how
