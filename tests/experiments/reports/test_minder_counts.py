"""Counts of alerts, and figures made of them, against hand-made cases and brute force."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from experiments.reports import minder_runs
from experiments.reports.minder_runs import Item, items


def case(*faults, left=()):
    made = [{"machine": m, "start": s, "end": s + 600} for m, s in faults]
    return {"faults": made, "left": [list(x) for x in left]}


def said(*alerts):
    return [{"machine": m, "at": t} for m, t in alerts]


@pytest.mark.parametrize(
    ("case", "alerts", "named", "vain", "repeats"),
    [
        (case(), said(), [], 0, 0),
        (case(), said(("a", 50)), [], 1, 0),
        (case(("a", 100)), said(("a", 400)), [300], 0, 0),
        (case(("a", 100)), said(("a", 100)), [None], 1, 0),  # not after the onset
        (case(("a", 100)), said(("a", 90), ("a", 400)), [300], 1, 0),
        (case(("a", 100)), said(("b", 400)), [None], 1, 0),
        (case(("a", 100)), said(("a", 700), ("a", 400)), [300], 0, 1),  # in the order of time
        (case(("a", 100), ("b", 120)), said(("b", 420)), [None, 300], 0, 0),
        (case(("a", 100), ("b", 120)), said(("b", 420), ("a", 430)), [330, 300], 0, 0),
        (case(left=[("c", 200)]), said(("c", 260), ("c", 190)), [], 1, 0),
        (case(("a", 100)), said(("a", 5000)), [4900], 0, 0),  # after the halt: late, not wrong
    ],
)
def test_what_is_named_what_is_in_vain(case, alerts, named, vain, repeats):
    judgement = minder_runs.judged(case, alerts)
    assert judgement == {"named": named, "vain": vain, "repeats": repeats}
    hits = sum(x is not None for x in named)
    assert minder_runs.triple(case, alerts) == (hits, vain, len(named))


@pytest.mark.parametrize("named, vain, faults", [(8, 2, 10), (0, 0, 4), (0, 0, 0), (0, 3, 0)])
def test_f1_is_the_harmonic_mean(named, vain, faults):
    quality = minder_runs.quality(np.array([named, vain, faults]))
    p = Fraction(named, named + vain) if named + vain else Fraction(1)
    r = Fraction(named, faults) if faults else Fraction(1)
    assert (quality["precision"], quality["recall"]) == (pytest.approx(float(p)), float(r))
    if named:
        assert quality["f1"] == pytest.approx(float(2 * p * r / (p + r)))
    else:
        assert quality["f1"] == (1.0 if not vain + faults else 0.0)


def test_intervals_are_those_of_all_samples_of_few_cases():
    """Three cases have 27 samples; the bootstrap must draw from them alone, and evenly."""
    each = np.array([[1, 0, 1], [0, 1, 1], [1, 0, 1]])
    every = [
        minder_runs.quality(each[list(k)].sum(0))["f1"]
        for k in itertools.product(range(3), repeat=3)
    ]
    times = minder_runs.resampled([7, 7, 7], seed=1, samples=20_000)
    drawn = minder_runs.quality(times @ each)["f1"]
    assert np.mean(drawn) == pytest.approx(np.mean(every), abs=0.01)
    assert set(np.round(np.unique(drawn), 9)) == set(np.round(every, 9))
    assert minder_runs.summary(each, times)["f1_95"] == pytest.approx(
        np.percentile(every, (2.5, 97.5), method="inverted_cdf"), abs=1e-9
    )


def test_samples_keep_the_cases_of_a_size_and_pairs_stay_pairs():
    sizes = [4, 4, 4, 64, 64]
    times = minder_runs.resampled(sizes)
    assert (times[:, :3].sum(1) == 3).all() and (times[:, 3:].sum(1) == 2).all()
    ours = np.array([[1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0], [1, 0, 1]])
    same = minder_runs.difference(ours, ours, times)
    assert (same["f1_more"], same["f1_more_95"], same["better"]) == (0.0, [0.0, 0.0], False)
    worse = ours.copy()
    worse[:, 1] += 1  # a false alarm more in each case
    assert minder_runs.difference(ours, worse, times)["better"]
    assert not minder_runs.difference(worse, ours, times)["better"]


def test_rate_of_rare_events_has_the_exact_interval():
    """Garwood's bounds: the rates at which so few, or so many, have a chance of 2.5 %."""

    def at_most(k, mean):
        return math.exp(-mean) * sum(mean**i / math.factorial(i) for i in range(k + 1))

    rate = minder_runs.rate(3, 2.0)
    low, high = (2.0 * x for x in rate["a_day_95"])
    assert rate["a_day"] == 1.5
    assert 1 - at_most(2, low) == pytest.approx(0.025) == at_most(3, high)
    assert minder_runs.rate(0, 1.0)["a_day_95"] == [0.0, pytest.approx(-np.log(0.025))]


def test_cases_are_shared_out_as_the_flags_say():
    drawn = items("held_out", 5, [4, 64], [12, 6], ["evaluation", "even", "weak", "slow"], 2.0)
    by = {}
    for item in drawn:
        by[item.size, item.mix] = by.get((item.size, item.mix), 0) + 1
    assert by == {
        (4, "evaluation"): 6,
        (4, "even"): 2,
        (4, "weak"): 2,
        (4, "slow"): 2,
        (64, "evaluation"): 3,
        (64, "even"): 1,
        (64, "weak"): 1,
        (64, "slow"): 1,
        (1024, ""): 2,
    }
    assert len({i.name for i in drawn}) == len(drawn)
    seeds = {(i.mix, i.seed) for i in drawn}
    assert len(seeds) == 5 == len({s for _, s in seeds})  # no two mixes share their jobs
    one = Item("train", 3, "evaluation", 8, 2).case()
    again = Item("train", 3, "evaluation", 8, 2).case()
    assert one.faults == again.faults and one.fleet == again.fleet
