"""Grid: samples of all machines on one grid of seconds, where holes stay holes.

A detector compares the machines of a job at the same second (Minder section 3.1). The paper fills
holes with the nearest sample. Here a second without a sample is NaN, because a series that stops
may be the only sign of a fault: a GPU that fell off its bus shows nothing else.

Legend: C metrics, N machines, T seconds (cells of step_s seconds).
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.samples import Samples

MOST = 2**29  # (chosen: 2 GiB of float32) cells of a grid; a wrong timestamp would need far more
SPARSE = 2**27  # (chosen: 0.5 GiB) cells of a grid of few rows
CELLS_PER_ROW = 16  # (chosen: samples every 15 s) of a grid of more cells than that
LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Grid:
    """start: Unix seconds of the first cell. step_s: seconds a cell. values_CNT: float32; NaN: no
    sample in that cell. machines, metrics: their names, sorted. notes: those of the samples, and
    what was left out."""

    start: int
    step_s: int
    values_CNT: np.ndarray
    machines: tuple[str, ...]
    metrics: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """Unix seconds at which the last cell ends."""
        return self.start + self.step_s * self.values_CNT.shape[2]


def to_grid(samples: Samples, step_s: int = 1, period_s: Mapping[str, float] | None = None) -> Grid:
    """Returns the mean of each cell's samples; NaN where there is none.

    The order of the rows does not matter. A metric that is sampled every k > 1 cells holds each
    sample for its own period, k - 1 more cells, and no longer. k is the median distance of the
    samples of a machine, over all machines. Values that are not finite as
    float32 count as none. Cells begin at multiples of step_s; the first is that of the samples'
    start, or of the first row.

    period_s: seconds between the samples of a metric, where the caller knows it, e.g. because the
        window is shorter than a few of them.
    Raises: UserError when step_s is no positive integer or the grid would be too large.
    """
    if step_s < 1 or step_s != int(step_s):
        raise UserError(f"step_s={step_s} must be a whole number of seconds; nearest: 1")
    first, cells = _span(samples, step_s)
    machines, metrics = tuple(sorted(samples.machines)), tuple(sorted(samples.metrics))
    most = min(MOST, max(SPARSE, CELLS_PER_ROW * len(samples)))
    if cells * len(machines) * len(metrics) > most:
        low, high = _range(samples.time_N)
        raise UserError(
            f"{len(machines)} machines x {len(metrics)} metrics x {cells} cells of {step_s} s are "
            f"more than {most:,}: the {len(samples):,} rows are from {low:.0f} to "
            f"{high:.0f} (Unix seconds). Take a shorter interval, a larger step_s, or "
            "correct the timestamps"
        )
    row_N = _ranks(samples.machines)[samples.machine_N]
    metric_N = _ranks(samples.metrics)[samples.metric_N]
    with np.errstate(invalid="ignore"):  # a time that is not finite is in no cell
        cell_N = np.floor(samples.time_N / step_s) - first
        inside_N = (cell_N >= 0) & (cell_N < cells)
    valid_N = inside_N & (np.abs(samples.value_N) <= LARGEST)  # NaN is not
    values_CNT = np.full((len(metrics), len(machines), cells), np.nan, np.float32)
    for c, name in enumerate(metrics):
        rows = np.flatnonzero(valid_N & (metric_N == c))
        at = row_N[rows].astype(np.int64) * cells + cell_N[rows].astype(np.int64)
        size = len(machines) * cells
        count = np.bincount(at, minlength=size)
        total = np.bincount(at, samples.value_N[rows], minlength=size)
        has = count > 0
        mean = np.full(size, np.nan)
        mean[has] = total[has] / count[has]
        given = None if period_s is None else period_s.get(name)
        mean_NT = mean.reshape(len(machines), cells)
        period = period_of(np.isfinite(mean_NT)) if given is None else round(given / step_s)
        values_CNT[c] = hold(mean_NT, period)
    notes = samples.notes + _outside(samples, ~inside_N)
    return Grid(first * step_s, int(step_s), values_CNT, machines, metrics, notes)


def _range(time_N: np.ndarray) -> tuple[float, float]:
    finite_N = time_N[np.isfinite(time_N)]
    return (finite_N.min(), finite_N.max()) if len(finite_N) else (math.nan, math.nan)


def _span(samples: Samples, step_s: int) -> tuple[int, int]:
    """Returns (number of the first cell since the epoch, number of cells)."""
    time_N = samples.time_N[np.isfinite(samples.time_N)]
    if samples.start is not None:
        first = math.floor(samples.start / step_s)
    else:
        first = math.floor(time_N.min() / step_s) if len(time_N) else 0
    if samples.end is not None:
        last = math.ceil(samples.end / step_s)
    else:
        last = math.floor(time_N.max() / step_s) + 1 if len(time_N) else first
    return first, max(last - first, 0)


def _ranks(names: tuple[str, ...]) -> np.ndarray:
    """Returns the place of each name among the sorted ones."""
    rank = np.empty(len(names), np.int32)
    rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    return rank


def period_of(has_NT: np.ndarray) -> int:
    """Returns the median number of cells between two samples of a machine, 1 where none has two."""
    at, cells = np.flatnonzero(has_NT), max(has_NT.shape[1], 1)
    gaps = np.diff(at)[at[1:] // cells == at[:-1] // cells]
    return max(1, round(float(np.median(gaps)))) if len(gaps) else 1


def hold(value_NT: np.ndarray, period: float) -> np.ndarray:
    """Returns the values, each repeated in the NaN cells that follow it, over at most `period`
    cells together with its own."""
    if period <= 1 or not value_NT.size:
        return value_NT
    now_T = np.arange(value_NT.shape[1])
    last_NT = np.maximum.accumulate(np.where(np.isfinite(value_NT), now_T, -1), axis=1)
    fresh_NT = (last_NT >= 0) & (now_T - last_NT < period)
    return np.where(fresh_NT, np.take_along_axis(value_NT, np.maximum(last_NT, 0), 1), np.nan)


def _outside(samples: Samples, outside_N: np.ndarray) -> tuple[str, ...]:
    """Returns a sentence about rows outside of the interval, with the machines of most of them."""
    if not outside_N.any():
        return ()
    count = np.bincount(samples.machine_N[outside_N], minlength=len(samples.machines))
    most = [samples.machines[k] for k in np.argsort(-count, kind="stable") if count[k]]
    more = f" and {len(most) - 3} more" if len(most) > 3 else ""
    return (
        f"{int(count.sum())} rows lie outside of the interval that was asked for, or have no time, "
        f"and were left out (machines {', '.join(most[:3])}{more}): is a clock wrong?",
    )
