"""Gaps and verdicts of SDP4Bit's study, from rows written by hand; a run that is only counted."""

import json
import math

import jax
import numpy as np
import pytest

from experiments.reports import sdp4bit
from experiments.reports.sdp4bit import FLOAT32, VARIANTS
from megajax.core.errors import UserError
from megajax.monitor import results
from megajax.parallel import wire

# Percent above float32, in the paper's order.
PERCENT = {
    FLOAT32: 0.0,
    "qWD": 0.02,
    "TLq-HS": 0.1,
    "TLq": 0.5,
    "qW": 6.0,
    "SDP4Bit": 0.12,
    "ZeRO++": 0.9,
    "fp8": 1.0,
}
BASE = (2.0, 2.5, 3.0)  # float32's loss of each seed: gaps must not depend on it


def run(variant, seed, loss, **changes):
    return {
        "part": "run",
        "variant": variant,
        "seed": seed,
        "loss": loss,
        "loss_masters": loss,
        "drift": 0.0,
        "tokens": 10,
        "data": f"data{seed}",
        "steps": [1],
        "losses": [loss],
    } | changes


def study(percent=PERCENT, spread=0.01, seeds=3, **changes):
    """Runs whose gaps are `percent`, the seeds apart by `spread` percent around them."""
    return [
        run(v, s, BASE[s] * (1 + (p + (s - 1) * spread * (v != FLOAT32)) / 100), **changes)
        for v, p in percent.items()
        for s in range(seeds)
    ]


def verdicts(rows):
    return {r["what"]: r for r in sdp4bit.claims(rows)}


def test_gaps_are_means_of_pairs_and_their_errors():
    rows = {r["variant"]: r for r in sdp4bit.gaps(study(spread=0.3))}
    assert list(rows) == [v for v in VARIANTS if v in PERCENT]
    for variant, row in rows.items():
        assert row["gap_percent"] == pytest.approx(PERCENT[variant], abs=1e-9)
        error = 0.0 if variant == FLOAT32 else 0.3 / math.sqrt(3)
        assert row["gap_error"] == pytest.approx(error, abs=1e-9) and row["n"] == 3
    assert rows[FLOAT32]["loss"] == pytest.approx(2.5)
    assert rows[FLOAT32]["loss_error"] == pytest.approx(0.5 / math.sqrt(3))
    assert rows["SDP4Bit"]["paper_percent"]["1.3B"] == pytest.approx(0.2407, abs=1e-4)
    assert rows["qW"]["paper_percent"]["125M"] == pytest.approx(12.17, abs=0.01)
    assert rows["ZeRO++"]["paper_percent"] == {}
    alone = {r["variant"]: r for r in sdp4bit.gaps(study(seeds=1))}
    assert alone["qW"]["gap_error"] is None
    assert not list(sdp4bit.gaps([run("qW", 0, 2.0)]))  # nothing to compare with


def test_the_papers_own_table_meets_its_claims():
    """Its three models as if they were three seeds."""
    losses = list(sdp4bit.PAPER.values())
    rows = [run(v, s, of_model[v]) for s, of_model in enumerate(losses) for v in of_model]
    claims = verdicts(rows)
    assert len(claims) == 6 and all(r["met"] for r in claims.values())
    assert claims["SDP4Bit at most 0.24 % above float32"]["value"] == pytest.approx(
        0.1486, abs=1e-3
    )


def test_what_is_as_claimed_is_met():
    claims = verdicts(study())
    assert len(claims) == 7
    assert all(r["met"] and r["sure"] for r in claims.values())


@pytest.mark.parametrize(
    ("changed", "broken"),
    [
        ({"SDP4Bit": 0.3}, {"SDP4Bit at most 0.24 % above float32"}),
        (
            {"SDP4Bit": 0.6},
            {"SDP4Bit at most 0.24 % above float32", "SDP4Bit at most 0.5 % above float32"},
        ),
        ({"qWD": 0.2}, {"qWD below TLq-HS"}),
        ({"TLq-HS": 0.51}, {"TLq-HS below TLq"}),
        ({"TLq": 2.0}, {"qW's gap over 4 times TLq's"}),
        ({"qW": 0.4}, {"TLq below qW", "qW's gap over 4 times TLq's"}),
        ({"qW": -0.1, "TLq": -1.0}, {"TLq-HS below TLq", "qW's gap over 4 times TLq's"}),
        ({"ZeRO++": 0.1}, {"SDP4Bit below ZeRO++"}),
    ],
)
def test_what_is_not_as_claimed_is_not_met(changed, broken):
    claims = verdicts(study(PERCENT | changed))
    assert {what for what, row in claims.items() if not row["met"]} == broken


def test_noise_is_not_sure_and_one_seed_cannot_tell():
    noisy = verdicts(study(spread=3.0))["qWD below TLq-HS"]
    assert noisy["met"] and noisy["sure"]  # the seeds move both alike: the pairs agree
    rows = study(PERCENT | {"TLq-HS": 0.03})
    rows = [
        r | {"loss": r["loss"] * (1 + 1e-3 * (r["seed"] == 2) * (r["variant"] == "qWD"))}
        for r in rows
    ]
    assert not verdicts(rows)["qWD below TLq-HS"]["sure"]
    assert verdicts(study(seeds=1))["qWD below TLq-HS"]["sure"] is None


def test_a_loss_that_is_not_finite_meets_nothing():
    claims = verdicts(study(PERCENT | {"SDP4Bit": math.nan, "qW": math.inf, "qWD": math.nan}))
    for what in (
        "SDP4Bit at most 0.5 % above float32",
        "qWD below TLq-HS",
        "SDP4Bit below ZeRO++",
    ):
        assert not claims[what]["met"] and not claims[what]["sure"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (run("qW", 1, 2.6, data="other"), "qW, seed 1 read other data"),
        (run("qW", 1, 2.6, tokens=11), "qW, seed 1 read other data"),
        (run(FLOAT32, 1, 2.5), "two runs of float32, seed 1"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(row, message):
    rows = [r for r in study() if (r["variant"], r["seed"]) != ("qW", 1)]
    for function in (sdp4bit.gaps, sdp4bit.claims):
        with pytest.raises(UserError, match=message):
            list(function([*rows, row]))


def test_a_claim_needs_all_its_variants():
    rows = [r for r in study() if r["variant"] not in ("TLq", "SDP4Bit")]
    assert set(verdicts(rows)) == {"qWD below TLq-HS"}
    assert not verdicts([r for r in study() if r["variant"] != FLOAT32])


def test_a_saved_run_is_read_back_and_a_broken_one_is_told(tmp_path):
    path = sdp4bit.saved(tmp_path, "qW", 2)
    assert path.name == "qW-2.json" and sdp4bit.saved_run(path) is None
    path.write_text(json.dumps({"rows": [run("qW", 2, 2.5)]}))
    assert sdp4bit.saved_run(path) == run("qW", 2, 2.5)
    results.write(path, {}, [run("qW", 2, math.inf)])  # a run that diverged: null in JSON
    again = sdp4bit.saved_run(path)
    assert again is not None and math.isnan(again["loss"]) and math.isnan(again["losses"][0])
    for bad in (
        "{",
        '{"rows": []}',
        '{"rows": 3}',
        json.dumps({"rows": [run("qW", 2, "2.5")]}),
        json.dumps({"rows": [run("loco", 2, 2.5)]}),
        json.dumps({"rows": [{"part": "run"}]}),
    ):
        path.write_text(bad)
        with pytest.raises(UserError, match=r"qW-2.json holds no run: .*remove it \(--state\)"):
            sdp4bit.saved_run(path)


STUDY = sdp4bit.Study(
    layers=1, width=32, steps=3, batch=4, seq_len=16, nodes=2, ranks=2, held_out=1, evals=1
)


def test_the_flags_of_a_variant_give_its_exchange():
    """(weights, inside, between) as bits, whether transformed, whether differences."""

    def sent(variant):
        cfg = sdp4bit.job(STUDY, variant)
        cfg.check(cfg.mesh.sizes(4))
        assert cfg.zero == "optimizer"
        used = wire.codec(cfg)
        levels = (used.weights, used.inside, used.between)
        bits = [32 if c.format is None else c.format.bits for c in levels]
        return (*bits, bool(used.hadamard) and bits[1] != 32, wire.sends_differences(cfg))

    assert {v: sent(v) for v in VARIANTS} == {
        FLOAT32: (32, 32, 32, False, False),
        "qW": (4, 32, 32, False, False),
        "qWD": (4, 32, 32, False, True),
        "TLq": (32, 8, 4, False, True),
        "TLq-HS": (32, 8, 4, True, True),
        "SDP4Bit": (4, 8, 4, True, True),
        "ZeRO++": (8, 4, 4, False, False),
        "LoCo": (32, 4, 4, False, False),
        "fp8": ("e4m3", "e4m3", "e4m3", False, False),
    }


@pytest.mark.slow  # CI runs the preset
def test_weights_in_use_are_what_a_wire_gives(tmp_path):
    """qW: no more than 8 magnitudes in a group; the float32 exchange: the masters."""
    runner = sdp4bit.Runner(STUDY, "qW", str(tmp_path))
    state = runner.step.init(1)
    used, masters = runner.used(state), state.params
    for x in _matrices(used):  # 8 magnitudes a group, which may begin and end in other leaves
        groups = 4 * (x.size // 4 // 2048 + 2)
        assert len(np.unique(np.abs(np.asarray(x)))) <= 8 * groups < x.size // 10
    plain = sdp4bit.Runner(STUDY, FLOAT32, str(tmp_path))
    again = plain.used(plain.step.init(1))
    for a, b in zip(_matrices(again), _matrices(masters), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    row = runner.run(1)
    other = plain.run(1)
    assert (row["data"], row["tokens"]) == (other["data"], other["tokens"])
    assert row["data"] != runner.run(2)["data"] and row == runner.run(1)
    assert row["loss"] != row["loss_masters"] and other["loss"] == other["loss_masters"]
    assert row["tokens"] == 3 * 4 * 16


def _matrices(tree):
    return [x for x in jax.tree.leaves(tree) if x.ndim >= 2 and x.size > 2048]
