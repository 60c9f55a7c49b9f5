"""Minder in a run: who makes the job wait, from progress, step times and metrics, and what is done.

Three rules for a driver's watchdog, by one name, --detector=minder:

hang    a rank for which all others wait, within seconds, from progress (monitor/hang.py); told
slow    a rank whose own work makes the steps slow, from step times (monitor/slow_rank.py); evicted
minder  a machine whose metrics differ from the others' (detector.py, a child process); evicted

What evicts may do so only within a budget of false alarms (elastic/evictions.py); beyond it, it
only tells. --respond=slow=warn lets a rule only tell. No jax import.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.core.paths import expand
from megajax.monitor import alerts
from megajax.monitor.alerts import Action, Alert, Kind
from megajax.monitor.detectors import DETECTORS, NEEDED, Maker, choose
from megajax.monitor.hang import Hang
from megajax.monitor.job import Job
from megajax.monitor.minder_config import MinderConfig
from megajax.monitor.own_work import TICKS, OwnWork
from megajax.monitor.record_file import RecordFile
from megajax.monitor.records import Record
from megajax.monitor.slow_rank import SlowRank
from megajax.systems.elastic.events import Journal
from megajax.systems.elastic.evictions import Eviction, Evictions
from megajax.systems.minder import alert as minder_alert
from megajax.systems.minder.beside import Beside
from megajax.systems.minder.settings import LEAST

NAME = "minder"
RESPONSES: Mapping[str, Kind] = {"hang": "warn", "slow": "evict", "minder": "evict"}
AFTER = 3  # (chosen) ticks of an attempt whose steps tell whether an eviction was right


def _flags() -> list[dataclasses.Field]:
    """Returns the options that a driver has; its training processes have the others."""
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
    """Returns the options of parsed flags, by their names. Raises: UserError."""
    return MinderConfig(**{f.name: said[f"minder.{f.name}"] for f in _flags()})


def choose_detectors(
    said: Mapping[str, Any], known: Mapping[str, Maker]
) -> tuple[dict[str, Maker], dict[str, Kind]]:
    """Returns (detectors by name, responses by rule) of the flags of a driver.

    In the place of minder stands what `of_driver` replaces. Raises: UserError.
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
    """Puts minder in its place among the detectors, and returns it; None where it is none."""
    if NAME not in detectors:
        return None
    minder = RunMinder(
        from_flags(said), said["prometheus"], journal.folder, journal.event, journal.take,
        journal.gauge,
    )  # fmt: skip
    detectors[NAME] = minder.attempt
    return minder


class RunMinder:
    """The detector of a job, over all its attempts: `attempt` makes that of one (a Maker), and the
    driver asks it before it evicts (driver.Guard)."""

    def __init__(
        self,
        options: MinderConfig,
        prometheus: str | None,
        out: Path,
        tell: Callable[..., object],
        emit: Callable[[Sequence[Record]], object],
        gauge: Callable[..., object] = lambda **_: None,
    ):
        """prometheus: address of a server. out: folder of evictions.json. tell(event, message,
        **values): of a journal. emit: takes records of what is found. gauge(**values): of a
        journal, for metrics of the job.

        Raises: UserError for what cannot be.
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
                "minder", "no model of metrics is given (--minder.model): machines are judged by "
                "progress and by step times only",
            )  # fmt: skip
            return
        if len(job.hosts) < LEAST:
            self._tell(
                "minder", f"the metrics of {len(job.hosts)} hosts cannot be judged, which takes "
                f"{LEAST}; progress and step times are",
            )  # fmt: skip
        settings = {n: getattr(o, n) for n in ("continuity_s", "clear_s", "strict")}
        given = {
            "model": str(expand(o.model, "minder.model")), "settings": settings,
            "server": o.server(self._prometheus),
        }  # fmt: skip
        self.beside = Beside(given)

    def note(self, text: str) -> None:
        """Says something that is no alert."""
        self._tell("minder", text)

    def settled(self, eviction: Eviction) -> None:
        """Says what became of an eviction."""
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
        """Returns why a host may not be taken out now."""
        return self.evictions.refusal() if action.rule in RESPONSES else None

    def evicts(self, action: Action) -> None:
        """A host is taken out."""
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
        """Ends the child, and the file of records."""
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
        """Returns what is new, by all three rules."""
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
            self._run.emit([
                Record(now, m, None, None, step, "minder_score", s)
                for m, s in scores.items() if m in self._job.hosts
            ])  # fmt: skip
        return [self._alert(a) for a in alerts]

    def _alert(self, found: minder_alert.Alert) -> Alert:
        """Returns an alert of the watchdog; without a host for a machine of another job."""
        host = self._job.hosts.get(found.machine)
        message = found.message
        if beside := self._slow.beside(found.machine):
            message += "; " + ", ".join(beside)
        if host is None:
            return Alert(NAME, f"{message} (no host of this job)", step=self._job.step)
        return self._job.alert(NAME, host.ranks, message)

    def steps_s(self, action: Action) -> tuple[float, float]:
        """Returns how long steps took before a host was slow, and take now; 0: not known."""
        own = [s for n, s in self._slow.found.items() if n in action.ranks]
        if own:
            most = max(own, key=lambda s: s.more_s)
            return most.usual_s, most.step_s
        recent = self._slow.steps_s[-TICKS:]  # the continuity; one tick may hold a step or two
        return self._slow.work.usual_s or 0.0, statistics.median(recent) if recent else 0.0
