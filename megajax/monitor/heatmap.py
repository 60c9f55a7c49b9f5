"""One value for each rank over the grid of a job: a picture, a page, and who is silent.

MegaScale section 6.1: a heat map of the time that each machine computes shows the few that are
slow; section 6.3: when a job hangs, the ranks that wait have logged the operation that they wait
in, and the one that did not is where to look. Rows of the picture are pipe stages, columns the data
replicas, with the tensor ranks beside each other.

matplotlib is imported when a picture is drawn, not before. No jax import.
"""

import dataclasses
import html
import statistics
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

SLOW = 1.1  # (MegaScale section 6.1: the slow machines took 10 % longer)


@dataclasses.dataclass(frozen=True)
class Grid:
    """How ranks lie: rank = (pipe index x data + data index) x tensor + tensor index."""

    pipe: int
    data: int
    tensor: int

    def place(self, rank: int) -> tuple[int, int, int]:
        """Returns (pipe, data, tensor) indices."""
        rest, tensor = divmod(rank, self.tensor)
        return (*divmod(rest, self.data), tensor)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.pipe * self.data * self.tensor


@dataclasses.dataclass(frozen=True)
class Progress:
    """The last sign of a rank: how many operations it has begun, and which the last one is."""

    count: int
    operation: str


def slow(values: Mapping[int, float], factor: float = SLOW) -> dict[int, float]:
    """Returns {rank: value over the median} of those at or above `factor`, the slowest first."""
    middle = statistics.median(values.values())
    ratios = {rank: value / middle for rank, value in values.items() if middle > 0}
    found = {rank: ratio for rank, ratio in ratios.items() if ratio >= factor}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def silent(progress: Mapping[int, Progress], ranks: int) -> list[int]:
    """Returns the ranks that hold up the others: without any sign, else those furthest behind.

    Empty when all have begun the same operation: then nobody waits for anybody.
    """
    missing = [rank for rank in range(ranks) if rank not in progress]
    if missing:
        return missing
    counts = {rank: progress[rank].count for rank in range(ranks)}
    behind = min(counts.values())
    if behind == max(counts.values()):
        return []
    return [rank for rank, count in counts.items() if count == behind]


def describe(progress: Mapping[int, Progress], grid: Grid) -> str:
    """Returns one line for each group of ranks that are at the same operation, the silent first."""
    guilty = silent(progress, grid.ranks)
    groups: dict[tuple[int, str], list[int]] = {}
    for rank in range(grid.ranks):
        sign = progress.get(rank)
        key = (-1, "no sign at all") if sign is None else (sign.count, sign.operation)
        groups.setdefault(key, []).append(rank)
    lines = []
    for (count, operation), members in sorted(groups.items()):
        mark = "SILENT" if members[0] in guilty else "waits in"
        places = " ".join(f"{rank}{grid.place(rank)}" for rank in members[:8])
        more = f" and {len(members) - 8} more" if len(members) > 8 else ""
        about = operation if count < 0 else f"{operation} (operation {count})"
        lines.append(f"{mark} {about}: rank(pipe, data, tensor) {places}{more}")
    return "\n".join(lines)


def draw(values: Mapping[int, float], grid: Grid, path: str | PathLike[str], what: str) -> None:
    """Draws the values over the grid; the title names the slowest rank.

    what: the value with its unit, 'forward + backward (ms)'. path: its suffix says PNG or SVG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_size(grid), dpi=110, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(_rows(values, grid), cmap="viridis", aspect="auto")
    figure.colorbar(image, label=what)
    for rank in slow(values):
        pipe, data, tensor = grid.place(rank)
        axes.text(data * grid.tensor + tensor, pipe, str(rank), ha="center", va="center",
                  color="black", fontsize=8)  # fmt: skip
    axes.set_xticks(
        [(i + 0.5) * grid.tensor - 0.5 for i in range(grid.data)],
        [str(i) for i in range(grid.data)],
    )
    axes.set_yticks(range(grid.pipe))
    for i in range(1, grid.data):
        axes.axvline(i * grid.tensor - 0.5, color="white", linewidth=1)
    axes.set_xlabel(f"data replica ({grid.tensor} tensor ranks each)")
    axes.set_ylabel("pipe stage")
    axes.set_title(_claim(values, grid), loc="left", fontsize=10)
    figure.savefig(path)


def write_html(
    values: Mapping[int, float], grid: Grid, path: str | PathLike[str], what: str
) -> None:
    """Writes a page of its own with the same map; each cell says its rank, place and value."""
    known = [v for v in values.values()]
    low, high = min(known), max(known)
    rows = []
    for pipe in range(grid.pipe):
        cells = []
        for column in range(grid.data * grid.tensor):
            rank = pipe * grid.data * grid.tensor + column
            value = values.get(rank)
            share = 0.0 if value is None or high == low else (value - low) / (high - low)
            colour = "#ddd" if value is None else f"hsl({240 - 240 * share:.0f} 70% 60%)"
            shown = "no value" if value is None else f"{value:.4g}"
            place = "pipe {}, data {}, tensor {}".format(*grid.place(rank))
            cells.append(
                f'<td style="background:{colour}" title="rank {rank} ({place}): {shown}"></td>'
            )
        rows.append(f"<tr><th>{pipe}</th>{''.join(cells)}</tr>")
    Path(path).write_text(
        "<!doctype html><meta charset=utf-8><title>Heat map</title>"
        "<style>body{font:14px sans-serif}td{width:14px;height:22px}th{padding:0 6px}</style>"
        f"<h1>{html.escape(_claim(values, grid))}</h1><p>{html.escape(what)}, "
        f"{low:.4g} (blue) to {high:.4g} (red); rows: pipe stages, columns: data replicas of "
        f"{grid.tensor} tensor ranks. Point at a cell for its rank.</p>"
        f"<table>{''.join(rows)}</table>\n"
    )


def _claim(values: Mapping[int, float], grid: Grid) -> str:
    found = slow(values)
    if not found:
        return f"No rank of {len(values)} is {SLOW - 1:.0%} slower than the median"
    rank, ratio = next(iter(found.items()))
    others = f"; slow too: {len(found) - 1}" if len(found) > 1 else ""
    return f"Rank {rank} {grid.place(rank)} takes {ratio - 1:.0%} longer than the median{others}"


def _rows(values: Mapping[int, float], grid: Grid) -> list[list[float]]:
    wide = grid.data * grid.tensor
    return [[values.get(p * wide + c, float("nan")) for c in range(wide)] for p in range(grid.pipe)]


def _size(grid: Grid) -> tuple[float, float]:
    wide = grid.data * grid.tensor
    return min(max(5.0, 0.3 * wide + 2), 16.0), min(max(2.2, 0.35 * grid.pipe + 1.4), 12.0)
