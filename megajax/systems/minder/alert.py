"""An alert of Minder: one machine that differs from its peers. No jax import."""

import re
from dataclasses import dataclass

COURSES = ("unsteady", "late")  # kinds of how a machine follows the job (dynamics.py)
# A number that stands alone: a count or a moment, not a part of a machine's name or address.
NUMBER = re.compile(r"(?<![\w.:/-])\d+(?:\.\d+)?(?![\w:/-]|\.\d)")


@dataclass(frozen=True)
class Alert:
    """One machine that has differed from its peers for too long.

    metric: the first metric, in the detector's order of metrics, that is over its limit. since:
    when the difference began, Unix seconds. score: size of the difference; 1 is the limit. kind:
    the nearest known type of fault; 'vanished' if a series stopped, 'silent' if all series of the
    machine did; 'unsteady' if the metric varies more than the others', 'late' if the machine does
    the work of the job `lag_s` seconds after them. deviations: (metric, signed score in standard
    deviations) of all metrics in which the machine differs, the largest first. at: Unix seconds up
    to which the detector had read when it found this.
    """

    machine: str
    metric: str
    since: float
    score: float
    kind: str
    deviations: tuple[tuple[str, float], ...] = ()
    at: float = 0.0
    lag_s: float = 0.0

    @property
    def message(self) -> str:
        """Returns a sentence for a log."""
        if self.kind == "silent":
            what = "none of its metrics has a sample"
        elif self.kind == "vanished":
            what = f"{self.metric} has no sample, while the others have"
        elif self.kind == "unsteady":
            what = (
                f"{self.metric} varies more than the others', by {self.score:.1f} times the limit"
            )
        elif self.kind == "late":
            what = f"it is {self.lag_s:.1f} s behind the others in what the job does"
        else:
            what = f"{self.metric} differs from the others' by {self.score:.1f} times the limit"
        lasts = f"{self.machine}: {what}, for {self.at - self.since:.0f} s"
        return lasts if self.kind in COURSES else f"{lasts} (nearest: {self.kind})"


def without_numbers(note: str) -> str:
    """Returns the note with its numbers replaced by '#', so that repeated notes compare equal."""
    return NUMBER.sub("#", note)
