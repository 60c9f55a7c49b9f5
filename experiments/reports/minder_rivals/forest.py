"""Isolation forest (Liu, Ting, Zhou 2008) in NumPy: rare points are cut off after few cuts.

Trees are complete binary trees in arrays, so that all points walk down a tree together. Points are
a machine in 24 s: of each metric how far its mean lies from the median machine's, and from its own
mean of the minutes before.

Legend: X points, D numbers of a point, T trees, K nodes of a tree.
"""

import numpy as np

Forest = dict[str, np.ndarray]
TREES, SAMPLE, DEPTH = 64, 256, 8  # the paper's 256 points a tree, and so 8 levels
EULER = 0.5772156649


def average_path(points: np.ndarray) -> np.ndarray:
    """Returns the mean depth of an unsuccessful search among so many points."""
    points = np.asarray(points, np.float64)
    harmonic = np.log(np.maximum(points - 1, 1)) + EULER
    return np.where(points > 2, 2 * harmonic - 2 * (points - 1) / np.maximum(points, 1),
                    np.where(points == 2, 1.0, 0.0))  # fmt: skip


def grow(x_XD: np.ndarray, seed: int) -> Forest:
    """Returns a forest: feature_TK, cut_TK, and depth_TK, the path length of a point that ends in a
    node (NaN: it goes on)."""
    rng = np.random.default_rng(seed)
    K = 2 ** (DEPTH + 1) - 1
    feature, cut = np.zeros((TREES, K), np.int32), np.zeros((TREES, K), np.float32)
    depth = np.full((TREES, K), np.nan, np.float32)
    for t in range(TREES):
        sample = x_XD[rng.choice(len(x_XD), min(SAMPLE, len(x_XD)), replace=False)]
        _split(rng, sample, 0, 0, feature[t], cut[t], depth[t])
    return {"feature": feature, "cut": cut, "depth": depth, "points": np.array(len(sample))}


def _split(
    rng: np.random.Generator, x_XD: np.ndarray, node: int, level: int,
    feature: np.ndarray, cut: np.ndarray, depth: np.ndarray,
) -> None:  # fmt: skip
    low, high = (x_XD.min(0), x_XD.max(0)) if len(x_XD) else (np.zeros(1), np.zeros(1))
    can = np.flatnonzero(high > low)
    if level == DEPTH or len(x_XD) <= 1 or not len(can):
        depth[node] = level + average_path(np.array(len(x_XD)))
        return
    d = feature[node] = rng.choice(can)
    cut[node] = np.float32(rng.uniform(low[d], high[d]))
    right = x_XD[:, d] >= cut[node]
    _split(rng, x_XD[~right], 2 * node + 1, level + 1, feature, cut, depth)
    _split(rng, x_XD[right], 2 * node + 2, level + 1, feature, cut, depth)


def score(forest: Forest, x_XD: np.ndarray) -> np.ndarray:
    """Returns 2 ** (-mean path / average path) of each point: towards 1 is rare, 0.5 is usual."""
    total_X = np.zeros(len(x_XD), np.float32)
    place_X = np.arange(len(x_XD))
    for feature_K, cut_K, depth_K in zip(
        forest["feature"], forest["cut"], forest["depth"], strict=True
    ):
        node_X = np.zeros(len(x_XD), np.int32)
        for _ in range(DEPTH):
            ends_X = np.isfinite(depth_K[node_X])
            right_X = x_XD[place_X, feature_K[node_X]] >= cut_K[node_X]
            node_X = np.where(ends_X, node_X, 2 * node_X + 1 + right_X)
        total_X += depth_K[node_X]
    usual = float(average_path(forest["points"]))
    return 2.0 ** (-total_X / len(forest["depth"]) / usual)
