"""Fingerprints of arrays that depend neither on how they are cut nor on the order of their rows.

fingerprint(x) = sum over elements of h(place in the whole array, bits) modulo 2^32, twice with
different h. Where rows are held in another order (LeafSum.order in integrity.py), the place of an
element is the one that it has in the model's order. A sum, so every device adds up its own shard
where it lies and the shards of any mesh add to the same number; h is a bijection of the bits for a
given place, so a change of one element never goes unseen, and any other change does with a
probability of 2^-64. Made from the devices before a save and after a restore, it covers the whole
way there and back (copies, files, network) and no byte is read twice for it. File checksums
(integrity.py) say WHERE damage lies.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Print = tuple[int, int]
Order = Sequence[int] | np.ndarray | None
Orders = Sequence[Order]
# Odd numbers without a pattern, one a dimension: a place is a sum of these, so shards need only
# their offset, and no place overflows.
STRIDES = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5)
WORD_STRIDE = 0xB55A4F09
# Devices have no bitcast for parts of a byte; these widen without loss, so as such they count.
SMALL = {
    "int2": jnp.int32,
    "uint2": jnp.int32,
    "int4": jnp.int32,
    "uint4": jnp.int32,
    "float4_e2m1fn": jnp.float32,
}


def _scramble(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every bit depends on every bit (MurmurHash3's finaliser)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits as uint32; elements of more than four bytes get a dimension of words."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.name in SMALL:
        return x.astype(SMALL[x.dtype.name]).view(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    width = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


def host_words(x: np.ndarray) -> np.ndarray:
    """Returns what `_words` does, for types that devices may not have (float64 and the like)."""
    if x.dtype == np.bool_:
        return x.astype(np.uint32)
    if x.dtype.name in SMALL:
        return x.astype(SMALL[x.dtype.name]).view(np.uint32)
    x = np.ascontiguousarray(x).reshape(x.shape)  # the former makes a scalar a row
    if x.dtype.itemsize > 4:
        return x.reshape(*x.shape, 1).view(np.uint32)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.dtype.itemsize]).astype(np.uint32)


def place_hashes(bits: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both hashes of each word, which is where `place` says."""
    key = _scramble(place)
    one = _scramble(bits ^ key)
    two = _scramble(bits * jnp.uint32(0x2545F491) + (key ^ jnp.uint32(0x5BD1E995)))
    return one, two


@jax.jit
def _sum_words(bits: jax.Array, start: jax.Array, rows: jax.Array | None = None) -> jax.Array:
    """Returns the two sums (2,) of a shard that begins at `start` (rank,) of the whole array.

    rows: uint32, the place of each of its rows in the model's order; None: they follow `start`.
    """
    place = jnp.zeros(bits.shape, jnp.uint32)
    for d in range(bits.ndim):
        inside = d < start.shape[0]  # else: the dimension of words
        stride = STRIDES[d % len(STRIDES)] if inside else WORD_STRIDE
        along = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, d)
        along = along + start[d] if inside else along
        if d == 0 and rows is not None:
            along = jnp.broadcast_to(rows.reshape(-1, *[1] * (bits.ndim - 1)), bits.shape)
        place += along * jnp.uint32(stride)
    one, two = place_hashes(bits, place)
    zero = jnp.uint32(0)
    # One reduction of both: as two, XLA's CPU compiler hashes twice and does not vectorise (6
    # times slower, measured, 2-core CPU).
    sums = jax.lax.reduce(
        (one, two), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), range(bits.ndim)
    )
    return jnp.stack(sums)


@functools.cache
def _program(devices: tuple[jax.Device, ...], scalars: tuple[bool, ...]) -> Callable:
    """Returns the program that sums each device's shards: one for all leaves and devices."""
    mesh = Mesh(np.array(devices), ("d",))
    each, same = PartitionSpec("d"), PartitionSpec()
    run = jax.shard_map(
        lambda xs, starts, rows: [
            _sum_words(_words(x), s[0], r)[None] for x, s, r in zip(xs, starts, rows, strict=True)
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
            parts[i] = [(0, _sum_words(host_words(x), np.zeros(x.ndim, np.uint32), rows))]
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
