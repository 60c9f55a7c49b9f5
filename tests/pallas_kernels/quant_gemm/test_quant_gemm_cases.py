"""Floors of the named shapes by hand, what the tuner and the benchmark are given, the default."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.hopper import tiles
from pallas_kernels.quant_gemm import api, bench, hopper
from pallas_kernels.quant_gemm import bench as tunings
from pallas_kernels.quant_gemm.cases import CASES, SERVED, Case
from pallas_kernels.quant_gemm.reference import Spec
from tests import tables


def test_floors():
    case = Case("x", 2, 3, 40, 3, 16, zeros=True, bias=True)
    assert case.flops() == 2 * 2 * 3 * 40 and not case.flops(backward=True)
    # 40 codes are 15 bytes, and three groups, the last of which is short.
    assert case.bytes() == 15 * 3 + 2 * 4 * 3 * 3 + 2 * (2 * 40 + 2 * 3) + 4 * 3
    decode = next(c for c in CASES if c.name == "decode 1 gate int4")
    weight = 14336 * 4096 * (0.5 + 4 / 128)
    assert decode.floor_s() == pytest.approx(weight / 4.8e12, rel=2e-3)  # memory alone
    prefill = next(c for c in CASES if c.name == "prefill 8192 gate int8")
    assert prefill.floor_s() == pytest.approx(2 * 8192 * 14336 * 4096 / 989.5e12)
    assert len({c.name for c in CASES}) == len(CASES)


def test_every_case_is_tuned_once_with_legal_tiles():
    every, cases = tunings.tunings(), (*CASES, *SERVED)
    assert len(every) == len(cases) == len({tuple(t.key.items()) for t in every})
    for tuning, case in zip(every, cases, strict=True):
        assert len(set(tuning.candidates)) == len(tuning.candidates) > 3
        assert tuning.candidates[0] == hopper.heuristic(case.M, case.N, case.K, case.spec)
        for tile in tuning.candidates:
            hopper.check(tile, case.spec)
            tiles.check_shared("x", hopper.buffers(tile, case.spec, jnp.bfloat16))


@pytest.mark.parametrize("zeros", [False, True])
def test_what_is_timed_has_the_shapes_of_its_key(zeros):
    case = Case("x", 24, 160, 128, 4, 64, zeros=zeros, bias=True)
    tuning = tunings.tuning(case)
    args = jax.eval_shape(tuning.inputs, jax.random.key(0))
    for call in (tuning.function(tuning.candidates[0], True), tuning.reference):
        assert jax.eval_shape(call, *args).shape == (24, 160)


@pytest.mark.slow
def test_the_benchmark_notices_a_wrong_result(monkeypatch):
    """Each side has the shapes of the case; 5 % too much is more than the bound."""
    case = bench.CHECKED[1]
    for function, like in (build() for build in bench.sides(case, "reference").values()):
        assert jax.eval_shape(function, *like).shape == (case.M, case.N)
    assert bench.errors(case, "reference")["out"] <= 0.51
    right = api.quant_matmul

    def wrong(*args, implementation, **options):
        y = right(*args, implementation="reference", **options)
        return y if implementation == "reference" else (y * 1.05).astype(y.dtype)

    monkeypatch.setattr(bench.pallas_kernels, "quant_matmul", wrong)
    assert bench.errors(case, "hopper")["out"] > 1


def test_the_default_is_the_reference_until_a_table_says_otherwise(monkeypatch, tmp_path):
    x, spec = jnp.zeros((16, 128), jnp.bfloat16), Spec(4, 64)

    def ways():
        with tables.on(tables.H100):
            static = api._static(x, 256, spec, None)
        return static.implementation, static.tile.stages

    assert ways()[0] == "library"
    tile = dict(block_m=128, block_n=16, block_k=64, stages=3, warpgroups=1)
    row = tables.row(api.OP, api.key(x.dtype, spec, 16, 256, 128), tile=tile)
    tables.write(monkeypatch, tmp_path, row)
    assert ways() == ("measured", 3)
    tables.write(monkeypatch, tmp_path, row | {"fastest": "reference"})
    assert ways()[0] == "library"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_size_that_was_not_tuned_gets_the_tile_of_its_dtype(dtype):
    x, spec = jnp.zeros((1024, 4096), dtype), Spec(4, 128)
    tile = hopper.heuristic(1024, 4096, 4096, spec, jnp.dtype(dtype))
    assert api._static(x, 4096, spec, "reference").tile == tile
    assert tile.block_k == {"bfloat16": 128, "float16": 64}[dtype]
