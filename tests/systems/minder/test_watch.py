"""The daemon's loop on a clock and a source that the tests move: gaps, outages, restarts, outlets.

What the detector says is scripted here; tests/systems/minder/test_watch_server.py runs the real one
on a real server.
"""

import itertools
import json
import threading

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor import exporter
from megajax.monitor.samples import Grid, Samples
from megajax.monitor.sources import Refused, Unavailable
from megajax.systems.minder import Alert
from megajax.systems.minder.detector import Recent, merged
from megajax.systems.minder.refit import Result
from megajax.systems.minder.reporter import NAMES, Heat, Ledger, Reporter, draw_alert
from megajax.systems.minder.watch import Pace, Watch

BEGIN = 1_700_000_000
MACHINES = tuple(f"m{i}" for i in range(5))
ALERT = Alert.of_machine(
    "m3", "cpu_usage", BEGIN - 90, 1.5, "cpu_contention", (("cpu_usage", 4.0),), BEGIN
)


class World:
    """A source whose clock the test moves. asked: what was read."""

    def __init__(self):
        self.now, self.asked, self.fails = BEGIN + 5.0, [], None

    def __call__(self):
        return self.now

    def read(self, start, end):
        if self.fails is not None:
            raise self.fails
        self.asked.append((start, end))
        rows = [
            (float(t), m, "cpu_usage", 0.1 + 0.5 * (m == "m3"))
            for t, m in itertools.product(range(int(start), int(end)), MACHINES)
        ]
        return Samples.of(rows, start, end)


class Scripted:
    """A detector that says what it is told to. seconds: all that it was given."""

    def __init__(self, alerts=()):
        self.alerts, self.seconds, self.notes = list(alerts), [], []
        self.named, self.scores, self.machines = {}, dict.fromkeys(MACHINES, 0.1), MACHINES
        self.error, self.gone = None, []

    def leave(self, machine):
        self.gone.append(machine)

    def update(self, grid):
        self.seconds += range(grid.start, grid.end)
        if self.error is not None:
            raise self.error
        alerts = [a for a in self.alerts if grid.start < a.at <= grid.end]
        self.named |= {a.machine: a.at + 600 for a in alerts}
        self.named = {m: until for m, until in self.named.items() if until > grid.end}
        return alerts


class Outlet:
    """Where Alertmanager would be."""

    def __init__(self):
        self.got, self.failures = [], 0

    def put(self, alert):
        self.got.append(alert)

    def close(self):
        pass


@pytest.fixture
def setting(tmp_path):
    """make(detector) -> (watch, said lines, what Alertmanager got, reporter).

    later: makes the detectors after the first one; None: it is always the same.
    """
    made = []

    def make(world, detector, pace=Pace(history_s=0), later=None, **kw):
        said, outlet, first = [], Outlet(), iter([detector])

        def load():
            return next(first, None) or (detector if later is None else later())

        ledger = Ledger(tmp_path / "alerts.json", 600)
        reporter = Reporter(tmp_path, ledger, said.append, outlet, tmp_path / "heat.html")
        made.append(reporter)
        watch = Watch(world, load, reporter, pace, clock=world, **kw)
        return watch, said, outlet, reporter

    yield make
    for reporter in made:
        reporter.close()


def go(watch, world, seconds, step=8):
    for _ in range(seconds // step):
        world.now += step
        watch.look()


def test_every_second_is_judged_once_whatever_fails_meanwhile(setting):
    world, detector = World(), Scripted()
    watch, said, _, reporter = setting(world, detector)
    go(watch, world, 80)
    world.fails = Unavailable("http://x: no answer of HTTP: 123")
    go(watch, world, 160)
    assert reporter.gauges["source_up"] == 0.0 and reporter.count["source_failures_total"] == 20
    world.fails = None
    go(watch, world, 80)
    assert detector.seconds == list(range(detector.seconds[0], int(world.now) - 5))
    assert len(detector.seconds) >= 320 and reporter.gauges["source_up"] == 1.0
    troubles = [line for line in said if line.startswith("reading")]
    assert len(troubles) == 2 and "works again, after 20 failures" in troubles[1], troubles
    assert reporter.count["judged_seconds_total"] == len(detector.seconds)


def test_a_long_gap_is_bounded_and_named_and_a_longer_one_forgets(setting):
    world, made = World(), []

    def load():
        made.append(Scripted())
        return made[-1]

    watch, said, _, reporter = setting(world, Scripted(), Pace(history_s=0, gap_s=300), load)
    go(watch, world, 24)
    world.now += 1000
    watch.look()
    assert world.asked[-1] == (world.now - 305, world.now - 5) and not made
    assert any("are too long ago and will not be judged" in line for line in said)
    assert reporter.count["skipped_seconds_total"] == 700
    world.now += 9000
    watch.look()
    assert len(made) == 1 and len(made[0].seconds) == 300


def test_the_past_is_read_at_the_start_in_pieces_and_a_clock_that_goes_back_begins_anew(setting):
    world, made = World(), []

    def load():
        made.append(Scripted())
        return made[-1]

    watch, said, *_ = setting(world, Scripted(), Pace(history_s=2000), load)
    for _ in range(3):
        watch.look()
    assert [b - a for a, b in world.asked] == [900, 900, 200] and world.asked[-1][1] == BEGIN
    world.now -= 500
    watch.look()
    assert "the clock went back by 500 s" in said[-1] and len(made) == 1
    go(watch, world, 16)
    assert made[0].seconds == list(range(BEGIN - 500, BEGIN - 484))


def test_a_server_that_is_too_slow_for_all_is_asked_for_less(setting):
    """Else what it missed would grow, and with it each request."""
    world, detector = World(), Scripted()
    read, tried = world.read, []

    def slow(start, end):
        tried.append(end - start)
        if end - start > 120:
            raise Unavailable("no whole answer within 5 s")
        return read(start, end)

    world.read = slow
    watch, *_ = setting(world, detector, Pace(history_s=800))
    go(watch, world, 400)
    assert tried[:5] == [800, 450, 225, 112, 224] and max(tried[5:]) <= 225
    assert detector.seconds == list(range(BEGIN - 792, int(world.now) - 5))


def test_the_interval_of_the_server_sets_how_far_before_now_is_read(setting):
    world = World()
    world.interval_s = 15.0
    watch, *_ = setting(world, Scripted())
    watch.look()
    assert world.asked[-1][1] == BEGIN + 5 - 30


def test_a_refusal_at_the_start_ends_it_and_later_it_does_not(setting):
    world = World()
    watch, said, *_ = setting(world, Scripted())
    world.fails = Unavailable("away")
    watch.look()
    world.fails = Refused("http://x: 401 Unauthorized")
    with pytest.raises(Refused, match="401"):
        watch.look()
    world.fails = None
    watch.look()
    world.fails = Refused("http://x: 401 Unauthorized")
    go(watch, world, 80)
    assert sum("401" in line for line in said) == 1 and "watching goes on" in said[-1]


@pytest.mark.parametrize("only", ["", "other.*"])
def test_metrics_without_a_sample_are_reported_until_they_are_back(setting, only):
    world, detector = World(), Scripted()
    watch, said, _, reporter = setting(world, detector, Pace(history_s=0, machines=only))
    read = world.read
    if not only:
        go(watch, world, 16)
        world.read = lambda start, end: Samples.of([], start, end)
    seconds = reporter.count["judged_seconds_total"]
    go(watch, world, 80)
    assert len(said) == 1 and "no machine has a sample from" in said[0], said
    assert ("none of the 5 machines" in said[0] and "'other.*'" in said[0]) == bool(only)
    assert reporter.count["judged_seconds_total"] == seconds
    if not only:
        world.read = read
        go(watch, world, 8)
        assert len(said) == 2 and "works again" in said[1]


def test_few_machines_are_said_once_and_watching_goes_on(setting):
    world, detector = World(), Scripted()
    watch, said, _, reporter = setting(world, detector)
    detector.error = UserError("a job of 3 machines cannot be judged: at least 4 are needed")
    go(watch, world, 80)
    assert len(said) == 1 and "3 machines" in said[0]
    assert reporter.count["refused_windows_total"] == 10
    detector.error = None
    go(watch, world, 16)
    assert len(said) == 2 and "works again" in said[1]


def test_a_new_model_takes_over_the_last_minutes_and_repeats_no_alert(setting):
    world, old, results = World(), Scripted([ALERT]), []
    new = {"machine": "m1", "at": BEGIN + 10}  # the old detector saw none of this
    other = Alert.of_machine(**ALERT.measured | new)
    made = []

    class Fits:
        seconds = 0

        def keep(self, grid, lasting):
            self.seconds += grid.values_CNT.shape[2]

        def poll(self, now):
            return results.pop() if results else None

    def load():
        made.append(Scripted([ALERT, other]))
        return made[-1]

    fits = Fits()
    watch, said, _, reporter = setting(world, old, Pace(history_s=300), load, refit=fits)
    go(watch, world, 80)
    results.append(Result("rejected", "retraining: it is blind", {"named": 0}))
    go(watch, world, 8)
    assert made == [] and said[-1] == "retraining: it is blind"
    results.append(Result("accepted", "retrained", {}))
    go(watch, world, 8)
    before = len(made[0].seconds)
    assert made[0].seconds == old.seconds and fits.seconds == before
    assert [line[:9] for line in said if "ALERT" in line] == ["ALERT m3:", "ALERT m1:"]
    go(watch, world, 16)
    assert len(old.seconds) == before and len(made[0].seconds) == before + 16
    assert reporter.count["judged_seconds_total"] == before + 16  # the replay does not count
    assert reporter.fits == {"rejected": 1, "accepted": 1}

    def full(now):
        raise OSError(28, "No space left on device")

    fits.poll = full
    go(watch, world, 24)
    assert "retraining: [Errno 28]" in said[-1] and len(made[0].seconds) == before + 40


def test_who_left_on_purpose_stands_in_a_file_that_may_change(setting, tmp_path):
    world, detector = World(), Scripted()
    detector.machines = ("a:9100", "b:9100", "c")
    file = tmp_path / "blocklist"
    watch, said, *_ = setting(world, detector, Pace(history_s=0, left=file))
    watch.look()
    assert detector.gone == []
    file.write_text("b\n")
    go(watch, world, 8)
    file.write_text("a:9100\nc\nx\n")
    go(watch, world, 8)
    assert detector.gone == ["b:9100", "a:9100", "c"] and said == []
    file.unlink()
    file.mkdir()
    go(watch, world, 24)
    assert len(said) == 1 and "blocklist" in said[0] and len(detector.seconds) >= 40


def test_a_note_is_said_when_it_comes_and_not_while_it_stays(setting, monkeypatch):
    world, detector = World(), Scripted()
    monkeypatch.setattr("megajax.systems.minder.detector.MAX_NOTES", 1)
    watch, said, *_ = setting(world, detector)
    detector.notes = ["machine m1 gave nothing since 1700000001"]
    watch.look()
    detector.notes = ["machine m1 gave nothing since 1700000009"]
    go(watch, world, 80)
    assert said == ["machine m1 gave nothing since 1700000001"]
    detector.notes = ["metric x has another unit"]
    go(watch, world, 8)
    assert len(said) == 2
    detector.notes = ["machine m1 gave nothing since 1700000090"]  # only one note is remembered
    go(watch, world, 8)
    assert len(said) == 3


def test_an_alert_is_told_everywhere_once_and_ends_when_the_machine_is_like_the_others(
    setting, tmp_path
):
    world, detector = World(), Scripted([ALERT])
    watch, said, outlet, reporter = setting(world, detector, Pace(history_s=300))
    watch.look()
    go(watch, world, 400)
    detector.named["m3"] = BEGIN + 900  # it differed until BEGIN + 300
    go(watch, world, 488)
    assert len(said) == 1 and world.now == BEGIN + 893
    go(watch, world, 16)
    assert [line for line in said if line.startswith("ALERT m3: cpu_usage")] == said[:1]
    assert len(said) == 2 and said[1].startswith("m3: like the others again")
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [r["event"] for r in rows] == ["alert", "resolved"]
    assert rows[0]["rule"] == "minder" and rows[0]["hosts"] == ["m3"]
    assert rows[0]["since"] == ALERT.since and rows[1]["last"] == BEGIN + 300
    (picture,) = (tmp_path / "alerts").glob("*.png")
    assert rows[0]["picture"] == str(picture) and picture.stem.endswith("-m3")
    first, last = outlet.got
    assert first.labels == last.labels and first.since == ALERT.since and first.ended is None
    assert first.labels["machine"] == "m3" and last.ended == BEGIN + 300
    assert "<b>m3</b>" not in (tmp_path / "heat.html").read_text()
    text = exporter.text(reporter.rows())
    assert 'megajax_minder_alerts_total{machine="m3"} 1.0' in text
    assert "megajax_minder_alerts 0.0" in text
    assert {line.split()[2] for line in text.splitlines() if line[0] == "#"} <= set(NAMES)


def test_a_restarted_daemon_does_not_repeat_what_lasts_and_ends_it(setting, tmp_path):
    world = World()
    watch, said, _, reporter = setting(world, Scripted([ALERT]), Pace(history_s=300))
    watch.look()
    assert len(said) == 1
    world.now += 60
    again, said, outlet, _ = setting(world, Scripted([ALERT]), Pace(history_s=300))
    assert [a.labels["machine"] for a in outlet.got] == ["m3"]  # it still lasts
    again.look()
    assert said == [] and len(again._recent._grids) == 1
    later = Alert.of_machine(**ALERT.measured | {"at": BEGIN + 900})  # told anew by then
    world.now += 840
    third, said, *_ = setting(world, Scripted([later]), Pace(history_s=300))
    third.look()
    assert len(said) == 1 and said[0].startswith("ALERT m3")
    (tmp_path / "alerts.json").write_text('{"alerts": [{"alert": {"machine": 3}}]}')
    assert "cannot be read" in Ledger(tmp_path / "alerts.json", 600).trouble


def test_a_disk_that_takes_nothing_ends_no_watch(setting, tmp_path, monkeypatch):
    world = World()
    watch, said, outlet, reporter = setting(world, Scripted([ALERT]), Pace(history_s=300))
    (tmp_path / "alerts").write_text("a file where the folder should be")
    monkeypatch.setattr(reporter._lines, "write", lambda line: False)
    reporter.ledger._path = tmp_path / "alerts" / "alerts.json"
    watch.look()
    assert any(line.startswith("ALERT m3") for line in said) and len(outlet.got) == 1
    assert "megajax_minder_lost_writes_total 3.0" in exporter.text(reporter.rows())


def test_the_loop_stops_when_told(setting):
    world, stop = World(), threading.Event()
    watch, *_ = setting(world, Scripted(), Pace(period_s=0.01, history_s=0))
    look = watch.look

    def counted():
        look()
        world.now += 8
        if len(world.asked) == 3:
            stop.set()

    watch.look = counted
    watch.run(stop)
    assert len(world.asked) == 3 and watch.seconds == 17


def test_recent_seconds_are_put_together_with_their_holes():
    recent = Recent(20)
    for start in range(0, 40, 10):
        machines = ("a", "b") if start < 20 else ("b", "c")
        values = np.full((1, 2, 10), start, np.float32)
        recent.add(Grid(start, 1, values, machines, ("x",)))
    grid = recent.metric("x", 15, 45)
    assert grid.machines == ("a", "b", "c") and grid.values_CNT.shape == (1, 3, 30)
    assert np.isnan(grid.values_CNT[0, 0, 5:]).all() and (grid.values_CNT[0, 0, :5] == 10).all()
    assert (grid.values_CNT[0, 1, :25] == np.repeat([10, 20, 30], [5, 10, 10])).all()
    assert np.isnan(grid.values_CNT[0, :, 25:]).all()
    assert recent.metric("x", 0, 10).machines == ()  # too long ago
    assert merged([], ["x"]).values_CNT.shape == (1, 0, 0)


@pytest.mark.parametrize(("machines", "suffix"), [(5, ".svg"), (80, ".png")])
def test_pictures_of_few_and_of_many_machines(tmp_path, machines, suffix):
    recent, heat = Recent(900), Heat()
    values = np.random.default_rng(0).random((2, machines, 400)).astype(np.float32)
    values[0, 3, 200:] = np.nan  # a series that ended
    values[1, :, 100:110] = np.nan
    names = tuple(f"m{i:02}" for i in range(machines))
    recent.add(Grid(BEGIN - 390, 1, values, names, ("cpu_usage", "memory_usage")))
    alert = Alert.of_machine(
        "m03", "cpu_usage", BEGIN - 100, 2, "vanished", (("memory_usage", 3.0),), BEGIN
    )
    draw_alert(alert, recent, BEGIN + 10, tmp_path / f"a{suffix}")
    for k in range(5):
        heat.add(BEGIN + 8 * k, {n: i / 4 for i, n in enumerate(names[k:])})
    for ending in (".html", suffix):
        heat.write(tmp_path / f"heat{ending}", ["m03"])
    assert {p.name for p in tmp_path.iterdir()} == {f"a{suffix}", "heat.html", f"heat{suffix}"}
    page = (tmp_path / "heat.html").read_text()
    assert page.count("<tr>") == min(machines, 64) and page.index("<b>m03") < page.index(names[-1])
    if suffix == ".svg":
        assert "m03" in (tmp_path / "a.svg").read_text()
