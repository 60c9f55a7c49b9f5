"""Effective training time ratio: what part of the time went into steps that count.

By ByteCheckpoint's formula, from the interval between saves, and by measurement, from what a
supervised run left behind. No jax import.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def formula(interval: int, step_s: float, save_s: float, load_s: float) -> float:
    """Returns N T / (N T + T_wasted), T_wasted = (N T + T_save) / 2 + T_load.

    The ratio of an interval in which one fault falls, at a random moment. interval: N, the steps
    between saves. step_s: T. save_s: until a save is stored. load_s: from fault to next step.
    """
    useful = interval * step_s
    return useful / (useful + (useful + save_s) / 2 + load_s)


def elapsed(events: Sequence[Mapping[str, Any]]) -> float:
    """Returns the seconds of all drivers that wrote these events, each by its even clock.

    A clock that is set during the run changes "time", and not "clock"; older files lack the latter.
    """
    if "clock" not in events[-1]:
        return events[-1]["time"] - events[0]["time"]
    clocks = [e.get("clock", 0.0) for e in events]
    ends = [a for a, b in zip(clocks, clocks[1:], strict=False) if b < a]  # another driver began
    return sum(ends) + clocks[-1]


def measured(events: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> dict:
    """Returns where the time of a supervised run went, in seconds, and the ratio.

    events: of events.jsonl. rows: of metrics.jsonl, with those of steps that were done again.
    training_s: steps that count; redone_s: steps that a fault undid; down_s: all the rest: start,
    compilation, saves, evaluation, hanging, checks.
    """
    events = list(events)
    total = elapsed(events)
    last: dict[int, float] = {}
    redone = 0.0
    for row in rows:
        if "step_time_s" in row:
            redone += last.get(row["step"], 0.0)
            last[row["step"]] = max(row["step_time_s"] - row.get("time_compile_s", 0.0), 0.0)
    training = sum(last.values())
    return {
        "total_s": total,
        "training_s": training,
        "redone_s": redone,
        "down_s": total - training - redone,
        "faults": sum(e["event"] == "fault" for e in events),
        "ettr": training / total if total > 0 else 0.0,
    }
