"""Pictures of all ranks: one clock, arrows to who was waited for, the silent place in the grid."""

import pytest

from megajax.core.errors import UserError
from megajax.monitor import timeline
from megajax.monitor.heartbeat import Span
from megajax.monitor.timeline import draw_heat, heat_html, own_share, parse_grid, perfetto, silent


def spans_of(ranks, steps, slow=None, offset=0.0, more=0.12):
    """Steps of a second; the slow rank has `more` own work, so the others wait in the launch."""
    spans = {}
    for rank in range(ranks):
        work_s = 0.1 + (more if rank == slow else 0.0)
        spans[rank] = [
            span
            for step in range(1, steps + 1)
            for t in [step * 1.0 + offset * rank]
            for span in (Span("data", step, t, t + work_s), Span("launch", step, t + work_s, t + 1))
        ]
    return spans


HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def test_perfetto_has_one_clock_and_arrows_from_the_last_to_launch():
    spans = spans_of(4, 3, slow=2)
    clocks = {"a": 0.0, "b": 5000.0}  # host b booted earlier
    shifted = {
        r: [
            Span(s.section, s.step, s.begin + clocks[HOSTS[r]], s.end + clocks[HOSTS[r]])
            for s in sections
        ]
        for r, sections in spans.items()
    }
    trace = perfetto(shifted, HOSTS, clocks)["traceEvents"]
    slices = {(e["tid"], e["name"], e["args"]["step"]): e for e in trace if e["ph"] == "X"}
    assert len(slices) == 4 * 3 * 2
    for (rank, name, step), e in slices.items():
        (s,) = [s for s in spans[rank] if (s.section, s.step) == (name, step)]
        assert e["ts"] == pytest.approx((s.begin - 1.0) * 1e6, abs=1)
        assert e["dur"] == pytest.approx((s.end - s.begin) * 1e6, abs=1)
        assert e["pid"] == {"a": 0, "b": 1}[HOSTS[rank]]
    begins = [e for e in trace if e["ph"] == "s"]
    ends = {e["id"]: e for e in trace if e["ph"] == "f"}
    assert len(begins) == len(ends) == 3 * 3  # in each step three ranks waited for one
    for arrow in begins:
        assert arrow["tid"] == 2 and ends[arrow["id"]]["tid"] != 2
        assert ends[arrow["id"]]["ts"] > arrow["ts"]
        target = ends[arrow["id"]]
        inside = [
            e
            for (r, *_), e in slices.items()
            if r == target["tid"] and e["ts"] <= target["ts"] <= e["ts"] + e["dur"]
        ]
        assert inside and inside[-1]["name"] == "launch"


def test_own_work_is_told_in_steps():
    shares = own_share(spans_of(4, 30, slow=1))
    assert shares[1] == pytest.approx(0.12) and shares[0] == shares[2] == shares[3] == 0
    assert own_share({0: [], 1: []}) == {0: 0.0, 1: 0.0}


def test_silence_locates_a_rank_in_the_grid():
    grid = parse_grid("pipe=2,data=2,tensor=4", 8)  # two devices a rank
    places = {r: (7, "wait") for r in range(8)} | {5: (7, "data")}
    assert silent(places, grid).splitlines() == [
        "furthest behind, in 'data' of step 7: rank 5",
        "rows: pipe x data; along a row: tensor",
        "pipe 0 data 0 ....",
        "pipe 0 data 1 ....",
        "pipe 1 data 0 ..##",
        "pipe 1 data 1 ....",
    ]
    places[0] = (6, "wait")
    assert silent(places, parse_grid(None, 8)).splitlines() == [
        "furthest behind, in 'wait' of step 6: rank 0",
        "rows: all; along a row: rank",
        " #.......",
    ]


@pytest.mark.parametrize("text", ["data", "data=x", "data=3", "data=0,tensor=4", ""])
def test_a_grid_that_is_none(text):
    with pytest.raises(UserError, match="--grid"):
        parse_grid(text, 4)


def test_the_heat_map_shows_the_slow_rank(tmp_path):
    shares = own_share(spans_of(4, 30, slow=2, more=0.3))
    grid = parse_grid("data=2,tensor=4", 4)
    page = heat_html(shares, grid)
    assert "rank 2 does 30.0 % of a step more" in page
    assert page.count("background:#ff0000") == 2 and page.count("background:#ffffff") == 6
    assert page.index("data 1") < page.index("#ff0000")
    draw_heat(shares, grid, tmp_path / "heat.png")
    assert (tmp_path / "heat.png").read_bytes()[:4] == b"\x89PNG"


def test_ettr_by_the_formula():
    assert timeline.formula(100, 2.0, 20.0, 50.0) == pytest.approx(200 / (200 + 110 + 50))


def test_compilation_is_no_training():
    rows = [{"step": 1, "step_time_s": 40.0, "time_compile_s": 38.0}, {"step": 2, "step_time_s": 2}]
    events = [{"time": 0, "event": "start"}, {"time": 50, "event": "end"}]
    figures = timeline.measured(events, [*rows, {"step": 2, "eval_loss": 1.0}])
    assert (figures["training_s"], figures["down_s"]) == (4, 46) and figures["ettr"] == 0.08


def test_ettr_by_measurement_agrees_with_the_formula():
    """One fault an interval at every moment of it in turn: the mean loss is the formula's."""
    interval, step_s, load_s = 50, 2.0, 30.0
    wasted = training = 0.0
    for lost in range(interval):  # steps since the save when the fault strikes
        rows = [{"step": s, "step_time_s": step_s} for s in range(1, interval + 1)]
        rows = rows[:lost] + rows
        end = (interval + lost) * step_s + load_s
        events = [
            {"time": 0, "event": "start"},
            {"time": 1, "event": "fault"},
            {"time": end, "event": "end"},
        ]
        figures = timeline.measured(events, rows)
        assert (figures["training_s"], figures["redone_s"]) == (interval * step_s, lost * step_s)
        assert (figures["down_s"], figures["faults"]) == (pytest.approx(load_s), 1)
        wasted += figures["total_s"]
        training += figures["training_s"]
    assert training / wasted == pytest.approx(
        timeline.formula(interval, step_s, 0, load_s), rel=0.01
    )
