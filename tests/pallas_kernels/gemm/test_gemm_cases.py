"""Floors of the named products by hand, and what the tuner is offered."""

import jax
import pytest

from pallas_kernels.gemm import bench as tunings
from pallas_kernels.gemm.cases import CASES, Case
from pallas_kernels.hopper import tiles


def test_floors():
    case = Case("x", 2, 3, 5, "gelu", bias=True, residual=True)
    assert case.flops() == 2 * 2 * 3 * 5 and case.flops(backward=True) == 2 * case.flops()
    assert case.bytes() == 2 * (10 + 15 + 6 + 6) + 12
    assert case.bytes(backward=True) == 2 * (2 * 10 + 2 * 15 + 2 * 6) + 12
    large = next(c for c in CASES if c.name == "square 8192")
    assert large.floor_s() == pytest.approx(2 * 8192**3 / 989.5e12)


def test_the_papers_tokens():
    """16 x 1024 x 0.6 tokens, in whole buckets of 128; names are unique."""
    assert {c.M for c in CASES if c.name.startswith("bert 1024")} == {9856}
    assert len({case.name for case in CASES}) == len(CASES)


def test_every_product_of_a_case_is_tuned_once_with_legal_tiles():
    every = tunings.tunings()
    trained = sum(case.trained for case in CASES)
    assert 0 < trained < len(CASES) and len(every) == 2 * trained + len(CASES)
    assert len({tuple(t.key.items()) for t in every}) >= len(every) - 6  # equal dx, dw
    for tuning in every:
        assert len(set(tuning.candidates)) == len(tuning.candidates) > 10
        for tile in tuning.candidates:
            tiles.check("x", tile)
        if tuning.key["M"] <= 128:
            assert {tile.splits for tile in tuning.candidates} >= {1, 2, 4}


@pytest.mark.parametrize("kind", ["forward", "dx", "dw"])
def test_what_is_timed_has_the_shapes_of_its_key(kind):
    tuning = tunings.tuning(Case("x", 256, 128, 64, bias=True, residual=True), kind)
    args = jax.eval_shape(tuning.inputs, jax.random.key(0))
    call = tuning.function(tuning.candidates[0], True)
    y, z = jax.eval_shape(call, *args)
    assert y.shape == (tuning.key["M"], tuning.key["N"]) and z is None
