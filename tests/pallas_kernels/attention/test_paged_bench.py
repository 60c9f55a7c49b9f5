"""Cases of paged attention: what they count, what is timed, and measured tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret
from pallas_kernels.attention import paged_bench, paged_tile, paged_tiling
from pallas_kernels.attention import paged_bench as tunings
from pallas_kernels.attention.paged_cases import CASES, Case
from pallas_kernels.attention.paged_reference import Pages
from tests import tables

SMALL = Case("small", (300, 20), (1, 3), (4, 2), 64, page=8, room=512)


def test_floors_count_what_is_seen():
    """By loops over rows and keys."""
    pairs = sum(300 - 1 + i + 1 for i in range(1)) + sum(20 - 3 + i + 1 for i in range(3))
    assert SMALL.flops() == 4 * pairs * 4 * 64
    assert SMALL.bytes() == 2 * (320 * 2 * 64 * 2) + 2 * (4 * 4 * 64 * 2)
    eight = Case("small", (300, 20), (1, 3), (4, 2), 64, page=8, pages="int8")
    assert eight.bytes() == 2 * (320 * 2 * (64 + 4)) + 2 * (4 * 4 * 64 * 2)
    assert Case("none", (300,), (0,)).bytes() == 0
    decode, chunk = CASES[0], next(c for c in CASES if "chunk 2048" in c.name)
    assert decode.floor_s() == decode.bytes() / 4.8e12  # the memory's
    assert chunk.floor_s() == chunk.flops() / 989.5e12  # the tensor cores'


@pytest.mark.parametrize("case", [*CASES, *paged_bench.CHECKED], ids=lambda case: case.name)
def test_a_case_is_a_step_that_can_be(case):
    """Every page once, and a kernel that takes it."""
    table, start, count, context = paged_bench.table_of(case)
    q, k, _ = paged_bench.like(case)
    used = -(-context // case.page)
    ids = [i for row, n in zip(table, used, strict=True) for i in row[:n]]
    assert len(set(ids)) == len(ids) and 0 < min(ids) and max(ids) < k.shape[0]
    assert (count <= context).all() and (context <= table.shape[1] * case.page).all()
    assert (start + count).max() <= q.shape[0]
    kept = jax.ShapeDtypeStruct(k.shape, case.pages)
    shape = paged_tile.shape_of(q, Pages(kept, kept, None, None, table, start, count, context))
    assert not paged_tile.misfits(shape)
    paged_tile.check(paged_tile.heuristic(shape, q.shape[0], len(count)), shape)


def test_the_check_of_a_gpu_sees_a_wrong_result(monkeypatch):
    """It is right in the interpreter, and a result of another scale is not."""
    (_, right), *_ = paged_bench.checks(rehearsal=True)
    with interpret.checked():
        assert max(right().values()) <= 1
    (case,), real = paged_bench.TINY_CASES, paged_bench.call
    monkeypatch.setattr(
        paged_bench,
        "call",
        lambda case, which, **options: (
            lambda q, k, v: (
                real(case, "reference", **options)(q, k, v) * (1.1 if which == "wrong" else 1)
            )
        ),
    )
    assert paged_bench.errors(case, "wrong", {})["out"] > 1


def test_what_is_timed_is_the_case():
    for name, side in paged_bench.sides(SMALL, "reference").items():
        function, like = side()
        found = jax.eval_shape(function, *like)
        assert name == "copy" or found.shape == (4, 4, 64)
    small = Case("int8", (70, 20), (1, 1), (2, 1), 64, pages="int8", room=128)
    function, like = paged_bench.timed(small, "reference")
    drawn = [jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(like)]
    assert np.isfinite(np.asarray(jax.jit(function)(*drawn), np.float32)).all()


def test_measured_tiles_are_taken_where_they_fit(tmp_path, monkeypatch):
    q, k, _ = paged_bench.like(SMALL)
    pages = Pages(k, k, None, None, *(jnp.asarray(x) for x in paged_bench.table_of(SMALL)))
    shape = paged_tile.shape_of(q, pages)
    key = paged_tiling.key(shape, 4, 2, 512)
    with tables.on(tables.H100):
        assert paged_tiling.choose(q, pages) == (None, paged_tile.heuristic(shape, 4, 2))
        tile = paged_tile.Tile(2, 64, 3)
        tables.write(monkeypatch, tmp_path, tables.row(paged_tile.OP, key, tile=vars(tile)))
        row, found = paged_tiling.choose(q, pages)
        assert row is not None and found == tile
        bad = vars(paged_tile.Tile(1, 64, 99))
        tables.write(monkeypatch, tmp_path, tables.row(paged_tile.OP, key, tile=bad))
        assert paged_tiling.choose(q, pages)[1] == paged_tile.heuristic(shape, 4, 2)


def test_what_is_to_be_tuned():
    found = list(tunings.tunings())
    assert len({tuple(t.key.values()) for t in found}) == len(found) >= len(CASES) - 1
    for tuning in found:
        assert len(set(tuning.candidates)) == len(tuning.candidates) >= 2
        shapes = jax.eval_shape(tuning.inputs, jax.random.key(0))
        out = jax.eval_shape(tuning.reference, *shapes)
        assert out.shape == shapes[0].shape
