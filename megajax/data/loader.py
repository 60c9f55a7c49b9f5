"""Rows to device batches, prefetched by Grain, from any position and on any number of hosts.

Batch n of a run holds rows n*R .. n*R + R - 1 (R rows a step). Each host reads exactly the rows
that its devices hold under the batch's sharding, so hosts of one data-parallel group read the same
rows and nothing is sent between them (MegaScale section 3.4's one reader a machine). The position
is the count of rows consumed: saving it is saving the pipeline.

Legend: A micro-batches, B rows of one, R = A B rows a step, S positions.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from megajax.data.corpus import Corpus
from megajax.data.mixture import MixedRows
from megajax.data.pack import IGNORED, PackedRows

Abstract = Mapping[str, jax.ShapeDtypeStruct]


class Rows(Protocol):
    """An endless sequence of rows; row i depends on nothing but i."""

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i."""
        ...


def training_rows(corpora: Sequence[Corpus], seq_len: int, seed: int) -> Rows:
    """Returns the shuffled, packed, mixed training rows."""
    packed = [PackedRows(c.train, seq_len, seed) for c in corpora]
    if len(packed) == 1:
        return packed[0]
    return MixedRows(packed, [c.weight for c in corpora], seed)


class _HostBatches:
    """Batch n as this host's rows, for Grain: a random-access source of NumPy arrays."""

    def __init__(self, rows: Rows, indices: np.ndarray, rows_per_batch: int, start: int):
        self._rows, self._indices = rows, indices
        self._rows_per_batch, self._start = rows_per_batch, start

    def __len__(self) -> int:
        return 2**40  # endless

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        first = self._start + n * self._rows_per_batch
        rows = [self._rows[first + int(i)] for i in self._indices]
        return {key: np.stack([r[key] for r in rows]) for key in rows[0]}


class Loader(Iterator[dict[str, jax.Array]]):
    """Endless batches placed on the devices. `position` counts rows consumed so far."""

    def __init__(
        self,
        rows: Rows,
        abstract: Abstract,
        position: int = 0,
        prefetch: int = 4,
        order: np.ndarray | None = None,
    ):
        """abstract: the batch as ShapeDtypeStructs with shardings. position: rows to skip.

        order: which token of a row lies at each of its places (TrainStep.order).
        """
        import grain  # here: machines that only benchmark have none

        self._abstract, self._order, self.position = abstract, order, position
        self.rows_per_batch, self._indices = _shares(abstract, rows[position])
        host: Any = _HostBatches(rows, self._indices, self.rows_per_batch, position)
        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=max(prefetch, 1))
        self._iterator = iter(grain.MapDataset.source(host).to_iter_dataset(options))

    def __next__(self) -> dict[str, jax.Array]:
        """Returns the next batch."""
        batch = place(next(self._iterator), self._abstract, self._indices, self._order)
        self.position += self.rows_per_batch
        return batch


def _shares(abstract: Abstract, row: Mapping[str, np.ndarray]) -> tuple[int, np.ndarray]:
    """Returns (rows of a batch, those that this host's devices hold). row: any one."""
    name, like = next(iter(abstract.items()))
    numbers = _numbers(like, np.ndim(row[name]))
    return numbers.size, host_rows(like, np.ndim(row[name]))


def _numbers(like: jax.ShapeDtypeStruct, inner: int) -> np.ndarray:
    """Returns the numbers of a batch's rows, as they lie. inner: dimensions of one row."""
    outer = like.shape[: len(like.shape) - inner]
    return np.arange(int(np.prod(outer))).reshape(outer)


def host_rows(like: jax.ShapeDtypeStruct, inner: int = 1) -> np.ndarray:
    """Returns the numbers, within a batch, of the rows that this host's devices hold."""
    numbers = _numbers(like, inner)
    places: Any = like.sharding.addressable_devices_indices_map(like.shape)
    held = [numbers[index[: numbers.ndim]].ravel() for index in places.values()]
    return np.unique(np.concatenate(held))


def place(
    host: Mapping[str, np.ndarray],
    abstract: Abstract,
    indices: np.ndarray,
    order: np.ndarray | None = None,
) -> dict[str, jax.Array]:
    """Returns device arrays from this host's rows (len(indices), ...), their tokens in `order`."""
    arrays: dict[str, jax.Array] = {}
    for key, like in abstract.items():
        numbers = _numbers(like, host[key].ndim - 1)
        ordered = order is not None and host[key].ndim > 1
        rows = host[key][:, order] if ordered else host[key]

        def piece(index: Any, rows: Any = rows, numbers: Any = numbers) -> np.ndarray:
            outer, inner = index[: numbers.ndim], index[numbers.ndim :]
            return rows[np.searchsorted(indices, numbers[outer])][(..., *inner)]

        arrays[key] = jax.make_array_from_callback(like.shape, like.sharding, piece)
    return arrays


def held_out_rows(corpora: Sequence[Corpus], seq_len: int, most: int) -> list[int]:
    """Returns how many held-out rows of each corpus are evaluated when `most` are asked for.

    Shares are equal; a corpus with fewer rows gives those that it has, which may be none.
    """
    counts: list[int] = []
    for c in corpora:
        there = 0 if c.held_out is None else c.held_out.rows(seq_len)
        counts.append(min(there, -(-most // len(corpora)), most - sum(counts)))
    return counts


def held_out_batches(
    corpora: Sequence[Corpus], abstract: Abstract, most: int, order: np.ndarray | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Yields up to `most` held-out rows in batches, the same rows at every call.

    Corpora follow one another; rows beyond the last are filled with targets that count nothing.
    """
    S = abstract["tokens"].shape[-1]
    yield from finite_batches(held_out(corpora, S, most), abstract, order)


def held_out(corpora: Sequence[Corpus], seq_len: int, most: int) -> list[tuple[Rows, int]]:
    """Returns the held-out rows that are evaluated, each as (rows, its number)."""
    return [
        (packed, i)
        for c, count in zip(corpora, held_out_rows(corpora, seq_len, most), strict=True)
        if count and c.held_out is not None
        for packed in [PackedRows(c.held_out, seq_len, 0, shuffle=False)]
        for i in range(count)
    ]


def finite_batches(
    rows: Sequence[tuple[Rows, int]], abstract: Abstract, order: np.ndarray | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Yields these rows in batches; rows beyond the last have targets that count nothing."""
    if not rows:
        return
    B, indices = _shares(abstract, rows[0][0][rows[0][1]])
    for first in range(0, len(rows), B):
        held = []
        for i in indices + first:
            packed, number = rows[min(int(i), len(rows) - 1)]
            row = packed[number]
            if i >= len(rows):
                row = row | {"targets": np.full_like(row["targets"], IGNORED)}
            held.append(row)
        stacked = {k: np.stack([r[k] for r in held]) for k in held[0]}
        yield place(stacked, abstract, indices, order)
