"""Tile ranges against a brute-force count of live pairs."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import hopper_backward, hopper_forward, ranges
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


@pytest.mark.parametrize("far", [2**30, 2**31 - 1, 2**40])
def test_a_window_beyond_every_array_hides_nothing(far):
    """int32 positions plus such a window would overflow, and hide what it should show."""
    cu_q, cu_k = CASES[0].cu_q, CASES[0].cu_k
    want = ranges.packed_rows(cu_q, cu_k, T, False, None)
    for window in ((far, far), (None, far), (far, None)):
        rows = ranges.packed_rows(cu_q, cu_k, T, False, window)
        chex.assert_trees_all_equal(rows, want)


def test_ranges_are_int32_where_64_bits_are_on():
    with jax.enable_x64(True):
        cu = jax.ShapeDtypeStruct((3,), jnp.int32)
        rows = jax.eval_shape(lambda cu: ranges.packed_rows(cu, cu, 64, True, None), cu)
        arrays = rows, jax.eval_shape(lambda rows: ranges.visits(rows, 64, 16, 32), rows)
    assert {x.dtype.name for x in jax.tree.leaves(arrays)} == {"int32"}


def blocks_of(seen, block_q, block_k):
    """(M, N) booleans: does a tile hold a live pair; must it be masked for a row that lives."""
    padding = ((0, -seen.shape[0] % block_q), (0, -seen.shape[1] % block_k))
    tiles = np.pad(seen, padding)
    tiles = tiles.reshape(tiles.shape[0] // block_q, block_q, -1, block_k).swapaxes(1, 2)
    rows_live = np.pad(seen.any(1), padding[0]).reshape(-1, block_q)
    masked = (~tiles.all(-1) & rows_live[:, None]).any(-1)
    return tiles.any((2, 3)), masked


@pytest.mark.parametrize(
    "blocks", [(16, 32), pytest.param((32, 8), marks=pytest.mark.slow)], ids=str
)
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


TABLES = {
    "forward": (hopper_forward.tables, (S, hopper_forward.Tile(32, 2)), 64, 32, False),
    "grouped": (hopper_forward.tables, (S, hopper_forward.Tile(64, 2, 4)), 16, 64, False),
    "dq": (hopper_backward.dq_tables, (S, hopper_backward.Tile(32, 2, 64, 2)), 64, 32, False),
    "dkv": (hopper_backward.dkv_tables, (S, hopper_backward.Tile(64, 2, 32, 2), 64), 32, 64, True),
    "dkv 256": (
        hopper_backward.dkv_tables,
        (S, hopper_backward.Tile(32, 2, 64, 2), 256),
        64,
        64,
        True,
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_that_kernels_read_hold_no_tile_in_vain(name):
    """A warpgroup computes its live tiles only; a thread block loads their union and no more."""
    tables, static, block_q, block_k, inverse = TABLES[name]
    build = jax.jit(tables, static_argnums=tuple(range(1, 1 + len(static))))
    for case in CASES:
        live, _ = blocks_of(seen_by(case), block_q, block_k)
        live = live.T if inverse else live
        table, tiles = (np.asarray(x) for x in build(rows_of(case), *static))
        spans = table[:, 2:].reshape(-1, 4)
        per_block = len(spans) // len(table)
        assert per_block == (1 if "256" in name else 2) and 0 <= len(spans) - len(live) < per_block
        live = np.pad(live, ((0, len(spans) - len(live)), (0, 0)))
        for (first, _, _, last), want in zip(spans, live, strict=True):
            np.testing.assert_array_equal(tiles[first:last], np.flatnonzero(want))
        union = live.reshape(len(table), per_block, -1).any(1)
        for (begin, end), want in zip(table[:, :2], union, strict=True):
            np.testing.assert_array_equal(tiles[begin:end], np.flatnonzero(want))
        # What a warpgroup computes lies in what its thread block loads.
        inside = (spans[:, 0] >= table[:, 0].repeat(per_block)) & (
            spans[:, 3] <= table[:, 1].repeat(per_block)
        )
        assert (inside | (spans[:, 0] == spans[:, 3])).all()


def test_segment_ids_are_prefix_sums():
    ids = jnp.array([7, 7, 7, 2, 2, -1, -1, 3, 3, 3], jnp.int32)
    for options in ((True, None), (False, (1, 2))):
        got = jax.jit(ranges.segment_rows, static_argnums=(1, 2))(ids, *options)
        cu = jnp.array([0, 3, 5, 7, 10], jnp.int32)
        want = packed_rows(cu, cu, 10, *options)
        live = np.asarray(ids) >= 0
        np.testing.assert_array_equal(got.lo, np.where(live, want.lo, 0))
        np.testing.assert_array_equal(got.hi, np.where(live, want.hi, 0))
        np.testing.assert_array_equal(got.self, want.self)


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
