"""Chooses which programs to time on a new device, by clusters of them (CDMPP, arXiv 2311.09690).

k-means alone does not find clusters that are plain to see: it ends where its first centres lead it,
and its least sum of squares may divide a large cluster and join two small ones. So the clusters
that lie clearly apart are looked for first, by single linkage, and each of them gives one row;
k-means spreads the others. Single linkage is computed on a net: rows that are picked one after the
other, each as far as possible from those before it, so that no small cluster is left out.
"""

import itertools
import warnings

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.cluster.vq import kmeans2
from scipy.spatial.distance import cdist

from megajax.core.errors import UserError
from megajax.systems.cdmpp.dataset import Dataset
from megajax.systems.cdmpp.physics import ALIGNMENT, LOGS, programs

_MOST = 20_000  # largest number of rows on which the clusters of k-means are computed
# Most clusters of k-means whose first centres are drawn apart, which takes time by the square of
# their number, and most clusters that are looked for by single linkage.
_SPREAD = 64
_RESTARTS = 4  # first centres that k-means is tried with
_NET = 256  # rows of the net
# A cluster is clear if its distance from all others is so many times the longest step inside it
# (chosen: rows that are uniform in a cube have no clear clusters then).
_CLEAR = 2.5
# A logarithm of a size that varies by less than _LOG, and a flag, are not stretched to the
# deviation of the others: a rare flag, or a quarter more padding, would outweigh the sizes.
_LOG, _FLAG = 1.0, 0.5
_Ways = dict[int, tuple[float, tuple[int, ...]]]
_AT_ONCE = 10_000  # rows whose distances to all centres are in memory together


def choose(dataset: Dataset, n: int, *, seed: int = 0) -> np.ndarray:
    """Returns the indices of n representative rows of a data set, ascending, int64 (n,).

    Programs are clustered by their features and kinds. Where they lie in n clusters that are
    clearly apart, of whatever sizes, one row of each is returned, and with more than n rows asked
    for at least one of each. Otherwise each cluster of k-means gives the row nearest to its centre;
    if more rows are needed, the largest clusters give more. Times are not used.
    Raises: UserError if n is not from 1 to the number of rows.
    """
    if not 1 <= n <= len(dataset):
        raise UserError(f"n={n} rows to profile must be from 1 to the data set's {len(dataset)}")
    points = _points(dataset)
    first = [_nearest_of(points, rows) for rows in _clear(points, n)]
    if len(first) == n:
        return np.sort(np.array(first, int))
    centres = _centres(points, n, np.random.default_rng(seed))
    owner, distance = _nearest(points, centres)
    order = np.argsort(-np.bincount(owner, minlength=len(centres)), kind="stable").tolist()
    queues = {k: np.flatnonzero(owner == k) for k in order}
    queues = {k: rows[np.argsort(distance[rows], kind="stable")] for k, rows in queues.items()}
    # The clear clusters' rows, then of each other cluster of k-means the nearest row, then of all
    # the next one, and so on.
    spent = set(owner[first].tolist())
    heads = [queues[k][:1] for k in order if k not in spent]
    turns = itertools.zip_longest(*(queues[k] for k in order))
    rows = itertools.chain(first, *heads, *turns)
    unique = dict.fromkeys(int(row) for row in rows if row is not None)
    return np.sort(np.fromiter(itertools.islice(unique, n), int))


def _points(dataset: Dataset) -> np.ndarray:
    """Returns the rows as points, between which distances say how unlike the programs are."""
    inputs = programs(dataset.records).inputs_RX.astype(np.float64)
    least = np.full(inputs.shape[1], _FLAG)
    least[:LOGS] = _LOG
    points = (inputs - inputs.mean(0)) / np.maximum(inputs.std(0), least)
    points[:, LOGS:] /= 2  # flags and classes count less than sizes
    points[:, ALIGNMENT] /= 4  # and what jumps between nearly equal sizes still less
    return points


def _clear(points: np.ndarray, most: int) -> list[np.ndarray]:
    """Returns the rows of each clear cluster, as many of them as there are up to `most`.

    Together they have all rows. [] if no two clusters are clear.
    """
    most = min(most, _SPREAD)
    net, owner, radius = _net(points)
    if min(most, len(net)) < 2:
        return []
    tree = linkage(points[net], "single")
    heights = [radius] * len(net) + tree[:, 2].tolist()
    above = [0.0] * len(heights)
    members: list[list[int]] = [[leaf] for leaf in range(len(net))]
    # Of each node of the tree: {number of clusters: (how clear the least clear of them is, and
    # these clusters, as nodes)}, for the best way to divide its rows.
    best: list[_Ways] = []
    for node, (left, right) in enumerate(tree[:, :2].astype(int), len(net)):
        above[left] = above[right] = heights[node]
        members.append(members[left] + members[right])
    for node in range(len(heights)):
        alone = above[node] / heights[node] if heights[node] > 0 else np.inf
        ways: _Ways = {1: (float(alone), (node,))}
        if node >= len(net):
            left, right = (best[child] for child in tree[node - len(net), :2].astype(int))
            for (i, one), (j, other) in itertools.product(left.items(), right.items()):
                least = min(one[0], other[0])
                if least >= _CLEAR and i + j <= most and least > ways.get(i + j, (0.0,))[0]:
                    ways[i + j] = least, one[1] + other[1]
        best.append(ways)
    count = max((k for k in best[-1] if k > 1), default=0)
    if not count:
        return []
    return [np.flatnonzero(np.isin(owner, members[node])) for node in best[-1][count][1]]


def _net(points: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns up to _NET rows far from each other, which of them each row is nearest to, and the
    largest distance from a row to it."""
    away = np.linalg.norm(points, axis=1)  # from the mean
    net, owner = [int(away.argmax())], np.zeros(len(points), int)
    away = cdist(points, points[net])[:, 0]
    while len(net) < _NET and away.max() > 0:
        net.append(int(away.argmax()))
        distance = cdist(points, points[net[-1:]])[:, 0]
        owner = np.where(distance < away, len(net) - 1, owner)
        away = np.minimum(distance, away)
    return np.array(net), owner, float(away.max())


def _centres(points: np.ndarray, n: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the centres of k-means, the best of some restarts where these are cheap."""
    some = points[rng.permutation(len(points))[:_MOST]]
    count = min(n, len(np.unique(some, axis=0)))
    start, restarts = ("++", _RESTARTS) if count <= _SPREAD else ("points", 1)
    tries = []
    with warnings.catch_warnings():  # an empty cluster gives no row
        warnings.filterwarnings("ignore", "One of the clusters is empty", UserWarning)
        for _ in range(restarts):
            centres, _ = kmeans2(some, count, minit=start, rng=rng)
            tries.append((_nearest(some, centres)[1].sum(), centres))
    return min(tries, key=lambda one: one[0])[1]


def _nearest_of(points: np.ndarray, rows: np.ndarray) -> int:
    """Returns which of some rows is nearest to their mean."""
    mean = points[rows].mean(0, keepdims=True)
    return int(rows[cdist(points[rows], mean)[:, 0].argmin()])


def _nearest(points: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nearest centre of each point and the square of its distance, some at a time."""
    owner, least = np.zeros(len(points), int), np.zeros(len(points))
    for start in range(0, len(points), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        distance = cdist(points[part], centres, "sqeuclidean")
        owner[part], least[part] = distance.argmin(1), distance.min(1)
    return owner, least
