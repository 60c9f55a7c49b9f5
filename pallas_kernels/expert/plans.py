"""How an expert kernel runs where nothing was measured: tile, communication blocks, widths.

The tile is the grouped product's, by waves; the number of communication blocks, and of tiles in a
block of columns, is the best of collective/expert_simulator.py, for an even routing: SIMULATED,
until a table of measurements says otherwise (COMET, arXiv 2502.19811, section 3.2 compiles kernels
with several numbers ahead of time, and picks by profiles).

Legend: S choices of a rank's tokens, E experts of a rank, K contracted.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pallas_kernels.collective import expert_simulator
from pallas_kernels.collective.expert_simulator import ExpertProduct, Load
from pallas_kernels.collective.plans import fitted
from pallas_kernels.collective.simulator import H100, Fused
from pallas_kernels.expert.product import Plan
from pallas_kernels.grouped import hopper as grouped
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.tiles import BLOCKS, Tile

DISPATCH, COMBINE = "dispatch_grouped_matmul", "grouped_matmul_combine"
# (chosen: a copy of a row's part has 4 KiB or more, whose own cost the simulator does not know)
COMM, WIDTHS = (2, 4, 8, 16, 32), (4, 8)
CHUNK = (
    64  # rows of a job (chosen: a tile of 128 waits for two or three, a block sends one in 5 us)
)


def load(row: dict[str, Any]) -> Plan:
    """The inverse of dataclasses.asdict."""
    return Plan(**row | {"tile": Tile(**row["tile"])})


def candidates(op: str, choices: int, widths: Sequence[int], out_dtype: Any) -> Iterator[Tile]:
    """Tiles that are legal for these sizes, each with the most stages that fit."""
    for block_m, block_n in BLOCKS:
        if block_n > min(widths) or (op == COMBINE and block_n % 128):
            continue
        for cluster in (2, 1):
            if block_m * (cluster - 1) >= choices:
                continue
            yield fitted(Tile(block_m, block_n, 64, 6, block_m // 64, cluster), out_dtype)


def heuristic(
    op: str,
    ranks: int,
    choices: int,
    experts: int,
    K: int,
    widths: Sequence[int],
    out_dtype: Any,
    blocks: int = SMS,
) -> Plan:
    """Returns the plan where nothing was measured.

    op: DISPATCH or COMBINE. choices: S, of one rank. experts: E. widths: columns of each weight.
    out_dtype: of the result (dispatch), or of the answers that cross ranks.
    """

    def seconds(tile: Tile) -> float:
        # As many rows come as go, in groups of one size.
        count = sum(grouped.visited(tile, choices, width, experts) for width in widths)
        return grouped.seconds_of(tile, count, K)

    tile = min(candidates(op, choices, widths, out_dtype), key=seconds)
    comm, width = simulated(op, ranks, choices, experts, K, sum(widths), tile)
    comm = min(comm, (blocks // tile.cluster - 1) * tile.cluster)
    chunk = min(CHUNK, -(-choices // 8) * 8)
    return Plan(tile, comm, chunk, width=width)


@functools.cache
def simulated(
    op: str, ranks: int, choices: int, experts: int, K: int, width: int, tile: Tile
) -> tuple[int, int]:
    """Returns (communication blocks, tiles in a block of columns), the simulator's best."""
    each = max(1, choices // (ranks * experts))
    counts_RE = np.full((ranks, experts), each, np.int32)
    load = Load(0, counts_RE, counts_RE.sum(1))
    if op == DISPATCH:
        product = ExpertProduct("dispatch", K, width, 2)
    else:
        product = ExpertProduct("combine", width, K, 4)
    ways = (
        Fused((tile.block_m, tile.block_n), CHUNK, comm, width=wide)
        for comm in COMM
        for wide in (WIDTHS if op == COMBINE else WIDTHS[:1])
    )
    best = min(ways, key=lambda way: expert_simulator.fused_s(product, load, H100, way))
    return best.comm_blocks, best.width


def key(op: str, ranks: int, choices: int, experts: int, K: int, N: int) -> dict[str, int]:
    """Of a row of a table; N: columns of all weights."""
    return {"ranks": ranks, "choices": choices, "experts": experts, "K": K, "N": N}
