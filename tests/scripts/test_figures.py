"""Figures of the committed results: everything is inside its axes, and no text lies on another."""

import itertools
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from megajax.core.errors import UserError

ROOT = Path(__file__).parents[2]
FIGURES = runpy.run_path(str(ROOT / "scripts" / "figures.py"))["FIGURES"]


def points(axes):
    """Every point that is drawn in coordinates of the data, error bars and bars too."""
    for line in axes.lines:
        if line.get_transform().contains_branch(axes.transData):
            x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
            if line.get_transform() == axes.transData:
                yield from zip(x, y, strict=True)
    for bars in axes.collections:
        for path in bars.get_paths():
            yield from path.vertices
    for bar in axes.patches:
        yield bar.get_x() + bar.get_width(), bar.get_y() + bar.get_height()


def texts(figure):
    """(what, bounding box) of each text and legend that shows."""
    yield "suptitle", figure._suptitle
    yield from (("legend", legend) for legend in figure.legends)
    for axes in figure.axes:
        if axes.get_legend():
            yield "legend", axes.get_legend()
        yield from ((t.get_text(), t) for t in (*axes.texts, axes.title, axes._left_title))
        for axis in (axes.xaxis, axes.yaxis):
            yield axis.label.get_text(), axis.label
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if low <= tick.get_loc() <= high and tick.label1.get_visible():
                    yield tick.label1.get_text(), tick.label1


def faults(figure):
    """Returns what a reader could not read."""
    figure.draw_without_rendering()
    messages = []
    for axes in figure.axes:
        (x0, x1), (y0, y1) = sorted(axes.get_xlim()), sorted(axes.get_ylim())
        outside = [p for p in points(axes) if not (x0 <= p[0] <= x1 and y0 <= p[1] <= y1)]
        messages += [f"outside the axes: {p}" for p in outside]
        for legend in (axes.get_legend(), *figure.legends):
            if legend is not None:
                box = legend.get_window_extent()
                at = axes.transData.transform(list(points(axes)))
                messages += [f"under the legend: {p}" for p in at if box.contains(*p)]
    shown = [(what, a.get_window_extent()) for what, a in texts(figure) if a and what]
    for (a, one), (b, other) in itertools.combinations(shown, 2):
        if one.overlaps(other):
            messages.append(f"{a!r} lies on {b!r}")
    for what, box in shown:
        if not (-1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1):
            messages.append(f"{what!r} leaves the figure")
    return messages


@pytest.mark.parametrize("name", FIGURES)
def test_figures_of_committed_results_can_be_read(name, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append((path, self)))
    result = json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())
    FIGURES[name](result, tmp_path / name)
    svgs = [figure for path, figure in drawn if path.suffix == ".svg"]
    assert svgs and len(drawn) == 2 * len(svgs)
    for figure in svgs:
        assert faults(figure) == []


def test_the_check_sees_what_it_is_for():
    figure = Figure(figsize=(3, 2))
    axes = figure.subplots()
    axes.plot([0, 0.2, 1, 2], [0.0, 0.4, 5.0, 1.0], label="a")
    axes.set_ylim(0, 4)
    axes.annotate("75 %", (1, 1))
    axes.annotate("90 %", (1.02, 1.02))
    axes.legend(loc="lower left")
    messages = faults(figure)
    assert any("outside the axes: (np.float64(1.0), np.float64(5.0))" in f for f in messages)
    assert "'75 %' lies on '90 %'" in messages
    assert any("under the legend" in f for f in messages)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "flux_simulated.json is not JSON"),
        ('{"rows": []}', "flux_simulated.json is no result that can be drawn: KeyError"),
        ('{"rows": [1], "machine": {"name": "x"}}', "is no result that can be drawn: TypeError"),
    ],
)
def test_damaged_results_are_named(tmp_path, content, words):
    main = runpy.run_path(str(ROOT / "scripts" / "figures.py"))["main"]
    (tmp_path / "flux_simulated.json").write_text(content)
    with pytest.raises(UserError, match=words):
        main(str(tmp_path))


@pytest.mark.parametrize("script", ["publish", "accept", "figures"])
def test_scripts_that_read_a_run_refuse_what_is_none(tmp_path, script):
    main = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))["main"]
    words = ["name"] * (script == "publish")
    with pytest.raises(UserError, match="cannot read|is not a finished run|holds none of"):
        main(str(tmp_path), *words)
    with pytest.raises(UserError, match="home directory"):
        main("~nobody-of-this-name/x", *words)
    (tmp_path / "summary.json").write_text('{"rows": []}')
    if script == "publish":
        with pytest.raises(UserError, match="is not a finished run: it has no training rows"):
            main(str(tmp_path), "name")
