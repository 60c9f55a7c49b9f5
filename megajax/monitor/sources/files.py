"""Samples from files in long form: a row a value, with columns timestamp, machine, metric, value.

CSV (also compressed: .csv.gz) and Parquet. timestamp: Unix seconds, integer or not. value: a
number; empty or nan: none. More columns are labels: a column `gpu` tells the GPUs of a host apart.
A row that cannot be read is left out and named in the notes, and so is a file that breaks off; a
file without one good row is refused. Parquet needs pyarrow (`uv sync --extra parquet`).

Legend: N rows.
"""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.monitor.samples import Samples
from megajax.monitor.sources.convert import canonical

COLUMNS = ("timestamp", "machine", "metric", "value")
BLOCK = 2**22  # (chosen) bytes of text at a time, some 100,000 rows
ROWS = 100_000  # (chosen) of a Parquet file at a time
FUTURE = 1e11  # Unix seconds of the year 5138: more is in milliseconds or finer

Block = tuple[np.ndarray, dict[str, Sequence[Any]]]  # numbers of rows, columns


def read(path: str | Path, start: float | None = None, end: float | None = None) -> Samples:
    """Returns what a file holds, or its rows of [start, end) in Unix seconds.

    Counters and the names of exporters are converted (convert.py). Raises: UserError when there is
    no such file, a column is missing, or no row can be read.
    """
    path = Path(path)
    parts = _Parts(path, start, end)
    try:
        for block in _parquet(path) if path.suffix in (".parquet", ".pq") else _csv(path):
            parts.add(*block)
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if not parts.rows:
            raise UserError(f"{path}: cannot be read: {reason}") from None
        parts.notes.append(f"{path}: breaks off after row {parts.last}: {reason}")
    return canonical(parts.samples())


class _Parts:
    """The blocks of a file. rows: how many so far. last: the number of the last one."""

    def __init__(self, path: Path, start: float | None, end: float | None):
        self.path, self.start, self.end = path, start, end
        self.notes: list[str] = []
        self.rows, self.last = 0, 0
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._machines: dict[str, int] = {}
        self._metrics: dict[str, int] = {}
        self._bad, self._first_bad = 0, ""
        self._back, self._first_back = 0, 0
        self._times = (math.inf, -math.inf)  # of all rows, whether they were asked for or not
        self._latest: dict[tuple[int, int], float] = {}  # time of a series

    def add(self, numbers: np.ndarray, columns: dict[str, Sequence[Any]]) -> None:
        """Takes the columns of a block."""
        if not len(numbers):
            return
        self.rows, self.last = self.rows + len(numbers), int(numbers[-1])
        time_N, strange_N = _numbers(columns["timestamp"])
        value_N, bad_N = _numbers(columns["value"])
        bad_N |= strange_N | ~np.isfinite(time_N) | (time_N >= FUTURE)
        if bad_N.any():
            self._bad += int(bad_N.sum())
            at = int(np.flatnonzero(bad_N)[0])
            row = {name: column[at] for name, column in columns.items()}
            self._first_bad = self._first_bad or f"row {numbers[at]}: {_wrong(row)}"
        words: Sequence[str] = columns["metric"]
        if not bad_N.all():
            good_N, (low, high) = time_N[~bad_N], self._times
            self._times = min(low, good_N.min()), max(high, good_N.max())
        if labels := [c for c in columns if c not in COLUMNS]:
            words = _labelled(words, labels, [columns[c] for c in labels])
        keep = np.flatnonzero(
            ~bad_N
            & (time_N >= (-math.inf if self.start is None else self.start))
            & (time_N < (math.inf if self.end is None else self.end))
        )
        machine_N = _codes(columns["machine"], self._machines)[keep]
        metric_N = _codes(words, self._metrics)[keep]
        self._order(numbers[keep], time_N[keep], machine_N, metric_N)
        self._parts.append((time_N[keep], machine_N, metric_N, value_N[keep]))

    def _order(
        self, numbers: np.ndarray, time_N: np.ndarray, machine_N: np.ndarray, metric_N: np.ndarray
    ) -> None:
        """Notes rows that are older than one before of their series."""
        if not len(time_N):
            return
        order = np.lexsort((np.arange(len(time_N)), metric_N, machine_N))
        machine_N, metric_N, time_N = machine_N[order], metric_N[order], time_N[order]
        begins = np.ones(len(time_N), bool)
        begins[1:] = (np.diff(machine_N) != 0) | (np.diff(metric_N) != 0)
        first = np.flatnonzero(begins)
        newest = np.maximum.reduceat(time_N, first).tolist()
        before_N = np.empty(len(time_N))
        before_N[1:] = time_N[:-1]
        keys = list(zip(machine_N[first].tolist(), metric_N[first].tolist(), strict=True))
        before_N[first] = [self._latest.get(key, -math.inf) for key in keys]
        for key, moment in zip(keys, newest, strict=True):
            self._latest[key] = max(moment, self._latest.get(key, -math.inf))
        back = numbers[order][time_N < before_N]
        if len(back):
            self._back += len(back)
            self._first_back = self._first_back or int(back.min())

    def samples(self) -> Samples:
        """Returns all rows. Raises: UserError when there are none but bad ones."""
        if self._bad:
            what = f"{self.path}: {self._first_bad}"
            if self._bad == self.rows:
                raise UserError(f"{what}; none of its {self.rows} rows can be read")
            self.notes.append(f"{what}; {self._bad} of {self.rows} rows were left out")
        if self._back:
            self.notes.append(
                f"{self.path}: timestamps go back within a series {self._back} times, first in row "
                f"{self._first_back}; the rows were sorted"
            )
        if not self.rows:
            self.notes.append(f"{self.path}: has no rows")
        elif not any(len(part[0]) for part in self._parts):
            low, high = self._times
            self.notes.append(
                f"{self.path}: none of its {self.rows} rows lies in [{self.start}, {self.end}): "
                f"they are from {low:.0f} to {high:.0f} (Unix seconds)"
            )
        time_N, machine_N, metric_N, value_N = (
            np.concatenate([np.empty(0), *(p[k] for p in self._parts)]) for k in range(4)
        )
        machines, metrics = tuple(self._machines), tuple(self._metrics)
        return Samples(
            time_N, machine_N, metric_N, value_N, machines, metrics, self.start, self.end,
            tuple(self.notes),
        )  # fmt: skip


def _numbers(column: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (numbers, which are none although something is there). Empty: NaN."""
    size = len(column)
    try:
        return np.fromiter(map(float, column), np.float64, size), np.zeros(size, bool)
    except (TypeError, ValueError):
        pass
    found, bad = np.full(size, np.nan), np.zeros(size, bool)
    for k, value in enumerate(column):
        try:
            found[k] = float(value)
        except (TypeError, ValueError):
            bad[k] = value is not None and bool(str(value).strip())
    return found, bad


def _wrong(row: dict[str, Any]) -> str:
    """Returns what is wrong with a row."""
    (at,), (strange,) = _numbers([row["timestamp"]])
    if not strange and at >= FUTURE:
        return (
            f"timestamp={row['timestamp']} must be in Unix seconds; nearest: {at / 1e3:.3f}, if it "
            "is in milliseconds"
        )
    name = "timestamp" if strange or not math.isfinite(at) else "value"
    return f"{name}={row[name]!r:.60} is no number"


def _codes(column: Sequence[str], known: dict[str, int]) -> np.ndarray:
    """Returns the number of each name; new names are added to those that are known."""
    for name in dict.fromkeys(column):
        known.setdefault(name, len(known))
    return np.fromiter(map(known.__getitem__, column), np.int32, len(column))


def _labelled(
    words: Sequence[str], labels: Sequence[str], values: Sequence[Sequence[Any]]
) -> list[str]:
    """Returns the metrics with labels as Prometheus writes them; an empty value is no label."""
    made: dict[tuple, str] = {}
    for key in dict.fromkeys(zip(words, *values, strict=True)):
        pairs = zip(labels, key[1:], strict=True)
        texts = [f'{name}="{value}"' for name, value in pairs if value not in (None, "")]
        base, brace, rest = key[0].partition("{")
        inside = ",".join([*([rest.rstrip("}")] if brace else []), *texts])
        made[key] = f"{base}{{{inside}}}" if inside else base
    return [made[key] for key in zip(words, *values, strict=True)]


def _header(path: Path, names: Sequence[str]) -> list[str]:
    """Returns the names of the columns. Raises: UserError when one of COLUMNS is not among them."""
    found = [str(name).strip().lower() for name in names]
    for column in COLUMNS:
        if column not in found:
            raise UserError(
                f"{path}: its columns are {', '.join(found)[:200] or 'none'}, without {column!r}; "
                f"a file has the columns {', '.join(COLUMNS)}.{did_you_mean(column, found)}"
            )
    return found


def _csv(path: Path) -> Iterator[Block]:
    """Yields the blocks of a CSV file. Raises: what its compression raises where it breaks off."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        data: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        head = data.readline(BLOCK).decode("utf-8-sig", errors="replace")
        names = _header(path, next(csv.reader([head]), []))
        number, rest, trouble = 2, b"", None  # the header is row 1
        while trouble is None:
            block, trouble = _more(data)
            lines, newline, rest = (rest + block).rpartition(b"\n")
            if isinstance(trouble, StopIteration):  # the last line needs no end
                lines = lines + newline + rest
            if lines:
                columns, places, count = _columns(lines + b"\n", len(names))
                yield number + places, dict(zip(names, columns, strict=True))
                number += count
        if not isinstance(trouble, StopIteration):
            raise trouble


def _more(data: Any) -> tuple[bytes, Exception | None]:
    """Returns the next bytes, and what ends them: StopIteration, or an error of the file."""
    found = []
    try:
        for _ in range(16):  # what was read before an error counts
            if not (block := data.read(BLOCK // 16)):
                return b"".join(found), StopIteration()
            found.append(block)
    except (OSError, EOFError, zlib.error) as error:
        return b"".join(found), error
    return b"".join(found), None


def _columns(block: bytes, width: int) -> tuple[list[Sequence[str]], np.ndarray, int]:
    """Returns (columns, places of their rows among the lines, number of lines).

    A row of another width becomes one that cannot be read; empty lines are none. Rows as lists
    would cost most of the time, so that lines without quotes are cut all at once.
    """
    block = block.replace(b"\r\n", b"\n")
    bytes_ = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(bytes_ == ord("\n"))
    commas = np.diff(np.cumsum(bytes_ == ord(","))[ends], prepend=0)
    text = block.decode("utf-8", errors="replace")
    if b'"' not in block and (commas == width - 1).all() and width > 1:
        fields = text.replace("\n", ",").split(",")
        fields.pop()
        return [fields[k::width] for k in range(width)], np.arange(len(ends)), len(ends)
    reader = csv.reader(io.StringIO(text, newline=""))
    rows, places, count = [], [], 0
    for row in reader:
        if row:
            rows.append(row if len(row) == width else [",".join(row)] * width)
            places.append(count)
        count = reader.line_num
    columns: list[Sequence[str]] = [*zip(*rows, strict=True)] or [()] * width
    return columns, np.array(places, np.int64), count


def _parquet(path: Path) -> Iterator[Block]:
    """Yields the blocks of a Parquet file. Raises: UserError without pyarrow."""
    try:
        import pyarrow  # type: ignore[import-not-found]
        from pyarrow import parquet  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow: uv sync --extra parquet") from None
    try:
        file = parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: is no Parquet file: {error}") from None
    names = _header(path, file.schema_arrow.names)
    first = 1
    for batch in file.iter_batches(ROWS):
        columns: dict[str, Sequence[Any]] = {}
        for name, column in zip(names, batch.columns, strict=True):
            if pyarrow.types.is_timestamp(column.type):
                column = column.cast(pyarrow.timestamp("us")).cast(pyarrow.int64())
                columns[name] = [None if v is None else v / 1e6 for v in column.to_pylist()]
            elif name in ("timestamp", "value"):
                columns[name] = column.to_pylist()
            else:
                columns[name] = ["" if v is None else str(v) for v in column.to_pylist()]
        yield np.arange(first, first + len(batch)), columns
        first += len(batch)
