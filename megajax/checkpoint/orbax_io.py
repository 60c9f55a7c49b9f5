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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import multihost
from orbax.checkpoint._src.arrays.subchunking import choose_chunk_shape
from orbax.checkpoint._src.futures import future, synchronization
from orbax.checkpoint._src.futures.signaling_client import get_signaling_client

from megajax.checkpoint import agreement, store
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
# Storage returns complete chunks. A chunk that one shard needs is read into the memory of that
# shard. A chunk that several shards of this process need is read once, and copied to each of them.
# Where several processes would read the same chunk, the leaf is read in another sharding, which is
# cut along the chunks, and then the devices exchange the pieces (ByteCheckpoint section 4.3: read
# once, distribute over the idle interconnect).
#
# On CPU devices the memory that is read into becomes the array; on other devices it is freed when
# it was copied to the device. At any time the reads under way have at most SHARE of the bytes of
# the state, or one piece if that is more.


TOLERANCE = 1.05  # (chosen) bytes read per stored byte up to which a leaf's sharding is not changed
SHARE = 0.25  # of the state's bytes that may be under way (chosen)
WINDOW = 2**28  # bytes under way at most, in however large a state (chosen)
PIECE = 2**22  # bytes asked for at once, if chunks are not larger (chosen)
# Leaves are checked while later ones are being read, in at most GROUPS groups of at least MIN_GROUP
# bytes: each group is a program to compile (chosen).
GROUPS, MIN_GROUP = 4, 2**25

# {leaf: the stored row of each of its rows}, for leaves that are read in another order than stored.
Rows = Mapping[str, Sequence[int]]
AS_STORED: Rows = {}


def stored_chunks(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns {leaf: shape of its chunks} of a step, as far as it is known."""
    chunks: dict[str, tuple[int, ...]] = {}
    for path in folder.glob("state/array_metadatas/process_*"):
        try:
            for entry in parse_json(path.read_bytes())["array_metadatas"]:
                array = entry["array_metadata"]
                chunk = tuple(array["chunk_shape"])
                if all(type(n) is int and n > 0 for n in chunk):
                    chunks[array["param_name"]] = chunk
        except (OSError, ValueError, KeyError, TypeError):
            continue  # the arrays can be read all the same
    return chunks


def amplification(shape: Sequence[int], chunk: Sequence[int], boxes: Sequence[Box]) -> float:
    """Returns how many elements are read for each element of these boxes: chunks are read as one
    piece."""
    read = sum(
        math.prod(
            min(-(-b // c) * c, n) - a // c * c
            for a, b, c, n in zip(box.start, box.stop, chunk, shape, strict=True)
        )
        for box in boxes
    )
    return read / max(sum(box.size for box in boxes), 1)


def aligned(like: jax.ShapeDtypeStruct, chunk: Sequence[int]) -> NamedSharding | None:
    """Returns the sharding to read a leaf in, if another one than that of `like` reads fewer bytes.

    In it every axis of the mesh cuts the dimension with most chunks left, along chunks. Returns
    None if the sharding of `like` is as good, or if the other one would take more than twice the
    memory for a shard.
    """
    goal = like.sharding
    if not isinstance(goal, NamedSharding) or len(chunk) != len(like.shape):
        return None
    places = goal.devices_indices_map(like.shape).values()
    boxes = list({Box.of(index, like.shape) for index in places})
    if amplification(like.shape, chunk, boxes) <= TOLERANCE:
        return None
    left = [n // c if n % c == 0 else 1 for n, c in zip(like.shape, chunk, strict=True)]
    cuts: list[list[str]] = [[] for _ in like.shape]
    for axis, ways in sorted(goal.mesh.shape.items(), key=lambda item: -item[1]):
        d = max(range(len(left)), key=lambda d: (left[d] % ways == 0, left[d]))
        if left[d] % ways == 0:
            cuts[d].append(axis)
            left[d] //= ways
    # An axis that cuts nothing leaves copies; the shards of `like` may have the same ones.
    sharding = NamedSharding(goal.mesh, PartitionSpec(*(tuple(c) or None for c in cuts)))
    sizes = [math.prod(s.shard_shape(like.shape)) for s in (sharding, goal)]
    return sharding if sizes[0] <= 2 * sizes[1] else None


def pieces(
    shape: Sequence[int], chunk: Sequence[int], boxes: Sequence[Box], limit: int
) -> Iterator[tuple[Box, list[int]]]:
    """Yields (a box to read at once, the numbers of the boxes that need some of it).

    No chunk lies in two pieces. A piece of several boxes is one chunk; one of a single box lies in
    it and has at most `limit` elements unless it is one chunk.
    """
    todo = [(Box.of_shape(shape), list(range(len(boxes))))]
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
    """A leaf that is being read: the memory of its shards, and the reads that fill it."""

    def __init__(
        self,
        name: str,
        like: Any,
        stored: Any,
        chunk: Sequence[int] | None,
        sharding: NamedSharding | None,
        rows: Sequence[int] | None = None,
    ):
        """Reads nothing yet.

        Args: like: as the leaf is to be; a NumPy array gives one. stored: its array in storage.
          chunk: None: as the storage says. sharding: to read in, if not that of `like`. rows: the
          stored row of each row; None: the same.
        Raises: ValueError if the stored leaf has another shape or dtype than `like`.
        """
        facts = (tuple(stored.shape), stored.dtype.numpy_dtype)
        shape = tuple(max(n, 1) for n in like.shape) if 0 in like.shape else tuple(like.shape)
        if facts != (shape, np.dtype(like.dtype)):
            raise ValueError(
                f"leaf {name} is {facts[1]}{facts[0]} there and {like.dtype}{like.shape} in `like`"
            )
        self._rows, self._like, self._stored = rows, like, stored
        self._sharding = sharding or (None if isinstance(like, np.ndarray) else like.sharding)
        self._chunk = tuple(stored.chunk_layout.read_chunk.shape or () if chunk is None else chunk)
        self._boxes: dict[Any, Box] = {}
        self._buffers: dict[Box, np.ndarray] = {}

    def start(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Starts one read after the other; yields (its bytes, a call that waits for its end)."""
        shape, dtype = tuple(self._like.shape), np.dtype(self._like.dtype)
        if self._sharding is not None:
            indices: Any = self._sharding.addressable_devices_indices_map(shape)
            self._boxes = {device: Box.of(index, shape) for device, index in indices.items()}
        boxes = list(dict.fromkeys(self._boxes.values())) or [Box.of_shape(shape)]
        self._buffers = {box: store.buffer(box.shape, dtype) for box in boxes}
        if 0 in shape:
            return
        places = list(self._buffers.items())
        if self._rows is not None:
            places = [t for place in places for t in targets_of(*place, self._rows)]
        limit = PIECE // dtype.itemsize
        for box, numbers in pieces(shape, self._chunk, [p for p, _ in places], limit):
            targets = [places[i] for i in numbers]
            alone = len(targets) == 1
            place, view = targets[0]
            # An index with an ellipsis: a view of a scalar too.
            memory = view[*box.index(place), ...] if alone else store.buffer(box.shape, dtype)
            source = self._stored[box.index()].translate_to[(0,) * len(shape)]
            future = ts.array(memory).write(source)
            yield box.size * dtype.itemsize, _deal(future, box, memory, () if alone else targets)

    def finish(self) -> Any:
        """Returns the leaf on its devices."""
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
        """Returns the leaf as `like` has it, after the devices of all processes exchanged it."""
        x = self.finish()
        votes.go_on()
        # Donated: the memory of what was read is freed.
        return jax.block_until_ready(jax.device_put(x, self._like.sharding, donate=True))


def _deal(
    future: Any, box: Box, memory: np.ndarray, targets: Sequence[tuple[Box, np.ndarray]]
) -> Callable[[], None]:
    """Returns a call that waits for a piece and copies it to the targets that need some of it."""

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
        """exchanges: how many will follow; the same number on all processes."""
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

    like: a NumPy array, or a ShapeDtypeStruct with a sharding. rows: of leaves that are read in
    another order; each row is read straight to its place. Raises: what tensorstore does;
    StoreError for an object store that fails; ValueError for a leaf of another shape or dtype.
    """
    chunks = stored_chunks(folder)
    shardings = [_shared_sharding(like, chunks.get(name)) for name, like in leaves]
    votes = Votes(sum(sharding is not None for sharding in shardings))
    try:
        context = store.index_context()
        arrays = [store.open_leaf(folder, name, context) for name, _ in leaves]
        total = sum(math.prod(x.shape) * x.dtype.itemsize for _, x in leaves)
        is_far = isinstance(folder, store.ObjectPath)  # answers late, and many at a time
        room = WINDOW if is_far else min(max(int(SHARE * total), PIECE), WINDOW)
        flying: deque[tuple[int, Callable[[], Any], bool]] = deque()
        for (name, like), array, sharding in zip(leaves, arrays, shardings, strict=True):
            stored = array.result(timeout=store.PATIENCE_S)
            target = Target(name, like, stored, chunks.get(name), sharding, rows.get(name))
            for nbytes, wait_piece in target.start():
                flying.append((nbytes, wait_piece, False))
                yield from _land(flying, room)
            is_shared = sharding is not None
            last = functools.partial(target.exchange, votes) if is_shared else target.finish
            flying.append((0, last, True))
        yield from _land(flying, 0)
    except Exception as error:  # tensorstore raises many kinds
        votes.give_up()
        raise store.explained(folder, error) from error


def _land(flying: deque[tuple[int, Callable[[], Any], bool]], room: int) -> Iterator[Any]:
    """Waits for the oldest reads until `room` bytes are under way; yields the complete leaves."""
    while flying and (sum(n for n, _, _ in flying) > room or not room):
        _, call, is_last = flying.popleft()
        result = call()
        if is_last:
            yield result


def _shared_sharding(like: Any, chunk: Sequence[int] | None) -> NamedSharding | None:
    """Returns `aligned` where a leaf is on several processes, so that no two read one chunk."""
    alone = jax.process_count() == 1 or isinstance(like, np.ndarray)
    return None if alone or chunk is None or 0 in like.shape else aligned(like, chunk)


def take(x: Any, rows: Sequence[int] | None) -> Any:
    """Returns an array with its rows in another order, on its devices; rows: None: the array."""
    if rows is None or isinstance(x, np.ndarray):
        return x if rows is None else x[np.asarray(rows)]
    return x.at[np.asarray(rows)].get(out_sharding=x.sharding)


def landing(
    arrays: Iterator[Any], landed: Callable[[list[Any]], None] | None, like: Tree
) -> list[Any]:
    """Returns the arrays, having told `landed` of each GROUPS-th of the bytes."""
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(like)]
    enough = max(sum(sizes) / GROUPS, MIN_GROUP)
    leaves, told, filled = [], 0, 0
    for x, size in zip(arrays, sizes, strict=True):
        leaves.append(x)
        filled += size
        if landed is not None and (filled >= enough or len(leaves) == len(sizes)):
            landed(leaves[told:])
            told, filled = len(leaves), 0
    return leaves


# ---- writing
#
# How arrays are handed to Orbax, how the processes of a job wait for it, and its errors in words.
# This also does what Orbax cannot: arrays without elements, leaves without a sharding, error
# messages of one line.


# A chunk is read as one piece. Orbax makes one chunk per shard, which another mesh would need much
# memory to read (`aligned`); so chunks are smaller here.
CHUNKS = 64  # of a leaf, at least, of which each has
MIN_CHUNK, MAX_CHUNK = 2**14, 2**26  # bytes
POLL_S = 0.2  # between two looks whether another process of the job gave up (chosen)
GONE = 3  # looks in a row after which a folder counts as removed (chosen)
PATIENCE_S = 1800  # how long the processes of a job wait for each other's storage (chosen)
Compression = Literal["auto", "none", "zstd"]


def write(
    path: Path, state: Tree, metadata: dict[str, Any], compress: bool, file_bytes: int | None = None
) -> Any:
    """Copies the arrays off the devices and starts writing them. Returns: Orbax's response.

    file_bytes: at which it begins another file; None: Orbax's own.
    """
    # Orbax's threads would print the tracebacks of errors that SaveHandle explains.
    standard_logging.getLogger("absl").addFilter(_from_elsewhere)  # adding it again changes nothing
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
        leaves = landing(read(folder, named_leaves(like), rows), landed, like)
        return jax.tree.unflatten(jax.tree.structure(like), leaves)
    context = _context(False)  # plain Orbax wrote it, in one of its formats
    context.pytree.loading.partial_load = partial
    with context:
        state = ocp.load(str(folder), like)
    return jax.tree_util.tree_map_with_path(lambda p, x: take(x, rows.get(name_of(p))), state)


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
    """Returns (bytes of a chunk, dimensions cut down to one), which Orbax is asked for.

    Orbax chooses the shape of the chunks from them. Of the requests that give contiguous chunks,
    this is the one whose chunks are nearest to a CHUNKS-th of the leaf.
    """
    aim = max(MIN_CHUNK, math.prod(shape) * dtype.itemsize // CHUNKS)
    requests: list[tuple[float, int, tuple[int, ...]]] = [(math.inf, aim, ())]
    for axes in (tuple(range(n)) for n in range(max(len(shape), 1))):
        size = aim
        while size <= MAX_CHUNK:
            chunk = choose_chunk_shape(shape, written, dtype, size, shard_axes=axes)
            nbytes = math.prod(chunk) * dtype.itemsize
            if _in_one_piece(chunk, written) and nbytes >= min(MIN_CHUNK, aim):
                requests.append((abs(math.log(nbytes / aim)), size, axes))
                break
            size *= 2
    _, size, axes = min(requests)
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


def meet(key: str) -> None:
    """Waits until all processes of a job have called this, from any thread. key: new for each."""
    multihost.get_barrier_sync_fn()(key=key, timeout_ms=1000 * PATIENCE_S)


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
            kinds = (future._SignalingThread,)
            threads = threading.enumerate()
            stuck = [t for t in threads if isinstance(t, kinds) or t.name.startswith("asyncio_")]
            _stuck_threads().update(stuck)
            raise OSError(told)
    if ended[0] is not None:
        raise ended[0]


@functools.cache
def _stuck_threads() -> weakref.WeakSet[threading.Thread]:
    """Returns the set of Orbax's threads that wait for a process that failed; put them there.

    They are in a barrier of jax's coordination service for up to 20 minutes, and nothing can call
    off one barrier. At its exit Python joins them before it runs the `atexit` functions, with which
    jax would end its client. So that the process can exit at once, a thread ends the client, and
    with it all barriers, as soon as the exit begins: the worker of an idle pool ends just then.
    """
    stuck: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
    pool = ThreadPoolExecutor(1, "exit")
    worker = pool.submit(threading.current_thread).result()

    def end_barriers(_: ThreadPoolExecutor) -> None:
        worker.join()
        if any(t.is_alive() for t in stuck):
            jax.distributed.shutdown()

    # The argument keeps the pool, whose worker would otherwise end now.
    threading.Thread(target=end_barriers, args=(pool,), name="end-barriers").start()
    return stuck


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


def agree(key: str, value: Any, judge: Callable[[list[Any]], Any]) -> Any:
    """Returns, on all processes, the result of `judge` on process 0 for the values (JSON) of all.

    key: new for each. From any thread; no device is used. Raises: what the service does.
    """
    words, part = get_signaling_client(), jax.process_index()
    words.key_value_set(f"{key}_{part}", json.dumps(value), allow_overwrite=True)
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
