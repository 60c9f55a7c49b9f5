"""Where a run's seconds go, against runs whose seconds are known."""

import dataclasses

import numpy as np
import pytest

from megajax.monitor import ettr


def parts(found):
    return [v for k, v in dataclasses.asdict(found).items() if k != "total_s"]


def row(time, step, took):
    return {"time": time, "step": step, "step_time_s": took}


def test_formula():
    assert ettr.by_formula(100, 2.0, 20.0, 40.0) == pytest.approx(200 / (200 + 110 + 40))


def test_each_second_has_one_name():
    """Start 10 s, a first step of 5 s of which 4 compile, a save of 3 s, a crash that costs 2."""
    rows = [row(15, 1, 5), row(16, 2, 1), row(20, 3, 1), row(21, 4, 1)]
    rows += [row(40, 3, 6), row(41, 4, 1), row(42, 5, 1)]
    found = ettr.measure(rows, began=0, ended=44)
    assert found.productive_s == 5 and found.repeated_s == 2
    assert found.startup_s == 14 and found.recovery_s == 18
    assert found.paused_s == 3 + 2
    assert sum(parts(found)) == found.total_s == 44
    assert found.ratio == pytest.approx(5 / 44)


def test_a_run_without_a_step():
    found = ettr.measure([{"time": 3.0, "step": 1, "eval_loss": 2.0}], 0, 9)
    assert found.ratio == 0 and found.startup_s == 9


@pytest.mark.parametrize("load_s", [5.0, 60.0])
def test_formula_and_measurement_agree_within_5_percent(load_s):
    """One failure in each interval, at any moment of it, 2000 times; saves are quick."""
    random, steps, step_s = np.random.default_rng(0), 50, 2.0
    now, rows, step = 0.0, [], 0
    for _ in range(2000):
        good = step
        for i in range(1, random.integers(1, steps + 1)):  # lost
            now += step_s
            rows.append(row(now, good + i, step_s))
        now += load_s + random.uniform(0, step_s)
        for i in range(1, steps + 1):
            now += step_s
            rows.append(row(now, good + i, step_s))
        step = good + steps
    measured = ettr.measure(rows, 0.0, now)
    assert measured.productive_s == pytest.approx(step * step_s)
    assert measured.ratio == pytest.approx(ettr.by_formula(steps, step_s, 0.0, load_s), rel=0.05)
