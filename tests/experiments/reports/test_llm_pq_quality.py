"""What few bits cost, on a small model: plans, indicators, roundings, plans of equal loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.reports import llm_pq_quality as quality
from experiments.reports.llm_pq_run import in_bits
from megajax.core.errors import UserError
from megajax.models import decoder
from megajax.quant import Format, Statistics
from megajax.quant.quantized_model import matrices
from megajax.systems.llm_pq import PRESETS, Placement
from megajax.systems.llm_pq.planning import problem_of
from megajax.systems.llm_pq.quality import calibrate, loss_of
from tests.tiny import MODEL


@pytest.fixture(scope="module")
def model():
    params = jax.jit(decoder.parts(MODEL).init)(jax.random.key(0))
    params = jax.tree.map(lambda w: 4 * w, params)  # what is rounded matters
    learnt, judged = np.random.default_rng(0).integers(0, MODEL.vocab, (2, 4, 24))
    return quality.Subject(
        "tiny", MODEL, params, learnt, judged, calibrate(params, MODEL, [*learnt[:, None, :]])
    )


@pytest.mark.slow
def test_a_mixed_plan_has_the_loss_of_the_quantized_model(model):
    params = {16: model.params}
    for width in (3, 4, 8):
        params[width] = quality.rounded(
            model, quality.to_nearest, Format(width, 128, 0, scale_dtype="float16")
        )[0]
    for bits in ((3, 16), (8, 4)):
        mixed = quality.in_widths(params, matrices(MODEL.axes), bits)
        mixed_loss = loss_of(mixed, MODEL, model.judged)
        quantized_loss = loss_of(in_bits(model.params, MODEL, bits), MODEL, model.judged)
        assert (
            mixed_loss == pytest.approx(quantized_loss, abs=2e-4)
            and abs(mixed_loss - model.dense) > 1e-3
        )


@pytest.mark.slow
def test_rows_of_indicators_and_roundings(model):
    random, alike = quality.indicator_rows(model, 5, 0)
    assert random["count"] == 5 and len(set(map(tuple, random["bits"]))) == 5
    assert sorted(map(tuple, alike["bits"])) == [(3, 4), (4, 3)]
    for name in quality.SAID:
        assert -1 <= random[f"spearman_{name}"] <= 1
    row, *_ = quality.rounding_rows(model, [4], 16, {"rtn": quality.to_nearest})
    params, error = quality.rounded(
        model, quality.to_nearest, Format(4, 16, 0, scale_dtype="float16")
    )
    assert row["product_error"] == error > 0
    assert row["loss_change"] == loss_of(params, MODEL, model.judged) - model.dense


def test_plans_have_equal_bytes():
    drawn = quality.plans(8, 6, 1)
    assert len(drawn["equal bytes"]) == 6
    assert {tuple(sorted(bits)) for bits in drawn["equal bytes"]} == {(3, 3, 4, 4, 8, 8, 16, 16)}


def test_a_cluster_scaled_down_is_as_tight_in_sum():
    workload, cluster = PRESETS["case5"]
    small = dataclasses.replace(
        workload, stack=MODEL.stack, vocab=MODEL.padded_vocab, positions=0, omega=None
    )
    scaled = quality.scaled_down(cluster, workload, small)
    large, shrunk = problem_of(workload, cluster), problem_of(small, scaled)

    def room(p):
        ends = p.first_bytes + p.last_bytes
        return (p.memory.sum() - ends) / p.layers - p.cache_bytes

    theirs, ours = (room(p) / p.layer_bytes.max() for p in (large, shrunk))
    assert ours == pytest.approx(theirs, rel=1e-3)
    shares = [p.memory / p.memory.sum() for p in (large, shrunk)]
    np.testing.assert_allclose(*shares, rtol=1e-3)


def test_the_fastest_plan_that_loses_no_more(monkeypatch):
    """Budgets grow while the measured loss allows it, and then halve; what loses more is out."""
    problem = problem_of(*PRESETS["case3"])
    rival = next(r for r in quality.rivals(problem) if r.name == "pipeedge")

    def plan(problem, *, quality, time_limit_s):  # of twice the budget, a layer less than 8 bits
        narrow = min(int(200 * quality), 48)
        bits = (4,) * narrow + (8,) * (48 - narrow)
        stages, speed = ((0, 0, 48),), 1000.0 + narrow
        return Placement(stages, bits, 1, 1, speed, 0.0, 1.0, 1.0, quality, "optimal")

    def measure(bits):
        return float(np.mean([b == 4 for b in bits])) if 4 in bits else 0.5

    monkeypatch.setattr(quality, "solve", plan)
    plans = quality.tried(problem, rival, measure, 1.0)
    budgets = [p["budget"] for p in plans]
    assert budgets[:2] == [rival.omega, 4 * rival.omega]
    assert max(budgets) == pytest.approx(rival.omega * 4.0**3)  # the first that loses more
    row = quality.compared(rival, measure(rival.bits), plans)
    assert row["ours"]["bits"].count(4) == 23 and row["loss_change"] == pytest.approx(23 / 48)
    assert row["speedup"] == pytest.approx(1023 / rival.times.tokens_per_s)
    assert quality.compared(rival, -1.0, plans)["ours"] is None


def test_qwix_rounds_the_same_matrix():
    """Its codes reach one further, so its error is near ours and not the same."""
    pytest.importorskip("qwix", reason="uv sync --group rivals")
    x = jax.random.normal(jax.random.key(0), (64, 16))
    w, statistics = jax.random.normal(jax.random.key(1), (16, 8)), Statistics.of(x)
    fmt = Format(4, 8, 0, scale_dtype="float16")
    for name, rounding in quality.roundings().items():
        ours = quality.OURS[name.removeprefix("qwix ")](w, statistics, fmt)
        with jax.numpy_rank_promotion("allow"):
            theirs = rounding(w, statistics, fmt)
        assert theirs.shape == w.shape
        assert 0.3 < float(statistics.error(theirs - w)) / float(statistics.error(ours - w)) < 2
    with pytest.raises(NotImplementedError, match="no 3 bits"):
        quality.qwix_by_gptq(w, statistics, Format(3, 8, 0))


def test_without_qwix(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="uv sync --group rivals"):
        quality.roundings()


def test_awq_divides_its_scales_out():
    x = jax.random.normal(jax.random.key(0), (64, 16)) * jnp.exp(jnp.arange(16) / 4)[None]
    w, statistics = jax.random.normal(jax.random.key(1), (16, 8)), Statistics.of(x)
    fmt = Format(8, 8, 0)
    assert float(jnp.abs(quality.by_awq(w, statistics, fmt) - w).max()) < 0.3
