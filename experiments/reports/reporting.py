"""What all reports share: result files, Markdown tables and their source, figures, resumed runs.

A result file is what `megajax.monitor.results.write` wrote: facts (device, layer, date, commit) and
`rows`. A table of a document is Markdown, and the line under it says where its figures come from.
Figures have no frames, and the same data gives the same files.
"""

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError
from megajax.monitor import results

Row = dict[str, Any]
# Heading of a column -> member of a row, or a function of the row.
Columns = Mapping[str, str | Callable[[Row], Any]]
NOT_JUDGED = "{}: shows that it runs, no claim is judged"  # the last line of a small preset
LETTER = 0.075  # inches of a letter of the title, DejaVu Sans of 10 points: the mean of English


# ---- result files


def read(path: Path) -> dict[str, Any]:
    """Returns the facts and rows of a result file."""
    return json.loads(path.read_text())


def rows_of(result: Mapping[str, Any], **members: Any) -> list[Row]:
    """Returns the rows of a result that have all of these members."""
    return [row for row in result["rows"] if members.items() <= row.items()]


def written(
    rows: Iterable[Row], path: Path, about: Mapping[str, Any], into: list[Row]
) -> Iterator[Row]:
    """Yields each row after it was added to `into` and the result file was written with it, so that
    the rows of a run that is cut off count."""
    for row in rows:
        into.append(row)
        results.write(path, about, into)
        yield row


def resumed[T](path: Path, what: str, flag: str, parse: Callable[[dict[str, Any]], T]) -> T | None:
    """Returns parse(result) of a file that an earlier run wrote; None if the file does not exist.

    parse: raises ValueError, KeyError or TypeError for a result of another kind.
    Raises: UserError, which says `what` the file should hold and names the flag of its folder.
    """
    try:
        return parse(read(path))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds no {what}: {error!r}; remove it (--{flag})") from None


def wilson(hits: int, of: int) -> list[float]:
    """Returns the 95 % interval of a share (Wilson 1927); [0, 1] of nothing."""
    if not of:
        return [0.0, 1.0]
    z, p = 1.959964, hits / of
    middle = (p + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(p * (1 - p) / of + z * z / (4 * of * of))
    return [float(max(middle - half, 0)), float(min(middle + half, 1))]


def closing(preset: str, *, paper: str = "", ours: str = "", source: str = "") -> str:
    """Returns the last line of an experiment: the paper's number beside ours, or that none is
    judged.

    source: how our number was obtained. preset: what the command started from.
    """
    if not ours:
        return NOT_JUDGED.format(preset)
    return f"paper {paper}, ours {ours} ({source})"


# ---- tables


def markdown_table(heads: Sequence[str], lines: Iterable[Iterable[Any]]) -> str:
    """Returns a Markdown table."""
    rule = "|" + "---|" * len(heads)
    return "\n".join(
        [f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(map(str, c))} |" for c in lines)]
    )


def rows_table(rows: Iterable[Row], columns: Columns) -> str:
    """Returns a Markdown table with a line for each row; a missing value is '-'."""

    def cell(row: Row, column: str | Callable[[Row], Any]) -> str:
        value = row.get(column) if isinstance(column, str) else column(row)
        if value is None:
            return "-"
        return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")

    return markdown_table(list(columns), ([cell(row, c) for c in columns.values()] for row in rows))


def source(
    result: Mapping[str, Any],
    *details: str,
    layer: str | None = None,
    device: str | None = None,
) -> str:
    """Returns the line under a table of a result: how its figures were obtained, where and when.

    details: shown after the layer. layer, device: replace those of the result.
    """
    words = (layer or result.get("layer"), *details, device or result.get("device"))
    return f"*{', '.join(w for w in (*words, result.get('date'), result.get('commit')) if w)}*"


def table(path: Path, columns: Columns, **members: Any) -> str:
    """Returns a Markdown table of the rows of a result file that have these members, with its
    source."""
    result = read(path)
    return f"{rows_table(rows_of(result, **members), columns)}\n\n{source(result)}"


# ---- figures


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

    size: of all panels together, in inches. heights: proportions of the rows. sharex, sharey:
      whether all panels have the same axis.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(
        rows, columns, squeeze=False, height_ratios=heights, sharex=sharex, sharey=sharey
    )
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(grid.flat)


def save(figure: Any, path: Path, title: str = "") -> None:
    """Writes path.svg and path.png; the same figure gives the same file, byte for byte.

    title: stands above all panels, in as many lines as the figure's width asks for.
    """
    from matplotlib import rc_context

    if title:
        letters = int(figure.get_figwidth() / LETTER)
        lines = [part for line in title.splitlines() for part in textwrap.wrap(line, letters)]
        figure.suptitle("\n".join(lines), fontsize=10)
    with rc_context({"svg.hashsalt": path.with_suffix("").name}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    figure.savefig(path.with_suffix(".png"))
