"""Floors of the named products by hand, what the tuner is offered, and what is dispatched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import TileSparse
from pallas_kernels.hopper import tiles
from pallas_kernels.tile_sparse import api, cases, configs, hopper, hopper_weights
from pallas_kernels.tile_sparse import bench as tunings
from pallas_kernels.tile_sparse.cases import CASES, Case
from tests import tables

SMALL = Case(256, 128, 192, 50, tile=64)


def test_floors():
    """2 chunks, 3 tiles: 3 of 6 slots, which are in both chunks and in two tiles."""
    live_CT = SMALL.kept_CT
    assert live_CT.sum() == 3 and live_CT.any(1).all() and live_CT.any(0).sum() == 2
    assert SMALL.flops() == 2 * 256 * 3 * 64 * 64 and SMALL.flops(True) == 2 * SMALL.flops()
    x, w, y, dy = 256 * 128, 3 * 64 * 64, 256 * 192, 256 * 128
    assert SMALL.bytes() == 2 * (x + w + y)
    assert SMALL.bytes(backward=True) == 2 * (x + 2 * w + dy + x)
    large = next(c for c in CASES if c.name == "4096x16384 0%")
    assert large.floor_s() == pytest.approx(2 * 12800 * 4096 * 16384 / 989.5e12)


def test_cases_are_as_sparse_as_they_say():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        dense = 2 * case.M * case.K * case.N
        assert case.flops() / dense == pytest.approx(1 - case.sparsity / 100, abs=0.01)
    gathered = next(c for c in CASES if c.columns < 1)
    assert gathered.mask.mean() == pytest.approx(0.25, abs=0.01)
    assert gathered.mask.any(0).mean() == pytest.approx(0.5)


def test_what_is_known_without_a_mask_is_what_the_mask_gives():
    for case in (SMALL, dataclasses.replace(SMALL, columns=0.7, chunk=8)):
        known, pattern = case.abstract, cases.pattern(case)
        assert jax.tree.structure(known) == jax.tree.structure(pattern)
        for one, other in zip(jax.tree.leaves(known), jax.tree.leaves(pattern), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_every_product_of_a_case_is_tuned_once_with_legal_tiles():
    every = tunings.tunings()
    products = [(c, k) for c in CASES for k in configs.KINDS if k != "dx" or c.chunk >= 32]
    assert len({tuple(t.key.items()) for t in every}) == len(every)
    for tuning, (case, kind) in zip(every, products, strict=True):
        assert len(set(tuning.candidates)) == len(tuning.candidates) >= 6
        for tile in tuning.candidates:
            if kind == "dw":
                hopper_weights.check(tile, case.abstract.unit)
            else:
                shape = hopper.shape_of(case.abstract, kind == "dx")
                assert hopper.cut(tile, shape) == tile
                tiles.check("x", tile, hopper.GRAIN)


@pytest.mark.parametrize("kind", configs.KINDS)
def test_what_is_timed_gives_what_the_reference_gives(kind):
    tuning = tunings.tuning(SMALL, kind)
    args = jax.eval_shape(tuning.inputs, jax.random.key(0))
    result = jax.eval_shape(tuning.function(tuning.candidates[0], True), *args)
    assert result == jax.eval_shape(tuning.reference, *args)


def test_the_default_is_the_reference_until_a_table_says_otherwise(monkeypatch, tmp_path):
    weight = TileSparse.from_dense(jnp.zeros((128, 192), jnp.bfloat16), SMALL.mask, tile=64)
    x = jnp.zeros((256, 128), jnp.bfloat16)

    def ways(dtype="bfloat16"):
        with tables.on(tables.H100):
            static = api._static(x.astype(dtype), weight, "gelu", None)
        return static.forward, static.backward, static.tile.stages

    assert ways()[:2] == ("library", "library")
    rows = [
        tables.row(api.OP, api.key(x.dtype, kind, word, weight.pattern, 256), tile=tile)
        for kind, word in (("forward", "gelu"), ("dx", None), ("dw", None))
        for tile in (dict(block_m=128, stages=3),)
    ]
    tables.write(monkeypatch, tmp_path, *rows)
    assert ways() == ("measured", "measured", 3)
    assert ways("float16")[:2] == ("library", "library")  # a row speaks for its own type
    tables.write(monkeypatch, tmp_path, *rows[:2], rows[2] | {"fastest": "reference"})
    assert ways() == ("measured", "library", 3)


def test_what_cannot_run_says_why():
    mask = np.ones((128, 64), bool)
    weight = TileSparse.from_dense(jnp.zeros((128, 64)), mask, tile=40, chunk=7)
    with pytest.raises(NotImplementedError) as error:
        api.tile_sparse_matmul(jnp.zeros((4, 128)), weight, implementation="hopper")
    for reason in ("float32", r"tiles of (64, 128, 256) columns, found 40", "rows, found 7"):
        assert reason in str(error.value)
    narrow = TileSparse.from_dense(jnp.zeros((128, 64), jnp.bfloat16), mask)
    x = jnp.zeros((4, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="tile_sparse_matmul.* is for CUDA, .* for cpu"):
        api.tile_sparse_matmul(x, narrow, implementation="hopper")
    with pytest.raises(NotImplementedError, match="something to compute"):
        api.tile_sparse_matmul(x[:0], narrow, implementation="interpret")
