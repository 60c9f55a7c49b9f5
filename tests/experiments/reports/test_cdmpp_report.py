"""Splits that leak nothing, errors against hand counts, and a step's figures."""

import dataclasses

import numpy as np
import pytest

from experiments.reports import cdmpp as report
from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, parse_cluster
from megajax.cost.record import product
from megajax.monitor import results
from megajax.systems import aot
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.labels import Labels
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


def test_synthetic_programs_are_fitted_on_and_never_judged():
    dataset, known = made(), np.array(["a", "b", "mixture", "c", "d"])[np.arange(60) % 5]
    rows = report.unique_rows(dataset)
    programs, pairs = np.arange(60), np.zeros((60, 2))
    labels = Labels(dataset, known, programs, pairs, pairs)
    choice = report.SplitChoice(report.NAMES, None, 3, 0)
    splits = choice.of(dataset, rows, labels, 0)
    assert {split.name for split in splits} >= set(report.NAMES)
    mixtures = set(rows[known[rows] == "mixture"])
    for split in splits:
        assert not mixtures & set(split.judge)
        judged = {dataset.records[i].hash for i in split.judge}
        devices = {dataset.devices[i] for i in split.fit}
        for row in mixtures:
            is_free = dataset.records[row].hash not in judged and dataset.devices[row] in devices
            assert (row in split.fit) == is_free
    assert any(mixtures & set(split.fit) for split in splits)
    with pytest.raises(UserError, match="only synthetic programs"):
        choice.of(dataset, np.flatnonzero(known == "mixture"), labels, 0)
    with pytest.raises(UserError, match="splits=x must be random, families or devices"):
        report.SplitChoice(("x",), None, 3, 0)
    with pytest.raises(UserError, match="held_out=nears is no device.*near"):
        report.SplitChoice(("devices",), ["nears"], 3, 0).of(dataset, rows, labels, 0)


def test_a_program_of_two_devices_is_on_one_side():
    """The same structures on both devices: a split by rows would have each on both sides."""
    dataset = made()
    names = ["H100" if (i // 20) % 2 else "near" for i in range(60)]
    dataset = dataclasses.replace(dataset, devices=names)
    rows = report.unique_rows(dataset)
    assert len(rows) == 40
    split = report.random_split(dataset, rows, 0)
    fit, judge = ({dataset.records[i].hash for i in part} for part in (split.fit, split.judge))
    assert len(judge) == 4 and len(split.judge) == 8 and not fit & judge
    # A structure that two families have is not fitted on where one of them is held out.
    families = np.array(list("abcde"))[(np.arange(60) % 20 + np.arange(60) // 20) % 5]
    for split in report.family_splits(dataset, rows, families, 0):
        fit, judge = ({dataset.records[i].hash for i in part} for part in (split.fit, split.judge))
        assert judge and not fit & judge


def test_a_held_out_device_is_not_fitted_on_and_seen_rows_are_not_judged():
    dataset = made()
    rows = report.unique_rows(dataset)
    bare, few, *_ = report.device_splits(dataset, rows, 3, 0)
    assert bare.part == few.part == "H100"
    assert {dataset.devices[i] for i in bare.fit} == {"near"}
    assert {dataset.devices[i] for i in bare.judge} == {"H100"}
    assert few.adapt is not None and len(few.adapt) == 3
    assert sorted([*few.adapt, *few.judge]) == sorted(bare.judge)
    assert few.name == "devices, 3 programs seen"


def test_errors_are_those_of_a_hand_count():
    # Predicted 2 of 1, 2, 4 and 8 s: 100, 0, 50 and 75 %; only the second is in +-1.645 x 0.5 s,
    # and the first, which is 1 s off, is not.
    seconds = np.array([1.0, 2.0, 4.0, 8.0])
    halves = np.array([[1.0, 1.1], [2.0, 2.0], [4.0, 4.4], [8.0, 8.0]])
    errors = report.errors(np.full(4, 2.0), np.full(4, 0.5), seconds, halves, np.ones(4, bool))
    assert errors == pytest.approx(
        {
            "rows": 4,
            "mean": 56.25,
            "median": 62.5,
            "p90": 92.5,
            "weighted": 60.0,
            "in_band": 0.25,
            "noise_mean": 5.0,
            "noise_median": 5.0,
        }
    )


def test_every_split_and_method_has_its_rows_and_a_method_is_fitted_once_a_split():
    dataset = made()
    splits = list(report.device_splits(dataset, report.unique_rows(dataset), 3, 0))
    fitted, told = [], []

    def fit(part):
        fitted.append(len(part))
        return Off(1e-4)

    rows = report.evaluate(dataset, splits, {"ours": fit}, None, told.append)
    assert fitted == [10, 10]  # once a device, though each is judged with and without rows seen
    total = [row for row in rows if row["group"] == "all"]
    assert [row["split"] for row in total] == [*["devices", "devices, 3 programs seen"] * 3]
    assert [row["held_out"] for row in total[4:]] == [report.EACH] * 2
    assert total[4]["mean"] == pytest.approx((total[0]["mean"] + total[2]["mean"]) / 2)
    assert len(told) == 6 and all("error" in line for line in told)
    table = report.summary(rows)
    assert table.count("\n") == 1 + 6
    assert "10.85" in table
    seen = dataset.seconds[splits[1].judge]
    relative = np.abs(5e-5 - seen) / seen
    assert total[1]["mean"] == pytest.approx(100 * relative.mean())


def test_rows_of_programs_that_are_seen_are_not_judged():
    """All rows of a chosen program adapt, and no row of their structure is judged."""
    dataset = made()
    rows = report.unique_rows(dataset)
    programs = np.arange(60) // 6
    _, few = list(report.device_splits(dataset, rows, 3, 0, ["H100"], programs))
    names = np.array(dataset.devices)
    seen = {dataset.records[i].hash for i in few.adapt}
    assert not seen & {dataset.records[i].hash for i in few.judge}
    of_seen = {
        dataset.records[i].hash
        for i in np.flatnonzero(names == "H100")
        if programs[i] in set(programs[few.adapt])
    }
    assert seen <= of_seen and len(few.adapt) > 3
    assert {dataset.devices[i] for i in few.fit} == {"near"}


def test_seeds_are_averaged_and_their_range_is_kept():
    def row(mean, group="all"):
        where = {"method": "m", "split": "s", "held_out": "h", "group": group}
        return where | {"rows": 5, "mean": mean}

    averages = report.averaged([[row(10.0), row(4.0, "product")], [row(14.0), row(8.0, "product")]])
    assert [(r["group"], r["mean"], r["mean_low"], r["mean_high"]) for r in averages] == [
        ("all", 12, 10, 14),
        ("product", 6, 4, 8),
    ]
    assert all(r["seeds"] == 2 and r["rows"] == 5 for r in averages)


def test_groups_replace_kinds_and_a_method_without_a_band_has_none():
    class Bare(Off):
        def predict(self, records, card):
            return super().predict(records, card)[0], np.full(len(records), np.nan)

        def unseen(self, records):
            return ["sort"]

    dataset = made()
    split = report.random_split(dataset, report.unique_rows(dataset), 0)
    groups = np.array(["even", "odd"])[np.arange(60) % 2]
    rows = report.evaluate(
        dataset, [split], {"bare": lambda _: Bare(1e-4)}, None, lambda _: None, groups
    )
    assert {row["group"] for row in rows} <= {"all", "even", "odd"}
    assert all("in_band" not in row for row in rows)
    assert "no row of kind sort" in report.text(rows[0]) and "| - | - |" in report.summary(rows)


def test_documents_have_each_split_beside_its_rivals(tmp_path):
    dataset = made()
    rows = report.unique_rows(dataset)
    families = np.array(["a", "b", "c", "d", "e"])[np.arange(60) % 5]
    splits = [report.random_split(dataset, rows, 1)]
    splits += report.family_splits(dataset, rows, families, 1)
    splits += report.device_splits(dataset, rows, 3, 0)
    halves = np.stack([dataset.seconds, 1.1 * dataset.seconds], 1)
    methods = {"ours": lambda _: Off(1e-4), "worse": lambda _: Off(1.0)}
    groups = np.array(sorted(report.GROUP_TEXTS))[np.arange(60) % 5]
    for name in ("cpu", "kernels"):
        of = splits if name == "cpu" else splits[5:]
        more = {"families": families} if name == "cpu" else {}
        evaluation = report.evaluate(dataset, of, methods, halves, lambda _: None, groups, **more)
        about = results.facts("x", "measured") | {"shots": 3}
        results.write(tmp_path / name, about, report.averaged([evaluation]))
    table = report.programs(tmp_path / "cpu")
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + 2 + 6  # families only together; 2 devices and both, twice
    assert all("**" in line.split(" | ")[2] for line in lines[1:])  # ours is the better one
    assert "| 14.03 |" in table and "10.0 / 10.0" in table
    assert "| batched products, both | " in report.kernels(tmp_path / "kernels")
    kinds, each = (table(tmp_path / "cpu") for table in (report.kinds, report.families_table))
    assert "| bmm |" in kinds and "family" not in kinds
    seconds = dataset.seconds[rows[families[rows] == "b"]]
    mean = 100 * np.mean(np.abs(1e-4 - seconds) / seconds)
    assert f"\n| b | {len(seconds)} | **{mean:.1f} / " in each
    assert len([line for line in each.splitlines() if line.startswith("| ")]) == 1 + 5


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
    step = predict(text, cluster, assumed)
    facts = report.step_facts(step, cfg, cluster)
    assert facts["low_s"] < facts["step_s"] < facts["high_s"]
    assert facts["tokens_per_s"] == pytest.approx(32 * 128 / step.seconds)
    two = report.step_facts(step, cfg, cluster, segments=2)
    assert two["tokens_per_s"] == facts["tokens_per_s"]
    assert two["mfu_megatron"] < facts["mfu_megatron"]  # of less attention
    assert facts["dearest"] == [
        {
            "name": "one",
            "kind": "product",
            "executions": 2.0,
            "seconds": pytest.approx(step.seconds),
            "share": pytest.approx(1.0),
        }
    ]
    facts |= {"memory_bytes": 2**30, "times": "assumed", "attention": "xla"}
    shown = report.step_markdown(facts, cluster)
    assert "90 % band" in shown and "| one | product | 2 |" in shown
    assert "3.3 of 74.5 GiB a device (2.3 reserved)" in shown and "not compiled for" not in shown
    wide = report.step_facts(step, cfg, cluster, band=(0.5, 3.0))
    assert (wide["low_s"], wide["high_s"]) == (0.5 * step.seconds, 3 * step.seconds)
    other = report.step_markdown(facts | {"compiled_for": "H100"}, parse_cluster("a100:1x8"))
    assert "not compiled for A100, so the program and its memory are those of H100" in other
    assert "fit" not in shown
    for room, fits in ((aot.RESERVE_BYTES, True), (aot.RESERVE_BYTES - 1, False)):
        peak = cluster.card.memory_bytes - room
        full = report.step_markdown(facts | {"memory_bytes": peak}, cluster)
        assert ("does not fit" not in full) == ("--train.accumulate" not in full) == fits
