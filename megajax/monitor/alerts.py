"""What detectors find and what is done about it: Alert, Action, and the table between the two.

No jax import.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megajax.core.errors import UserError, did_you_mean

Kind = Literal["restart", "stop", "done", "evict", "warn"]
# What a fault is evidence of. program: an error of a rank itself while all ranks trained. start:
# the same before all of them did. stall: a rank that got nowhere while it trained. temporary: a
# full disk, or another error that says that a later start may work. other: what was done to a rank,
# to an agent or to the driver; it speaks against nobody.
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


@dataclass(frozen=True)
class Alert:
    """What a detector found. rule: names the kind of finding. code: how the job ends by it.

    cause: what it is evidence of. error: what the ranks said, without numbers, to be compared.
    """

    rule: str
    message: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    step: int | None = None
    code: int = 0
    cause: Cause = "other"
    error: str = ""


@dataclass(frozen=True)
class Action:
    """What to do, and why.

    kind restart: end this attempt and go on; stop: end the job, because trying again is no use;
    done: the job ended well, with `code`; evict: save, and go on without the hosts; warn: record.
    cause, error: as of the alert.
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
    """Returns what is to be done: at most one action that ends the attempt, and it comes first.

    alerts: by the order of the detectors, of which the first decides. responses: by rule.
    """
    actions = [Action(responses.get(a.rule, "warn"), **vars(a)) for a in alerts]
    ends = [a for a in actions if a.ends_the_attempt]
    return ends[:1] + [a for a in actions if not a.ends_the_attempt]


def parse(text: str, more: Collection[str] = ()) -> dict[str, Kind]:
    """Returns the responses of a flag: 'rule=warn|evict|restart', joined by commas.

    more: rules beside those of RESPONSES. Raises: UserError for what is no rule or no response.
    """
    found: dict[str, Kind] = {}
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
        found[rule] = CHOICES[kind]
    return found
