"""What a supervised run left behind, read again for a report: events, training rows, spans.

Files may be damaged or of another version: lines and sections that are not as expected are left
out. No jax import.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megajax.core import files
from megajax.core.errors import UserError
from megajax.monitor import ettr, timeline
from megajax.monitor.sinks import read_jsonl

MAX_SPANS = 2**30  # (chosen) bytes of a spans.json: 16,384 ranks
LARGEST = 1e12  # (chosen) seconds; what is beyond is no time


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < LARGEST  # False for NaN


def _has_times(row: Mapping[str, Any], needed: str, optional: str) -> bool:
    return _is_time(row.get(needed)) and _is_time(row.get(optional, 0.0))


def figures(out: Path, run_dir: Path) -> dict[str, float]:
    """Returns where the time of a run went, as ettr.measured. out: of its driver.

    Raises: UserError when no driver wrote there.
    """
    events = [
        e
        for e in read_jsonl(out / "events.jsonl")
        if isinstance(e.get("event"), str) and _has_times(e, "time", "clock")
    ]
    if len(events) < 2:
        raise UserError(f"{out} has no supervised run (--out)")
    rows = (
        r
        for r in read_jsonl(run_dir / "metrics.jsonl")
        if isinstance(r.get("step"), int) and _has_times(r, "step_time_s", "time_compile_s")
    )
    return ettr.measured(events, rows)


def shares(out: Path) -> tuple[Path, dict[int, float], dict[str, int]] | None:
    """Returns (the newest spans.json, what each rank does more than the usual one, the grid).

    None: no attempt left any. Raises: UserError when the file cannot be read or holds no spans.
    """
    newest = max(out.glob("attempt*/spans.json"), key=os.path.getmtime, default=None)
    if newest is None:
        return None
    saved = files.read_object(newest, MAX_SPANS, "out")
    told, grid = saved.get("spans"), saved.get("grid")
    spans = timeline.spans_of(told if isinstance(told, dict) else {})
    if not spans:
        raise UserError(f"{newest} holds no sections of ranks (--out)")
    axes = timeline.parse_grid(grid if isinstance(grid, str) else None, len(spans))
    shares, more = timeline.own_share(spans), saved.get("shares")
    for rank, x in (more if isinstance(more, dict) else {}).items():  # as the rule `slow` saw it
        if rank.isdecimal() and int(rank) in shares and _is_time(x):
            shares[int(rank)] = max(shares[int(rank)], x)
    return newest, shares, axes
