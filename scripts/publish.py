"""Turns a finished run into a result that documents may quote.

    uv run scripts/publish.py RUN_DIR NAME

Writes experiments/results/NAME.json (facts, figures, every tenth training row, the evaluations, the
sample) and NAME.svg (the loss curve). Then `uv run scripts/tables.py` puts it into the documents.
"""

import megajax.core.interrupted  # noqa: F401

import sys
from pathlib import Path

from megajax.core import config, files
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.monitor import results
from megajax.monitor.records import rows_by_step
from megajax.training.report import caption, draw_curve

RESULTS = Path(__file__).parent.parent / "experiments" / "results"
MAX_SUMMARY = 2**24  # (chosen) bytes of a summary.json


def main(folder: str, name: str) -> None:
    """Reads the run's own files only."""
    run = expand(folder)
    summary = files.read_object(run / "summary.json", MAX_SUMMARY)
    train = rows_by_step(run / "metrics.jsonl", "loss")
    held_out = rows_by_step(run / "metrics.jsonl", "eval_loss")
    if not train or not summary.get("rows"):
        raise UserError(f"{run} is not a finished run: it has no training rows, or no figures")
    figures = summary.pop("rows")[0]
    samples = sorted((run / "samples").glob("*.txt"))
    about = summary | figures | {"sample": samples[-1].read_text() if samples else None}
    about["wall_s"] = max(r["time"] for r in train.values()) - min(
        r["time"] - r["step_time_s"] for r in train.values()
    )
    shown = [train[s] for s in sorted(train) if s == 1 or s % 10 == 0]
    rows = [{k: v for k, v in r.items() if k != "time"} for r in (*shown, *held_out.values())]
    results.write(RESULTS / f"{name}.json", about, rows)
    draw_curve(RESULTS / f"{name}.svg", train, held_out, caption(summary))
    print(f"{RESULTS / name}.json and .svg")


if __name__ == "__main__":
    sys.exit(config.run(main, positional=2))
