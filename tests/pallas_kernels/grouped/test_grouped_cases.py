"""Floors of the named products by hand, and what the tuner is offered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped import api, configs, tiling
from pallas_kernels.grouped import bench as tunings
from pallas_kernels.grouped.cases import CASES, Case
from tests import tables


def test_floors():
    case = Case("x", 4, 2, 3, 5)
    assert case.flops() == 2 * 4 * 3 * 5 and case.flops(backward=True) == 2 * case.flops()
    assert case.bytes() == 2 * (12 + 30 + 20)
    assert case.bytes(backward=True) == 2 * (2 * 12 + 2 * 30 + 20)
    large = next(c for c in CASES if c.name == "mixtral e8 up")
    assert large.floor_s() == pytest.approx(2 * 16384 * 4096 * 14336 / 989.5e12)


def test_sizes_add_up_and_fit_no_tile():
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert case.sizes.shape == (case.G,) and case.sizes.sum() == case.M
        assert (case.sizes % 128).any()
    hot = next(c for c in CASES if c.hot)
    assert hot.sizes.max() / hot.M == pytest.approx(0.5 + 0.5 / hot.G, abs=0.02)


def test_every_product_of_a_case_is_tuned_once_with_legal_tiles():
    every = tunings.tunings()
    keys = {tuple(t.key.items()) for t in every}
    # A hot group has the shape of equal ones: the table's row is of the first.
    assert len(every) == 3 * len(CASES) and len(keys) == len(every) - 3
    for tuning in every:
        assert len(set(tuning.candidates)) == len(tuning.candidates) > 10
        for tile in tuning.candidates:
            tiling.check(tile)


@pytest.mark.parametrize("kind", configs.KINDS)
def test_what_is_timed_has_the_shapes_of_its_key(kind):
    tuning = tunings.tuning(Case("x", 256, 4, 64, 128), kind)
    args = jax.eval_shape(tuning.inputs, jax.random.key(0))
    result = jax.eval_shape(tuning.function(tuning.candidates[0], True), *args)
    key = tuning.key
    rows = (key["G"], key["K"]) if kind == "weights" else (key["M"],)
    assert result.shape == (*rows, key["N"])
    assert jax.eval_shape(tuning.reference, *args).shape == result.shape


def test_the_default_is_the_kernel_where_a_table_says_so(monkeypatch, tmp_path):
    lhs, rhs = jnp.zeros((64, 64), jnp.bfloat16), jnp.zeros((2, 64, 128), jnp.bfloat16)

    def ways(dtype="bfloat16"):
        with tables.on(tables.H100):
            static = api._static(lhs.astype(dtype), rhs.astype(dtype), False, None)
        return static.forward, static.backward, static.tile.stages

    assert ways()[:2] == ("library", "library")
    tile = dict(block_m=64, block_n=64, stages=3)
    rows = [
        tables.row(api.OP, api.key(lhs.dtype, kind, 2, 64, *sizes), tile=tile)
        for kind, *sizes in (("forward", 128, 64), ("transposed", 64, 128), ("weights", 128, 64))
    ]
    tables.write(monkeypatch, tmp_path, *rows)
    assert ways() == ("measured", "measured", 3)
    assert ways("float16")[:2] == ("library", "library")  # a row speaks for its own type
    tables.write(monkeypatch, tmp_path, *rows[:2], rows[2] | {"fastest": "reference"})
    assert ways() == ("measured", "library", 3)


def test_what_cannot_run_says_why():
    lhs, rhs, sizes = jnp.zeros((4, 16)), jnp.zeros((2, 16, 8)), jnp.array([1, 2])
    with pytest.raises(NotImplementedError, match="bfloat16 or float16, found float32"):
        api.grouped_matmul(lhs, rhs, sizes, implementation="hopper")
    narrow = lhs.astype("bfloat16"), rhs.astype("bfloat16"), sizes
    with pytest.raises(NotImplementedError, match="grouped_matmul.* is for CUDA, .* for cpu"):
        api.grouped_matmul(*narrow, implementation="hopper")
    with pytest.raises(NotImplementedError, match="something to compute, found M=0"):
        api.grouped_matmul(lhs[:0].astype("bfloat16"), *narrow[1:], implementation="interpret")
    assert np.all(np.asarray(api.grouped_matmul(*narrow)) == 0)
