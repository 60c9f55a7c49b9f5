"""Minder in a run: finds the rank or host that makes the job wait; a driver may then evict it.

--detector=minder adds four rules to a driver's watchdog:

hang    a rank for which all others wait, within seconds, by progress (monitor/detectors.py); warns
slow    a rank whose own work makes the steps slow, by step times (monitor/slow_rank.py); evicts
minder  a machine whose metrics differ from the others' (detector.py, in a child process); evicts
course  a machine whose metrics vary more than the others', or come later; warns, because a clock
        that is set back looks like a lag

A driver (scripts/supervise.py) uses RunMinder: evictions happen only within a budget of false
alarms (elastic/policy.py: Evictions), beyond which the rules only warn. --respond=slow=warn makes a
rule only warn. A training run without a driver uses InRun, which runs the same rules in the first
process and can only report. No jax import but in InRun.
"""

import dataclasses
import json
import os
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.monitor import alerts, heartbeat
from megajax.monitor.alerts import COURSE, MACHINE, Action, Alert, Kind
from megajax.monitor.detectors import DETECTORS, NEEDED, Hang, Job, Limits, Maker, Watchdog, choose
from megajax.monitor.heartbeat import Heartbeat
from megajax.monitor.meter import HostMeter
from megajax.monitor.minder_config import MinderConfig
from megajax.monitor.records import KIND, Lines, Record, newest, parse, without_host
from megajax.monitor.slow_rank import TICKS, OwnWork, RecordFile, SlowRank
from megajax.monitor.timers import Timers
from megajax.systems.elastic.events import Journal
from megajax.systems.elastic.policy import Eviction, Evictions
from megajax.systems.minder.child import Child
from megajax.systems.minder.settings import LEAST

NAME = MACHINE  # of the detector in flags; the rule of its metrics has the same name
RESPONSES: Mapping[str, Kind] = {"hang": "warn", "slow": "evict", MACHINE: "evict", COURSE: "warn"}
AFTER = 3  # (chosen) ticks of an attempt whose steps tell whether an eviction was right


def _flags() -> list[dataclasses.Field]:
    """Returns the options of a driver; the other options are for its training processes."""
    return [f for f in dataclasses.fields(MinderConfig) if f.name != "pulse_every"]


def add_flags(add: Callable[..., Any]) -> None:
    """Declares --detector, --prometheus and --minder.<option> of a script that uses argparse.

    add: the method `add_argument` of a group of flags.
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
    responses = RESPONSES if is_on else {}
    chosen = alerts.parse(said["respond"], [*known, *responses])
    return detectors, {"straggler": said["straggler"], **responses, **chosen}


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
        self.child: Child | None = None
        record = options.record
        self.file = None if record is None else RecordFile(expand(record, "minder.record"))
        self._work: OwnWork | None = None
        self._now: _Attempt | None = None
        self._acquitted: list[str] = []

    def attempt(self, job: Job) -> "_Attempt":
        """Returns the detector of an attempt."""
        if self._now is None:
            self._begin(job)
        if self.child is not None:
            self.child.begin([*job.hosts])
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
        arguments = {
            "model": str(expand(o.model, "minder.model")),
            "settings": settings,
            "server": o.server(self._prometheus),
        }
        self.child = Child(arguments)

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
        hosts, self._acquitted = self._acquitted, []
        return hosts

    def close(self) -> None:
        """Ends the child process and closes the file of records."""
        if self.file is not None:
            self.file.close()
        if self.child is not None:
            self.child.close()


class _Attempt:
    """Watches one attempt."""

    def __init__(self, run: RunMinder, job: Job, work: OwnWork):
        o = run.options
        self._run, self._job, self.size = run, job, len(job.ranks)
        self._hang = Hang(job, o.hang_s)
        self._slow = SlowRank(job, o.continuity_s, work, run.emit)
        self._kinds: dict[str, str] = dict.fromkeys(job.hosts, "")
        self._is_judged = False

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns the new alerts of all rules."""
        if self._run.file is not None:
            self._run.file.write(records)
        slow = self._slow.watch(records)
        named = [*slow, *self._metrics(records)]
        for alert in named:
            if wrong := self._run.evictions.blame(alert.rule, alert.ranks):
                self._run.settled(wrong)
        if not self._is_judged and len(self._slow.steps_s) >= AFTER:
            self._is_judged = True
            now = statistics.median(self._slow.steps_s)
            if settled := self._run.evictions.judge(self.size, now):
                self._run.settled(settled)
        return [*self._hang.watch(records), *named]

    def _metrics(self, records: Sequence[Record]) -> list[Alert]:
        child = self._run.child
        if child is None:
            return []
        kinds = {name: host.kind for name, host in self._job.hosts.items()}
        if kinds != self._kinds:
            self._kinds = kinds
            child.begin([*kinds], kinds)
        child.send(records)
        alerts, notes, scores = child.take()
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
        return [self._placed(a) for a in alerts]

    def _placed(self, alert: Alert) -> Alert:
        """Returns an alert with the ranks of its machine, none if it is no host of this job."""
        message = alert.message
        if differences := self._slow.differences(alert.machine):
            message += "; " + ", ".join(differences)
        host = self._job.hosts.get(alert.machine)
        if host is None:
            return Alert(MACHINE, f"{message} (no host of this job)", step=self._job.step)
        return self._job.alert(alert.rule, host.ranks, message)

    def steps_s(self, action: Action) -> tuple[float, float]:
        """Returns how long steps took before a host was slow, and take now; 0: not known."""
        slow = [s for n, s in self._slow.named.items() if n in action.ranks]
        if slow:
            most = max(slow, key=lambda s: s.more_s)
            return most.usual_s, most.step_s
        recent = self._slow.steps_s[-TICKS:]  # the continuity; one tick may hold a step or two
        return self._slow.work.usual_s or 0.0, statistics.median(recent) if recent else 0.0


# ---- a training run without a driver: its processes watch one another
#
# Once a period, a thread of each process writes what an agent would report (progress, records,
# counters of its host) into the job's key-value store, so that a process that hangs is noticed. The
# first process judges all reports as a driver would, with the rules above. It can only report:
# alerts go to its console and into minder.jsonl of the run's folder. Under scripts/supervise.py the
# driver judges instead.


FOLDER = "megajax/minder"
PROGRESS = ("beat", "section", "loss", "own_s", "step_s", "has_bad_state")
PERIOD_S = 1.0  # (chosen)
MEET_S = 300.0  # (chosen) for all processes to say where they are


def watched_timers() -> tuple[Timers, Path]:
    """Returns (timers whose progress another thread can read, the file of that progress).

    The file is in a folder of this process (heartbeat.py), whose lock it holds until it ends.
    Raises: UserError.
    """
    place = heartbeat.shared_memory()
    heartbeat.sweep_folders(place)  # of processes that were killed
    try:
        folder, _ = heartbeat.claim_folder(place)
    except OSError as error:
        raise UserError(
            f"cannot make a folder for the progress of this process in {place}: {error.strerror} "
            "(--detector=minder)"
        ) from None
    path = folder / "progress"
    return Timers(Heartbeat(path)), path


class InRun:
    """The thread of a process; a sink of its records too."""

    def __init__(
        self,
        options: MinderConfig,
        prometheus: str | None,
        progress: Path,
        run_dir: Path,
        say: Callable[[str], object],
        period_s: float = PERIOD_S,
    ):
        """Starts the thread.

        Args: progress: file of watched_timers. run_dir: folder into which the first process writes.
          say: prints a line on its console. period_s: seconds between two reports.
        """
        self._progress, self._period, self._say = progress, period_s, say
        import jax

        from megajax.core import mesh

        self._store = mesh.job_store()
        self._rank, self._size = jax.process_index(), jax.process_count()
        self._host = socket.gethostname()
        self._meter, self._guard = HostMeter(), threading.Lock()
        self._records: list[Record] = []
        self._done = threading.Event()
        self._folder = run_dir
        self._minder: RunMinder | None = None
        if self._rank == 0:
            self._lines = Lines(run_dir / "minder.jsonl")
            self._minder = RunMinder(options, prometheus, run_dir, self._tell, lambda _: None)
            if self._size == 1:
                say("minder: one process alone: there is nobody to compare it with")
            say("minder: alerts are told only; scripts/supervise.py --detector=minder acts on them")
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._thread.start()

    # ---- monitor.records.Sink

    def write(self, records: Sequence[Record]) -> None:
        """Remembers the newest records of this process."""
        with self._guard:
            self._records = newest([*self._records, *records])

    def close(self) -> None:
        """Ends the thread."""
        self._done.set()
        self._thread.join(2 * self._period + 5)
        if self._minder is not None:
            self._minder.close()
        shutil.rmtree(self._progress.parent, ignore_errors=True)

    # ---- the thread

    def _run(self) -> None:
        try:
            if self._store is not None:
                self._put(f"now/{self._rank}", json.dumps([self._host, []]))
            dog = self._meet() if self._rank == 0 else None
            while not self._done.wait(self._period):
                rows = [without_host(r) for r in self._look()]
                if self._store is not None:
                    self._put(f"now/{self._rank}", json.dumps([self._host, rows]))
                if dog is not None:
                    self._judge(dog, {self._rank: (self._host, rows)} | self._others())
        except Exception as error:  # the job's store may end before this process does
            if not self._done.is_set() and self._rank == 0:
                self._say(f"minder: watches no more: {error!r:.200}")

    def _look(self) -> list[Record]:
        """Returns the records that an agent would report of this process."""
        now, host, rank, meter = time.time(), self._host, self._rank, self._meter
        report = meter.records(host, self._folder)
        with self._guard:
            report += [r for r in self._records if r.device is None]
            self._records = [r for r in self._records if r.name == KIND]  # a report may be missed
        progress = heartbeat.read(self._progress)
        if progress is not None:
            seen = {n: getattr(progress, n) for n in PROGRESS} | meter.process(os.getpid())
            step = progress.step
            report += [Record(now, host, rank, None, step, n, v) for n, v in seen.items()]
        return report

    def _put(self, name: str, value: str) -> None:
        self._store.key_value_set(f"{FOLDER}/{name}", value, allow_overwrite=True)

    def _others(self) -> dict[int, tuple[str, list]]:
        if self._store is None:
            return {}
        reports = self._store.key_value_dir_get(f"{FOLDER}/now/")
        return {int(k.rsplit("/", 1)[1]): tuple(json.loads(v)) for k, v in reports}

    def _meet(self) -> Watchdog:
        """Waits until every process has published its host."""
        end = time.monotonic() + MEET_S
        said: dict[int, tuple[str, list]] = {0: (self._host, [])}
        while len(said) < self._size and time.monotonic() < end and not self._done.wait(0.2):
            said |= self._others()
        names = [host for host, _ in said.values()]
        # A process that is frozen does not report, whatever others of its host do.
        self._names = {
            rank: host if names.count(host) == 1 else f"{host}/{rank}"
            for rank, (host, _) in sorted(said.items())
        }
        hosts = {name: [rank] for rank, name in self._names.items()}
        assert self._minder is not None
        self._heard: dict[int, float] = {}
        responses: dict[str, Kind] = {rule: "warn" for rule in RESPONSES}
        return Watchdog(
            hosts, Limits(), time.monotonic(), self._period, {NAME: self._minder.attempt}, responses
        )

    def _judge(self, dog: Watchdog, said: dict[int, tuple[str, list]]) -> None:
        for rank, (_, rows) in said.items():
            if (name := self._names.get(rank)) is None:
                continue
            records = parse(name, rows)
            at = max((r.time for r in records), default=0.0)
            if at > self._heard.get(rank, 0.0):
                self._heard[rank] = at
                dog.hear(time.monotonic(), name, records)
        for action in dog.judge(time.monotonic()):
            values = {"rule": action.rule, "ranks": action.ranks, "hosts": action.hosts}
            self._tell("alert", action.message, **values, step=action.step)

    def _tell(self, event: str, message: str, **values: Any) -> None:
        row = {"time": round(time.time(), 3), "event": event, "message": message} | values
        self._lines.write(json.dumps(row))
        self._say(f"minder: {message}")
