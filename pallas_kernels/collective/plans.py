"""How a fused kernel runs where nothing was measured: tile, communication blocks, chunk.

The least time by waves of tiles on the blocks that are left, against the link's time through the
communication blocks (Flux, arXiv 2406.06858, section 4.4 tunes the same three).

Legend: K contracted, N columns; rows: of one rank's page.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.collective.core import Plan, buffers
from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.memory import up
from pallas_kernels.hopper.tiles import BLOCKS, Tile

COMM = (2, 4, 8, 16)
# (chosen: 400 GB/s of an H100's NVLink in one direction, of which a block, with six pieces of
# 32 KiB on their way for 2 us, moves a quarter; to be replaced by measurements)
LINK_BYTES, BLOCK_BYTES = 400e9, 100e9
CHUNK = 128  # rows, at most (chosen: chunks that are in flight together arrive together)


def load(row: dict[str, Any]) -> Plan:
    """The inverse of dataclasses.asdict."""
    return Plan(Tile(**row["tile"]), row["comm"], row["chunk"])


def fitted(tile: Tile, out_dtype: Any, dtype: Any = jnp.bfloat16) -> Tile:
    """The same tile with no more stages than fit in shared memory."""

    return tiles.fitted(tile, lambda tile: buffers(tile, dtype, out_dtype))


def candidates(op: str, rows: int, widths: Sequence[int], out_dtype: Any) -> Iterator[Plan]:
    """What the heuristic and a tuner choose from, legal for these sizes."""
    for block_m, block_n in BLOCKS:
        if block_n > min(widths) or (op == "matmul_all_reduce" and block_n % 128):
            continue
        for cluster in (2, 1):
            if block_m * (cluster - 1) >= rows or (block_m > 64 and block_m >= 2 * rows):
                continue
            tile = fitted(Tile(block_m, block_n, 64, 6, block_m // 64, cluster), out_dtype)
            chunk = min(CHUNK, -(-rows // 8) * 8)
            if op == "matmul_all_reduce":
                yield Plan(tile, 0, chunk)
            else:
                yield from (Plan(tile, comm, chunk) for comm in COMM)


def heuristic(
    op: str, ranks: int, rows: int, K: int, widths: Sequence[int], out_dtype: Any, blocks: int = SMS
) -> Plan:
    """Returns the plan where nothing was measured.

    op: of api.py. rows: of one rank's x (gather), result (scatter), or all (reduce). widths: N of
    each weight. out_dtype: of the result (gather), or of the sums that cross ranks.
    """
    legal = candidates(op, rows, widths, out_dtype)
    return min(legal, key=lambda plan: seconds(op, plan, ranks, rows, K, widths, out_dtype, blocks))


def seconds(
    op: str,
    plan: Plan,
    ranks: int,
    rows: int,
    K: int,
    widths: Sequence[int],
    out_dtype: Any,
    blocks: int = SMS,
) -> float:
    """Returns what the model gives for a plan: an estimate to choose by, not a time."""
    tile = plan.tile
    columns = sum(-(-N // tile.block_n) for N in widths)
    row_tiles = -(-rows // (tile.block_m * tile.cluster)) * tile.cluster
    count = row_tiles * columns * (1 if op == "matmul_all_reduce" else ranks)
    waves = -(-count // (blocks - plan.comm))
    computing = waves * sum(tile.seconds(up(K, tile.block_k)))
    if not plan.comm:
        return computing
    wide = K * 2 if op == "all_gather_matmul" else sum(widths) * jnp.dtype(out_dtype).itemsize
    link = min(LINK_BYTES, plan.comm * BLOCK_BYTES)
    return max(computing, (ranks - 1) * rows * wide / link) + plan.chunk * wide / BLOCK_BYTES
