"""The last step in shared memory: what a restart on the same hosts reads instead of storage.

A file in a folder of /dev/shm that belongs to the host's agent, so it outlives a killed trainer
(Python's own shared memory would be unlinked with the trainer) and goes with the agent. It has two
slots; a copy goes over the older one, whose header is taken away first and written last, so a torn
copy is never taken for a step, and checksums say whether memory still holds what was put there.
Each process keeps the shards that its devices hold. Sources: MegaScale section 4.4 and
ByteCheckpoint section 4 (the first of two stages).

`Segment` needs no jax; `MemoryTier` is the trainer's.
"""

import json
import math
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from megajax.checkpoint import agreement
from megajax.checkpoint.trust import CheckpointError
from megajax.core.boxes import Box, intersect, stored_rows, targets
from megajax.core.files import open_own, parse_json

Tree = Any  # core.tree has it, and jax
Order = Mapping[str, Sequence[int]]  # as leaves.Order
PAGE = 4096
ALIGN = 64
MAX_RANK = 32  # NumPy has up to 64
HEADER = struct.Struct("<8sQQQQI")  # magic, number, step, bytes of the table, of all, their CRC-32
MAGIC = b"megajax1"
ATTEMPT, ORDER = "attempt", "order_of_rows"  # members of data_state
NONE = (-1, -1)


@dataclass(frozen=True)
class Piece:
    """A shard: the box of a leaf, and its elements."""

    name: str
    shape: tuple[int, ...]
    box: Box
    array: np.ndarray


@dataclass(frozen=True)
class Snapshot:
    """A whole copy. The pieces are views of shared memory until the next write but one."""

    step: int
    data_state: dict[str, Any]
    pieces: list[Piece]


class Segment:
    """The shared memory of one process. capacity: bytes of one copy, its table included."""

    def __init__(self, path: str | Path):
        """Opens a segment that exists. Raises: CheckpointError when it does not."""
        self.path = Path(path)
        try:
            with os.fdopen(open_own(self.path, make=False), "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
            if len(self._memory) < 2 * PAGE:
                raise ValueError(f"{len(self._memory)} bytes")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} is no memory segment: {error}") from None
        self.capacity = (len(self._memory) - 2 * PAGE) // 2

    @classmethod
    def create(cls, path: str | Path, capacity: int) -> "Segment":
        """Makes a segment for two copies of `capacity` bytes each.

        Raises: CheckpointError when there is not so much memory; nothing is left then.
        """
        size = 2 * PAGE + 2 * (-(-capacity // PAGE) * PAGE)
        try:
            with open(path, "xb") as file:
                # Now, because a page that is not there when it is written to is a SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
        except FileExistsError:
            raise CheckpointError(f"{path} exists; it is another's, or was not removed") from None
        except OSError as error:
            Path(path).unlink(missing_ok=True)
            raise CheckpointError(
                f"cannot keep {size:,} bytes in {path}: {error.strerror}"
            ) from None
        return cls(path)

    def close(self, remove: bool = False) -> None:
        """Unmaps the memory. remove: also deletes the file, which frees the memory."""
        self._memory.close()
        if remove:
            self.path.unlink(missing_ok=True)

    def steps(self) -> list[int]:
        """Returns the steps with a whole header, the newest copy last. Reads no payload."""
        return [step for _, step, *_ in sorted(self._headers())]

    def write(self, step: int, pieces: Iterable[Piece], data_state: dict[str, Any]) -> None:
        """Copies a step over the older slot.

        Raises: CheckpointError when it does not fit; the newer copy stays in every case.
        """
        self.copy(step, pieces, data_state)()

    def copy(
        self, step: int, pieces: Iterable[Piece], data_state: dict[str, Any]
    ) -> Callable[[], None]:
        """The first half of `write`. Returns the second, checksum and header: without it the copy
        counts as torn. Another copy may begin only after it.
        """
        pieces = list(pieces)
        rows, table, total = _lay_out(pieces, data_state)
        begin = -(-len(table) // ALIGN) * ALIGN
        if total > self.capacity:
            raise CheckpointError(
                f"step {step} takes {total:,} bytes, a slot of {self.path} has {self.capacity:,}"
            )
        headers = sorted(self._headers())
        number = headers[-1][0] + 1 if headers else 1
        slot = 1 - headers[-1][-1] if headers else 0
        home = 2 * PAGE + slot * self.capacity
        self._memory[slot * PAGE : slot * PAGE + HEADER.size + 4] = bytes(HEADER.size + 4)
        self._memory[home : home + len(table)] = table
        for p, row in zip(pieces, rows, strict=True):
            target = np.frombuffer(self._memory, np.uint8, p.array.nbytes, home + begin + row[-1])
            target[:] = np.ascontiguousarray(p.array).reshape(-1).view(np.uint8)
            del target  # an exported view would keep close() from working

        def seal() -> None:
            crc = self._crc(home, total)
            header = HEADER.pack(MAGIC, number, step, len(table), total, crc)
            sealed = header + struct.pack("<I", zlib.crc32(header))
            self._memory[slot * PAGE : slot * PAGE + len(sealed)] = sealed

        return seal

    def read(self, step: int | None = None) -> Snapshot:
        """Returns a step (None: the newest whole one), checked byte for byte.

        Raises: CheckpointError when no whole copy of it is here.
        """
        for snapshot in self.snapshots():
            if step in (None, snapshot.step):
                return snapshot
        what = "a step" if step is None else f"step {step}"
        raise CheckpointError(f"{self.path} holds no whole copy of {what}; restore from storage")

    def snapshots(self) -> Iterator[Snapshot]:
        """Yields the whole copies, the newest first, each checked byte for byte."""
        for _, step, table_bytes, total, crc, slot in sorted(self._headers(), reverse=True):
            home = 2 * PAGE + slot * self.capacity
            if self._crc(home, total) != crc:
                continue
            try:
                table = parse_json(self._memory[home : home + min(table_bytes, total)])
                begin = home + -(-table_bytes // ALIGN) * ALIGN
                pieces = [self._piece(begin, home + total, row) for row in table["pieces"]]
                state = dict(table["data_state"])
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # of another version: its checksum is good, and its table is no table
            yield Snapshot(step, state, pieces)

    def _piece(self, begin: int, end: int, row: list) -> Piece:
        """Returns a row of the table, which lies from `begin` to `end`. Raises: ValueError for one
        that does not, TypeError."""
        name, shape, start, stop, dtype, offset = row
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        if any(type(n) is not int for n in (*shape, *start, *stop, offset)) or kind.hasobject:
            raise TypeError(f"{row}")
        if not len(shape) == len(start) == len(stop) or len(shape) > MAX_RANK:
            raise ValueError(f"{row}")
        if not all(0 <= a <= b <= n for a, b, n in zip(start, stop, shape, strict=True)):
            raise ValueError(f"{row}")
        box = Box(tuple(start), tuple(stop))
        if offset < 0 or begin + offset + box.size * kind.itemsize > end:
            raise ValueError(f"{row}")
        flat = np.frombuffer(self._memory, np.uint8, box.size * kind.itemsize, begin + offset)
        return Piece(name, tuple(shape), box, flat.view(kind).reshape(box.shape))

    def _crc(self, home: int, total: int) -> int:
        with memoryview(self._memory) as memory, memory[home : home + total] as body:
            return zlib.crc32(body)

    def _headers(self) -> list[tuple[int, int, int, int, int, int]]:
        """Returns (number of the copy, step, bytes of the table, of all, CRC, slot) of the headers
        whose checksum is right."""
        headers = []
        for slot in (0, 1):
            header = self._memory[slot * PAGE : slot * PAGE + HEADER.size]
            (crc,) = struct.unpack_from("<I", self._memory, slot * PAGE + HEADER.size)
            magic, *values = HEADER.unpack(header)
            if magic == MAGIC and zlib.crc32(header) == crc and values[3] <= self.capacity:
                headers.append((*values, slot))
        return headers


def _lay_out(pieces: list[Piece], data_state: dict[str, Any]) -> tuple[list, bytes, int]:
    """Returns (rows of the table, the table, bytes of it and of all pieces behind it)."""
    offset, rows = 0, []
    for p in pieces:
        rows.append([p.name, p.shape, p.box.start, p.box.stop, str(p.array.dtype), offset])
        offset += -(-p.array.nbytes // ALIGN) * ALIGN
    table = json.dumps({"data_state": data_state, "pieces": rows}).encode()
    return rows, table, -(-len(table) // ALIGN) * ALIGN + offset


# ---- the trainer's half


class MemoryTier:
    """The copies of one process of a job: the loop writes them (`put`), and the next attempt reads
    one (`take`).

    A copy says which attempt made it: processes never mix copies of one step from two attempts,
    whose sums may have gone in another order.
    """

    def __init__(self, path: Path, attempt: int):
        """path: in the agent's folder. attempt: how often the job was started before."""
        self._path, self._attempt = path, attempt
        self._segment = _left(path)
        self._is_off = False
        self._sealing: threading.Thread | None = None

    @classmethod
    def of_process(cls, path: Path | None, attempt: int) -> "MemoryTier | None":
        """Returns the one of this process; None where no agent would keep it."""
        return None if path is None else cls(path, attempt)

    def put(
        self, step: int, state: Tree, data_state: dict[str, Any], order: Order | None = None
    ) -> None:
        """Copies what this process's devices hold of a state, each box once.

        order: of leaves whose rows are not held in the model's order, as CheckpointManager.save
        has it.

        The checksum is made in the background; a process killed before it is done has the copy
        before this one. Where there is no memory, that is said once and the run goes on without.
        """
        if self._is_off:
            return
        self.wait()
        rows = {name: list(map(int, places)) for name, places in (order or {}).items()}
        pieces, data_state = _held(state), data_state | {ATTEMPT: self._attempt, ORDER: rows}
        total = _lay_out(pieces, data_state)[-1]
        try:
            if self._segment is not None and self._segment.capacity < total:
                self._path.unlink()  # of another mesh
                self._segment = None
            if self._segment is None:
                self._segment = Segment.create(self._path, total + PAGE)  # positions grow a digit
            seal = self._segment.copy(step, pieces, data_state)
        except CheckpointError as error:
            from absl import logging

            self._is_off = True
            logging.warning("nothing is kept in memory: %s", error)
        else:
            self._sealing = threading.Thread(target=seal)
            self._sealing.start()

    def wait(self) -> None:
        """Waits until the copy under way is whole."""
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None

    def take(
        self,
        like: Tree | Callable[[dict[str, Any]], Tree],
        at_least: int | None,
        order: Order | None = None,
    ) -> tuple[int, Tree, dict[str, Any]] | None:
        """Returns (step, the state placed as `like` says, its data_state); None: see storage.

        The step is the newest that all processes hold whole. at_least: the newest of storage; what
        is older than it is not taken. like: also a function of the data_state. order: in which the
        rows are wanted. A collective: all processes get the same answer.
        """
        held = {} if self._segment is None else {_key(s): s for s in self._segment.snapshots()}
        rows = agreement.tell([*held, NONE, NONE][:2])
        stored = agreement.tell(-1 if at_least is None else at_least).max()
        common = set.intersection(*({tuple(k) for k in copies} for copies in rows.tolist())) - {
            NONE
        }
        newest = max(common, default=NONE)
        if newest == NONE or newest[0] < stored:
            return None
        state = None
        try:
            snapshot = held[newest]
            state = _place(
                snapshot, like(snapshot.data_state) if callable(like) else like, order or {}
            )
        except CheckpointError as error:
            from absl import logging

            logging.warning("%s", error)
        if not agreement.tell(
            [state is not None]
        ).all():  # another mesh: a host lacks what it now wants
            return None
        data_state = {k: v for k, v in held[newest].data_state.items() if k not in (ATTEMPT, ORDER)}
        return newest[0], state, data_state


def _left(path: Path) -> Segment | None:
    """Returns the segment that the attempt before left; one that was killed while making it left a
    file that is none, and that goes."""
    if not path.exists():
        return None
    try:
        return Segment(path)
    except CheckpointError as error:
        from absl import logging

        logging.warning("%s; it is made anew", error)
        if path.is_file():
            path.unlink()
        return None


def _key(snapshot: Snapshot) -> tuple[int, int]:
    return snapshot.step, snapshot.data_state[ATTEMPT]


def _held(state: Tree) -> list[Piece]:
    """Returns what this process's devices hold of a state, each box once."""
    from megajax.core.tree import named_leaves

    pieces = []
    for name, x in named_leaves(state):
        if not hasattr(x, "addressable_shards") or not isinstance(x.dtype, np.dtype):
            raise CheckpointError(
                f"leaf {name} is {type(x).__name__} of {getattr(x, 'dtype', 'no type')}; memory "
                "keeps arrays of devices (jax.device_put, and jax.random.key_data for random keys)"
            )
        boxes: dict[Box, Any] = {}
        for shard in x.addressable_shards:
            boxes.setdefault(Box.of(shard.index, x.shape), shard.data)
        pieces += [Piece(name, x.shape, box, np.asarray(data)) for box, data in boxes.items()]
    return pieces


def _place(snapshot: Snapshot, like: Tree, order: Order) -> Tree:
    """Returns the state placed as `like` says, its rows in an order.

    Raises: CheckpointError when a part is not here.
    """
    import jax

    from megajax.core.tree import named_leaves

    pieces: dict[str, list[Piece]] = {}
    for piece in snapshot.pieces:
        pieces.setdefault(piece.name, []).append(piece)

    stored = snapshot.data_state.get(ORDER, {})

    def leaf(name: str, abstract: Any) -> Any:
        rows = stored_rows(stored.get(name, ()), order.get(name, ()))

        def fill(index: Any) -> np.ndarray:
            out = np.empty(Box.of(index, abstract.shape).shape, abstract.dtype)
            for place, view in targets(Box.of(index, abstract.shape), out, rows):
                _assemble(snapshot.step, name, pieces.get(name, []), place, view, abstract.shape)
            return out

        return jax.make_array_from_callback(abstract.shape, abstract.sharding, fill)

    names, tree = [n for n, _ in named_leaves(like)], jax.tree.structure(like)
    leaves = [leaf(n, x) for n, x in zip(names, jax.tree.leaves(like), strict=True)]
    return jax.tree.unflatten(tree, leaves)


def _assemble(
    step: int, name: str, pieces: list[Piece], box: Box, out: np.ndarray, shape: tuple[int, ...]
) -> None:
    """Fills the memory of a box. Raises: CheckpointError when a part is not here."""
    held = [p for p in pieces if p.shape == tuple(shape) and p.array.dtype == out.dtype]
    copied = 0
    for copy in intersect([p.box for p in held], [box]):
        piece = held[copy.source]
        out[copy.box.index(box)] = piece.array[copy.box.index(piece.box)]
        copied += copy.box.size
    if copied != math.prod(box.shape):
        raise CheckpointError(
            f"step {step} in memory lacks part of leaf {name}, {box.start}..{box.stop} of "
            f"{tuple(shape)}; restore from storage"
        )
