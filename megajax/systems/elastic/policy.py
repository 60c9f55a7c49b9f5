"""What to do after a fault: whom to exclude, how long to wait, when to give up. Pure.

Exit codes, for SLURM, JobSet and Ray to act on (scripts/launch_*):
0 done | 2 the command cannot work, do not retry | 70 the same step failed again and again, do not
retry | 75 too few good hosts or restarts are left: start again elsewhere, without the blocklist |
76 another driver's run has taken over the checkpoints: it goes on there, do not retry |
143, 130 told to stop and saved (the processes themselves then end with 0, and say so in their
progress records).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from megajax.monitor.alerts import Action, Kind

USAGE, POISON, ELSEWHERE = 2, 70, 75


@dataclasses.dataclass(frozen=True)
class Policy:
    """restarts: of the whole job. min_hosts: fewer than wanted are good enough from here on.

    poison: failures in one step that end the job. strikes: faults that name a host, before it is
    excluded though its self-checks pass. backoff: seconds before the first restart; each one that
    made no progress doubles them, up to longest. responses: what is done about alerts, by their
    rule, where it differs from alerts.RESPONSES.
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
    """code: to end with, None: restart after `wait` seconds without the `excluded` hosts."""

    code: int | None
    why: str
    wait: float = 0.0
    excluded: Mapping[str, str] = dataclasses.field(default_factory=dict)


def ended(action: Action, told: bool, leaving: Action | None) -> Action:
    """Returns what the end of an attempt means: a fault of a job that was told to stop ends it.

    told: whether it was. leaving: what takes a host out as soon as the job has saved.
    """
    if leaving is not None and not told:
        saved = action.kind == "done" and action.code
        return leaving if saved or action.kind == "restart" else action
    if action.kind == "done" or not told:
        return action
    return dataclasses.replace(action, kind="stop", code=ELSEWHERE)  # its last step may be stored


class Guard(Protocol):
    """Who has a word before a host is taken out because of an alert."""

    def refuses(self, action: Action) -> str | None:
        """Returns why not, None: it may be."""
        ...

    def evicts(self, action: Action) -> None:
        """It will be."""
        ...

    def acquitted(self) -> list[str]:
        """Returns hosts that were taken out wrongly, each once, as soon as that is known."""
        ...


def to_evict(
    found: Sequence[Action],
    hosts: Collection[str],
    least: int,
    guard: Guard | None,
    tell: Callable[[str, str], object],
) -> Action | None:
    """Returns what takes a host out, where it may.

    hosts: that there are, spares included. least: that must be left. guard: is told of the one.
    tell: of a journal, is told why others may not.
    """
    for action in [a for a in found if a.kind == "evict" and a.hosts]:
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
    """Remembers the faults of a job."""

    def __init__(self, policy: Policy):
        """Nothing has happened yet."""
        self.policy = policy
        self.restarts = 0
        self._strikes: Counter[str] = Counter()
        self._sick: set[str] = set()  # hosts that have failed a self-check
        self._step: int | None = None
        self._same = 0
        self._idle = 0  # restarts in a row that did not get beyond the best step
        self._best = 0

    @property
    def trusts_memory(self) -> bool:
        """Whether to go on from copies in memory: not when a step failed twice, maybe of them."""
        return self._same < 2

    def decide(self, fault: Action, bad: Mapping[str, str], hosts: Collection[str]) -> Verdict:
        """Returns what follows from a fault.

        bad: {host: why} of failed self-checks. hosts: that there are, spares included.
        """
        self._sick |= {*bad}
        if fault.kind == "stop":
            return Verdict(fault.code, fault.message)
        step = fault.step or 0
        # The loop is one step ahead of the devices, so one fault is seen in either of two steps.
        again = self._step is not None and abs(step - self._step) <= 1
        self._same = self._same + 1 if again else 1
        self._step = step
        if self._same >= self.policy.poison:
            return Verdict(
                POISON,
                f"step {step} failed {self._same} times: its data, or the program. Last: "
                f"{fault.message}",
            )
        excluded = dict(bad) | self._strike(fault, set(hosts) - set(bad))
        left = len(set(hosts) - set(excluded))
        if left < self.policy.min_hosts:
            return Verdict(
                ELSEWHERE, f"{left} good hosts are left of {self.policy.min_hosts}", 0.0, excluded
            )
        if self.restarts >= self.policy.restarts:
            return Verdict(ELSEWHERE, f"all {self.restarts} restarts are used", 0.0, excluded)
        self.restarts += 1
        self._idle = 0 if step > self._best else self._idle + 1
        self._best = max(self._best, step)
        wait = min(self.policy.backoff * 2**self._idle, self.policy.longest)
        return Verdict(None, fault.message, wait, excluded)

    def acquitted(self, guard: Guard | None) -> list[str]:
        """Returns the hosts that a guard lets come back now, but for those that have failed a
        self-check."""
        found = guard.acquitted() if guard is not None else []
        return [host for host in found if host not in self._sick]

    def forgive(self, host: str) -> None:
        """Forgets the faults that named a host."""
        self._strikes.pop(host, None)

    def _strike(self, fault: Action, good: set[str]) -> dict[str, str]:
        """Counts against a host that alone is named; excludes it while there are others."""
        if fault.kind == "evict":
            return dict.fromkeys(fault.hosts, fault.message)
        if len(fault.hosts) != 1 or fault.rule == "nan":
            return {}
        (host,) = fault.hosts
        self._strikes[host] += 1
        others = len(good - {host})
        if self._strikes[host] < self.policy.strikes or others < max(self.policy.min_hosts, 1):
            return {}
        return {host: f"{self._strikes[host]} faults; the last: {fault.message}"}
