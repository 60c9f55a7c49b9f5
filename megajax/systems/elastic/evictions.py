"""How often a detector may take hosts out, and what is learnt from it: a budget of false alarms.

An eviction costs a save and a restart, so a detector that errs would cost more than the slow host.
So at most a few a day are allowed, one at a time: until it is known whether the last one was right,
and for a day after one that was not, alerts only tell. An eviction was right when the steps were
about as short as before afterwards; it was a false alarm when they were not, or when the host that
came instead shows the same. What is known survives the driver, in evictions.json. No jax import.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megajax.core import files
from megajax.core.errors import UserError

DAY_S = 86_400.0
OPEN_S = 3600.0  # (chosen) after which nobody will know any more whether an eviction was right
IMPROVED = 0.5  # (chosen) of what the steps had become longer, that an eviction must give back
Verdict = Literal["open", "right", "false alarm", "unknown"]


@dataclass
class Eviction:
    """A host that was taken out. usual_s, slow_s: of a step before it was slow, and while it was;
    0: not known. ranks: that it had, and its successor has. why: of the verdict."""

    time: float
    host: str
    rule: str
    ranks: list[int]
    size: int
    usual_s: float = 0.0
    slow_s: float = 0.0
    verdict: Verdict = "open"
    why: str = ""


class Evictions:
    """All evictions of a job by its detectors."""

    def __init__(self, path: Path, per_day: int, clock: Callable[[], float] = time.time):
        """path: of evictions.json, of an earlier driver too. per_day: at most; 0: none.

        Raises: UserError for a file that is none.
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
        """A host is taken out. size: ranks of the job. steps_s: usual, and while it was slow."""
        fresh = Eviction(self._clock(), host, rule, [*ranks], size, *steps_s)
        self.all.append(fresh)
        self._save()

    def blame(self, rule: str, ranks: Sequence[int]) -> Eviction | None:
        """An alert of a rule names ranks: returns the eviction that it proves a false alarm."""
        last = self.open
        if last is None or last.rule != rule or not set(ranks) & set(last.ranks):
            return None
        return self._settle(last, "false alarm", "its successor shows the same")

    def judge(self, size: int, step_s: float) -> Eviction | None:
        """The next attempt's steps take so long: returns the eviction that is settled by it."""
        last = self.open
        if last is None:
            return None
        if size != last.size or last.slow_s <= 1.02 * last.usual_s:
            return None  # nothing can be compared; the successor may still show it
        limit = last.slow_s - IMPROVED * (last.slow_s - last.usual_s)
        why = f"steps took {last.slow_s:.3g} s, usually {last.usual_s:.3g} s, now {step_s:.3g} s"
        return self._settle(last, "right" if step_s <= limit else "false alarm", why)

    def _settle(self, one: Eviction, verdict: Verdict, why: str) -> Eviction:
        one.verdict, one.why = verdict, why
        self._save()
        return one

    def _save(self) -> None:
        """Replaces the file in one piece; a disk that does not take it costs no job."""
        rows: dict[str, Any] = {"evictions": [asdict(e) for e in self.all]}
        try:
            fresh = self._path.with_suffix(".new")
            fresh.write_text(json.dumps(rows, indent=1) + "\n")
            fresh.replace(self._path)
        except OSError:
            return
