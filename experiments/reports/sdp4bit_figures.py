"""Figure of experiments/sdp4bit.py: held-out losses as they fall, and what each variant costs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reports.figure import panels, save
from experiments.reports.sdp4bit_runs import FLOAT32, VARIANTS, WHAT, Row

COLOURS = {
    FLOAT32: "#000000", "qW": "#D55E00", "qWD": "#56B4E9", "TLq": "#E69F00", "TLq-HS": "#009E73",
    "SDP4Bit": "#0072B2", "ZeRO++": "#CC79A7", "LoCo": "#F0E442", "fp8": "#999999",
}  # fmt: skip
MARKS = {"125M": "v", "350M": "s", "1.3B": "D"}
LINEAR = 0.1  # percent: below it the axis of gaps is linear, so that signs and zeros show


def draw(rows: Sequence[Row], path: Path) -> None:
    """Losses against steps, means over the seeds; gaps with two standard errors and the paper's.

    rows: of the parts 'run' and 'gap'. Writes SVG and PNG.
    """
    figure, (left, right) = panels(2, size=(12.5, 4.2))
    gaps = {r["variant"]: r for r in rows if r["part"] == "gap"}
    shown = [v for v in VARIANTS if v in gaps]
    for variant in shown:
        mine = [r for r in rows if r["part"] == "run" and r["variant"] == variant]
        mean = np.mean([r["losses"] for r in mine], axis=0)
        left.plot(
            mine[0]["steps"], mean, color=COLOURS[variant], label=f"{variant}: {WHAT[variant]}",
            linewidth=1.1, linestyle="--" if variant == FLOAT32 else "-",
        )  # fmt: skip
    left.set(xlabel="steps", ylabel="held-out loss (nats a byte)")
    left.set_title("trained here", fontsize=9, loc="left")
    _draw_gaps(right, [gaps[v] for v in shown if v != FLOAT32])
    handles, labels = left.get_legend_handles_labels()
    marks, models = right.get_legend_handles_labels()
    figure.legend(
        [*handles, *marks], [*labels, *models], fontsize=8, frameon=False,
        loc="outside right center",
    )  # fmt: skip
    save(figure, path, _title(gaps))


def _draw_gaps(axes: Any, gaps: Sequence[Row]) -> None:
    for place, row in enumerate(gaps):
        error = row["gap_error"]
        axes.bar(
            place, row["gap_percent"], yerr=None if error is None else 2 * error, width=0.6,
            color=COLOURS[row["variant"]], capsize=3, error_kw={"elinewidth": 0.9},
        )  # fmt: skip
        for model, percent in row["paper_percent"].items():
            axes.plot(
                place + 0.38, percent, MARKS[model], color="0.35", markersize=4, markerfacecolor="w"
            )
    for model, mark in MARKS.items():
        axes.plot([], [], mark, color="0.35", markersize=4, markerfacecolor="w",
                  label=f"paper, {model}")  # fmt: skip
    axes.set_yscale("symlog", linthresh=LINEAR)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xlim(-0.7, max(len(gaps), 4) - 0.3)
    axes.set_xticks(range(len(gaps)), [r["variant"] for r in gaps], fontsize=7)
    axes.set(ylabel="held-out loss above the float32 exchange (%)")
    count = max((r["n"] for r in gaps), default=0)
    bars = "" if count < 2 else ", bars: two standard errors"
    axes.set_title(f"seeds: {count}{bars}", fontsize=9, loc="left")


def _title(gaps: dict[str, Row]) -> str:
    texts = []
    for variant, text in (("SDP4Bit", "with SDP4Bit"), ("qW", "with weights cut to 4 bits (qW)")):
        if variant in gaps:
            texts.append(f"{gaps[variant]['gap_percent']:+.2f} % {text}")
    return f"Held-out loss beside a float32 exchange: {', '.join(texts)}"
