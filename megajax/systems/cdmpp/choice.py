"""Chooses which programs to time on a new device, by k-means (CDMPP, arXiv 2311.09690)."""

import itertools
import warnings

import numpy as np
from scipy.cluster.vq import kmeans2
from scipy.spatial.distance import cdist

from megajax.core.errors import UserError
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.physics import LOGS, programs

_MOST = 20_000  # largest number of rows on which the clusters are computed
# Most clusters whose first centres are drawn apart, which takes time by the square of their number.
_SPREAD = 64
_AT_ONCE = 10_000  # rows whose distances to all centres are in memory together


def choose(dataset: Dataset, n: int, *, seed: int = 0) -> np.ndarray:
    """Returns the indices of n representative rows of a data set, ascending, int64 (n,).

    Programs are clustered by their features and kinds. Each cluster gives the row nearest to its
    centre; if more rows are needed, the largest clusters give more. Times are not used.
    Raises: UserError if n is not from 1 to the number of rows.
    """
    if not 1 <= n <= len(dataset):
        raise UserError(f"n={n} rows to profile must be from 1 to the data set's {len(dataset)}")
    inputs = programs(dataset.records).inputs_RX.astype(np.float64)
    spread = inputs.std(0)
    points = (inputs - inputs.mean(0)) / np.where(spread > 1e-6, spread, 1)
    points[:, LOGS:] /= 2  # flags and classes count less than sizes
    rng = np.random.default_rng(seed)
    some = rng.permutation(len(points))[:_MOST]
    start = "++" if n <= _SPREAD else "points"
    with warnings.catch_warnings():  # an empty cluster gives no row
        warnings.filterwarnings("ignore", "One of the clusters is empty", UserWarning)
        centres, _ = kmeans2(points[some], min(n, len(some)), minit=start, rng=rng)
    owner, distance = _nearest(points, centres)
    order = np.argsort(-np.bincount(owner, minlength=len(centres)), kind="stable")
    members = {k: np.flatnonzero(owner == k) for k in order.tolist()}
    queues = [rows[np.argsort(distance[rows], kind="stable")] for rows in members.values()]
    # Of each cluster the nearest row, then of each the next one, and so on.
    turns = itertools.chain.from_iterable(itertools.zip_longest(*queues))
    return np.sort(np.fromiter(itertools.islice((i for i in turns if i is not None), n), int))


def _nearest(points: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest centre of each point and the square of its distance, some at a time."""
    owner, least = np.zeros(len(points), int), np.zeros(len(points))
    for start in range(0, len(points), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        distance = cdist(points[part], centres, "sqeuclidean")
        owner[part], least[part] = distance.argmin(1), distance.min(1)
    return owner, least
