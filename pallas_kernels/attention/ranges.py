"""Which keys each query sees in packed attention: by row, and by tile in both directions.

A query row sees one interval of key rows, [lo, hi), for segments, causal order and windows alike,
and along the packed axis both ends never decrease. All that follows rests on that: a block of
queries needs an interval of the key tiles that anyone sees, and the inverse (the queries that a
block of keys needs, for dk and dv) is an interval too. So the work is proportional to the useful
pairs in the forward and the backward pass; ByteTransformer (arXiv 2210.03052) section 3.3 has the
forward half for whole sequences.

Tiles lie on the ALIGNED grid of the packed axis, never at a segment's start: TMA at a row that is
not a multiple of the tiling reads other rows without any error.

Legend: T query rows, S key rows, B segments, M query blocks, N key tiles.
"""

import dataclasses

import jax
import jax.numpy as jnp

Window = tuple[int | None, int | None]
FARTHEST = 2**30  # (chosen) int32 positions plus or minus this cannot overflow; none lies farther


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """What each query row sees: keys lo <= s < hi; lo == hi: nothing, the row is dead.

    self: the key at the row's own position, bottom-right aligned; distances count from it. All
    int32 (T,); lo and hi of live rows never decrease.
    """

    lo: jax.Array
    hi: jax.Array
    self: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """The tiles that each block visits.

    tiles: int32 (N,), the tiles that any row needs, ascending; what follows them is never visited.
    spans: int32 (M, 4), positions in `tiles`: first, full_first, full_last, last. Tiles
    first..last-1 are visited and hold a live pair; of these, full_first..full_last-1 need no mask.
    """

    tiles: jax.Array
    spans: jax.Array


def packed_rows(
    cu_q: jax.Array, cu_k: jax.Array, length: int, causal: bool, window: Window | None
) -> Rows:
    """Rows of segments given by prefix sums (B+1,) over queries and keys; length: T.

    Causal and window are bottom-right aligned: the last query of a segment stands at its last key
    (FlashAttention 2.1 and later).
    """
    t_T = jnp.arange(length, dtype=jnp.int32)
    # How many segments end at or before t; comparing with all of them is one fused pass.
    segment_T = (t_T[:, None] >= cu_q[None, 1:]).sum(1, dtype=jnp.int32)
    live_T = segment_T < cu_q.shape[0] - 1
    segment_T = jnp.minimum(segment_T, cu_q.shape[0] - 2)
    start_T, end_T = cu_k[segment_T], cu_k[segment_T + 1]
    return _rows(start_T, end_T, t_T + end_T - cu_q[segment_T + 1], live_T, causal, window)


def segment_rows(ids_S: jax.Array, causal: bool, window: Window | None) -> Rows:
    """Rows of one sequence attending to itself; runs of equal ids are segments, ids < 0 dead."""
    s_S = jnp.arange(ids_S.shape[0], dtype=jnp.int32)
    changes_S = jnp.concatenate([jnp.array([True]), ids_S[1:] != ids_S[:-1]])
    start_S = jax.lax.cummax(jnp.where(changes_S, s_S, 0))
    ends_S = jnp.concatenate([changes_S[1:], jnp.array([True])])
    end_S = jax.lax.cummin(jnp.where(ends_S, s_S + 1, ids_S.shape[0]), reverse=True)
    return _rows(start_S, end_S, s_S, ids_S >= 0, causal, window)


def _rows(
    start: jax.Array,
    end: jax.Array,
    position: jax.Array,
    live: jax.Array,
    causal: bool,
    window: Window | None,
) -> Rows:
    # A side that reaches farther than any array is long has no limit.
    left, right = (w if w is None or w < FARTHEST else None for w in window or (None, None))
    if causal:
        right = 0
    lo = start if left is None else jnp.maximum(start, position - left)
    hi = end if right is None else jnp.minimum(end, position + right + 1)
    live &= lo < hi
    return Rows(jnp.where(live, lo, 0), jnp.where(live, hi, 0), position)


def visits(rows: Rows, keys: int, block_q: int, block_k: int) -> tuple[Visits, Visits]:
    """Tiles of block_k keys that each block of block_q queries visits, and the inverse.

    keys: S. Lengths need not be multiples of the blocks.
    Returns: (over keys: M query blocks; over queries: one block per key tile). Every visited pair
      of block and tile holds a live pair of rows, in both.
    """
    M, N = -(-rows.lo.shape[0] // block_q), -(-keys // block_k)
    pad = (0, M * block_q - rows.lo.shape[0])
    lo, hi = (jnp.pad(x, pad).reshape(M, block_q) for x in (rows.lo, rows.hi))
    live = lo < hi
    any_live = live.any(1)
    first, last = lo // block_k, -(-hi // block_k)
    # A key tile may be needed by nobody (a segment without queries, keys left of every window), and
    # can then lie inside a block's range; positions in `tiles` leave it out.
    # Comparing all with all is one fused pass; scatters of the edges and their sum were three,
    # which took 26 of 482 us on an H200.
    n_N1 = jnp.arange(N, dtype=jnp.int32)[:, None]
    live_1T, first_1T, last_1T = (x.reshape(1, -1) for x in (live, first, last))
    needed = (live_1T & (first_1T <= n_N1) & (n_N1 < last_1T)).any(1)
    tiles, place = _compact(needed)
    big = jnp.iinfo(jnp.int32).max
    spans = jnp.stack(
        [
            place[jnp.where(live, first, N).min(1)],
            place[jnp.clip(-(-jnp.where(live, lo, 0).max(1) // block_k), 0, N)],
            place[jnp.clip(jnp.where(live, hi, big).min(1) // block_k, 0, N)],
            place[jnp.where(live, last, 0).max(1)],
        ],
        axis=1,
    )
    queries, _ = _compact(any_live)
    over_queries = _transpose(spans[queries], any_live.sum(dtype=jnp.int32), N)
    over_queries = jnp.where(needed[:, None], over_queries[place[:N]], 0)
    spans = jnp.where(any_live[:, None], spans, 0)
    return Visits(tiles, _settle(spans)), Visits(queries, _settle(over_queries))


def _compact(needed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (the true indices, ascending, padded; how many lie before each index, (N+1,))."""
    (tiles,) = jnp.nonzero(needed, size=needed.shape[0], fill_value=0)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), needed.cumsum(dtype=jnp.int32)])
    return tiles.astype(jnp.int32), before


def _transpose(spans: jax.Array, count: jax.Array, N: int) -> jax.Array:
    """Spans (first, full_first, full_last, last) of the blocks that visit each position (N, 4).

    spans: those of the `count` live blocks, in order, then padding. The four columns never decrease
    from block to block, so the blocks with first <= c are a prefix and those with last > c a
    suffix.
    """
    live = jnp.arange(spans.shape[0], dtype=jnp.int32) < count
    c = jnp.arange(N, dtype=jnp.int32)[:, None]

    def at_most(column: int) -> jax.Array:
        return (live[None] & (spans[None, :, column] <= c)).sum(1, dtype=jnp.int32)

    return jnp.stack([at_most(3), at_most(2), at_most(1), at_most(0)], axis=1)


def _settle(spans: jax.Array) -> jax.Array:
    """Moves an empty full part to `last`, so that all visited tiles lie before it."""
    first, full_first, full_last, last = spans.T
    empty = full_first >= full_last
    full_first, full_last = (jnp.where(empty, last, x) for x in (full_first, full_last))
    return jnp.stack([first, full_first, full_last, last], axis=1)


def useful_pairs(rows: Rows) -> jax.Array:
    """Returns how many pairs of a query and a key it sees there are, float32."""
    return (rows.hi - rows.lo).astype(jnp.float32).sum()
