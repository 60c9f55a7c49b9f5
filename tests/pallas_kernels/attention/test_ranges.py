"""Tile ranges against a brute-force count of live pairs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import ranges
from tests.attention_oracle import Case, visible

CASES = [
    Case((40, 24)),
    Case((1, 0, 70, 5, 0, 52), causal=True, spare=40),
    Case((30, 100, 3), causal=True, window=(9, 0)),
    Case((30, 100, 3), window=(9, 20), spare=7),
    Case((20, 0, 30, 16, 40), (90, 70, 0, 64, 5), causal=True, spare=33),
    Case((7, 20, 64), (100, 90, 130), window=(3, 2)),  # keys left of every window
    Case((0, 0, 0), (30, 0, 64), spare=64),
    Case((33,), (5,), causal=True),
    Case((0, 0), spare=0),
]


T, S, B = 192, 320, 6  # the capacity of every case: few compiles
packed_rows = jax.jit(ranges.packed_rows, static_argnums=(2, 3, 4))
visits = jax.jit(ranges.visits, static_argnums=(1, 2, 3))


def rows_of(case):
    cu_q, cu_k = (np.pad(x, (0, B + 1 - len(x)), mode="edge") for x in (case.cu_q, case.cu_k))
    return packed_rows(cu_q, cu_k, T, case.causal, case.window)


def seen_by(case):
    seen = visible(case)
    return np.pad(seen, ((0, T - seen.shape[0]), (0, S - seen.shape[1])))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rows_are_the_definition(case):
    rows, s = rows_of(case), np.arange(S)
    got = (np.asarray(rows.lo)[:, None] <= s) & (s < np.asarray(rows.hi)[:, None])
    np.testing.assert_array_equal(got, seen_by(case))


def blocks_of(seen, block_q, block_k):
    """(M, N) booleans: does a tile hold a live pair; must it be masked for a row that lives."""
    padding = ((0, -seen.shape[0] % block_q), (0, -seen.shape[1] % block_k))
    tiles = np.pad(seen, padding)
    tiles = tiles.reshape(tiles.shape[0] // block_q, block_q, -1, block_k).swapaxes(1, 2)
    rows_live = np.pad(seen.any(1), padding[0]).reshape(-1, block_q)
    masked = (~tiles.all(-1) & rows_live[:, None]).any(-1)
    return tiles.any((2, 3)), masked


@pytest.mark.parametrize("blocks", [(16, 32), (32, 8)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_tile_without_a_live_pair_is_visited_in_either_direction(case, blocks):
    seen = seen_by(case)
    live, masked = blocks_of(seen, *blocks)
    over_keys, over_queries = visits(rows_of(case), S, *blocks)
    for visited, want_live, want_masked in (
        (over_keys, live, masked),
        (over_queries, live.T, masked.T),
    ):
        tiles = np.asarray(visited.tiles)
        for m, (first, full_first, full_last, last) in enumerate(np.asarray(visited.spans)):
            assert first <= full_first <= full_last <= last
            np.testing.assert_array_equal(tiles[first:last], np.flatnonzero(want_live[m]))
            full = np.flatnonzero(want_live[m] & ~want_masked[m])
            np.testing.assert_array_equal(tiles[full_first:full_last], full)


def test_segment_ids_are_prefix_sums():
    ids = jnp.array([7, 7, 7, 2, 2, -1, -1, 3, 3, 3], jnp.int32)
    for options in ((False, None), (True, None), (True, (1, 0)), (False, (1, 2))):
        got = jax.jit(ranges.segment_rows, static_argnums=(1, 2))(ids, *options)
        cu = jnp.array([0, 3, 5, 7, 10], jnp.int32)
        want = packed_rows(cu, cu, 10, *options)
        live = np.asarray(ids) >= 0
        np.testing.assert_array_equal(got.lo, np.where(live, want.lo, 0))
        np.testing.assert_array_equal(got.hi, np.where(live, want.hi, 0))
        np.testing.assert_array_equal(got.self, want.self)


def paper_lengths(longest, batch=16, seed=0):
    """ByteTransformer's draw (its benchmark): uniform, average 0.6 of the longest."""
    average = int(0.6 * longest)
    return np.random.default_rng(seed).integers(2 * average - longest, longest + 1, batch)


@pytest.mark.parametrize(("longest", "bound"), [(64, 5.5), (256, 2.2), (512, 1.6), (1024, 1.4)])
def test_visited_area_on_the_papers_draws(longest, bound):
    """64-row blocks and 128-row tiles, as the forward kernel's warpgroups have them."""
    lengths = paper_lengths(longest)
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    rows = packed_rows(cu, cu, 16384, False, None)
    over_keys, over_queries = visits(rows, 16384, 64, 128)
    useful = float((lengths.astype(float) ** 2).sum())
    assert float(ranges.useful_pairs(rows)) == useful
    for visited, block, tile in ((over_keys, 64, 128), (over_queries, 128, 64)):
        ratio = float(ranges.visited_area(visited, block, tile)) / useful
        print(f"longest {longest}: visited area {ratio:.2f} of the useful pairs")
        assert ratio <= bound


def test_one_compile_serves_any_prefix_sums():
    count = 0

    @jax.jit
    def build(cu):
        nonlocal count
        count += 1
        return ranges.visits(ranges.packed_rows(cu, cu, 96, True, None), 96, 16, 32)

    for lengths in ((5, 60, 0), (0, 0, 0), (96, 0, 0)):
        build(jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32))
    assert count == 1
