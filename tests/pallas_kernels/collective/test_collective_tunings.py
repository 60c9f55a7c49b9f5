"""What a tuner measures of the fused products on one GPU, which is not here."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret as interpreter
from pallas_kernels.collective import api, fusions
from pallas_kernels.collective import bench as tunings
from pallas_kernels.collective.bench import Case
from pallas_kernels.collective.cases import RANKS
from pallas_kernels.hopper import fused
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.tiles import Tile

R = 2


def values(*shapes, seed):
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.integers(-2, 3, shape), jnp.bfloat16) for shape in shapes]


SELDOM = pytest.param("all_gather_matmul", marks=pytest.mark.slow)


@pytest.mark.parametrize("op", [SELDOM, "matmul_reduce_scatter"])
def test_what_a_tuner_measures_is_right(op, seed):
    """A tuning of two ranks, interpreted: its kernel gives what it is compared with."""
    case = Case(op, 2 * 64, 64, 128, R)
    tuning = tunings.tuning(case)
    first = dataclasses.replace(tuning.candidates[0], tile=Tile(64, 128, 64, 2, 1, 1), chunk=64)
    pages = 1 if op == "all_gather_matmul" else R
    x, w = values((pages, 64, 64), (1, 64, 128), seed=seed)
    assert jax.tree.map(jnp.shape, tuning.inputs(jax.random.key(0))) == (x.shape, w.shape)
    with interpreter.checked():
        result = np.asarray(tuning.function(first, True)(x, w), np.float64)
    want = np.asarray(tuning.want(x, w), np.float64)
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(result, want)


def test_tunings_are_legal_and_differ():
    """Of each the heuristic's fusion comes first, and the table's row is read back as it was."""
    every = tunings.tunings()
    assert len({(t.op, *t.key.values()) for t in every}) == len(every) == 26
    for case, tuning in zip(tunings.tuned_cases(), every, strict=True):
        sizes = RANKS, case.rows, case.K, [case.N], case.spec.out_dtype
        assert tuning.candidates[0] == fusions.heuristic(case.op, *sizes)
        assert len(set(tuning.candidates)) == len(tuning.candidates) > 1
        for fusion in tuning.candidates:
            fused.clusters_of(case.op, fusion, case.ghost(fusion, 1e9), SMS, case.op != api.REDUCE)
            assert fusions.load(dataclasses.asdict(fusion)) == fusion


@pytest.mark.parametrize("op", [api.SCATTER, api.REDUCE])
def test_a_rivals_sums_travel_in_16_bits(op):
    """As a model's own do; those that fused kernels are judged beside, in float32 as theirs."""
    case = Case(op, 64, 64, 128, 8)
    fusion = case.fusions()[0]
    alike = functools.partial(case.serial, case.alone(fusion, 1e9), fusion)
    for function, wire in ((tunings.tuning(case).reference, "bfloat16"), (alike, "float32")):
        jaxpr = jax.make_jaxpr(function)(*case.arguments)
        calls = [eqn for eqn in jaxpr.eqns if "name=all_gather" in str(eqn)]
        assert calls and all(call.outvars[0].aval.dtype == wire for call in calls)


def test_the_copies_of_an_all_reduce_are_the_fewest():
    """A scatter's and a gather's, of (R - 1) / R of the sums each, whatever the rows."""
    for case in (c for c in tunings.tuned_cases() if c.op == api.REDUCE):
        fusion, sums = case.fusions()[0], case.m * case.N
        peers = case.alone(fusion, 1e9)
        parts = jax.ShapeDtypeStruct((1, case.m, case.N), jnp.float32)
        text = str(jax.make_jaxpr(functools.partial(case.copy, peers, fusion))(parts))
        assert text.count("name=all_gather") == 2 and f"f32[8,8,{sums // 64}]" in text
        assert peers.bytes_per_s * 7 == 1e9
