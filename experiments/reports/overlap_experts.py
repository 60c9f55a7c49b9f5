"""Both products of a mixture of experts with their communication, on the simulated GPU.

SIMULATED times only, from the events of overlap_simulator.py. First product (dispatch): tokens come
from all ranks to the experts, rows sorted by source, tiles stage by stage. Second product
(combine): a block of columns of all experts at a time; a few blocks add up each token's answers
(top-k) and send the sums to the token's owner (COMET, arXiv 2502.19811, section 3). The rank with
the most work decides, as the next collective waits for it.

Beside each stands what runs one thing after the other: the grouped product, and everything else
(the pass over memory that adds up, the collective, the owner's last sum).

Not modelled: sorting, the activation between the products, what overlap_simulator.py leaves out. A
token with several experts on a rank travels once, in both directions.

Legend: E experts of one rank, R ranks.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from experiments.reports import overlap_schedules as schedules
from experiments.reports.overlap_simulator import TILES, Fused, Machine, Times, run, tile_s
from pallas_kernels.expert.cases import Mixture

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

    width: of a token. hidden: columns of the first product or depth of the second on one rank; for
    a gated activation the first has both matrices' columns. wire_bytes: of an element that crosses
    ranks: 2 for tokens of 16 bits, 4 for partial sums in float32.
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

    sum_bytes: of a partial sum that crosses ranks.
    """
    if part == "dispatch":
        hidden = mixture.inputs * mixture.hidden // tensor
        return ExpertProduct(part, mixture.width, hidden, 2)
    return ExpertProduct(part, mixture.width, mixture.hidden // tensor, sum_bytes)


def gemm_s(product: ExpertProduct, load: Load, machine: Machine) -> float:
    """Returns seconds of the grouped product alone with the best of TILES, in full waves."""
    rows_E = load.counts_RE.sum(axis=0)
    return min(
        math.ceil(int((-(-rows_E // rows)).sum()) * math.ceil(product.n / columns) / machine.sms)
        * tile_s((rows, columns), product.k, machine)
        for rows, columns in TILES
    )


def comm_s(product: ExpertProduct, load: Load, machine: Machine) -> float:
    """Returns seconds of everything beside the product when nothing is hidden."""
    token = product.width * product.wire_bytes
    seconds = machine.call_s + load.remote_tokens * token / machine.link_bytes_per_s
    if product.part == "dispatch":
        return seconds
    # Top-k answers of 16 bits are read, their sum is written; then the owners add up.
    read = int(load.counts_RE.sum()) * product.width * 2 + int(load.tokens_R.sum()) * token
    return seconds + read / machine.memory_bytes_per_s + owner_s(product, load, machine)


def owner_s(product: ExpertProduct, load: Load, machine: Machine) -> float:
    """Returns seconds of a combine's last pass: what came from all ranks is added up.

    A rank is taken to receive as many sums as it sends.
    """
    return (
        int(load.tokens_R.sum()) * product.width * product.wire_bytes / (machine.memory_bytes_per_s)
    )


def fused_s(product: ExpertProduct, load: Load, machine: Machine, how: Fused) -> float:
    """Returns seconds of one fused kernel, a combine's last pass included. how.chunk: rows."""
    rows, columns = how.tile
    duration = tile_s(how.tile, product.k, machine)
    across = math.ceil(product.n / columns)
    if product.part == "dispatch":
        schedule = schedules.dispatch_gemm(load.rank, load.counts_RE, rows, across, how.chunk)
        sent_R = load.counts_RE.sum(axis=1)
        token_R = product.width * product.wire_bytes * load.tokens_R / np.maximum(sent_R, 1)
        bytes_C = schedule.chunks.rows * token_R[schedule.chunks.peer]
        return run(schedule, duration, bytes_C, how.comm_blocks, machine).end_s
    rows_E = load.counts_RE.sum(axis=0)
    schedule = schedules.gemm_combine(
        load.rank, rows_E, load.tokens_R, rows, across, width=how.width, chunk=how.chunk
    )
    chunks = schedule.chunks
    wide_C = np.minimum(chunks.columns * columns, product.n - chunks.column * columns)
    # A block that reads several answers of a token for each sum is slower by what it reads.
    answers = float(rows_E.sum()) / max(float(load.tokens_R.sum()), 1.0)
    slower = max(1.0, 2 * answers / product.wire_bytes)
    adding = dataclasses.replace(machine, block_bytes_per_s=machine.block_bytes_per_s / slower)
    bytes_C = chunks.rows * wide_C * product.wire_bytes
    found = run(schedule, duration, bytes_C, how.comm_blocks, adding)
    return found.end_s + owner_s(product, load, machine)


def candidates(product: ExpertProduct, comm_blocks: Sequence[int]) -> list[Fused]:
    """Returns ways to fuse; the second product also by the width of its blocks of columns."""
    widths = WIDTHS if product.part == "combine" else (1,)
    chunk = CHUNK[product.part]
    return [
        Fused(tile, chunk, blocks, width=width)
        for tile, blocks, width in itertools.product(TILES, comm_blocks, widths)
        if width * tile[1] <= max(product.n, tile[1])
    ]


def simulate(
    product: ExpertProduct, loads: Sequence[Load], machine: Machine, ways: Sequence[Fused]
) -> tuple[Times, Fused]:
    """Returns the times of the slowest rank, and how the best of `ways` works.

    loads: of the ranks that may be the slowest. The way is chosen on the rank with the most rows.
    Raises: ValueError without a load or a way.
    """
    if not loads or not ways:
        raise ValueError("simulate needs at least one load and one way to fuse")
    busiest = max(loads, key=lambda load: int(load.counts_RE.sum()))
    how = min(ways, key=lambda way: fused_s(product, busiest, machine, way))
    gemm = max(gemm_s(product, load, machine) for load in loads)
    comm = max(comm_s(product, load, machine) for load in loads)
    fused = max(fused_s(product, load, machine, how) for load in loads)
    return Times(gemm, comm, gemm + comm, fused), how
