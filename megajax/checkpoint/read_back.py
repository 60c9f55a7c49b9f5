"""The fingerprints of what lies in the files of a step that was just written.

The checksums of integrity.py are made of the files, so a bit that flips between the write and the
checksum would be sealed in. The fingerprints of the devices' arrays (fingerprint.py) are of what
was meant to be written: the files of a step are read again in the background once it counts, and
must give the same before an older step goes (sealing.py).

Leaves are read in slabs of about SLAB bytes along their first dimension, the next one while one is
summed. Words and places are one long row in blocks of fixed lengths, so two programs serve leaves
of every shape and type. The host computes: nothing goes back to an accelerator.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from megajax.checkpoint import marks, offline, reads, store
from megajax.checkpoint.directory import StepFolder
from megajax.checkpoint.fingerprint import Print
from megajax.checkpoint.integrity import LeafSum, Record, find_damage
from megajax.core.boxes import runs
from megajax.core.errors import UserError
from megajax.core.hashes import STRIDES, WORD_STRIDE, host_words, place_hashes

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
    context, memory = reads.index_context(), _Memory()
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
        raise marks.refuted(steps.step(step), wrong)
    return record


def wrong_parts(folder: Path, record: Record, part: int = 0, parts: int = 1) -> list[str]:
    """Returns what is not as the record says, in the share of one of `parts` processes.

    Raises: StoreError, OSError, MemoryError: nothing can be said of what is stored.
    """
    table = [(n, tuple(x.shape), x.dtype) for n, x in record.leaves.items()]
    damage = find_damage(folder, record, fast=True) if part == 0 else []
    wrong = [f"{d.file}: {d.what}" for d in damage]
    context, memory, folder = reads.index_context(), _Memory(), folder / record.home
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
            "PERMISSION_DENIED", "Permission denied", "UNAVAILABLE", "Stale file handle",
            "Too many open files", "RESOURCE_EXHAUSTED", "CANCELLED", "interpreter shutdown",
        )
    )  # fmt: skip


class _Memory:
    """Two buffers, used in turn for all slabs: fresh memory costs as much as reading into it."""

    def __init__(self):
        self._raw = [reads.buffer((0,), np.dtype(np.uint8))] * 2
        self._turn = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns an array in the buffer that was not taken last."""
        self._turn = 1 - self._turn
        nbytes = math.prod(shape) * dtype.itemsize
        if self._raw[self._turn].size < nbytes:
            self._raw[self._turn] = reads.buffer((nbytes,), np.dtype(np.uint8))
        return self._raw[self._turn][:nbytes].view(dtype).reshape(shape)


def _fingerprint(folder: Path, name: str, leaf: LeafSum, context: Any, memory: _Memory) -> Print:
    shape = tuple(leaf.shape)
    if 0 in shape:
        return 0, 0
    stored = reads.open_leaf(folder, name, context).result(timeout=store.PATIENCE_S)
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
