"""The detector of metrics in a child process, so that a driver or a trainer never waits for it.

The detector needs jax, which a driver must not load, and a trainer's devices are busy. So Child
sends records to a child process on the CPU, and alerts come back; both are lines of JSON. Threads
do this; batches that the child does not accept in time are dropped and counted. If the child ends,
this is reported once and the job continues without it.

`python -m megajax.systems.minder.child` is that process (`main`); the first line of its input has
the options. Every few seconds the new records, and a Prometheus server's samples of the same hosts,
become one window of the detector (Feed). A server that is unreachable, or answers nothing usable,
is reported once, and the records alone are judged. No jax import but in `main`.
"""

import contextlib
import dataclasses
import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megajax.core.errors import UserError
from megajax.core.worker import Worker
from megajax.monitor.alerts import Alert
from megajax.monitor.records import Record
from megajax.monitor.samples import Samples, concat, of_machines
from megajax.monitor.slow_rank import METRICS
from megajax.monitor.sources import from_records, prometheus

if TYPE_CHECKING:
    from megajax.systems.minder.detector import Runner

# ---- the end of the driver or the trainer


# What of a trainer's environment a process of its own on the CPU must not have.
ON_CPU = (
    "env",
    "-u",
    "XLA_FLAGS",
    "-u",
    "JAX_COORDINATOR_ADDRESS",
    "-u",
    "JAX_NUM_PROCESSES",
    "-u",
    "JAX_PROCESS_ID",
    "JAX_PLATFORMS=cpu",
    "CUDA_VISIBLE_DEVICES=",
)
CLOSE_S = 2.0  # (chosen) for a thread to see the end of the child
WAITING = 600  # (chosen) batches of records, of about a second, that wait for the child


class Child:
    """The child process. `send` and `take` return at once."""

    def __init__(self, options: dict[str, Any]):
        """Starts the child.

        Args: options: "model": path of a saved detector. "settings": {field: value} of Settings.
          "server": arguments of sources.prometheus, or None.
        """
        self._queue: queue.Queue[Any] = queue.Queue(WAITING)
        self._queue.put(options)  # not among its arguments, which everybody sees
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.dropped = 0
        program = [*ON_CPU, sys.executable, "-m", "megajax.systems.minder.child"]
        self._child = Worker(program, stderr=subprocess.PIPE)
        self._last = ""  # words of the child to standard error
        self._threads = [
            threading.Thread(target=work, name="minder", daemon=True)
            for work in (self._write, self._read, self._listen)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, records: Sequence[Record]) -> None:
        """Sends those records to the child that are metrics of machines."""
        rows = [list(r) for r in records if r.name in METRICS and isinstance(r.value, int | float)]
        if rows:
            self._put(rows)

    def begin(self, hosts: Sequence[str], kinds: Mapping[str, str] | None = None) -> None:
        """Tells the child the hosts of an attempt; hosts that are not among them leave the job.

        The machines of a Prometheus server are matched with these names. kinds: {host: the kind of
        its devices}; hosts are compared within their kind. None: as told before.
        """
        self._put({"hosts": [*hosts], "kinds": kinds})

    def _put(self, what: Any) -> None:
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self.dropped += 1

    def take(self) -> tuple[list[Alert], list[str], dict[str, float]]:
        """Returns (alerts, notes, {host: newest score}) that arrived since the last call."""
        alerts, notes, scores = [], [], {}
        with contextlib.suppress(queue.Empty):
            while True:
                said = self._lines.get_nowait()
                notes += said.get("notes", [])
                scores |= said.get("scores", {})
                alerts += [Alert.of_machine(**one) for one in said.get("alerts", [])]
        return alerts, notes, scores

    def close(self) -> None:
        """Ends the child."""
        self._child.kill()
        self._child.process.wait()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        self._child.close()

    def _write(self) -> None:
        while (what := self._queue.get()) is not None and self._child.send(what):
            pass

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for message in self._child.messages():
                self._lines.put(message)
        code = self._child.process.wait()
        why = f": {self._last}" if self._last else ""
        if code >= 0:  # else it was told to end
            message = f"the detector of metrics ended (exit code {code}){why}; the job goes on"
            self._lines.put({"notes": [message]})

    def _listen(self) -> None:
        stderr = self._child.process.stderr
        assert stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in stderr:
                self._last = line.decode(errors="replace").strip()[:300] or self._last


# ---- the end of the child


EVERY_S = 5.0  # (chosen) between two windows
LAG_S = 4.0  # (chosen) before now, up to which a window goes: records and scrapes come late
BEFORE_S = 10.0  # (chosen) of the records before a window, of which rates of counters are taken


class Feed:
    """Makes windows of records and of a server's answers."""

    def __init__(self, server: Any):
        """server: a source of samples; None: records only."""
        self._server = server
        self.machines: tuple[str, ...] = ()  # names of the job's hosts
        self._rows: list[Record] = []
        self._served: set[str] = set()  # metrics that the server has shown
        self._next: int | None = None
        self.notes: list[str] = []
        self._trouble = ""

    def begin(self, hosts: Sequence[str]) -> list[str]:
        """Takes the hosts of an attempt; returns hosts that only the previous attempt had.

        Their records are dropped.
        """
        gone = [host for host in self.machines if host not in hosts]
        self.machines = tuple(hosts)
        self._rows = [r for r in self._rows if r.host not in gone]
        return gone

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Adds records, as lists of their fields."""
        self._rows += [Record(*row) for row in rows]

    def window(self, now: float) -> Samples | None:
        """Returns the samples since the last window, None if no second is complete yet."""
        end = int(now - LAG_S)
        if self._next is None:
            first = min((r.time for r in self._rows), default=now)
            self._next = int(first if self._server is None else min(first, now - 30))
        start = self._next
        if end <= start:
            return None
        told = None if self._server is None else self._ask(start, end)
        parts = [] if told is None else [told]
        if self._rows:
            parts.append(self._recorded(start, end))
            self._rows = [r for r in self._rows if r.time >= end - BEFORE_S]
        self._next = end
        return concat(parts) if parts else None

    def _recorded(self, start: int, end: int) -> Samples:
        """Returns the samples of the records.

        Metrics that the server has shown are left out: the two may measure a metric differently,
        e.g. with or without other programs of the host, and a second must not have the mean of
        both.
        """
        samples = from_records([r for r in self._rows if r.time < end])
        is_served_C = np.array([m in self._served for m in samples.metrics], bool)
        keep_N = (samples.time_N >= start) & ~is_served_C[samples.metric_N]
        return dataclasses.replace(
            samples,
            time_N=samples.time_N[keep_N],
            machine_N=samples.machine_N[keep_N],
            metric_N=samples.metric_N[keep_N],
            value_N=samples.value_N[keep_N],
            start=start,
            end=end,
        )

    def _ask(self, start: int, end: int) -> Samples | None:
        try:
            samples = self._server.read(start, end)
        except Exception as error:  # whatever a server makes its reader raise
            if str(error)[:60] != self._trouble:
                self._trouble = str(error)[:60]
                self.notes.append(f"the metrics server: {error}; records are judged without it")
            return None
        if self._trouble:
            self._trouble = ""
            self.notes.append("the metrics server answers again")
        hosts = host_of(samples.machines, self.machines)
        if hosts:
            samples = renamed(samples, hosts)
        elif self.machines and samples.machines:
            self.notes.append(
                f"no machine of the metrics server ({', '.join(samples.machines[:3])}) has the "
                f"name of a host of this job ({', '.join(self.machines[:3])})"
            )
        if hosts or not self.machines:  # else it says nothing of the job's hosts
            self._served |= {samples.metrics[c] for c in np.unique(samples.metric_N)}
        return samples


def host_of(machines: Sequence[str], hosts: Sequence[str]) -> dict[str, str]:
    """Returns {machine of a server: host of the job}: the same but for port and domain."""
    pairs = {}
    for machine in machines:
        plain = machine.rsplit(":", 1)[0] if machine.count(":") == 1 else machine
        is_address = plain.replace(".", "").isdigit()
        for host in hosts:
            same_name = plain.split(".")[0] == host.split(".")[0] and not is_address
            if plain == host or same_name:
                pairs[machine] = host
    return pairs


def renamed(samples: Samples, hosts: dict[str, str]) -> Samples:
    """Returns the samples of these machines only, under the names of the hosts."""
    rows = ((t, hosts[m], c, v) for t, m, c, v in samples.rows() if m in hosts)
    named = Samples.of(rows, samples.start, samples.end)
    return dataclasses.replace(named, notes=samples.notes)


class Judges:
    """A detector for each kind of devices, which compares the hosts of that kind."""

    def __init__(self, make: Callable[[], "Runner"]):
        """make: returns a runner whose detector has seen no job."""
        self._make = make
        self._kinds: dict[str, str] = {}
        self._runners = {"": make()}  # all hosts, until they say of which kind they are

    def begin(self, gone: Sequence[str], kinds: Mapping[str, str] | None) -> None:
        """Takes the hosts that left the job, and what `Child.begin` tells about the others."""
        before, self._kinds = self._kinds, self._kinds if kinds is None else dict(kinds)
        for kind, runner in self._runners.items():
            for host in {*gone, *before, *self._kinds}:
                if host in gone or self._kinds.get(host, "") != kind:
                    runner.detector.leave(host)

    def judge(self, window: Samples) -> tuple[list[Alert], list[str], dict[str, float]]:
        """Returns (new alerts, notes, {host: newest score}) of a window."""
        hosts: dict[str, list[str]] = {}
        for host in dict.fromkeys((*window.machines, *self._kinds)):
            hosts.setdefault(self._kinds.get(host, ""), []).append(host)
        alerts, notes, scores = [], [], {}
        for kind, names in hosts.items() or [("", [])]:
            if kind not in self._runners:
                self._runners[kind] = self._make()
            runner, part = self._runners[kind], window
            if len(hosts) > 1:
                chosen = of_machines(window, "|".join(map(re.escape, names)))
                part = dataclasses.replace(chosen, notes=window.notes)
            named, about, error = runner.judge(part)
            if error is not None:
                foreseen = isinstance(error, UserError)
                about = [
                    f"{error}" if foreseen else f"the detector begins anew after {error!r:.200}"
                ]
            alerts += named
            notes += [f"{kind}: {note}" if kind else note for note in about]
            scores |= runner.detector.scores
        return alerts, notes, scores

    def is_new(self, note: str) -> bool:
        """Tells whether a note is new."""
        return self._runners[""].is_new(note)


def main() -> int:
    """Judges until standard input ends. Returns the exit code."""
    from megajax.systems.minder.detector import Detector, Profile, Runner

    options = json.loads(sys.stdin.readline())
    profile = Profile.load(options["model"])
    settings = dataclasses.replace(profile.settings, **options["settings"])
    judges = Judges(lambda: Runner(lambda: Detector(profile, settings)))
    server = None
    if options["server"] is not None:
        server = prometheus(**options["server"], metrics=profile.metrics)
    feed = Feed(server)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    due = time.monotonic() + EVERY_S
    while True:
        try:
            line = lines.get(timeout=max(due - time.monotonic(), 0.0))
            if line is None:
                return 0
            told = json.loads(line)
            if isinstance(told, list):
                feed.add(told)
            else:
                judges.begin(feed.begin(told["hosts"]), told["kinds"])
            if time.monotonic() < due or not lines.empty():
                continue
        except queue.Empty:
            pass
        due = time.monotonic() + EVERY_S
        window = feed.window(time.time())
        if window is None:
            continue
        alerts, about, scores = judges.judge(window)
        line = {
            "alerts": [alert.measured for alert in alerts],
            "notes": [note for note in (*feed.notes, *about) if judges.is_new(note)],
            "scores": scores,
        }
        feed.notes = []
        print(json.dumps(line), flush=True)


def _read(lines: "queue.SimpleQueue[str | None]") -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error}")
