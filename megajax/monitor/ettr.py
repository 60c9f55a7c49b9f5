"""Effective training time ratio: the share of a run's wall time that its final state is made of.

`by_formula` is ByteCheckpoint's (arXiv 2407.20143, section 6, as second-hand notes give it): one
failure in each checkpoint interval. `measure` counts the same from the rows that a run left in
metrics.jsonl, which every restart appends to. No jax import.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from typing import Any


def by_formula(steps: int, step_s: float, save_s: float, load_s: float) -> float:
    """Returns N t / (N t + wasted), wasted = (N t + save) / 2 + load.

    steps: N, from one checkpoint to the next. step_s: t. save_s: from the call until the checkpoint
    counts. load_s: from the failure to the first new step.
    """
    useful = steps * step_s
    return useful / (useful + (useful + save_s) / 2 + load_s)


@dataclasses.dataclass(frozen=True)
class Effective:
    """Where the seconds of a run went; the parts add up to total_s.

    productive_s: steps that the final state is made of. repeated_s: steps that were lost and done
    again. startup_s: until the first step, its compilation included. recovery_s: from the last step
    before a restart to the first one after it, less that step. paused_s: saves that stall,
    evaluations, and anything else between two steps.
    """

    total_s: float
    productive_s: float
    repeated_s: float
    startup_s: float
    recovery_s: float
    paused_s: float

    @property
    def ratio(self) -> float:
        """ETTR, from 0 to 1."""
        return self.productive_s / self.total_s if self.total_s else 0.0


def measure(rows: Iterable[Mapping[str, Any]], began: float, ended: float) -> Effective:
    """Counts the rows of metrics.jsonl that have `step_time_s`, in the order of the file.

    began, ended: of the whole run, seconds since the epoch. A step that follows a restart takes as
    long as the median step; what it took longer is compilation, which belongs to the start.
    """
    found = [row for row in rows if row.get("step_time_s") is not None]
    if not found:
        return Effective(ended - began, 0.0, 0.0, ended - began, 0.0, 0.0)
    usual = statistics.median(row["step_time_s"] for row in found)
    last = {row["step"]: i for i, row in enumerate(found)}  # the execution that counts
    sums = dict.fromkeys(("productive", "repeated", "startup", "recovery", "paused"), 0.0)
    before, before_step = began, 0
    for i, row in enumerate(found):
        first = i == 0
        restarted = not first and row["step"] <= before_step
        took = min(row["step_time_s"], usual) if first or restarted else row["step_time_s"]
        took = min(took, max(row["time"] - before, 0.0))
        sums["productive" if last[row["step"]] == i else "repeated"] += took
        rest = max(row["time"] - before - took, 0.0)
        sums["startup" if first else "recovery" if restarted else "paused"] += rest
        before, before_step = row["time"], row["step"]
    sums["paused"] += max(ended - before, 0.0)
    return Effective(ended - began, **{f"{name}_s": value for name, value in sums.items()})
