"""What runs of experiments/optimus.py on drawings reached: docs/vision.md."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.reports.reporting import markdown_table, read, source
from megajax.monitor import results
from megajax.monitor.records import rows_by_step

MEASURES = ("eval_exact", "eval_exact_blank", "eval_most_frequent", "eval_loss", "eval_images")
KINDS = ("word", "number", "count", "bars")


def write(runs: Iterable[tuple[Path, float]], out: Path, loop_s: float) -> None:
    """Writes the last evaluations of runs as one result.

    runs: (folder of a run, CPU seconds of its process, user and system, imports included). loop_s:
    CPU seconds of ten million additions in a Python loop on the same machine.
    """
    rows, about = [], {}
    for folder, cpu_s in runs:
        cfg = json.loads((folder / "config.json").read_text())
        summary = json.loads((folder / "summary.json").read_text())
        names = "device", "layer", "date", "commit", "mesh", "parameters"
        about = {name: summary[name] for name in names}
        evaluations = rows_by_step(folder / "metrics.jsonl", "eval_exact")
        last = max(evaluations)
        row: dict[str, Any] = {"seed": cfg["train"]["seed"], "blank": cfg["data"]["blank"]}
        row |= {"steps": last, "schedule": cfg["optim"]["schedule"], "cpu_s": round(cpu_s, 1)}
        row["commit"] = summary["commit"]
        row |= {name: evaluations[last][name] for name in MEASURES}
        row |= {name: evaluations[last][f"eval_exact/{name}"] for name in KINDS}
        earlier = {step: evaluations[step]["eval_exact"] for step in sorted(evaluations)}
        rows.append(row | {"eval_exact_by_step": earlier})
    results.write(out, about | {"loop_s": loop_s}, rows)


def table(path: Path) -> str:
    """Exact match by seed, and of the control that is trained without images."""
    result = read(path)
    heads = ("seed", "trained", "steps, schedule", "exact match", *KINDS, "without images")
    heads += ("most frequent answers", "CPU-s")
    lines = []
    for row in result["rows"]:
        shown = [row[name] for name in ("eval_exact", *KINDS, *MEASURES[1:3])]
        trained = "without images" if row["blank"] else "with images"
        percent = [f"{100 * share:.1f} %" for share in shown]
        steps = f"{row['steps']}, {row['schedule']}"
        lines.append((row["seed"], trained, steps, *percent, f"{row['cpu_s']:.0f}"))
    images = result["rows"][0]["eval_images"]
    about = (
        f"{result['parameters'] / 1e6:.2f} M parameters, {images} held-out drawings. CPU-s are "
        "user and system time of the process, imports, compiling and evaluations included; ten "
        f"million additions in a Python loop took {result['loop_s']:.1f} CPU-s on the same machine."
    )
    return f"{markdown_table(heads, lines)}\n\n{about}\n\n{source(result)}"
