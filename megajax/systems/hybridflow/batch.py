"""DataBatch: named columns of equal length that travel between the models of a dataflow.

A column is an array whose first dimension counts rows, or a list with an item a row (texts, dicts).
Every operation returns a new batch; columns are shared, not copied, where rows do not change. Rows
of jax arrays on several devices are picked on the host. No jax: reward processes import it.
Source: HybridFlow (arXiv 2409.19256) section 4; verl's DataProto has the same operations.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Column = Any  # np.ndarray, jax.Array or list


class DataBatch:
    """Columns of equal length by name: `batch[name]`, `len(batch)` rows, `list(batch)` names."""

    def __init__(self, columns: Mapping[str, Any]):
        """Args: columns: {name: array or list}; at least one.

        Raises: ValueError for columns of unlike lengths, scalars, or none at all.
        """
        self._columns: dict[str, Column] = {}
        for name, column in columns.items():
            if not isinstance(column, list) and not hasattr(column, "shape"):  # jax's has one
                column = np.asarray(column)
            if not isinstance(column, list) and column.ndim == 0:
                raise ValueError(f"column {name!r} is a scalar; it needs a dimension of rows")
            self._columns[name] = column
        lengths = {name: len(column) for name, column in self._columns.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"columns of a batch have one length; these have {lengths}"
                if lengths
                else "a batch needs at least one column"
            )
        self._rows = next(iter(lengths.values()))

    def __len__(self) -> int:
        """Returns the number of rows."""
        return self._rows

    def __getitem__(self, name: str) -> Column:
        """Returns a column. Raises: KeyError that lists the names that there are."""
        if name not in self._columns:
            raise KeyError(f"no column {name!r}; this batch has {sorted(self._columns)}")
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        """Iterates over the names."""
        return iter(self._columns)

    def keys(self) -> list[str]:
        """Returns the names; with `[name]` that makes `dict(batch)` the columns."""
        return list(self._columns)

    def __contains__(self, name: object) -> bool:
        """Says whether there is a column of this name."""
        return name in self._columns

    def __repr__(self) -> str:
        """Shows the rows and the columns' types."""
        kinds = {
            name: "list" if isinstance(x, list) else f"{x.dtype}{list(x.shape)}"
            for name, x in self._columns.items()
        }
        return f"DataBatch({self._rows} rows, {kinds})"

    def select(self, names: Iterable[str]) -> "DataBatch":
        """Returns a batch of these columns. Raises: KeyError naming one that is missing."""
        return DataBatch({name: self[name] for name in names})

    def union(self, other: "DataBatch") -> "DataBatch":
        """Returns a batch with the columns of both.

        Raises: ValueError naming a column that both have, or for unlike numbers of rows.
        """
        common = sorted(self._columns.keys() & other._columns.keys())
        if common:
            raise ValueError(f"both batches have the column {common[0]!r}")
        if len(self) != len(other):
            raise ValueError(f"batches of {len(self)} and of {len(other)} rows have no union")
        return DataBatch(self._columns | other._columns)

    def take(self, rows: Sequence[int] | np.ndarray) -> "DataBatch":
        """Returns the rows of these numbers, in this order. Raises: IndexError, ValueError."""
        index = np.asarray(rows)
        if index.dtype == bool or (index.size and index.dtype.kind not in "iu"):
            raise ValueError(f"rows are {index.dtype}; their numbers are needed (np.flatnonzero)")
        index = index.astype(np.int64)
        if ((index < -len(self)) | (index >= len(self))).any():  # jax would take the last row
            raise IndexError(f"a batch of {len(self)} rows has no row {index[index >= len(self)]}")
        return DataBatch(
            {
                name: [x[i] for i in index] if isinstance(x, list) else _on_host(x)[index]
                for name, x in self._columns.items()
            }
        )

    def chunk(self, n: int) -> list["DataBatch"]:
        """Returns n batches of equally many consecutive rows.

        Raises: ValueError if n does not divide the rows: `pad` first.
        """
        _check_count(n=n)
        if len(self) % n:
            raise ValueError(f"{len(self)} rows cannot be cut into {n} equal parts; pad({n}) first")
        size = len(self) // n
        return [
            DataBatch({k: _on_host(x)[i * size : (i + 1) * size] for k, x in self._columns.items()})
            for i in range(n)
        ]

    def repeat(self, n: int, interleave: bool = True) -> "DataBatch":
        """Returns each row n times: row by row (0, 0, 1, 1), or all rows n times (0, 1, 0, 1).

        Raises: ValueError for n below 1.
        """
        _check_count(n=n)
        index = np.arange(len(self))
        return self.take(np.repeat(index, n) if interleave else np.tile(index, n))

    def pad(self, multiple: int) -> tuple["DataBatch", int]:
        """Returns (batch, added): rows appended until `multiple` divides their number.

        The rows that are appended are the first ones again, so that they are valid everywhere.
        Raises: ValueError for an empty batch, or a multiple below 1.
        """
        _check_count(multiple=multiple)
        added = -len(self) % multiple
        if not added:
            if not len(self):
                raise ValueError("an empty batch cannot be padded: it has no row to repeat")
            return self, 0
        return self.take(np.arange(len(self) + added) % len(self)), added

    def unpad(self, added: int) -> "DataBatch":
        """Returns the batch without the last `added` rows. Raises: ValueError if it has fewer."""
        if not 0 <= added <= len(self):
            raise ValueError(f"added={added}; a batch of {len(self)} rows cannot lose so many")
        count = len(self) - added
        return DataBatch({k: _on_host(x)[:count] for k, x in self._columns.items()})

    @staticmethod
    def concatenate(batches: Iterable["DataBatch"]) -> "DataBatch":
        """Returns the rows of all batches, in order.

        Raises: ValueError for no batch, or for batches with unlike names or rows.
        """
        parts = list(batches)
        if not parts:
            raise ValueError("no batch to concatenate")
        names = list(parts[0])
        for part in parts[1:]:
            if set(part) != set(names):
                odd = sorted(set(part) ^ set(names))
                raise ValueError(f"batches have unlike columns: {odd[0]!r} is not in all of them")
        return DataBatch({name: _joined(name, [part[name] for part in parts]) for name in names})


def _joined(name: str, columns: Sequence[Column]) -> Column:
    """Returns the rows of all columns, in order: a list if one of them is a list.

    Raises: ValueError for arrays whose rows are not of one shape.
    """
    if any(isinstance(x, list) for x in columns):
        return [row for x in columns for row in x]
    try:
        arrays = [np.asarray(x) for x in columns]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r} cannot be put together: {error}") from None


def _on_host(column: Column) -> Column:
    """Returns a column whose rows can be picked: not those of an array on several devices, whose
    sharding jax could not always derive."""
    is_cut = len(getattr(getattr(column, "sharding", None), "device_set", ())) > 1
    return np.asarray(column) if is_cut else column


def _check_count(**counts: Any) -> None:
    for name, count in counts.items():
        if not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"{name}={count!r} must be a whole number, at least 1")
