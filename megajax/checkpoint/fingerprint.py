"""Fingerprints of arrays that depend neither on how they are cut nor on the order of their rows.

The fingerprint of an array is the sum of core/hashes.py. Where rows are held in another order
(LeafSum.order in trust.py), the place of an element is the one that it has in the model's
order. A sum, so every device adds up its own shard where it lies and the shards of any mesh add to
the same number. Made from the devices before a save and after a restore, it covers the whole way
there and back (copies, files, network) and no byte is read twice for it. File checksums
(trust.py) say WHERE damage lies. Section "reading back" compares what was written with them.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.checkpoint import offline, store, trust
from megajax.checkpoint.steps import StepFolder
from megajax.checkpoint.trust import LeafSum, Record, find_damage
from megajax.core.boxes import runs
from megajax.core.errors import UserError
from megajax.core.hashes import STRIDES, WORD_STRIDE, host_words, place_hashes, sum_words, words

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


# ---- reading back
#
# The fingerprints of what lies in the files of a step that was just written.
#
# The checksums of trust.py are made of the files, so a bit that flips between the write and the
# checksum would be sealed in. The fingerprints of the devices' arrays are of what
# was meant to be written: the files of a step are read again in the background once it counts, and
# must give the same before an older step goes (manager.Sealer).
#
# Leaves are read in slabs of about SLAB bytes along their first dimension, the next one while one
# is summed. Words and places are one long row in blocks of fixed lengths, so two programs serve
# leaves of every shape and type. The host computes: nothing goes back to an accelerator.


SLAB = 2**25  # bytes of a leaf read at once (chosen)
BLOCKS = (2**12, 2**18)  # words that a program sums: of small leaves, of large ones (chosen)


def share(
    table: Sequence[tuple[str, tuple[int, ...], str]], part: int, parts: int
) -> list[tuple[str, tuple[int, ...], str]]:
    """Returns the (name, shape, dtype) that one of `parts` processes reads back."""
    return sorted(table, key=lambda leaf: (-math.prod(leaf[1]), leaf[0]))[part::parts]


def fingerprints(
    folder: Path, leaves: Sequence[tuple[str, tuple[int, ...], str]]
) -> dict[str, Print]:
    """Returns the fingerprints of leaves (name, shape, dtype) as they are stored.

    Raises: what tensorstore does; ValueError for a leaf of another shape.
    """
    context, memory = store.index_context(), _Memory()
    return {
        name: _fingerprint(folder, name, LeafSum(list(shape), dtype, []), context, memory)
        for name, shape, dtype in leaves
    }


def verify(steps: StepFolder, step: int) -> Record:
    """Reads every byte of a step, compares leaves that nobody has, and returns its record.

    Raises: as `offline.verify`; DamagedError too when the leaves are not what was saved, though the
    checksums agree.
    """
    record = offline.verify(steps, step)
    if not steps.is_read_back(step, record) and (wrong := wrong_parts(steps.step(step), record)):
        raise trust.refuted(steps.step(step), wrong)
    return record


def wrong_parts(folder: Path, record: Record, part: int = 0, parts: int = 1) -> list[str]:
    """Returns what is not as the record says, in the share of one of `parts` processes.

    Raises: StoreError, OSError, MemoryError: nothing can be said of what is stored.
    """
    table = [(n, tuple(x.shape), x.dtype) for n, x in record.leaves.items()]
    damage = find_damage(folder, record, fast=True) if part == 0 else []
    wrong = [f"{d.file}: {d.what}" for d in damage]
    context, memory, folder = store.index_context(), _Memory(), folder / record.home
    for leaf in share(table, part, parts):
        try:
            found = _fingerprint(folder, leaf[0], record.leaves[leaf[0]], context, memory)
        except Exception as error:  # tensorstore raises many kinds
            why = store.explained(folder, error)
            text = str(error).partition("\n")[0][:200]
            if isinstance(why, UserError | TimeoutError | MemoryError) or _is_closed(text):
                raise why from error
            wrong.append(f"leaf {leaf[0]} ({text})")
            continue
        if found != tuple(record.leaves[leaf[0]].fingerprint):
            wrong.append(f"leaf {leaf[0]}")
    return wrong


def _is_closed(text: str) -> bool:
    """Tells an error that says nothing of the bytes: they may be whole."""
    return any(
        words in text
        for words in (
            "PERMISSION_DENIED",
            "Permission denied",
            "UNAVAILABLE",
            "Stale file handle",
            "Too many open files",
            "RESOURCE_EXHAUSTED",
            "CANCELLED",
            "interpreter shutdown",
        )
    )


class _Memory:
    """Two buffers, used in turn for all slabs: fresh memory costs as much as reading into it."""

    def __init__(self):
        self._raw = [store.buffer((0,), np.dtype(np.uint8))] * 2
        self._current = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an array in the buffer that was not taken last."""
        self._current = 1 - self._current
        nbytes = math.prod(shape) * dtype.itemsize
        if self._raw[self._current].size < nbytes:
            self._raw[self._current] = store.buffer((nbytes,), np.dtype(np.uint8))
        return self._raw[self._current][:nbytes].view(dtype).reshape(shape)


def _fingerprint(folder: Path, name: str, leaf: LeafSum, context: Any, memory: _Memory) -> Print:
    shape = tuple(leaf.shape)
    if 0 in shape:
        return 0, 0
    stored = store.open_leaf(folder, name, context).result(timeout=store.PATIENCE_S)
    if tuple(stored.shape) != tuple(shape):
        raise ValueError(f"leaf {name} is {tuple(stored.shape)} there instead of {shape}")
    sums = np.zeros(2, np.uint32)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        for start, slab in _slabs(stored, memory):
            for first, rows in _in_order(leaf, start, slab):
                words = host_words(rows)
                places = _places(rows.shape, words.shape[rows.ndim :])
                shift = np.uint32(first * STRIDES[0] & 0xFFFFFFFF)
                sums += _sum(words.reshape(-1), places, shift)
    return int(sums[0]), int(sums[1])


def _in_order(leaf: LeafSum, start: int, slab: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (place of the first row in the model's order, rows that follow it there)."""
    if not leaf.order:
        yield start, slab
        return
    for run in runs(leaf.order[start : start + len(slab)]):
        yield run.source, slab[run.place : run.place + run.count]


def _slabs(stored: Any, memory: _Memory) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, rows) of a stored array; the next rows are on their way meanwhile."""
    dtype, shape = stored.dtype.numpy_dtype, tuple(stored.shape)
    if not shape:
        yield 0, np.asarray(stored.read().result(timeout=store.PATIENCE_S))
        return
    unit = stored.chunk_layout.read_chunk.shape[0]
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    height = max(SLAB // max(row_bytes * unit, 1), 1) * unit

    def ask(start: int) -> tuple[Any, np.ndarray]:
        rows = stored[start : min(start + height, shape[0])].translate_to[(0,) * len(shape)]
        slab = memory.take(tuple(rows.shape), dtype)
        return ts.array(slab).write(rows), slab

    coming = ask(0)
    for start in range(0, shape[0], height):
        future, slab = coming
        future.result(timeout=store.PATIENCE_S)
        if start + height < shape[0]:
            coming = ask(start + height)
        yield start, slab


@functools.lru_cache(2)
def _places(shape: tuple[int, ...], words: tuple[int, ...]) -> list[jax.Array]:
    """Returns the places of a slab's words, as if it began at the origin, in blocks."""
    total = np.zeros((), np.uint32)
    for d, n in enumerate((*shape, *words)):
        stride = STRIDES[d % len(STRIDES)] if d < len(shape) else WORD_STRIDE
        total = np.add.outer(total, np.arange(n, dtype=np.uint32) * np.uint32(stride))
    return _blocks(total.reshape(-1))


def _blocks(row: np.ndarray) -> list[jax.Array]:
    """Returns a row of words cut into blocks, the last filled up with zeros; no copy is made of
    what is aligned."""
    length = BLOCKS[row.size > BLOCKS[0]]
    parts = [row[begin : begin + length] for begin in range(0, row.size, length)]
    parts[-1] = np.pad(parts[-1], (0, length - parts[-1].size))
    return [jax.device_put(part) for part in parts]


def _sum(words: np.ndarray, places: list[jax.Array], shift: np.uint32) -> np.ndarray:
    blocks = _blocks(words)
    missing = [np.uint32(0)] * len(blocks)
    missing[-1] = np.uint32(sum(b.size for b in blocks) - words.size)
    found = [
        _sum_block(bits, place, shift, left)
        for bits, place, left in zip(blocks, places, missing, strict=True)
    ]
    return np.sum([np.asarray(x) for x in found], axis=0, dtype=np.uint32)


@jax.jit
def _sum_block(
    bits: jax.Array, place: jax.Array, shift: jax.Array, missing: jax.Array
) -> jax.Array:
    """Returns the two sums (2,) of the words but the last `missing`, which are zero at place 0.

    What those add is taken away: a mask would keep XLA's CPU compiler from vectorising.
    """
    zero = jnp.uint32(0)
    sums = jax.lax.reduce(
        place_hashes(bits, place + shift),
        (zero, zero),
        lambda a, b: (a[0] + b[0], a[1] + b[1]),
        (0,),
    )
    return jnp.stack(sums) - missing * jnp.stack(place_hashes(zero, shift))
