"""Floors of the named shapes, by hand, and every tuning's first candidate."""

import jax.numpy as jnp
import pytest

from pallas_kernels.norm import bench as tunings
from pallas_kernels.norm import configs, hopper
from pallas_kernels.norm.cases import CASES, Case


def test_floors():
    plain = Case("x", 10, 8, added=False)
    assert plain.bytes() == 2 * 80 * 2 and plain.bytes(backward=True) == 3 * 80 * 2  # x, y; h dy dx
    added = Case("x", 10, 8)
    assert added.bytes() == 4 * 80 * 2 and added.bytes(backward=True) == 4 * 80 * 2
    unpacked = Case("x", 10, 8, padded_rows=16)
    assert unpacked.bytes() == (3 * 80 + 128) * 2 and unpacked.bytes(backward=True) == 3 * 80 * 2
    large = next(c for c in CASES if c.name == "layer 32k x 1024")
    assert large.floor_s() == pytest.approx(4 * 64 * 2**20 / 4.8e12)
    assert len({case.name for case in CASES}) == len(CASES)


def test_what_is_tuned_fits():
    every = list(tunings.tunings())
    assert len(every) == 2 * len(CASES)
    assert {t.op for t in every} == {"fused_layer_norm", "fused_layer_norm_backward"}
    for case, backward in ((case, b) for case in CASES for b in (False, True)):
        problem, _, args = configs.kernel(case, backward)
        tiles = tunings.candidates(problem)
        assert tiles[0] == hopper.heuristic(problem) and len(tiles) == len(set(tiles))
        assert not [reason for tile in tiles for reason in hopper.misfits(problem, tile)]
        assert args[0].shape == (case.rows, case.width) and args[0].dtype == jnp.bfloat16
