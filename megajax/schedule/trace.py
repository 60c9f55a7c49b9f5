"""Draws timelines, planned and measured alike: Perfetto JSON with arrows, and Gantt charts.

matplotlib is imported when a chart is drawn, not before.
"""

import itertools
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from megajax.schedule.ir import Span, Timeline

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = {
    "F": "#56B4E9",
    "B": "#E69F00",
    "W": "#009E73",
    "COMM": "#999999",
    "EF": "#F0E442",
    "EB": "#D55E00",
    "GEN": "#CC79A7",
}
NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradient",
    "COMM": "transfer",
    "EF": "encoder forward",
    "EB": "encoder backward",
    "GEN": "generation",
}
SPARE = ("#B2DF8A", "#CAB2D6", "#FDBF6F")  # of kinds without a colour above, in turn
MASKED = {"facecolor": "white", "edgecolor": "#bbbbbb", "hatch": "////"}
_POINTS = 72  # an inch
_ROW_INCHES = 0.27
_LABEL_POINTS = 7


def perfetto(timeline: Timeline) -> dict[str, Any]:
    """Returns Chrome trace events: a thread for each resource, arrows along deps between them."""
    spans = (*timeline.spans, *timeline.masked)
    threads = {name: i for i, name in enumerate(_rows(timeline))}
    events: list[dict[str, Any]] = []
    for name, i in threads.items():
        place = {"ph": "M", "pid": 0, "tid": i}
        events.append({**place, "name": "thread_name", "args": {"name": name}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": i}})
    for span in spans:
        task = span.task
        name = f"{task.kind} {task.microbatch}" if task.microbatch >= 0 else task.name
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": task.kind,
                "ts": float(span.start) * 1e6,
                "dur": float(span.end - span.start) * 1e6,
                "pid": 0,
                "tid": threads[task.resource],
                "args": {"task": task.name, "chunk": task.chunk, "microbatch": task.microbatch},
            }
        )
    by_name = {span.task.name: span for span in timeline.spans}
    hops = (
        (by_name[dep], span)
        for span in timeline.spans
        for dep in span.task.deps
        if dep in by_name and by_name[dep].task.resource != span.task.resource
    )
    for i, (source, target) in enumerate(hops):
        # An arrow is tied to the slices that begin at its two times.
        arrow = {"name": "needs", "cat": "needs", "id": i, "pid": 0}
        for phase, span in (("s", source), ("f", target)):
            place = {"tid": threads[span.task.resource], "ts": float(span.start) * 1e6}
            events.append({**arrow, **place, "ph": phase, **({"bp": "e"} if phase == "f" else {})})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_perfetto(timeline: Timeline, path: str | PathLike[str]) -> None:
    """Writes `perfetto` as JSON."""
    Path(path).write_text(json.dumps(perfetto(timeline)))


def gantt(timelines: Mapping[str, Timeline], path: str | PathLike[str], unit: str = "s") -> None:
    """Draws timelines under each other on one time axis; keys are their titles.

    Colour is the kind, shade the chunk (the first is the lightest), the number the micro-batch;
    masked work is hatched.
    Args: path: its suffix says PNG or SVG. unit: the unit of the times.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = {title: _rows(timeline) for title, timeline in timelines.items()}
    kinds = {span.task.kind for timeline in timelines.values() for span in timeline.spans}
    others = zip(sorted(kinds - COLOURS.keys()), itertools.cycle(SPARE), strict=False)
    colours = {kind: c for kind, c in COLOURS.items() if kind in kinds} | dict(others)
    heights = [len(r) * _ROW_INCHES + 0.45 for r in rows.values()]
    figure = Figure(figsize=(11, sum(heights) + 0.7), dpi=110, layout="constrained")
    panels = figure.subplots(len(rows), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    span_s = max(float(t.makespan) for t in timelines.values())
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _draw(axes, timeline, rows[title], colours, points_per_s=9.5 * _POINTS / span_s)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlim(0, span_s)
    panels[-1].set_xlabel(f"time ({unit})")
    marks = [Patch(color=colour, label=NAMES.get(k, k)) for k, colour in colours.items()]
    if any(timeline.masked for timeline in timelines.values()):
        marks.append(Patch(**MASKED, label="masked"))
    figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), fontsize=8)
    figure.savefig(path)


def _draw(
    axes: Any,
    timeline: Timeline,
    rows: list[str],
    colours: Mapping[str, str],
    points_per_s: float,
) -> None:
    chunks = 1 + max((span.task.chunk for span in timeline.spans), default=0)
    bars: dict[tuple[int, Any], list[tuple[float, float]]] = {}
    for span in timeline.masked:
        bars.setdefault((rows.index(span.task.resource), "white"), []).append(_bar(span, timeline))
    for span in timeline.spans:
        task, row, bar = span.task, rows.index(span.task.resource), _bar(span, timeline)
        colour = shade(colours[task.kind], task.chunk, chunks)
        bars.setdefault((row, colour), []).append(bar)
        text = str(task.microbatch)
        if task.microbatch >= 0 and bar[1] * points_per_s > 0.62 * _LABEL_POINTS * len(text) + 1:
            middle = bar[0] + bar[1] / 2
            axes.text(middle, row, text, ha="center", va="center", fontsize=_LABEL_POINTS)
    for (row, colour), at in bars.items():
        style = MASKED if colour == "white" else {"facecolor": colour, "edgecolor": "white"}
        axes.broken_barh(at, (row - 0.45, 0.9), linewidth=0.5, **style)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _bar(span: Span, timeline: Timeline) -> tuple[float, float]:
    return float(span.start - timeline.start), float(span.end - span.start)


def shade(colour: str, chunk: int, chunks: int) -> tuple[float, ...]:
    """Mixes the first chunks with white, so that black numbers stay legible on all."""
    white = 0.0 if chunks == 1 else 0.65 * (1 - max(chunk, 0) / (chunks - 1))
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return tuple(white + (1 - white) * c for c in channels)


def _rows(timeline: Timeline) -> list[str]:
    """Returns the resources that count, then the others in the order of their names."""
    named = {span.task.resource for span in (*timeline.spans, *timeline.masked)}
    return [*timeline.resources, *sorted(named - set(timeline.resources))]
