"""A Prometheus and an Alertmanager that lie: whatever they answer, the daemon goes on.

Answers are bytes on a socket, so that nothing but this file decides what is sent. The daemon is the
real one with a detector that finds nothing.
"""

import contextlib
import itertools
import json
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from megajax.monitor import sources
from megajax.monitor.samples import Samples, to_grid
from megajax.monitor.sources import convert, http_query, server
from megajax.systems.minder.reporter import Alertmanager, Firing, Ledger, Reporter
from megajax.systems.minder.watch import Pace, Watch

T0 = 1_700_000_000
NAMES = ["node_cpu_seconds_total", "DCGM_FI_DEV_GPU_UTIL"]


class Liar:
    """Answers each request with what `lie(target)` returns: bytes, or a function of the socket;
    None: as Prometheus does."""

    def __init__(self):
        self.lie, self.asked = (lambda target: None), 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError), connection:
            connection.settimeout(5)
            head = b""
            while b"\r\n\r\n" not in head:
                if not (part := connection.recv(65536)):
                    return
                head += part
            self.asked += 1
            target = head.split(b" ")[1].decode("latin1")
            answer = self.lie(target)
            if answer is None:
                answer = honest(target)
            if callable(answer):
                answer(connection)
            else:
                connection.sendall(answer)


def response(body, status=b"200 OK", headers=b""):
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n%b\r\n%b" % (status, len(body), headers, body)


def good(data, **more):
    return response(json.dumps({"status": "success", "data": data, **more}).encode())


def matrix(*entries):
    return good({"resultType": "matrix", "result": list(entries)})


def series(machine, values=((T0, "1"),), **labels):
    return {"metric": {"instance": machine, **labels}, "values": [list(v) for v in values]}


def honest(target):
    if "label/__name__" in target:
        return good(NAMES)
    if "/query?" in target:
        return matrix(series("h0:9100", [(T0 + 2 * k, "1") for k in range(9)]))
    start, end = (int(target.partition(f"{k}=")[2].partition("&")[0]) for k in ("start", "end"))
    times = range(start, end + 1)
    return matrix(*(series(f"h{n}:9100", [(t, str(t % 7)) for t in times]) for n in range(5)))


def pages(answer):
    """Lies about samples only."""
    return lambda target: answer if "query_range" in target else None


def intervals(*times):
    told = matrix(series("h0:9100", [(t, "1") for t in times]))
    return lambda target: told if "/query?" in target else None


def every(answer):
    return lambda target: answer


def endless(begin, part):
    def send(connection):
        connection.sendall(begin)
        while True:
            connection.sendall(part)

    return send


def drip(connection):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    for _ in range(100):
        connection.sendall(b"{")
        time.sleep(0.05)


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def moved(location):
    return every(response(b"", b"302 Found", b"Location: " + location + b"\r\n"))


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
MEBIBYTE = b"a" * 2**20
LIES = {
    "a list as a metric's name": every(good([["a"], {"b": 1}])),
    "no names": every(good(None)),
    "names that are a number": every(good(7)),
    "a name of 100,000 characters": every(good(["x" * 100_000])),
    "a redirect to half an IPv6 address": moved(b"http://[::1"),
    "a redirect to a port that cannot be": moved(b"http://127.0.0.1:99999999/x"),
    "a redirect to bytes beyond ASCII": moved("/r\u00e9".encode("latin1")),
    "a redirect to UTF-8": moved("http://\u00e9\u00e9/".encode()),
    "a redirect with spaces": moved(b"/a b\tc"),
    "a redirect to a file": moved(b"file:///etc/passwd"),
    "a redirect to nowhere": moved(b""),
    "a redirect with a password": moved(b"http://u:p@127.0.0.2:1/x"),
    "a status that upgrades": every(b"HTTP/1.1 101 Upgrade\r\nUpgrade: x\r\n\r\n" + MEBIBYTE),
    "half a body": every(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}"),
    "two lengths": every(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}"),
    "a negative length": every(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}"),
    "a chunk of size -1": every(endless(CHUNKED + b"-1\r\n", MEBIBYTE)),
    "a chunk of size 7fff_ffff": every(endless(CHUNKED + b"7fff_ffff\r\n", MEBIBYTE)),
    "a chunk of 16 EiB": every(endless(CHUNKED + b"ffffffffffffffff\r\n", MEBIBYTE)),
    "an endless body": every(endless(CHUNKED, b"100000\r\n" + MEBIBYTE + b"\r\n")),
    "a body without an end": every(endless(b"HTTP/1.1 200 OK\r\n\r\n", MEBIBYTE)),
    "endless headers": every(endless(b"HTTP/1.1 200 OK\r\n", b"X: " + b"a" * 60_000 + b"\r\n")),
    "endless continuations": every(endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 99)),
    "endless chunks of a byte": every(endless(CHUNKED, b"1\r\na\r\n" * 999)),
    "a byte now and then": every(drip),
    "a reset": every(reset),
    "nothing": every(b""),
    "random bytes": every(bytes(range(256)) * 2),
    "a header beyond ASCII": every(b"HTTP/1.1 200 \xff\r\nX\xff: \xff\r\n\r\n{}"),
    "a pause beyond all numbers": every(response(b"", b"503 X", b"Retry-After: " + b"9" * 400)),
    "an error that is a list": every(response(b'{"errorType": [], "error": {}}', b"503 X")),
    "JSON of lists of lists": every(
        response(b'{"status":"success","data":[' + b"[[]]," * 2**20 + b"[]]}")
    ),
    "JSON that is too deep": every(response(b"[" * 10**6)),
    "UTF-16": every(response('{"status":"success","data":7}'.encode("utf-16"))),
    "gzip": every(response(b"\x1f\x8b" + bytes(50), headers=b"Content-Encoding: gzip\r\n")),
    "a vector": pages(good({"resultType": "vector", "result": []})),
    "no result": pages(good({"resultType": "matrix", "result": None})),
    "no metric": pages(matrix({"metric": None, "values": [[T0, "1"]]})),
    "a number as the machine's name": pages(matrix(series(5))),
    "a list as the machine's name": pages(matrix(series([1, [2]]))),
    "a label of 100,000 characters": pages(matrix(series("h", gpu="x" * 100_000))),
    "values that are an object": pages(matrix({"metric": {"instance": "h"}, "values": {"a": 1}})),
    "values that are a number": pages(matrix({"metric": {"instance": "h"}, "values": 0})),
    "points of three": pages(matrix(series("h", [(T0, "1", 2), (T0, "2", 3)]))),
    "points that are words": pages(matrix(series("h", [(T0, "one"), (T0, None)]))),
    "an integer of 4,000 digits": pages(
        matrix(series("h", [(T0, "1")])).replace(b'"1"', b"1" * 4000)
    ),
    "the same series twice": pages(matrix(series("h"), series("h"))),
    "two million points": pages(matrix(series("h", [(T0, "1")] * 20_000))),
    "17,000 machines": pages(matrix(*(series(f"h{n}", []) for n in range(17_000)))),
}
BENT = {  # what can be used all the same
    "NaN as the interval": intervals("NaN", "NaN", "NaN", "NaN"),
    "an infinite interval": intervals(0, 1e308, -1e308, 1e308),
    "an interval of zero": intervals(5, 5, 5, 5),
    "a negative interval": intervals(50, 40, 30, 20),
    "intervals that are words": intervals("a", "b", "c", "d"),
    "times that are NaN": pages(matrix(series("h", [("NaN", "1"), ("NaN", "2")]))),
    "times beyond all": pages(matrix(series("h", [(1e300, "1"), (-1e300, "2"), (2**70, "3")]))),
    "values beyond float32": pages(matrix(series("h", [(T0 + 600, "1e300")]))),
    "NaN and infinities": pages(matrix(series("h", [(T0, "NaN"), (T0, "+Inf"), (T0, "-Inf")]))),
    "warnings that are an object": pages(
        good({"resultType": "matrix", "result": []}, warnings={"a": 1})
    ),
    "half a surrogate as the machine's name": pages(matrix(series("\ud800"))),
    "a line end in a name": pages(matrix(series("h\n2026 ALERT h7\x1b[2J"))),
}


class Finds:
    """A detector that finds nothing. seconds: what it was given."""

    named, scores, machines, notes = {}, {}, (), ()

    def __init__(self):
        self.seconds = []

    def update(self, grid):
        self.seconds += range(grid.start, grid.end)
        self.notes = grid.notes
        return []


@pytest.fixture
def liar():
    with contextlib.closing(Liar()) as made:
        yield made


def test_whatever_a_prometheus_answers_after_a_good_read_the_daemon_goes_on(
    liar, tmp_path, monkeypatch
):
    monkeypatch.setattr(http_query, "MOST", 2**21)  # as if memory were a sixteenth
    monkeypatch.setattr(server, "KNOWN_S", 0.0)  # the intervals are asked for each time
    said, now = [], [T0 + 100.0]
    reporter = Reporter(tmp_path, Ledger(tmp_path / "alerts.json", 600), said.append)
    source = sources.prometheus(
        liar.url.replace("//", "//u:s3cret@"),
        retries=0,
        timeout_s=0.25,
        metrics=["cpu_usage", "gpu_duty_cycle"],
    )
    detector = Finds()
    watch = Watch(source, lambda: detector, reporter, Pace(history_s=20), clock=lambda: now[0])
    watch.look()
    assert reporter.gauges["source_up"] == 1.0 and len(detector.seconds) == 20
    for name, lie in LIES.items():
        liar.lie, failures = lie, reporter.count["source_failures_total"]
        now[0] += 8
        began = time.process_time()
        watch.look()
        assert reporter.count["source_failures_total"] == failures + 1, name
        assert reporter.gauges["source_up"] == 0.0 and time.process_time() - began < 5, name
    for name, lie in BENT.items():
        liar.lie = lie
        now[0] += 8
        watch.look()
        assert reporter.gauges["source_up"] == 1.0, (name, said[-1])
    liar.lie = lambda target: None
    now[0] += 8
    for _ in range(9):  # what was missed is read in pieces
        watch.look()
    assert detector.seconds == list(range(T0 + 75, int(now[0]) - 5))  # each once, missed ones too
    assert any("works again" in line for line in said)
    assert any("nan s apart, which is no scrape interval" in line for line in said)
    text = "\n".join(said) + (tmp_path / "events.jsonl").read_text()
    assert "s3cret" not in text and all(line.isprintable() for line in said)
    reporter.close()


def test_a_cause_in_ever_other_words_is_said_once_a_minute(liar, tmp_path):
    said, now, number = [], [T0 + 100.0], itertools.count()
    reporter = Reporter(tmp_path, Ledger(tmp_path / "alerts.json", 600), said.append)
    source = sources.prometheus(liar.url, queries={"x": "x"}, retries=0, timeout_s=1)
    watch = Watch(source, Finds, reporter, Pace(history_s=20), clock=lambda: now[0])
    watch.look()
    liar.lie = lambda target: response(b"word" * (1 + next(number) % 9), b"500 X")
    for _ in range(9):
        now[0] += 8
        watch.look()
    assert reporter.count["source_failures_total"] == 9 and len(said) == 1
    reporter.close()


def test_what_the_detector_does_not_foresee_is_an_event_and_it_begins_anew(liar, tmp_path):
    said, made = [], []

    class Breaks(Finds):
        def update(self, grid):
            if len(made) == 1:
                raise ZeroDivisionError("of its own\nmaking")
            return super().update(grid)

    def load():
        made.append(Breaks())
        return made[-1]

    now = [T0 + 100.0]
    reporter = Reporter(tmp_path, Ledger(tmp_path / "alerts.json", 600), said.append)
    source = sources.prometheus(liar.url, queries={"x": "x"}, retries=0, timeout_s=1)
    watch = Watch(source, load, reporter, Pace(history_s=20), clock=lambda: now[0])
    watch.look()
    assert "judging: ZeroDivisionError: of its own making; the detector begins anew" in said[0]
    now[0] += 8
    watch.look()
    assert made[1].seconds == list(range(T0 + 95, T0 + 103)) and "works again" in said[1]
    assert reporter.count["refused_windows_total"] == 1
    reporter.close()


def test_machines_that_come_and_go_without_end_take_no_more_memory(liar, tmp_path, monkeypatch):
    monkeypatch.setattr("megajax.systems.minder.watch.MACHINES", 50)
    monkeypatch.setattr(server, "MACHINES", 50)
    number, now, said = itertools.count(), [T0 + 100.0], []
    reporter = Reporter(tmp_path, Ledger(tmp_path / "alerts.json", 600), said.append)
    source = sources.prometheus(liar.url, queries={"x": "x"}, retries=0, timeout_s=1)
    liar.lie = lambda target: matrix(*(series(f"h{next(number)}") for _ in range(40)))

    class Remembers(Finds):
        def update(self, grid):
            self.machines = {*self.machines, *grid.machines}
            return super().update(grid)

    made = []

    def load():
        made.append(Remembers())
        return made[-1]

    watch = Watch(source, load, reporter, Pace(history_s=20), clock=lambda: now[0])
    for _ in range(8):
        now[0] += 8
        watch.look()
        assert len(made[-1].machines) <= 50 and len(source._seen) <= 100
        assert len(source._last) <= 140
    assert "80 machines have come and gone; 50 are watched at most" in said[-1]
    reporter.close()


@pytest.mark.parametrize(
    "answer",
    [
        response(b"\xff\xfe\x00", b"500 X"),
        response(b"", b"302 X", b"Location: http://[::1\r\n"),
        drip,
        endless(CHUNKED + b"-1\r\n", MEBIBYTE),
        endless(CHUNKED, b"100000\r\n" + MEBIBYTE + b"\r\n"),
        bytes(range(256)),
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n",
        b"HTTP/1.1 101 X\r\n\r\n",
        reset,
        b"",
    ],
)
def test_whatever_an_alertmanager_answers_alerts_are_sent_again(liar, answer, monkeypatch):
    monkeypatch.setattr("megajax.systems.minder.reporter.LONGEST_PAUSE_S", 0.02)
    monkeypatch.setattr(http_query, "MOST", 2**21)
    said, lies = [], [answer, answer]
    liar.lie = lambda target: lies.pop() if lies else response(b"")
    url = liar.url.replace("//", "//u:s3cret@")
    with contextlib.closing(Alertmanager(url, tell=said.append, timeout_s=0.1)) as client:
        client.put(Firing({"alertname": "A"}, {}, T0))
        until = time.monotonic() + 20
        while len(said) < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert client.failures == 2 and "takes alerts again, after 2 failed" in said[1], said
    assert "s3cret" not in str(said) and said[0].isprintable()


def test_every_metric_that_is_asked_for_is_one_of_the_table():
    assert {n for m in ("cpu_usage", "gpu_duty_cycle") for n in convert.METRICS[m][0].names} == {
        *NAMES
    }


def test_a_read_ends_in_its_time_however_many_pages_are_slow(liar):
    queries = {f"m{k}": f"q{k}" for k in range(12)}
    source = sources.prometheus(liar.url, queries=queries, retries=9, timeout_s=0.1)
    liar.lie = every(response(b"", b"503 X", b"Retry-After: 1\r\n"))
    began = time.monotonic()
    with pytest.raises(sources.Unavailable, match="503"):
        source.read(T0, T0 + 10)
    assert time.monotonic() - began < 10 and liar.asked <= 2 * len(queries)


def test_names_are_shown_as_one_line_and_values_beyond_float32_are_none(tmp_path):
    said = []
    reporter = Reporter(tmp_path, Ledger(tmp_path / "alerts.json", 600), said.append)
    reporter.event("note", "machine h\n2026 ALERT h7\x1b[2J is silent")
    assert said == ["machine h 2026 ALERT h7?[2J is silent"]
    reporter.close()
    grid = to_grid(Samples.of([(T0, "h", "x", 1e300), (T0 + 1, "h", "x", 2.0)]))
    assert grid.values_CNT[0, 0, 1] == 2.0
    assert not (abs(grid.values_CNT[0, 0, 0]) > 0)  # NaN, and not infinite


READ = """
import sys
from megajax.monitor import sources
source = sources.prometheus(sys.argv[1], queries={f"m{k}": f"m{k}" for k in range(4)}, timeout_s=60)
found = source.read(1_700_000_000, 1_700_000_060)
lines = open("/proc/self/status").read().splitlines()
(peak,) = (int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
print(len(found), len(found.metrics), peak // 1024)
"""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("devices", [1, 8])
def test_a_read_of_8_million_samples_takes_less_than_1_gib(liar, devices):
    points = b"[" + b",".join(b'[17e8,"%d.00"]' % (k % 10) for k in range(60)) + b"]"
    label = b',"gpu":"%d"' if devices > 1 else b""
    rows = [
        b'{"metric":{"instance":"h%d"%b},"values":%b}'
        % (k // devices, label % (k % devices) if label else label, points)
        for k in range(34_000)
    ]
    body = (
        b'{"status":"success","data":{"resultType":"matrix","result":[' + b",".join(rows) + b"]}}"
    )

    def send(connection):
        connection.settimeout(60)
        connection.sendall(response(body))

    liar.lie = every(send)
    done = subprocess.run([sys.executable, "-c", READ, liar.url], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, metrics, peak_mb = map(int, done.stdout.split())
    machines = 34_000 // devices
    assert metrics == (4 if devices == 1 else 12)
    assert count == (4 * 60 * machines if devices == 1 else 12 * machines)
    assert peak_mb < 1024
