"""The fingerprints of what lies in the files of a step that was just written.

The checksums of integrity.py are made of the files, so a bit that flips between the write and the
checksum would be sealed in. The fingerprints of the devices' arrays (fingerprint.py) are of what
was meant to be written: before a step gets its name, its files are read and must give the same.

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

from megajax.checkpoint import reads, store
from megajax.checkpoint.fingerprint import STRIDES, WORD_STRIDE, Print, host_words, place_hashes

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
    context = reads.index_context()
    device = jax.local_devices(backend="cpu")[0]
    with jax.default_device(device):
        return {
            name: (0, 0) if 0 in shape else _fingerprint(folder, name, tuple(shape), context)
            for name, shape, _ in leaves
        }


def _fingerprint(folder: Path, name: str, shape: tuple[int, ...], context: Any) -> Print:
    stored = reads.open_leaf(folder, name, context).result(timeout=store.PATIENCE_S)
    if tuple(stored.shape) != shape:
        raise ValueError(f"leaf {name} is {tuple(stored.shape)} there instead of {shape}")
    sums = np.zeros(2, np.uint32)
    for start, slab in _slabs(stored):
        words = host_words(slab)
        places = _places(slab.shape, words.shape[slab.ndim :])
        shift = np.uint32(start * STRIDES[0] & 0xFFFFFFFF)
        sums += _sum(words.reshape(-1), places, shift)
    return int(sums[0]), int(sums[1])


def _slabs(stored: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, rows) of a stored array; two slabs are in memory."""
    if not stored.shape:
        yield 0, np.asarray(stored.read().result(timeout=store.PATIENCE_S))
        return
    rows = stored.shape[0]
    unit = stored.chunk_layout.read_chunk.shape[0]
    row_bytes = math.prod(stored.shape[1:]) * stored.dtype.numpy_dtype.itemsize
    height = max(SLAB // max(row_bytes * unit, 1), 1) * unit
    coming = stored[: min(height, rows)].read()
    for start in range(0, rows, height):
        slab, after = coming.result(timeout=store.PATIENCE_S), start + height
        if after < rows:
            coming = stored[after : min(after + height, rows)].read()
        yield start, np.asarray(slab)


@functools.lru_cache(2)
def _places(shape: tuple[int, ...], words: tuple[int, ...]) -> np.ndarray:
    """Returns the places of a slab's words in one row, as if it began at the origin."""
    total = np.zeros((), np.uint32)
    for d, n in enumerate((*shape, *words)):
        stride = STRIDES[d % len(STRIDES)] if d < len(shape) else WORD_STRIDE
        total = np.add.outer(total, np.arange(n, dtype=np.uint32) * np.uint32(stride))
    return total.reshape(-1)


def _sum(words: np.ndarray, places: np.ndarray, shift: np.uint32) -> np.ndarray:
    length = BLOCKS[words.size > BLOCKS[0]]
    sums = []
    for begin in range(0, words.size, length):
        bits, place = words[begin : begin + length], places[begin : begin + length]
        if (missing := length - bits.size) > 0:
            bits, place = np.pad(bits, (0, missing)), np.pad(place, (0, missing))
        sums.append(_sum_block(bits, place, shift, np.uint32(max(missing, 0))))
    return np.sum([np.asarray(s) for s in sums], axis=0, dtype=np.uint32)


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
