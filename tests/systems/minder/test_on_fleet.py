"""The detector on the simulated fleet: trained on one family of jobs, judged on another.

What it reaches is printed (`pytest -s`); the bounds are below that, so that a change for the worse
shows. The fleet's numbers are assumed (megajax/monitor/fleet).
"""

import pytest

from megajax.monitor.fleet import cases
from megajax.systems.minder import Detector

SIZES = (4, 16, 64)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("fleet") / "model.npz"
    sources = [case.read() for case in cases(18, (8, 16, 64), 7, split="train", healthy=0.8)]
    Detector.fit(sources).save(path)
    return path


def counts(model, case):
    """Returns (faults that were named, alerts that name no fault, faults)."""
    alerts = Detector.load(model).update(case.read())
    left = {machine for machine, _ in case.fleet.departures}
    alerts = [a for a in alerts if a.kind != "silent" or a.machine not in left]  # it was declared
    right = {
        f.machine for f in case.faults for a in alerts if a.machine == f.machine and a.at > f.start
    }
    return len(right), sum(a.machine not in right for a in alerts), len(case.faults)


@pytest.mark.slow
def test_what_it_finds_and_what_it_says_in_vain(model):
    total = dict.fromkeys(SIZES, (0, 0, 0))
    for case in cases(60, SIZES, 23, split="validate"):
        size = case.fleet.machines
        total[size] = tuple(a + b for a, b in zip(total[size], counts(model, case), strict=True))
    named, vain, faults = (sum(t[k] for t in total.values()) for k in range(3))
    precision, recall = named / max(named + vain, 1), named / faults
    f1 = 2 * precision * recall / (precision + recall)
    print(
        f"\nprecision {precision:.3f}, recall {recall:.3f}, F1 {f1:.3f}; (named, vain, faults) by"
    )
    print(f"(named, in vain, faults) by machines: {total}")
    assert precision >= 0.75 and recall >= 0.6 and f1 >= 0.7
