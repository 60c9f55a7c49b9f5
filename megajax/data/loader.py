"""Rows to device batches, prefetched by Grain, from any position and on any number of hosts.

Batch n of a run holds rows n*R .. n*R + R - 1 (R rows a step). Each host reads exactly the rows
that its devices hold under the batch's sharding, so hosts of one data-parallel group read the same
rows and nothing is sent between them (MegaScale section 3.4's one reader a machine). The position
is the count of rows consumed: saving it is saving the pipeline.

Batches may come in a few shapes (images on canvases of several sizes). Which one a batch has is a
function of its number alone, and a step compiles once for each.

Legend: A micro-batches, B rows of one, R = A B rows a step, S positions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from megajax.data.corpus import Corpus
from megajax.data.pack import IGNORED, MixedRows, PackedRows

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


class ShapedRows(Protocol):
    """An endless sequence of rows that come in several shapes, such as images on canvases."""

    def row(self, i: int, shape: int) -> dict[str, np.ndarray]:
        """Returns row i in a shape, given by its number; it depends on nothing else."""
        ...


class Share(NamedTuple):
    """The part of each batch that a loader gives. numbers: of its rows, among the `total` rows of
    the whole batch, in the order in which the abstract batch has them. Loaders with shares of their
    own feed processes that train on unequal parts of one batch."""

    numbers: np.ndarray
    total: int


class _HostBatches:
    """Batch n as this host's rows, for Grain: a random-access source of NumPy arrays."""

    def __init__(self, numbers: Callable[[int], np.ndarray], row: Callable[[int, int], dict]):
        """numbers(n): of this host's rows of batch n. row(i, n): row i as batch n has it."""
        self._numbers, self._row = numbers, row

    def __len__(self) -> int:
        return 2**40  # endless

    def __getitem__(self, n: int) -> dict[str, np.ndarray]:
        rows = [self._row(int(i), n) for i in self._numbers(n)]
        return {key: np.stack([r[key] for r in rows]) for key in rows[0]}


class Loader(Iterator[dict[str, jax.Array]]):
    """Endless batches placed on the devices. `position` counts rows consumed so far."""

    def __init__(
        self,
        rows: Rows | ShapedRows,
        abstract: Abstract | Sequence[Abstract],
        position: int = 0,
        prefetch: int = 4,
        order: np.ndarray | None = None,
        share: Share | None = None,
        shape_of: Callable[[int], int] | None = None,
    ):
        """abstract: the batch as ShapeDtypeStructs with shardings; of several shapes a sequence of
        them, equal in rows. position: rows to skip.

        order: which token of a row lies at each of its places (TrainStep.order). share: the part of
        each batch that this loader gives; None: all of it. position counts rows of the whole batch.
        shape_of(batch number) -> the number of its shape, where there are several; the rows are
        ShapedRows then.
        Raises: ValueError for a share that is not of the abstract batch.
        """
        import grain  # here: machines that only benchmark have none

        shapes = [abstract] if isinstance(abstract, Mapping) else [*abstract]
        self._shape_of = shape_of or (lambda number: 0)
        first_row = _row(rows, position, 0 if shape_of else None)
        held, self._indices = _shares(shapes[0], first_row)
        within, total = share or (np.arange(held), held)
        if within.shape != (held,) or not ((0 <= within) & (within < total))[self._indices].all():
            raise ValueError(
                f"share {share}: the batch has {held} rows, so it must number {held}, those of "
                "this host from 0 to total - 1"
            )
        self._shapes, self._order, self.position, self.rows_per_batch = (
            shapes,
            order,
            position,
            total,
        )
        start = position // total

        def numbers(n: int) -> np.ndarray:
            return position + n * total + within[self._indices]

        def row(i: int, n: int) -> dict[str, np.ndarray]:
            return _row(rows, i, shape_of(start + n) if shape_of else None)

        options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=max(prefetch, 1))
        host: Any = _HostBatches(numbers, row)
        self._iterator = iter(grain.MapDataset.source(host).to_iter_dataset(options))

    def __next__(self) -> dict[str, jax.Array]:
        """Returns the next batch."""
        abstract = self._shapes[self._shape_of(self.position // self.rows_per_batch)]
        batch = place(next(self._iterator), abstract, self._indices, self._order)
        self.position += self.rows_per_batch
        return batch


def _row(rows: Any, i: int, shape: int | None) -> dict[str, np.ndarray]:
    return rows[i] if shape is None else rows.row(i, shape)


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
