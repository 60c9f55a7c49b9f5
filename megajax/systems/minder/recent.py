"""The last minutes of a job's metrics, as the daemon read them; for pictures and new models.

Legend: C metrics, N machines, T seconds.
"""

import collections
from collections.abc import Iterator, Sequence

import numpy as np

from megajax.monitor.samples import Grid


class Recent:
    """Grids of successive seconds, no older than `keep_s` seconds."""

    def __init__(self, keep_s: float):
        """keep_s: seconds before the newest one that are kept."""
        self._keep_s = keep_s
        self._grids: collections.deque[Grid] = collections.deque()

    def add(self, grid: Grid) -> None:
        """Adds the grid of the next seconds."""
        self._grids.append(grid)
        while self._grids[0].end < grid.end - self._keep_s:
            self._grids.popleft()

    def clear(self) -> None:
        """Drops all grids."""
        self._grids.clear()

    def __iter__(self) -> Iterator[Grid]:
        return iter(self._grids)

    def metric(self, name: str, start: int, end: int) -> Grid:
        """Returns one metric in [start, end), Unix seconds; NaN where nothing was read."""
        return merged(list(self._grids), [name], start, end)


def merged(
    grids: Sequence[Grid], metrics: Sequence[str], start: int | None = None, end: int | None = None
) -> Grid:
    """Returns successive grids of one second as one grid; NaN where nothing was read.

    Args: metrics: names that are kept, in this order. start, end: Unix seconds; None: those of the
      first and the last grid.
    """
    start = min((g.start for g in grids), default=0) if start is None else start
    end = max((g.end for g in grids), default=start) if end is None else end
    inside = [g for g in grids if g.start < end and g.end > start]
    machines = tuple(sorted({m for g in inside for m in g.machines}))
    place = {machine: n for n, machine in enumerate(machines)}
    shape = (len(metrics), len(machines), max(end - start, 0))
    values_CNT = np.full(shape, np.nan, np.float32)
    for grid in inside:
        rows = [place[m] for m in grid.machines]
        first, last = max(grid.start, start), min(grid.end, end)
        for c, name in enumerate(metrics):
            if name in grid.metrics:
                part = grid.values_CNT[grid.metrics.index(name), :, first - grid.start :]
                values_CNT[c, rows, first - start : last - start] = part[:, : last - first]
    return Grid(start, 1, values_CNT, machines, tuple(metrics))
