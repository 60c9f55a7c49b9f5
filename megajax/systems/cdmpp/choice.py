"""Chooses which programs to time on a new device, by k-means (CDMPP, arXiv 2311.09690)."""

import numpy as np
from scipy.cluster.vq import kmeans2

from megajax.core.errors import UserError
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.physics import LOGS, programs

_MOST = 20_000  # largest number of rows on which the clusters are computed


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
    centres, _ = kmeans2(points[some], min(n, len(some)), minit="++", rng=rng, missing="warn")
    distance = ((points[:, None] - centres[None]) ** 2).sum(-1)
    owner = distance.argmin(1)
    order = np.argsort(-np.bincount(owner, minlength=len(centres)), kind="stable")
    chosen: list[int] = []
    while len(chosen) < n:
        before = len(chosen)
        for cluster in order:
            rows = np.setdiff1d(np.flatnonzero(owner == cluster), chosen)
            if len(rows) and len(chosen) < n:
                chosen.append(int(rows[distance[rows, cluster].argmin()]))
        if len(chosen) == before:
            raise AssertionError("every row belongs to a cluster")
    return np.sort(np.array(chosen))
