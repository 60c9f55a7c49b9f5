"""Figures of a pruning study: what was lost at each sparsity, and what a speed-up costs."""

from collections.abc import Sequence
from pathlib import Path

from experiments.reports.figure import panels, save
from experiments.reports.pruning import CLAIM_AT, PAPER, WHAT, Row
from experiments.reports.pruning_study import METHODS

COLOURS = {
    "EW": "#000000", "VW": "#999999", "TEW": "#009E73", "TW-1": "#0072B2", "TW-1a": "#004466",
    "TW-8": "#56B4E9", "TW-32": "#CC79A7", "TW-64": "#E69F00", "TW1D-1": "#7A6FF0",
    "BW": "#D55E00", "BW-64": "#A63A00", "BW-128": "#6B2500",
}  # fmt: skip


def draw_quality(rows: Sequence[Row], claim: Sequence[Row], path: Path) -> None:
    """What each pattern loses at each sparsity, a panel for each model; SVG and PNG.

    Sparsities stand at equal distances, patterns side by side at each of them.
    """
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    shown = [name for name in METHODS if any(r["method"] == name for r in rows)]
    figure, places = panels(len(tasks), size=(5.2 * len(tasks), 4.2))
    for axes, task in zip(places, tasks, strict=True):
        goals = sorted({r["goal"] for r in rows if r["task"] == task} | {0.0})
        for i, name in enumerate(shown):
            mine = [r for r in rows if (r["task"], r["method"]) == (task, name)]
            if mine:
                aside = 0.6 * ((i + 0.5) / len(shown) - 0.5)
                at = [0.0, *(goals.index(r["goal"]) + aside for r in mine)]
                bars = [0.0, *(r["lost_std"] or 0.0 for r in mine)]
                axes.errorbar(
                    at, [0.0, *(r["lost"] for r in mine)], bars, color=COLOURS[name], label=name,
                    marker="o", markersize=3, capsize=1.5, linewidth=0.9,
                    linestyle="--" if name.startswith("BW") else ":" if name == "TW-1a" else "-",
                )  # fmt: skip
        seeds = [r["n"] for r in rows if r["task"] == task]
        count = f"{min(seeds)} to {max(seeds)}" if min(seeds) < max(seeds) else f"{seeds[0]}"
        axes.set_title(f"{WHAT[task]}: seeds {count}", fontsize=9, loc="left")
        axes.set_xticks(range(len(goals)), [f"{100 * g:g}" for g in goals])
        axes.set(xlabel="weights pruned (%)", ylabel="held-out loss above dense (nats)")
        axes.axhline(0, color="0.6", linewidth=0.8)
    figure.legend(*places[0].get_legend_handles_labels(), fontsize=8, frameon=False,
                  loc="outside right center")  # fmt: skip
    found = [
        f"{r['ratio']:.2f} of that with {r['blocks']}"
        for r in claim
        if (r["what"], r["tiles"], r["task"]) == ("lost", "TW-1", tasks[-1]) and r["ratio"]
    ]
    title = f"{WHAT[tasks[-1]]}, pruned by 75 %: with TW-1 it loses {', '.join(found)}"
    save(figure, path, title if found else "What each pattern loses")


def draw_price(rows: Sequence[Row], path: Path) -> None:
    """Estimated speed-up against loss, chunk by chunk, at each sparsity; the paper's dashed."""
    from matplotlib.lines import Line2D

    tasks = [t for t in WHAT if any(f"{t}_lost" in r for r in rows)]
    figure, places = panels(len(tasks), size=(5.2 * len(tasks), 4.2))
    marks = dict(zip(dict.fromkeys(r["goal"] for r in rows), "osD^vP" * 4, strict=False))
    for axes, task in zip(places, tasks, strict=True):
        for r in (r for r in rows if f"{task}_lost" in r):
            axes.errorbar(
                r[f"{task}_lost"], r["speedup_estimate"], xerr=r[f"{task}_lost_std"] or 0.0,
                marker=marks[r["goal"]], markersize=5, capsize=2, color=COLOURS[r["method"]],
                elinewidth=0.7, markerfacecolor=None if r["kernel"] else "white",
            )  # fmt: skip
        axes.axhline(PAPER, color="0.4", linestyle="--", linewidth=1)
        axes.locator_params(axis="x", nbins=5)
        axes.set_title(WHAT[task], fontsize=9, loc="left")
        axes.set(xlabel="held-out loss above dense (nats)", ylabel="estimated speed-up (times)")
        axes.set_ylim(1, 1.05 * max([PAPER, *(r["speedup_estimate"] for r in rows)]))

    def point(colour: str, mark: str, text: str, face: str | None = None) -> Line2D:
        return Line2D(
            [], [], color=colour, marker=mark, linestyle="", markerfacecolor=face, label=text
        )

    names = [n for n in METHODS if any(r["method"] == n for r in rows)]
    shown = [point(COLOURS[n], "o", n) for n in names]
    shown += [point("0.4", mark, f"{100 * goal:g} % pruned") for goal, mark in marks.items()]
    shown.append(point("0.4", "o", "no kernel takes\nthis chunk", "white"))
    shown.append(Line2D([], [], color="0.4", linestyle="--", label=f"paper, 75 %,\nV100: {PAPER}"))
    figure.legend(handles=shown, fontsize=8, frameon=False, loc="outside right center")
    save(figure, path, _price_title(rows, tasks))


def _price_title(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    at = {r["method"]: r for r in rows if r["goal"] == CLAIM_AT}
    if not tasks or not {"TW-1", "TW-64"} <= at.keys():
        return "What coarse chunks cost (speed-ups are estimates)"
    parts = (
        f"{at['TW-64'][f'{t}_lost'] - at['TW-1'][f'{t}_lost']:+.2f} nats ({t})"
        for t in tasks
        if all(f"{t}_lost" in at[m] for m in ("TW-1", "TW-64"))
    )
    gain = at["TW-64"]["speedup_estimate"]
    return (
        f"Chunks of 64 rows, estimated {gain:.2f} times dense at 75 %, cost {', '.join(parts)} "
        "over chunk 1"
    )
