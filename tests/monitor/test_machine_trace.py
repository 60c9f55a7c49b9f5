"""The recorded trace of machines under real stress holds what its description says.

scripts/record_trace.py makes tests/golden/machines.csv.gz and machines.json.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megajax.monitor.samples import to_grid
from megajax.monitor.sources import files

GOLDEN = Path(__file__).parent.parent / "golden"
METRIC = {
    "cpu": "cpu_usage",
    "memory": "memory_usage",
    "disk": "disk_throughput",
    "network": "tcp_throughput",
    "frozen": "cpu_usage",
    "killed": "cpu_usage",
}


@pytest.fixture(scope="module")
def trace():
    grid = to_grid(files.read(GOLDEN / "machines.csv.gz"))
    return grid, json.loads((GOLDEN / "machines.json").read_text())


def means(grid, event, before=0.0):
    """{machine: mean of the event's metric while it lasts, or some seconds before it}."""
    values_NT = grid.values_CNT[grid.metrics.index(METRIC[event["kind"]])]
    first = math.ceil(event["start"] - grid.start - before) + 5
    last = math.floor(event["end"] - grid.start - before) - 1
    with np.errstate(invalid="ignore"):
        mean_N = [
            np.mean(v[np.isfinite(v)]) if np.isfinite(v).any() else math.nan
            for v in values_NT[:, first:last]
        ]
    return dict(zip(grid.machines, mean_N, strict=True))


def test_the_trace_has_few_holes_and_all_kinds_of_stress(trace):
    grid, about = trace
    assert list(grid.machines) == about["machines"] and len(grid.machines) == 8
    assert grid.values_CNT.shape[2] > 800
    assert np.isnan(grid.values_CNT[:, 1:]).mean() < 0.05
    assert {e["kind"] for e in about["events"]} == set(METRIC)


def test_every_fault_shows_on_its_machine_alone(trace):
    grid, about = trace
    for event in (e for e in about["events"] if e["fault"]):
        others = means(grid, event)
        sick = others.pop(event["machine"])
        match event["kind"]:
            case "killed":
                assert math.isnan(sick) and all(map(math.isfinite, others.values()))
            case "frozen":
                assert sick < 0.2 * min(others.values()), (event, sick, others)
            case _:
                assert sick > 2 * max(others.values()), (event, sick, others)


def test_what_is_no_fault_shows_on_all_or_is_short(trace):
    grid, about = trace
    harmless = [e for e in about["events"] if not e["fault"]]
    assert len(harmless) == 2
    for event in harmless:
        if event["machine"] is None:
            now, before = means(grid, event), means(grid, event, before=30.0)
            assert all(now[m] > 1.3 * before[m] for m in now), (now, before)
        else:
            assert event["end"] - event["start"] < 15
