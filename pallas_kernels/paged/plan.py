"""Tiles of a step's queries, and which thread block of the paged kernel sums which of their keys.

The queries of a step lie one segment behind the other, a segment for each sequence: one row where
the sequence decodes, a piece of its prompt where it prefills. Work is done in tiles of Q rows of
ONE segment, so that a tile needs one list of pages; a segment's last tile is padded.

The plan is made on the device. An item is a tile with one key-value head, and its keys are steps of
C neighbours. The steps of all items lie one behind the other, and every thread block takes the same
number of them; its share of one item is a part. So all blocks end together, however ragged the
contexts are, and the keys of an item are cut only where a block's share ends (flash-decoding,
arXiv 2311.01282 section 3.1, with the shares of Stream-K, arXiv 2301.03598 section 4). A part of
an item that is cut leaves its sums in a slot of its own; the others are results.

All sizes are static: D blocks cut D - 1 items at most.

Legend: T query tokens, B segments, X tiles, Q rows of a tile, G key-value heads, I = X G items,
V parts, D thread blocks, C keys of a step.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.ranges import FARTHEST, Window

# Columns of a part. ITEM: X G. SEGMENT: of the page table. FIRST: its first step of the sequence,
# counted from position 0. STEPS: how many. LEFT, RIGHT: of these, those at either end of which some
# row sees some keys only. POSITION: of its first row. LIVE: rows of it, in tokens. SLOT: for its
# sums; -1: it has all steps of its item. BEGINS: 1 if it has the item's first step, else 0.
ITEM, SEGMENT, FIRST, STEPS, LEFT, RIGHT, POSITION, LIVE, SLOT, BEGINS = range(10)
JOB_ITEM, JOB_SLOT, JOB_PARTS = range(3)  # columns of an item that is cut: its first slot, parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """segment_X: each tile's segment. row_XQ: rows in q. lo_XQ, hi_XQ: the keys that a row sees.

    A row sees lo <= key < hi; a padding row has lo = hi = 0. tile_T, place_T: the tile of a token's
    row, and its place in the tile. All int32.
    """

    segment_X: jax.Array
    row_XQ: jax.Array
    lo_XQ: jax.Array
    hi_XQ: jax.Array
    tile_T: jax.Array
    place_T: jax.Array


def most_tiles(tokens: int, segments: int, rows: int) -> int:
    """Returns X, for any lengths of so many segments that hold so many tokens at most."""
    return min(tokens, (tokens + segments * (rows - 1)) // rows)


def cut(
    tokens: int,
    start_B: jax.Array,
    count_B: jax.Array,
    context_B: jax.Array,
    rows: int,
    window: Window | None,
) -> Tiles:
    """Returns the tiles of `rows` rows; behind the last one there are dead ones.

    tokens: T, at least 1. start_B, count_B, context_B: as in `paged_attention`.
    """
    segments = start_B.shape[0]
    tiles_B = -(-count_B // rows)
    end_B = tiles_B.cumsum(dtype=jnp.int32)
    tile_X = jnp.arange(most_tiles(tokens, segments, rows), dtype=jnp.int32)
    segment_X = (end_B[None] <= tile_X[:, None]).sum(1, dtype=jnp.int32)
    segment_X = jnp.minimum(segment_X, segments - 1)
    first_X = (tile_X - (end_B - tiles_B)[segment_X]) * rows
    own_XQ = first_X[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    count_X1, context_X1, start_X1 = (x[segment_X][:, None] for x in (count_B, context_B, start_B))
    position_XQ = context_X1 - count_X1 + own_XQ
    left = window[0] if window is not None else None
    lo_XQ = jnp.zeros_like(position_XQ)
    if left is not None and left < FARTHEST:
        lo_XQ = jnp.maximum(position_XQ - left, 0)
    live_XQ = (own_XQ < count_X1) & (position_XQ >= 0)
    token_T1 = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    inside_TB = (token_T1 >= start_B[None]) & (token_T1 < (start_B + count_B)[None])
    segment_T = jnp.argmax(inside_TB, axis=1).astype(jnp.int32)
    own_T = jnp.arange(tokens, dtype=jnp.int32) - start_B[segment_T]
    own_T = jnp.where(inside_TB.any(1), own_T, -1)
    return Tiles(
        segment_X,
        jnp.clip(start_X1 + own_XQ, 0, tokens - 1),
        jnp.where(live_XQ, lo_XQ, 0),
        jnp.where(live_XQ, position_XQ + 1, 0),
        jnp.where(own_T < 0, -1, (end_B - tiles_B)[segment_T] + own_T // rows),
        own_T % rows,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """All int32. parts_V: (V, 10), by block. first_D: (D + 1,), each block's first part.

    jobs_D: (D, 3), the items that are cut; count: (1,), how many. job_I: which of these, or -1.
    """

    parts_V: jax.Array
    first_D: jax.Array
    jobs_D: jax.Array
    count: jax.Array
    job_I: jax.Array


def most_slots(blocks: int) -> int:
    """Returns the most slots: a block's share can begin and end inside an item."""
    return 2 * blocks


def plan(tiles: Tiles, heads: int, keys: int, blocks: int, least: int) -> Plan:
    """Returns the shares of `blocks` thread blocks.

    heads: G. keys: C. least: steps of a share at least, where there are few.
    """
    live_X = (tiles.lo_XQ < tiles.hi_XQ).sum(1, dtype=jnp.int32)
    position_X, first_X = tiles.hi_XQ[:, 0] - 1, tiles.lo_XQ[:, 0] // keys
    steps_X = jnp.where(live_X > 0, -(-tiles.hi_XQ.max(1) // keys) - first_X, 0)
    # Steps full_first <= step < full_last hold nothing but keys that all rows see.
    full_first_X, full_last_X = -(-tiles.lo_XQ.max(1) // keys), (position_X + 1) // keys

    steps_I = jnp.repeat(steps_X, heads)
    end_I = steps_I.cumsum(dtype=jnp.int32)
    start_I = end_I - steps_I
    share = jnp.maximum(-(-end_I[-1] // blocks), least)
    parts_I = jnp.where(steps_I > 0, (end_I - 1) // share - start_I // share + 1, 0)
    split_I = parts_I > 1
    after_I = parts_I.cumsum(dtype=jnp.int32)
    slots_I = jnp.where(split_I, parts_I, 0)
    slot_I = slots_I.cumsum(dtype=jnp.int32) - slots_I

    part_V = jnp.arange(steps_I.shape[0] + blocks, dtype=jnp.int32)
    item_V = (part_V[:, None] >= after_I[None]).sum(1, dtype=jnp.int32)
    live_V = item_V < steps_I.shape[0]
    item_V = jnp.minimum(item_V, steps_I.shape[0] - 1)
    nth_V = part_V - (after_I - parts_I)[item_V]
    block_V = start_I[item_V] // share + nth_V
    begin_V = jnp.maximum(start_I[item_V], block_V * share)
    stop_V = jnp.minimum(end_I[item_V], (block_V + 1) * share)
    steps_V = jnp.where(live_V, stop_V - begin_V, 0)
    tile_V = item_V // heads
    first_V = first_X[tile_V] + begin_V - start_I[item_V]
    last_V = first_V + steps_V
    right_V = jnp.clip(last_V - jnp.maximum(full_last_X[tile_V], first_V), 0, steps_V)
    left_V = jnp.minimum(full_first_X[tile_V], last_V - right_V) - first_V
    columns = {
        ITEM: item_V,
        SEGMENT: tiles.segment_X[tile_V],
        FIRST: first_V,
        STEPS: steps_V,
        LEFT: jnp.maximum(left_V, 0),
        RIGHT: right_V,
        POSITION: position_X[tile_V],
        LIVE: live_X[tile_V],
        SLOT: jnp.where(split_I[item_V], slot_I[item_V] + nth_V, -1),
        BEGINS: (nth_V == 0).astype(jnp.int32),
    }
    block_D = jnp.arange(blocks + 1, dtype=jnp.int32)
    before_D = (live_V[None] & (block_V[None] < block_D[:, None])).sum(1, dtype=jnp.int32)
    (cut_D,) = jnp.nonzero(split_I, size=blocks, fill_value=0)
    job_I = split_I.cumsum(dtype=jnp.int32) - 1
    return Plan(
        jnp.stack([columns[i] for i in range(len(columns))], axis=1),
        before_D,
        jnp.stack([cut_D.astype(jnp.int32), slot_I[cut_D], parts_I[cut_D]], axis=1),
        split_I.sum(dtype=jnp.int32)[None],
        jnp.where(split_I, job_I, -1),
    )
