"""Which rows of a step's queries belong to which sequence, and what each of them sees.

The queries of a step lie one segment behind the other, a segment for each sequence: one row where
it decodes, a piece of its prompt where it prefills. Work is done in tiles of Q rows of ONE segment,
so that a tile needs one list of pages; a segment's last tile is padded.

Legend: T query tokens, B segments, X tiles, Q rows of a tile.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.ranges import FARTHEST, Window


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """segment_X: of each tile. row_XQ: in q. lo_XQ, hi_XQ: keys that a row sees, lo <= key < hi.

    tile_T, place_T: where the row of a token is. All int32. A row of nobody has lo = hi = 0.
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
    inside_TB = _inside(tokens, start_B, count_B)
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


def _inside(tokens: int, start_B: jax.Array, count_B: jax.Array) -> jax.Array:
    token_T1 = jnp.arange(tokens, dtype=jnp.int32)[:, None]
    return (token_T1 >= start_B[None]) & (token_T1 < (start_B + count_B)[None])
