"""Cases of paged attention: what they count, what is timed, and measured tiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret
from pallas_kernels.paged import bench
from pallas_kernels.paged import tile as tiles
from pallas_kernels.paged.cases import CASES, Case
from pallas_kernels.paged.reference import Pages
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


@pytest.mark.parametrize("case", [*CASES, *bench.CHECKED], ids=lambda case: case.name)
def test_a_case_is_a_step_that_can_be(case):
    """Every page once, and a kernel that takes it."""
    table, start, count, context = bench.table_of(case)
    q, k, _ = bench.like(case)
    used = -(-context // case.page)
    ids = [i for row, n in zip(table, used, strict=True) for i in row[:n]]
    assert len(set(ids)) == len(ids) and 0 < min(ids) and max(ids) < k.shape[0]
    assert (count <= context).all() and (context <= table.shape[1] * case.page).all()
    assert (start + count).max() <= q.shape[0]
    page_array = jax.ShapeDtypeStruct(k.shape, case.pages)
    shape = tiles.shape_of(
        q, Pages(page_array, page_array, None, None, table, start, count, context)
    )
    assert not tiles.misfits(shape)
    tiles.check(tiles.heuristic(shape, q.shape[0], len(count)), shape)


def test_the_check_of_a_gpu_sees_a_wrong_result(monkeypatch):
    """It is right in the interpreter, and a result of another scale is not."""
    (_, right), *_ = bench.checks(rehearsal=True)
    with interpret.checked():
        assert max(right().values()) <= 1
    (case,), real = bench.TINY_CASES, bench.call
    monkeypatch.setattr(
        bench,
        "call",
        lambda case, which, **options: (
            lambda q, k, v: (
                real(case, "reference", **options)(q, k, v) * (1.1 if which == "wrong" else 1)
            )
        ),
    )
    assert bench.errors(case, "wrong", {})["out"] > 1


def test_what_is_timed_is_the_case():
    for name, side in bench.sides(SMALL, "reference").items():
        function, like = side()
        out = jax.eval_shape(function, *like)
        assert name == "copy" or out.shape == (4, 4, 64)
    small = Case("int8", (70, 20), (1, 1), (2, 1), 64, pages="int8", room=128)
    function, like = bench.timed(small, "reference")
    drawn = [jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(like)]
    assert np.isfinite(np.asarray(jax.jit(function)(*drawn), np.float32)).all()


def test_measured_tiles_are_taken_where_they_fit(tmp_path, monkeypatch):
    q, k, _ = bench.like(SMALL)
    pages = Pages(k, k, None, None, *(jnp.asarray(x) for x in bench.table_of(SMALL)))
    shape = tiles.shape_of(q, pages)
    key = tiles.key(shape, 4, 2, 512)
    with tables.on(tables.H100):
        assert tiles.choose(q, pages) == (None, tiles.heuristic(shape, 4, 2))
        tile = tiles.Tile(2, 64, 3)
        tables.write(monkeypatch, tmp_path, tables.row(tiles.OP, key, tile=vars(tile)))
        row, chosen = tiles.choose(q, pages)
        assert row is not None and chosen == tile
        bad = vars(tiles.Tile(1, 64, 99))
        tables.write(monkeypatch, tmp_path, tables.row(tiles.OP, key, tile=bad))
        assert tiles.choose(q, pages)[1] == tiles.heuristic(shape, 4, 2)


def test_what_is_to_be_tuned():
    every = list(bench.tunings())
    assert len({tuple(t.key.values()) for t in every}) == len(every) >= len(CASES) - 1
    for tuning in every:
        assert len(set(tuning.candidates)) == len(tuning.candidates) >= 2
        shapes = jax.eval_shape(tuning.inputs, jax.random.key(0))
        out = jax.eval_shape(tuning.reference, *shapes)
        assert out.shape == shapes[0].shape
