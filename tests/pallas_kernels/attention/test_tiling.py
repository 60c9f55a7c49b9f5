"""Measured tiles and implementations, from a table that a test writes."""

import functools
import logging

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels.attention import api, hopper_backward, hopper_forward, tiling
from pallas_kernels.attention import bench as tunings
from pallas_kernels.attention.cases import CASES, Case
from tests import tables

SHAPE = ("bfloat16", 64, 2, 256, 128)  # type, width, group, tokens, longest
FORWARD = hopper_forward.Tile(64, 3)
BACKWARD = hopper_backward.Tile(32, 3, 32, 3)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes the rows of H100s, for which programs of this test are."""

    def write(*rows):
        tables.write(monkeypatch, tmp_path, *rows)

    with tables.on(tables.H100):
        yield write


def row(op, tile, **changes):
    key = tiling.key(*SHAPE) | ({"deterministic": True} if op == tiling.BACKWARD else {})
    return tables.row(op, key, tile=vars(tile), **changes)


def test_without_a_table_the_heuristics_decide():
    assert tiling.choose(*SHAPE, True) == (
        [None, None],
        hopper_forward.heuristic(64, 2, 128),
        hopper_backward.heuristic(64, 128),
    )


def test_measured_tiles_are_taken(table):
    table(row(tiling.FORWARD, FORWARD), row(tiling.BACKWARD, BACKWARD))
    assert tiling.choose(*SHAPE, True)[1:] == (FORWARD, BACKWARD)
    # A row for a fixed order of additions says nothing of the other.
    assert tiling.choose(*SHAPE, False)[2].fused
    table(row(tiling.FORWARD, FORWARD, correct=False))
    assert tiling.choose(*SHAPE, True)[1] == hopper_forward.heuristic(64, 2, 128)


def test_another_width_is_another_kernel(table):
    table(row(tiling.FORWARD, FORWARD))
    wide = ("bfloat16", 96, 2, 256, 128)
    rows, tile, _ = tiling.choose(*wide, True)
    assert rows == [None, None] and tile == hopper_forward.heuristic(96, 2, 128)


def test_a_tile_that_does_not_fit_is_passed_over(table):
    table(row(tiling.FORWARD, hopper_forward.Tile(128, 60)))
    assert tiling.choose(*SHAPE, True)[1] == hopper_forward.heuristic(64, 2, 128)


def test_each_pass_is_chosen_by_its_own_row(table, caplog):
    table(row(tiling.FORWARD, FORWARD), row(tiling.BACKWARD, BACKWARD, fastest="reference"))
    q, k = (jax.ShapeDtypeStruct((256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    with caplog.at_level(logging.WARNING):
        assert api._choose("tuned op", q, k, None, 128, True)[:2] == ("measured", "library")
    (said,) = (r.getMessage() for r in caplog.records if "tuned op" in r.getMessage())
    assert "reference was the fastest at" in said and "'longest': 128" in said
    assert api._choose("tuned op", q, k, "hopper", 128, True)[:2] == ("hopper", "hopper")
    # Nobody measured the backward pass in any order.
    assert api._choose("tuned op", q, k, None, 128, False)[:2] == ("measured", "library")


def test_the_public_function_hands_the_measured_tiles_to_the_kernels(table, monkeypatch):
    table(row(tiling.FORWARD, FORWARD), row(tiling.BACKWARD, BACKWARD))
    taken = []

    def record(choice, hopper, reference, *args, op, **library):
        taken.append(hopper.keywords["tile"])
        return reference(*args)

    monkeypatch.setattr(api.dispatch, "run", record)
    q, k = (jax.ShapeDtypeStruct((256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    cu = jax.ShapeDtypeStruct((3,), jnp.int32)

    def loss(q, k, v, cu, **options):
        out = pallas_kernels.varlen_attention(q, k, v, cu_seqlens_q=cu, max_seqlen=128, **options)
        return out.sum(dtype=jnp.float32)

    jax.eval_shape(jax.grad(loss), q, k, k, cu)
    assert taken == [FORWARD, BACKWARD]
    options = {"deterministic": False, "implementation": "hopper"}  # not measured
    jax.eval_shape(jax.grad(functools.partial(loss, **options)), q, k, k, cu)
    assert taken[3].fused


def test_what_is_to_be_tuned():
    every = list(tunings.tunings())
    assert len({(t.op, *t.key.items()) for t in every}) == len(every) == 3 * (len(CASES) - 3)
    for tuning in every:
        width, longest = int(tuning.key["width"]), tuning.key["longest"]
        group, fixed = tuning.key["group"], tuning.key.get("deterministic", True)
        if tuning.op == tiling.FORWARD:
            assert tuning.candidates[0] == hopper_forward.heuristic(width, group, longest)
            assert {t.overlap for t in tuning.candidates} == {True, False}
            checks = [hopper_forward.check(t, width, group, "bfloat16") for t in tuning.candidates]
        else:
            assert tuning.candidates[0] == hopper_backward.heuristic(width, longest, fixed)
            checks = [hopper_backward.check(t, width, "bfloat16") for t in tuning.candidates]
            assert any(t.fused for t in tuning.candidates) == (not fixed and width <= 128)
        assert len(set(tuning.candidates)) == len(checks) >= 2


def test_what_is_timed_takes_its_inputs():
    for tuning in tunings.tunings([Case("tiny", (60, 68), (2, 1), 64, True)]):
        function = tuning.function(tuning.candidates[0], True)
        shapes = jax.eval_shape(function, *jax.eval_shape(tuning.inputs, jax.random.key(0)))
        assert shapes[0].shape == (128, 2, 64)
