"""Learns from labelled faults in which order metrics decide, with a decision tree.

Source: Minder (arXiv 2411.01791, section 4.3). The feature of a metric is the largest absolute
z-score of a machine in a window. A tree that separates windows with a fault from windows without
one has the most informative metrics near its root; these come first.
The largest possible z-score grows with the number of machines. Features are divided by it, so that
jobs of different sizes share one tree.

Legend: X windows, C metrics, N machines.
"""

from collections.abc import Sequence

import numpy as np

DEPTH = 8  # (chosen) splits from the root to a leaf, at most
LEAST = 0.005  # (chosen) share of the windows that a leaf has at least


def features(levels_CNX: np.ndarray) -> np.ndarray:
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
    Args: z_XC: of `features`. fault_X: True for windows with a fault. names: of the metrics.
    """
    depth, gain = {}, dict.fromkeys(range(len(names)), 0.0)
    least = max(1, int(LEAST * len(fault_X)))
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
    whole = _impurity(np.array([fault_X.sum()], float), np.array([X], float))[0]
    best: tuple[int, float, float] | None = None
    if X < 2 * least or whole == 0:
        return None
    for c in range(z_XC.shape[1]):
        by = np.argsort(z_XC[:, c], kind="stable")
        z_X, faults_X = z_XC[by, c], np.cumsum(fault_X[by]).astype(float)
        left_X = np.arange(1.0, X + 1)
        right = _impurity(faults_X[-1] - faults_X, X - left_X)
        told_X = whole - _impurity(faults_X, left_X) - right
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
