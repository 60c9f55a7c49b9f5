"""Pictures of alerts: the metrics of all machines around an alert, and a map of all scores.

matplotlib is imported only when something is drawn. Legend: N machines, T seconds.
"""

import collections
import datetime
import html
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from megajax.monitor.samples import Grid
from megajax.systems.minder.alert import Alert
from megajax.systems.minder.recent import Recent

BEFORE_S = 300  # (chosen) seconds that a picture shows before an alert's onset
MOST_LINES = 64  # machines that are drawn one by one; more become bands of quantiles
PANELS = 3  # metrics of a picture
ROWS = 64  # machines of a map of scores: those with the highest
COLUMNS = 180  # moments of a map
REDDEST = 2.0  # (chosen) the score that has the strongest colour


def draw_alert(alert: Alert, recent: Recent, end: float, path: Path) -> None:
    """Draws the metrics in which a machine differs, for this machine and all others.

    The first panel shows the metric that the alert names.
    Args: recent: the metrics of the last minutes. end: Unix seconds at which the picture ends.
      path: .png or .svg.
    """
    from matplotlib.figure import Figure

    metrics = list(dict.fromkeys([alert.metric, *(m for m, _ in alert.deviations)]))[:PANELS]
    figure = Figure(figsize=(9, 1 + 2.2 * len(metrics)), dpi=110, layout="constrained")
    panels = figure.subplots(len(metrics), squeeze=False, sharex=True)[:, 0]
    start = int(alert.since) - BEFORE_S
    for axes, metric in zip(panels, metrics, strict=True):
        _panel(axes, recent.metric(metric, start, int(end)), alert)
    panels[-1].set_xlabel("seconds from the onset")
    panels[0].legend(loc="upper left", fontsize=7)
    began = datetime.datetime.fromtimestamp(alert.since).isoformat(" ", "seconds")
    figure.suptitle(f"{alert.message}\nsince {began}", fontsize=9)
    _save(figure, path)


def _panel(axes: Any, grid: Grid, alert: Alert) -> None:
    values_NT = grid.values_CNT[0]
    at_T = np.arange(values_NT.shape[1]) + grid.start - alert.since
    others = [n for n, name in enumerate(grid.machines) if name != alert.machine]
    if len(others) > MOST_LINES:
        few, half, many = _quantiles(values_NT[others])
        axes.fill_between(at_T, few, many, color="0.85", label="99 % of the others")
        axes.plot(at_T, half, color="0.5", linewidth=0.8, label="their median")
    else:
        for k, n in enumerate(others):
            label = "others" if k == 0 else None
            axes.plot(at_T, values_NT[n], color="0.7", linewidth=0.6, label=label)
    if alert.machine in grid.machines:
        own_T = values_NT[grid.machines.index(alert.machine)]
        axes.plot(at_T, own_T, color="tab:red", linewidth=1.2, label=alert.machine)
    axes.axvline(0, color="k", linestyle="--", linewidth=0.8, label="onset")
    axes.axvline(alert.at - alert.since, color="k", linestyle=":", linewidth=0.8, label="found")
    axes.set_ylabel(grid.metrics[0], fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _quantiles(values_NT: np.ndarray) -> np.ndarray:
    """Returns the quantiles of 0.5 %, 50 % and 99.5 %, NaN in seconds without a sample."""
    found = np.full((3, values_NT.shape[1]), np.nan)
    there_T = np.isfinite(values_NT).any(0)
    found[:, there_T] = np.nanquantile(values_NT[:, there_T], (0.005, 0.5, 0.995), axis=0)
    return found


class Heat:
    """The scores of all machines over time, as a picture or a page."""

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._moments: collections.deque[tuple[float, Mapping[str, float]]] = collections.deque(
            maxlen=COLUMNS
        )

    def add(self, at: float, scores: Mapping[str, float]) -> None:
        """Takes the scores of a moment, Unix seconds."""
        self._moments.append((at, dict(scores)))

    def write(self, path: Path, named: Collection[str]) -> None:
        """Writes the map. path: ends in .html, .png or .svg. named: machines with an alert."""
        highest: dict[str, float] = {}
        for _, scores in self._moments:
            for machine, score in scores.items():
                highest[machine] = max(score, highest.get(machine, 0.0))
        order = sorted(highest, key=lambda m: (m not in named, -highest[m], m))[:ROWS]
        if path.suffix == ".html":
            part = path.with_name(f"{path.name}.part")
            part.write_text(self._page(order, named))
            part.replace(path)
        elif order:
            self._draw(order, named, path)

    def _title(self, named: Collection[str]) -> str:
        verb = "differs" if len(named) == 1 else "differ"
        who = f"{', '.join(sorted(named)[:3])} {verb}" if named else "no machine differs"
        last = self._moments[-1][0] if self._moments else 0.0
        return f"Minder: {who} ({datetime.datetime.fromtimestamp(last):%Y-%m-%d %H:%M:%S})"

    def _page(self, order: Collection[str], named: Collection[str]) -> str:
        title = html.escape(self._title(named))
        lines = [
            "<!doctype html><meta charset=utf-8><meta http-equiv=refresh content=30>"
            f"<title>{title}</title><h3>{title}</h3><p>score of each machine, 1 (and above) is an "
            "alert; time goes to the right</p>"
            "<table cellspacing=0 style='font:12px sans-serif'>"
        ]
        for machine in order:
            name = html.escape(machine)
            mark = f"<b>{name}</b>" if machine in named else name
            cells = (
                f'<td style="background:{_colour(scores.get(machine))}" title="{name} '
                f'{datetime.datetime.fromtimestamp(at):%H:%M:%S}: {scores.get(machine, 0):.2f}">'
                "&nbsp;</td>"
                for at, scores in self._moments
            )
            lines.append(f"<tr><th align=left>{mark}</th>{''.join(cells)}</tr>")
        return "\n".join([*lines, "</table>\n"])

    def _draw(self, order: Collection[str], named: Collection[str], path: Path) -> None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 1.5 + 0.18 * len(order)), dpi=110, layout="constrained")
        axes = figure.subplots()
        table = [[scores.get(m, np.nan) for _, scores in self._moments] for m in order]
        image = axes.imshow(
            table, cmap="Reds", vmin=0, vmax=REDDEST, aspect="auto", interpolation="nearest"
        )
        labels = [f"{m} *" if m in named else m for m in order]
        axes.set_yticks(range(len(labels)), labels, fontsize=6)
        ticks = range(0, len(self._moments), max(1, len(self._moments) // 6))
        words = [f"{datetime.datetime.fromtimestamp(self._moments[t][0]):%H:%M:%S}" for t in ticks]
        axes.set_xticks(ticks, words, fontsize=7)
        axes.set_title(self._title(named), loc="left", fontsize=9)
        figure.colorbar(image, label="score; 1 is an alert")
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Writes a picture in one piece: somebody may look at it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        figure.savefig(part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _colour(score: float | None) -> str:
    if score is None:
        return "#dddddd"  # the machine was not there
    pale = round(255 * (1 - min(max(score / REDDEST, 0.0), 1.0)))
    return f"#ff{pale:02x}{pale:02x}"
