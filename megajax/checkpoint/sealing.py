"""The trust around a save: fingerprints of its arrays, its integrity record, its read-back.

A save starts in manager.py, which takes the fingerprints of the arrays where they lie and hands
them to Orbax. The rest happens in a thread of its own, a SaveHandle: the Sealer waits for Orbax,
writes the integrity record (trust.py), gives the step its name (steps.py), with which it counts,
and reads the step back before older ones go. A restore compares fingerprints again.

The fingerprint of an array is the sum of core/hashes.py. It depends neither on how the array is cut
nor on the order of its rows: where rows are held in another order (LeafSum.order in trust.py), the
place of an element is the one that it has in the model's order. As it is a sum, every device adds
up its own shard where it lies, and the shards of any mesh add to the same number. Made from the
devices before a save and after a restore, it covers the complete path there and back (copies,
files, network), and no byte is read twice for it. File checksums (trust.py) say WHERE damage lies.
"""

import functools
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from megajax.checkpoint import offline, orbax_io, store, trust
from megajax.checkpoint.lease import SupersededError
from megajax.checkpoint.steps import StepFolder
from megajax.checkpoint.store import SaveError
from megajax.checkpoint.trust import CheckpointError, LeafSum, Record, find_damage
from megajax.core.boxes import runs
from megajax.core.errors import UserError
from megajax.core.hashes import STRIDES, WORD_STRIDE, host_words, place_hashes, sum_words, words

# ---- fingerprints of arrays


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

    A GPU begins at once, in the order of the caller's programs, while the caller goes on. Programs
    of a CPU would keep the caller waiting, so there a thread runs them, on views of the shards:
    donated memory is not used again as long as it has a view.
    """

    def __init__(
        self, leaves: Iterable[Any] = (), at_once: bool = False, orders: Orders | None = None
    ):
        """The arrays may be donated afterwards.

        at_once: CPUs begin at once too, and not when a sum is first asked for. orders: of all
        leaves that will be added: the row of the model at each place, None where that is the place
        itself.
        """
        self._orders: Iterator[Order] = itertools.repeat(None) if orders is None else iter(orders)
        # A thread of its own: a mesh in scope (jax.set_mesh) would claim these programs of one
        # device each.
        self._pool = ThreadPoolExecutor(1, "fingerprints")
        self._at_once = at_once
        self._groups: list[Callable[[], list[list[tuple[int, Any]]]]] = []
        self.add(leaves)

    def add(self, leaves: Iterable[Any]) -> None:
        """Adds leaves behind those of earlier calls; one program sums the leaves of one call."""
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

    def wrong(self, expected: Sequence[Sequence[int]]) -> list[int]:
        """Returns the numbers of the leaves of which a replica, on any process, is not as expected.

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
        goal = np.array(expected, np.uint32).reshape(-1, 1, 2)
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
    """Returns (a call that returns an array of the same values even after x was donated, whether
    its memory is the host's)."""
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
        sums = _device_sums(devices, [leaves[i] for i in members], [orders[i] for i in members])
        for i, part in zip(members, sums, strict=True):
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
    stacked, starts = [], []
    for x, shards in zip(leaves, ordered, strict=True):
        # The shards side by side, as one array of another shape: the same memory.
        shape = (len(shards) * shards[0].data.shape[0], *shards[0].data.shape[1:]) if x.ndim else ()
        spec = PartitionSpec("d") if x.ndim else PartitionSpec()
        stacked.append(
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
    sums = _program(devices, tuple(x.ndim == 0 for x in leaves))(stacked, starts, rows)
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
# must give the same before an older step goes (Sealer).
#
# Leaves are read in slabs of about SLAB bytes along their first dimension, the next one while one
# is summed. Words and places are one long row in blocks of fixed lengths, so two programs serve
# leaves of every shape and type. The host computes: nothing goes back to an accelerator.


SLAB = 2**25  # bytes of a leaf read at once (chosen)
BLOCKS = (2**12, 2**18)  # words that a program sums: of small leaves, of large ones (chosen)


def verify(steps: StepFolder, step: int) -> Record:
    """Reads every byte of a step and returns its record. Also compares the leaves with their
    fingerprints, unless the step was read back before.

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
    by_size = sorted(record.leaves.items(), key=lambda item: (-math.prod(item[1].shape), item[0]))
    damage = find_damage(folder, record, fast=True) if part == 0 else []
    wrong = [f"{d.file}: {d.what}" for d in damage]
    context, folder = store.index_context(), folder / record.home
    memory = _Memory([store.buffer((0,), np.dtype(np.uint8))] * 2)
    for name, leaf in by_size[part::parts]:
        try:
            total = (0, 0)
            if 0 not in leaf.shape:
                opened = store.open_leaf(folder, name, context)
                total = _fingerprint(name, leaf, opened.result(timeout=store.PATIENCE_S), memory)
        except Exception as error:  # tensorstore raises many kinds
            why = store.explained(folder, error)
            text = str(error).partition("\n")[0][:200]
            if isinstance(why, UserError | TimeoutError | MemoryError) or _is_closed(text):
                raise why from error
            wrong.append(f"leaf {name} ({text})")
            continue
        if total != tuple(leaf.fingerprint):
            wrong.append(f"leaf {name}")
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


@dataclass
class _Memory:
    """Two buffers, used alternately: fresh memory for a slab costs as much as reading the slab."""

    buffers: list[np.ndarray]  # grow as needed
    last: int = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an array in the buffer that was not taken last."""
        self.last = 1 - self.last
        nbytes = math.prod(shape) * dtype.itemsize
        if self.buffers[self.last].size < nbytes:
            self.buffers[self.last] = store.buffer((nbytes,), np.dtype(np.uint8))
        return self.buffers[self.last][:nbytes].view(dtype).reshape(shape)


def _fingerprint(name: str, leaf: LeafSum, stored: Any, memory: _Memory) -> Print:
    """Returns the fingerprint of a stored array, which is read in slabs of rows.

    The place of an element is the sum of its indices, each times the stride of its dimension
    (core/hashes.py). `_places` has the places of a slab that begins at row 0; those of a slab that
    begins at row `first` are larger by first * STRIDES[0], modulo 2^32. So all slabs share one
    array of places, and `shift` is added to it.
    Raises: ValueError for an array of another shape.
    """
    there, shape = tuple(stored.shape), tuple(leaf.shape)
    if there != shape:
        raise ValueError(f"leaf {name} is {there} there instead of {shape}")
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
    """Yields (first row, rows) of a stored array; the next rows are read meanwhile."""
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
    sums = [
        _sum_block(bits, place, shift, left)
        for bits, place, left in zip(blocks, places, missing, strict=True)
    ]
    return np.sum([np.asarray(x) for x in sums], axis=0, dtype=np.uint32)


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


# ---- the second stage of a save
#
# A SaveHandle is the thread, which runs `store` and `check` of the Sealer, and then frees the bytes
# of removed steps.
#
# `store` waits for Orbax, sums the files, writes the integrity record (trust.py) and gives the step
# its name, with which it counts. `check` reads the step back from storage, compares it with the
# fingerprints of the devices' arrays, marks what it saw (trust.py), and removes older steps, which
# stay as long as this step was not read back.
#
# Reading back runs beside the next save, but ends before that save's step gets its name: no two
# steps are read back at once, and at most one step waits for it. A step that a kill kept from being
# read back is read by the next save, before that save's step gets its name.
#
# The processes of a job meet twice in `store`. In `check` they exchange messages through jax's
# coordination service: what each process read, and from process 0, what follows from it.


Table = list[tuple[str, tuple[int, ...], str, list[int]]]  # name, shape, dtype, order of its rows
Finding = dict[str, Any]  # what one process read back: {"wrong": [...]} or {"unknown": "why"}


class ReadBackError(SaveError):
    """A step that counted was read back and is not what was written; it counts no more."""


class SaveHandle:
    """A save under way. blocking_s: seconds that the call took from the training loop."""

    def __init__(self, step: int, folder: Path, todo: Sequence[Callable[[], None]]):
        """Starts storing in the background.

        Args: step: being saved. folder: that holds the steps. todo: what stores; what reads back
          and removes the names of older steps, once the step counts; what frees their bytes. Each
          is dropped when it is done, with all arrays that it holds.
        """
        self.step, self.blocking_s = step, 0.0
        self._error: SaveError | None = None
        self._settled, self._checked = threading.Event(), threading.Event()
        calls = list(todo)

        def work() -> None:
            try:
                calls.pop(0)()
            except Exception as error:  # tensorstore raises many kinds, some bare
                kind = SupersededError if isinstance(error, SupersededError) else SaveError
                self._error = kind(
                    f"step {step} was not saved in {folder}: {orbax_io.reason(error)}; "
                    "earlier checkpoints are untouched"
                )
                self._checked.set()
                return  # a store that did not answer is not asked again
            finally:
                self._settled.set()
            while calls:
                try:
                    calls.pop(0)()
                except ReadBackError as error:
                    self._error = error
                except Exception as error:
                    logging.warning("old steps stay in %s: %s", folder, orbax_io.reason(error))
                self._checked.set()

        self._thread = threading.Thread(target=work, name=f"save-{step}")
        self._thread.start()

    def result(self) -> None:
        """Waits until the step counts. Raises: SaveError, each time it is asked."""
        self._settled.wait()
        if self._error is not None:
            raise self._error

    def wait_checked(self) -> None:
        """Waits, if the step counts, until it was read back and old steps lost their names."""
        if self._settled.is_set():
            self._checked.wait()

    def join(self) -> None:
        """Waits until nothing is left to do."""
        self._thread.join()

    def finish(self) -> None:
        """Waits until the step was read back and old ones are gone. Raises: as `result`."""
        self.join()
        self.result()


@dataclass(frozen=True)
class Job:
    """The inputs of the second stage of one save.

    number: of the save, the same on all processes. response: Orbax's. former: the save before,
    which may still be reading back. unread: an older step to read back first.
    """

    step: int
    number: int
    response: Any
    table: Table
    prints: Fingerprints
    metric: float | None
    former: SaveHandle | None
    unread: int | None


@dataclass
class Sealer:
    """The second stage of all saves in one folder.

    keep, best, reads_back: as the manager has them. bad: the steps that are known to be damaged;
    the Sealer adds to it. refuted: steps that were read back and are not what was written.
    """

    steps: StepFolder
    keep: int
    best: int
    reads_back: bool
    bad: set[int]
    refuted: list[int] = field(default_factory=list)

    def store(self, job: Job) -> None:
        """Seals a step and gives it its name. Raises: what storage does."""
        saving = self.steps.saving(job.step)
        part, parts = jax.process_index(), jax.process_count()
        problem: Exception | None = None
        try:
            try:
                sums = job.prints.local()  # beside Orbax's writing, which must end in any case
            finally:
                orbax_io.wait(job.response, f"megajax_failed_{job.number}", saving.parent)
            names = trust.list_files(saving)[part::parts]
            summed = trust.sum_files(saving, names, None, names if self.steps.keys else ())
            files = {n: asdict(f) for n, f in summed.items()}
            if job.former is not None:
                job.former.join()
            unread = None if job.unread is None else self._read_share(job.unread)
            message = {"files": files, "fingerprints": sums, "unread": unread}
            trust.write_file(saving / f"{trust.PART}{part}", json.dumps(message))
        except Exception as error:
            problem = error
            orbax_io.give_up(f"megajax_failed_{job.number}", error)
        if parts > 1:  # a process that failed meets the others too, or they would wait in vain
            orbax_io.meet(f"megajax_summed_{job.number}")
        if part == 0:
            try:
                if problem is not None:
                    raise problem
                self._seal(job)
            except Exception as error:
                problem = error
                self.steps.drop_saving(job.step)
            finally:
                self.steps.unlock()
        if parts > 1:
            orbax_io.meet(f"megajax_named_{job.number}")
        if problem is None and not (self.steps.step(job.step) / trust.RECORD).exists():
            problem = OSError("another process could not write")
        if problem is not None:
            raise problem
        self.bad.discard(job.step)

    def _seal(self, job: Job) -> None:
        """Writes the record, from the messages of all processes, and gives the step its name."""
        saving = self.steps.saving(job.step)
        paths = sorted(saving.glob(f"{trust.PART}*"))
        if len(paths) != jax.process_count():
            raise OSError(f"only {len(paths)} of {jax.process_count()} processes wrote their part")
        parts = [json.loads(p.read_text()) for p in paths]
        files = {n: trust.FileSum(**f) for part in parts for n, f in part["files"].items()}
        sums = map(add, zip(*(p["fingerprints"] for p in parts), strict=True))
        leaves = {
            name: LeafSum(list(shape), dtype, list(total), order)
            for (name, shape, dtype, order), total in zip(job.table, sums, strict=True)
        }
        version = trust.ORDERED if any(x.order for x in leaves.values()) else 1
        record = Record(job.step, files, leaves, job.metric, version)
        if job.unread is not None:
            self._judge(job.unread, [part["unread"] for part in parts])
        if self.reads_back and job.former is None:  # a kill may have come before older ones went
            self._remove_older(job.step, counts=False)
        for path in paths:
            path.unlink()
        trust.write_record(saving, record, self.steps.keys)
        self.steps.commit(job.step)

    def check(self, step: int, number: int) -> None:
        """Reads a step back and removes older ones. number: of its save.

        Raises: ReadBackError when the step is not what was written.
        """
        finding: Finding = {"wrong": []}
        if self.reads_back:
            share = self._read_share(step)
            if jax.process_count() == 1:
                finding = self._judge(step, [share])
            else:
                judge = functools.partial(self._judge, step)
                finding = orbax_io.agree(f"megajax_read_{number}", share, judge)
        if jax.process_index() == 0:
            with self.steps.cleaning:
                self._remove_older(step)
        if finding.get("wrong"):
            self.bad.add(step)
            raise ReadBackError(str(trust.refuted(self.steps.step(step), finding["wrong"])))

    def _read_share(self, step: int) -> Finding:
        """Reads this process's share of a step back; what looks wrong is read a second time.

        A store that answers late, or a folder that somebody moves and puts back, makes whole bytes
        look wrong once; a step that is called wrong does not count any more.
        """
        folder = self.steps.step(step)
        try:
            record = self.steps.record(step)
            if record is None:
                return {"unknown": "it has no record"}
            share = folder, record, jax.process_index(), jax.process_count()
            wrong = wrong_parts(*share) and wrong_parts(*share)
            if wrong and self.steps.record(step) != record:
                return {"unknown": "it was saved again meanwhile"}
        except Exception as error:  # tensorstore raises many kinds
            return {"unknown": orbax_io.reason(error)}
        return {"wrong": wrong[: trust.SAID]}

    def _judge(self, step: int, findings: Sequence[Finding]) -> Finding:
        """Marks a step that was read back, and logs an error when it is not what was written."""
        wrong = [what for one in findings for what in one.get("wrong", ())]
        unknown = next((one["unknown"] for one in findings if "unknown" in one), None)
        folder = self.steps.step(step)
        if wrong:
            self.refuted.append(step)
            logging.error(
                "%s. It does not count any more; older steps stay", trust.refuted(folder, wrong)
            )
        elif unknown is not None:
            logging.warning(
                "step %d of %s was not read back (%s): older steps stay until it is",
                step,
                self.steps.path,
                unknown,
            )
            return {"unknown": unknown}
        try:
            record = self.steps.record(step)
            assert record is not None
            trust.write_mark(folder, record, wrong)
        except (OSError, CheckpointError) as error:
            logging.warning("step %d of %s is not marked: %s", step, self.steps.path, error)
        return {"wrong": wrong[: trust.SAID]}

    def _remove_older(self, saved: int, counts: bool = True) -> None:
        """Removes the steps that need not stay.

        Args: saved: a step that stays in every case. counts: whether it is one of the newer steps
          that allow older ones to go. Not so an older copy that is about to be replaced: it may be
          why the step is saved again, whether a restore saw its damage or a listing of a store left
          it out.
        """
        try:
            if self.steps.lease is not None and self.steps.lease.is_lost():
                return  # the newer attempt does it
            bad = self.bad if counts else self.bad | {saved}
            self.steps.retain(self.keep, self.best, bad, saved, self.reads_back)
        except (OSError, CheckpointError) as error:  # the step counts all the same
            logging.warning("older steps than %d stay: %s", saved, error)
