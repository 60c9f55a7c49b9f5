"""An alert of Minder: one machine that differs from its peers; and the ledger of active alerts.

No jax import.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.core import files

COURSES = ("unsteady", "late")  # kinds of how a machine follows the job (tracker.py)
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


# ---- the active alerts of a job, in a file so that a restarted daemon does not report them again
#
# An alert is active while its machine differs from the others, and for `clear_s` seconds more. The
# file is replaced as a whole after each change.


MOST = 2**24  # (chosen) bytes of the file


@dataclass(frozen=True)
class Lasting:
    """An active alert.

    until: Unix seconds at which it ends if the machine does not differ again. last: Unix seconds at
    which the machine was last seen to differ.
    """

    alert: Alert
    until: float
    last: float


class Ledger:
    """The active alerts of one job, by machine, and their file."""

    def __init__(self, path: Path, clear_s: float):
        """Reads the file of an earlier process; `trouble` says what was wrong with it, or ''."""
        self._path, self._clear_s, self.trouble = path, clear_s, ""
        self.lasting: dict[str, Lasting] = {}
        self.lost = 0  # writes that failed since the last one that did not
        if not path.exists():
            return
        try:
            rows = files.parse_json(files.read_bytes(path, MOST))["alerts"]
            self.lasting = {one.alert.machine: one for one in map(_parse, rows)}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self.trouble = (
                f"{path} cannot be read ({error!s:.100}): alerts that last may be told once more"
            )

    def hear(
        self, alerts: Iterable[Alert], named: Mapping[str, float], judged: float
    ) -> tuple[list[Lasting], list[Lasting]]:
        """Updates the active alerts; returns (new alerts to report, alerts that have ended).

        Args: alerts: of Detector.update. named: Detector.named. judged: Unix seconds up to which
          the detector has judged.
        """
        new, before = [], dict(self.lasting)
        for alert in alerts:
            old = self.lasting.get(alert.machine)
            if old is None or old.until <= alert.at:
                self.lasting[alert.machine] = Lasting(alert, alert.at + self._clear_s, alert.at)
                new.append(self.lasting[alert.machine])
            else:
                self._prolong(alert.machine, alert.at + self._clear_s)
        for machine, until in named.items():
            self._prolong(machine, until)
        ended = [one for one in self.lasting.values() if one.until <= judged]
        for one in ended:
            del self.lasting[one.alert.machine]
        if self.lasting != before or self.lost:
            self.save()
        return new, ended

    def _prolong(self, machine: str, until: float) -> None:
        old = self.lasting.get(machine)
        if old is not None and until > old.until:
            last = until - self._clear_s
            self.lasting[machine] = dataclasses.replace(old, until=until, last=last)

    def save(self) -> None:
        """Writes the file; `lost` counts the writes that failed since the last good one."""
        rows = [dataclasses.asdict(one) for one in self.lasting.values()]
        part = self._path.with_name(f".{self._path.name}.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "w") as file:
                json.dump({"alerts": rows}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError:
            self.lost += 1
        else:
            self.lost = 0


def _parse(row: Mapping[str, Any]) -> Lasting:
    """Returns what `save` wrote. Raises: what a row of another form raises."""
    said = dict(row["alert"])
    pairs: Sequence = said.pop("deviations")
    alert = Alert(**said, deviations=tuple((str(m), float(s)) for m, s in pairs))
    if not isinstance(alert.machine, str):
        raise ValueError("a machine without a name")
    numbers = (alert.since, alert.score, alert.at, row["until"], row["last"])
    if not all(isinstance(x, int | float) for x in numbers):
        raise ValueError("a time that is no number")
    return Lasting(alert, float(row["until"]), float(row["last"]))
