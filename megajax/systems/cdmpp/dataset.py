"""A data set of measured operations: a row is a record, its device and its time in seconds.

A row of unknown time has NaN seconds; a new device has only such rows before it is profiled. Files
are npz without pickles; a record that many rows share is stored once. `choose` picks the programs
of a new device that are timed first.
"""

import dataclasses
import itertools
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.cluster.hierarchy import linkage
from scipy.cluster.vq import kmeans2
from scipy.spatial.distance import cdist

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.hardware import DeviceCard
from megajax.cost.record import FEATURES, LEAF, PLACE, OpRecord, Tree
from megajax.systems.cdmpp.physics import ALIGNMENT, LOGS, programs, with_chip

VERSION = 2
_TEXTS = ("kind", "hash", "dtype", "name")
_NUMBERS = ("flops", "nbytes", "executions")


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Rows of measured operations.

    records: one a row. seconds: (rows,) float64, of one execution, NaN if unknown. devices: one
    name a row. cards: {name of a device: its card}. facts: provenance of the rows (device, date,
    commit, noise).

    Raises: UserError if the lengths differ, a device has no card, or a time is not positive.
    """

    records: Sequence[OpRecord]
    seconds: np.ndarray
    devices: Sequence[str]
    cards: Mapping[str, DeviceCard]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks that every row is complete."""
        object.__setattr__(self, "records", list(self.records))
        object.__setattr__(self, "devices", [str(name) for name in self.devices])
        object.__setattr__(self, "seconds", np.asarray(self.seconds, np.float64).reshape(-1))
        lengths = len(self.records), len(self.seconds), len(self.devices)
        if len(set(lengths)) > 1:
            counts = f"{lengths[0]}, {lengths[1]} and {lengths[2]}"
            raise UserError(f"records, seconds and devices must have one entry a row: {counts}")
        missing = sorted(set(self.devices) - set(self.cards))
        if missing:
            raise UserError(
                f"device {missing[0]} has no card; cards given: {', '.join(self.cards) or 'none'}"
            )
        wrong = np.flatnonzero(~(np.isnan(self.seconds) | (self.seconds > 0)))
        wrong = wrong if len(wrong) else np.flatnonzero(np.isinf(self.seconds))
        if len(wrong):
            raise UserError(
                f"seconds of row {wrong[0]} is {self.seconds[wrong[0]]}; a time must be positive "
                "and finite, or NaN where it is unknown"
            )

    def __len__(self) -> int:
        """Returns the number of rows."""
        return len(self.records)

    def __getitem__(self, rows: Any) -> "Dataset":
        """Returns the rows of a slice, of an array of indices or of a boolean mask."""
        index = np.arange(len(self))[rows].reshape(-1)
        names = [self.devices[i] for i in index]
        return Dataset(
            [self.records[i] for i in index],
            self.seconds[index],
            names,
            self.cards,
            self.facts,
        )

    def __add__(self, other: "Dataset") -> "Dataset":
        """Returns both data sets' rows. Raises: UserError if a device has two different cards."""
        for name in set(self.cards) & set(other.cards):
            if self.cards[name] != other.cards[name]:
                raise UserError(f"device {name} has two different cards")
        return Dataset(
            [*self.records, *other.records],
            np.concatenate([self.seconds, other.seconds]),
            [*self.devices, *other.devices],
            {**self.cards, **other.cards},
            {"parts": [dict(self.facts), dict(other.facts)]},
        )

    @property
    def labelled(self) -> "Dataset":
        """The rows that have a time."""
        return self[~np.isnan(self.seconds)]

    def of(self, *devices: str) -> "Dataset":
        """Returns the rows of these devices."""
        names = set(devices)
        return self[np.array([name in names for name in self.devices], bool)]

    def typical(self) -> "Dataset":
        """Returns the rows, each with the median time of all rows of equal structure and device.

        Instructions of equal structure take different times because the contents of the caches
        differ when they start. The features that describe an instruction's place in its program
        (record.PLACE) are replaced by their medians, too.
        """
        groups: dict[tuple[str, str], list[int]] = {}
        for row in np.flatnonzero(~np.isnan(self.seconds)).tolist():
            groups.setdefault(self._key(row), []).append(row)
        seconds = self.seconds.copy()
        middle = {key: np.median(self.seconds[rows]) for key, rows in groups.items()}
        for row in range(len(self)):
            seconds[row] = middle.get(self._key(row), np.nan)
        records = list(self.records)
        for rows in groups.values():
            typical = _typical([records[row] for row in rows])
            for row in rows:
                records[row] = typical
        return dataclasses.replace(self, records=records, seconds=seconds)

    def without_duplicates(self) -> "Dataset":
        """Returns one row for each pair of structural hash and device, with its `typical` time.

        Without this, the same structure could be in the training and in the test part of a split,
        and a predictor could answer from memory.
        """
        seen: dict[tuple[str, str], int] = {}
        for row in range(len(self)):
            seen.setdefault(self._key(row), row)
        return self.typical()[np.array(sorted(seen.values()), int)]

    def _key(self, row: int) -> tuple[str, str]:
        record = self.records[row]
        return record.hash or str(id(record)), self.devices[row]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an npz file, whole or not at all."""
        unique = list({id(record): record for record in self.records}.values())
        place = {id(record): i for i, record in enumerate(unique)}
        names = sorted(set(self.devices))
        arrays: dict[str, np.ndarray] = {
            "version": np.array(VERSION),
            "record": np.array([place[id(record)] for record in self.records], np.int64),
            "seconds": self.seconds,
            "device": np.array([names.index(name) for name in self.devices], np.int64),
            "names": np.array(names, np.str_),
            "features": np.array([r.features for r in unique]).reshape(-1, len(FEATURES)),
            "operations": np.array([len(r.tree.positions) for r in unique], np.int64),
            "leaves": _joined([r.tree.leaves for r in unique], (0, LEAF), np.float32),
            "positions": _joined([r.tree.positions for r in unique], (0,), np.int32),
            "cards": np.array(json.dumps([card_as_json(c, n) for n, c in self.cards.items()])),
            "facts": np.array(json.dumps(dict(self.facts))),
        }
        for name in _TEXTS:
            arrays[name] = np.array([getattr(r, name) for r in unique], np.str_)
        for name in _NUMBERS:
            arrays[name] = np.array([getattr(r, name) for r in unique], np.float64)
        save_arrays(path, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Dataset":
        """Returns the data set of a file that `save` wrote. Raises: UserError if it is damaged."""
        arrays = load_arrays(path, "data set")
        try:
            if int(arrays["version"]) != VERSION:
                raise UserError(
                    f"{path} has version {arrays['version']}, must be {VERSION}: measure again "
                    "with this megajax (scripts/profile_programs.py)"
                )
            if arrays["features"].size and arrays["features"].shape[1] > len(FEATURES):
                raise UserError(f"{path} has features of a newer version of megajax")
            unique = _records(arrays)
            names = [str(name) for name in arrays["names"]]
            cards = dict(card_of_json(entry) for entry in json.loads(str(arrays["cards"])))
            rows = {arrays[name].shape for name in ("record", "seconds", "device")}
            if len(rows) != 1 or len(next(iter(rows))) != 1:
                raise ValueError(f"its columns have the shapes {sorted(rows)}, not one of rows")
            if min(arrays["record"].min(initial=0), arrays["device"].min(initial=0)) < 0:
                raise ValueError("a row names a record or a device before the first")
            devices = [names[i] for i in arrays["device"]]
            if unknown := next((name for name in devices if name not in cards), None):
                raise ValueError(f"it has no card of the device {unknown!r:.60}")
            return cls(
                [unique[i] for i in arrays["record"]],
                arrays["seconds"].astype(np.float64, casting="same_kind", copy=False),
                devices,
                cards,
                json.loads(str(arrays["facts"])),
            )
        except (
            KeyError,
            IndexError,
            ValueError,
            TypeError,
            AttributeError,
            OverflowError,
        ) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"{path} is no data set of megajax, or it is damaged: {error}"
            ) from error


def _typical(records: Sequence[OpRecord]) -> OpRecord:
    """Returns the first of some records of one structure, at the median of their places."""
    if all(record is records[0] for record in records):
        return records[0]
    places = np.array([[record[name] for name in PLACE] for record in records])
    middle = np.expm1(np.median(np.log1p(places), 0))
    return records[0].within(**dict(zip(PLACE, middle.tolist(), strict=True)))


def _records(arrays: Mapping[str, np.ndarray]) -> list[OpRecord]:
    ends = np.cumsum(arrays["operations"])
    if len(ends) and (ends[-1] != len(arrays["leaves"]) or ends[-1] != len(arrays["positions"])):
        raise ValueError("the trees are incomplete")
    features = np.zeros((len(ends), len(FEATURES)))  # names that were added since are 0
    features[:, : arrays["features"].shape[1]] = arrays["features"]
    records = []
    for i, (end, count) in enumerate(zip(ends, arrays["operations"], strict=True)):
        part = slice(end - count, end)
        values: dict[str, Any] = {name: str(arrays[name][i]) for name in _TEXTS}
        values |= {name: float(arrays[name][i]) for name in _NUMBERS}
        tree = Tree(arrays["leaves"][part], arrays["positions"][part])
        records.append(OpRecord(features=features[i], tree=tree, **values))
    return records


def _joined(parts: Sequence[np.ndarray], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.concatenate([np.zeros(shape, dtype), *parts]).astype(dtype)


def card_as_json(card: DeviceCard, name: str) -> dict[str, Any]:
    """Returns a card, and the name that the rows call its device, as JSON."""
    return {"device": name, **dataclasses.asdict(card), "flops": dict(card.flops)}


def card_of_json(entry: Mapping[str, Any]) -> tuple[str, DeviceCard]:
    """Returns the name and the card that `card_as_json` wrote."""
    values = dict(entry)
    name, card = values.pop("device"), DeviceCard(**values)
    return name, card if "capability" in entry else with_chip(card, name)


def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an npz file under another name first: a reader never sees half a file."""
    os.makedirs(os.path.dirname(os.fspath(path)) or ".", exist_ok=True)
    files.write_arrays(Path(path), arrays, compress=True)


def load_arrays(path: str | os.PathLike[str], what: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an npz file. Raises: UserError if it is missing or damaged."""
    try:
        return files.read_arrays(path, f"{what} of megajax")
    except FileNotFoundError:
        raise UserError(f"{what} {path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


# ---- choice of programs
#
# Clusters choose which programs to time on a new device (CDMPP, arXiv 2311.09690).
#
# k-means alone does not find clusters that are plain to see: it ends where its first centres lead
# it, and its least sum of squares may divide a large cluster and join two small ones. So the
# clusters that lie clearly apart are looked for first, by single linkage, and each of them gives
# one row; k-means spreads the others. Single linkage is computed on a net: rows that are picked one
# after the other, each as far as possible from those before it, so that no small cluster is left
# out.


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
    # The rows as points, between which distances say how unlike the programs are.
    inputs = programs(dataset.records).inputs_RX.astype(np.float64)
    least = np.full(inputs.shape[1], _FLAG)
    least[:LOGS] = _LOG
    points = (inputs - inputs.mean(0)) / np.maximum(inputs.std(0), least)
    points[:, LOGS:] /= 2  # flags and classes count less than sizes
    points[:, ALIGNMENT] /= 4  # and what jumps between nearly equal sizes still less
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
