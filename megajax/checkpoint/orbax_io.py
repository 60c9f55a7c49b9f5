"""The engine under the manager: reading arrays by tensorstore, writing them by Orbax.

The only module that imports Orbax: it costs seconds to load. Sections: how a step is read, each
stored chunk once; how one is written in the background.
"""

import dataclasses
import functools
import json
import logging as standard_logging
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import thread as pools
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import tensorstore as ts
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import multihost
from orbax.checkpoint._src.arrays.subchunking import choose_chunk_shape
from orbax.checkpoint._src.futures import future, synchronization
from orbax.checkpoint._src.futures.signaling_client import get_signaling_client

from megajax.checkpoint import agreement, store
from megajax.checkpoint.lease import SupersededError
from megajax.checkpoint.store import SaveError
from megajax.checkpoint.trust import RECORD
from megajax.core.boxes import Box
from megajax.core.boxes import targets as targets_of
from megajax.core.files import parse_json
from megajax.core.tree import Tree, named_leaves
from megajax.core.tree import name as name_of

# ---- reading
#
# How the arrays of a step are read: every stored chunk once, straight to where it is to lie.
#
# Storage gives whole chunks. One that a single shard wants is read into that shard's memory, one
# that several shards of this process want is read once and dealt out. Where processes would read
# each other's chunks, a leaf is read cut along its chunks instead and the devices exchange the
# pieces (ByteCheckpoint section 4.3: read once, distribute over the idle interconnect).
#
# On CPU devices the memory that is read into becomes the array; on others it goes when the copy is
# done. Besides, SHARE of the state's bytes are on their way at most (or one piece, if that is
# more).


TOLERANCE = 1.05  # bytes read for each byte that is there, up to which nothing is done (chosen)
SHARE = 0.25  # of the state's bytes that may be under way (chosen)
WINDOW = 2**28  # bytes under way at most, in however large a state (chosen)
PIECE = 2**22  # bytes asked for at once, if chunks are not larger (chosen)
# What has been read is checked beside what is being read, in so many parts of at least so many
# bytes: each is a program to compile (chosen).
GROUPS, MIN_GROUP = 4, 2**25

# {leaf: the stored row of each of its rows}, where a leaf is wanted in another order than stored.
Rows = Mapping[str, Sequence[int]]
AS_STORED: Rows = {}


def stored_chunks(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns {leaf: shape of its chunks} of a step, as far as it is known."""
    found: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("state/array_metadatas/process_*"):
        try:
            for entry in parse_json(path.read_bytes())["array_metadatas"]:
                array = entry["array_metadata"]
                chunk = tuple(array["chunk_shape"])
                if all(type(n) is int and n > 0 for n in chunk):
                    found[array["param_name"]] = chunk
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the arrays can be read all the same
    return found


def amplification(shape: Sequence[int], chunk: Sequence[int], boxes: Sequence[Box]) -> float:
    """Returns the elements of the chunks that reading these boxes touches over the boxes' own."""
    read = sum(
        math.prod(
            min(-(-b // c) * c, n) - a // c * c
            for a, b, c, n in zip(box.start, box.stop, chunk, shape, strict=True)
        )
        for box in boxes
    )
    return read / max(sum(box.size for box in boxes), 1)


def aligned(like: jax.ShapeDtypeStruct, chunk: Sequence[int]) -> NamedSharding | None:
    """Returns how to read a leaf instead of as wanted; None: as wanted is as good.

    Every axis of the mesh cuts the dimension with most chunks left, along chunks; None too when
    that would take more than twice the memory of a wanted shard.
    """
    wanted = like.sharding
    if not isinstance(wanted, NamedSharding) or len(chunk) != len(like.shape):
        return None
    places = wanted.devices_indices_map(like.shape).values()
    boxes = list({Box.of(index, like.shape) for index in places})
    if amplification(like.shape, chunk, boxes) <= TOLERANCE:
        return None
    left = [n // c if n % c == 0 else 1 for n, c in zip(like.shape, chunk, strict=True)]
    cuts: list[list[str]] = [[] for _ in like.shape]
    for axis, ways in sorted(wanted.mesh.shape.items(), key=lambda item: -item[1]):
        d = max(range(len(left)), key=lambda d: (left[d] % ways == 0, left[d]))
        if left[d] % ways == 0:
            cuts[d].append(axis)
            left[d] //= ways
    # An axis that cuts nothing leaves copies; the wanted shards may have the same ones.
    sharding = NamedSharding(wanted.mesh, PartitionSpec(*(tuple(c) or None for c in cuts)))
    sizes = [math.prod(s.shard_shape(like.shape)) for s in (sharding, wanted)]
    return sharding if sizes[0] <= 2 * sizes[1] else None


def pieces(
    shape: Sequence[int], chunk: Sequence[int], boxes: Sequence[Box], limit: int
) -> Iterator[tuple[Box, list[int]]]:
    """Yields (what to read at once, numbers of the boxes that want some of it).

    No chunk lies in two pieces. A piece of several boxes is one chunk; one of a single box lies in
    it and has at most `limit` elements unless it is one chunk.
    """
    todo = [(Box.whole(shape), list(range(len(boxes))))]
    while todo:
        box, near = todo.pop()
        common = {i: both for i in near if (both := box & boxes[i]) is not None}
        if not common:
            continue
        edges = zip(box.start, box.stop, chunk, strict=True)
        cells = [-(-b // c) - a // c for a, b, c in edges]
        if max(cells, default=1) > 1 and (len(common) > 1 or box.size > limit):
            d = cells.index(max(cells))
            middle = box.start[d] + cells[d] // 2 * chunk[d]
            stop, start = list(box.stop), list(box.start)
            stop[d] = start[d] = middle
            todo.append((Box(tuple(start), box.stop), list(common)))
            todo.append((Box(box.start, tuple(stop)), list(common)))
        else:
            yield (box if len(common) > 1 else next(iter(common.values()))), list(common)


class Target:
    """A leaf that is being read: the memory of its shards, and what has been asked for."""

    def __init__(
        self,
        like: Any,
        stored: Any,
        chunk: Sequence[int],
        sharding: Any,
        rows: Sequence[int] | None = None,
    ):
        """like: as the leaf is wanted. stored: its array. sharding: to read in; None: NumPy.

        rows: the stored row of each wanted one; None: the same.
        """
        self._rows = rows
        self._like, self._stored, self._sharding = like, stored, sharding
        self._chunk = tuple(chunk)
        shape = tuple(like.shape)
        where = {} if sharding is None else sharding.addressable_devices_indices_map(shape)
        self._boxes = {device: Box.of(index, shape) for device, index in where.items()}
        self._buffers: dict[Box, np.ndarray] = {}

    def start(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Asks for piece after piece; yields (bytes under way, what waits for them)."""
        shape, dtype = tuple(self._like.shape), np.dtype(self._like.dtype)
        boxes = list(dict.fromkeys(self._boxes.values())) or [Box.whole(shape)]
        self._buffers = {box: store.buffer(box.shape, dtype) for box in boxes}
        if 0 in shape:
            return
        places = [t for own in self._buffers.items() for t in targets_of(*own, self._rows)]
        limit = PIECE // dtype.itemsize
        for box, wanted in pieces(shape, self._chunk, [p for p, _ in places], limit):
            targets = [places[i] for i in wanted]
            alone = len(targets) == 1
            place, view = targets[0]
            # An index with an ellipsis: a view of a scalar too.
            memory = view[*box.index(place), ...] if alone else store.buffer(box.shape, dtype)
            source = self._stored[box.index()].translate_to[(0,) * len(shape)]
            future = ts.array(memory).write(source)
            yield box.size * dtype.itemsize, _deal(future, box, memory, () if alone else targets)

    def finish(self) -> Any:
        """Returns the leaf, where it is wanted."""
        if self._sharding is None:
            return next(iter(self._buffers.values()))
        kind = self._sharding.memory_kind
        shards = [
            jax.device_put(self._buffers[box], SingleDeviceSharding(device, memory_kind=kind))
            for device, box in self._boxes.items()
        ]
        self._buffers = {}
        shape = tuple(self._like.shape)
        x = jax.make_array_from_single_device_arrays(
            shape, self._sharding, shards, dtype=self._like.dtype
        )
        return x

    def exchange(self, votes: "Votes") -> Any:
        """Returns the leaf, which the devices of all processes deal out to where it is wanted."""
        x = self.finish()
        votes.go_on()
        # Donated: the memory of what was read is freed.
        return jax.block_until_ready(jax.device_put(x, self._like.sharding, donate=True))


def _deal(
    future: Any, box: Box, memory: np.ndarray, targets: Sequence[tuple[Box, np.ndarray]]
) -> Callable[[], None]:
    """Returns what waits for a piece and copies it to the targets that want some of it."""

    def wait() -> None:
        future.result(timeout=store.PATIENCE_S)
        for place, view in targets:
            both = box & place
            assert both is not None
            view[*both.index(place), ...] = memory[both.index(box)]

    return wait


class Votes:
    """Lets all processes agree, before each exchange, that each of them could read its part."""

    def __init__(self, exchanges: int):
        """exchanges: to come, the same number on all processes."""
        self._left = exchanges

    def go_on(self) -> None:
        """Raises: OSError when another process gave up."""
        self._left -= 1
        if agreement.tell(False).any():
            self._left = 0
            raise OSError("another process could not read")

    def give_up(self) -> None:
        """Tells those who wait for the next exchange, if there is one."""
        if self._left:
            self._left = 0
            agreement.tell(True)


def read(folder: Path, leaves: Sequence[tuple[str, Any]], rows: Rows = AS_STORED) -> Iterator[Any]:
    """Yields the arrays of the leaves (name, like) of a step that our manager wrote, in order.

    like: a NumPy array, or a ShapeDtypeStruct with a sharding. rows: of leaves whose rows are
    wanted in another order; each row is read straight to its place. Raises: what tensorstore does;
    StoreError for an object store that fails; ValueError for a leaf of another shape or dtype.
    """
    chunks = stored_chunks(folder)
    ways = [_way(like, chunks.get(name)) for name, like in leaves]
    votes = Votes(sum(way is not None for way in ways))
    try:
        yield from _read(folder, leaves, chunks, ways, votes, rows)
    except Exception as error:  # tensorstore raises many kinds
        votes.give_up()
        raise store.explained(folder, error) from error


def _read(
    folder: Path,
    leaves: Sequence[tuple[str, Any]],
    chunks: dict[str, tuple[int, ...]],
    ways: Sequence[NamedSharding | None],
    votes: Votes,
    rows: Rows,
) -> Iterator[Any]:
    context = store.index_context()
    arrays = [store.open_leaf(folder, name, context) for name, _ in leaves]
    total = sum(math.prod(x.shape) * x.dtype.itemsize for _, x in leaves)
    far = isinstance(folder, store.ObjectPath)  # answers late, and many at a time
    room = WINDOW if far else min(max(int(SHARE * total), PIECE), WINDOW)
    flying: deque[tuple[int, Callable[[], Any], bool]] = deque()
    for (name, like), array, way in zip(leaves, arrays, ways, strict=True):
        stored = array.result(timeout=store.PATIENCE_S)
        target = _target(name, like, stored, chunks.get(name), way, rows.get(name))
        for nbytes, wait in target.start():
            flying.append((nbytes, wait, False))
            yield from _land(flying, room)
        last = target.finish if way is None else functools.partial(target.exchange, votes)
        flying.append((0, last, True))
    yield from _land(flying, 0)


def _land(flying: deque[tuple[int, Callable[[], Any], bool]], room: int) -> Iterator[Any]:
    """Waits for the oldest reads until `room` bytes are under way; yields what is a whole leaf."""
    while flying and (sum(n for n, _, _ in flying) > room or not room):
        _, call, whole = flying.popleft()
        found = call()
        if whole:
            yield found


def _way(like: Any, chunk: Sequence[int] | None) -> NamedSharding | None:
    """Returns how to read a leaf so that no two processes read one chunk; None: as it is wanted."""
    alone = jax.process_count() == 1 or isinstance(like, np.ndarray)
    return None if alone or chunk is None or 0 in like.shape else aligned(like, chunk)


def _target(
    name: str,
    like: Any,
    stored: Any,
    chunk: Sequence[int] | None,
    way: NamedSharding | None,
    rows: Sequence[int] | None,
) -> Target:
    there = (tuple(stored.shape), stored.dtype.numpy_dtype)
    shape = tuple(max(n, 1) for n in like.shape) if 0 in like.shape else tuple(like.shape)
    if there != (shape, np.dtype(like.dtype)):
        raise ValueError(
            f"leaf {name} is {there[1]}{there[0]} there and {like.dtype}{like.shape} in `like`"
        )
    chunk = tuple(stored.chunk_layout.read_chunk.shape or ()) if chunk is None else chunk
    wanted = None if isinstance(like, np.ndarray) else like.sharding
    return Target(like, stored, chunk, way or wanted, rows)


def take(x: Any, rows: Sequence[int] | None) -> Any:
    """Returns an array with its rows in another order, where it lies; rows: None: as it is."""
    if rows is None or isinstance(x, np.ndarray):
        return x if rows is None else x[np.asarray(rows)]
    return x.at[np.asarray(rows)].get(out_sharding=x.sharding)


def landing(
    arrays: Iterator[Any], landed: Callable[[list[Any]], None] | None, like: Tree
) -> list[Any]:
    """Returns the arrays, having told `landed` of each GROUPS-th of the bytes."""
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(like)]
    enough = max(sum(sizes) / GROUPS, MIN_GROUP)
    found, told, filled = [], 0, 0
    for x, size in zip(arrays, sizes, strict=True):
        found.append(x)
        filled += size
        if landed is not None and (filled >= enough or len(found) == len(sizes)):
            landed(found[told:])
            told, filled = len(found), 0
    return found


# ---- writing
#
# Orbax, its context, its errors in words, a save in the background. What Orbax cannot do is made up
# for here: arrays without elements, shardings that are not given, messages of many kilobytes.


# A shard is read in whole chunks; of one chunk a shard, as Orbax makes them, another mesh would
# need much memory to read (`aligned`).
CHUNKS = 64  # of a leaf, at least, of which each has
MIN_CHUNK, MAX_CHUNK = 2**14, 2**26  # bytes
LEAVE_S = 2.0  # for a thread that waits for a failed process to end at the exit (chosen)
POLL_S = 0.2  # between two looks whether another process of the job gave up (chosen)
GONE = 3  # looks in a row after which a folder counts as removed (chosen)
PATIENCE_S = 1800  # how long the processes of a job wait for each other's storage (chosen)
Compression = Literal["auto", "none", "zstd"]


class ReadBackError(SaveError):
    """A step that counted was read back and is not what was written; it counts no more."""


class SaveHandle:
    """A save under way. blocking_s: seconds that the call took from the training loop."""

    def __init__(self, step: int):
        """step: being saved."""
        self.step, self.blocking_s = step, 0.0
        self._error: SaveError | None = None
        self._thread: threading.Thread | None = None
        self._settled, self._checked = threading.Event(), threading.Event()

    def run(self, todo: Sequence[Callable[[], None]], folder: Path) -> None:
        """Starts storing in the background.

        todo: what stores; what reads back and takes names of older steps away, once the step
        counts; what frees their bytes. Each is let go when it is done, with all that it holds.
        """
        left = list(todo)

        def work() -> None:
            try:
                left.pop(0)()
            except Exception as error:  # tensorstore raises many kinds, some bare
                kind = SupersededError if isinstance(error, SupersededError) else SaveError
                self._error = kind(
                    f"step {self.step} was not saved in {folder}: {reason(error)}; "
                    "earlier checkpoints are untouched"
                )
                self._checked.set()
                return  # a store that did not answer is not asked again
            finally:
                self._settled.set()
            while left:
                try:
                    left.pop(0)()
                except ReadBackError as error:
                    self._error = error
                except Exception as error:
                    logging.warning("old steps stay in %s: %s", folder, reason(error))
                self._checked.set()

        self._thread = threading.Thread(target=work, name=f"save-{self.step}")
        self._thread.start()

    def result(self) -> None:
        """Waits until the step counts. Raises: SaveError, each time it is asked."""
        if self._thread is not None:
            self._settled.wait()
        if self._error is not None:
            raise self._error

    def wait_checked(self) -> None:
        """Waits, if the step counts, until it was read back and old steps lost their names."""
        if self._settled.is_set():
            self._checked.wait()

    def join(self) -> None:
        """Waits until nothing is left to do."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Waits until the step was read back and old ones are gone. Raises: as `result`."""
        self.join()
        self.result()


def write(
    path: Path, state: Tree, metadata: dict[str, Any], compress: bool, file_bytes: int | None = None
) -> Any:
    """Copies the arrays off the devices and starts writing them. Returns: Orbax's response.

    file_bytes: at which it begins another file; None: Orbax's own.
    """
    _quieten_orbax()
    context = _context(compress)
    if file_bytes is not None:
        context.array.saving.ocdbt_target_data_file_size = file_bytes
    context.array.saving.scoped_storage_options_creator = _chunks
    with _one_at_a_time(), context:
        return ocp.save_async(
            str(path), jax.tree.map(_storable, state), overwrite=True, custom_metadata=metadata
        )


def load(
    folder: Path,
    like: Tree,
    partial: bool,
    landed: Callable[[list[Any]], None] | None = None,
    rows: Rows = AS_STORED,
) -> Tree:
    """Returns the arrays of a step, placed as `like` says, every byte read about once.

    landed: is given the leaves in order, some at a time, while others are still being read.
    rows: of leaves that are wanted in another order.
    Raises: what tensorstore or Orbax does.
    """
    like = jax.tree.map(_placed, like)
    if any((place / RECORD).exists() for place in (folder, folder.parent)):  # parent: a copy's
        found = landing(read(folder, named_leaves(like), rows), landed, like)
        return jax.tree.unflatten(jax.tree.structure(like), found)
    context = _context(False)  # plain Orbax wrote it, in one of its formats
    context.pytree.loading.partial_load = partial
    with context:
        found = ocp.load(str(folder), like)
    return jax.tree_util.tree_map_with_path(lambda p, x: take(x, rows.get(name_of(p))), found)


def _chunks(key: Any, value: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions:
    """Stores a leaf in chunks that are small, yet lie in one piece in what is written at once.

    Such a chunk is written from where it lies; any other is copied first, which doubles the time
    and the memory of a save (524 MB on 8 CPU devices: 0.7 instead of 1.4 s, measured).
    """
    shape = tuple(value.shape)
    size, axes = _chunking(shape, _written_at_once(value), np.dtype(value.dtype))
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=size, shard_axes=axes)


@functools.cache
def _chunking(
    shape: tuple[int, ...], written: tuple[int, ...], dtype: np.dtype
) -> tuple[int, tuple[int, ...]]:
    """Returns (bytes, dimensions cut down to one) to ask Orbax for, which then has its own rule.

    Of the chunks in one piece that it would make, that which is nearest to a CHUNKS-th of the leaf.
    """
    aim = max(MIN_CHUNK, math.prod(shape) * dtype.itemsize // CHUNKS)
    found: list[tuple[float, int, tuple[int, ...]]] = [(math.inf, aim, ())]
    for axes in (tuple(range(n)) for n in range(max(len(shape), 1))):
        size = aim
        while size <= MAX_CHUNK:
            chunk = choose_chunk_shape(shape, written, dtype, size, shard_axes=axes)
            nbytes = math.prod(chunk) * dtype.itemsize
            if _in_one_piece(chunk, written) and nbytes >= min(MIN_CHUNK, aim):
                found.append((abs(math.log(nbytes / aim)), size, axes))
                break
            size *= 2
    _, size, axes = min(found)
    return size, axes


def _in_one_piece(chunk: Sequence[int], written: Sequence[int]) -> bool:
    """Tells whether a chunk of an array of shape `written` is contiguous in it."""
    rows = next((d for d, n in enumerate(chunk) if n > 1), len(chunk))
    return tuple(chunk[rows + 1 :]) == tuple(written[rows + 1 :])


def _written_at_once(value: Any) -> tuple[int, ...]:
    """Returns the shape of what Orbax writes of each device: replicas share a shard's work."""
    if not isinstance(value, jax.Array):
        return value.shape
    shard = value.sharding.shard_shape(value.shape)
    copies = value.sharding.num_devices * math.prod(shard) // max(value.size, 1)
    axis = next((d for d, n in enumerate(shard) if n % max(copies, 1) == 0), None)
    return tuple(n // copies if d == axis else n for d, n in enumerate(shard))


@functools.cache
def _one_at_a_time() -> threading.Lock:
    """Orbax numbers the saves that begin, for the whole process: two threads would share one."""
    return threading.Lock()


def barrier() -> Callable[..., None]:
    """Returns what all processes of a job meet at: (key=, timeout_ms=), from any thread."""
    return multihost.get_barrier_sync_fn()


def wait(response: Any, key: str, folder: Path) -> None:
    """Waits until Orbax has written, or until another process of the job gives up (`give_up`).

    Orbax's threads wait minutes for a process that failed, and for each other when the folder that
    they write to is removed. key: of the save, new for each. folder: which holds the steps.
    Raises: what Orbax does; OSError when another process gave up, or the folder is gone.
    """
    if jax.process_count() == 1:
        response.result()
        return
    ended: list[BaseException | None] = []

    def work() -> None:
        try:
            response.result()
            ended.append(None)
        except BaseException as error:  # raised below, in the thread that waits
            ended.append(error)

    thread = threading.Thread(target=work, name="orbax-writes", daemon=True)
    thread.start()
    gone = 0  # looks that did not find the folder: a network's file system may miss it once
    while not ended:
        thread.join(POLL_S)
        told = get_signaling_client().key_value_try_get(key)
        gone = 0 if folder.is_dir() else gone + 1
        if told is None and gone == GONE:
            told = f"{folder} was removed while a step was written there"
        if not ended and told is not None:
            _leave_behind()
            raise OSError(told)
    if ended[0] is not None:
        raise ended[0]


@functools.cache
def _left_behind() -> weakref.WeakSet[threading.Thread]:
    """Returns the threads that no exit of this process waits for."""
    found: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    python: Any = threading  # its own book of threads, as of version 3.12
    pool: Any = pools

    def forget() -> None:
        if any(t.is_alive() for t in found):  # ends the barriers that they are in
            jax.distributed.shutdown()
        for thread in [t for t in found if t.is_alive()]:
            thread.join(LEAVE_S)  # one that wakes up in C++ after Python's end aborts the process
            pool._threads_queues.pop(thread, None)
            with python._shutdown_locks_lock:
                python._shutdown_locks.discard(vars(thread)["_tstate_lock"])

    python._register_atexit(forget)
    return found


def _leave_behind() -> None:
    """Lets this process exit though threads of Orbax wait for a process that failed.

    They are in a barrier of jax's coordination service, up to 20 minutes, which nothing can call
    off, and Python joins its threads before it runs what would end jax's client.
    """
    kinds = (future._SignalingThread,)
    threads = threading.enumerate()
    found = [t for t in threads if isinstance(t, kinds) or t.name.startswith("asyncio_")]
    _left_behind().update(found)


@dataclasses.dataclass(frozen=True)
class Failed:
    """Stands for Orbax's response where there is none. error: the reason."""

    error: Exception

    def result(self) -> None:
        """Raises the error."""
        raise self.error


def give_up(key: str, error: BaseException) -> None:
    """Tells the processes that are in `wait` that this one failed.

    Orbax's threads there wait for signals of this process, up to 20 minutes, and Python waits for
    those threads at its exit. So all signals of the save are given: what the threads then do or
    fail to do is of no account, as the step gets no name.
    """
    if jax.process_count() > 1:
        text = f"process {jax.process_index()}: {reason(error)}"
        get_signaling_client().key_value_set(key, text, allow_overwrite=True)
        save = synchronization.OperationIdGenerator.get_current_operation_id()
        future.set_signals(tuple(synchronization.HandlerAwaitableSignal), operation_id=save)


def agree(key: str, mine: Any, judge: Callable[[list[Any]], Any]) -> Any:
    """Returns what `judge` makes, on process 0, of what each process of a job says (JSON).

    key: new for each. From any thread; no device is used. Raises: what the service does.
    """
    words, part = get_signaling_client(), jax.process_index()
    words.key_value_set(f"{key}_{part}", json.dumps(mine), allow_overwrite=True)
    if part == 0:
        said = [
            words.blocking_key_value_get(f"{key}_{i}", PATIENCE_S)
            for i in range(jax.process_count())
        ]
        try:
            verdict = judge([json.loads(text) for text in said])
        except Exception as error:  # or the others would wait in vain
            verdict = {"unknown": reason(error)}
        words.key_value_set(key, json.dumps(verdict), allow_overwrite=True)
        return verdict
    return json.loads(words.blocking_key_value_get(key, PATIENCE_S))


def _context(compress: bool) -> ocp.Context:
    context = ocp.Context()
    context.array.saving.use_compression = compress
    return context


def compresses(policy: Compression, state: Tree) -> bool:
    """Tells whether to compress: auto: where most bytes are elements of one byte.

    Compression costs 4-5 times the wall time of a save on few cores and gains little on float noise
    (measured, 2-core CPU); bytes are codes of few values and gain.
    """
    if policy != "auto":
        return policy == "zstd"
    leaves = jax.tree.leaves(state)
    small = sum(x.nbytes for x in leaves if x.dtype.itemsize == 1)
    return 2 * small > sum(x.nbytes for x in leaves)


def _storable(x: Any) -> Any:
    """Orbax refuses arrays without elements: one element stands in for them."""
    return np.zeros([max(n, 1) for n in x.shape], x.dtype) if 0 in x.shape else x


def _placed(x: Any) -> Any:
    """Without a sharding Orbax would take the one saved, which may be of a mesh that is gone."""
    if isinstance(x, np.ndarray):
        return x
    where = getattr(x, "sharding", None)
    where = where or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def _from_elsewhere(record: standard_logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _quieten_orbax() -> None:
    """Keeps Orbax's threads from printing the tracebacks of errors that SaveHandle explains."""
    standard_logging.getLogger("absl").addFilter(_from_elsewhere)  # adding it again changes nothing


def reason(error: BaseException) -> str:
    """Returns the first line that a person can use of a storage error."""
    text = str(error)
    for words, meaning in (
        ("No space left", "no space left on the device"),
        ("RESOURCE_EXHAUSTED", "storage is full"),
        ("File too large", "a file would be larger than allowed"),
        ("Read-only file system", "the file system is read-only"),
        ("Permission denied", "permission denied"),
    ):
        if words in text:
            return meaning
    lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:300]
