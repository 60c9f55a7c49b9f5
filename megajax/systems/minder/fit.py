"""Fits a detector on jobs without labels: ranges, networks, noise, offsets and limits.

There are three passes over the sources, with one source in memory at a time. The first finds the
ranges of the metrics and windows to train on. The second trains the LSTM-VAEs (features.py). The
third measures how far healthy machines are from their peers and from their own past. Faults in the
data are few, so every estimate is a quantile or a median.

Legend: C metrics, F channels, N machines, T seconds, J windows of a tick, H ticks, X windows with
and without a fault.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError
from megajax.models.lstm_vae import LstmVaeConfig
from megajax.monitor.samples import Grid, period_of
from megajax.monitor.sources.convert import MINDER
from megajax.systems.minder import features, tracker
from megajax.systems.minder.detector import Dynamics, Profile, Window, grid_of, held
from megajax.systems.minder.settings import LEAST, TICK, WINDOW, Settings
from megajax.systems.minder.tracker import Limits

# ---- in which order metrics decide: a decision tree, learnt from labelled faults
#
# Source: Minder (arXiv 2411.01791, section 4.3). The feature of a metric is the largest absolute
# z-score of a machine in a window. A tree that separates windows with a fault from windows without
# one has the most informative metrics near its root; these come first. The largest possible z-score
# grows with the number of machines. Features are divided by it, so that jobs of different sizes
# share one tree.


DEPTH = 8  # (chosen) splits from the root to a leaf, at most
LEAST_LEAF = 0.005  # (chosen) share of the windows that a leaf has at least


def peak_scores(levels_CNX: np.ndarray) -> np.ndarray:
    """Returns the largest |z-score| of a machine, (X, C), as a share of its bound.

    levels_CNX: levels of the windows (features.of_tick), NaN where missing.
    """
    measured = np.isfinite(levels_CNX)
    count_CX = np.maximum(measured.sum(1), 1)
    filled = np.where(measured, levels_CNX, 0.0)
    mean_CX = filled.sum(1) / count_CX
    apart = np.where(measured, levels_CNX - mean_CX[:, None], 0.0)
    sigma_CX = np.sqrt((apart**2).sum(1) / count_CX)
    bound_CX = np.maximum(np.sqrt(count_CX - 1.0), 1e-9)  # of a population deviation
    return (np.abs(apart).max(1) / np.maximum(sigma_CX, 1e-9) / bound_CX).T


def order(z_XC: np.ndarray, fault_X: np.ndarray, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the metrics, the most informative first.

    They are sorted by the depth at which the tree first uses a metric, then by the total gain of
    its splits. Metrics that the tree never uses follow in their given order.
    Args: z_XC: what `features` returns. fault_X: True for windows with a fault. names: names of the
      metrics, in the order of z_XC.
    """
    depth, gain = {}, dict.fromkeys(range(len(names)), 0.0)
    least = max(1, int(LEAST_LEAF * len(fault_X)))
    todo = [(np.arange(len(fault_X)), 0)]
    while todo:
        rows, level = todo.pop()
        split = best_split(z_XC[rows], fault_X[rows], least) if level < DEPTH else None
        if split is None:
            continue
        c, threshold, told = split
        depth[c] = min(level, depth.get(c, DEPTH))
        gain[c] += told
        left = z_XC[rows, c] <= threshold
        todo += [(rows[left], level + 1), (rows[~left], level + 1)]
    places = sorted(range(len(names)), key=lambda c: (depth.get(c, DEPTH), -gain[c], c))
    return tuple(names[c] for c in places)


def best_split(
    z_XC: np.ndarray, fault_X: np.ndarray, least: int = 1
) -> tuple[int, float, float] | None:
    """Returns (metric index, threshold, gain) of the best split; None if no split has a gain.

    The gain is the decrease of Gini's impurity times the number of windows. Each side has at least
    `least` windows.
    """
    X = len(fault_X)
    impurity = _impurity(np.array([fault_X.sum()], float), np.array([X], float))[0]
    best: tuple[int, float, float] | None = None
    if X < 2 * least or impurity == 0:
        return None
    for c in range(z_XC.shape[1]):
        by = np.argsort(z_XC[:, c], kind="stable")
        z_X, faults_X = z_XC[by, c], np.cumsum(fault_X[by]).astype(float)
        left_X = np.arange(1.0, X + 1)
        right = _impurity(faults_X[-1] - faults_X, X - left_X)
        told_X = impurity - _impurity(faults_X, left_X) - right
        cuts = (z_X[:-1] < z_X[1:]) & (left_X[:-1] >= least) & (X - left_X[:-1] >= least)
        if not cuts.any():
            continue
        k = int(np.argmax(np.where(cuts, told_X[:-1], -1.0)))
        if told_X[k] > (best[2] if best else 1e-9):
            best = c, float((z_X[k] + z_X[k + 1]) / 2), float(told_X[k])
    return best


def _impurity(faults: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns Gini's impurity times the windows: 2 f (n - f) / n."""
    return 2 * faults * (count - faults) / np.maximum(count, 1)


# ---- fitting


SHORTEST = 600  # seconds of a job to learn from: more than the longest span of ticks
VALUES = 2**20  # of a metric from which its range is taken
WINDOWS = 2**15  # to train on
TAILS = (0.002, 0.998)  # quantiles that bound the healthy range
NARROW = 0.02  # (chosen) of its level: a smaller difference is no fault in any metric
SKEWED = 4.0  # (chosen) times as far above the median as below it: a metric of factors
LEAST_NOISE = (
    0.002,
    0.05,
)  # (chosen) of a level, as a share of three healthy ranges; of a residual
# (chosen) quantile of distances, and times as far as noise that it shows: in a metric whose
# machines differ from the others in a few ticks only, such as rare packets
SPARSE = (0.9, 2.0)
USUAL_SLOPE = (0.5, 0.5)  # where the job's state did not vary while learning
BLOCK = 75  # ticks (30 minutes) of which the highest score is one observation of the tail
# (chosen on held-out jobs of earlier runs, which are not reported with them) A fault and the peers
# that it drags along are some percent of the machines' half hours: a higher quantile is theirs.
HIGH, MARGIN = 0.9, 2.3
LEAST_ALONE = 5.9  # (chosen) standard deviations of a channel's average
LEAST_MORE = 6.0  # (chosen) of the length of all channels above its healthy one
ODD = 1.5  # (chosen) a residual alone is weaker evidence than a level
Tell = Callable[[str], Any]
LEARNT = 0.5  # (chosen) share of the windows' variance that trained networks give back at least
Faults = Sequence[Sequence[tuple[float, float]]]
Prior = tuple[np.ndarray, np.ndarray, np.ndarray]  # noise_F, offset_F, slope_F


def fit(
    sources: Sequence[Window],
    seed: int,
    metrics: Sequence[str] | None,
    steps: int,
    settings: Settings,
    tell: Tell | None,
    keep: features.Keep,
    faults: Faults | None = None,
) -> Profile:
    """Returns a profile; the arguments are Detector.fit's."""
    tell = tell or (lambda message: None)
    if not sources:
        raise UserError("there is nothing to fit: give at least one source")
    if faults is not None and len(faults) != len(sources):
        raise UserError(
            f"faults has {len(faults)} lists of intervals for {len(sources)} sources: give one "
            "for each, empty where nothing was wrong"
        )
    ranges = _Ranges(np.random.default_rng(seed), metrics)
    longest = 0
    for k, source in enumerate(sources):
        grid = _checked(grid_of(source), k)
        longest = max(longest, (grid.end - grid.start - -grid.start % TICK) // TICK)
        ranges.add(grid)
    _long_enough(longest, settings)
    names, range_3C, period_C, end_2C = ranges.learnt()
    tell(f"{len(names)} metrics of {ranges.machines} machines, {ranges.seconds / 3600:.1f} h")
    model = LstmVaeConfig(len(names))
    windows = ranges.windows(range_3C)
    vae, error = features.train(model, windows, seed, steps, keep, tell)
    learnt = 1.0 - error / features.variance(windows, seed)
    if not learnt >= LEARNT:
        tell(
            f"WARNING: after {steps} steps the networks give back {max(learnt, 0):.0%} of their "
            f"windows' variance, less than {LEARNT:.0%}: the detector is nearly blind. Train longer"
        )
    ticks, dynamic, starts = [], [], []
    for source in sources:
        grid = grid_of(source)
        levels, courses = _ticks(model, vae, range_3C, period_C, names, grid)
        ticks.append(levels)
        dynamic.append(courses)
        starts.append(grid.start + -grid.start % TICK)
    tell("networks trained; measuring offsets and noise")
    C = len(names)
    slopes = np.repeat(USUAL_SLOPE, C)
    prior = noise_F, offset_F, slope_F = _spreads(ticks, np.repeat(LEAST_NOISE, C), slopes, C)
    limits = _limits(prior, ticks, settings, C)
    usual = np.full(C + 1, tracker.USUAL_SLOPE)
    course = _spreads(dynamic, tracker.least_noise(C), usual, C + 1)
    limit = _limits(course, dynamic, settings, C + 1, only_more=True)
    more = Dynamics(course[0], course[1], course[2], limit)
    report = {
        "seconds": ranges.seconds,
        "machines": ranges.machines,
        "mean_square": error,
        "learnt": learnt,
    }
    return Profile(
        names, model, vae, range_3C[0], range_3C[1], range_3C[2], period_C, end_2C[0], end_2C[1],
        noise_F, offset_F, slope_F, limits, settings, report,
        names if faults is None else _priority(ticks, starts, faults, names), more,
    )  # fmt: skip


def _priority(
    ticks: Sequence[np.ndarray], starts: Sequence[int], faults: Faults, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the metrics in the order in which a decision tree uses them."""
    z, labels = [], []
    for y_HFNJ, start, intervals in zip(ticks, starts, faults, strict=True):
        H, _, N, J = y_HFNJ.shape
        levels = y_HFNJ[:, : len(names)].transpose(1, 2, 0, 3).reshape(len(names), N, H * J)
        middle_X = start + WINDOW * (np.arange(H * J) + 0.5)
        z.append(peak_scores(levels))
        labels.append(
            np.any([(a <= middle_X) & (middle_X < b) for a, b in intervals], 0)
            if intervals
            else np.zeros(H * J, bool)
        )
    return order(np.concatenate(z), np.concatenate(labels), names)


def _checked(grid: Grid, k: int) -> Grid:
    C, N, T = grid.values_CNT.shape
    if N < LEAST or T < SHORTEST or not C:
        raise UserError(
            f"source {k} has {N} machines, {C} metrics and {T} s; a job to learn from has at least "
            f"{LEAST} machines and {SHORTEST} s"
        )
    return grid


def _long_enough(ticks: int, settings: Settings) -> None:
    """Raises UserError if no source has the ticks of the longest span that the limits are for."""
    needed = tracker.spans(settings.ticks)[-1].ticks
    if ticks < needed:
        raise UserError(
            f"continuity_s={settings.continuity_s:g} needs a source of at least "
            f"{(needed + 1) * TICK} s, and the longest has {ticks} ticks of {TICK} s: give longer "
            "jobs or a shorter continuity (--continuity_s)"
        )


class _Ranges:
    """The first pass: ranges of the metrics, and windows from random machines and times."""

    def __init__(self, rng: np.random.Generator, metrics: Sequence[str] | None):
        self._rng, self._names = rng, metrics
        self._values: dict[str, list[np.ndarray]] = {}
        self._periods: dict[str, list[float]] = {}
        self._windows: list[tuple[tuple[str, ...], np.ndarray, np.ndarray]] = []
        self.machines = self.seconds = 0

    def add(self, grid: Grid) -> None:
        """Reads a source."""
        C, N, T = grid.values_CNT.shape
        self.machines, self.seconds = max(self.machines, N), self.seconds + T
        period_C = np.ones(C)
        for c, name in enumerate(grid.metrics):
            values = grid.values_CNT[c][np.isfinite(grid.values_CNT[c])]
            if not len(values):
                continue
            stride = -(-len(values) // VALUES)
            self._values.setdefault(name, []).append(values[::stride])
            period_C[c] = period_of(np.isfinite(grid.values_CNT[c]))
            self._periods.setdefault(name, []).append(period_C[c])
        at_B = self._rng.integers(0, T - WINDOW + 1, WINDOWS)
        who_B = self._rng.integers(0, N, WINDOWS)
        full_CNT = held(grid.values_CNT, period_C)
        index_BW = at_B[:, None] + np.arange(WINDOW)
        windows_BWC = full_CNT[:, who_B[:, None], index_BW].transpose(1, 2, 0)
        self._windows.append((grid.metrics, windows_BWC, np.full(WINDOWS, T)))

    def learnt(self) -> tuple[tuple[str, ...], np.ndarray, np.ndarray, np.ndarray]:
        """Returns (metrics in order, range_3C, period_C, ends of the scales (2, C))."""
        have = set(self._values)
        order = [m for m in (MINDER if self._names is None else self._names) if m in have]
        if self._names is None:
            order += sorted(have - set(order))
        if not order:
            raise UserError(f"no metric to learn: the sources have {sorted(have) or 'no value'}")
        values = [np.concatenate(self._values[name]).astype(np.float64) for name in order]
        ranges, ends = [_range(x) for x in values], [features.ends(x) for x in values]
        period_C = np.array([np.median(self._periods[name]) for name in order])
        self._order = tuple(order)
        return self._order, np.array(ranges).T, period_C, np.array(ends).T

    def windows(self, range_3C: np.ndarray) -> np.ndarray:
        """Returns x_BWC in [0, 1], NaN for holes, each source with its share of the seconds."""
        total, samples = sum(float(T[0]) for *_, T in self._windows), []
        for names, windows_BWC, T in self._windows:
            count = max(1, round(WINDOWS * float(T[0]) / total))
            picked = np.full((count, WINDOW, len(self._order)), np.nan, np.float32)
            for c, name in enumerate(self._order):
                if name in names:
                    picked[..., c] = windows_BWC[:count, :, names.index(name)]
            samples.append(picked)
        x_BWC = np.concatenate(samples)
        return features.scaled(x_BWC, *range_3C).astype(np.float32)


def _range(values: np.ndarray) -> tuple[float, float, float]:
    """Returns (low, high, bend) of a metric's values."""
    low, middle, high = np.quantile(values, (TAILS[0], 0.5, TAILS[1]))
    bend = 0.0
    if low >= 0 and middle == 0 and high > 0:  # mostly nothing: what there is when there is some
        middle = float(np.median(values[values > 0]))
    if low >= 0 and middle > 0 and high - middle > SKEWED * (middle - low):
        bend = middle / 10
        low, high = features.bent(low, bend), features.bent(high, bend)
    least = max(abs(low), abs(high)) * NARROW or 1.0  # of a metric that never changes
    if high - low < least:
        low, high = (low + high - least) / 2, (low + high + least) / 2
    return float(low), float(high), float(bend)


def _ticks(
    model: LstmVaeConfig,
    vae: Any,
    range_3C: np.ndarray,
    period_C: np.ndarray,
    names: tuple[str, ...],
    grid: Grid,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns y_HFNJ of a source's ticks: levels and residuals; spreads and lags (J = 1)."""
    C, N, T = len(names), len(grid.machines), grid.values_CNT.shape[2]
    values = np.full((C, N, T), np.nan, np.float32)
    for c, name in enumerate(names):
        if name in grid.metrics:
            values[c] = grid.values_CNT[grid.metrics.index(name)]
    values = held(values, period_C)
    first = -grid.start % TICK
    x_CNT = features.scaled(values, *range_3C[:, :, None, None].astype(np.float32))
    levels, courses, state = [], [], tracker.State()
    for at in range(first, T - TICK + 1, TICK):
        during = slice(at, at + TICK)
        levels.append(features.of_tick(model, vae, range_3C, values[..., during]))
        y_FN, state_S = tracker.of_tick(x_CNT[..., during])
        is_usual, _ = state.see(state_S)
        courses.append(np.where(is_usual, y_FN, np.nan)[..., None])
    return np.stack(levels), np.stack(courses)


def _quiet(function: Callable) -> Callable:
    """Returns the function with every RuntimeWarning silenced while it runs.

    NumPy gives one for each metric or machine without a value, whose median or mean is then NaN, as
    intended. Its warnings of an overflow or a division by 0 are silenced as well.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return function(*args)

    return call


@_quiet
def _spreads(
    ticks: Sequence[np.ndarray], least_F: np.ndarray, usual_F: np.ndarray, levels: int
) -> Prior:
    """Returns (noise_F, offset_F, slope_F) of all sources.

    least_F: noise that a channel has at least. usual_F: slopes where the job's state did not vary.
    """
    middles = [np.nanmedian(y_HFNJ, (2, 3)) for y_HFNJ in ticks]  # (H, F)
    noise, rare, offsets, slopes = [], [], [], []
    for y_HFNJ, middle_HF in zip(ticks, middles, strict=True):
        apart_HFN = np.nanmean(y_HFNJ - np.nanmedian(y_HFNJ, 2, keepdims=True), 3)
        offset_FN = np.nanmedian(apart_HFN, 0)
        rest_HFN = apart_HFN - offset_FN
        noise.append(np.nanmedian(np.abs(rest_HFN), 0))
        rare.append(np.nanquantile(np.abs(rest_HFN), SPARSE[0], axis=0))
        offsets.append(offset_FN)
        u_HF = middle_HF - np.nanmedian(middle_HF, 0)
        power_F = np.nanmean(u_HF**2, 0)
        slope_FN = np.nanmean(u_HF[..., None] * rest_HFN, 0) / np.maximum(power_F, 1e-9)[:, None]
        slopes.append(np.where((power_F > 0.03**2)[:, None], slope_FN, np.nan))
    noise_F = np.fmax(1.4826 * np.nanmedian(np.concatenate(noise, 1), 1), least_F)
    rare_F = np.nanmedian(np.concatenate(rare, 1), 1) / 1.645  # of normal noise it is noise_F
    noise_F = np.where(rare_F > SPARSE[1] * noise_F, rare_F, noise_F)
    offset_F = np.fmax(_spread(np.concatenate(offsets, 1)), 2 * noise_F)
    slope_F = np.fmax(_spread(np.concatenate(slopes, 1)), 0.1)
    slope_F = np.where(np.isfinite(slope_F), slope_F, usual_F)
    return np.nan_to_num(noise_F), np.nan_to_num(offset_F), np.nan_to_num(slope_F)


@_quiet
def _spread(x_FN: np.ndarray) -> np.ndarray:
    """Returns a standard deviation, (F,), that covers one machine in fifty with its own role."""
    absolute_FN = np.abs(x_FN)
    usual_F = 1.4826 * np.nanmedian(absolute_FN, 1)
    far_F = np.nanquantile(absolute_FN, 0.99, axis=1) / 2
    return np.fmax(usual_F, far_F)


def _scores(prior: tracker.Prior, y_HFNJ: np.ndarray, only_more: bool) -> np.ndarray:
    """Returns the scores of a source's ticks, (F, N, H)."""
    N = y_HFNJ.shape[2]
    tracks, nobody, scores = tracker.begin(prior, N), np.zeros(N, bool), []
    for y_FNJ in y_HFNJ:
        if only_more:
            tracks, score, *_ = tracker.advance_course(prior, tracks, y_FNJ[..., 0], nobody, nobody)
        else:
            tracks, score, *_ = tracker.advance(prior, tracks, jnp.asarray(y_FNJ), nobody, nobody)
        scores.append(np.asarray(score))
    return np.stack(scores, -1)


def _limits(
    prior: Prior, ticks: Sequence[np.ndarray], s: Settings, levels: int, only_more: bool = False
) -> Limits:
    """Returns limits that healthy machines do not reach.

    An observation is the highest statistic of a machine in half an hour. The limit is a multiple of
    a percentile of these that is too low for the unlabelled faults in the sources to influence it.
    levels: channels behind which there are residuals. only_more: the ticks are spreads and lags.
    """
    arrays = tracker.Prior(*(jnp.asarray(x, jnp.float32) for x in prior))
    if only_more:
        arrays = tracker.prior(*prior)
    scores = [_scores(arrays, y_HFNJ, only_more) for y_HFNJ in ticks]
    chosen, F = tracker.spans(s.ticks), len(prior[0])
    shape = len(tracker.AGES), len(chosen)
    inverse, limit = np.zeros((*shape, F, F)), np.zeros((*shape, F + 1))
    for a, p in np.ndindex(shape):
        span = chosen[p]
        starts = [_starts(a, span, x.shape[-1]) for x in scores]
        averages = [
            tracker.average(x[..., at : at + span.ticks]).T
            for x, ats in zip(scores, starts, strict=True)
            for at in ats[:: max(1, span.ticks // 2)]
        ]
        average_XF = np.concatenate([np.zeros((0, F)), *averages])
        if not len(average_XF):  # the sources are too short: as the shorter past
            inverse[a, p], limit[a, p] = inverse[a - 1, p], limit[a - 1, p]
            continue
        inverse[a, p] = np.linalg.inv(tracker.covariance(average_XF, levels))
        highest = [
            _highest(x, ats, inverse[a, p], span) for x, ats in zip(scores, starts, strict=True)
        ]
        limit[a, p] = _tail(np.concatenate([h for hs in highest for h in hs], 1), levels)
    return Limits(inverse, limit)


def _starts(age: int, span: tracker.Span, H: int) -> list[int]:
    """Returns the first ticks of spans whose machines have a past of this age (index of AGES)."""
    ages = (*tracker.AGES, H)
    return list(range(ages[age], min(ages[age + 1], H - span.ticks + 1)))


def _highest(
    scores_FNH: np.ndarray, starts: list[int], inverse_FF: np.ndarray, span: tracker.Span
) -> list[np.ndarray]:
    """Returns the highest statistics of each block of BLOCK spans: a list of (G, N)."""
    maxima = []
    for first in range(0, len(starts), BLOCK):
        block = starts[first : first + BLOCK]
        parts = [scores_FNH[..., at : at + span.ticks] for at in block]
        each = [tracker.statistics(x, tracker.average(x), inverse_FF, span) for x in parts]
        maxima.append(np.max(each, 0))
    return maxima


def _tail(highest_GX: np.ndarray, levels: int) -> np.ndarray:
    """Returns the limit of each statistic, (G,), from the highest statistics (G, X).

    levels: channels behind which there are residuals.
    """
    X, F = highest_GX.shape[1], len(highest_GX) - 1
    least_G = np.append(np.full(F, LEAST_ALONE), np.sqrt(F) + LEAST_MORE)
    least_G[levels:F] *= ODD  # residuals
    high_G = MARGIN * np.quantile(highest_GX, HIGH, axis=1)
    return np.maximum(high_G, least_G * (1 + 1.5 / np.sqrt(X)))
