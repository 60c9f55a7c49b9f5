"""Detectors: records in, alerts out. The rules of MegaScale section 4, and how others are added.

A detector is called once a look with the records that came since, of all ranks and hosts in the
order of their coming; perhaps none, because time passes too. It returns what it found, each thing
once. `Job` is the state that many rules share; a detector may read it, or keep what it needs
itself. Liveness says nothing (a rank asleep before a collective keeps all its heartbeats), so the
rules look at ends and at progress. What is done about an alert is no business of a detector
(alerts.py). No jax import.
"""

import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from megajax.core.errors import SUPERSEDED, UserError, did_you_mean
from megajax.monitor.alerts import Alert, Cause
from megajax.monitor.job import WINDOW, Host, Job, Rank
from megajax.monitor.lease import EXPIRED
from megajax.monitor.records import Record

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
        """Returns what is new. records: that came since the last call."""
        ...


Maker = Callable[[Job], Detector]  # called once an attempt


class Rule:
    """A detector that asks what all records said so far. `is_new` remembers what was said."""

    def __init__(self, job: Job):
        """job: of the attempt that is watched."""
        self._job = job
        self._said: set[object] = set()

    def is_new(self, key: object, holds: bool) -> bool:
        """Tells whether something holds that did not hold at the last call."""
        if not holds:
            self._said.discard(key)
            return False
        fresh = key not in self._said
        self._said.add(key)
        return fresh


class End(Rule):
    """The end of processes, or of an agent: who caused it, or that the job is done."""

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
            mine = [r for name in job.gone for r in job.hosts[name].ranks]
            why = next(iter(job.gone.values()))
            return [job.alert("agent", mine, f"the agent is gone{why and f' ({why})'}")]
        return self._cause([r for r in bad if _blame(r) == least], least)

    def _cause(self, causes: Sequence[Rank], least: int) -> list[Alert]:
        """Returns an alert about those that ended first. least: their blame."""
        job, first = self._job, causes[0]
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
        """Returns what the end of a rank is evidence of."""
        if _is_full(rank) or rank.code == EXPIRED or f"exit code {EXPIRED}" in rank.error:
            return "temporary"
        is_own = rank.code in CRASHES if least == KILLED else least == OWN
        if least == ABORTED:
            is_own = bool(rank.error) and not any(word in rank.error for word in GIVEN_UP)
        return "other" if not is_own else "program" if self._job.is_up() else "start"


# Who of those that ended caused it: the smallest.
KILLED, OWN, ABORTED, LEASE, LOST = 1, 2, 3, 4, 5


def _blame(rank: Rank) -> int:
    """Returns how likely the end of a rank caused the others'. 0: nothing wrong here."""
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
    """Tells whether a rank ended because a disk takes no more."""
    return any(word in rank.error.lower() for word in FULL_DISK)


def _owes_code(rank: Rank) -> bool:
    """Tells whether a rank printed an error as a command does that may refuse its flags: only its
    exit code tells whether it is of use to try again, and a busy machine takes seconds to end it.
    """
    says_all = "exit code" in rank.error or _is_full(rank)
    return rank.error.startswith("error: ") and not says_all


def _sign(rank: Rank) -> str:
    """Returns what must be equal for two ends to be of one kind."""
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
    """A process that a signal has stopped, while others of the job go on."""

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
            r for r in job.ranks.values()
            if r.flood is not None and job.hosts[r.host].heard - r.flood > job.limits.silence
        ]  # fmt: skip
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
    """A rank whose own work takes longer than that of the others."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert a rank."""
        ranks = list(self._job.ranks.values())
        if len(ranks) < 2 or any(len(r.own) < WINDOW for r in ranks):
            return []
        own = {r.number: statistics.median(o for o, _ in r.own) for r in ranks}
        step_s = statistics.median(s for r in ranks for _, s in r.own)
        usual = statistics.median_low(own.values())
        found = []
        for r in ranks:
            more = (own[r.number] - usual) / step_s
            if self.is_new(r.number, more > STRAGGLER):
                message = f"its own work takes {100 * more:.0f} % of a step longer than the others'"
                found.append(self._job.alert("straggler", [r], message))
        return found


class Disk(Rule):
    """A disk that is nearly full."""

    def watch(self, records: Sequence[Record]) -> list[Alert]:
        """Returns an alert a host."""
        found = []
        for name, host in self._job.hosts.items():
            free = host.number_of("disk_free_bytes", otherwise=float("inf"))
            if self.is_new(name, free < self._job.limits.disk_free):
                message = f"{name}: {free / 2**30:.2f} GiB left on the disk"
                found.append(Alert("disk", message, hosts=(name,)))
        return found


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
    found: dict[str, Maker] = {}
    for name in [n.strip() for n in names.split(",") if n.strip()]:
        if name != USUAL and name not in known:
            raise UserError(
                f"detectors={names}: there is no detector {name!r}; there are "
                f"{', '.join([USUAL, *known])}.{did_you_mean(name, [USUAL, *known])} (--detectors)"
            )
        found |= {n: known[n] for n in (DEFAULT if name == USUAL else [name])}
    if NEEDED not in found:
        raise UserError(
            f"detectors={names} must name {NEEDED!r} too, which sees that the job is done; "
            f"nearest: {','.join([NEEDED, *found])} (--detectors)"
        )
    return {name: found[name] for name in [*known] if name in found}
