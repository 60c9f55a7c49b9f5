"""Shards as N-dimensional boxes: what every program that moves arrays between layouts counts with.

A shard of a global array is a box [start, stop). Resharding is intersection: the copies that make
the new boxes from those that exist. A piece [begin, end) of a flattened array (a ZeRO bucket) is
no box, but a few of them, at most 2 (n - 1) + 1 for n dimensions, so it needs no communication to
be stored (ByteCheckpoint section 3, irregular tensors). No jax: a planner and a driver use it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

Index = tuple[slice, ...]


@dataclass(frozen=True, order=True)
class Box:
    """The elements with start[d] <= i[d] < stop[d]; without dimensions: one scalar."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def of(cls, index: Index, shape: Sequence[int]) -> "Box":
        """Returns the box that an index of slices, as jax gives them, takes from a shape."""
        spans = [s.indices(n) for s, n in zip(index, shape, strict=True)]
        return cls(tuple(a for a, _, _ in spans), tuple(max(a, b) for a, b, _ in spans))

    @classmethod
    def of_shape(cls, shape: Sequence[int]) -> "Box":
        """Returns the box that is all of an array."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Elements in all."""
        return math.prod(self.shape)

    def index(self, origin: "Box | None" = None) -> Index:
        """Returns the slices of this box in the whole array, or in the array held by `origin`."""
        zero = (0,) * len(self.start) if origin is None else origin.start
        spans = zip(self.start, self.stop, zero, strict=True)
        return tuple(slice(a - z, b - z) for a, b, z in spans)

    def __and__(self, other: "Box") -> "Box | None":
        """Returns the common box, or None when there is not one element in common."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, stop)


@dataclass(frozen=True)
class Copy:
    """Box `box` goes from the source with this number to the target with that one."""

    source: int
    target: int
    box: Box


def intersect(sources: Sequence[Box], targets: Sequence[Box]) -> list[Copy]:
    """Returns the copies between two lists of boxes of one array, by target, then by source.

    Where sources overlap (replicas), a target is given the same elements by each of them.
    """
    if not sources or not targets:
        return []
    rank = len(sources[0].start)
    edges = [
        np.array([side(b) for b in boxes], np.int64).reshape(len(boxes), rank)
        for boxes in (sources, targets)
        for side in (lambda b: b.start, lambda b: b.stop)
    ]
    start = np.maximum(edges[0][None], edges[2][:, None])
    stop = np.minimum(edges[1][None], edges[3][:, None])
    return [
        Copy(int(s), int(t), Box(tuple(start[t, s].tolist()), tuple(stop[t, s].tolist())))
        for t, s in np.argwhere((start < stop).all(axis=-1))
    ]


def grid(shape: Sequence[int], ways: Sequence[int]) -> list[Box]:
    """Returns the boxes of an array cut `ways[d]` times along dimension d, in row-major order.

    Pieces are as even as they can be: where ways do not divide, the first ones have one more.
    """
    edges = [[n * k // w for k in range(w + 1)] for n, w in zip(shape, ways, strict=True)]
    return [
        Box(
            tuple(e[i] for e, i in zip(edges, place, strict=True)),
            tuple(e[i + 1] for e, i in zip(edges, place, strict=True)),
        )
        for place in np.ndindex(*ways)
    ]


def flat_boxes(begin: int, end: int, shape: Sequence[int]) -> Iterator[Box]:
    """Yields the boxes, in row-major order, of elements [begin, end) of an array laid out flat.

    Raises: ValueError when the range does not lie in the array.
    """
    if not 0 <= begin <= end <= math.prod(shape):
        raise ValueError(f"[{begin}, {end}) is not in an array of {tuple(shape)}")
    if begin == end:
        return
    if len(shape) <= 1:
        yield Box((begin,), (end,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    head = begin - first * row
    if first == last or head:  # part of a row, which is an array of one dimension less
        upto = end if first == last else (first + 1) * row
        for inner in flat_boxes(head, upto - first * row, shape[1:]):
            yield Box((first, *inner.start), (first + 1, *inner.stop))
        if first == last:
            return
        first += 1
    full = end // row
    if full > first:
        yield Box((first, *(0 for _ in shape[1:])), (full, *shape[1:]))
    if full * row < end:
        for inner in flat_boxes(0, end - full * row, shape[1:]):
            yield Box((full, *inner.start), (full + 1, *inner.stop))


class Run(NamedTuple):
    """Rows that follow one another in both of two orders: `count` from `place`, from `source`."""

    place: int
    source: int
    count: int


def runs(sources: Sequence[int]) -> list[Run]:
    """Returns the runs of a map of rows: row i is row sources[i] of another array."""
    result: list[Run] = []
    for place, source in enumerate(sources):
        last = result[-1] if result else None
        if last is not None and last.source + last.count == source:
            result[-1] = last._replace(count=last.count + 1)
        else:
            result.append(Run(place, source, 1))
    return result


def stored_rows(stored: Sequence[int], requested: Sequence[int]) -> list[int] | None:
    """Returns the stored row of each requested row; None: they are the same.

    stored, requested: orders, the model's row at each place; empty: the model's order.
    """
    if list(stored) == list(requested):
        return None
    count = len(stored) or len(requested)
    place = {int(row): i for i, row in enumerate(stored if len(stored) else range(count))}
    return [place[int(row)] for row in (requested if len(requested) else range(count))]


def targets(
    box: Box, memory: np.ndarray, rows: Sequence[int] | None
) -> Iterator[tuple[Box, np.ndarray]]:
    """Yields (a stored box, the part of `memory` that it is to be read into).

    Args: box: that memory holds. rows: the stored row of each row of the array; None: the same.
    """
    if rows is None:
        yield box, memory
        return
    for run in runs(rows[box.start[0] : box.stop[0]]):
        start = (run.source, *box.start[1:])
        stop = (run.source + run.count, *box.stop[1:])
        yield Box(start, stop), memory[run.place : run.place + run.count]
