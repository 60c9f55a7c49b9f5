"""The child process of run.py (Beside): reads records from standard input, writes alerts to
standard output.

Both are lines of JSON; the first line of input has the options. Every few seconds the new records,
and a Prometheus server's samples of the same hosts, become one window of the detector. A server
that is unreachable, or answers nothing usable, is reported once, and the records alone are judged.
"""

import dataclasses
import json
import queue
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.records import Record
from megajax.monitor.samples import Samples, concat
from megajax.monitor.sources import from_records, prometheus
from megajax.systems.minder.alert import without_numbers
from megajax.systems.minder.detector import Detector
from megajax.systems.minder.run import as_line

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
        """Takes the hosts of an attempt; returns the hosts that were in the previous one only.

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
        """Returns the samples since the last window; None: there is no complete second yet."""
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
        """Returns what the records show. A metric that the server has shown is left out: the two
        may measure it differently, e.g. with or without what other programs of the host use, and a
        second must not have the mean of both."""
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
    found = {}
    for machine in machines:
        plain = machine.rsplit(":", 1)[0] if machine.count(":") == 1 else machine
        for host in hosts:
            if (
                plain == host
                or plain.split(".")[0] == host.split(".")[0]
                and not _is_address(plain)
            ):
                found[machine] = host
    return found


def _is_address(name: str) -> bool:
    return name.replace(".", "").isdigit()


def renamed(samples: Samples, hosts: dict[str, str]) -> Samples:
    """Returns the samples of these machines only, under the names of the hosts."""
    rows = ((t, hosts[m], c, v) for t, m, c, v in samples.rows() if m in hosts)
    found = Samples.of(rows, samples.start, samples.end)
    return dataclasses.replace(found, notes=samples.notes)


def main() -> int:
    """Judges until standard input ends. Returns the exit code."""
    options = json.loads(sys.stdin.readline())
    detector = Detector.load(options["model"])
    settings = dataclasses.replace(detector.settings, **options["settings"])
    detector = Detector(detector.profile, settings)
    server = None
    if options["server"] is not None:
        server = prometheus(**options["server"], metrics=detector.profile.metrics)
    feed = Feed(server)
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    due, said = time.monotonic() + EVERY_S, set[str]()
    while True:
        try:
            line = lines.get(timeout=max(due - time.monotonic(), 0.0))
            if line is None:
                return 0
            told = json.loads(line)
            if isinstance(told, list):
                feed.add(told)
            else:
                for host in feed.begin(told["hosts"]):
                    detector.leave(host)
            if time.monotonic() < due or not lines.empty():
                continue
        except queue.Empty:
            pass
        due = time.monotonic() + EVERY_S
        window = feed.window(time.time())
        if window is None:
            continue
        notes, alerts = feed.notes, []
        feed.notes = []
        try:
            alerts = detector.update(window)
            notes = [*notes, *detector.notes]
        except UserError as error:
            notes = [*notes, str(error)]
        except Exception as error:  # what it had learnt may be half of the old, half of the new
            notes = [*notes, f"the detector begins anew after {error!r:.200}"]
            detector = Detector(detector.profile, settings)
        keys = [without_numbers(n) for n in notes]
        fresh = [n for n, key in zip(notes, keys, strict=True) if key not in said]
        said.update(keys)
        if len(said) > 1000:
            said.clear()
        print(json.dumps(as_line(alerts, fresh, dict(detector.scores))), flush=True)


def _read(lines: "queue.SimpleQueue[str | None]") -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error}")
