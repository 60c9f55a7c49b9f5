"""What a supervised run left, read again: also when it is damaged or a sick process wrote it."""

import json
import math

import pytest

from megajax.core.errors import UserError
from megajax.monitor import timeline
from megajax.systems.elastic.events import Journal

EVENTS = [{"time": 0, "clock": 0, "event": "start"}, {"time": 9, "clock": 8, "event": "end"}]


def leave(folder, events, rows=()):
    for name, lines in (("events", events), ("metrics", rows)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_lines_that_are_no_events_and_no_rows_are_left_out(tmp_path):
    strange = [[], 1, {"event": 1, "time": 1}, {"event": "x", "time": "1"}, {"event": "y"}]
    rows = [
        {"step": 1, "step_time_s": 2.0},
        {"step": 2, "step_time_s": "2"},
        {"step_time_s": 1},
        {"step": 3, "step_time_s": 1, "time_compile_s": []},
        {"step": 4, "step_time_s": 1e999},
        {"step": 5, "step_time_s": 10**400},
        {"step": 6, "step_time_s": float("nan")},
    ]
    leave(tmp_path, [EVENTS[0], *strange, EVENTS[1]], rows)
    figures = timeline.figures(tmp_path, tmp_path)
    assert (figures["total_s"], figures["training_s"], figures["ettr"]) == (8, 2, 0.25)


def test_a_run_that_took_no_time_has_a_ratio(tmp_path):
    leave(tmp_path, [EVENTS[0], EVENTS[0]])
    assert timeline.figures(tmp_path, tmp_path)["ettr"] == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "spans.json is not JSON"),
        ("[]", "must hold a JSON object"),
        ('{"spans": 1}', "holds no sections"),
        ('{"spans": {"0": [1]}}', "holds no sections"),
        ('{"spans": {"' + "1" * 5000 + '": [["data", 1, 0, 1]]}}', "holds no sections"),
        ('{"spans": {"0": [["data", 1, 0, 1]]}, "grid": "data=7x"}', "grid=data=7x must be"),
        ('{"spans": {"0": [["data", 1, 0, 1]]}, "grid": "a=9999999999"}', "at most 1048576"),
    ],
)
def test_spans_that_cannot_be_drawn_are_one_sentence(tmp_path, text, words):
    (tmp_path / "attempt0").mkdir()
    (tmp_path / "attempt0" / "spans.json").write_text(text)
    with pytest.raises(UserError, match=words):
        timeline.shares(tmp_path)


def test_what_a_sick_process_says_of_its_sections_keeps_no_driver_from_its_evidence(tmp_path):
    bad = [math.nan, math.inf, -1e300, 1e300, "1", None, True]
    sections = [["data", 1, x, 2.0] for x in bad[:-1]] + [["data", 1, 2.0, x] for x in bad]
    sections += [["data", 1, 2.0, 1.0], ["none", 1, 0, 1], ["data", 2**70, 0, 1], [], 5, "data"]
    assert timeline.spans_of({"0": sections}) in ({}, {0: [timeline.Span("data", 1, 2.0, True)]})
    good = ["data", 1, 1.0, 2.0], ["data", 2, 1.0, 2.0]  # two steps at one moment
    journal = Journal(tmp_path, lambda text: None)
    journal.evidence(0, {}, {"0": [*sections, *good], "1": good}, {0: "a", 1: "b"}, {}, None)
    journal.close()
    assert (tmp_path / "attempt0" / "heat.html").exists() and not journal.lost
