"""Markdown tables of where a train step's time goes, by scripts/step_budget.py."""

import json
from pathlib import Path

from megajax.monitor.results import table

NAMES = ("before", "now", "recommended")


def configurations(path: Path) -> str:
    """Step time, MFU and memory of each configuration."""
    columns = {
        "configuration": "configuration", "segments a row": "segments", "remat": "remat",
        "loss chunks": "loss_chunks", "step, ms (estimate)": "step_ms",
        "MFU, % (estimate)": "mfu_percent", "memory, GiB (estimate)": "bound_gib",
    }  # fmt: skip
    return table(path, columns)


def memory(path: Path) -> str:
    """What XLA says of the step's memory."""
    columns = {
        "configuration": "configuration", "loss chunks": "loss_chunks",
        "arguments, GiB": "arguments_gib", "temporary, GiB": "temporary_gib",
        "peak, GiB": "peak_gib", "terms of the cost model, GiB": "bound_gib",
    }  # fmt: skip
    return table(path, columns)


def causes(path: Path, segments: int) -> str:
    """Milliseconds of each configuration by cause, of rows of so many segments."""
    found = json.loads(path.read_text())
    by_name = {
        row["configuration"]: row["causes_ms"]
        for row in found["rows"]
        if row["segments"] == segments
    }
    names = list(dict.fromkeys(cause for name in NAMES for cause in by_name[name]))
    lines = ["| ms (estimate) | " + " | ".join(NAMES) + " |", "|---" * (len(NAMES) + 1) + "|"]
    for cause in names:
        cells = (f"{by_name[name].get(cause, 0.0):.1f}" for name in NAMES)
        lines.append(f"| {cause} | " + " | ".join(cells) + " |")
    totals = (f"{sum(by_name[name].values()):.1f}" for name in NAMES)
    lines.append("| all | " + " | ".join(totals) + " |")
    source = ", ".join(found[k] for k in ("layer", "device", "date", "commit") if found.get(k))
    return "\n".join([*lines, "", f"*{source}*"])
