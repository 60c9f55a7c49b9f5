"""What Minder says of a machine. No jax import."""

import re
from dataclasses import dataclass

# A number that stands alone: a count or a moment, not a part of a machine's name or address.
NUMBER = re.compile(r"(?<![\w.:/-])\d+(?:\.\d+)?(?![\w:/-]|\.\d)")


@dataclass(frozen=True)
class Alert:
    """One machine that differs from its peers for too long.

    metric: the one that says it first, in the detector's order of metrics. since: when it began,
    Unix seconds. score: how far it is, as a multiple of what makes an alert. kind: the nearest
    known type of fault, or 'vanished' where a series stopped and 'silent' where all of a machine
    did. deviations: {metric: score with its sign} of all metrics in which it differs, the largest
    first. at: Unix seconds at which it was found.
    """

    machine: str
    metric: str
    since: float
    score: float
    kind: str
    deviations: tuple[tuple[str, float], ...] = ()
    at: float = 0.0

    @property
    def message(self) -> str:
        """Returns a sentence for a log."""
        if self.kind == "silent":
            what = "none of its metrics has a sample"
        elif self.kind == "vanished":
            what = f"{self.metric} has no sample, while the others have"
        else:
            what = f"{self.metric} differs from the others' by {self.score:.1f} times the limit"
        return f"{self.machine}: {what}, for {self.at - self.since:.0f} s (nearest: {self.kind})"


def without_numbers(note: str) -> str:
    """Returns a note by which it is known again when only its counts and moments have changed."""
    return NUMBER.sub("#", note)
