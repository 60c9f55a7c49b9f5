"""Detectors: records in, alerts out. The rules of MegaScale section 4, and how others are added.

Job (the state of an attempt) -> detectors -> Watchdog, which turns their alerts into actions.

The watchdog calls every detector several times a second with the records that arrived since the
last call, of all ranks and hosts in order of arrival; without records too, because some rules only
measure time. A detector returns an alert for each new finding, and reports no finding twice. `Job`
is the state that many rules share; a detector may read it, or keep its own state. A rank that
answers may still hang (asleep before a collective, it keeps all its heartbeats), so the rules look
at exits and at progress. alerts.py decides what is done about an alert. No jax import.
"""

import math
import re
import signal
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megajax.core.errors import SUPERSEDED, UserError, did_you_mean
from megajax.monitor.alerts import RESPONSES, Action, Alert, Cause, Kind, respond
from megajax.monitor.heartbeat import CODES, EXPIRED
from megajax.monitor.records import KIND, Record, Value

# ---- what the records of a job say so far: how far each rank is, and since when
#
# The watchdog puts the records of all hosts into one Job, and the detectors read it. Its clock does
# not run while nobody looks: when the watcher itself was starved on a loaded machine, the time that
# it missed counts for two periods. How long it missed is known (`absence`): what agents and ranks
# did meanwhile, because nobody answered them, is not their fault.
#
# Of all ranks only those furthest behind can be late; who is ahead waits for them rightly, however
# long. So `since` of every other rank is now.
#
# In a job on unlike GPUs (systems/qsync) every rank says of which kind its devices are, as a record
# `device_kind`, when it starts. Speeds are compared among ranks of one kind: a weak device is not
# slow, and a strong one that waits for it has done nothing wrong. A rank that is the only one of
# its kind is compared with its past. Without such records all ranks are of one kind.


FACTOR = 5.0  # (chosen) times the longest time seen in a section, before it counts as a stall
WINDOW = 20  # (chosen) steps whose median counts, for stragglers and traffic
TOLD = (0, 143, 130)  # codes of a process that came to its end: done, or saved because told to


@dataclass(frozen=True)
class Limits:
    """Limits of the rules: times in seconds, and amounts.

    start: longest time from the start of a process to its first step, and of each of its first two
    steps, which compile. step: longest time in one section of a step. save: in a save. evaluate: in
    an evaluation, and at the end of the run. silence: longest time without a report of an agent, or
    in which a process is stopped by a signal. settle: time between the first sign of a fault and
    its judgement, so that the signs of the rank that caused it have arrived.
    """

    start: float = 1800.0
    step: float = 180.0
    save: float = 600.0
    evaluate: float = 1800.0
    silence: float = 15.0
    settle: float = 2.0
    flood_bytes_per_s: float = 20e6
    disk_free: float = 2**30

    def floor(self, section: str) -> float:
        """Returns the least that a section may take."""
        if section in ("start", "compile"):
            return self.start
        if section == "save":
            return self.save
        return self.evaluate if section in ("evaluate", "end", "told") else self.step


@dataclass
class Rank:
    """A training process. values: the last value of each name that it recorded.

    times: (seconds of its own work, seconds of the step) of the last steps.
    """

    number: int
    host: str
    since: float = 0.0  # when it last moved, or rightly waited for another
    running: float = 0.0  # when it was last seen in a state other than T
    flood: float | None = None  # since when its log is in flood
    step: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    times: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def number_of(self, name: str) -> float:
        """Returns the last value of a name, 0 before the first."""
        return _number(self.values.get(name), 0.0)

    @property
    def kind(self) -> str:
        """The kind of its devices; "": it said none."""
        return str(self.values.get(KIND, ""))

    @property
    def section(self) -> str:
        """Name of the section of a step that it is in."""
        return str(self.values.get("section", "start"))

    @property
    def place(self) -> tuple[int, int]:
        """How far it is."""
        return self.step, CODES[self.section]

    @property
    def code(self) -> int | None:
        """How it ended, negative for a signal; None: it lives."""
        return int(self.number_of("exit_code")) if "exit_code" in self.values else None

    @property
    def is_frozen(self) -> bool:
        """Whether a signal has stopped it (SIGSTOP)."""
        return self.values.get("state") == "T"

    @property
    def has_bad_loss(self) -> bool:
        """Whether its last finished step had no finite loss."""
        return not math.isfinite(self.number_of("loss"))

    @property
    def has_bad_state(self) -> bool:
        """Whether the part of the state that its devices hold is not finite."""
        return bool(self.number_of("has_bad_state"))

    @property
    def error(self) -> str:
        """The last error that it printed, '' for none."""
        return str(self.values.get("error", ""))

    @property
    def came_to_its_end(self) -> bool:
        """Whether it ended as it should, or is about to."""
        return self.code in TOLD and ("beat" not in self.values or self.section in ("end", "told"))


@dataclass
class Host:
    """A machine with its ranks. heard: the job's clock at its agent's last report."""

    name: str
    ranks: list[Rank]
    heard: float = 0.0
    step: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    counted: float | None = None  # bytes through its network at that step
    per_step: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def kind(self) -> str:
        """The kinds of its ranks' devices, one as a rule."""
        return ",".join(sorted({r.kind for r in self.ranks}))

    def number_of(self, name: str, otherwise: float = 0.0) -> float:
        """Returns the last value of a name; `otherwise` before the first one."""
        return _number(self.values.get(name), otherwise)


class Job:
    """One attempt of a job. clock: seconds; it stands still while the watcher is frozen."""

    def __init__(
        self, ranks: Mapping[str, Sequence[int]], limits: Limits, now: float, period: float = 1.0
    ):
        """ranks: {host: its ranks}. period: seconds between two reports of an agent."""
        self.limits, self._period = limits, period
        self._last, self.clock = now, 0.0
        self.hosts = {
            name: Host(name, [Rank(r, name) for r in numbers]) for name, numbers in ranks.items()
        }
        self.ranks = {r.number: r for host in self.hosts.values() for r in host.ranks}
        self.gone: dict[str, str] = {}  # hosts whose agents hung up, and why
        self._gaps: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # (end, seconds) unwatched
        self._back = set(self.ranks)  # the ranks furthest behind, at the last look
        self._seen: dict[str, float] = {}
        self._sign: float | None = None  # when the first sign of a fault came

    @property
    def step(self) -> int:
        """The furthest step of any rank."""
        return max((r.step for r in self.ranks.values()), default=0)

    def tick(self, now: float) -> None:
        """Advances the clock to a moment of the watcher's clock."""
        gap = now - self._last
        self.clock += min(gap, 2 * self._period)
        if gap > 2 * self._period:
            self._gaps.append((now, gap))
        self._last = now

    def look(self, now: float) -> None:
        """Finds who is behind, before the detectors judge."""
        self.tick(now)
        self._back = {r.number for r in self.behind()}
        for rank in self.ranks.values():
            if rank.number not in self._back:
                rank.since = self.clock

    def hear(self, now: float, name: str, records: Sequence[Record]) -> None:
        """Takes the records of one report of a host's agent."""
        self.tick(now)
        host = self.hosts[name]
        elapsed = self.clock - host.heard
        host.heard = self.clock
        told: dict[int, list[Record]] = {}
        for r in records:
            if r.rank is None:
                if r.device is None:
                    host.values[r.name] = r.value
            elif r.device is None and r.name != "log_line":
                told.setdefault(r.rank, []).append(r)
        for number, news in told.items():
            self._hear_rank(self.ranks[number], news, elapsed)
        total = host.number_of("network_bytes")
        step = min((r.step for r in host.ranks), default=0)
        if host.counted is None:
            host.counted, host.step = total, step
        elif step > host.step:
            host.per_step.append((total - host.counted) / (step - host.step))
            host.counted, host.step = total, step

    def _hear_rank(self, rank: Rank, records: Sequence[Record], elapsed: float) -> None:
        before, section = dict(rank.values), rank.section
        rank.values.update((r.name, r.value) for r in records)
        step = next((r.step or 0 for r in records if r.name == "section"), rank.step)
        if rank.values.get("beat") != before.get("beat"):
            if rank.number in self._back:  # those ahead also waited for others
                spent = self.clock - elapsed - rank.since
                self._seen[section] = max(self._seen.get(section, 0.0), spent)
            if step != rank.step and (step_s := rank.number_of("step_s")):
                rank.times.append((rank.number_of("own_s"), step_s))
            rank.since = self.clock
        rank.step = step
        if not rank.is_frozen:
            rank.running = self.clock
        if any(r.name == "log_bytes" for r in records):
            grown = rank.number_of("log_bytes") - _number(before.get("log_bytes"), 0.0)
            wild = grown > self.limits.flood_bytes_per_s * max(elapsed, self._period)
            rank.flood = (self.clock if rank.flood is None else rank.flood) if wild else None

    # ---- what rules ask

    def absence(self) -> float:
        """Returns for how many seconds the watcher was frozen, if that may explain the present
        signs."""
        recent = self._last - self.limits.silence - self.limits.settle - 2 * self._period
        return sum(gap for end, gap in self._gaps if end >= recent)

    def is_up(self) -> bool:
        """Tells whether every rank has reached a step, as far as ranks publish their progress."""
        return all(r.step > 0 for r in self.ranks.values())

    def by_kind(self) -> dict[str, list[Rank]]:
        """Returns the ranks by the kind of their devices."""
        kinds: dict[str, list[Rank]] = {}
        for rank in self.ranks.values():
            kinds.setdefault(rank.kind, []).append(rank)
        return kinds

    def behind(self) -> list[Rank]:
        """Returns the living ranks that are furthest behind."""
        live = [r for r in self.ranks.values() if r.code is None]
        place = min((r.place for r in live), default=None)
        return [r for r in live if r.place == place]

    def allowed(self, section: str, least: float | None = None) -> float:
        """Returns the seconds that a section may take now: FACTOR times the longest that was seen
        of it, and not less than `least`, None: its limit."""
        least = self.limits.floor(section) if least is None else least
        return max(least, FACTOR * self._seen.get(section, 0.0))

    def is_settled(self, times: float = 1.0) -> bool:
        """Tells whether the signs of the other ranks have arrived; to be called at a sign of a
        fault.

        times: factor on the time that the limits allow for it.
        """
        self._sign = self.clock if self._sign is None else self._sign
        waits = any(r.code is None for r in self.ranks.values())
        return not waits or self.clock - self._sign >= times * self.limits.settle

    def alert(
        self,
        rule: str,
        ranks: Sequence[Rank],
        message: str,
        code: int = 0,
        cause: Cause = "other",
        error: str = "",
    ) -> Alert:
        """Returns an alert that names ranks with their hosts. error: numbers in it do not count."""
        where = f"rank {_listed(r.number for r in ranks)} on {_listed(r.host for r in ranks)}"
        hosts = tuple(dict.fromkeys(r.host for r in ranks))
        numbers = tuple(r.number for r in ranks)
        error = re.sub(r"0x[0-9a-f]+|\d+", "#", error)
        return Alert(rule, f"{where}: {message}", numbers, hosts, self.step, code, cause, error)


def _number(value: Value, otherwise: float) -> float:
    return value if isinstance(value, int | float) else otherwise


def _listed(values: Iterable[object]) -> str:
    words = list(dict.fromkeys(str(v) for v in values))
    return ", ".join(words[:4]) + (f" and {len(words) - 4} more" if len(words) > 4 else "")


# ---- the detectors of every supervised run


STRAGGLER = 0.08  # (chosen) of a step: named at +12 %, above the 6 % between two at -3 and +3 %
TRAFFIC = 0.5  # (chosen, papers' "traffic drop") of its own median bytes a step
ABORT = -6
WORDS = 1.5  # (chosen) times the usual, for the last words of a rank without an exit code
CODE = 5.0  # (chosen) times the usual, for the exit code that says what the last words do not
# What jax's runtime says when it ends a process because of another one.
GIVEN_UP = ("distributed service", "coordination service", "heartbeat")
FULL_DISK = ("no space left on", "disk quota exceeded", "storage is full")
CRASHES = tuple(-getattr(signal, f"SIG{name}") for name in ("SEGV", "BUS", "FPE", "ILL", "SYS"))
TOLD_CODE = 143  # of a job whose processes say that they were told, whatever their own codes


class Detector(Protocol):
    """One way of finding that something is wrong with a job."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns new alerts. records: those that arrived since the last call."""
        ...


Maker = Callable[[Job], Detector]  # called once an attempt


class Rule:
    """A detector that reads the job's state. `is_new` remembers which findings were reported."""

    def __init__(self, job: Job):
        """job: the state of the attempt that is watched."""
        self._job = job
        self._said: set[object] = set()

    def is_new(self, key: object, holds: bool) -> bool:
        """Tells whether a finding holds now that did not hold at the last call."""
        if not holds:
            self._said.discard(key)
            return False
        fresh = key not in self._said
        self._said.add(key)
        return fresh


class End(Rule):
    """Ends of processes or agents: names the rank that caused them, or that the job is done."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert once the signs of all ranks are in."""
        job, ranks = self._job, list(self._job.ranks.values())
        if all(r.came_to_its_end for r in ranks):
            told = any(r.section == "told" for r in ranks)
            code = max(r.code or (TOLD_CODE if told else 0) for r in ranks)
            return [Alert("end", "all ranks came to their end", code=code)]
        if taken := [r for r in ranks if r.code == SUPERSEDED]:
            why = "a newer driver's run saves in its place"
            return [job.alert("superseded", taken, why, SUPERSEDED)]
        bad = [r for r in ranks if _blame(r)]
        if not (bad or job.gone):
            return []
        open_ = [r for r in bad if r.code is None and r.section == "failed"]
        mute = any(not r.error for r in open_)
        if not job.is_settled(CODE if any(map(_owes_code, open_)) else WORDS if mute else 1.0):
            return []
        least = min(map(_blame, bad), default=LOST)
        away = job.absence()
        if away > job.limits.silence / 2 and least > OWN and (job.gone or least >= LEASE):
            return [
                Alert(
                    "driver",
                    f"the driver did not run for {away:.1f} s (it was frozen, or its machine was); "
                    f"without it, processes end themselves after {job.limits.silence:g} s. No host "
                    "is at fault",
                    step=job.step,
                )
            ]
        if job.gone:
            lost = [r for name in job.gone for r in job.hosts[name].ranks]
            why = next(iter(job.gone.values()))
            return [job.alert("agent", lost, f"the agent is gone{why and f' ({why})'}")]
        causes = [r for r in bad if _blame(r) == least]
        first = causes[0]
        if least == LOST and (late := [r for r in job.behind() if not _blame(r)]):
            # Those that were on their way when jax gave them up.
            why = (
                f"the others gave up waiting for it, in {late[0].section!r}; it was slow, not lost"
            )
            return [job.alert("lost", late, why)]
        if any(r.has_bad_loss for r in causes):
            return NotFinite(job).watch(())
        if any(r.code == 2 and not _is_full(r) for r in causes):
            return [job.alert("usage", causes, f"says it cannot (exit code 2){_said(first)}", 2)]
        if least == LEASE:
            why = f"ended itself, for want of news from its driver (exit code {EXPIRED})"
            return [job.alert("lease", causes, why + _said(first))]
        message = f"{_how(first)}, step {first.step}{_said(first)}"
        return [job.alert("exit", causes, message, 0, self._evidence(first, least), _sign(first))]

    def _evidence(self, rank: Rank, least: int) -> Cause:
        """Returns the cause that the end of a rank is evidence of."""
        if _is_full(rank) or rank.code == EXPIRED or f"exit code {EXPIRED}" in rank.error:
            return "temporary"
        is_own = rank.code in CRASHES if least == KILLED else least == OWN
        if least == ABORTED:
            is_own = bool(rank.error) and not any(word in rank.error for word in GIVEN_UP)
        return "other" if not is_own else "program" if self._job.is_up() else "start"


# Who of those that ended caused it: the smallest.
KILLED, OWN, ABORTED, LEASE, LOST = 1, 2, 3, 4, 5


def _blame(rank: Rank) -> int:
    """Returns how likely the end of a rank caused the others' ends: 1 the most, 0 not at all."""
    if rank.came_to_its_end or (rank.code is None and rank.section not in ("failed", "lost")):
        return 0
    if rank.code is not None and rank.code < 0 and rank.code != ABORT:
        return KILLED  # by somebody, or by what it did itself
    if rank.section == "lost":
        return LOST  # it died of another rank's death
    if rank.code == ABORT:
        return ABORTED  # so ends jax's runtime what lost its coordinator or was slow to answer
    if rank.code == EXPIRED:
        says_so = rank.error.startswith("[lease]")
        if says_so or ("beat" in rank.values and rank.section != "failed" and not rank.error):
            return LEASE
    return OWN  # an error of its own, or it left before the end


def _is_full(rank: Rank) -> bool:
    """Tells whether a rank ended because a disk is full."""
    return any(word in rank.error.lower() for word in FULL_DISK)


def _owes_code(rank: Rank) -> bool:
    """Tells whether only the exit code of a rank can tell whether a restart helps.

    It printed an error as a command does that refuses its flags, and a busy machine takes seconds
    to end it.
    """
    says_all = "exit code" in rank.error or _is_full(rank)
    return rank.error.startswith("error: ") and not says_all


def _sign(rank: Rank) -> str:
    """Returns the text by which two ends of ranks are recognised as the same error."""
    return rank.error or f"{_how(rank)}"


def _said(rank: Rank) -> str:
    return f": {rank.error[:200]}" if rank.error else ""


def _how(rank: Rank) -> str:
    code, where = rank.code, f"in {rank.section!r}"
    if rank.section == "failed":
        where = "after an error or an early exit"
    if code is None:
        return f"ending {where}"
    if code == 0:
        return f"left too early {where}"
    return f"killed by signal {-code} {where}" if code < 0 else f"exit code {code} {where}"


class Silence(Rule):
    """An agent that does not report."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert about the first host that is silent for too long."""
        job = self._job
        for host in job.hosts.values():
            quiet = job.clock - host.heard
            if quiet > job.limits.silence:
                why = f"the agent said nothing for {quiet:.1f} s"
                return [job.alert("silence", host.ranks, why)]
        return []


class NotFinite(Rule):
    """A loss that is not finite.

    All ranks compute the same loss; it comes from those whose own state is not finite. Where no
    state is bad (the data, a learning rate, a product gone wrong) all are named.
    """

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert once the signs of all ranks are in."""
        job = self._job
        bad = [r for r in job.ranks.values() if r.has_bad_loss]
        if not bad or not job.is_settled():
            return []
        sick = [r for r in bad if r.has_bad_state]
        why = ", what it holds of the state is not" if sick else ""
        message = f"the loss is not finite by step {bad[0].step}{why}"
        return [job.alert("nan", sick or bad, message, cause="program", error="nan")]


class Stopped(Rule):
    """A process that a signal has stopped, while others of the job run."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert about all that are stopped."""
        job = self._job
        live = [r for r in job.ranks.values() if r.code is None]
        frozen = [r for r in live if job.clock - r.running > job.limits.silence]
        if not frozen or len(frozen) == len(live) > 1:  # a whole job is suspended on purpose
            return []
        return [job.alert("stopped", frozen, f"stopped (SIGSTOP) in {frozen[0].section!r}")]


class Stall(Rule):
    """A section that takes too long, of the ranks that are furthest behind."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert about those behind."""
        job = self._job
        behind = job.behind()
        if not behind:
            return []
        # As of the last report: what was not heard since is the silence rule's.
        age = min(job.hosts[r.host].heard - r.since for r in behind)
        section, allowed = behind[0].section, job.allowed(behind[0].section)
        if age <= allowed:
            return []
        message = f"no progress for {age:.1f} s in {section!r} of step {behind[0].step} "
        frozen = [r for r in behind if r.is_frozen]
        # Whoever stopped it, compiles, or waits for storage, has done nothing wrong.
        free = frozen or section in ("start", "compile", "save") or not job.is_up()
        message += f"(allowed: {allowed:.1f} s)"
        return [job.alert("stall", frozen or behind, message, cause="other" if free else "stall")]


class Flood(Rule):
    """A log that grows without end."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert about all ranks that print too much for too long."""
        job = self._job
        wild = [
            r
            for r in job.ranks.values()
            if r.flood is not None and job.hosts[r.host].heard - r.flood > job.limits.silence
        ]
        rate = job.limits.flood_bytes_per_s / 1e6
        return [job.alert("flood", wild, f"the log grows by more than {rate:g} MB/s")] * bool(wild)


class Log(Rule):
    """Lines of a log that hold a keyword."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert a line."""
        job = self._job
        return [
            job.alert("log", [job.ranks[r.rank]], str(r.value))
            for r in records
            if r.name == "log_line" and r.rank is not None
        ]


class Straggler(Rule):
    """A rank whose own work takes longer than that of the others of its kind."""

    def __init__(self, job: Job):
        """job: the state of the attempt that is watched."""
        super().__init__(job)
        self._first: dict[int, float] = {}  # work of the only rank of a kind, when first judged

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert a rank."""
        ranks, kinds = list(self._job.ranks.values()), self._job.by_kind()
        if len(ranks) < 2 or any(len(r.times) < WINDOW for r in ranks):
            return []
        work_s = {r.number: statistics.median(o for o, _ in r.times) for r in ranks}
        step_s = statistics.median(s for r in ranks for _, s in r.times)
        medians = {k: statistics.median_low(work_s[r.number] for r in kinds[k]) for k in kinds}
        alerts = []
        for r in ranks:
            usual, than = medians[r.kind], "the others'"
            if len(kinds[r.kind]) == 1:
                usual, than = self._first.setdefault(r.number, usual), "it did at first"
            elif len(kinds) > 1:
                than = f"that of the others of kind {r.kind}"
            more = (work_s[r.number] - usual) / step_s
            if self.is_new(r.number, more > STRAGGLER):
                message = f"its own work takes {100 * more:.0f} % of a step longer than {than}"
                alerts.append(self._job.alert("straggler", [r], message))
        return alerts


class Disk(Rule):
    """A disk that is nearly full."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert a host."""
        alerts = []
        for name, host in self._job.hosts.items():
            free = host.number_of("disk_free_bytes", otherwise=float("inf"))
            if self.is_new(name, free < self._job.limits.disk_free):
                message = f"{name}: {free / 2**30:.2f} GiB left on the disk"
                alerts.append(Alert("disk", message, hosts=(name,)))
        return alerts


class Traffic(Rule):
    """A host that sends and receives much less a step than it used to."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert a host."""
        return [a for host in self._job.hosts.values() if (a := self._drop(host)) is not None]

    def _drop(self, host: Host) -> Alert | None:
        full = len(host.per_step) == WINDOW
        usual = statistics.median(host.per_step) if full else 0.0
        now = max(list(host.per_step)[-3:], default=0.0)
        if not self.is_new(host.name, full and now < TRAFFIC * usual):
            return None
        message = f"{host.name}: {now:.3g} bytes a step, usually {usual:.3g}"
        return Alert("traffic", message, hosts=(host.name,))


# By name, in the order in which they decide where several find an end of the attempt.
DETECTORS: Mapping[str, Maker] = {
    "end": End,
    "silence": Silence,
    "nan": NotFinite,
    "stopped": Stopped,
    "stall": Stall,
    "flood": Flood,
    "log": Log,
    "straggler": Straggler,
    "disk": Disk,
    "traffic": Traffic,
}
DEFAULT = tuple(DETECTORS)
NEEDED = "end"  # without it nobody sees that the job is done
USUAL = "default"  # stands for all of DEFAULT


def choose(names: str, known: Mapping[str, Maker] = DETECTORS) -> dict[str, Maker]:
    """Returns the detectors of a flag: names joined by commas; 'default' stands for DEFAULT.

    known: those that there are, by name. Raises: UserError for an unknown name, and without 'end'.
    """
    chosen: dict[str, Maker] = {}
    for name in [n.strip() for n in names.split(",") if n.strip()]:
        if name != USUAL and name not in known:
            raise UserError(
                f"detectors={names}: there is no detector {name!r}; there are "
                f"{', '.join([USUAL, *known])}.{did_you_mean(name, [USUAL, *known])} (--detectors)"
            )
        chosen |= {n: known[n] for n in (DEFAULT if name == USUAL else [name])}
    if NEEDED not in chosen:
        raise UserError(
            f"detectors={names} must name {NEEDED!r} too, which sees that the job is done; "
            f"nearest: {','.join([NEEDED, *chosen])} (--detectors)"
        )
    return {name: chosen[name] for name in [*known] if name in chosen}


# ---- the rank for which all others wait, named within seconds
#
# When a collective hangs, the ranks that came to it say where they wait, and the one that did not
# is silent or behind (MegaScale section 5.2). So a rank is named when the others have waited for it
# for `after_s` seconds, and not for a section that rightly takes long: compilation, saves,
# evaluations. Where all are in the same section the processes tell: one that a signal stopped, or
# the only one that computes. This only names; a person, or Limits (rules `stall` and
# `stopped`, which act later), end the attempt.


AFTER_S = 10.0  # (chosen): with a report a second, named in less than 15 s
BRIEF = ("data", "prepare", "launch", "wait")  # sections of a step
BUSY, IDLE = 0.5, 0.1  # (chosen) processors that a rank uses: it computes; it waits


class Hang(Rule):
    """A rank that does not reach a section in which the others wait for it."""

    def __init__(self, job: Job, after_s: float = AFTER_S):
        """after_s: seconds for which the others must have waited before a rank is named."""
        super().__init__(job)
        self._after = after_s
        self._late: dict[int, float] = {}  # rank -> since when it alone is behind
        self._longest = 0.0  # that a rank was late for and then came

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert about those that are newly named."""
        job = self._job
        live = [r for r in job.ranks.values() if r.code is None]
        alerts = [self._silent(live), self._frozen(live), self._behind(live)]
        return [alert for alert in alerts if alert is not None]

    def _silent(self, live: Sequence[Rank]) -> Alert | None:
        """Names hosts whose agents do not report, while most others do."""
        job = self._job
        quiet = {h.name: job.clock - h.heard for h in job.hosts.values()}
        hosts = [name for name, age in quiet.items() if age > self._after]
        is_new = self.is_new(("silent", *hosts), bool(hosts))
        if not hosts or 2 * len(hosts) >= len(quiet) > 1 or not is_new:
            return None
        ranks = [r for name in hosts for r in job.hosts[name].ranks]
        return job.alert("hang", ranks, f"nothing was heard of it for {quiet[hosts[0]]:.0f} s")

    def _frozen(self, live: Sequence[Rank]) -> Alert | None:
        job = self._job
        ranks = [r for r in live if r.is_frozen and job.clock - r.running > self._after]
        numbers = tuple(r.number for r in ranks)
        is_new = self.is_new(("frozen", *numbers), bool(ranks))
        if not ranks or len(ranks) == len(live) > 1 or not is_new:
            return None
        age = job.clock - min(r.running for r in ranks)
        section = ranks[0].section
        return job.alert("hang", ranks, f"stopped by a signal for {age:.0f} s, in {section!r}")

    def _behind(self, live: Sequence[Rank]) -> Alert | None:
        """The few that are behind, or in the same section the only one that computes."""
        job, back = self._job, self._job.behind()
        if len(live) < 2 or not back or back[0].section not in BRIEF:
            self._late.clear()
            return None
        late = back if 2 * len(back) < len(live) or len(back) < len(live) == 2 else []
        how = f"the others wait for it, which is in {back[0].section!r} of step {back[0].step}"
        allowed = max(self._after, min(FACTOR * self._longest, job.limits.step))
        if not late and len(back) == len(live):
            busy = [r for r in back if r.number_of("cpu_cores") > BUSY]
            idle = [r for r in back if r.number_of("cpu_cores") < IDLE]
            late = busy if len(busy) == 1 and len(idle) == len(back) - 1 else []
            how = f"it computes while the others wait, all in {back[0].section!r}"
            # Devices of another kind may rightly wait for it.
            peers = any(busy[:1] and r.kind == busy[0].kind for r in idle)
            allowed = job.allowed(back[0].section, self._after if peers else None)
        if any(r.section not in BRIEF for r in live):
            late = []  # of those ahead, some are in what takes long
        places = {r.number: r.since for r in late}
        for number, since in list(self._late.items()):
            if places.get(number) != since:  # it came
                del self._late[number]
                self._longest = max(self._longest, job.clock - since)
        self._late |= places
        late = [r for r in late if job.hosts[r.host].heard - r.since > allowed]
        if not late or not self.is_new(("behind", *places.items()), True):
            return None
        age = job.hosts[late[0].host].heard - late[0].since
        return job.alert("hang", late, f"{how}, for {age:.0f} s")


# ---- the watchdog of one attempt of a job: records of all ranks in, actions out
#
# `hear` takes what agents report, each detector of a list looks at it, and what they
# find becomes at most one action that ends the attempt, besides warnings (alerts.py). The clock is
# handed in. Who is excluded, and how often to try, is the driver's business.


class Watchdog:
    """Judges one attempt: `hear` and `hang_up` take reports, `judge` returns actions."""

    def __init__(
        self,
        ranks: Mapping[str, Sequence[int]],
        limits: Limits,
        now: float,
        period: float = 1.0,
        detectors: Mapping[str, Maker] = DETECTORS,
        responses: Mapping[str, Kind] = RESPONSES,
    ):
        """ranks: {host: its ranks}. now: the moment at which the attempt starts, in seconds of the
        clock by which `hear` and `judge` are called too (time.monotonic). period: seconds between
        two reports of an agent.

        detectors: by name, in the order in which they decide. responses: what is done about an
        alert, by its rule.
        """
        self.job = Job(ranks, limits, now, period)
        self._responses = responses
        self._detectors: dict[str, Detector] = {n: make(self.job) for n, make in detectors.items()}
        self._fresh: list[Record] = []

    def hang_up(self, host: str, why: str = "") -> None:
        """The connection to an agent is gone."""
        self.job.gone[host] = why

    def hear(self, now: float, host: str, records: Sequence[Record]) -> None:
        """Takes a report of a host's agent."""
        self.job.hear(now, host, records)
        self._fresh += records

    def judge(self, now: float) -> list[Action]:
        """Returns the actions; one that ends the attempt comes first."""
        self.job.look(now)
        records, self._fresh = self._fresh, []
        alerts: list[Alert] = []
        for name, detector in list(self._detectors.items()):
            try:
                alerts += detector.watch(records)
            except Exception as error:  # of whoever wrote it: no reason to end a job
                if name == NEEDED:
                    raise
                del self._detectors[name]
                why = f"the detector {name!r} fails and is switched off: {error!r:.200}"
                alerts.append(Alert("detector", why))
        return respond(alerts, self._responses)
