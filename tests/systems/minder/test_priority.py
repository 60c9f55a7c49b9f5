"""The order of metrics that labelled faults teach, and what `fit` says of untrained networks."""

import itertools

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor.samples import Grid
from megajax.systems.minder import Detector, fit

BEGIN = 1_700_000_000


def gini(labels):
    share = np.mean(labels) if len(labels) else 0.0
    return len(labels) * (1 - share**2 - (1 - share) ** 2)


def test_the_best_split_is_that_of_all_splits():
    rng = np.random.default_rng(0)
    for trial in range(30):
        z = rng.integers(0, 6, (25, 3)).astype(float)  # with ties
        fault = rng.random(25) < 0.2 + 0.1 * z[:, trial % 3]
        told = {}
        for c, cut in itertools.product(range(3), np.arange(0.5, 6)):
            left = z[:, c] <= cut
            if left.sum() >= 3 and (~left).sum() >= 3:
                told[c, cut] = gini(fault) - gini(fault[left]) - gini(fault[~left])
        split = fit.best_split(z, fault, least=3)
        assert split is not None
        c, threshold, decrease = split
        assert decrease == pytest.approx(max(told.values()))
        left = z[:, c] <= threshold
        assert gini(fault) - gini(fault[left]) - gini(fault[~left]) == pytest.approx(decrease)


def test_the_telling_metric_comes_first_and_a_constant_one_last():
    rng = np.random.default_rng(1)
    fault = rng.random(2000) < 0.3
    z = rng.random((2000, 4))
    z[:, 2] += 0.8 * fault
    z[:, 0] += 0.3 * fault
    z[:, 1] = 0.5
    order = fit.order(z, fault, ("a", "b", "c", "d"))
    assert order[:2] == ("c", "a") and order[-1] == "b"
    assert fit.order(z, np.zeros(2000, bool), ("a", "b", "c", "d")) == ("a", "b", "c", "d")


def test_a_lone_machine_has_the_same_feature_at_any_size():
    for machines in (4, 16, 200):
        levels = np.zeros((1, machines, 5))
        levels[0, 1] = 1.0
        levels[0, 0, 3] = np.nan
        np.testing.assert_allclose(fit.peak_scores(levels), 1.0, rtol=1e-6)


def jobs():
    rng = np.random.default_rng(2)
    values = 50 + rng.standard_normal((3, 6, 900))
    values[1, 2, 300:700] += 30  # the middle one is that in which faults show
    names = tuple(f"m{i}" for i in range(6))
    return [Grid(BEGIN, 1, values.astype(np.float32), names, ("a", "b", "c"))]


@pytest.mark.slow  # compiles a training
def test_fit_learns_the_order_keeps_it_and_says_when_it_is_nearly_blind(tmp_path):
    told = []
    faults = [[(BEGIN + 300, BEGIN + 700)]]
    detector = Detector.fit(jobs(), steps=2, faults=faults, tell=told.append)
    assert detector.profile.priority[0] == "b"
    assert detector.profile.metrics == ("a", "b", "c")
    assert any("nearly blind" in line for line in told)
    assert detector.profile.report["learnt"] < 0.5
    detector.save(tmp_path / "model.npz")
    assert Detector.load(tmp_path / "model.npz").profile.priority == detector.profile.priority
    with pytest.raises(UserError, match="2 lists of intervals for 1 sources"):
        Detector.fit(jobs(), steps=2, faults=[[], []])
