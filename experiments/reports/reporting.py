"""What all reports share: figures without frames, reproducible files, the source under a table."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LETTER = 0.075  # inches of a letter of the title, DejaVu Sans of 10 points: the mean of English


def panels(
    columns: int = 1,
    rows: int = 1,
    *,
    size: tuple[float, float],
    heights: Sequence[float] | None = None,
    sharex: bool = False,
    sharey: bool = False,
) -> tuple[Any, list[Any]]:
    """Returns (a figure, its axes row by row).

    size: in inches, of all panels. heights: of the rows, in proportion. sharex, sharey: whether
      panels have one axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(
        rows, columns, squeeze=False, height_ratios=heights, sharex=sharex, sharey=sharey
    )
    found = list(grid.flat)
    for axes in found:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, found


def save(figure: Any, path: Path, title: str = "") -> None:
    """Writes path.svg and path.png; the same figure gives the same file, byte for byte.

    title: above all panels, in as many lines as the figure's width asks for.
    """
    from matplotlib import rc_context

    if title:
        letters = int(figure.get_figwidth() / LETTER)
        lines = [part for line in title.splitlines() for part in textwrap.wrap(line, letters)]
        figure.suptitle("\n".join(lines), fontsize=10)
    with rc_context({"svg.hashsalt": path.with_suffix("").name}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"))


def source(
    found: Mapping[str, Any], *details: str, layer: str | None = None, device: str | None = None
) -> str:
    """Returns the line under a table of a result file: how it was obtained, where and when.

    details: shown after the layer. layer, device: replace the file's.
    """
    words = (layer or found.get("layer"), *details, device or found.get("device"))
    return f"*{', '.join(w for w in (*words, found.get('date'), found.get('commit')) if w)}*"
