"""Seconds of metrics that a detector waits for or looks back on.

Pending: seconds that wait until their tick is complete; windows may be cut anywhere. Recent: the
last minutes, for pictures and new models.

Legend: C metrics, N machines, T seconds.
"""

import collections
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.samples import Grid, Samples, hold, to_grid
from megajax.monitor.sources.files import read
from megajax.systems.minder.settings import TICK

Window = str | Path | Samples | Grid
FAR = 3 * 86400  # (chosen) seconds from the middle of a window at which a time must be wrong


def grid_of(window: Window) -> Grid:
    """Returns a window as a grid of one second; missing samples stay missing.

    Raises: UserError for a file that cannot be read, or an object that is no window.
    """
    if isinstance(window, Grid):
        if window.step_s != 1:
            raise UserError(f"a grid of {window.step_s} s must be of 1 s for a detector")
        return window
    if isinstance(window, str | Path):
        window = read(window)
    if not isinstance(window, Samples):
        raise UserError(
            f"a window of type {type(window).__name__} must be a path of a CSV or parquet file, "
            "Samples, or a Grid"
        )
    return to_grid(_near(window), 1, dict.fromkeys(window.metrics, 1.0))


def held(values_CNT: np.ndarray, period_C: np.ndarray) -> np.ndarray:
    """Returns values_CNT with each sample repeated for its metric's period (seconds), no longer."""
    if (period_C <= 1).all():
        return values_CNT
    pairs = zip(values_CNT, period_C, strict=True)
    return np.stack([hold(values_NT, period) for values_NT, period in pairs])


def _near(samples: Samples) -> Samples:
    """Drops rows whose time is days away from all others, which would make the grid huge."""
    if samples.start is not None and samples.end is not None or not len(samples):
        return samples
    finite_N = np.isfinite(samples.time_N)
    if not finite_N.any():
        raise UserError("no row of the window has a time that is a number")
    near_N = finite_N & (np.abs(samples.time_N - np.median(samples.time_N[finite_N])) <= FAR)
    if near_N.all():
        return samples
    note = f"{int((~near_N).sum())} rows have times days away from all others, or none: left out"
    return Samples(
        samples.time_N[near_N],
        samples.machine_N[near_N],
        samples.metric_N[near_N],
        samples.value_N[near_N],
        samples.machines,
        samples.metrics,
        samples.start,
        samples.end,
        (*samples.notes, note),
    )


class Pending:
    """Collects windows of any length and returns complete ticks, in order and each once."""

    def __init__(self, metrics: Sequence[str]):
        """metrics: names of the metrics that are kept, in this order."""
        self._metrics = tuple(metrics)
        self.machines: list[str] = []  # in the order of their coming: a machine's row
        self._start: int | None = None
        self._values_CNT = np.full((len(metrics), 0, 0), np.nan, np.float32)
        self.end = 0  # seconds up to which windows have come
        self.begin = 0  # of the first window

    def add(self, grid: Grid) -> list[str]:
        """Adds a window; returns sentences about the parts of it that cannot be used."""
        notes = []
        if self._start is None:
            self._start = -(-grid.start // TICK) * TICK  # ticks begin at multiples of their length
            self.end, self.begin = self._start, grid.start
        if late := max(min(self._start - grid.start, grid.values_CNT.shape[2]), 0):
            if np.isfinite(grid.values_CNT[:, :, :late]).any() and self.end > self._start:
                notes.append(f"{late} s of samples came after their time was judged: left out")
        known = set(self._metrics)
        if strange := [m for m in grid.metrics if m not in known]:
            notes.append(f"metrics that the detector was not fitted on: {', '.join(strange[:10])}")
        if not known & set(grid.metrics) and grid.metrics:
            raise UserError(
                f"none of the window's metrics ({', '.join(grid.metrics[:10])}) is one that the "
                f"detector was fitted on ({', '.join(self._metrics[:10])})"
            )
        shows_N = np.isfinite(grid.values_CNT).any((0, 2))  # who has no sample is not there yet
        there = [m for m, shows in zip(grid.machines, shows_N, strict=True) if shows]
        self._grow(there, max(grid.end, self.end))
        row = {name: k for k, name in enumerate(self.machines)}
        rows = np.array([row[m] for m in there], int)
        places = [self._metrics.index(m) for m in grid.metrics if m in known]
        used = [m in known for m in grid.metrics]
        new = grid.values_CNT[used][:, shows_N, late:]
        first = grid.start + late - self._start
        part = self._values_CNT[:, :, first : first + new.shape[2]]
        for c, values_NT in zip(places, new, strict=True):
            part[c, rows] = np.where(np.isfinite(values_NT), values_NT, part[c, rows])
        return notes

    def _grow(self, machines: Sequence[str], end: int) -> None:
        assert self._start is not None
        have = set(self.machines)
        self.machines += [m for m in machines if m not in have]
        self.end = end
        C, N, T = self._values_CNT.shape
        more = (len(self.machines) - N, max(end - self._start - T, 0))
        if any(more):
            pad = ((0, 0), (0, more[0]), (0, more[1]))
            self._values_CNT = np.pad(self._values_CNT, pad, constant_values=np.nan)

    def take(self) -> tuple[int, np.ndarray] | None:
        """Returns (start in Unix seconds, values_CNT) of the next complete tick, or None."""
        if self._start is None or self.end < self._start + TICK:
            return None
        start, tick = self._start, self._values_CNT[:, :, :TICK]
        self._start, self._values_CNT = start + TICK, self._values_CNT[:, :, TICK:]
        return start, tick

    def forget(self, rows: Sequence[int]) -> None:
        """Removes the machines in these rows; later machines move up."""
        gone = set(rows)
        self.machines = [m for i, m in enumerate(self.machines) if i not in gone]
        self._values_CNT = np.delete(self._values_CNT, list(rows), axis=1)


# ---- the last minutes of a job's metrics, as the daemon read them


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
