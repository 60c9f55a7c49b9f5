"""Measured tiles and implementations, from a table that a test writes."""

import functools
import json
import logging

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import tuned
from pallas_kernels.attention import api, configs, hopper_backward, hopper_forward, tiling
from pallas_kernels.attention.cases import CASES, Case

SHAPE = ("bfloat16", 64, 2, 256, 128)  # type, width, group, tokens, longest
FORWARD = hopper_forward.Tile(64, 3)
BACKWARD = hopper_backward.Tile(32, 3, 32, 3)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes the rows of this process's GPU, of which there is none."""
    find = tuned.find
    monkeypatch.setattr(tuned, "find", lambda op, key: find(op, key, kind="chip", folder=tmp_path))

    def write(*rows):
        (tmp_path / "chip.json").write_text(json.dumps({"rows": rows}))

    return write


def row(op, tile, fastest="hopper", **key):
    key = tiling.key(*SHAPE) | ({"deterministic": True} if op == tiling.BACKWARD else {}) | key
    return {"op": op, "key": key, "tile": vars(tile), "fastest": fastest}


def test_without_a_table_the_heuristics_decide():
    assert tiling.choose(*SHAPE, True) == (
        [], hopper_forward.heuristic(64, 2, 128), hopper_backward.heuristic(64, 128),
    )  # fmt: skip


def test_measured_tiles_are_taken(table):
    table(row(tiling.FORWARD, FORWARD), row(tiling.BACKWARD, BACKWARD))
    assert tiling.choose(*SHAPE, True) == ([], FORWARD, BACKWARD)
    # A row for a fixed order of additions says nothing of the other.
    assert tiling.choose(*SHAPE, False)[2].fused


def test_a_tile_of_another_width_that_does_not_fit_is_passed_over(table):
    table(row(tiling.FORWARD, hopper_forward.Tile(128, 6)))
    assert tiling.choose(*SHAPE, True)[1] == hopper_forward.Tile(128, 6)
    wide = ("bfloat16", 256, 2, 256, None)
    assert tiling.choose(*wide, True)[1] == hopper_forward.heuristic(256, 2)


def test_where_another_was_faster_the_default_is_the_reference_and_says_why(table, caplog):
    table(row(tiling.BACKWARD, BACKWARD, fastest="reference"))
    q, k = (jnp.zeros((256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    with caplog.at_level(logging.WARNING):
        assert api._choose("tuned op", q, k, None, 128, True)[0] == "reference"
    (said,) = (r.getMessage() for r in caplog.records if "tuned op" in r.getMessage())
    assert "reference was measured to be faster at" in said and "'longest': 128" in said
    assert api._choose("tuned op", q, k, "hopper", 128, True)[0] == "hopper"
    assert api._choose("tuned op", q, k, None, 128, False)[0] == "auto"


def test_the_public_function_hands_the_measured_tiles_to_the_kernels(table, monkeypatch):
    table(row(tiling.FORWARD, FORWARD), row(tiling.BACKWARD, BACKWARD))
    taken = []

    def record(choice, hopper, reference, *args, op):
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
    jax.eval_shape(jax.grad(functools.partial(loss, deterministic=False)), q, k, k, cu)
    assert taken[3].fused


def test_what_is_to_be_tuned():
    found = list(configs.tunings())
    assert len({(t.op, *t.key.items()) for t in found}) == len(found) == 3 * (len(CASES) - 3)
    for tuning in found:
        width, longest = tuning.key["width"], tuning.key["longest"]
        group, fixed = tuning.key["group"], tuning.key.get("deterministic", True)
        if tuning.op == tiling.FORWARD:
            assert tuning.candidates[0] == hopper_forward.heuristic(width, group, longest)
            checks = [hopper_forward.check(t, width, group, "bfloat16") for t in tuning.candidates]
        else:
            assert tuning.candidates[0] == hopper_backward.heuristic(width, longest, fixed)
            checks = [hopper_backward.check(t, width, "bfloat16") for t in tuning.candidates]
            assert any(t.fused for t in tuning.candidates) == (not fixed and width <= 128)
        assert len(set(tuning.candidates)) == len(checks) >= 2


def test_what_is_timed_takes_its_inputs():
    for tuning in configs.tunings([Case("tiny", (60, 68), (2, 1), 64, True)]):
        function = tuning.function(tuning.candidates[0], True)
        shapes = jax.eval_shape(function, *jax.eval_shape(tuning.inputs, jax.random.key(0)))
        assert shapes[0].shape == (128, 2, 64)
