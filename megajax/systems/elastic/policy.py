"""What to do after a fault: whom to exclude, how long to wait, when to give up.

The second half is the budget of evictions, which a detector may ask for before a fault.

Exit codes, for SLURM, JobSet and Ray to act on (scripts/launch_*):
0 done | 2 the command cannot work, do not retry | 70 one step failed with the same error on several
hosts, do not retry | 75 too few good hosts or restarts are left, or a disk is full, or the job was
told to stop before it trained: start again, without the blocklist |
76 another driver's run has taken over the checkpoints: it goes on there, do not retry |
143, 130 told to stop and saved (the processes themselves then end with 0, and say so in their
progress records).
"""

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from megajax.core import files
from megajax.core.errors import SUPERSEDED, UserError
from megajax.monitor.alerts import Action, Cause, Kind

USAGE, POISON, ELSEWHERE = 2, 70, 75
EARLY = "early"  # rule of the end of a job that was told to stop while it started
OWN: tuple[Cause, ...] = ("program", "start", "stall")  # causes that speak against somebody


@dataclasses.dataclass(frozen=True)
class Policy:
    """When to restart, and when to give up.

    restarts: most restarts of the job. min_hosts: fewest hosts with which the job goes on. poison:
    how often the same error must occur before it ends the job. strikes: number of errors that only
    the ranks of one host had, of different kinds or in different steps, after which the host is
    excluded though its self-checks pass. backoff: seconds before the first restart; every attempt
    without progress doubles them, up to longest. responses: {rule: response} where the response
    differs from alerts.RESPONSES.
    """

    restarts: int = 5
    min_hosts: int = 1
    poison: int = 3
    strikes: int = 2
    backoff: float = 1.0
    longest: float = 300.0
    responses: Mapping[str, Kind] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What follows from a fault.

    code: exit code with which the job ends; None: restart after `wait` seconds without the
    `excluded` hosts. moves: hosts whose ranks another host must run in the next attempt, if there
    is one: then it shows whether an error belongs to the host or to the rank. memory: whether the
    next attempt may go on from copies in memory; not after a step failed twice, perhaps because of
    them.
    """

    code: int | None
    why: str
    wait: float = 0.0
    excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)
    moves: frozenset[str] = frozenset()
    memory: bool = True


def after(code: int, again: str) -> str:
    """Returns a sentence that says what to do after the driver ended with a code.

    again: its command.
    """
    if code == SUPERSEDED:
        return "Start nothing: the run goes on under the newer driver."
    if code == POISON:
        return (
            "Another start would fail in the same step. Correct the data or the program, and then "
            f"continue the run from its last checkpoint: {again}"
        )
    if code == USAGE:
        return f"Correct the command, and then start it again: {again}"
    return f"To continue the run from its last checkpoint, start the command again: {again}"


def ended(action: Action, told: bool, leaving: Action | None, trained: bool) -> Action:
    """Returns what follows from the end of an attempt; a job that was told to stop has no fault.

    told: whether the job was told to stop. leaving: the action that evicts a host as soon as the
    job has saved. trained: whether all ranks trained; the signal ends a rank that is still
    starting, and no step is lost by it.
    """
    if leaving is not None and not told:
        saved = action.kind == "done" and action.code
        return leaving if saved or action.kind == "restart" else action
    if action.kind == "done" or not told:
        return action
    if not trained and action.kind == "restart":
        why = "told to stop before all ranks were seen to train"
        return Action("stop", EARLY, why, step=action.step, code=ELSEWHERE)
    return dataclasses.replace(action, kind="stop", code=ELSEWHERE)  # its last step may be stored


class Guard(Protocol):
    """Decides whether a host may be evicted because of an alert."""

    def refuses(self, action: Action) -> str | None:
        """Returns why the host may not be evicted; None: it may."""
        ...

    def evicts(self, action: Action) -> None:
        """Is told that the host will be evicted."""
        ...

    def acquitted(self) -> list[str]:
        """Returns hosts that were evicted wrongly, each once, as soon as that is known."""
        ...


def to_evict(
    actions: Sequence[Action],
    hosts: Collection[str],
    least: int,
    guard: Guard | None,
    tell: Callable[[str, str], object],
) -> Action | None:
    """Returns the first action that may evict its hosts, or None.

    hosts: all good hosts, spares included. least: number of hosts that must be left. guard: may
    refuse, and is told of the eviction. tell(event, message): is told why a host stays.
    """
    for action in [a for a in actions if a.kind == "evict" and a.hosts]:
        left = len(set(hosts) - set(action.hosts))
        why = guard.refuses(action) if guard is not None else None
        if left < least:
            why = f"{left} hosts would be left of {least} (--spares, --min_hosts)"
        if why is None:
            if guard is not None:
                guard.evicts(action)
            return action
        tell("kept", f"{', '.join(action.hosts)} stays: {why}")
    return None


class Recovery:
    """Remembers the faults of a job, and decides what follows.

    Only errors of the ranks themselves count against a host or the program (alerts.Cause). If an
    error occurs again in the same step, the program or its data is at fault if several hosts had
    it, and the host if only one had it. Faults from outside (of ranks, agents or the driver) cost a
    restart and nothing else.
    """

    def __init__(self, policy: Policy):
        """Nothing has happened yet."""
        self.policy = policy
        self.restarts = 0
        self._strikes: dict[str, list[Action]] = {}
        self._sick: set[str] = set()  # hosts that have failed a self-check
        self._step: int | None = None
        self._same = 0  # faults in a row in one step, whatever they were
        self._errors: list[Action] = []  # of the program in one step, all of one kind
        self._blaming: Action | None = None  # the last fault that speaks against somebody
        self._deferred = 0  # temporary errors in a row without progress
        self._idle = 0  # restarts in a row that did not get beyond the best step
        self._best = 0

    def decide(self, fault: Action, bad: Mapping[str, str], hosts: Collection[str]) -> Verdict:
        """Returns what follows from a fault.

        bad: {host: why} of hosts that failed a self-check. hosts: all hosts that are present or can
        be started, spares included.
        """
        self._sick |= {*bad}
        if fault.kind == "stop":
            return Verdict(fault.code, fault.message)
        step = fault.step or 0
        self._same = self._same + 1 if self._step is not None and _near(step, self._step) else 1
        self._step = step
        goes_on, self._best = step > self._best, max(self._best, step)
        self._remember(fault, step, goes_on)
        if why := self._hopeless(hosts):
            return Verdict(POISON, why)
        excluded = dict(bad) | self._strike(fault, set(hosts) - set(bad))
        left = len(set(hosts) - set(excluded))
        if left < self.policy.min_hosts:
            return Verdict(
                ELSEWHERE, f"{left} good hosts are left of {self.policy.min_hosts}", 0.0, excluded
            )
        if self._deferred >= self.policy.poison:
            why = f"{self._deferred} attempts ended by a temporary error. Last: {fault.message}"
            return Verdict(ELSEWHERE, why, 0.0, excluded)
        if fault.rule != "driver" or not goes_on:  # the job cannot help it that its driver froze
            if self.restarts >= self.policy.restarts:
                why = f"all {self.restarts} restarts are used. Last: {fault.message}"
                return Verdict(ELSEWHERE, why, 0.0, excluded)
            self.restarts += 1
        self._idle = 0 if goes_on else self._idle + 1
        wait = min(self.policy.backoff * 2**self._idle, self.policy.longest)
        return Verdict(None, fault.message, wait, excluded, self._moves(fault), self._same < 2)

    def _remember(self, fault: Action, step: int, goes_on: bool) -> None:
        """Remembers errors of a step that may be poison, until the job has passed that step."""
        if fault.cause == "program" and self._errors and _alike(fault, self._errors[-1]):
            self._errors.append(fault)
        elif fault.cause == "program":
            self._errors = [fault]
        elif self._errors and step > (self._errors[-1].step or 0) + 1:
            self._errors = []
        self._deferred = self._deferred * (not goes_on) + 1 if fault.cause == "temporary" else 0

    def _moves(self, fault: Action) -> frozenset[str]:
        """Returns the host on which an error occurred again, if no other host had it."""
        if fault.cause not in OWN:
            return frozenset()
        former, self._blaming = self._blaming, fault
        again = former is not None and _alike(fault, former) and fault.hosts == former.hosts
        return frozenset(fault.hosts if again and len(fault.hosts) == 1 else ())

    def _hopeless(self, hosts: Collection[str]) -> str | None:
        """Returns why the data or the program must be at fault, None where it may be otherwise.

        One error in one step, of ranks that trained, on several hosts; or on the only one there is.
        """
        seen = {host for e in self._errors for host in e.hosts}
        if len(self._errors) < self.policy.poison or not (len(seen) > 1 or len(hosts) <= 1):
            return None
        last = self._errors[-1]
        return (
            f"step {last.step} failed {len(self._errors)} times with the same error, on "
            f"{', '.join(sorted(seen))}: its data, or the program. Last: {last.message}"
        )

    def acquitted(self, guard: Guard) -> list[str]:
        """Returns the hosts that a guard readmits now, without those that have failed a
        self-check."""
        return [host for host in guard.acquitted() if host not in self._sick]

    def forgive(self, host: str) -> None:
        """Forgets the faults that named a host."""
        self._strikes.pop(host, None)

    def _strike(self, fault: Action, good: set[str]) -> dict[str, str]:
        """Counts an error against a host if only its ranks had it; excludes the host if others are
        left. The same error in the same step counts once, because it may be the program's."""
        if fault.kind == "evict":
            return dict.fromkeys(fault.hosts, fault.message)
        if len(fault.hosts) != 1 or fault.cause not in OWN or fault.rule == "nan":
            return {}
        (host,) = fault.hosts
        strikes = self._strikes.setdefault(host, [])
        if any(_alike(fault, s) for s in strikes):
            return {}
        strikes.append(fault)
        others = len(good - {host})
        if len(strikes) < self.policy.strikes or others < max(self.policy.min_hosts, 1):
            return {}
        return {host: f"{len(strikes)} faults; the last: {fault.message}"}


def _near(a: int, b: int) -> bool:
    """The loop is one step ahead of the devices, so one fault is seen in either of two steps."""
    return abs(a - b) <= 1


def _alike(a: Action, b: Action) -> bool:
    """Tells whether two faults are the same error."""
    return (a.rule, a.error) == (b.rule, b.error) and _near(a.step or 0, b.step or 0)


# ---- how often a detector may take hosts out, and what is learnt from it
#
# An eviction costs a save and a restart, so a detector that errs would cost more than the slow
# host. So at most a few a day are allowed, one at a time: until it is known whether the last one
# was right, and for a day after one that was not, alerts only tell. An eviction was right when the
# steps were about as short as before afterwards; it was a false alarm when they were not, or when
# the host that came instead shows the same. What is known survives the driver, in evictions.json.


DAY_S = 86_400.0
OPEN_S = 3600.0  # (chosen) after which nobody will know any more whether an eviction was right
IMPROVED = 0.5  # (chosen) of what the steps had become longer, that an eviction must give back
Settled = Literal["open", "right", "false alarm", "unknown"]


@dataclass
class Eviction:
    """A host that was evicted.

    rule: of the alert. ranks: the ranks that the host had, which its successor has now. size: ranks
    of the job. usual_s, slow_s: seconds of a step before the host was slow, and while it was; 0:
    not known. why: the reason for the verdict.
    """

    time: float
    host: str
    rule: str
    ranks: list[int]
    size: int
    usual_s: float = 0.0
    slow_s: float = 0.0
    verdict: Settled = "open"
    why: str = ""


class Evictions:
    """All evictions of a job by its detectors."""

    def __init__(self, path: Path, per_day: int, clock: Callable[[], float] = time.time):
        """path: evictions.json, which an earlier driver may have written. per_day: most evictions a
        day; 0: none.

        Raises: UserError if the file holds something else.
        """
        self._path, self._per_day, self._clock = path, per_day, clock
        self.all: list[Eviction] = []
        if path.exists():
            try:
                rows = files.read_object(path, 2**24, "out")["evictions"]
                self.all = [Eviction(**row) for row in rows]
            except (KeyError, TypeError):
                raise UserError(
                    f"{path} was not written by a driver; remove it, and detectors may evict "
                    "again (--out)"
                ) from None

    @property
    def open(self) -> Eviction | None:
        """The last one, while it is not known whether it was right."""
        last = self.all[-1] if self.all else None
        if last is not None and last.verdict == "open" and self._clock() - last.time > OPEN_S:
            self._settle(last, "unknown", f"nothing was learnt within {OPEN_S:.0f} s")
        return last if last is not None and last.verdict == "open" else None

    def refusal(self) -> str | None:
        """Returns why no host may be taken out now, None: one may."""
        now = self._clock()
        today = [e for e in self.all if 0 <= now - e.time < DAY_S]
        if last := self.open:
            return f"it is not known yet whether {last.host} was evicted rightly"
        if wrong := [e for e in today if e.verdict == "false alarm"]:
            return f"the eviction of {wrong[-1].host} was a false alarm less than a day ago"
        if len(today) >= self._per_day:
            return f"{self._per_day} evictions a day are allowed (--minder.evictions_per_day)"
        return None

    def add(
        self, host: str, rule: str, ranks: Sequence[int], size: int, steps_s: tuple[float, float]
    ) -> None:
        """Records that a host is evicted.

        size: ranks of the job. steps_s: seconds of a step usually, and while the host was slow.
        """
        fresh = Eviction(self._clock(), host, rule, [*ranks], size, *steps_s)
        self.all.append(fresh)
        self._save()

    def blame(self, rule: str, ranks: Sequence[int]) -> Eviction | None:
        """Returns the eviction that is a false alarm because its rule now names the successor.

        rule, ranks: of a new alert.
        """
        last = self.open
        if last is None or last.rule != rule or not set(ranks) & set(last.ranks):
            return None
        return self._settle(last, "false alarm", "its successor shows the same")

    def judge(self, size: int, step_s: float) -> Eviction | None:
        """Returns the eviction that the steps of the next attempt settle, or None.

        size: ranks of the attempt. step_s: seconds of its steps.
        """
        last = self.open
        if last is None:
            return None
        if size != last.size or last.slow_s <= 1.02 * last.usual_s:
            return None  # nothing can be compared; the successor may still show it
        limit = last.slow_s - IMPROVED * (last.slow_s - last.usual_s)
        why = f"steps took {last.slow_s:.3g} s, usually {last.usual_s:.3g} s, now {step_s:.3g} s"
        return self._settle(last, "right" if step_s <= limit else "false alarm", why)

    def _settle(self, one: Eviction, verdict: Settled, why: str) -> Eviction:
        one.verdict, one.why = verdict, why
        self._save()
        return one

    def _save(self) -> None:
        """Replaces the file in one piece; a disk that does not take it costs no job."""
        rows: dict[str, Any] = {"evictions": [asdict(e) for e in self.all]}
        try:
            files.write_whole(self._path, json.dumps(rows, indent=1) + "\n")
        except OSError:
            return
