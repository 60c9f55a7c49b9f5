"""--detector=minder put together: flags, its budget over attempts, its records, its child."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.monitor.alerts import RESPONSES, Action
from megajax.monitor.detectors import DETECTORS, Limits
from megajax.monitor.minder_config import MinderConfig
from megajax.monitor.records import Record
from megajax.monitor.samples import Samples
from megajax.monitor.slow_rank import RecordFile
from megajax.monitor.sources import from_records, read
from megajax.monitor.sources.http_query import Unavailable
from megajax.systems.minder import run
from megajax.systems.minder.child import Child, Feed, Judges, host_of
from megajax.systems.minder.detector import without_numbers
from scripts import supervise
from tests.monitor.test_watchdog import Stream

HOSTS = {f"h{r}": (r,) for r in range(4)}


def flags(*words):
    settings, _ = supervise.parse([*words, "--", "true"])
    return run.choose_detectors(vars(settings), DETECTORS)


def test_both_spellings_add_minder_to_the_default_with_its_responses():
    detectors, responses = flags("--detector=minder")
    assert list(detectors) == [*DETECTORS, "minder"]
    assert responses == {
        "straggler": "warn",
        "hang": "warn",
        "slow": "evict",
        "minder": "evict",
        "course": "warn",
    }
    other = flags("--detectors=default,minder", "--respond=slow=warn,hang=restart")
    assert list(other[0]) == list(detectors)
    assert (other[1]["slow"], other[1]["hang"]) == ("warn", "restart")
    assert "minder" not in flags()[0] and set(flags()[1]) == {"straggler"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minder.hang_s=3"], "need --detector=minder"),
        (["--prometheus=http://x:1"], "need --detector=minder"),
        (["--respond=slow=warn"], "slow"),
        (["--detector=mindr"], "Did you mean minder"),
        (["--detector=minder", "--prometheus=http://x:1"], "minder.model"),
        (["--detector=minder", "--minder.model=/nowhere"], "is no file"),
        (["--detector=minder", "--minder.continuity_s=1"], "nearest: 10"),
        (["--detector=minder", "--minder.evictions_per_day=-1"], "evictions_per_day"),
    ],
)
def test_a_mistake_in_the_flags(words, message):
    with pytest.raises(UserError, match=message):
        flags(*words)


class Told(list):
    def __call__(self, event, message, **values):
        self.append((event, message))


def job(minder):
    rules = {"minder": minder.attempt}
    return Stream(HOSTS, Limits(), detectors=rules, responses={**RESPONSES, **run.RESPONSES})


def train(s, seconds, step_s, slow=None):
    actions, first = [], max((x or 0) for x in s.steps.values()) + 1
    for step in range(first, first + seconds):
        for r in HOSTS.values():
            work_s = 0.02 + (0.4 if r[0] == slow else 0)
            s.put(r[0], "wait", step, own_s=work_s + 0.001 * ((step + r[0]) % 3), step_s=step_s)
        actions += s.tick()
    return actions


@pytest.mark.parametrize(("after_s", "verdict"), [(1.0, "right"), (1.4, "false alarm")])
def test_the_steps_after_an_eviction_say_whether_it_was_right(tmp_path, after_s, verdict):
    told, emitted = Told(), []
    minder = run.RunMinder(MinderConfig(continuity_s=20), None, tmp_path, told, emitted.extend)
    s = job(minder)
    assert "no model" in told[0][1]
    assert train(s, 60, 1.0) == []
    (action,) = train(s, 30, 1.4, slow=2)
    assert (action.kind, action.rule, action.hosts) == ("evict", "slow", ("h2",))
    assert minder.refuses(action) is None
    minder.evicts(action)
    assert "not known yet" in minder.refuses(action)
    s = job(minder)  # the next attempt, with another host in its place
    assert train(s, 30, after_s) == []
    assert told[-1][0] == "eviction" and verdict in told[-1][1]
    assert (minder.refuses(action) is None) == (verdict == "right")
    assert minder.acquitted() == ([] if verdict == "right" else ["h2"]) and not minder.acquitted()
    again = run.RunMinder(MinderConfig(), None, tmp_path, told, emitted.extend)
    assert (again.refuses(action) is None) == (verdict == "right")  # of the next driver
    assert {r.rank for r in emitted if r.name == "own_work_share"} == {0, 1, 2, 3}


def test_steps_before_an_eviction_by_metrics_are_those_of_the_whole_continuity(tmp_path):
    """A tick of long steps holds few of them, and may hold just a short one."""
    told = Told()
    minder = run.RunMinder(MinderConfig(continuity_s=20), None, tmp_path, told, lambda _: None)
    s = job(minder)
    assert train(s, 60, 1.0) == []
    train(s, 30, 4.0)  # all are slow: no rank of its own, so only metrics name a host
    train(s, 3, 0.1)
    minder.evicts(Action("evict", "minder", "odd", (2,), ("h2",), 90))
    (eviction,) = minder.evictions.all
    assert (eviction.usual_s, eviction.slow_s) == (pytest.approx(1.0), pytest.approx(4.0))
    train(job(minder), 30, 1.0)
    assert eviction.verdict == "right", told


def test_a_successor_that_is_slow_too_makes_the_eviction_a_false_alarm(tmp_path):
    told = Told()
    minder = run.RunMinder(MinderConfig(continuity_s=20), None, tmp_path, told, lambda _: None)
    s = job(minder)
    train(s, 60, 1.0)
    (action,) = train(s, 30, 1.4, slow=2)
    minder.evicts(action)
    s = job(minder)
    train(s, 30, 1.4, slow=2)
    assert [m for e, m in told if e == "eviction" and "false alarm" in m]


# ---- records on their way to the child


def machine_records(hosts, seconds, start, sick=None, seed=0):
    """A record a second of three metrics of each host; one of them burns from the middle on."""
    random = np.random.default_rng(seed)
    records, sent = [], 0.0
    for t in range(seconds):
        wave = 0.1 * np.sin(t / 7)
        sent += 1e6 * (1 + wave)
        for h in range(hosts):
            busy = sick == h and t > seconds / 2
            cpu = 0.99 if busy else 0.3 + wave + 0.02 * random.standard_normal()
            values = {
                "cpu_share": cpu,
                "memory_share": 0.4 + 0.01 * random.standard_normal(),
                "network_bytes": sent,
            }
            records += [Record(start + t, f"h{h}", None, None, t, n, v) for n, v in values.items()]
            records.append(Record(start + t, f"h{h}", h, None, t, "cpu_cores", 4 * cpu))
    return records


def test_a_file_of_records_is_read_as_the_records_are(tmp_path):
    records = machine_records(3, 20, 1e9) + [Record(1e9, 'a "b"', 0, 1, 1, "gpu_duty", 0.5)]
    file = RecordFile(tmp_path / "x.csv.gz")
    for k in range(0, len(records), 7):
        file.write([*records[k : k + 7], Record(1e9, "h0", 0, None, 1, "loss", 3.0)])
    file.close()
    got, want = read(tmp_path / "x.csv.gz"), from_records(records)
    assert set(got.machines) == set(want.machines) and set(got.metrics) == set(want.metrics)
    for a, b in zip(sorted(got.rows()), sorted(want.rows()), strict=True):
        assert a[1:3] == b[1:3] and a[0] == pytest.approx(b[0]) and a[3] == pytest.approx(b[3])
    with pytest.raises(UserError, match=r"end with \.csv\.gz"):
        RecordFile(tmp_path / "x.csv")


def test_windows_follow_each_other_and_lose_no_rate():
    records = machine_records(4, 60, 1e9)
    feed, windows = Feed(None), []
    for t in range(0, 60, 5):
        feed.add([list(r) for r in records if t <= r.time - 1e9 < t + 5])
        windows.append(feed.window(1e9 + t + 5 + 4))
    assert [(w.start, w.end) for w in windows] == [(1e9 + t, 1e9 + t + 5) for t in range(0, 60, 5)]
    samples = from_records(records)
    got = sorted(row for w in windows for row in w.rows())
    assert len(got) == len(samples)
    assert {r[2] for r in got} >= {"cpu_usage", "memory_usage", "tcp_rdma_throughput"}


def test_machines_of_a_server_are_hosts_of_the_job():
    machines = ["h1:9100", "h2.cluster.org:9100", "h3", "10.0.0.1:9100", "other:9100"]
    hosts = ["h1", "h2", "h3.x", "10.0.0.2"]
    expected = {"h1:9100": "h1", "h2.cluster.org:9100": "h2", "h3": "h3.x"}
    assert host_of(machines, hosts) == expected
    assert host_of(["10.0.0.1:9100"], ["10.0.0.1", "10.0.0.2"]) == {"10.0.0.1:9100": "10.0.0.1"}


class Served:
    """A source that shows the processors of some machines, or is away."""

    def __init__(self, *machines):
        self.machines, self.is_away = machines, False

    def read(self, start, end):
        if self.is_away:
            raise Unavailable("nobody listens")
        rows = [(t, m, "cpu_usage", 0.5) for t in range(start, end) for m in self.machines]
        return replace(Samples.of(rows, start, end), notes=("one page was lost",))


def test_a_metric_that_the_server_shows_is_not_mixed_with_that_of_the_records():
    server = Served("h0:9100", "h1:9100", "other:9100")
    feed = Feed(server)
    feed.machines = ("h0", "h1", "h2", "h3")

    def window(t):
        feed.add([list(r) for r in records if t <= r.time - 1e9 < t + 5])
        return feed.window(1e9 + t + 5 + 4)

    records = machine_records(4, 20, 1e9)
    first = window(0)
    assert first.notes == ("one page was lost",) and not feed.notes
    cpu = [(m, v) for _, m, c, v in first.rows() if c == "cpu_usage"]
    assert {m for m, _ in cpu} == {"h0", "h1"} and {v for _, v in cpu} == {0.5}
    assert {m for _, m, c, _ in first.rows() if c == "memory_usage"} == {*feed.machines}
    server.is_away = True  # the records' measure does not come in its place
    shown = {c for _, _, c, _ in window(5).rows()}
    assert "memory_usage" in shown and "cpu_usage" not in shown
    assert ["nobody listens" in n for n in feed.notes] == [True]


def test_notes_of_two_machines_are_two_and_of_two_counts_one():
    note = "{} rows of {} came late at {}"
    assert without_numbers(note.format(3, "h1", 1e9)) == without_numbers(note.format(4, "h1", 2.5))
    for a, b in (("h1", "h2"), ("10.0.0.1", "10.0.0.2"), ("10.0.0.1:91", "10.0.0.1:92")):
        assert without_numbers(note.format(3, a, 1)) != without_numbers(note.format(3, b, 1))


def test_a_host_that_is_in_no_further_attempt_is_not_judged_silent():
    feed, records = Feed(None), machine_records(4, 20, 1e9)
    assert feed.begin(["h0", "h1", "h2"]) == []
    feed.add([list(r) for r in records if r.time < 1e9 + 10])
    assert "h2" in feed.window(1e9 + 9).machines
    assert feed.begin(["h0", "h1", "h3"]) == ["h2"]
    feed.add([list(r) for r in records if r.time >= 1e9 + 10 and r.host != "h2"])
    assert {m for _, m, _, _ in feed.window(1e9 + 24).rows()} == {"h0", "h1", "h3"}


def test_a_server_of_other_machines_is_said():
    feed = Feed(Served("node1:9100", "node2:9100"))
    feed.machines = ("h0", "h1")
    assert {m for _, m, _, _ in feed.window(1e9).rows()} == {"node1:9100", "node2:9100"}
    (note,) = feed.notes
    assert "node1:9100, node2:9100) has the name of a host of this job (h0, h1)" in note
    # What it shows of them takes no metric out of the records.
    feed.add([list(r) for r in machine_records(2, 20, 1e9) if r.time >= 1e9])
    shown = {m for _, m, c, _ in feed.window(1e9 + 19).rows() if c == "cpu_usage"}
    assert shown == {"h0", "h1", "node1:9100", "node2:9100"}


class Notebook:
    """A runner that says which machines it saw, and that any with a load above 0.9 is odd."""

    def __init__(self):
        self.detector, self.seen, self.left = self, set(), []
        self.scores = {}

    def leave(self, machine):
        self.left.append(machine)
        self.scores.pop(machine, None)

    def judge(self, window):
        load = {m: v for _, m, c, v in window.rows() if c == "cpu_usage"}
        self.seen, self.scores = set(load), self.scores | load
        return [m for m, v in load.items() if v > 0.9], [f"{len(load)} machines"], None

    def is_new(self, note):
        return True


def test_the_metrics_of_hosts_are_compared_within_their_kind():
    made = []
    judges = Judges(lambda: made.append(Notebook()) or made[-1])
    window = from_records(machine_records(6, 20, 1e9, sick=4))
    alerts, notes, scores = judges.judge(window)
    assert (alerts, notes, set(scores)) == (["h4"], ["6 machines"], {f"h{i}" for i in range(6)})
    kinds = {f"h{h}": "H100" if h < 3 else "L4" for h in range(6)}
    judges.begin([], kinds)
    alerts, notes, scores = judges.judge(window)
    assert [sorted(one.seen) for one in made[1:]] == [["h0", "h1", "h2"], ["h3", "h4", "h5"]]
    assert alerts == ["h4"] and notes == ["H100: 3 machines", "L4: 3 machines"]
    assert sorted(made[0].left) == sorted(kinds) and set(scores) == set(kinds)
    judges.begin(["h5"], None)  # the next attempt, before its processes say of which kind they are
    judges.judge(from_records(machine_records(5, 20, 2e9)))
    assert sorted(made[2].left) == ["h0", "h1", "h2", "h5"] and made[1].seen == {"h0", "h1", "h2"}
    silent = from_records([r for r in machine_records(5, 20, 2e9) if r.host < "h3"])
    judges.judge(silent)
    assert made[2].seen == set()  # it hears that its hosts are silent
    judges.begin([], dict.fromkeys(kinds, "L4"))
    judges.judge(window)
    assert made[2].seen == set(kinds) and len(made) == 3


@pytest.mark.slow
@pytest.mark.process
def test_a_child_names_the_host_with_odd_metrics_and_its_end_costs_nothing(tmp_path):
    from megajax.systems.minder import Detector

    healthy = [from_records(machine_records(6, 1200, 1e9, seed=s)) for s in range(2)]
    model = tmp_path / "model.npz"
    Detector.fit(healthy, steps=300).save(model)
    options = {"model": str(model), "settings": {"continuity_s": 96.0}, "server": None}
    child = Child(options)
    try:
        child.begin([f"h{h}" for h in range(6)])
        start = int(time.time()) - 1210
        records = machine_records(6, 1200, start, sick=4, seed=9)
        for t in range(0, 1200, 60):
            child.send([r for r in records if t <= r.time - start < t + 60])
        alerts, scores, end = [], {}, time.monotonic() + 240
        while not alerts and time.monotonic() < end:
            more, _, newest = child.take()
            alerts, scores = alerts + more, scores | newest
            time.sleep(0.5)
        assert [a.machine for a in alerts] == ["h4"] and max(scores, key=scores.get) == "h4"
        assert start + 570 <= alerts[0].since <= start + 660
    finally:
        child.close()
    (tmp_path / "bad.npz").write_bytes(b"no model")
    child = Child({"model": str(tmp_path / "bad.npz"), "settings": {}, "server": None})
    notes, end = [], time.monotonic() + 120
    while not notes and time.monotonic() < end:
        notes += child.take()[1]
        time.sleep(0.2)
    assert "ended" in notes[0] and "bad.npz" in notes[0] and "the job goes on" in notes[0]
    child.send(machine_records(4, 3, 1e9))
    child.close()
    json.dumps(notes)
