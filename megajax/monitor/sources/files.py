"""Samples from files in long form: a row a value, with columns timestamp, machine, metric, value.

CSV (also compressed: .csv.gz) and Parquet. timestamp: Unix seconds, integer or not. value: a
number; empty or nan: none. More columns are labels: a column `gpu` tells the GPUs of a host apart.
A row that cannot be read is left out and named in the notes, and so is a file that breaks off; a
file without one good row is refused. Parquet needs pyarrow (`uv sync --extra parquet`).

A small file may hold a great deal: gzip and dictionaries repeat a row a million times in a few
bytes. What a file may hold is bounded in rows, bytes and names, and in proportion to its size where
that is more; a file beyond it is refused with the number that it exceeds. Only regular files are
opened.

Legend: N rows.
"""

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import open_regular, size_of
from megajax.monitor.records import Record
from megajax.monitor.samples import Samples
from megajax.monitor.sources.convert import canonical

COLUMNS = ("timestamp", "machine", "metric", "value")
BLOCK = 2**22  # (chosen) bytes of text at a time, some 100,000 rows
BATCH = 100_000  # (chosen) rows of a Parquet file at a time
FUTURE = 1e11  # Unix seconds of the year 5138: more is in milliseconds or finer
ROWS = 2**23  # (chosen: 0.4 GB with what sorts them) of a file; a larger one may have a row a byte
EXPANDED = 2**30  # (chosen) bytes of a file once it is unpacked
RATIO = 32  # (chosen: text of metrics packs to a tenth) times its size, where that is more
GROUP = 2**29  # (chosen) unpacked bytes of a Parquet file's group of rows
LINE = 2**20  # (chosen) bytes of a line of text
WIDTH = 256  # (chosen) columns
NAME = 1024  # (chosen) characters of a machine's name, a metric's or a label's
MACHINES, METRICS = 2**16, 2**17  # (chosen) names; those of metrics with their labels


@dataclass(frozen=True)
class _Words:
    """A column of names. code_N: the place of each row's name among `names`."""

    code_N: np.ndarray
    names: Sequence[str]

    @classmethod
    def of(cls, column: Sequence[str]) -> "_Words":
        """Returns a column of text."""
        place = {name: k for k, name in enumerate(dict.fromkeys(column))}
        return cls(np.fromiter(map(place.__getitem__, column), np.int32, len(column)), [*place])

    def rows(self, keep: np.ndarray) -> "_Words":
        """Returns some of the rows, with their names only."""
        if len(keep) == len(self.code_N):
            return self
        different, code_N = np.unique(self.code_N[keep], return_inverse=True)
        return _Words(code_N.astype(np.int32), [self.names[k] for k in different.tolist()])


@dataclass(frozen=True)
class _Block:
    """Rows of a file. number_N: which rows. texts: columns as they stand, for messages. numbers:
    (values, which are no numbers although something is there) of timestamp and value. words: of
    machine, metric and labels."""

    number_N: np.ndarray
    texts: dict[str, Any]
    numbers: dict[str, tuple[np.ndarray, np.ndarray]]
    words: dict[str, _Words]


class _Damaged(Exception):
    """A file that cannot be read from some place on."""


def read(path: str | Path, start: float | None = None, end: float | None = None) -> Samples:
    """Returns the samples of a file, or those of [start, end) in Unix seconds.

    Counters and the names of exporters are converted (convert.py). Raises: UserError when there is
    no such file, it is no regular one, a column is missing, no row can be read, or it holds more
    than one may.
    """
    path = Path(path)
    parts = _Parts(path, start, end)
    try:
        with open_regular(path) as file:
            parts.most = max(ROWS, size_of(file))
            blocks = _parquet if path.suffix in (".parquet", ".pq") else _csv
            for block in blocks(path, file):
                parts.add(block)
    except (OSError, EOFError, zlib.error, csv.Error, _Damaged) as error:
        reason = getattr(error, "strerror", None) or str(error)
        if not parts.rows:
            raise UserError(f"{path}: cannot be read: {reason}") from None
        parts.notes.append(f"{path}: breaks off after row {parts.last}: {reason}")
    try:
        return canonical(parts.samples())
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from None


class _Parts:
    """The blocks of a file. rows: how many so far. last: the number of the last one. most: rows."""

    def __init__(self, path: Path, start: float | None, end: float | None):
        self.path, self.start, self.end, self.most = path, start, end, ROWS
        self.notes: list[str] = []
        self.rows, self.last = 0, 0
        self._columns: tuple[list[np.ndarray], ...] = ([], [], [], [])
        self._machines: dict[str, int] = {}
        self._metrics: dict[str, int] = {}
        self._bad, self._first_bad = 0, ""
        self._back, self._first_back = 0, 0
        self._times = (math.inf, -math.inf)  # of all rows, whether they were asked for or not
        self._series_S, self._newest_S = np.empty(0, np.int64), np.empty(0)  # sorted by series

    def add(self, block: _Block) -> None:
        """Adds a block. Raises: UserError if the file exceeds a limit."""
        number_N = block.number_N
        if not len(number_N):
            return
        self.rows, self.last = self.rows + len(number_N), int(number_N[-1])
        if self.last > self.most:
            raise UserError(
                f"{self.path}: has more than {self.most:,} rows, which is the limit for a file of "
                "its size; give several files"
            )
        (time_N, strange_N), (value_N, bad_N) = (block.numbers[c] for c in ("timestamp", "value"))
        with np.errstate(invalid="ignore"):
            bad_N = bad_N | strange_N | ~(np.abs(time_N) < FUTURE)  # NaN is not
        if bad_N.any():
            self._bad += int(bad_N.sum())
            at = int(np.flatnonzero(bad_N)[0])
            row = {name: column[at] for name, column in block.texts.items()}
            self._first_bad = self._first_bad or f"row {number_N[at]}: {_wrong(row)}"
        if not bad_N.all():
            good_N, (low, high) = time_N[~bad_N], self._times
            self._times = min(low, good_N.min()), max(high, good_N.max())
        keep = np.flatnonzero(
            ~bad_N
            & (time_N >= (-math.inf if self.start is None else self.start))
            & (time_N < (math.inf if self.end is None else self.end))
        )
        words = {name: column.rows(keep) for name, column in block.words.items()}
        for name, column in words.items():
            if (size := max(map(len, column.names), default=0)) > NAME:
                raise UserError(
                    f"{self.path}: a {name} of {size:,} characters; {NAME:,} are read at most"
                )
        machine_N = self._codes("machines", words.pop("machine"), self._machines, MACHINES)
        metric_N = self._codes("metrics", _labelled(words), self._metrics, METRICS)
        self._order(number_N[keep], time_N[keep], machine_N, metric_N)
        columns = (time_N[keep], machine_N, metric_N, value_N[keep])
        for column, part in zip(self._columns, columns, strict=True):
            column.append(part)

    def _codes(self, what: str, words: _Words, known: dict[str, int], most: int) -> np.ndarray:
        """Returns the number of each name; new names are added to those that are known."""
        code_N = np.array([known.setdefault(name, len(known)) for name in words.names], np.int32)
        if len(known) > most:
            raise UserError(
                f"{self.path}: names more than {most:,} {what}; is a column of it, such as an "
                "identity or a time, no label?"
            )
        return code_N[words.code_N] if len(code_N) else np.empty(0, np.int32)

    def _order(
        self, number_N: np.ndarray, time_N: np.ndarray, machine_N: np.ndarray, metric_N: np.ndarray
    ) -> None:
        """Notes rows that are older than one before of their series."""
        if not len(time_N):
            return
        series_N = machine_N.astype(np.int64) * METRICS + metric_N
        order = np.argsort(series_N, kind="stable")
        series_N, time_N = series_N[order], time_N[order]
        begins = np.ones(len(time_N), bool)
        begins[1:] = np.diff(series_N) != 0
        first = np.flatnonzero(begins)
        series_S, newest_S = series_N[first], np.maximum.reduceat(time_N, first)
        before_N = np.empty(len(time_N))
        before_N[1:] = time_N[:-1]
        place_S = np.searchsorted(self._series_S, series_S)
        old_S = np.zeros(len(series_S), bool)
        inside_S = place_S < len(self._series_S)
        old_S[inside_S] = self._series_S[place_S[inside_S]] == series_S[inside_S]
        before_N[first] = -math.inf
        before_N[first[old_S]] = self._newest_S[place_S[old_S]]
        self._newest_S[place_S[old_S]] = np.maximum(self._newest_S[place_S[old_S]], newest_S[old_S])
        self._series_S = np.insert(self._series_S, place_S[~old_S], series_S[~old_S])
        self._newest_S = np.insert(self._newest_S, place_S[~old_S], newest_S[~old_S])
        back = number_N[order][time_N < before_N]
        if len(back):
            self._back += len(back)
            self._first_back = self._first_back or int(back.min())

    def samples(self) -> Samples:
        """Returns all rows. Raises: UserError if none of its rows can be read."""
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
        elif not any(map(len, self._columns[0])):
            low, high = self._times
            self.notes.append(
                f"{self.path}: none of its {self.rows} rows lies in [{self.start}, {self.end}): "
                f"they are from {low:.0f} to {high:.0f} (Unix seconds)"
            )
        columns = []
        for column, dtype in zip(self._columns, "fiif", strict=True):
            columns.append(
                np.concatenate([np.empty(0, f"{dtype}{8 if dtype == 'f' else 4}"), *column])
            )
            column.clear()  # else all rows would be held twice
        time_N, machine_N, metric_N, value_N = columns
        machines, metrics = tuple(self._machines), tuple(self._metrics)
        return Samples(
            time_N,
            machine_N,
            metric_N,
            value_N,
            machines,
            metrics,
            self.start,
            self.end,
            tuple(self.notes),
        )


def _numbers(column: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns (numbers, which are none although something is there). Empty: NaN."""
    size = len(column)
    try:
        return np.fromiter(map(float, column), np.float64, size), np.zeros(size, bool)
    except (TypeError, ValueError, OverflowError):
        pass
    numbers, bad = np.full(size, np.nan), np.zeros(size, bool)
    for k, value in enumerate(column):
        try:
            numbers[k] = float(value)
        except (TypeError, ValueError, OverflowError):
            bad[k] = value is not None and bool(str(value).strip())
    return numbers, bad


def _wrong(row: dict[str, Any]) -> str:
    """Returns the defect of a row, in words."""
    (at,), (strange,) = _numbers([row["timestamp"]])
    if not strange and abs(at) >= FUTURE:
        return (
            f"timestamp={row['timestamp']} must be in Unix seconds; nearest: {at / 1e3:.3f}, if it "
            "is in milliseconds"
        )
    name = "timestamp" if strange or not math.isfinite(at) else "value"
    return f"{name}={row[name]!r:.60} is no number"


def _labelled(words: dict[str, _Words]) -> _Words:
    """Returns the metrics with labels as Prometheus writes them; an empty value is no label.

    words: of the metric and of each label."""
    columns = dict(words)
    metric = columns.pop("metric")
    if not columns:
        return metric
    key_N = metric.code_N.astype(np.int64)
    for column in columns.values():  # of the combinations that there are, one by one
        key_N = key_N * max(len(column.names), 1) + column.code_N
        key_N = np.unique(key_N, return_inverse=True)[1]
    _, first, code_N = np.unique(key_N, return_index=True, return_inverse=True)
    names: dict[str, int] = {}
    place = []
    for row in first.tolist():
        pairs = [(label, column.names[column.code_N[row]]) for label, column in columns.items()]
        base, brace, inside = metric.names[metric.code_N[row]].partition("{")
        texts = [inside.rstrip("}")] * bool(brace)
        texts += [f'{label}="{value}"' for label, value in pairs if value]
        name = f"{base}{{{','.join(texts)}}}" if texts else base
        place.append(names.setdefault(name, len(names)))
    return _Words(np.array(place, np.int32)[code_N] if place else metric.code_N, [*names])


def _header(path: Path, names: Sequence[str]) -> list[str]:
    """Returns the names of the columns. Raises: UserError when one of COLUMNS is not among them, or
    twice, or there are too many."""
    if len(names) > WIDTH:
        raise UserError(f"{path}: has {len(names):,} columns; {WIDTH} are read at most")
    columns = [str(name).strip().lower() for name in names]
    for column in COLUMNS:
        if column not in columns:
            raise UserError(
                f"{path}: its columns are {', '.join(columns)[:200] or 'none'}, without "
                f"{column!r}; a file has the columns {', '.join(COLUMNS)}."
                f"{did_you_mean(column, columns)}"
            )
    if twice := next((name for name in columns if columns.count(name) > 1), None):
        raise UserError(f"{path}: has the column {twice[:40]!r} twice")
    return columns


def _csv(path: Path, file: Any) -> Iterator[_Block]:
    """Yields the blocks of a CSV file. Raises: what its compression raises where it breaks off."""
    most, rows = max(EXPANDED, RATIO * size_of(file)), max(ROWS, size_of(file))
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    data: Any = gzip.GzipFile(fileobj=file) if packed else file
    head = data.readline(LINE + 1)
    if len(head) > LINE:
        raise UserError(f"{path}: row 1 has more than {LINE:,} bytes, which is the limit of a line")
    names = _header(path, next(csv.reader([head.decode("utf-8-sig", errors="replace")]), []))
    number, size, text, trouble = 2, len(head), b"", None  # the header is row 1
    while trouble is None:
        block, trouble = _more(data)
        size += len(block)
        if size > most:
            raise UserError(
                f"{path}: is more than {most:,} bytes once it is unpacked, which is the limit for "
                "a file of its size; give several files"
            )
        text += block
        # The last line needs no end.
        end = len(text) if isinstance(trouble, StopIteration) else _end_of_rows(text)
        lines, text = text[:end], text[end:]
        if lines:
            columns, places, count = _columns(lines + b"\n", len(names))
            yield _block(number + places, dict(zip(names, columns, strict=True)))
            number += count
        if number > rows + 2:  # empty ones count
            raise UserError(
                f"{path}: has more than {rows:,} lines, which is the limit for a file of its size; "
                "give several files"
            )
        if len(text) > LINE:
            raise UserError(
                f"{path}: row {number} has more than {LINE:,} bytes, which is the limit of a line"
            )
    if not isinstance(trouble, StopIteration):
        raise trouble


def _block(number_N: np.ndarray, columns: dict[str, Sequence[str]]) -> _Block:
    """Returns columns of text as a block."""
    return _Block(
        number_N,
        columns,
        {c: _numbers(columns[c]) for c in ("timestamp", "value")},
        {c: _Words.of(column) for c, column in columns.items() if c not in ("timestamp", "value")},
    )


def _more(data: Any) -> tuple[bytes, Exception | None]:
    """Returns the next bytes, and what ends them: StopIteration, or an error of the file."""
    blocks = []
    try:
        for _ in range(16):  # what was read before an error counts
            if not (block := data.read(BLOCK // 16)):
                return b"".join(blocks), StopIteration()
            blocks.append(block)
    except (OSError, EOFError, zlib.error) as error:
        return b"".join(blocks), error
    return b"".join(blocks), None


def _end_of_rows(text: bytes) -> int:
    """Returns where the last row ends: behind a line end that stands in no quotes.

    Where there is none within the limit of a line, the quote was none: behind the last line end."""
    last = text.rfind(b"\n") + 1
    if b'"' not in text:
        return last
    bytes_ = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(bytes_ == ord("\n"))
    quotes = np.flatnonzero(bytes_ == ord('"'))
    outside = ends[np.searchsorted(quotes, ends) % 2 == 0]
    end = int(outside[-1]) + 1 if len(outside) else 0
    return end if len(text) - end <= LINE else last


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


def _parquet(path: Path, file: Any) -> Iterator[_Block]:
    """Yields the blocks of a Parquet file. Raises: UserError without pyarrow, _Damaged."""
    try:
        import pyarrow  # type: ignore[import-not-found]
        from pyarrow import parquet  # type: ignore[import-not-found]
    except ImportError:
        raise UserError(f"{path} needs the package pyarrow: uv sync --extra parquet") from None
    size = size_of(file)
    try:
        with parquet.ParquetFile(file) as opened:
            names = _header(path, opened.schema_arrow.names)
            _check_sizes(path, opened.metadata, size)
            columns = zip(opened.schema_arrow.names, opened.schema_arrow.types, strict=True)
            texts = [name for name, kind in columns if _is_text(pyarrow, kind)]
        # A dictionary that is read as such takes the memory of its different values only.
        file.seek(0)
        with parquet.ParquetFile(file, read_dictionary=texts) as opened:
            first = 1
            for batch in opened.iter_batches(BATCH, use_threads=False):
                yield _of_batch(path, pyarrow, first, dict(zip(names, batch.columns, strict=True)))
                first += len(batch)
    except (pyarrow.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
        raise _Damaged(f"as Parquet: {' '.join(str(error).split())[:300]}") from None


def _check_sizes(path: Path, metadata: Any, size: int) -> None:
    """Raises: UserError if a file declares more than the limits allow. size: its bytes."""
    rows, most = max(ROWS, size), max(EXPANDED, RATIO * size)
    if metadata.num_rows > rows:
        raise UserError(
            f"{path}: has {metadata.num_rows:,} rows; {rows:,} are read at most of a file of its "
            "size"
        )
    total = 0
    for group in range(metadata.num_row_groups):
        # Not the columns' sizes: pyarrow 26 ends the process where a column's statistics are bad.
        one = metadata.row_group(group).total_byte_size
        total += max(one, 0)
        if one > GROUP or total > most:
            raise UserError(
                f"{path}: its group {group} of rows has {one:,} bytes unpacked, all until there "
                f"{total:,}; {GROUP:,} and {most:,} are read at most"
            )


def _is_text(pyarrow: Any, kind: Any) -> bool:
    return pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)


def _of_batch(path: Path, pyarrow: Any, first: int, columns: dict[str, Any]) -> _Block:
    """Returns rows of a Parquet file, from row `first` on."""
    from pyarrow import compute  # type: ignore[import-not-found]

    types, numbers, words, texts = pyarrow.types, {}, {}, {}
    for name, column in columns.items():
        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        is_text = _is_text(pyarrow, kind)
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        is_moment = types.is_timestamp(kind) and name == "timestamp"
        if not (is_text or is_number or is_moment or types.is_boolean(kind)):
            raise UserError(f"{path}: the column {name!r} is of type {kind}, which is not read")
        if is_text or name not in ("timestamp", "value"):
            if not types.is_dictionary(column.type):
                column = column.dictionary_encode()
            if is_text:  # bytes, before they become text
                sizes = compute.binary_length(column.dictionary)  # type: ignore[missing-attribute]
                longest = compute.max(sizes).as_py() or 0  # type: ignore[missing-attribute]
                if longest > 4 * NAME:
                    raise UserError(
                        f"{path}: a {name} of {longest:,} bytes; {NAME:,} characters are read at "
                        "most"
                    )
            code_N = column.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            different = [*map(str, column.dictionary.to_pylist()), ""]
            words[name] = _Words(np.where(code_N < 0, len(different) - 1, code_N), different)
            if name in ("timestamp", "value"):
                code_N = words.pop(name).code_N
                values, bad = _numbers(different)
                numbers[name] = values[code_N], bad[code_N]
                texts[name] = np.array(different, object)[code_N]
            continue
        if is_moment:  # nanoseconds that a microsecond does not hold do not matter
            column = column.cast(pyarrow.timestamp("us"), safe=False).cast(pyarrow.int64())
        values = column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
        values = values / 1e6 if is_moment else values
        numbers[name], texts[name] = (values, np.zeros(len(values), bool)), values
    size = len(numbers["value"][0])
    return _Block(np.arange(first, first + size), texts, numbers, words)


# ---- samples from the records of a run (megajax/monitor/records.py), as a driver has them
#
# A machine is a host, a metric the name of a record. The ranks and devices of a host are its
# devices: their mean and extremes count (convert.py). Times are those of the hosts' clocks. Texts
# are no metrics.


def from_records(records: Sequence[Record], offset_s: Mapping[str, float] | None = None) -> Samples:
    """Returns the numbers of records as samples.

    offset_s: {host: seconds by which its clock is ahead}; they are subtracted from its times.
    """
    ahead = offset_s or {}

    def metric(r: Record) -> str:
        places = (("rank", r.rank), ("device", r.device))
        labels = ",".join(f'{name}="{number}"' for name, number in places if number is not None)
        return f"{r.name}{{{labels}}}" if labels else r.name

    return canonical(
        Samples.of(
            (r.time - ahead.get(r.host, 0.0), r.host, metric(r), float(r.value))
            for r in records
            if isinstance(r.value, int | float) and math.isfinite(r.time)
        )
    )
