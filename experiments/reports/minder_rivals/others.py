"""Rivals that are no variant of the paper: Mahalanobis, isolation forest, NVRx, Greyhound.

Each returns scores of machines by window, (M streams, J windows, N machines), and says what was
assumed where its source looks at other data than per-second metrics.

Legend: C metrics, N machines, J windows of 8 s, H ticks of 24 s, D numbers, R run lengths.
"""

from collections.abc import Sequence

import numpy as np

from experiments.reports.minder_rivals import forest, integrated
from experiments.reports.minder_rivals.view import View

Learnt = dict[str, np.ndarray]
TICK = 3  # windows
POINTS = 50_000  # to learn from


def apart(view: View) -> np.ndarray:
    """Returns of each window the mean and the logarithm of the spread of each metric, less the
    median machine's, (J, N, 2 C)."""
    if "apart" not in view.kept:
        x_CNJW = view.x_CNJW
        spread = np.log(x_CNJW.std(3) + 1e-2)
        y_DNJ = np.concatenate([x_CNJW.mean(3), spread])
        y_DNJ = np.where(view.there_JN.T, y_DNJ, np.nan)
        y_DNJ = y_DNJ - np.nanmedian(y_DNJ, 1, keepdims=True)
        view.kept["apart"] = np.nan_to_num(y_DNJ.transpose(2, 1, 0)).astype(np.float32)
    return view.kept["apart"]


# ---- Mahalanobis distance (the paper's baseline)


def learn_covariance(views: Sequence[View], seed: int, steps: int) -> Learnt:
    """Returns the inverse covariance of healthy points. Assumed: means and spreads of windows are
    the features, as the paper's are only said to be statistics of windows; what is beyond 4 robust
    standard deviations is cut off, because the jobs have faults in them."""
    y_XD = sample([apart(v).reshape(-1, apart(v).shape[2]) for v in views], seed)
    sigma_D = 1.4826 * np.median(np.abs(y_XD), 0) + 1e-3
    cut_XD = np.clip(y_XD / sigma_D, -4, 4)
    inverse = np.linalg.inv(cut_XD.T @ cut_XD / len(cut_XD) + 1e-3 * np.eye(len(sigma_D)))
    return {"inverse": inverse / sigma_D / sigma_D[:, None]}


def mahalanobis(view: View, learnt: Learnt) -> np.ndarray:
    """Returns the length of each machine's point, one stream."""
    y_JND = apart(view).astype(np.float64)
    square = np.einsum("jnd,de,jne->jn", y_JND, learnt["inverse"], y_JND, optimize=True)
    return np.sqrt(np.maximum(square, 0))[None]


# ---- isolation forest


def points(view: View) -> np.ndarray:
    """Returns of each tick the means of the metrics, less the median machine's and less the
    machine's own median of all ticks before, (H, N, 2 C)."""
    y_JND = apart(view)[..., : len(view.x_CNJW)]
    H = y_JND.shape[0] // TICK
    y_HND = y_JND[: H * TICK].reshape(H, TICK, *y_JND.shape[1:]).mean(1)
    own_HND = y_HND - np.stack([np.median(y_HND[: max(h, 1)], 0) for h in range(H)])
    return np.concatenate([y_HND, own_HND], 2)


def learn_forest(views: Sequence[View], seed: int, steps: int) -> Learnt:
    """Returns a forest of the points of healthy machines, and of the few faulty ones."""
    found = [points(v) for v in views]
    return forest.grow(sample([p.reshape(-1, p.shape[2]) for p in found], seed), seed)


def isolation(view: View, learnt: Learnt) -> np.ndarray:
    """Returns each machine's score, one stream; a window has that of its tick."""
    p_HND = points(view)
    score_HN = forest.score(learnt, p_HND.reshape(-1, p_HND.shape[2])).reshape(p_HND.shape[:2])
    return by_window(score_HN[None], view.windows)


# ---- NVRx: relative and individual scores


def nvrx(view: View, _: Learnt, kind: str) -> np.ndarray:
    """Returns 1 - score of NVIDIA's resiliency extension (attribution/straggler/reporting.py): the
    reference's median time over the machine's, averaged over kernels; a straggler is below 0.75.

    relative: the reference is the best machine; individual: the best that the machine had so far.
    Assumed: there are no kernel times, so work done in a second stands for its inverse: means of
    duty cycle, power, graphics and tensor activity and NVLink traffic, each against its reference,
    with equal weights; the median is of four minutes (10 ticks), reported every tick.
    """
    wanted = [c for c, m in enumerate(view.base.metrics) if m.startswith(("gpu_", "nvlink"))]
    raw_CNT = view.raw_CNT[wanted]
    C, N, T = raw_CNT.shape
    H = T // (8 * TICK)
    parts = raw_CNT[..., : H * 8 * TICK].reshape(C, N, H, 8 * TICK)
    with np.errstate(invalid="ignore"):
        seen = np.isfinite(parts).sum(3)
        mean_CNH = np.where(seen > 0, np.nansum(parts, 3) / np.maximum(seen, 1), np.nan)
    lost = np.full((1, H, N), 0.0)
    best_CN = np.full((C, N), 1e-9)
    for h in range(9, H):
        part = mean_CNH[..., h - 9 : h + 1]
        there_CN = np.isfinite(part).sum(2) >= 5
        median_CN = np.where(there_CN, _median(part), np.nan)
        if kind == "relative":
            reference = np.nanmax(np.where(there_CN, median_CN, 1e-9), 1, keepdims=True)
        else:
            best_CN = np.fmax(best_CN, median_CN)
            reference = best_CN
        score_CN = median_CN / np.maximum(reference, 1e-9)
        count_N = np.isfinite(score_CN).sum(0)
        lost[0, h] = np.where(count_N > 0, 1 - np.nansum(score_CN, 0) / np.maximum(count_N, 1), 0)
    return by_window(lost, view.windows)


# ---- Greyhound (ATC 2025; FALCON, arXiv 2410.12588)


def greyhound(view: View, _: Learnt, hazard: float = 1 / 100, least: int = 4) -> np.ndarray:
    """Returns how far each metric of a machine moved at its last change point, (C, J, N).

    Greyhound finds change points of iteration times with Bayesian online change-point detection
    (Adams and MacKay 2007) and confirms one where the means before and after differ by more than
    10 %. Assumed: the series are, for each machine and metric, the means of 24 s less the median
    machine's, as a share of the metric's range, because no iteration times are among the metrics
    and those of synchronous training are the same on all machines; the 10 % are the threshold that
    is tuned; a change counts once it has lasted `least` ticks.
    """
    y_JNC = apart(view)[..., : len(view.x_CNJW)]
    H = y_JNC.shape[0] // TICK
    y_HS = y_JNC[: H * TICK].reshape(H, TICK, -1).mean(1)
    moved_HS = changes(y_HS, hazard, least)
    N, C = y_JNC.shape[1:]
    return by_window(moved_HS.reshape(H, N, C).transpose(2, 0, 1), view.windows)


def changes(y_HS: np.ndarray, hazard: float, least: int) -> np.ndarray:
    """Returns |mean since the last change point - mean before it| of each series, by tick; 0 where
    there was none, or not for `least` ticks.

    The run length is the likeliest of its posterior under a normal model with unknown mean and
    variance (prior: mean 0, two observations' worth of the usual spread).
    """
    H, S = y_HS.shape
    spread_S = 1.4826 * np.median(np.abs(np.diff(y_HS, axis=0)), 0) / 2**0.5 + 5e-3
    y_HS = y_HS / spread_S
    sums_HS = np.concatenate([np.zeros((1, S)), np.cumsum(y_HS, 0)])
    log_RS = np.full((H + 1, S), -np.inf)
    log_RS[0] = 0.0
    mean_RS, kappa, alpha = np.zeros((H + 1, S)), 0.1 + np.arange(H + 1.0), 1 + np.arange(H + 1) / 2
    beta_RS = np.ones((H + 1, S))
    moved_HS = np.zeros((H, S))
    for h in range(H):
        n = h + 1
        scale_RS = beta_RS[:n] * ((kappa[:n] + 1) / (alpha[:n] * kappa[:n]))[:, None]
        t_RS = _student(y_HS[h] - mean_RS[:n], 2 * alpha[:n, None], scale_RS)
        grown = log_RS[:n] + t_RS + np.log1p(-hazard)
        most = grown.max(0)
        anew = most + np.log(np.exp(grown - most).sum(0)) + np.log(hazard / (1 - hazard))
        log_RS[1 : n + 1], log_RS[0] = grown, anew
        log_RS[: n + 1] -= log_RS[: n + 1].max(0)
        error = y_HS[h] - mean_RS[:n]
        beta_RS[1 : n + 1] = beta_RS[:n] + (kappa[:n] / (2 * (kappa[:n] + 1)))[:, None] * error**2
        mean_RS[1 : n + 1] = mean_RS[:n] + error / (kappa[:n, None] + 1)
        mean_RS[0], beta_RS[0] = 0.0, 1.0
        run_S = log_RS[: n + 1].argmax(0)
        begin_S = n - run_S
        after = (sums_HS[n] - np.take_along_axis(sums_HS, begin_S[None], 0)[0]) / np.maximum(
            run_S, 1
        )
        from_S = np.maximum(begin_S - 10, 0)
        before = np.take_along_axis(sums_HS, begin_S[None], 0) - np.take_along_axis(
            sums_HS, from_S[None], 0
        )
        before = before[0] / np.maximum(begin_S - from_S, 1)
        counts = (run_S >= least) & (begin_S >= 2)
        moved_HS[h] = np.where(counts, np.abs(after - before), 0.0) * spread_S
    return moved_HS


def _student(x: np.ndarray, freedom: np.ndarray, square: np.ndarray) -> np.ndarray:
    """Returns the logarithm of Student's density with a squared scale."""
    from scipy.special import gammaln

    constant = gammaln((freedom + 1) / 2) - gammaln(freedom / 2) - 0.5 * np.log(np.pi * freedom)
    return constant - 0.5 * np.log(square) - (freedom + 1) / 2 * np.log1p(x**2 / freedom / square)


# ---- shared


def learn_integrated(views: Sequence[View], seed: int, steps: int) -> Learnt:
    """Returns INT's network."""
    rows = [v.x_CNJW.transpose(1, 2, 3, 0).reshape(-1, 8, len(v.x_CNJW)) for v in views]
    return integrated.train(sample(rows, seed), seed, steps)


def sample(rows: Sequence[np.ndarray], seed: int) -> np.ndarray:
    """Returns rows of all sources, POINTS at most, each source with its share."""
    every = np.concatenate(rows)
    rng = np.random.default_rng(seed)
    return every[np.sort(rng.choice(len(every), min(POINTS, len(every)), replace=False))]


def by_window(score_MHN: np.ndarray, windows: int) -> np.ndarray:
    """Returns the scores of ticks by window: a tick is known at its last window."""
    M, H, N = score_MHN.shape
    found = np.zeros((M, windows, N), score_MHN.dtype)
    for j in range(TICK - 1, windows):
        found[:, j] = score_MHN[:, min((j + 1) // TICK, H) - 1]
    return found


def _median(part_CNH: np.ndarray) -> np.ndarray:
    """Median over ticks of what is not NaN; 0 where nothing is."""
    nothing = ~np.isfinite(part_CNH).any(2, keepdims=True)
    return np.nanmedian(np.where(nothing, 0, part_CNH), 2)
