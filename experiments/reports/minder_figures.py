"""Figures of the evaluation of experiments/minder.py."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.reports.figure import panels, save

Rows = Sequence[Mapping[str, Any]]
OURS = "ours"
PAPER_F1 = 0.893
COLOURS = {
    OURS: "#0072B2", "minder-paper": "#000000", "minder-tuned": "#555555", "raw": "#E69F00",
    "con": "#56B4E9", "int": "#009E73", "no-continuity": "#D55E00", "mahalanobis": "#CC79A7",
    "median": "#8C564B", "forest": "#17A015", "nvrx-relative": "#F0C000",
    "nvrx-individual": "#B8A000", "greyhound": "#9467BD",
}  # fmt: skip
LEVELS = ("low", "middle", "high")


def draw(rows: Rows, path: Path) -> None:
    """F1 by size, recall by kind, precision and recall by noise, delays. Writes SVG and PNG."""
    whole = {r["detector"]: r for r in rows if r["part"] == "overall"}
    if OURS not in whole:
        return
    order = sorted(whole, key=lambda n: (n != OURS, -whole[n]["f1"]))
    figure, axes = panels(2, 2, size=(14, 8.6))
    _sizes(axes[0], rows, order)
    _kinds(axes[1], rows, order[:2])
    _noise(axes[2], rows, order[:4])
    _delays(axes[3], rows, order[:4])
    best = whole[order[1]] if len(order) > 1 else None
    title = f"ours: F1 {whole[OURS]['f1']:.3f} on {whole[OURS]['cases']} simulated cases"
    title += f"; the best rival ({order[1]}): {best['f1']:.3f}" if best else ""
    save(figure, path, title)


def _sizes(axes: Any, rows: Rows, order: Sequence[str]) -> None:
    for name in order:
        mine = [r for r in rows if r["part"] == "size" and r["detector"] == name]
        x = range(len(mine))
        axes.plot(
            x, [r["f1"] for r in mine], color=COLOURS[name], label=name, marker="o", markersize=3,
            linewidth=2.2 if name == OURS else 1.0,
        )  # fmt: skip
        if name == OURS:
            low, high = zip(*(r["f1_95"] for r in mine), strict=True)
            axes.fill_between(x, low, high, color=COLOURS[name], alpha=0.15, linewidth=0)
    axes.axhline(PAPER_F1, color="0.3", linestyle="--", linewidth=0.9)
    axes.text(0.01, PAPER_F1 + 0.01, "paper", fontsize=7, color="0.3",
              transform=axes.get_yaxis_transform())  # fmt: skip
    sizes = sorted({r["size"] for r in rows if r["part"] == "size"})
    axes.set_xticks(range(len(sizes)), [f"{s:,}" for s in sizes])
    axes.set(xlabel="machines of the job", ylabel="F1", ylim=(0, 1.02))
    axes.set_title("F1 by size of the job; shaded: 95 % interval", fontsize=9, loc="left")
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _kinds(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    mine = {n: {r["kind"]: r for r in rows if r["part"] == "kind" and r["detector"] == n}
            for n in names}  # fmt: skip
    kinds = sorted(mine[OURS], key=lambda k: (k[0] == "(", mine[OURS][k]["recall"]))
    for place, kind in enumerate(kinds):
        for shift, name in zip((0.2, -0.2), names, strict=False):
            row = mine[name][kind]
            low, high = row["recall_95"]
            axes.barh(place + shift, row["recall"], 0.36, color=COLOURS[name],
                      label=name if not place else None)  # fmt: skip
            axes.plot([low, high], [place + shift] * 2, color="black", linewidth=0.8)
    axes.set_yticks(
        range(len(kinds)), [f"{k.replace('_', ' ')} ({mine[OURS][k]['faults']})" for k in kinds],
        fontsize=7.5,
    )  # fmt: skip
    axes.set(xlabel="share of the faults that were named", xlim=(0, 1))
    axes.set_title("recall by kind of fault; lines: 95 % intervals", fontsize=9, loc="left")
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _noise(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    for k, name in enumerate(names):
        mine = {r["noise"]: r for r in rows if r["part"] == "noise" and r["detector"] == name}
        x = np.array([i for i, level in enumerate(LEVELS) if level in mine]) + 0.07 * k
        found = [mine[level] for level in LEVELS if level in mine]
        for what, mark in (("precision", "^"), ("recall", "o")):
            middle = np.array([r[what] for r in found])
            low, high = np.array([r[f"{what}_95"] for r in found]).T
            axes.errorbar(
                x, middle, np.maximum([middle - low, high - middle], 0), marker=mark,
                color=COLOURS[name], markersize=4, linewidth=1.0, elinewidth=0.6,
                linestyle="--" if what == "precision" else "-", label=f"{name}, {what}",
            )  # fmt: skip
    axes.set_xticks(range(len(LEVELS)), LEVELS)
    axes.set(xlabel="noise", ylabel="precision, recall", ylim=(0, 1.02))
    axes.set_title("precision and recall by noise", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="lower left")


def _delays(axes: Any, rows: Rows, names: Sequence[str]) -> None:
    for name in names:
        (row,) = [r for r in rows if r["part"] == "delays" and r["detector"] == name]
        seconds = np.sort(row["seconds"]) / 60
        share = np.arange(1, len(seconds) + 1) / max(row["faults"], 1)
        last = share[-1] if len(share) else 0
        width = 2.0 if name == OURS else 1.0
        axes.step([0, *seconds, 25], [0, *share, last], where="post", color=COLOURS[name],
                  label=name, linewidth=width)  # fmt: skip
    axes.axvline(4, color="0.3", linestyle="--", linewidth=0.9)
    axes.text(4.1, 0.02, "continuity of the paper", fontsize=7, color="0.3")
    axes.set(xlabel="minutes from the onset to the alert", xlim=(0, 25), ylim=(0, 1.02),
             ylabel="share of all faults")  # fmt: skip
    axes.set_title("delay to the alert", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False, loc="lower right")
