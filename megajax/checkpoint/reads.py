"""How the arrays of a step are read: every stored chunk once, straight to where it is to lie.

Storage gives whole chunks. One that a single shard wants is read into that shard's memory, one that
several shards of this process want is read once and dealt out. Where processes would read each
other's chunks, a leaf is read cut along its chunks instead and the devices exchange the pieces
(ByteCheckpoint section 4.3: read once, distribute over the idle interconnect).

On CPU devices the memory that is read into becomes the array; on others it goes when the copy is
done. Besides, SHARE of the state's bytes are on their way at most (or one piece, if that is more).
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from megajax.checkpoint import agreement, store
from megajax.core.boxes import Box
from megajax.core.boxes import targets as targets_of
from megajax.core.files import parse_json
from megajax.core.tree import Tree

TOLERANCE = 1.05  # bytes read for each byte that is there, up to which nothing is done (chosen)
SHARE = 0.25  # of the state's bytes that may be under way (chosen)
WINDOW = 2**28  # bytes under way at most, in however large a state (chosen)
PIECE = 2**22  # bytes asked for at once, if chunks are not larger (chosen)
ALIGNMENT = 64  # bytes: memory that begins so needs no copy to become an array on the CPU
# What has been read is checked beside what is being read, in so many parts of at least so many
# bytes: each is a program to compile (chosen).
GROUPS, MIN_GROUP = 4, 2**25
INDEX_CACHE = 10**8  # bytes of OCDBT's index that are kept, or every chunk would read it again

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
        self._buffers = {box: buffer(box.shape, dtype) for box in boxes}
        if 0 in shape:
            return
        places = [t for own in self._buffers.items() for t in targets_of(*own, self._rows)]
        limit = PIECE // dtype.itemsize
        for box, wanted in pieces(shape, self._chunk, [p for p, _ in places], limit):
            targets = [places[i] for i in wanted]
            alone = len(targets) == 1
            place, view = targets[0]
            # An index with an ellipsis: a view of a scalar too.
            memory = view[*box.index(place), ...] if alone else buffer(box.shape, dtype)
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
    context = index_context()
    arrays = [open_leaf(folder, name, context) for name, _ in leaves]
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


def index_context() -> ts.Context:
    """Returns what `open_leaf` shares among the leaves of a step."""
    return ts.Context({"cache_pool#index": {"total_bytes_limit": INDEX_CACHE}})


def open_leaf(folder: Path, name: str, context: ts.Context) -> Any:
    """Returns the future of a stored leaf's array."""
    kvstore = {
        "driver": "ocdbt",
        "base": store.kvstore(folder / "state"),
        "path": f"{name}/",
        "cache_pool": "cache_pool#index",
    }
    return ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True, read=True, context=context)


def buffer(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns fresh memory that begins at a multiple of ALIGNMENT."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return raw[begin : begin + nbytes].view(dtype).reshape(shape)
