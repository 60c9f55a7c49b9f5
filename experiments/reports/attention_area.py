"""How many pairs of rows attention's kernels visit beside the useful ones, from their own tables.

A warpgroup computes the tiles that hold a live pair of its own rows; which pairs of such a tile
live is a mask. And it passes, for it shares them, the tiles that the other warpgroup of its thread
block needs: it waits while those are in use. Both are counted.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from pallas_kernels.attention import hopper_backward, hopper_forward
from pallas_kernels.attention.ranges import Rows, packed_rows, useful_pairs

ROWS = hopper_forward.ROWS


@dataclasses.dataclass(frozen=True)
class Area:
    """Pairs of rows over the useful ones: in tiles that are computed, in tiles that are passed."""

    computed: float
    passed: float


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def _read(
    rows: Rows,
    keys: int,
    width: int,
    forward: hopper_forward.Tile,
    backward: hopper_backward.Tile,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    tables = {
        "forward": hopper_forward.tables(rows, keys, forward)[0],
        "dq": hopper_backward.dq_tables(rows, keys, backward)[0],
        "dkv": hopper_backward.dkv_tables(rows, keys, backward, width)[0],
    }
    return useful_pairs(rows), tables


def areas(
    rows: Rows,
    keys: int,
    width: int,
    forward: hopper_forward.Tile,
    backward: hopper_backward.Tile,
) -> dict[str, Area]:
    """Returns the areas of one head by kernel: 'forward', 'dq' (none if fused) and 'dkv'."""
    blocks = {
        "forward": (ROWS // forward.heads, forward.block_k),
        "dq": (ROWS, backward.block_dq),
        "dkv": (backward.block_dkv, ROWS),
    }
    useful, tables = _read(rows, keys, width, forward, backward)
    found = {}
    for name, table in jax.tree.map(np.asarray, tables).items():
        spans = table[:, 2:].reshape(table.shape[0], -1, 4)
        computed = (spans[..., 3] - spans[..., 0]).sum()
        passed = (table[:, 1] - table[:, 0]).sum() * spans.shape[1]
        pairs = float(np.prod(blocks[name])) / float(useful)
        found[name] = Area(float(computed) * pairs, float(passed) * pairs)
    if backward.fused:
        del found["dq"]
    return found


def of_lengths(
    lengths: Sequence[int], width: int, group: int = 1, capacity: int | None = None
) -> dict[str, Area]:
    """`areas` of packed self-attention, with the heuristics' tiles for its longest segment.

    capacity: T; None: the tokens.
    """
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    capacity, longest = capacity or int(sum(lengths)), max(lengths)
    forward = hopper_forward.heuristic(width, group, longest)
    backward = hopper_backward.heuristic(width, longest)
    rows = jax.jit(packed_rows, static_argnums=(2, 3, 4))(cu, cu, capacity, False, None)
    return areas(rows, capacity, width, forward, backward)
