"""Samples: what a source of monitoring data gives, one row a measured value, in any order.

The input of the detector of sick machines (Minder, NSDI 2025, arXiv 2411.01791, section 3). Sources
(megajax/monitor/sources/) make Samples, `to_grid` puts them on a Grid of seconds. A machine
is what may be sick, most often a host. A series that stops is a sign of a fault, so that nobody
fills holes: a value that was not measured is in no row.

Legend: N rows; in Grid, C metrics, N machines, T seconds (cells of step_s seconds). Not here: what
the metrics are called (sources/convert.py).
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from megajax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Samples:
    """Rows of (time, machine, metric, value).

    time_N: float64, Unix seconds. machine_N, metric_N: int32, places in `machines` and `metrics`.
    value_N: float64; NaN: the source says that there is no value. start, end: the interval
    [start, end) that was asked for, in Unix seconds; None: what the rows hold. notes: sentences
    about what was wrong with the data, for the log.
    """

    time_N: np.ndarray
    machine_N: np.ndarray
    metric_N: np.ndarray
    value_N: np.ndarray
    machines: tuple[str, ...]
    metrics: tuple[str, ...]
    start: float | None = None
    end: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Sets the types. Raises: ValueError for rows that name nothing, or names that repeat."""
        types = {"time_N": np.float64, "machine_N": np.int32, "metric_N": np.int32}
        for name, kind in {**types, "value_N": np.float64}.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), kind))
        rows = {getattr(self, n).shape for n in (*types, "value_N")}
        if len(rows) != 1 or len(next(iter(rows))) != 1:
            raise ValueError(f"Samples has columns of the shapes {sorted(rows)}, not of one")
        for place_N, names in ((self.machine_N, self.machines), (self.metric_N, self.metrics)):
            if len(set(names)) != len(names):
                raise ValueError(f"Samples has names twice: {sorted(names)[:20]}")
            if place_N.size and not (0 <= place_N.min() and place_N.max() < len(names)):
                raise ValueError(f"Samples has rows of names outside of {len(names)}")

    @classmethod
    def of(
        cls,
        rows: Iterable[tuple[float, str, str, float]],
        start: float | None = None,
        end: float | None = None,
    ) -> "Samples":
        """Returns the samples of (time, machine, metric, value) rows."""
        times, names, words, values = [list(c) for c in zip(*rows, strict=True)] or [[]] * 4
        machines, machine_N = index(names)
        metrics, metric_N = index(words)
        return cls(
            np.array(times, np.float64),
            machine_N,
            metric_N,
            np.array(values, np.float64),
            machines,
            metrics,
            start,
            end,
        )

    def __len__(self) -> int:
        return len(self.time_N)

    def rows(self) -> Iterable[tuple[float, str, str, float]]:
        """Yields (time, machine, metric, value) in the order in which they are held."""
        columns = (self.time_N, self.machine_N, self.metric_N, self.value_N)
        for at, machine, metric, value in zip(*(c.tolist() for c in columns), strict=True):
            yield at, self.machines[machine], self.metrics[metric], value


def of_machines(samples: Samples, pattern: str) -> Samples:
    """Returns the rows of the machines whose whole names the regular expression matches; '': of
    all."""
    if not pattern:
        return samples
    keep = [k for k, m in enumerate(samples.machines) if re.fullmatch(pattern, m)]
    notes = samples.notes
    if samples.machines and not keep:
        names = ", ".join(samples.machines[:3])
        notes += (f"none of the {len(samples.machines)} machines ({names}) matches {pattern!r}",)
    place = np.full(len(samples.machines), -1)
    place[keep] = np.arange(len(keep))
    rows = np.flatnonzero(place[samples.machine_N] >= 0)
    return dataclasses.replace(
        samples,
        time_N=samples.time_N[rows],
        machine_N=place[samples.machine_N[rows]],
        metric_N=samples.metric_N[rows],
        value_N=samples.value_N[rows],
        machines=tuple(samples.machines[k] for k in keep),
        notes=notes,
    )


def index(names: Sequence[str]) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns (the different names, sorted; the place of each among them, int32 (N,))."""
    different = tuple(sorted(set(names)))
    place = {name: k for k, name in enumerate(different)}
    return different, np.fromiter((place[n] for n in names), np.int32, len(names))


def concat(parts: Sequence[Samples]) -> Samples:
    """Returns the rows of all parts, in their order.

    The interval is the smallest that holds all; it is None where one part has none.
    """
    machines = tuple(sorted({m for p in parts for m in p.machines}))
    metrics = tuple(sorted({m for p in parts for m in p.metrics}))

    def column(name: str, kind: type) -> np.ndarray:
        return np.concatenate([np.empty(0, kind), *(getattr(p, name) for p in parts)])

    def moved(place: str, old: str, new: tuple[str, ...]) -> np.ndarray:
        at = {name: k for k, name in enumerate(new)}
        found = [np.empty(0, np.int32)]
        for p in parts:
            table = np.array([at[name] for name in getattr(p, old)], np.int32)
            found.append(table[getattr(p, place)])
        return np.concatenate(found)

    starts, ends = [p.start for p in parts], [p.end for p in parts]
    return Samples(
        column("time_N", np.float64),
        moved("machine_N", "machines", machines),
        moved("metric_N", "metrics", metrics),
        column("value_N", np.float64),
        machines,
        metrics,
        None if None in starts else min(starts, default=None),  # type: ignore[type-var]
        None if None in ends else max(ends, default=None),  # type: ignore[type-var]
        tuple(dict.fromkeys(note for p in parts for note in p.notes)),
    )


# ---- samples of all machines on one grid of seconds, where holes stay holes
#
# A detector compares the machines of a job at the same second (Minder section 3.1). The paper fills
# holes with the nearest sample. Here a second without a sample is NaN, because a series that stops
# may be the only sign of a fault: a GPU that fell off its bus shows nothing else.


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
