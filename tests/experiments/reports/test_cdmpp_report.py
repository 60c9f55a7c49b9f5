"""Splits that leak nothing, errors against hand counts, and a step's figures."""

import dataclasses

import numpy as np
import pytest

from experiments.reports import cdmpp as report
from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost.record import product
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.step import assumed, predict
from megajax.training.presets import PRESETS

H100 = CARDS["H100"]
NEAR = dataclasses.replace(H100, name="near")


def made(rows=60):
    """Two devices; every third program again, once without a time."""
    records = [product(1, 8 * (1 + i % 20), 8, 8, "bfloat16") for i in range(rows)]
    devices = ["H100" if i % 2 else "near" for i in range(rows)]
    seconds = np.array([1e-5 * (1 + i % 20) for i in range(rows)])
    seconds[0] = np.nan
    return Dataset(records, seconds, devices, {"H100": H100, "near": NEAR})


class Off:
    """Predicts a constant, with a band of a tenth; adapting halves it."""

    def __init__(self, seconds):
        self.seconds = seconds

    def predict(self, records, card):
        return np.full(len(records), self.seconds), np.full(len(records), 0.1 * self.seconds)

    def adapt(self, dataset):
        return Off(self.seconds / 2)


def test_no_program_is_on_both_sides_of_a_split():
    dataset = made()
    rows = report.unique_rows(dataset)
    assert len(rows) == len({(dataset.records[i].hash, dataset.devices[i]) for i in rows}) == 20
    assert 0 not in rows  # without a time
    families = np.array(["a", "b", "c", "d", "e"])[np.arange(60) % 5]
    splits = [report.random_split(dataset, rows, 1)]
    splits += report.family_splits(dataset, rows, families, 1)
    assert len(splits) == 5
    for split in splits:
        fit, judge = ({dataset.records[i].hash for i in part} for part in (split.fit, split.judge))
        assert len(judge) and not fit & judge
        assert set(split.fit) <= set(rows) and set(split.judge) <= set(rows)
    judged = np.concatenate([s.judge for s in splits[1:]])
    assert sorted(judged) == sorted(rows)  # each family is held out once


def test_a_held_out_device_is_not_fitted_on_and_seen_rows_are_not_judged():
    dataset = made()
    rows = report.unique_rows(dataset)
    bare, few, *_ = report.device_splits(dataset, rows, 3, 0)
    assert bare.part == few.part == "H100"
    assert {dataset.devices[i] for i in bare.fit} == {"near"}
    assert {dataset.devices[i] for i in bare.judge} == {"H100"}
    assert few.adapt is not None and len(few.adapt) == 3
    assert sorted([*few.adapt, *few.judge]) == sorted(bare.judge)
    assert few.name == "devices, 3 rows seen"


def test_errors_are_those_of_a_hand_count():
    # Predicted 2 of 1, 2, 4 and 8 s: 100, 0, 50 and 75 %; only the second is in +-1.645 x 0.5 s,
    # and the first, which is 1 s off, is not.
    seconds = np.array([1.0, 2.0, 4.0, 8.0])
    halves = np.array([[1.0, 1.1], [2.0, 2.0], [4.0, 4.4], [8.0, 8.0]])
    found = report.errors(np.full(4, 2.0), np.full(4, 0.5), seconds, halves, np.ones(4, bool))
    assert found == pytest.approx(
        {
            "rows": 4, "mean": 56.25, "median": 62.5, "p90": 92.5, "weighted": 60.0,
            "in_band": 0.25, "noise_mean": 5.0, "noise_median": 5.0,
        }
    )  # fmt: skip


def test_every_split_and_method_has_its_rows_and_a_method_is_fitted_once_a_split():
    dataset = made()
    splits = list(report.device_splits(dataset, report.unique_rows(dataset), 3, 0))
    fitted, told = [], []

    def fit(part):
        fitted.append(len(part))
        return Off(1e-4)

    rows = report.evaluate(dataset, splits, {"ours": fit}, None, told.append)
    assert fitted == [10, 10]  # once a device, though each is judged with and without rows seen
    whole = [row for row in rows if row["kind"] == "all"]
    assert [row["split"] for row in whole] == ["devices", "devices, 3 rows seen"] * 2
    assert len(told) == 4 and all("error" in line for line in told)
    table = report.markdown(rows)
    assert table.count("\n") == 1 + 4
    assert "10.85" in table
    seen = dataset.seconds[splits[1].judge]
    relative = np.abs(5e-5 - seen) / seen
    assert whole[1]["mean"] == pytest.approx(100 * relative.mean())


def test_the_figures_of_a_step():
    text = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[512,512], y: f32[512,512]) -> f32[512,512] {
  %x = f32[512,512]{1,0} parameter(0)
  %y = f32[512,512]{1,0} parameter(1)
  %one = f32[512,512]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %two = f32[512,512]{1,0} dot(%x, %one), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    cluster, cfg = parse_cluster("h100:1x8"), PRESETS["nano"]()
    found = predict(text, cluster, assumed)
    facts = report.step_facts(found, cfg, cluster)
    assert facts["low_s"] < facts["step_s"] < facts["high_s"]
    assert facts["tokens_per_s"] == pytest.approx(32 * 128 / found.seconds)
    assert facts["dearest"] == [
        {
            "name": "one", "kind": "product", "executions": 2.0,
            "seconds": pytest.approx(found.seconds), "share": pytest.approx(1.0),
        }
    ]  # fmt: skip
    shown = report.step_markdown(facts, cluster, "assumed")
    assert "90 % band" in shown and "| one | product | 2 |" in shown
