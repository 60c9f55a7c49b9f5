"""Memory of an emulated GPU: arrays that know who touched them last, and report races.

Every access is an event (component, count) of a vector clock, and comes with what its thread knows.
An access that conflicts with one that its thread does not know of is a race, however the two were
interleaved in this run. What a clock knows has three rows, for there are three ways to see memory:

    GENERIC  loads and stores of a thread
    SHARED   shared memory, by TMA and wgmma: stores of a thread are seen after `commit_smem`
    GLOBAL   global memory, by TMA: what a flag announced is seen after the fence

Memory begins as NaN. Offsets of swizzled tiles and alignment are not modelled.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

GENERIC, SHARED, GLOBAL = range(3)
Box = tuple[tuple[int, int], ...]  # first and past the last, of each dimension; bytes of shared
Event = tuple[int, int]  # component of the clocks, count
Lost = list[Box] | None  # what a load that may race brings as NaN; None: it may not race


class Fault(AssertionError):
    """What a kernel may not do."""


class Memory:
    """An array in global memory, or the shared memory of a thread block.

    machine: loads and stores for a thread. owner: its rank. number: among the arrays of a rank; -1:
    shared. fixed: nobody may write it.
    """

    def __init__(self, machine: Any, data: np.ndarray, owner: int, number: int, fixed: bool):
        """Is empty of accesses."""
        self.machine, self.data, self.owner = machine, data, owner
        self.number, self.fixed = number, fixed
        self.name = f"array {number}" if number >= 0 else "shared memory"
        self.ended = False
        self.foreign: dict[int, int] = {}  # the last event of each component of other ranks
        self.reads: dict[int | None, dict[tuple[Box, int], tuple[int, Lost]]] = {}
        self.writes: dict[int | None, dict[Box, Event]] = {}

    def ref(self) -> "Ref":
        """All of it."""
        return Ref(self, self.data, [0] * self.data.ndim, self.data.shape, range(self.data.ndim), 0)

    def read(self, box: Box, event: Event, knows: np.ndarray, view: int, rank: int, lost: Lost):
        """Notes that a part is read. view: how memory is seen. rank: of the thread that reads.

        lost: is given what a write races with, where that is allowed. Raises: Fault for a race,
        and for memory of a rank that has ended.
        """
        self._reach(event, rank)
        if self.fixed:
            return
        place = _page(box)
        for writes in self._near(self.writes, place):
            for other, (component, count) in writes.items():
                if knows[view, component] < count and _overlap(box, other):
                    if lost is None:
                        raise Fault(f"race: {self.name}{box} is read, {other} is written")
                    lost.append(other)
        self.reads.setdefault(place, {})[box, event[0]] = event[1], lost

    def write(self, box: Box, event: Event, knows: np.ndarray, view: int, rank: int):
        """Notes that a part is written, as `read`."""
        self._reach(event, rank)
        if self.fixed:
            raise Fault(f"{self.name} is written")
        place, first = _page(box), True
        for writes in self._near(self.writes, place):
            for other, (component, count) in list(writes.items()):
                if _overlap(box, other):
                    first = False
                    if knows[view, component] < count:
                        raise Fault(f"race: {self.name}{box} is written, {other} is as well")
                    if _inside(other, box):
                        del writes[other]
        for reads in self._near(self.reads, place):
            for (other, component), (count, lost) in list(reads.items()):
                if _overlap(box, other):
                    if knows[GENERIC, component] < count:
                        # What was read before the first write is NaN anyway.
                        if lost is None or not first:
                            raise Fault(f"race: {self.name}{box} is written, {other} is read")
                        lost.append(box)
                    elif _inside(other, box):
                        del reads[other, component]
        self.writes.setdefault(place, {})[box] = event

    def _reach(self, event: Event, rank: int):
        if rank != self.owner:
            if self.ended:
                raise Fault(f"{self.name} of rank {self.owner} is used after that rank has ended")
            self.foreign[event[0]] = max(self.foreign.get(event[0], 0), event[1])

    def _near(self, notes: dict[int | None, Any], place: int | None) -> Iterator[Any]:
        """Those of a page and of several; of all pages where `place` is None."""
        if place is None:
            yield from notes.values()
            return
        for key in (place, None):
            if key in notes:
                yield notes[key]

    def end(self, knows: np.ndarray):
        """Its rank has ended: others' accesses must be over by then, in any order of events."""
        self.ended = True
        for component, count in self.foreign.items():
            if knows[GENERIC, component] < count:
                raise Fault(f"{self.name} of rank {self.owner} may be used after that rank's end")


def _page(box: Box) -> int | None:
    """The page that all of a box is in; None: it is of several, or of shared memory."""
    return box[0][0] if len(box) > 1 and box[0][1] - box[0][0] == 1 else None


def _overlap(a: Box, b: Box) -> bool:
    return all(
        first < other_last and other_first < last
        for (first, last), (other_first, other_last) in zip(a, b, strict=True)
    )


def _inside(a: Box, b: Box) -> bool:
    return all(
        other_first <= first and last <= other_last
        for (first, last), (other_first, other_last) in zip(a, b, strict=True)
    )


class Ref:
    """A part of an array: what a kernel is given and slices with `at`.

    data: the array. first, shape: of the part, in all dimensions of data. dimensions: those
    that are not indexed by a number. offset: in bytes, of data in shared memory.
    """

    def __init__(self, memory, data, first, shape, dimensions, offset, turned=False):
        """Is a part of `data`, which is a view of the memory's."""
        self.memory, self.data, self.first, self.sizes = memory, data, list(first), list(shape)
        self.dimensions, self.offset, self.turned = list(dimensions), offset, turned

    @property
    def shape(self):
        """Of what is kept."""
        shape = tuple(self.sizes[d] for d in self.dimensions)
        return shape[::-1] if self.turned else shape

    @property
    def dtype(self):
        """Of an element."""
        return self.data.dtype

    @property
    def at(self):
        """Parts of it: ref.at[index]."""
        return _At(self)

    @property
    def T(self):  # noqa: N802
        """Its transpose, for wgmma."""
        parts = self.memory, self.data, self.first, self.sizes, self.dimensions, self.offset
        return Ref(*parts, turned=not self.turned)

    def part(self, key: Any) -> "Ref":
        """ref.at[key]; a slice may end past the array, where TMA reads 0 and writes nothing."""
        first, sizes, dimensions = list(self.first), list(self.sizes), list(self.dimensions)
        keys = () if key is Ellipsis else key if isinstance(key, tuple) else (key,)
        for d, k in zip(self.dimensions, keys, strict=False):
            uncut = self.sizes[d] == self.data.shape[d]
            if isinstance(k, slice):
                start = 0 if k.start is None else int(k.start)
                stop = self.sizes[d] if k.stop is None else int(k.stop)
                past = stop > self.sizes[d] and (self.memory.number < 0 or not uncut)
                first[d], sizes[d] = first[d] + start, stop - start
            else:
                start, past = int(k), int(k) >= self.sizes[d]
                first[d], sizes[d] = first[d] + start, 1
                dimensions.remove(d)
            if start < 0 or past:
                raise Fault(f"{self.memory.name}: index {key} of {self.shape}")
        return Ref(self.memory, self.data, first, sizes, dimensions, self.offset)

    def on(self, memory: Memory) -> "Ref":
        """The same part of another block's shared memory, or of another rank's array."""
        data = memory.data
        if memory.number < 0:
            width = math.prod(self.data.shape) * self.data.itemsize
            data = data[self.offset : self.offset + width].view(self.data.dtype)
            data = data.reshape(self.data.shape)
        return Ref(memory, data, self.first, self.sizes, self.dimensions, self.offset, self.turned)

    @property
    def box(self) -> Box:
        """What it covers."""
        limits = [
            (min(f, n), min(f + s, n))
            for f, s, n in zip(self.first, self.sizes, self.data.shape, strict=True)
        ]
        if self.memory.number >= 0:
            return tuple(limits)
        corner, last = (self._byte([limit[i] - i for limit in limits]) for i in (0, 1))
        size = math.prod(self.sizes) * self.data.itemsize
        if last + self.data.itemsize - corner != size:
            raise Fault("a part of shared memory that is not contiguous")
        return ((corner, corner + size),)

    def _byte(self, place: list[int]) -> int:
        return self.offset + sum(
            p * stride for p, stride in zip(place, self.data.strides, strict=True)
        )

    @property
    def within(self) -> bool:
        """Whether all of it is in the array."""
        return all(
            f + s <= n for f, s, n in zip(self.first, self.sizes, self.data.shape, strict=True)
        )

    def _where(self) -> tuple[slice, ...]:
        return tuple(slice(f, f + s) for f, s in zip(self.first, self.sizes, strict=True))

    def read(self, lost: Lost = None) -> np.ndarray:
        """What it holds, 0 past the array, NaN where it is lost."""
        values = self.data[self._where()]
        for box in lost or ():
            values = values.copy()
            limits = zip(box, self.first, strict=True)
            part = tuple(slice(max(low - f, 0), max(high - f, 0)) for (low, high), f in limits)
            values[part] = np.nan
        if list(values.shape) != self.sizes:
            missing = [(0, s - n) for s, n in zip(self.sizes, values.shape, strict=True)]
            values = np.pad(values, missing)
        values = values.reshape([self.sizes[d] for d in self.dimensions])
        return values.T.copy() if self.turned else values.copy()

    def write(self, value: np.ndarray):
        """Sets what lies in the array."""
        target = self.data[self._where()]
        value = np.asarray(value).reshape(self.sizes)
        target[...] = value[tuple(slice(0, n) for n in target.shape)]

    def __getitem__(self, key):
        """A load of this thread's; see tests/kernel_threads.py."""
        return self.memory.machine.load(self.part(key))

    def __setitem__(self, key, value):
        """A store of this thread's."""
        self.memory.machine.store(self.part(key), value)


class _At:
    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, key):
        return self.ref.part(key)
