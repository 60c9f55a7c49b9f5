"""What experiments/optimus.py --preset=paper simulates, and what its page says of it."""

import collections
import json
import pathlib

import pytest

from experiments.reports import optimus as report
from experiments.reports.reporting import read, rows_of
from megajax.monitor import results
from megajax.schedule.ir import Span, Task, Timeline

RESULT = pathlib.Path("experiments/results/optimus_simulated.json")


def test_the_page_is_right_about_the_result():
    rows = rows_of(read(RESULT), part="strong", efficiency="one")
    assert [row["gpus"] for row in rows] == [1536, 2048, 3072]
    ours = [row["balanced_s"] / row["optimus_s"] for row in rows]
    theirs = [row["reported"]["balanced_s"] / row["reported"]["optimus_s"] for row in rows]
    assert ours == sorted(ours)
    assert all(abs(a - b) < 0.05 for a, b in list(zip(ours, theirs, strict=True))[1:])
    assert all(abs(row["coarse"] - row["reported"]["coarse"]) < 0.05 for row in rows)
    assert all(abs(row["fine"] - row["reported"]["fine"]) < 0.04 for row in rows[:2])
    assert rows[0]["optimus_s"] == pytest.approx(9.80, rel=0.005)  # the one that is fitted
    two = rows_of(read(RESULT), part="strong", efficiency="two")
    assert all(row["fine"] > 0.99 for row in two)
    # The paper's own figures: 16 microbatches more cost Optimus more than the balanced baseline.
    first, last = rows[0]["reported"], rows[-1]["reported"]
    more = [first[name] - last[name] for name in ("optimus_s", "balanced_s")]
    assert more == pytest.approx([4.93, 4.56]) and more[0] > more[1]
    weak = rows_of(read(RESULT), part="weak")
    assert max(row["balanced_s"] / row["optimus_s"] for row in weak) == pytest.approx(1.18, rel=0.1)


def test_a_case_gives_a_row_and_a_table(tmp_path):
    case = next(one for one in report.cases() if one.part == "small")
    row = report.simulated(case, "one")
    assert row["decoder_s"] < row["optimus_s"] <= row["exchanged_s"]
    assert row["optimus_s"] < row["balanced_s"] < row["megatron_s"]
    assert 0 < row["mfu"] < 0.5 and row["microbatches"] == 16
    path = tmp_path / "result.json"
    results.write(path, results.facts("figures", "simulated"), [row])
    table = report.others(path, "small")
    assert f"{row['optimus_s']:.2f} (2.78)" in table and "simulated, figures" in table
    assert json.loads(path.read_text())["rows"][0]["reported"]["balanced_s"] == 3.04


def test_the_figure_has_a_bar_for_each_piece():
    def span(resource, name, start, end, kind):
        return Span(Task(name, resource, (), end - start, kind, 3, 0, 1), start, end)

    timeline = Timeline(
        (
            span("stage 0", "F a kernel 0", 0, 10, "F"),
            span("tensor link 0", "F a kernel 1", 10, 20, "COMM"),
            span("stage 0", "F a kernel 2", 20, 30, "F"),
            span("stage 0", "EF b kernel 0", 10, 12, "EF"),
            span("stage 0", "EF b kernel 1", 12, 15, "EF"),
            span("stage 0", "EF b kernel 2", 35, 40, "EF"),
            span("network 0", "all-gather 0", 0, 100, "COMM"),
            span("network 1", "all-gather 1", 0, 100, "COMM"),
        ),
        ("stage 0",),
    )
    bars = collections.defaultdict(list)
    for bar in report.outlined(timeline).spans:
        bars[bar.task.kind].append((bar.start, bar.end))
    assert bars == {"F": [(0, 30)], "COMM": [(0, 100)], "EF": [(10, 15), (35, 40)]}
