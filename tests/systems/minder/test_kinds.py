"""The fault type that explains an alert, by scores that were written by hand."""

import numpy as np
import pytest

from megajax.monitor.fleet import METRICS
from megajax.monitor.fleet.faults import GROUPS, KINDS
from megajax.monitor.sources.convert import MINDER
from megajax.systems.minder.detector import nearest

GPU = ("gpu_duty_cycle", "gpu_power_draw", "gpu_graphics_engine_activity", "gpu_tensor_activity")


@pytest.mark.parametrize(
    ("moved", "kind"),
    [
        ({"pfc_tx_packet_rate": 5}, "pcie_downgrading"),
        ({"cpu_usage": 4}, "cpu_contention"),
        ({"cpu_usage": 4, "gpu_duty_cycle": -1, "gpu_power_draw": -1}, "cpu_contention"),
        ({"nvlink_bandwidth": -3}, "nvlink_error"),
        ({"gpu_power_draw": -3}, "fail_slow"),
        ({}, "unknown"),
        ({"nvlink_bandwidth": 5}, "unknown"),
    ],
)
def test_types_by_the_seven_metrics_of_the_paper(moved, kind):
    assert nearest(dict.fromkeys(MINDER, 0.0) | moved) == kind


@pytest.mark.parametrize(
    ("moved", "kind"),
    [
        (
            {"disk_throughput": 1, "disk_busy": 1, "cpu_usage": 2, "tcp_throughput": -4},
            "hdfs_error",
        ),
        ({"memory_usage": 5, "cpu_usage": 2}, "memory_leak"),
        ({"queue_length": 9}, "unknown"),
    ],
)
def test_types_by_metrics_of_real_exporters(moved, kind):
    assert nearest(moved) == kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_moves_as_a_type_does_is_of_that_type(kind):
    """All metrics are measured, and each group moves as its table says, by a tenth more or less."""
    random, scores = np.random.default_rng(list(KINDS).index(kind)), dict.fromkeys(METRICS, 0.0)
    for effect in KINDS[kind].effects:
        size = effect.probability * np.sqrt(effect.low * effect.high)
        size *= 1 if effect.target == "high" else -1
        for metric in GROUPS[effect.group]:
            scores[metric] += size / len(GROUPS[effect.group]) ** 0.5
    assert nearest({m: 7 * s * random.uniform(0.9, 1.1) for m, s in scores.items()}) == kind


def test_too_few_metrics_say_nothing_of_a_type_that_needs_others():
    assert nearest({"gpu_duty_cycle": -3.0, "queue_length": 4.0}) == "unknown"
