"""Minder in a supervised run: finds the rank or host that makes the job wait, and evicts it.

--detector=minder adds four rules to a driver's watchdog:

hang    a rank for which all others wait, within seconds, by progress (monitor/detectors.py); warns
slow    a rank whose own work makes the steps slow, by step times (monitor/slow_rank.py); evicts
minder  a machine whose metrics differ from the others' (detector.py, a child process); evicts
course  a machine whose metrics vary more than the others', or come later; warns, because a clock
        that is set back looks like a lag

Evictions happen only within a budget of false alarms (elastic/policy.py: Evictions); beyond it the
rules only warn. --respond=slow=warn lets a rule only warn. No jax import.
"""

import contextlib
import dataclasses
import json
import queue
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.monitor import alerts
from megajax.monitor.alerts import Action, Alert, Kind
from megajax.monitor.detectors import DETECTORS, NEEDED, Hang, Job, Maker, choose
from megajax.monitor.minder_config import MinderConfig
from megajax.monitor.records import Record
from megajax.monitor.slow_rank import METRICS, TICKS, OwnWork, RecordFile, SlowRank
from megajax.systems.elastic.events import Journal
from megajax.systems.elastic.policy import Eviction, Evictions
from megajax.systems.minder import alert as minder_alert
from megajax.systems.minder.settings import LEAST

# ---- the detector in a child process, so that a driver or a trainer never waits for it
#
# The detector needs jax, which a driver must not load, and a trainer's devices are busy. So records
# are sent to a child process (beside_main.py) on the CPU, and its alerts come back as lines of
# JSON. Threads do this; batches that the child does not accept in time are dropped and counted. If
# the child ends, this is reported once and the job continues without it.


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


class Beside:
    """The child process. `send` and `take` return at once."""

    def __init__(self, options: dict[str, Any]):
        """Starts the child.

        Args: options: of beside_main.py: "model", path of a saved detector; "settings", {field:
          value} of Settings; "server", arguments of sources.prometheus, or None.
        """
        self._queue: queue.Queue[Any] = queue.Queue(WAITING)
        self._queue.put(options)  # not among its arguments, which everybody sees
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.dropped = 0
        self._child = subprocess.Popen(
            [*ON_CPU, sys.executable, "-m", "megajax.systems.minder.beside_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
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

    def begin(self, hosts: Sequence[str]) -> None:
        """Tells the child the hosts of an attempt; hosts that are not among them leave the job.

        The machines of a Prometheus server are matched with these names.
        """
        self._put({"hosts": [*hosts]})

    def _put(self, what: Any) -> None:
        try:
            self._queue.put_nowait(what)
        except queue.Full:
            self.dropped += 1

    def take(self) -> tuple[list[minder_alert.Alert], list[str], dict[str, float]]:
        """Returns (alerts, notes, {host: newest score}) that came since the last call."""
        alerts, notes, scores = [], [], {}
        with contextlib.suppress(queue.Empty):
            while True:
                said = self._lines.get_nowait()
                notes += said.get("notes", [])
                scores |= said.get("scores", {})
                for one in said.get("alerts", []):
                    pairs = tuple((m, s) for m, s in one.pop("deviations"))
                    alerts.append(minder_alert.Alert(**one, deviations=pairs))
        return alerts, notes, scores

    def close(self) -> None:
        """Ends the child."""
        self._child.kill()
        self._child.wait()
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()

    def _write(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while (what := self._queue.get()) is not None:
                self._child.stdin.write(json.dumps(what) + "\n")
                self._child.stdin.flush()

    def _read(self) -> None:
        assert self._child.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._child.stdout:
                self._lines.put(json.loads(line))
        code = self._child.wait()
        why = f": {self._last}" if self._last else ""
        if code >= 0:  # else it was told to end
            message = f"the detector of metrics ended (exit code {code}){why}; the job goes on"
            self._lines.put({"notes": [message]})

    def _listen(self) -> None:
        assert self._child.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._child.stderr:
                self._last = line.strip()[:300] or self._last


def as_line(
    alerts: Sequence[minder_alert.Alert], notes: Sequence[str], scores: dict[str, float]
) -> dict[str, Any]:
    """Returns the message of the child, which is sent as one line of JSON."""
    return {"alerts": [asdict(a) for a in alerts], "notes": [*notes], "scores": scores}


# ---- the detectors of a driver


NAME = "minder"
COURSE = "course"  # the rule of spreads and lags
RESPONSES: Mapping[str, Kind] = {"hang": "warn", "slow": "evict", "minder": "evict", COURSE: "warn"}
AFTER = 3  # (chosen) ticks of an attempt whose steps tell whether an eviction was right


def _flags() -> list[dataclasses.Field]:
    """Returns the options of a driver; the other options are for its training processes."""
    return [f for f in dataclasses.fields(MinderConfig) if f.name != "pulse_every"]


def add_flags(add: Callable[..., Any]) -> None:
    """Declares --detector, --prometheus and --minder.<option> of a script that uses argparse.

    add: of a group of flags.
    """
    what = "another detector; minder: names the machine that all others wait for, that is slow, or"
    more = f"{what} whose metrics differ (docs/supervision.md)"
    add("--detector", action="append", default=[], metavar="NAME", help=more)
    add(
        "--prometheus",
        metavar="URL",
        help="address of a Prometheus server with the hosts' metrics, for minder",
    )
    for field in _flags():
        kind = str if field.default is None else type(field.default)
        shown = "" if field.default is None else f"; [{field.default:g}]"
        what = field.metadata["help"] + shown
        add(f"--minder.{field.name}", type=kind, default=field.default, help=what)


def from_flags(said: Mapping[str, Any]) -> MinderConfig:
    """Returns the options from parsed flags, {name: value}. Raises: UserError."""
    return MinderConfig(**{f.name: said[f"minder.{f.name}"] for f in _flags()})


def choose_detectors(
    said: Mapping[str, Any], known: Mapping[str, Maker]
) -> tuple[dict[str, Maker], dict[str, Kind]]:
    """Returns (detectors by name, responses by rule) from the flags of a driver.

    The entry of minder is a placeholder, which `of_driver` replaces. Raises: UserError for flags
    that do not exist or do not fit together.
    """
    names = ",".join([said["detectors"], *said["detector"]])
    detectors = choose(names, {**known, NAME: DETECTORS[NEEDED]})
    is_on, options = NAME in detectors, from_flags(said)
    if not is_on and (options != MinderConfig() or said["prometheus"]):
        raise UserError("--minder.* and --prometheus need --detector=minder")
    options.check(said["prometheus"])
    own = RESPONSES if is_on else {}
    chosen = alerts.parse(said["respond"], [*known, *own])
    return detectors, {"straggler": said["straggler"], **own, **chosen}


def of_driver(
    said: Mapping[str, Any], detectors: dict[str, Maker], journal: Journal
) -> "RunMinder | None":
    """Replaces the placeholder of minder among the detectors and returns it; None: not chosen."""
    if NAME not in detectors:
        return None
    minder = RunMinder(
        from_flags(said),
        said["prometheus"],
        journal.folder,
        journal.event,
        journal.take,
        journal.gauge,
    )
    detectors[NAME] = minder.attempt
    return minder


class RunMinder:
    """Minder for all attempts of a job.

    `attempt` makes the detector of one attempt (a Maker). The driver asks this object before it
    evicts a host (driver.Guard).
    """

    def __init__(
        self,
        options: MinderConfig,
        prometheus: str | None,
        out: Path,
        tell: Callable[..., object],
        emit: Callable[[Sequence[Record]], object],
        gauge: Callable[..., object] = lambda **_: None,
    ):
        """Prepares the rules; the child process starts with the first attempt.

        Args: prometheus: address of a server; None: none. out: folder of evictions.json.
          tell(event, message, **values): writes an event to the journal. emit: takes records of the
          findings. gauge(**values): sets metrics of the job in the journal.
        Raises: UserError for options that do not fit together.
        """
        options.check(prometheus)
        self.options, self._prometheus = options, prometheus
        self._tell, self.emit, self._gauge = tell, emit, gauge
        self.evictions = Evictions(out / "evictions.json", options.evictions_per_day)
        self.beside: Beside | None = None
        record = options.record
        self.file = None if record is None else RecordFile(expand(record, "minder.record"))
        self._work: OwnWork | None = None
        self._now: _Attempt | None = None
        self._acquitted: list[str] = []

    def attempt(self, job: Job) -> "_Attempt":
        """Returns the detector of an attempt."""
        if self._now is None:
            self._begin(job)
        if self.beside is not None:
            self.beside.begin([*job.hosts])
        size = len(job.ranks)
        if self._work is None or len(self._work.share_R) != size:
            self._work = OwnWork(size)
        self._now = _Attempt(self, job, self._work)
        return self._now

    def _begin(self, job: Job) -> None:
        o = self.options
        if o.model is None:
            self._tell(
                "minder",
                "no model of metrics is given (--minder.model): machines are judged by "
                "progress and by step times only",
            )
            return
        if len(job.hosts) < LEAST:
            self._tell(
                "minder",
                f"the metrics of {len(job.hosts)} hosts cannot be judged, which takes "
                f"{LEAST}; progress and step times are",
            )
        settings = {n: getattr(o, n) for n in ("continuity_s", "clear_s", "strict")}
        given = {
            "model": str(expand(o.model, "minder.model")),
            "settings": settings,
            "server": o.server(self._prometheus),
        }
        self.beside = Beside(given)

    def note(self, text: str) -> None:
        """Writes a message that is no alert to the journal."""
        self._tell("minder", text)

    def settled(self, eviction: Eviction) -> None:
        """Reports whether an eviction was right; after a false alarm the host may return."""
        only = "; alerts only tell for a day" if eviction.verdict == "false alarm" else ""
        message = f"the eviction of {eviction.host}: {eviction.verdict}, {eviction.why}{only}"
        self._tell("eviction", message, host=eviction.host, verdict=eviction.verdict)
        if eviction.verdict == "false alarm":
            self._acquitted.append(eviction.host)
        self._count()

    def _count(self) -> None:
        wrong = sum(e.verdict == "false alarm" for e in self.evictions.all)
        self._gauge(minder_evictions=len(self.evictions.all), minder_false_alarms=wrong)

    # ---- driver.Guard

    def refuses(self, action: Action) -> str | None:
        """Returns why a host may not be evicted now; None: it may."""
        return self.evictions.refusal() if action.rule in RESPONSES else None

    def evicts(self, action: Action) -> None:
        """Notes that the driver evicts a host."""
        if action.rule not in RESPONSES or self._now is None:
            return
        ranks, steps_s = action.ranks, self._now.steps_s(action)
        self.evictions.add(action.hosts[0], action.rule, ranks, self._now.size, steps_s)
        self._count()

    def acquitted(self) -> list[str]:
        """Returns hosts whose eviction has proved a false alarm since the last call."""
        found, self._acquitted = self._acquitted, []
        return found

    def close(self) -> None:
        """Ends the child process and closes the file of records."""
        if self.file is not None:
            self.file.close()
        if self.beside is not None:
            self.beside.close()


class _Attempt:
    """Watches one attempt."""

    def __init__(self, run: RunMinder, job: Job, work: OwnWork):
        o = run.options
        self._run, self._job, self.size = run, job, len(job.ranks)
        self._hang = Hang(job, o.hang_s)
        self._slow = SlowRank(job, o.continuity_s, work, run.emit)
        self._is_judged = False

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns the new alerts of all rules."""
        if self._run.file is not None:
            self._run.file.write(records)
        slow = self._slow.watch(records)
        found = [*slow, *self._metrics(records)]
        for alert in found:
            if wrong := self._run.evictions.blame(alert.rule, alert.ranks):
                self._run.settled(wrong)
        if not self._is_judged and len(self._slow.steps_s) >= AFTER:
            self._is_judged = True
            now = statistics.median(self._slow.steps_s)
            if settled := self._run.evictions.judge(self.size, now):
                self._run.settled(settled)
        return [*self._hang.watch(records), *found]

    def _metrics(self, records: Sequence[Record]) -> list[Alert]:
        beside = self._run.beside
        if beside is None:
            return []
        beside.send(records)
        alerts, notes, scores = beside.take()
        for note in notes:
            self._run.note(note)
        if scores:
            step, now = self._job.step, max((r.time for r in records), default=0.0)
            self._run.emit(
                [
                    Record(now, m, None, None, step, "minder_score", s)
                    for m, s in scores.items()
                    if m in self._job.hosts
                ]
            )
        return [self._alert(a) for a in alerts]

    def _alert(self, found: minder_alert.Alert) -> Alert:
        """Returns an alert of the watchdog; without a host for a machine of another job."""
        host = self._job.hosts.get(found.machine)
        message = found.message
        if beside := self._slow.beside(found.machine):
            message += "; " + ", ".join(beside)
        if host is None:
            return Alert(NAME, f"{message} (no host of this job)", step=self._job.step)
        rule = COURSE if found.kind in minder_alert.COURSES else NAME
        return self._job.alert(rule, host.ranks, message)

    def steps_s(self, action: Action) -> tuple[float, float]:
        """Returns how long steps took before a host was slow, and take now; 0: not known."""
        own = [s for n, s in self._slow.found.items() if n in action.ranks]
        if own:
            most = max(own, key=lambda s: s.more_s)
            return most.usual_s, most.step_s
        recent = self._slow.steps_s[-TICKS:]  # the continuity; one tick may hold a step or two
        return self._slow.work.usual_s or 0.0, statistics.median(recent) if recent else 0.0
