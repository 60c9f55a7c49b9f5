"""Traces: the JSON says what the timeline says; charts are drawn and legible."""

import json
from collections import defaultdict

import pytest

from megajax.schedule import build, trace
from megajax.schedule.simulator import lockstep, simulate
from tests.schedule.test_lanes import COPIES, UPDATED

UNIT = {"F": 1, "B": 1, "W": 1}


@pytest.mark.parametrize("transfer", [0, 0.25])
def test_perfetto_events(tmp_path, transfer):
    table = build.zero_bubble(3, 4)
    timeline = simulate(table, UNIT, transfer)
    timeline.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    by_phase = defaultdict(list)
    for event in events:
        by_phase[event["ph"]].append(event)
    names = {e["tid"]: e["args"]["name"] for e in by_phase["M"] if e["name"] == "thread_name"}
    slices = {(names[e["tid"]], e["ts"], e["dur"], e["name"]) for e in by_phase["X"]}
    assert slices == {
        (
            s.task.resource,
            s.start * 1e6,
            (s.end - s.start) * 1e6,
            f"{s.task.kind} {s.task.microbatch}",
        )
        for s in timeline.spans
    }
    # 2 hops of F and 2 of B a micro-batch; through a link a hop has two arrows.
    assert len(by_phase["s"]) == len(by_phase["f"]) == 4 * 4 * (2 if transfer else 1)
    arrows = {
        (names[a["tid"]], a["ts"], names[b["tid"]], b["ts"])
        for a, b in zip(by_phase["s"], by_phase["f"], strict=True)
        if a["id"] == b["id"]
    }
    first = ("stage 0", 0.0, "link 0-1" if transfer else "stage 1", 1e6)
    assert len(arrows) == len(by_phase["s"]) and first in arrows
    starts = {(thread, ts) for thread, ts, _, _ in slices}
    for a, from_s, b, to_s in arrows:
        assert a != b and from_s < to_s and {(a, from_s), (b, to_s)} <= starts


def test_perfetto_names_masked_work():
    table = build.one_f_one_b(2, 2)
    events = trace.perfetto(lockstep(table, UNIT))["traceEvents"]
    assert sum("masked" in e["name"] for e in events) == len(table.free())


def test_gantt_files(tmp_path):
    table = build.interleaved(2, 4, 2)
    charts = {"planned": simulate(table, UNIT, 0.1), "lockstep": lockstep(table, UNIT)}
    seconds = dict.fromkeys(("F", "B", "U", "EF", "EB"), 1)
    charts |= {"encoder": simulate(COPIES, seconds), "new kind": simulate(UPDATED, seconds)}
    trace.gantt(charts, tmp_path / "a.png")
    trace.gantt(charts, tmp_path / "a.svg", unit="forward passes")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "a.svg").read_text()
    colours = {trace.COLOURS[k].lower() for k in ("F", "B", "COMM", "EF", "EB")}
    colours.add(trace.SPARE[0].lower())
    assert "<svg" in svg and all(c in svg for c in colours)
    assert trace.COLOURS["W"].lower() not in svg


def test_black_numbers_stand_out_on_every_colour():
    """Contrast at least 4.5 (WCAG 2.1, level AA), for each shade."""
    for colour in (*trace.COLOURS.values(), *trace.SPARE):
        for chunk in range(3):
            channels = trace.shade(colour, chunk, 3)
            linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
            light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
            assert (light + 0.05) / 0.05 >= 4.5
