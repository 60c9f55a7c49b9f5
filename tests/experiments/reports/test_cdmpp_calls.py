"""Calls whose times are known sums of their instructions."""

import numpy as np
import pytest

from experiments.reports import cdmpp
from experiments.reports.cdmpp import Split
from megajax.core.hardware import CARDS
from megajax.cost.record import product
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.labels import Labels


def test_weights_are_fitted_on_other_families_and_sums_count_executions():
    rng = np.random.default_rng(0)
    records, seconds, families, numbers, walls, counts = [], [], [], [], [], {}
    for number in range(40):
        total = 0.0
        for _ in range(1 + number % 3):
            m, runs = int(rng.integers(8, 4096)), float(rng.integers(1, 9))
            record = product(1, m, 64, 64, "float32")
            records.append(type(record)(**{**vars(record), "executions": runs}))
            seconds.append(1e-6 + 1e-9 * m)
            total += runs * seconds[-1]
            families.append("ab"[number % 2])
            numbers.append(number)
        walls += [3e-5 + 1.2 * total] * (1 + number % 3)
        counts[number] = np.array([rng.uniform(1e3, 1e9), 1.0, 0.0])
    dataset = Dataset(records, np.array(seconds), ["H100"] * len(records), {"H100": CARDS["H100"]})
    halves = np.repeat(np.array(seconds)[:, None], 2, 1)
    both = np.repeat(np.array(walls)[:, None], 2, 1)
    labels = Labels(dataset, np.array(families), np.array(numbers), halves, both)
    every = np.arange(len(records))
    splits = [Split("families", name, every, every) for name in ("a", "b")]
    off = np.array(seconds) * np.where(np.array(families) == "a", 1.0, 2.0)
    rows = cdmpp.Calls(labels, counts).judge(
        splits, {"exact": [np.array(seconds)] * 2, "off": [off] * 2}
    )
    error = {row["method"]: row["mean"] for row in rows}
    assert all(row["rows"] == 40 and row["group"] == cdmpp.GROUP for row in rows)
    assert error["measured instructions"] == pytest.approx(0, abs=1e-6)
    assert error["exact"] == pytest.approx(0, abs=1e-6)
    # Weights of the other family: twice and half of what is right for this one.
    assert error["off"] > 20 and error["XLA's counts"] > 5
    few = cdmpp.Calls(labels, {n: counts[n] for n in range(20)}).judge(splits, {})
    assert all(row["rows"] == 20 for row in few)
