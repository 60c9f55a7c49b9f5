"""The simulated fleet is hard for plain detectors and not impossible for one that knows all."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.reports import fleet as report
from megajax.monitor.fleet import cases
from megajax.monitor.samples import Grid


def made(n: int, machines, **options):
    return [(case, case.read()) for case in cases(n, machines, 21, **options)]


def test_the_oracle_is_no_constant():
    """It names the machine of a fault, and not a machine without one."""
    case = next(c for c in cases(20, 8, 3, noise="low", healthy=0) if len(c.faults) == 1)
    grid = case.read()
    assert report.oracle(case, grid)
    row = grid.machines.index(case.faults[0].machine)
    order = np.roll(np.arange(8), 1)  # now another machine shows what this one did
    other = replace(grid, values_CNT=grid.values_CNT[:, order])
    assert grid.machines[row] == case.faults[0].machine
    assert not report.oracle(case, other)


def test_plain_detectors_on_a_plain_case():
    """A machine that is 50 % away for 10 minutes is named, one that is for 1 minute only without
    continuity."""
    names = next(iter(cases(1, 8, 1, healthy=1))).fleet.layout.names
    value_CNT = np.full((1, 8, 900), 20.0, np.float32)
    value_CNT += np.random.default_rng(0).normal(0, 0.5, value_CNT.shape)
    long, short = value_CNT.copy(), value_CNT.copy()
    long[0, 3, 200:800] += 10
    short[0, 3, 200:260] += 10
    grids = [Grid(0, 1, made_CNT, names, ("cpu_usage",)) for made_CNT in (long, short)]
    assert [report.plain(g, 4.0, 240, "mad") for g in grids] == [names[3], None]
    assert [report.plain(g, 4.0, 0, "mad") for g in grids] == [names[3]] * 2


def test_quality():
    """2 right of 3 alerts, 4 faulty cases: by hand."""
    drawn = [c for c in cases(10, 8, 2) if len(c.faults) < 2]
    faulty, healthy = [c for c in drawn if c.faults][:4], [c for c in drawn if not c.faults][:1]
    answers = [(c, c.faults[0].machine) for c in faulty[:2]] + [(faulty[2], None)]
    answers += [(faulty[3], None), (healthy[0], "node00001")]
    got = report.quality(answers)
    assert got == {"precision": 0.667, "recall": 0.5, "f1": 0.571}


@pytest.mark.slow  # 2 minutes: 160 cases
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_hard_but_not_impossible(split):
    figures = report.difficulty(made(80, (4, 16, 48), split=split))
    assert figures["oracle"] >= 0.97
    assert figures["largest_z_score"]["f1"] < 0.3 and figures["median_score"]["f1"] < 0.5
    lasting = figures["median_score_240s"]["f1"]
    assert lasting > figures["median_score"]["f1"] + 0.2  # continuity pays
    assert lasting < 0.89  # and is not enough
    assert figures["signal_below"]["4"] > 0.03  # the tail near the noise
    assert figures["signal_to_noise_percentiles"]["50"] > 6
