"""The tile, communication blocks and widths of an expert kernel if nothing was measured.

The tile is the grouped product's, by waves; the number of communication blocks, and of tiles in a
block of columns, is the best by closed forms for an even routing: an ESTIMATE until a table of
measurements says otherwise (COMET, arXiv 2502.19811, section 3.2 compiles kernels with several
numbers ahead of time, and picks by profiles). Where all is simulated event by event
(experiments/reports/overlap_simulator.py), what they pick is at most 6 % slower than the best.

Legend: S choices of a rank's tokens, E experts of a rank, K contracted.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from pallas_kernels.expert.product import ExpertFusion
from pallas_kernels.hopper import fused, visits
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.fused import BLOCK_BYTES, LINK_BYTES
from pallas_kernels.hopper.tiles import Tile

DISPATCH, COMBINE = "dispatch_grouped_matmul", "grouped_matmul_combine"
# (chosen: a copy of a row's part has 4 KiB or more, whose own cost is not estimated)
COMM, WIDTHS = (2, 4, 8, 16, 32), (4, 8)
# Rows of a job (chosen: a tile of 128 waits for two or three, a block sends one in 5 us).
CHUNK = 64


def load(row: dict[str, Any]) -> ExpertFusion:
    """Returns the fusion of a table's row, which dataclasses.asdict made."""
    return ExpertFusion(**row | {"tile": Tile(**row["tile"])})


def candidates(op: str, choices: int, widths: Sequence[int], out_dtype: Any) -> Iterator[Tile]:
    """Tiles that are legal for these sizes, each with the most stages that fit."""
    return fused.candidates(choices, widths, out_dtype, 128 if op == COMBINE else 64)


def heuristic(
    op: str,
    ranks: int,
    choices: int,
    experts: int,
    K: int,
    widths: Sequence[int],
    out_dtype: Any,
    blocks: int = SMS,
) -> ExpertFusion:
    """Returns the fusion where nothing was measured.

    op: DISPATCH or COMBINE. choices: S, of one rank. experts: E. widths: columns of each weight.
    out_dtype: the type of the result (dispatch), or of the answers that cross ranks.
    """

    def seconds(tile: Tile) -> float:
        # As many rows come as go, in groups of one size.
        count = sum(visits.visited(tile, choices, width, experts) for width in widths)
        return visits.seconds(tile, count, K)

    tile = min(candidates(op, choices, widths, out_dtype), key=seconds)
    sizes = ranks, max(1, choices // (ranks * experts)), experts, K, sum(widths), tile
    if op == DISPATCH:
        ways = [(dispatch_seconds(comm, *sizes), comm, WIDTHS[0]) for comm in COMM]
    else:
        ways = [(combine_seconds(c, width, *sizes), c, width) for c in COMM for width in WIDTHS]
    _, comm, width = min(ways)
    comm = min(comm, (blocks // tile.cluster - 1) * tile.cluster)
    chunk = min(CHUNK, -(-choices // 8) * 8)
    return ExpertFusion(tile, comm, chunk, width=width)


def dispatch_seconds(
    comm: int, ranks: int, rows: int, experts: int, K: int, N: int, tile: Tile
) -> float:
    """An estimate of the first product, N columns, of tokens that come rank by rank.

    rows: how many an expert gets from each rank. The last of `distance` ranks have come that late,
    and the tiles that wait for them are all that is left to do then.
    """
    across, tile_s = -(-N // tile.block_n) * experts, sum(tile.seconds(K))
    hop_s = rows * experts * K * 2 / min(LINK_BYTES, comm * BLOCK_BYTES)

    def left(distance: int) -> int:
        return across * (-(-rows * ranks // tile.block_m) - rows * distance // tile.block_m)

    return max(
        distance * hop_s + -(-left(distance) // (SMS - comm)) * tile_s for distance in range(ranks)
    )


def combine_seconds(
    comm: int, width: int, ranks: int, rows: int, experts: int, K: int, N: int, tile: Tile
) -> float:
    """An estimate of the second product, N columns, whose answers leave in float32.

    A block of columns leaves when `width` tiles of columns are computed; own answers, added up by
    the same blocks, use no link.
    """
    across, tile_s = -(-N // tile.block_n), sum(tile.seconds(K))
    down = -(-rows * ranks // tile.block_m) * experts
    answer_s = (ranks - 1) / min(LINK_BYTES, comm * BLOCK_BYTES) + 1 / (comm * BLOCK_BYTES)
    column_s = rows * experts * 4 * answer_s

    def end(first: int) -> float:
        computed = -(-min(first + width, across) * down // (SMS - comm)) * tile_s
        return computed + (N - first * tile.block_n) * column_s

    return max(end(first) for first in range(0, across, width))


def key(op: str, ranks: int, choices: int, experts: int, K: int, N: int) -> dict[str, int]:
    """Returns the key of a table's row; N: columns of all weights."""
    return {"ranks": ranks, "choices": choices, "experts": experts, "K": K, "N": N}
