"""The tile, communication blocks and chunk of a fused kernel if nothing was measured.

They have the least time by a model: waves of tiles on the blocks that compute, against the link's
time through the communication blocks (Flux, arXiv 2406.06858, section 4.4 tunes the same three).

Legend: K contracted, N columns; `rows` are those of one rank's page.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper import fused
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.fused import BLOCK_BYTES, LINK_BYTES, Fusion
from pallas_kernels.hopper.memory import up
from pallas_kernels.hopper.tiles import Tile

COMM = (2, 4, 8, 16)
CHUNK = 128  # rows, at most (chosen: chunks that are in flight together arrive together)


def load(row: dict[str, Any]) -> Fusion:
    """Returns the fusion of a table's row, which dataclasses.asdict made."""
    return Fusion(Tile(**row["tile"]), row["comm"], row["chunk"])


def candidates(op: str, rows: int, widths: Sequence[int], out_dtype: Any) -> Iterator[Fusion]:
    """Yields the fusions that are legal for these sizes, for the heuristic and a tuner."""
    reduces = op == "matmul_all_reduce"
    chunk = min(CHUNK, -(-rows // 8) * 8)
    for tile in fused.candidates(rows, widths, out_dtype, 128 if reduces else 64):
        if tile.block_m == 64 or tile.block_m < 2 * rows:
            yield from (Fusion(tile, comm, chunk) for comm in ((0,) if reduces else COMM))


def heuristic(
    op: str, ranks: int, rows: int, K: int, widths: Sequence[int], out_dtype: Any, blocks: int = SMS
) -> Fusion:
    """Returns the fusion where nothing was measured.

    op: a name of api.py. rows: those of one rank's x (gather), of its result (scatter), or all
      (reduce). widths: N of each weight. out_dtype: the type of the result (gather), or of the sums
      that cross ranks.
    """
    legal = candidates(op, rows, widths, out_dtype)
    return min(
        legal, key=lambda fusion: seconds(op, fusion, ranks, rows, K, widths, out_dtype, blocks)
    )


def seconds(
    op: str,
    fusion: Fusion,
    ranks: int,
    rows: int,
    K: int,
    widths: Sequence[int],
    out_dtype: Any,
    blocks: int = SMS,
) -> float:
    """Returns the model's time of a fusion: an estimate to choose by, not a time."""
    tile = fusion.tile
    columns = sum(-(-N // tile.block_n) for N in widths)
    row_tiles = -(-rows // (tile.block_m * tile.cluster)) * tile.cluster
    count = row_tiles * columns * (1 if op == "matmul_all_reduce" else ranks)
    waves = -(-count // (blocks - fusion.comm))
    computing = waves * sum(tile.seconds(up(K, tile.block_k)))
    if not fusion.comm:
        return computing
    wide = K * 2 if op == "all_gather_matmul" else sum(widths) * jnp.dtype(out_dtype).itemsize
    link = min(LINK_BYTES, fusion.comm * BLOCK_BYTES)
    return max(computing, (ranks - 1) * rows * wide / link) + fusion.chunk * wide / BLOCK_BYTES
