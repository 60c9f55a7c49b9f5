"""Fingerprints of arrays that depend neither on how they are cut nor on the order of their rows.

The fingerprint of an array is the sum of core/hashes.py. Where rows are held in another order
(LeafSum.order in integrity.py), the place of an element is the one that it has in the model's
order. A sum, so every device adds up its own shard where it lies and the shards of any mesh add to
the same number. Made from the devices before a save and after a restore, it covers the whole way
there and back (copies, files, network) and no byte is read twice for it. File checksums
(integrity.py) say WHERE damage lies.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.core.hashes import host_words, sum_words, words

Print = tuple[int, int]
Order = Sequence[int] | np.ndarray | None
Orders = Sequence[Order]


@functools.cache
def _program(devices: tuple[jax.Device, ...], scalars: tuple[bool, ...]) -> Callable:
    """Returns the program that sums each device's shards: one for all leaves and devices."""
    mesh = Mesh(np.array(devices), ("d",))
    each, same = PartitionSpec("d"), PartitionSpec()
    run = jax.shard_map(
        lambda xs, starts, rows: [
            sum_words(words(x), s[0], r)[None] for x, s, r in zip(xs, starts, rows, strict=True)
        ],
        mesh=mesh,
        in_specs=([same if scalar else each for scalar in scalars], each, each),
        out_specs=each,
        check_vma=False,
    )
    return jax.jit(run)


class Fingerprints:
    """The fingerprints of leaves, computed where the shards lie.

    A GPU begins at once, in the order of the caller's programs, and computes beside what it does
    next. A CPU's programs would keep the caller waiting, so there a thread has them, on views of
    the shards: donated memory that has a view is not used again while it has one.
    """

    def __init__(
        self, leaves: Iterable[Any] = (), at_once: bool = False, orders: Orders | None = None
    ):
        """The arrays may be donated afterwards.

        at_once: CPUs begin too, not when first asked. orders: of all leaves that will be added:
        the row of the model at each place, None where that is the place itself.
        """
        self._orders: Iterator[Order] = itertools.repeat(None) if orders is None else iter(orders)
        # A thread of its own: a mesh in scope (jax.set_mesh) would claim these programs of one
        # device each.
        self._pool = ThreadPoolExecutor(1, "fingerprints")
        self._at_once = at_once
        self._groups: list[Callable[[], list[list[tuple[int, Any]]]]] = []
        self.add(leaves)

    def add(self, leaves: Iterable[Any]) -> None:
        """Takes more leaves, after those before; one program for all of one call."""
        held = [_held(x) for x in leaves]
        orders = list(itertools.islice(self._orders, len(held)))

        def work() -> list[list[tuple[int, Any]]]:
            return _shard_sums([x() for x, _ in held], orders)

        on_hosts = all(on_host for _, on_host in held)
        if on_hosts and not self._at_once:
            self._groups.append(lambda: self._pool.submit(work).result())
            return
        sums = self._pool.submit(work)
        if not on_hosts:
            sums.result()
        self._groups.append(sums.result)

    @functools.cached_property
    def _parts(self) -> list[list[tuple[int, Any]]]:
        groups, self._groups = self._groups, []  # which hold the arrays
        return [parts for group in groups for parts in group()]

    def local(self) -> list[Print]:
        """Returns what the shards of this process add to each leaf's fingerprint."""
        return [_total(s for replica, s in parts if replica == 0) for parts in self._parts]

    def wrong(self, wanted: Sequence[Sequence[int]]) -> list[int]:
        """Returns the numbers of the leaves of which a replica, on any process, is not as wanted.

        All processes must call it with leaves in the same order; all get the same answer.
        """
        copies = jax.device_count()
        sums = np.zeros((len(self._parts), copies, 2), np.uint32)
        counts = np.zeros((len(self._parts), copies), np.uint32)
        for i, parts in enumerate(self._parts):
            for replica, part in parts:
                sums[i, replica] += np.asarray(part).reshape(2)
                counts[i, replica] += 1
        if jax.process_count() > 1:
            sums = multihost_utils.process_allgather(sums).sum(0, dtype=np.uint32)
            counts = multihost_utils.process_allgather(counts).sum(0, dtype=np.uint32)
        goal = np.array(wanted, np.uint32).reshape(-1, 1, 2)
        bad = ((sums != goal).any(-1) & (counts > 0)).any(-1)
        return np.flatnonzero(bad).tolist()


def add(parts: Iterable[Sequence[int]]) -> Print:
    """Returns the fingerprint of an array from those of its disjoint parts."""
    return _total(np.array(p, np.uint32) for p in parts)


def _total(parts: Iterable[Any]) -> Print:
    total = sum((np.asarray(p).reshape(2).astype(np.uint64) for p in parts), np.zeros(2, np.uint64))
    one, two = (total & np.uint64(0xFFFFFFFF)).tolist()
    return one, two


def _held(x: Any) -> tuple[Callable[[], Any], bool]:
    """Returns (what gives an array of the same memory, which stays as it is, whether on hosts)."""
    if not isinstance(x, jax.Array):
        return lambda: x, True
    device = next(iter(x.sharding.device_set))
    if x.sharding.memory_kind not in (None, usual := device.default_memory().kind):
        x = jax.device_put(x, x.sharding.with_memory_kind(usual))  # where the sums are computed
    if any(d.platform != "cpu" for d in x.sharding.device_set):
        return lambda: x, False
    shape, sharding, dtype = x.shape, x.sharding, x.dtype
    views = [(np.asarray(s.data), s.device) for s in x.addressable_shards]

    def again() -> jax.Array:
        shards = [jax.device_put(view, device) for view, device in views]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)

    return again, True


def _shard_sums(leaves: Sequence[Any], orders: Orders) -> list[list[tuple[int, Any]]]:
    """Returns, for each leaf, [(replica, sums)] of the shards that this process holds."""
    parts: list[list[tuple[int, Any]]] = [[] for _ in leaves]
    groups: dict[tuple[jax.Device, ...], list[int]] = {}
    for i, x in enumerate(leaves):
        if 0 in np.shape(x):
            # No element adds anything, and a shard_map whose empty operand is cut over two or more
            # devices is a segmentation fault in XLA's CPU compiler (jaxlib 0.11.2).
            continue
        if isinstance(x, jax.Array):
            shards = sorted(x.addressable_shards, key=lambda s: s.device.id)
            groups.setdefault(tuple(s.device for s in shards), []).append(i)
        elif jax.process_index() == 0:  # host arrays are the same on all processes
            x = np.asarray(x)
            rows = _rows(orders[i], [slice(None)])
            parts[i] = [(0, sum_words(host_words(x), np.zeros(x.ndim, np.uint32), rows))]
    for devices, members in groups.items():
        found = _device_sums(devices, [leaves[i] for i in members], [orders[i] for i in members])
        for i, part in zip(members, found, strict=True):
            parts[i] = part
    return parts


def _rows(order: Order, pieces: Sequence[slice]) -> np.ndarray | None:
    """Returns the places of the rows of pieces, one piece after the other."""
    if order is None:
        return None
    places = np.asarray(order, np.uint32)
    return np.concatenate([places[p] for p in pieces])


def _device_sums(
    devices: tuple[jax.Device, ...], leaves: Sequence[jax.Array], orders: Orders
) -> list[list[tuple[int, Any]]]:
    """Returns, for each leaf, [(replica, sums)] of its shards on these devices."""
    mesh = Mesh(np.array(devices), ("d",))
    ordered = [sorted(x.addressable_shards, key=lambda s: s.device.id) for x in leaves]
    beside, starts = [], []
    for x, shards in zip(leaves, ordered, strict=True):
        # The shards side by side, as one array of another shape: the same memory.
        shape = (len(shards) * shards[0].data.shape[0], *shards[0].data.shape[1:]) if x.ndim else ()
        spec = PartitionSpec("d") if x.ndim else PartitionSpec()
        beside.append(
            jax.make_array_from_single_device_arrays(
                shape, NamedSharding(mesh, spec), [s.data for s in shards]
            )
        )
        start = np.array([[i.start or 0 for i in s.index] for s in shards], np.uint32)
        starts.append(start.reshape(len(shards), x.ndim))
    rows = [
        _rows(order, [s.index[0] for s in shards if s.index])
        for order, shards in zip(orders, ordered, strict=True)
    ]
    sums = _program(devices, tuple(x.ndim == 0 for x in leaves))(beside, starts, rows)
    parts = [{part.device: part.data for part in s.addressable_shards} for s in sums]
    return [
        [(s.replica_id, p[s.device]) for s in shards]
        for shards, p in zip(ordered, parts, strict=True)
    ]
