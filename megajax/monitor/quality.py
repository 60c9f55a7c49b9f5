"""What is wrong with the metrics of machines themselves: named once, and units put right.

Between the sources and a detector: `Quality.check` looks at successive grids of one job. It names a
metric that no machine has, a machine that is silent, an exporter that repeats its last values, and
a change of unit: an exporter that says percent where it said shares, or milliwatts instead of
watts. A change of unit on one machine would look like the worst fault of all, so its values are
converted to the old unit.

A change of unit is a step by a factor of FACTORS, up to TOLERANCE, between the medians of SECONDS
before and after it. It counts only where the metric is steady: rates of packets, say, jump by a
hundred by themselves. One machine's step counts only if the converted level lies among those of the
other machines, as the old one did and the new one as it is does not; if the others hardly moved;
and if the values vary as much in proportion as before: a GPU that stands still, or a job that goes
on after it stood still, does not look like milliwatts.

An exporter is stuck when no series of its machine changes any more although some of them did so all
the time. Series that are always the same, or change once in a while, say nothing either way.

Legend: C metrics, N machines, T seconds, M moments, K stretches of EVERY seconds, J last changes.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from megajax.monitor.samples import Grid

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
    """A metric's last 2 SECONDS (tail_NT), and what each machine is divided by (divisor_N)."""

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
    """Remembers units, and what was said, from grid to grid."""

    def __init__(self, expected: Sequence[str] = ()):
        """expected: metrics that some machine should have."""
        self._expected = tuple(expected)
        self._said: set[tuple[str, str]] = set()
        self._machines: tuple[str, ...] = ()
        self._memory: dict[str, _Memory] = {}
        self._changes = _Changes()

    def check(self, grid: Grid) -> Grid:
        """Returns the grid in the units of the first one, with what is new in its notes.

        grid: of cells of one second, behind the last one; machines and metrics may come and go. The
        result does not depend on where a stretch of time is cut into grids.
        """
        notes = self._missing(grid)
        self._know(grid)
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

    def _know(self, grid: Grid) -> None:
        """Makes room for new machines."""
        have = set(self._machines)
        machines = self._machines + tuple(m for m in grid.machines if m not in have)
        for memory in self._memory.values():
            more = len(machines) - len(memory.divisor_N)
            memory.tail_NT = np.pad(memory.tail_NT, ((0, more), (0, 0)), constant_values=np.nan)
            memory.divisor_N = np.pad(memory.divisor_N, (0, more), constant_values=1.0)
        self._machines = machines

    def _convert(self, metric: str, value_NT: np.ndarray, grid: Grid) -> list[str]:
        """Puts a metric's values into the old units, in place. Returns what changed."""
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
