"""What detectors find and what is done about it: Alert, Action, and the table between the two.

Every detector makes alerts of this one class: the rules of a supervised run (detectors.py,
slow_rank.py) name ranks and hosts; Minder (systems/minder) names a machine by its metrics. A
Watchdog turns alerts into actions with `respond`; the daemon of Minder reports them
(systems/minder/reporter.py). No jax import.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megajax.core.errors import UserError, did_you_mean

Kind = Literal["restart", "stop", "done", "evict", "warn"]
# What a fault is evidence of. program: an error of a rank itself while all ranks trained. start: an
# error of a rank before all ranks trained. stall: a rank that made no progress while it trained.
# temporary: a full disk, or another error after which a later start may work. other: something that
# was done to a rank, to an agent or to the driver, so that neither a host nor the program is at
# fault.
Cause = Literal["program", "start", "stall", "temporary", "other"]

# What is done about an alert, by its rule. A rule that is not listed here warns.
RESPONSES: Mapping[str, Kind] = {
    "end": "done",
    "superseded": "stop",
    "driver": "restart",
    "usage": "stop",
    "agent": "restart",
    "exit": "restart",
    "lost": "restart",
    "lease": "restart",
    "silence": "restart",
    "nan": "restart",
    "stopped": "restart",
    "stall": "restart",
    "flood": "restart",
    "log": "warn",
    "straggler": "warn",
    "disk": "warn",
    "traffic": "warn",
}
CHOICES: Mapping[str, Kind] = {k: k for k in ("warn", "evict", "restart")}  # of a user


MACHINE = "minder"  # the rule of machines whose metrics differ from those of the others
COURSE = "course"  # the same, of machines that follow the job in another way
COURSES = ("unsteady", "late")  # kinds of such a way (minder/tracker.py)
# Members that say by what metrics a machine differs, in the order in which files have them.
MEASURED = ("machine", "metric", "since", "score", "kind", "deviations", "at", "lag_s")


@dataclass(frozen=True)
class Alert:
    """What a detector found.

    rule: names the kind of finding, and chooses the response. message: a sentence for a log. ranks,
    hosts: those that are to blame. step: the job's step at that time. code: the exit code with
    which the job ends by it. cause: what it is evidence of. error: what the ranks printed, without
    numbers, so that errors can be compared.

    The other members describe one machine that has differed from its peers for too long
    (`of_machine`). metric: the first metric, in the detector's order of metrics, that is over its
    limit. since: when the difference began, Unix seconds. score: size of the difference; 1 is the
    limit. kind: the nearest known type of fault; 'vanished' if a series stopped, 'silent' if all
    series of the machine did; 'unsteady' if the metric varies more than the others', 'late' if the
    machine does the work of the job `lag_s` seconds after them. deviations: (metric, signed score
    in standard deviations) of all metrics in which the machine differs, the largest first. at: Unix
    seconds up to which the detector had read when it found this.
    """

    rule: str
    message: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    step: int | None = None
    code: int = 0
    cause: Cause = "other"
    error: str = ""
    machine: str = ""
    metric: str = ""
    since: float = 0.0
    score: float = 0.0
    kind: str = ""
    deviations: tuple[tuple[str, float], ...] = ()
    at: float = 0.0
    lag_s: float = 0.0

    @classmethod
    def of_machine(
        cls,
        machine: str,
        metric: str,
        since: float,
        score: float,
        kind: str,
        deviations: Sequence[Sequence[Any]] = (),
        at: float = 0.0,
        lag_s: float = 0.0,
    ) -> "Alert":
        """Returns an alert about a machine whose metrics differ, with the sentence for a log."""
        if kind == "silent":
            what = "none of its metrics has a sample"
        elif kind == "vanished":
            what = f"{metric} has no sample, while the others have"
        elif kind == "unsteady":
            what = f"{metric} varies more than the others', by {score:.1f} times the limit"
        elif kind == "late":
            what = f"it is {lag_s:.1f} s behind the others in what the job does"
        else:
            what = f"{metric} differs from the others' by {score:.1f} times the limit"
        message = f"{machine}: {what}, for {at - since:.0f} s"
        is_course = kind in COURSES
        return cls(
            COURSE if is_course else MACHINE,
            message if is_course else f"{message} (nearest: {kind})",
            hosts=(machine,),
            machine=machine,
            metric=metric,
            since=since,
            score=score,
            kind=kind,
            deviations=tuple((name, distance) for name, distance in deviations),
            at=at,
            lag_s=lag_s,
        )

    @property
    def measured(self) -> dict[str, Any]:
        """The arguments of `of_machine`, as values that JSON can hold."""
        return {name: getattr(self, name) for name in MEASURED}


@dataclass(frozen=True)
class Action:
    """What to do, and why.

    kind restart: end this attempt and go on; stop: end the job, because trying again is no use;
    done: the job ended well, with `code`; evict: save, and go on without the hosts; warn: record.
    rule, message, ranks, hosts, step, code, cause, error: those of the alert.
    """

    kind: Kind
    rule: str
    message: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    step: int | None = None
    code: int = 0
    cause: Cause = "other"
    error: str = ""

    @property
    def ends_the_attempt(self) -> bool:
        """Whether nothing of the attempt is left to be saved or watched."""
        return self.kind in ("restart", "stop", "done")


def respond(alerts: Sequence[Alert], responses: Mapping[str, Kind] = RESPONSES) -> list[Action]:
    """Returns the actions: at most one that ends the attempt, which comes first.

    alerts: in the order of the detectors; the first that ends the attempt decides. responses: what
    to do, by rule; a rule that is missing warns.
    """
    actions = [
        Action(
            responses.get(a.rule, "warn"),
            a.rule,
            a.message,
            a.ranks,
            a.hosts,
            a.step,
            a.code,
            a.cause,
            a.error,
        )
        for a in alerts
    ]
    ends = [a for a in actions if a.ends_the_attempt]
    return ends[:1] + [a for a in actions if not a.ends_the_attempt]


def parse(text: str, more: Collection[str] = ()) -> dict[str, Kind]:
    """Returns the responses of a flag: 'rule=warn|evict|restart', joined by commas.

    more: rules beside those of RESPONSES. Raises: UserError for what is no rule or no response.
    """
    responses: dict[str, Kind] = {}
    rules = [r for r, kind in RESPONSES.items() if kind == "warn"]  # those are said once
    rules += [r for r in more if r not in RESPONSES]
    for word in [w.strip() for w in text.split(",") if w.strip()]:
        rule, _, kind = word.partition("=")
        if rule not in rules:
            raise UserError(
                f"respond={word}: {rule!r} must be a rule whose response can be chosen, of "
                f"{', '.join(rules)}.{did_you_mean(rule, rules)} (--respond)"
            )
        if kind not in CHOICES:
            raise UserError(
                f"respond={word}: {kind!r} must be one of {', '.join(CHOICES)}."
                f"{did_you_mean(kind, CHOICES)} (--respond)"
            )
        responses[rule] = CHOICES[kind]
    return responses
