"""Replays judged against programs whose times are made up: what is predicted, and from what."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.reports import cdmpp_replay
from experiments.reports.cdmpp_replay import Measured
from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.cost.program import records
from megajax.systems.cdmpp.families import Program
from megajax.systems.cdmpp.labels import Labels
from megajax.systems.cdmpp.profile import Timed
from megajax.systems.cdmpp.step import Overheads, counts

CARD = DeviceCard("a CPU", {"float32": 1e11}, 2**30, 1e10, 0.0, 0.0, sms=1, l2_bytes=1e6)
COSTS = Overheads(call_s=4e-5, array_s=2e-6, launch_s=3e-6)


def program(turns, width):
    """A loop of one product a turn."""
    array = f"f32[{width},{width}]{{1,0}}"
    return f"""HloModule jit_f, is_scheduled=true

%body (p: (s32[], {array})) -> (s32[], {array}) {{
  %p = (s32[], {array}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = {array} get-tuple-element(%p), index=1
  %y = {array} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (s32[], {array}) tuple(%i, %y)
}}

%cond (c: (s32[], {array})) -> pred[] {{
  %c = (s32[], {array}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (i.1: s32[], w: {array}) -> {array} {{
  %i.1 = s32[] parameter(0)
  %w = {array} parameter(1)
  %first = {array} add(%w, %w)
  %init = (s32[], {array}) tuple(%i.1, %first)
  %loop = (s32[], {array}) while(%init), condition=%cond, body=%body, backend_config={{"known_trip_count":{{"n":"{turns}"}}}}
  ROOT %out = {array} get-tuple-element(%loop), index=1
}}
"""  # noqa: E501


@pytest.fixture
def measured():
    """Two steps and eight other programs; a call is its instructions' seconds and COSTS."""
    rng = np.random.default_rng(0)
    shapes = [(40, 512), (9, 1024), *((int(n), 64 + 8 * k) for k, n in enumerate(range(1, 9)))]
    texts = [program(*shape) for shape in shapes]
    timed, walls = [], []
    for place, text in enumerate(texts):
        launches = records(text)
        seconds = rng.uniform(1e-5, 1e-3, len(launches))
        one = Program(place, "made up", lambda: None, ())
        timed.append(Timed(one, launches, np.stack([seconds, 1.01 * seconds], 1), np.ones(2), 0))
        total = sum(s * r.executions for s, r in zip(seconds, launches, strict=True))
        walls.append(total + COSTS.of(counts(text)))
    facts = {"layer": "made up", "device": "a CPU", "date": "today", "commit": ""}
    labels = Labels.of(timed, CARD, facts)
    table = np.array(walls) * np.array([[1.02], [1.0], [1.01], [1.02]])
    return Measured(["one", "two"], table, table, labels, texts, 0.0)


def test_steps_are_predicted_from_their_parts(measured):
    costs = cdmpp_replay.overheads(measured)
    rows = cdmpp_replay.judge(measured, cdmpp_replay.methods(measured, {}), costs)
    table = [row for row in rows if row["method"] == "table"]
    assert [row["configuration"] for row in table] == ["one", "two"]
    for place, row in enumerate(table):
        assert row["measured_s"] == pytest.approx(measured.walls[1, place])
        assert row["error_percent"] == pytest.approx(0, abs=0.5)
        assert row["overhead_s"] == pytest.approx(COSTS.of(counts(measured.texts[place])), rel=0.2)
    # The calls of the steps themselves are in no prediction.
    slow = dataclasses.replace(measured, walls=measured.walls * np.array([3, 3, *[1] * 8]))
    again = cdmpp_replay.judge(slow, cdmpp_replay.methods(slow, {}), cdmpp_replay.overheads(slow))
    assert [r["predicted_s"] for r in again] == [r["predicted_s"] for r in rows]
    assert [r["high_s"] for r in again] == [r["high_s"] for r in rows]


def test_bands_are_those_of_the_other_programs(measured):
    # Other programs take up to 1.5 times what their parts say: nine in ten are within the band.
    factors = np.array([1, 1, *np.linspace(1, 1.5, 8)])
    odd = dataclasses.replace(measured, walls=measured.walls * factors)
    rows = cdmpp_replay.judge(odd, cdmpp_replay.methods(odd, {})[:1], COSTS)
    for row in rows:
        assert row["high_s"] / row["predicted_s"] == pytest.approx(1.5, rel=0.02)
    assert cdmpp_replay.summary(rows)[0]["in_band"] == 1.0


def test_a_loop_that_values_stop_has_the_turns_that_the_profile_saw(measured):
    labels = measured.labels
    rows = np.flatnonzero(labels.programs == 0)
    twice = [
        dataclasses.replace(r, executions=2 * r.executions) if i in rows else r
        for i, r in enumerate(labels.dataset.records)
    ]
    seen = dataclasses.replace(labels, dataset=dataclasses.replace(labels.dataset, records=twice))
    launches = records(measured.texts[0])
    before, after = (
        cdmpp_replay.table(dataclasses.replace(measured, labels=one), 0, launches)(launches, CARD)[
            0
        ]
        for one in (labels, seen)
    )
    np.testing.assert_allclose(after, 2 * before)


def test_what_is_written_is_shown(measured, tmp_path, capsys):
    cdmpp_replay.write(tmp_path, measured, {})
    result = json.loads((tmp_path / "cdmpp_replay.json").read_text())
    best = {row["method"]: row for row in result["summary"]}["table"]
    assert best["spearman"] == pytest.approx(1) and best["max_percent"] < 1
    shown = cdmpp_replay.steps_table(tmp_path / "cdmpp_replay.json")
    assert "| table |" in shown and shown in capsys.readouterr().out
    assert (tmp_path / "cdmpp_replay.png").stat().st_size > 1000
    assert "idle" in cdmpp_replay.steps_table(tmp_path / "missing.json")
    known = measured.labels.dataset
    assert len(cdmpp_replay.without(known, measured)) == 0


def test_configurations_are_named():
    assert cdmpp_replay.names("all") == list(cdmpp_replay.CONFIGURATIONS)
    with pytest.raises(UserError, match="Did you mean wide"):
        cdmpp_replay.names("nano,wied")
    with pytest.raises(UserError, match="twice"):
        cdmpp_replay.names("nano,nano")
    for name in cdmpp_replay.CONFIGURATIONS:
        cdmpp_replay.configuration(name).check(
            dict.fromkeys(("pipe", "node", "data", "expert", "context", "tensor"), 1)
        )
