"""Who saves what and who reads what: explicit plans, for real meshes and for simulated ones.

Replicated shards are cut into pieces and each piece given to the least loaded of the ranks that
hold it, the largest first (worst fit; ByteCheckpoint section 4.1 gives whole shards, which cannot
be balanced where there are fewer shards than ranks). Loading is the same problem the other way
round: of the ranks that want a shard each reads some pieces and sends them to the others, so
storage is read once (section 4.3). NumPy only: 12,288 ranks are planned on a laptop, without jax.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megajax.core.boxes import Box, Copy, grid, intersect

# Pieces a rank is given, at least, where shards may be cut: the imbalance is at most one piece.
# (chosen: 1/32 is 3 %; twice as many cost twice the time)
PIECES = 32


@dataclass(frozen=True)
class Leaf:
    """An array and how a mesh cuts it. cuts: for each dimension the mesh axes, slowest first."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    cuts: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Plan:
    """Pieces of leaves and the rank that writes, or reads, each; row i of each array is piece i.

    Attributes:
      leaves: what is planned.
      ranks: of the job.
      leaf: int32 (n,): number of the leaf.
      start, stop: int64 (n, most dimensions): the box; 0 and 1 where the leaf has none.
      rank: int32 (n,): who writes or reads it.
      copies: int32 (n,): ranks that hold or want it.
    """

    leaves: tuple[Leaf, ...]
    ranks: int
    leaf: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    rank: np.ndarray
    copies: np.ndarray

    @property
    def bytes(self) -> np.ndarray:
        """Bytes of each piece, int64 (n,)."""
        sizes = np.array([x.itemsize for x in self.leaves], np.int64)
        return (self.stop - self.start).prod(axis=1) * sizes[self.leaf]

    @property
    def bytes_per_rank(self) -> np.ndarray:
        """Bytes that each rank writes or reads, int64 (ranks,)."""
        return np.bincount(self.rank, self.bytes, self.ranks).astype(np.int64)

    @property
    def imbalance(self) -> float:
        """The fullest rank's bytes over the mean."""
        loads = self.bytes_per_rank
        return float(loads.max() / loads.mean()) if loads.any() else 1.0

    @property
    def metadata_bytes(self) -> int:
        """Bytes of an index that says of each piece: leaf, box, file, offset and length."""
        dims = np.array([len(x.shape) for x in self.leaves], np.int64)
        return int((4 + 16 * dims[self.leaf] + 4 + 8 + 8).sum()) + sum(
            len(x.name) + 8 * len(x.shape) for x in self.leaves
        )

    @property
    def broadcast_bytes(self) -> int:
        """Bytes that cross the interconnect when each piece is read once and then sent."""
        return int((self.bytes * (self.copies - 1)).sum())

    def pieces(self, rank: int) -> Iterator[tuple[Leaf, Box]]:
        """Yields what one rank writes or reads, in the order of its file."""
        for i in np.flatnonzero(self.rank == rank):
            yield self.leaves[self.leaf[i]], self.box(int(i))

    def box(self, i: int) -> Box:
        """Returns the box of piece i."""
        rank = len(self.leaves[self.leaf[i]].shape)
        return Box(tuple(self.start[i, :rank].tolist()), tuple(self.stop[i, :rank].tolist()))


def plan(leaves: Sequence[Leaf], mesh: Mapping[str, int], pieces: int = PIECES) -> Plan:
    """Returns the save plan of leaves on a mesh, or the load plan of ranks that want them so.

    mesh: {axis: size}, slowest first; rank r is place r of the mesh in row-major order.
    Raises: ValueError when a leaf names an axis twice or one that the mesh does not have.
    """
    leaves = tuple(leaves)
    ranks = math.prod(mesh.values())
    total = sum(math.prod(x.shape) * x.itemsize for x in leaves)
    largest = max(total // (ranks * pieces), 1)
    rank = max([len(x.shape) for x in leaves], default=0)
    tables = [_pieces(i, x, mesh, largest, max(rank, 1)) for i, x in enumerate(leaves)]
    leaf = np.concatenate([t.leaf for t in tables] or [np.zeros(0, np.int32)])
    start, stop = (
        np.concatenate([getattr(t, n) for t in tables] or [np.zeros((0, 1), np.int64)])
        for n in ("start", "stop")
    )
    first = np.concatenate([t.first for t in tables] or [np.zeros(0, np.int64)])
    copies = np.array([len(t.others) for t in tables], np.int32)[leaf]
    bare = Plan(leaves, ranks, leaf, start, stop, first.astype(np.int32), copies)
    chosen = _worst_fit(bare, first, [t.others for t in tables])
    return Plan(leaves, ranks, leaf, start, stop, chosen, copies)


@dataclass(frozen=True)
class _Pieces:
    """The pieces of one leaf. first + others: the ranks that hold a piece."""

    leaf: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first: np.ndarray
    others: np.ndarray


def _pieces(number: int, leaf: Leaf, mesh: Mapping[str, int], largest: int, width: int) -> _Pieces:
    used = [a for axes in leaf.cuts for a in axes]
    if len(set(used)) < len(used) or set(used) - set(mesh) or len(leaf.cuts) != len(leaf.shape):
        raise ValueError(
            f"{leaf.name} of {len(leaf.shape)} dimensions is cut by {leaf.cuts}; each axis of "
            f"{', '.join(mesh)} may cut one dimension once"
        )
    names, sizes = list(mesh), list(mesh.values())
    strides = {a: math.prod(sizes[i + 1 :]) for i, a in enumerate(names)}
    free = [np.arange(mesh[a]) * strides[a] for a in names if a not in used]
    others = np.zeros(1, np.int64)
    for offsets in free:
        others = (others[:, None] + offsets).ravel()
    firsts = np.zeros(1, np.int64)
    for axis in used:  # in the order in which grid() counts the shards
        firsts = (firsts[:, None] + np.arange(mesh[axis]) * strides[axis]).ravel()
    shards = grid(leaf.shape, [math.prod(mesh[a] for a in axes) for axes in leaf.cuts])
    start, stop, first = [], [], []
    for box, rank in zip(shards, firsts.tolist(), strict=True):
        if box.size == 0:
            continue
        for piece in _cut(box, leaf.itemsize, largest) if len(others) > 1 else [box]:
            start.append(piece.start + (0,) * (width - len(piece.start)))
            stop.append(piece.stop + (1,) * (width - len(piece.stop)))
            first.append(rank)
    return _Pieces(
        np.full(len(first), number, np.int32),
        np.array(start, np.int64).reshape(-1, width),
        np.array(stop, np.int64).reshape(-1, width),
        np.array(first, np.int64),
        others,
    )


def _cut(box: Box, itemsize: int, largest: int) -> list[Box]:
    """Returns a box in pieces of at most `largest` bytes, if its two longest dimensions allow."""
    ways = [1] * len(box.shape)
    parts = -(-box.size * itemsize // largest)
    for d in sorted(range(len(ways)), key=lambda d: -box.shape[d])[:2]:
        ways[d] = min(box.shape[d], parts)
        parts = -(-parts // ways[d])
    return [
        Box(
            tuple(a + o for a, o in zip(b.start, box.start, strict=True)),
            tuple(a + o for a, o in zip(b.stop, box.start, strict=True)),
        )
        for b in grid(box.shape, ways)
    ]


def _worst_fit(bare: Plan, first: np.ndarray, others: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the rank of each piece: the least loaded of its holders, the largest piece first.

    Pieces with fewer holders go before larger ones with more: who has no choice chooses first.
    """
    sizes = bare.bytes
    chosen = bare.rank.copy()
    alone = bare.copies == 1
    loads = np.bincount(chosen[alone], sizes[alone], bare.ranks)
    todo = np.flatnonzero(~alone)
    todo = todo[np.lexsort((-sizes[todo], bare.copies[todo]))]
    for i, leaf, base, size in zip(
        todo.tolist(),
        bare.leaf[todo].tolist(),
        first[todo].tolist(),
        sizes[todo].tolist(),
        strict=True,
    ):
        holders = others[leaf] + base
        rank = holders[loads[holders].argmin()]
        loads[rank] += size
        chosen[i] = rank
    return chosen


def reads(saved: Plan, loaded: Plan) -> Iterator[tuple[int, Copy]]:
    """Yields (leaf, copy) for all that a load takes from what a save wrote.

    A copy's source is a piece of `saved`, its target one of `loaded`; exactly one copy has each
    element of `loaded`. Raises: ValueError when the leaves differ.
    """
    shapes = [[(x.name, x.shape, x.itemsize) for x in p.leaves] for p in (saved, loaded)]
    if shapes[0] != shapes[1]:
        raise ValueError("the plans are of different leaves")
    for number in range(len(saved.leaves)):
        written, read = (np.flatnonzero(p.leaf == number) for p in (saved, loaded))
        sources = [saved.box(int(i)) for i in written]
        for k in read.tolist():
            for copy in intersect(sources, [loaded.box(k)]):
                yield number, Copy(int(written[copy.source]), k, copy.box)


@dataclass(frozen=True)
class Rates:
    """What moves bytes, in bytes/s. Defaults: chosen round numbers of one H100 host of 8 ranks."""

    device_to_host: float = 50e9  # of a rank: PCIe 5 x16, pinned
    host_to_storage: float = 5e9  # of a host: its storage network
    storage: float = 1e12  # of all hosts together
    interconnect: float = 40e9  # of a rank: the idle compute network
    ranks_per_host: int = 8


@dataclass(frozen=True)
class Estimate:
    """Seconds. stall: devices to hosts, what training waits for."""

    stall: float
    save: float
    load: float


def simulate(save: Plan, rates: Rates = Rates()) -> Estimate:
    """Returns how long a save by a plan, and its load, take if only these rates limit them."""
    loads = save.bytes_per_rank.astype(float)
    padded = np.pad(loads, (0, -len(loads) % rates.ranks_per_host))
    hosts = padded.reshape(-1, rates.ranks_per_host).sum(axis=1)
    stall = loads.max() / rates.device_to_host
    moved = max(hosts.max() / rates.host_to_storage, loads.sum() / rates.storage)
    sent = save.broadcast_bytes / save.ranks / rates.interconnect
    return Estimate(float(stall), float(stall + moved), float(max(moved, sent) + stall))


class PlanCache:
    """The plans of a session: a run saves the same leaves on the same mesh again and again."""

    def __init__(self, capacity: int = 8, make: Callable[..., Plan] = plan):
        """capacity: plans kept; the one used longest ago goes first."""
        self._capacity, self._make = capacity, make
        self._plans: OrderedDict[tuple, Plan] = OrderedDict()

    def plan(self, leaves: Sequence[Leaf], mesh: Mapping[str, int]) -> Plan:
        """Returns the plan of `plan`, made at most once."""
        key = (tuple(leaves), tuple(mesh.items()))
        if key not in self._plans:
            self._plans[key] = self._make(leaves, mesh)
            if len(self._plans) > self._capacity:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]
