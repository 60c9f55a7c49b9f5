"""The last step in shared memory: what a restart on the same hosts reads instead of storage.

A file in /dev/shm that the host's agent makes and removes, so it outlives a killed trainer
(Python's own shared memory would be unlinked with the trainer). It has two slots; a copy goes over
the older one, whose header is taken away first and written last, so a torn copy is never taken for
a step, and checksums say whether memory still holds what was put there. Each process keeps the
shards that its devices hold. Sources: MegaScale section 4.4 and ByteCheckpoint section 4 (the first
of two stages).

The agent's half (`Segment`) needs no jax; `put`, `common_step` and `get` are the trainer's.
"""

import json
import math
import mmap
import os
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from megajax.checkpoint.integrity import CheckpointError
from megajax.core.boxes import Box, intersect

Tree = Any  # core.tree has it, and jax
PAGE = 4096
HEADER = struct.Struct("<8sQQQQI")  # magic, turn, step, bytes of the table, of all, their CRC-32
MAGIC = b"megajax1"


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
    """The shared memory of one process. Made by its agent, opened by the trainer."""

    def __init__(self, path: str | Path):
        """Opens a segment that exists. Raises: CheckpointError when it does not."""
        self.path = Path(path)
        try:
            with open(self.path, "r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} is no memory segment: {error}") from None
        self._slot = (len(self._memory) - 2 * PAGE) // 2

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
            raise CheckpointError(
                f"{path} exists; its agent removes it, or it is another's"
            ) from None
        except OSError as error:
            Path(path).unlink(missing_ok=True)
            raise CheckpointError(
                f"cannot keep {size:,} bytes in {path}: {error.strerror}"
            ) from None
        return cls(path)

    def close(self, remove: bool = False) -> None:
        """Lets go of the memory; remove: frees it, which is the agent's to do."""
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
        pieces = list(pieces)
        offset, rows = 0, []
        for p in pieces:
            rows.append([p.name, p.shape, p.box.start, p.box.stop, str(p.array.dtype), offset])
            offset += -(-p.array.nbytes // 64) * 64
        table = json.dumps({"data_state": data_state, "pieces": rows}).encode()
        begin = -(-len(table) // 64) * 64
        total = begin + offset
        if total > self._slot:
            raise CheckpointError(
                f"step {step} takes {total:,} bytes, a slot of {self.path} has {self._slot:,}; "
                "give the agent's segment more"
            )
        headers = sorted(self._headers())
        turn = headers[-1][0] + 1 if headers else 1
        slot = 1 - headers[-1][-1] if headers else 0
        home = 2 * PAGE + slot * self._slot
        self._memory[slot * PAGE : slot * PAGE + HEADER.size + 4] = bytes(HEADER.size + 4)
        self._memory[home : home + len(table)] = table
        for p, row in zip(pieces, rows, strict=True):
            target = np.frombuffer(self._memory, np.uint8, p.array.nbytes, home + begin + row[-1])
            target[:] = np.ascontiguousarray(p.array).reshape(-1).view(np.uint8)
            del target  # an exported view would keep close() from working
        crc = self._crc(home, total)
        header = HEADER.pack(MAGIC, turn, step, len(table), total, crc)
        sealed = header + struct.pack("<I", zlib.crc32(header))
        self._memory[slot * PAGE : slot * PAGE + len(sealed)] = sealed

    def read(self, step: int | None = None) -> Snapshot:
        """Returns a step (None: the newest whole one), checked byte for byte.

        Raises: CheckpointError when no whole copy of it is here.
        """
        for _, found, table_bytes, total, crc, slot in sorted(self._headers(), reverse=True):
            home = 2 * PAGE + slot * self._slot
            if step in (None, found) and self._crc(home, total) == crc:
                table = json.loads(self._memory[home : home + table_bytes])
                begin = home + -(-table_bytes // 64) * 64
                pieces = [self._piece(begin, row) for row in table["pieces"]]
                return Snapshot(found, table["data_state"], pieces)
        wanted = "a step" if step is None else f"step {step}"
        raise CheckpointError(f"{self.path} holds no whole copy of {wanted}; restore from storage")

    def _piece(self, begin: int, row: list) -> Piece:
        name, shape, start, stop, dtype, offset = row
        kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
        box = Box(tuple(start), tuple(stop))
        flat = np.frombuffer(self._memory, np.uint8, box.size * kind.itemsize, begin + offset)
        return Piece(name, tuple(shape), box, flat.view(kind).reshape(box.shape))

    def _crc(self, home: int, total: int) -> int:
        with memoryview(self._memory) as memory, memory[home : home + total] as body:
            return zlib.crc32(body)

    def _headers(self) -> list[tuple[int, int, int, int, int, int]]:
        """Returns (turn, step, bytes of the table, of all, CRC, slot) of the whole headers."""
        found = []
        for slot in (0, 1):
            header = self._memory[slot * PAGE : slot * PAGE + HEADER.size]
            (crc,) = struct.unpack_from("<I", self._memory, slot * PAGE + HEADER.size)
            magic, *values = HEADER.unpack(header)
            if magic == MAGIC and zlib.crc32(header) == crc and values[3] <= self._slot:
                found.append((*values, slot))
        return found


# ---- the trainer's half


def put(segment: Segment, step: int, state: Tree, data_state: dict[str, Any]) -> None:
    """Copies what this process's devices hold of a state, each box once, into shared memory."""
    from megajax.core.tree import named_leaves

    pieces = []
    for name, x in named_leaves(state):
        boxes: dict[Box, Any] = {}
        for shard in x.addressable_shards:
            boxes.setdefault(Box.of(shard.index, x.shape), shard.data)
        pieces += [Piece(name, x.shape, box, np.asarray(data)) for box, data in boxes.items()]
    segment.write(step, pieces, data_state)


def common_step(segment: Segment) -> int | None:
    """Returns the newest step that all processes of the job hold whole, or None."""
    import jax
    from jax.experimental import multihost_utils

    own = []
    for step in segment.steps():
        try:
            own.append(segment.read(step).step)
        except CheckpointError:
            continue  # checked again on every restart; two copies are never both needed
    held = np.array([*own, -1, -1][:2], np.int32)
    if jax.process_count() > 1:
        held = multihost_utils.process_allgather(held)
    rows = [set(row.tolist()) - {-1} for row in held.reshape(-1, 2)]
    return max(set.intersection(*rows), default=None)


def get(segment: Segment, like: Tree, step: int | None = None) -> tuple[Tree, dict[str, Any]]:
    """Returns (the state placed as `like` says, its data_state) from this process's memory.

    Raises: CheckpointError when there is no whole copy, or it lacks what this process's devices
    now want: then other hosts had it, and storage has it.
    """
    import jax

    from megajax.core.tree import named_leaves

    snapshot = segment.read(step)
    pieces: dict[str, list[Piece]] = {}
    for piece in snapshot.pieces:
        pieces.setdefault(piece.name, []).append(piece)

    def leaf(name: str, wanted: Any) -> Any:
        def fill(index: Any) -> np.ndarray:
            return _assemble(snapshot.step, name, pieces.get(name, []), index, wanted)

        return jax.make_array_from_callback(wanted.shape, wanted.sharding, fill)

    names, tree = [n for n, _ in named_leaves(like)], jax.tree.structure(like)
    leaves = [leaf(n, x) for n, x in zip(names, jax.tree.leaves(like), strict=True)]
    return jax.tree.unflatten(tree, leaves), snapshot.data_state


def _assemble(step: int, name: str, pieces: list[Piece], index: Any, wanted: Any) -> np.ndarray:
    box = Box.of(index, wanted.shape)
    out = np.empty(box.shape, wanted.dtype)
    held = [p for p in pieces if p.shape == tuple(wanted.shape) and p.array.dtype == wanted.dtype]
    copied = 0
    for copy in intersect([p.box for p in held], [box]):
        piece = held[copy.source]
        out[copy.box.index(box)] = piece.array[copy.box.index(piece.box)]
        copied += copy.box.size
    if copied != math.prod(box.shape):
        raise CheckpointError(
            f"step {step} in memory lacks part of leaf {name}, {box.start}..{box.stop} of "
            f"{tuple(wanted.shape)}; restore from storage"
        )
    return out
