"""Counts of a detector's alerts: what was named, what was said in vain, how sure a figure is.

An alert is true if it names the machine of a fault after the fault's onset; further alerts of that
machine are repeats and count as nothing. Every other alert is false, but for a machine that left
the job as it had declared. A fault that no alert names is a miss; several faults of a case count
each. Intervals are percentiles of bootstrap samples over cases, drawn within each size of job; two
detectors are compared on the same samples of the same cases.

Legend: X cases, B bootstrap samples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
SAMPLES = 2000


def judged(case: Row, alerts: Sequence[Row]) -> dict[str, Any]:
    """Returns {'named': delay in s by fault (None: a miss), 'vain': false alerts, 'repeats'}.

    case: 'faults' with machine, start, end; 'left': (machine, time). alerts: with machine, at.
    """
    named: list[float | None] = [None] * len(case["faults"])
    vain = repeats = 0
    gone = {machine: at for machine, at in case["left"]}
    for alert in sorted(alerts, key=lambda a: a["at"]):
        hits = [
            k for k, fault in enumerate(case["faults"])
            if alert["machine"] == fault["machine"] and alert["at"] > fault["start"]
        ]  # fmt: skip
        new = [k for k in hits if named[k] is None]
        for k in new:
            named[k] = alert["at"] - case["faults"][k]["start"]
        left = alert["machine"] in gone and alert["at"] >= gone[alert["machine"]]
        if not hits and not left:
            vain += 1
        repeats += bool(hits) and not new
    return {"named": named, "vain": vain, "repeats": repeats}


def triple(case: Row, alerts: Sequence[Row]) -> tuple[int, int, int]:
    """Returns (named, in vain, faults)."""
    found = judged(case, alerts)
    return sum(d is not None for d in found["named"]), found["vain"], len(case["faults"])


def quality(counts: np.ndarray) -> dict[str, np.ndarray]:
    """Returns precision, recall and F1 of (..., 3) sums of named, in vain, faults; without an alert
    the precision is 1, without a fault the recall is."""
    named, vain, faults = np.moveaxis(np.asarray(counts, float), -1, 0)
    alerts = named + vain
    return {
        "precision": np.where(alerts > 0, named / np.maximum(alerts, 1), 1.0),
        "recall": np.where(faults > 0, named / np.maximum(faults, 1), 1.0),
        "f1": np.where(faults + alerts > 0, 2 * named / np.maximum(faults + alerts, 1), 1.0),
    }


def resampled(sizes: Sequence[int], seed: int = 0, samples: int = SAMPLES) -> np.ndarray:
    """Returns how often each case is in each sample, (B, X); samples keep the cases of a size."""
    rng, sizes_X = np.random.default_rng(seed), np.asarray(sizes)
    times_BX = np.zeros((samples, len(sizes_X)))
    for size in np.unique(sizes_X):
        rows = np.flatnonzero(sizes_X == size)
        times_BX[:, rows] = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), samples)
    return times_BX


def summary(counts_X3: np.ndarray, times_BX: np.ndarray) -> dict[str, Any]:
    """Returns counts, precision, recall, F1, and 95 % intervals of these."""
    counts_X3 = np.asarray(counts_X3, float)
    total = counts_X3.sum(0)
    drawn = quality(times_BX @ counts_X3)
    row: dict[str, Any] = dict(
        zip(("named", "vain", "faults"), (int(v) for v in total), strict=True)
    )
    row["cases"] = len(counts_X3)
    for name, value in quality(total).items():
        row[name] = float(value)
        row[f"{name}_95"] = [float(v) for v in np.percentile(drawn[name], (2.5, 97.5))]
    return row


def difference(ours_X3: np.ndarray, other_X3: np.ndarray, times_BX: np.ndarray) -> dict[str, Any]:
    """Returns our F1 less another's on the same cases, with its 95 % interval."""
    ours_X3, other_X3 = np.asarray(ours_X3, float), np.asarray(other_X3, float)
    apart_B = quality(times_BX @ ours_X3)["f1"] - quality(times_BX @ other_X3)["f1"]
    value = quality(ours_X3.sum(0))["f1"] - quality(other_X3.sum(0))["f1"]
    low, high = np.percentile(apart_B, (2.5, 97.5))
    return {"f1_more": float(value), "f1_more_95": [float(low), float(high)],
            "better": bool(low > 0)}  # fmt: skip


def rate(count: int, days: float) -> dict[str, Any]:
    """Returns events a day and the exact 95 % interval of a Poisson process (Garwood 1936)."""
    from scipy.special import gammaincinv

    low = gammaincinv(count, 0.025) if count else 0.0
    high = gammaincinv(count + 1, 0.975)
    return {"false_alarms": count, "days": days, "a_day": count / days,
            "a_day_95": [float(low / days), float(high / days)]}  # fmt: skip


def delays(found: Sequence[float]) -> dict[str, float]:
    """Returns quantiles of the seconds from onset to alert."""
    if not len(found):
        return {}
    marks = (10, 50, 90, 100)
    return {f"p{q}": float(v) for q, v in zip(marks, np.percentile(found, marks), strict=True)}
