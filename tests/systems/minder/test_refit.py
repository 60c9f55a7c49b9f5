"""Rolling retraining: what is kept to learn from, and which new model is taken.

Legend: C metrics, N machines, T seconds.
"""

import dataclasses
import time

import numpy as np
import pytest

from megajax.monitor.samples import Grid
from megajax.systems.minder import Alert, Detector, Settings
from megajax.systems.minder.refit import Plan, Refit, compare, stretches
from megajax.systems.minder.reporter import Lasting

BEGIN = 1_699_999_992  # a multiple of 24
METRICS = ("cpu_usage", "queue_length")


def grid(start, seconds, machines=5, seed=0, level=50.0):
    rng = np.random.default_rng([seed, start])
    values = level + 3 * rng.standard_normal((2, machines, seconds))
    names = tuple(f"m{i}" for i in range(machines))
    return Grid(BEGIN + start, 1, values.astype(np.float32), names, METRICS)


def refit(tmp_path, hours=1.0, now=0.0):
    (tmp_path / "model.npz").write_text("old")
    plan = Plan(hours, 400, Settings(), METRICS)
    return Refit(tmp_path / "quiet", tmp_path / "model.npz", plan, lambda: now)


def pieces(tmp_path):
    return sorted(int(p.stem) - BEGIN for p in (tmp_path / "quiet").glob("*.npz"))


def test_quiet_pieces_are_kept_and_those_with_an_alert_thrown_away(tmp_path):
    data = refit(tmp_path)
    for start in range(0, 1800, 8):
        data.keep(grid(start, 8), {})
    assert pieces(tmp_path) == [0, 600, 1200]
    alert = Alert.of_machine("m1", "cpu_usage", BEGIN + 1500, 1.0, "unknown", (), BEGIN + 1850)
    for start in range(1800, 3000, 8):
        lasting = {"m1": Lasting(alert, BEGIN + 2600, BEGIN + 2000)} if start >= 1848 else {}
        data.keep(grid(start, 8), lasting)
    assert pieces(tmp_path) == [0, 600, 2400]  # 1200 had the onset, 1800 what followed
    (first, last) = stretches(sorted((tmp_path / "quiet").glob("*.npz")), METRICS)
    assert (first.start, first.end) == (BEGIN, BEGIN + 1200) and last.start == BEGIN + 2400
    values_CNT = np.concatenate([grid(s, 8).values_CNT for s in range(0, 1200, 8)], 2)
    assert (first.values_CNT == values_CNT).all()
    assert first.machines == ("m0", "m1", "m2", "m3", "m4")


def test_no_more_is_kept_than_the_hours_and_a_restart_goes_on_with_it(tmp_path):
    data = refit(tmp_path, hours=0.5)
    for start in range(0, 3000, 100):
        data.keep(grid(start, 100), {})
    assert pieces(tmp_path) == [1200, 1800, 2400]
    again = refit(tmp_path, hours=0.5)
    again.keep(grid(3000, 600, machines=6), {})
    assert pieces(tmp_path) == [1800, 2400, 3000]
    parts = stretches(sorted((tmp_path / "quiet").glob("*.npz")), METRICS)
    assert [len(p.machines) for p in parts] == [5, 6]  # another machine, another stretch


def test_nothing_is_fitted_before_its_time_or_without_half_an_hour(tmp_path):
    fits = refit(tmp_path, hours=1.0)
    fits._start = lambda: pytest.fail("too early")
    for start in range(0, 1200, 600):
        fits.keep(grid(start, 600), {})
    assert fits.poll(now=3599.0) is None and fits.poll(now=3601.0) is None
    fits.keep(grid(5000, 600), {})  # a hole before it
    assert fits.poll(now=3601.0) is None
    started = []
    fits._start = lambda: started.append(1)
    for start in (5600, 6200):
        fits.keep(grid(start, 600), {})
    assert fits.poll(now=3599.0) is None and not started
    assert fits.poll(now=3601.0) is None and started


@pytest.mark.parametrize(
    ("said", "word", "model"),
    [
        (
            {"worse": "", "seconds": 3600, "faults": 4, "named": 4, "named_before": 3},
            "accepted",
            "new",
        ),
        ({"worse": "the new model names 0 of 4 faults"}, "rejected", "old"),
        (None, "failed", "old"),
    ],
)
def test_the_model_is_replaced_in_one_piece_or_stays(tmp_path, said, word, model):
    fits = refit(tmp_path)
    fits._candidate.write_text("new")
    result = fits._take(0 if said else 1, [said] if said else [])
    assert result.word == word and (tmp_path / "model.npz").read_text() == model
    assert word != "accepted" or (tmp_path / "model.npz.previous").read_text() == "old"


class Names:
    """Names every machine whose second half lies off the others' by `limit`."""

    def __init__(self, limit, falsely=0):
        self._limit, self._falsely = limit, falsely

    def update(self, part):
        half_CNT = part.values_CNT[:, :, part.values_CNT.shape[2] // 2 :]
        mean_CN = half_CNT.mean(2)
        off_CN = np.abs(mean_CN - np.median(mean_CN, 1, keepdims=True)) > self._limit
        named = [m for m, off in zip(part.machines, off_CN.any(0), strict=True) if off]
        named += ["nobody"] * self._falsely
        return [Alert.of_machine(m, "cpu_usage", 0.0, 1.0, "unknown") for m in named]


def test_a_blind_model_and_one_that_cries_wolf_are_worse():
    part = grid(0, 1800)
    sees, blind, loud = lambda: Names(5), lambda: Names(1e9), lambda: Names(5, 2)
    same = compare(sees, sees, part)
    assert same["worse"] == "" and same["named"] == same["named_before"] == same["faults"] == 4
    assert "names 0 of 4 faults, the old one 4" in compare(sees, blind, part)["worse"]
    assert "raises 2 alerts on quiet data, the old one 0" in compare(sees, loud, part)["worse"]
    assert compare(blind, sees, part)["worse"] == "" == compare(loud, sees, part)["worse"]


@pytest.mark.slow  # two trainings, one of them in a process
@pytest.mark.process
def test_a_real_fit_in_a_process_of_its_own(tmp_path):
    before = Detector.fit([grid(0, 1800, seed=1)], steps=200)
    fits = refit(tmp_path, hours=0.5)
    before.save(tmp_path / "model.npz")
    old = (tmp_path / "model.npz").read_bytes()
    for start in range(0, 1800, 600):
        fits.keep(grid(start, 600, seed=2), {})
    result, until = None, time.monotonic() + 300
    while result is None:
        assert time.monotonic() < until
        result = fits.poll(now=1801.0)
        time.sleep(0.2)
    assert result.word == "accepted", (result, (tmp_path / "quiet/fit.log").read_text())
    assert result.report["named"] == result.report["faults"] == 4
    assert (tmp_path / "model.npz.previous").read_bytes() == old
    after = Detector.load(tmp_path / "model.npz")
    assert after.profile.metrics == METRICS
    assert not np.array_equal(after.profile.noise_F, before.profile.noise_F)
    # One that cannot be fitted: all machines but three are gone.
    for path in (tmp_path / "quiet").glob("*.npz"):
        path.unlink()
    new = (tmp_path / "model.npz").read_bytes()
    for start in range(6000, 7800, 600):
        part = grid(start, 600)
        few = dataclasses.replace(
            part, values_CNT=part.values_CNT[:, :3], machines=part.machines[:3]
        )
        fits.keep(few, {})
    result = None
    while result is None:
        result = fits.poll(now=9000.0)
        time.sleep(0.2)
    assert result.word == "failed" and (tmp_path / "model.npz").read_bytes() == new
    assert "has 4 machines" in (tmp_path / "quiet/fit.log").read_text()
