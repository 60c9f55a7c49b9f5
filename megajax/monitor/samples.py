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
        columns = [np.empty(0, np.int32)]
        for p in parts:
            table = np.array([at[name] for name in getattr(p, old)], np.int32)
            columns.append(table[getattr(p, place)])
        return np.concatenate(columns)

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
        finite_N = samples.time_N[np.isfinite(samples.time_N)]
        low, high = (finite_N.min(), finite_N.max()) if len(finite_N) else (math.nan, math.nan)
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
        known_s = None if period_s is None else period_s.get(name)
        mean_NT = mean.reshape(len(machines), cells)
        period = period_of(np.isfinite(mean_NT)) if known_s is None else round(known_s / step_s)
        values_CNT[c] = hold(mean_NT, period)
    notes = samples.notes + _outside(samples, ~inside_N)
    return Grid(first * step_s, int(step_s), values_CNT, machines, metrics, notes)


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


# ---- defects of the metrics themselves: each is named once, and units are converted back
#
# Between the sources and a detector: `Quality.check` looks at successive grids of one job. It names
# a metric that no machine has, a machine that is silent, an exporter that repeats its last values,
# and a change of unit: an exporter that says percent where it said shares, or milliwatts instead of
# watts. A change of unit on one machine would look like the worst fault of all, so its values are
# converted to the old unit.
#
# A change of unit is a step by a factor of FACTORS, up to TOLERANCE, between the medians of SECONDS
# before and after it. It counts only where the metric is steady: rates of packets, say, jump by a
# hundred by themselves. One machine's step counts only if the converted level lies among those of
# the other machines, as the old one did and the new one as it is does not; if the others hardly
# moved; and if the values vary as much in proportion as before: a GPU that stands still, or a job
# that goes on after it stood still, does not look like milliwatts.
#
# An exporter is stuck when no series of its machine changes any more although some of them did so
# all the time. Series that are always the same, or change once in a while, say nothing either way.
#
# Legend: C metrics, N machines, T seconds, M moments, K stretches of EVERY seconds, J last changes.


# (chosen) percent; thousands to billions, decimal and binary: what exporters change between
FACTORS = (100.0, 1000.0, 1024.0, 1e6, 2.0**20, 1e9, 2.0**30)
TOLERANCE = 0.05  # (chosen) of the factor, in the middle of all machines that changed alike
NOISY = 0.25  # (chosen) the same of one machine, whose medians are of few seconds
SECONDS = 30  # (chosen) that a level is the median of; a step shows this late
EVERY = 10  # (chosen) seconds between the moments at which a step is looked for
AMONG = 1.5  # (chosen) times the greatest, or below the least, level of the others
STILL = 2.0  # (chosen) times by which the middle of the others may move meanwhile
VARIES = 3.0  # (chosen) times by which the spread in proportion to the level may change
FEWEST_OTHERS = 3  # (chosen) machines that did not change
STEADY = 0.25  # (chosen) power of the factor that the middle 90 % of a metric's samples may span
ALL = 0.9  # (chosen) part of the machines that makes a step one of all
CHANGES, LIVELY_S = 8, 900  # (chosen) changes in so many seconds: the series varies
STUCK_S = 120  # (chosen) without a change, after which a series that varies stands still
STUCK_ALL_S = (
    300  # (chosen) the same, if more than half of the machines stand still: a job may wait
)
RARE = 4.0  # (chosen) times the usual distance of its changes that it must stand still, if longer
EQUAL = 5  # (chosen) equal samples of it
FRESH_S = 120  # (chosen) age of the newest sample of a series that is not silent


@dataclasses.dataclass
class _Memory:
    """A metric's last 2 SECONDS (tail_NT), and the divisor of each machine's values (divisor_N)."""

    tail_NT: np.ndarray
    divisor_N: np.ndarray


def nothing_in(grid: Grid) -> str:
    """Returns a sentence about a grid in which no machine has a sample; "" if one has."""
    if np.isfinite(grid.values_CNT).any():
        return ""
    return (
        f"no machine has a sample from {grid.start} to {grid.end} (Unix seconds): nothing was "
        "judged in this time"
    )


class Quality:
    """Remembers units and reported defects from grid to grid."""

    def __init__(self, expected: Sequence[str] = ()):
        """expected: metrics that some machine should have."""
        self._expected = tuple(expected)
        self._said: set[tuple[str, str]] = set()
        self._machines: tuple[str, ...] = ()
        self._memory: dict[str, _Memory] = {}
        self._changes = _Changes()

    def check(self, grid: Grid) -> Grid:
        """Returns the grid in the units of the first one; its notes describe new defects.

        grid: has cells of one second and follows the last one in time; machines and metrics may
        come and go. The result does not depend on where a stretch of time is cut into grids.
        """
        notes = self._missing(grid)
        # Makes room for new machines.
        have = set(self._machines)
        machines = self._machines + tuple(m for m in grid.machines if m not in have)
        for memory in self._memory.values():
            more = len(machines) - len(memory.divisor_N)
            memory.tail_NT = np.pad(memory.tail_NT, ((0, more), (0, 0)), constant_values=np.nan)
            memory.divisor_N = np.pad(memory.divisor_N, (0, more), constant_values=1.0)
        self._machines = machines
        values_CNT = grid.values_CNT.copy()
        for c, metric in enumerate(grid.metrics):
            notes += self._convert(metric, values_CNT[c], grid)
        notes += self._stuck(grid)
        return dataclasses.replace(grid, values_CNT=values_CNT, notes=(*grid.notes, *notes))

    def _is_new(self, kind: str, name: str, holds: bool) -> bool:
        key = (kind, name)
        fresh = holds and key not in self._said
        (self._said.add if holds else self._said.discard)(key)
        return fresh

    def _missing(self, grid: Grid) -> list[str]:
        """Returns sentences about metrics and machines without a sample, once each.

        A grid without any sample is named each time, and its metrics and machines are not.
        """
        if nothing := nothing_in(grid):
            return [nothing]
        has_CN = np.isfinite(grid.values_CNT).any(2)
        there = {m for m, has in zip(grid.metrics, has_CN.any(1), strict=True) if has}
        notes = [
            f"no machine has the metric {metric} from {grid.start} (Unix seconds) on"
            for metric in self._expected
            if self._is_new("metric", metric, metric not in there)
        ]
        heard = {m for m, has in zip(grid.machines, has_CN.any(0), strict=True) if has}
        for machine in dict.fromkeys((*self._machines, *grid.machines)):
            if self._is_new("machine", machine, machine not in heard):
                notes.append(f"machine {machine} is silent from {grid.start} (Unix seconds) on")
        return notes

    def forget(self, machines: Sequence[str]) -> None:
        """Forgets machines that have left the job."""
        gone = set(machines)
        stay = [k for k, name in enumerate(self._machines) if name not in gone]
        for memory in self._memory.values():
            memory.tail_NT, memory.divisor_N = memory.tail_NT[stay], memory.divisor_N[stay]
        self._machines = tuple(self._machines[k] for k in stay)
        self._said -= {(kind, name) for kind, name in self._said if name in gone}
        self._changes.forget(gone)

    def _stuck(self, grid: Grid) -> list[str]:
        """Returns sentences about exporters that repeat their last values, once each."""
        notes = []
        for stuck in self._changes.look(grid):
            fresh = [m for m in stuck if self._is_new("stuck", m, True)]
            for machine in {name for kind, name in self._said if kind == "stuck"} - stuck.keys():
                self._said.discard(("stuck", machine))
            if fresh:
                since = min(stuck[m] for m in fresh)
                more = f" and {len(fresh) - 3} more" if len(fresh) > 3 else ""
                notes.append(
                    f"all metrics of {', '.join(fresh[:3])}{more} have had the same values since "
                    f"{since:.0f} (Unix seconds): what exports or serves them may be stuck"
                )
        return notes

    def _convert(self, metric: str, value_NT: np.ndarray, grid: Grid) -> list[str]:
        """Converts a metric's values to the old units, in place. Returns notes about changes."""
        size, span = len(self._machines), 2 * SECONDS
        memory = self._memory.setdefault(
            metric, _Memory(np.full((size, span), np.nan, np.float32), np.ones(size))
        )
        place = {name: k for k, name in enumerate(self._machines)}
        rows = np.array([place[m] for m in grid.machines], np.int64)
        whole_NT = np.full((size, span + value_NT.shape[1]), np.nan, np.float32)
        whole_NT[:, :span] = memory.tail_NT
        whole_NT[rows, span:] = value_NT / memory.divisor_N[rows, None]
        out_NT, notes = whole_NT[:, span:].copy(), []
        moments = range(-(-(grid.start + 1) // EVERY) * EVERY, grid.end + 1, EVERY)
        first = moments.start - grid.start  # where the first moment's seconds begin
        far_MN = _far(whole_NT[:, first:])
        for m, moment in enumerate(moments):
            if not far_MN[m].any():
                continue
            at = span + moment - grid.start
            changed = _steps(whole_NT[:, at - span : at], far_MN[m])
            moved = changed != 1
            if moved.any():
                memory.divisor_N *= changed
                memory.divisor_N[np.abs(memory.divisor_N - 1) < TOLERANCE] = 1  # as it was
                notes.append(self._sentence(metric, changed, moment))
                whole_NT[moved, :at] = np.nan  # from here on it is compared anew
                whole_NT[moved, at:] /= changed[moved, None]
                out_NT[moved, at - span :] /= changed[moved, None]
                far_MN = _far(whole_NT[:, first:])
        memory.tail_NT = whole_NT[:, whole_NT.shape[1] - span :]
        value_NT[:] = out_NT[rows]
        return notes

    def _sentence(self, metric: str, changed_N: np.ndarray, moment: int) -> str:
        names = [self._machines[k] for k in np.flatnonzero(changed_N != 1)]
        who = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        factor = changed_N[changed_N != 1][0]
        shown = f"{factor:g} times larger" if factor > 1 else f"{1 / factor:g} times smaller"
        return (
            f"{metric} is {shown} on {who} since about {moment - SECONDS} (Unix seconds): taken "
            "for a change of unit and converted"
        )


class _Changes:
    """When each series changed, over the grids of a job."""

    def __init__(self) -> None:
        self._names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # metrics, machines
        self._last_CN = np.zeros((0, 0), np.float32)
        self._heard_CN = np.zeros((0, 0))  # Unix seconds of the newest sample
        self._equal_CN = np.zeros((0, 0), np.int64)  # samples since the last change
        self._changed_CNJ = np.zeros((0, 0, CHANGES))  # Unix seconds, the newest last

    def look(self, grid: Grid) -> list[dict[str, float]]:
        """Returns {machine that stands still: since when} at each moment of the grid."""
        self._grow(grid)
        places = []
        for have, names in zip(self._names, (grid.metrics, grid.machines), strict=True):
            place = {name: k for k, name in enumerate(have)}
            places.append([place[name] for name in names])
        values_CNT = np.full((*self._last_CN.shape, grid.values_CNT.shape[2]), np.nan, np.float32)
        values_CNT[np.ix_(*places)] = grid.values_CNT
        stuck = []
        for second in range(values_CNT.shape[2]):
            now = grid.start + second
            self._take(values_CNT[..., second], now)
            if (now + 1) % EVERY == 0:
                stuck.append(self._stuck(now + 1))
        return stuck

    def _grow(self, grid: Grid) -> None:
        more = []
        for have, new in zip(self._names, (grid.metrics, grid.machines), strict=True):
            known = set(have)
            more.append(tuple(name for name in new if name not in known))
        if not any(more):
            return
        pad = [(0, len(names)) for names in more]
        self._names = self._names[0] + more[0], self._names[1] + more[1]
        self._last_CN = np.pad(self._last_CN, pad, constant_values=np.nan)
        self._heard_CN = np.pad(self._heard_CN, pad, constant_values=-np.inf)
        self._equal_CN = np.pad(self._equal_CN, pad)
        self._changed_CNJ = np.pad(self._changed_CNJ, [*pad, (0, 0)], constant_values=-np.inf)

    def _take(self, value_CN: np.ndarray, now: int) -> None:
        has_CN = np.isfinite(value_CN)
        changed = np.nonzero(has_CN & (value_CN != self._last_CN) & np.isfinite(self._last_CN))
        if len(changed[0]):
            before_RJ = self._changed_CNJ[changed]
            before_RJ[:, :-1], before_RJ[:, -1] = before_RJ[:, 1:].copy(), now
            self._changed_CNJ[changed] = before_RJ
            self._equal_CN[changed] = 0
        self._equal_CN += has_CN
        np.copyto(self._last_CN, value_CN, where=has_CN)
        self._heard_CN[has_CN] = now

    def _stuck(self, moment: int) -> dict[str, float]:
        first_CN, last_CN = self._changed_CNJ[..., 0], self._changed_CNJ[..., -1]
        with np.errstate(invalid="ignore"):  # of series that never changed
            span_CN = last_CN - first_CN
            varies_CN = (moment - self._heard_CN <= FRESH_S) & (span_CN <= LIVELY_S)
            least_CN = np.maximum(STUCK_S, RARE * span_CN / (CHANGES - 1))
            stands_CN = (self._equal_CN >= EQUAL) & (moment - last_CN >= least_CN)
        since_N = last_CN.max(0, initial=-np.inf)
        varies_N = varies_CN.any(0)
        stuck_N = varies_N & (stands_CN | ~varies_CN).all(0) & (moment - since_N >= STUCK_S)
        if 2 * stuck_N.sum() > varies_N.sum():
            stuck_N &= moment - since_N >= STUCK_ALL_S
        return {self._names[1][k]: float(since_N[k]) for k in np.flatnonzero(stuck_N)}

    def forget(self, gone: set[str]) -> None:
        """Forgets machines."""
        stay = [k for k, name in enumerate(self._names[1]) if name not in gone]
        self._names = self._names[0], tuple(self._names[1][k] for k in stay)
        self._last_CN, self._heard_CN = self._last_CN[:, stay], self._heard_CN[:, stay]
        self._equal_CN, self._changed_CNJ = self._equal_CN[:, stay], self._changed_CNJ[:, stay]


def _far(value_NT: np.ndarray) -> np.ndarray:
    """Returns far_MN: machines whose greatest value moved so far that the unit may have changed.

    It is what decides, for nearly all moments, that no median is needed. value_NT: 2 SECONDS before
    the first moment, then EVERY seconds more for each further one; M = 0 if it is shorter.
    """
    N, blocks, side = len(value_NT), value_NT.shape[1] // EVERY, SECONDS // EVERY
    block_NKT = value_NT[:, : blocks * EVERY].reshape(N, blocks, EVERY)
    count_NK, most_NK = np.zeros(block_NKT.shape[:2], np.int8), block_NKT[..., 0].copy()
    for second in range(EVERY):  # NumPy reduces so short an axis ten times slower than this
        count_NK += np.isfinite(block_NKT[..., second])
        np.fmax(most_NK, block_NKT[..., second], out=most_NK)
    size = (max(blocks - 2 * side + 1, 0), N)
    far_MN = np.zeros(size, bool)
    for m in range(size[0]):
        parts = [slice(m, m + side), slice(m + side, m + 2 * side)]
        enough_N = np.all([count_NK[:, p].sum(1) >= SECONDS / 2 for p in parts], axis=0)
        most = [np.fmax.reduce(most_NK[:, p], axis=1) for p in parts]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio_N = most[1] / most[0]
            far_MN[m] = enough_N & ((ratio_N > FACTORS[0] / 2) | (ratio_N < 2 / FACTORS[0]))
    return far_MN


def _steps(value_NT: np.ndarray, far_N: np.ndarray) -> np.ndarray:
    """Returns by what factor each machine's unit changed in the middle, 1 for none.

    value_NT: 2 SECONDS of all machines. far_N: of `_far`, for these seconds.
    """
    changed_N = np.ones(len(value_NT))
    parts = np.split(value_NT, 2, axis=1)
    enough_N = np.all([np.isfinite(p).sum(1) >= SECONDS / 2 for p in parts], axis=0)
    before_N, after_N = np.full((2, len(value_NT)), np.nan)

    def level(asked_N: np.ndarray) -> None:
        for level_N, p in zip((before_N, after_N), parts, strict=True):
            level_N[asked_N] = np.nanmedian(p[asked_N], axis=1)

    level(far_N)
    for k in np.flatnonzero(far_N & (before_N > 0) & (after_N > 0)):
        changed_N[k] = _factor(after_N[k] / before_N[k], NOISY)
    if (changed_N == 1).all():
        return changed_N
    level(enough_N & ~far_N)  # medians are dear, so those of the others come last
    for size in set(np.round(np.log10(changed_N))) - {0}:  # 1000 or 1024: all of them tell better
        alike = np.round(np.log10(changed_N)) == size
        changed_N[alike] = _factor(float(np.median(after_N[alike] / before_N[alike])))
    moved_N, still_N = changed_N != 1, enough_N & (changed_N == 1)
    used_N = enough_N & (before_N > 0)
    if not moved_N.any():
        return changed_N
    old_NT = parts[0][:, :-EVERY]  # a step down is seen once the last value before it has gone
    if moved_N.sum() >= ALL * enough_N.sum() and len(set(changed_N[moved_N])) == 1:
        steady = _is_steady(old_NT[enough_N], changed_N[moved_N][0])
        return changed_N if steady else np.ones(len(value_NT))
    others = [level_N[still_N & used_N] for level_N in (before_N, after_N)]
    if len(others[0]) < FEWEST_OTHERS:
        return np.ones(len(value_NT))
    common = np.median(others[1] / others[0])
    for k in np.flatnonzero(moved_N):
        unit = 1 / STILL < common < STILL and _is_steady(old_NT[k], changed_N[k])
        unit = unit and all(_is_steady(p[still_N & used_N], changed_N[k]) for p in parts)
        unit &= _among(before_N[k], others[0]) and _among(after_N[k] / changed_N[k], others[1])
        unit &= not _among(after_N[k], others[1])
        unit &= _varies_alike(parts[0][k] / before_N[k], parts[1][k] / after_N[k])
        changed_N[k] = changed_N[k] if unit else 1
    return changed_N


def _among(level: float, others: np.ndarray) -> bool:
    return bool(others.min() / AMONG <= level <= AMONG * others.max())


def _is_steady(samples: np.ndarray, factor: float) -> bool:
    """Tells whether a step by this factor stands out among samples of a metric."""
    low, high = np.nanquantile(samples, (0.05, 0.95))
    return bool(low > 0 and high <= low * max(factor, 1 / factor) ** STEADY)


def _varies_alike(before_T: np.ndarray, after_T: np.ndarray) -> bool:
    """Tells whether values around 1 spread as much after a step as before it."""
    spreads = [float(np.nanmedian(np.abs(x - 1))) for x in (before_T, after_T)]
    return max(spreads) <= VARIES * min(spreads) or max(spreads) < 1e-6


def _factor(ratio: float, tolerance: float = TOLERANCE) -> float:
    """Returns the factor of FACTORS, or its inverse, that a ratio is near; 1 for none."""
    signed = [f for g in FACTORS for f in (g, 1 / g)]
    nearest = min(signed, key=lambda f: abs(math.log(ratio / f)))
    return nearest if abs(ratio / nearest - 1) < tolerance else 1.0


assert SECONDS % EVERY == 0
