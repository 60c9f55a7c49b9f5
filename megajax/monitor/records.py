"""Record: one measured value. Every meter of every rank writes them; sinks and detectors read them.

Sources: the training loop of each rank (Recorder), the agent of each host for what is seen from
outside (meter.py), and the fault injector, which records what it does. Sinks: the console, JSONL,
TensorBoard, Weights & Biases, Prometheus, and a ring in shared memory (Stream) from which an agent
sends the records of all ranks to the detectors of a supervised job (detectors.py). Lines and files
that a disk cannot hold are counted and lost; they never end a run. No jax import: a driver reads
the stream without a device.
"""

import errno
import json
import math
import mmap
import os
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import open_own

Value = float | int | str | None


class Record(NamedTuple):
    """A value with its place and moment.

    time: seconds since the epoch, by the clock of the host. rank: number of the process; None: the
    value is of the host as a whole. device: number of an accelerator on this host; None: the value
    is of no single one. step: optimizer step, from 1; None: the value belongs to no step.
    """

    time: float
    host: str
    rank: int | None
    device: int | None
    step: int | None
    name: str
    value: Value


KIND = "device_kind"  # the record in which a rank says, at its start, of which kind its devices are


class Sink(Protocol):
    """A receiver of the records of one moment."""

    def write(self, records: Sequence[Record]) -> None:
        """Takes records that share their time and step."""
        ...

    def close(self) -> None:
        """Writes buffered records and closes the sink."""
        ...


class Recorder:
    """Stamps values and hands them to all sinks. A sink that cannot write ends no run."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        rank: int = 0,
        tell: Callable[[str], object] | None = None,
        host: str | None = None,
    ):
        """rank: number of this process. host: None: this machine's name. tell: is called once when
        a
        sink cannot write, and once when it can again."""
        self._sinks, self._rank, self._tell = list(sinks), rank, tell or (lambda message: None)
        self._host = socket.gethostname() if host is None else host
        self._lost: Counter[int] = Counter()  # by the place of the sink

    def emit(self, step: int, values: Mapping[str, Value]) -> None:
        """Records named values of a step, now."""
        now, host, rank = time.time(), self._host, self._rank
        records = [Record(now, host, rank, None, step, n, v) for n, v in values.items()]
        for place, sink in enumerate(self._sinks):
            try:
                sink.write(records)
            except OSError as error:
                self._lost[place] += 1
                if self._lost[place] == 1:
                    what = type(sink).__name__
                    self._tell(f"{what} cannot write: {error.strerror}. Training goes on without")
            else:
                if lost := self._lost.pop(place, 0):
                    self._tell(f"{type(sink).__name__} writes again; {lost} rows were lost")

    def close(self) -> None:
        """Closes all sinks."""
        for sink in self._sinks:
            try:
                sink.close()
            except OSError as error:
                self._tell(f"{type(sink).__name__} cannot write its end: {error.strerror}")


def newest(records: Sequence[Record]) -> list[Record]:
    """Returns the last record of each name, rank and device, of those that have a value."""
    last = {(r.name, r.rank, r.device): r for r in records if r.value is not None}
    return list(last.values())


def without_host(record: Record) -> list:
    """Returns a record as a row without its host, which the receiver of the message knows."""
    at, _, *fields = record
    return [at, *fields]


def parse(host: str, rows: Sequence[Sequence]) -> list[Record]:
    """Returns the records of a host's message: rows of Record's fields without `host`.

    Raises: ValueError for a row that is not of this form.
    """
    records = []
    for row in rows:
        match row:
            case [
                int() | float() as at,
                int() | None as rank,
                int() | None as device,
                int() | None as step,
                str() as name,
                (int() | float() | str() | None) as value,
            ]:
                records.append(Record(at, host, rank, device, step, name, value))
            case _:
                raise ValueError(f"{row!r:.100} is no record")
    return records


# ---- lines and files that a full, read-only or vanished disk may lose
#
# A run never ends because its measurements cannot be written. What could not be written is counted,
# and written about as soon as there is room again.


CHUNK = 1 << 16  # bytes read at a time to find the last line


class Lines:
    """Appends whole lines to a file. lost: lines that could not be written since the last success.

    A line is written in one system call and flushed, so another reader never sees half of one; what
    a full disk took of a line is cut off again.
    """

    def __init__(self, path: Path):
        """Makes the folder; half a line that a killed process left at the end is dropped.

        Raises: OSError if the file cannot be opened, while a person can still choose another one.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self.lost, self.why = path, 0, ""
        self._file = self._open()

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _cut_half_line(file)
        except BaseException:
            os.close(file)
            raise
        return file

    def write(self, line: str) -> bool:
        """Writes a line; tells whether it was written, and counts it in `lost` if not."""
        data = line.encode(errors="backslashreplace") + b"\n"
        try:
            if self._file < 0 or os.fstat(self._file).st_nlink == 0:  # the file was removed
                if self._file >= 0:
                    os.close(self._file)
                    self._file = -1
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._open()
            size = os.fstat(self._file).st_size
            if os.write(self._file, data) < len(data):
                os.ftruncate(self._file, size)
                raise OSError(28, "No space left on device")
        except OSError as error:
            self.lost += 1
            self.why = error.strerror or str(error)
            return False
        return True

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _cut_half_line(file: int) -> None:
    size = end = os.fstat(file).st_size
    while end > 0:
        at = max(end - CHUNK, 0)
        place = os.pread(file, end - at, at).rfind(b"\n")
        if place >= 0:
            end = at + place + 1
            break
        end = at
    if end < size:
        os.ftruncate(file, end)


class Lossy:
    """A text stream that drops what cannot be written, as to a full disk or an unread pipe."""

    def __init__(self, stream: TextIO, pipes: bool = True):
        """Passes everything else on to the stream.

        pipes: False: the end of a pipe is still an error.
        """
        self._stream, self._pipes = stream, pipes

    def __getattr__(self, name: str):
        """Returns the stream's attribute of this name."""
        return getattr(self._stream, name)

    def __iter__(self):
        """Iterates over the stream's lines."""
        return iter(self._stream)

    def write(self, text: str) -> int:
        """Returns the characters that were given, written or not."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._pass(error)
        except UnicodeEncodeError:  # the stream's encoding does not have them
            self.write(text.encode("ascii", "backslashreplace").decode())
        return len(text)

    def writelines(self, lines) -> None:
        """Writes each."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flushes as far as that is possible."""
        try:
            self._stream.flush()
        except OSError as error:
            self._pass(error)

    def _pass(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError) and not self._pipes:
            raise error


def keep_standard_streams(pipes: bool = True) -> None:
    """Keeps prints and the exit of this process from failing when a log cannot be written.

    pipes: False: the reader of a pipe may still end the process by closing it, as `head` does.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Lossy):
            setattr(sys, name, Lossy(stream, pipes))


# ---- sinks: metrics.jsonl (the truth), TensorBoard, Weights & Biases, Prometheus


MAX_ROW = 2**24  # (chosen) bytes of a line; what is longer is no row
_WORD = re.compile(r"[^a-zA-Z0-9_]")  # what the name of a metric may not have
FLUSH_S = 10.0  # (chosen) seconds between writes of TensorBoard's events


def _finite(value: Value) -> Value:
    """Returns None for a value that JSON cannot represent."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Jsonl:
    """One line for each moment: {"step", "time", name: value...}, flushed at once.

    A row that the disk does not take is lost; the next one that it takes says how many were, as
    "rows_lost".
    """

    def __init__(self, path: Path):
        """Appends; half a line that a killed run left at the end is dropped."""
        self._lines = Lines(path)

    def write(self, records: Sequence[Record]) -> None:
        """Writes one line. Raises: OSError when the disk does not take it."""
        row = {"step": records[0].step, "time": round(records[0].time, 3)}
        row |= {r.name: _finite(r.value) for r in records}
        if self._lines.lost:
            row["rows_lost"] = self._lines.lost
        if not self._lines.write(json.dumps(row)):
            raise OSError(errno.EIO, self._lines.why)
        self._lines.lost = 0

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics file; half a line at the end, and lines that are no rows, are
    left out."""
    if not path.exists():
        return
    with files.open_regular(path) as file:
        while line := file.readline(MAX_ROW):
            try:
                row = files.parse_json(line.decode("utf-8", errors="replace"))
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row


def rows_by_step(path: Path, key: str) -> dict[int, dict[str, Any]]:
    """Returns {step: row} of the rows that have `key`; the last row of a step wins."""
    rows = (row for row in read_jsonl(path) if key in row)
    return {row["step"]: row for row in rows if isinstance(row.get("step"), int)}


SCORE = "critic/score/mean"  # verl's name of the mean score of reinforcement learning's rollouts
TRAINING = ("loss", "loss_smooth", "grad_norm", "lr", "z_squared", "tokens", "targets")
SPEED = ("tokens_per_s", "mfu", "mfu_causal", "data_wait")
GROUPS = (
    ("eval_", "eval"),
    ("moe_", "moe"),
    ("wire_", "wire"),
    ("start_", "start"),
    ("time_", "time"),
    ("memory_", "memory"),
    ("kept.", "pruning"),
)
METRICS = ("train/loss", "eval/loss", "speed/tokens_per_s")  # beside the hyperparameters


def tag(name: str) -> str:
    """Returns a value's name in TensorBoard: 'train/loss', 'eval/loss', 'speed/mfu'."""
    if name in TRAINING or name.startswith("accuracy"):
        return f"train/{name}"
    for prefix, group in GROUPS:
        if name.startswith(prefix):
            return f"{group}/{name.removeprefix(prefix)}"
    if name == "sparsity":
        return f"pruning/{name}"
    return f"speed/{name}" if name in SPEED or name.endswith("_s") else f"other/{name}"


class TensorBoard:
    """Event files, readable by `tensorboard --logdir`. Tags are in groups (`tag`).

    tensorboardX's SummaryWriter hands events to a thread, which a full disk ends; its queue then
    fills and blocks the training loop for ever. Events are therefore written here, in the caller.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None):
        """settings: the run's settings, for the page of hyperparameters; None: no page."""
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[missing-module-attribute]
        from tensorboardX.summary import hparams

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"))
        self._flushed = 0.0
        if settings:
            known = (bool, int, float, str)
            plain = {n: v if isinstance(v, known) else str(v) for n, v in settings.items()}
            for summary in hparams(plain, dict.fromkeys(METRICS, 0.0)):
                self._writer.write_event(Event(wall_time=time.time(), summary=summary))

    def write(self, records: Sequence[Record]) -> None:
        """Writes every number as a scalar. Raises: OSError when the disk does not take it."""
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[missing-module-attribute]
        from tensorboardX.summary import scalar

        for r in records:
            if isinstance(r.value, (int, float)) and math.isfinite(r.value):
                summary = scalar(tag(r.name), r.value)
                self._writer.write_event(Event(wall_time=r.time, step=r.step, summary=summary))
        if time.monotonic() > self._flushed + FLUSH_S:
            self._flushed = time.monotonic()
            self._writer.flush()

    def close(self) -> None:
        """Flushes the events."""
        self._writer.close()


class Prometheus:
    """The newest numbers of all hosts, ranks and devices, in Prometheus' text format.

    A record `loss` becomes `megajax_rank_loss{host="a",rank="0"}`; of a whole host
    `megajax_host_...{host="a"}`, of a device `megajax_device_...{host="a",device="0"}`.
    """

    def __init__(self) -> None:
        """Knows nothing yet."""
        self._values: dict[str, dict[str, float]] = {}  # metric -> labels -> value

    def write(self, records: Sequence[Record]) -> None:
        """Takes numbers; texts are left out."""
        for r in records:
            if isinstance(r.value, int | float):
                kind = "host" if r.rank is None else "rank"
                kind = kind if r.device is None else "device"
                known = self._values.setdefault(f"megajax_{kind}_{_WORD.sub('_', r.name)}", {})
                known[_labels(r)] = r.value

    def lines(self) -> list[str]:
        """Returns the lines of the file."""
        lines = []
        for metric, values in self._values.items():
            lines.append(f"# TYPE {metric} gauge")
            lines += [f"{metric}{labels} {value:.10g}" for labels, value in values.items()]
        return lines

    def close(self) -> None:
        """Holds no file."""


def _labels(record: Record) -> str:
    host = record.host.replace("\\", r"\\").replace('"', r"\"")
    named = {"host": host, "rank": record.rank, "device": record.device}
    return "{" + ",".join(f'{n}="{v}"' for n, v in named.items() if v is not None) + "}"


class Wandb:
    """A Weights & Biases run; the extra `wandb` must be installed."""

    def __init__(self, project: str, name: str, folder: Path, config: Mapping[str, Any]):
        """Resumes the run of the same name. Raises: UserError without the package."""
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError:
            raise UserError("--log.wandb needs the package: uv sync --extra wandb") from None
        run_id = "".join(c if c.isalnum() else "-" for c in name)
        self._run = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=folder, config=dict(config)
        )

    def write(self, records: Sequence[Record]) -> None:
        """Logs all values of the moment."""
        values = {r.name: r.value for r in records if r.value is not None}
        self._attempt(lambda: self._run.log(values, step=records[0].step))

    def close(self) -> None:
        """Ends the run."""
        self._attempt(self._run.finish)

    def _attempt(self, work: Callable[[], Any]) -> None:
        """Raises: OSError for any error of the package: no run ends because of it."""
        try:
            work()
        except Exception as error:
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from None


# ---- stream: the records of one process in shared memory, for its agent
#
# A ring of SLOTS records beside the progress record (heartbeat.py). Writing takes no system call
# and never waits; a reader that comes too late loses the oldest records. A slot begins and ends
# with its number and is written from front to back. A reader reads the last number, then the slot,
# then the first number, so it never takes a record that is half written. Values are numbers, or
# texts that are cut to fit the slot.


SLOTS = 4096  # (chosen) about 150 steps of 25 records between two readings
_TEXT = 82
# number, time, step, value, device, kind, length of the name, name and text, number again
_SLOT = struct.Struct(f"<QdqdiBB{_TEXT}sQ")
_NUMBER = 8
SIZE = SLOTS * _SLOT.size
_NUMERIC, _TEXTUAL = 1, 2  # kinds of a value


class Stream:
    """A sink that writes into shared memory. One per process."""

    def __init__(self, path: Path):
        """Makes the file. Raises: OSError when memory is full: its pages are taken here, because
        a page that is missing later would end the process by SIGBUS."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_own(path), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, SIZE)
            file.truncate(SIZE)
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._number = 0

    def write(self, records: Sequence[Record], pack=_SLOT.pack_into) -> None:
        """Adds records; those without a value are left out."""
        memory, number = self._memory, self._number
        for at, _, _, device, step, name, value in records:
            if value is None:
                continue
            number += 1
            text = name.encode()[:_TEXT]
            length = len(text)
            if isinstance(value, str):
                kind, text, value = _TEXTUAL, text + value.encode(), 0.0  # struct cuts it off
            else:
                kind = _NUMERIC
            pack(
                memory,
                (number - 1) % SLOTS * _SLOT.size,
                number,
                at,
                -1 if step is None else step,
                value,
                -1 if device is None else device,
                kind,
                length,
                text,
                number,
            )
        self._number = number

    def close(self) -> None:
        """Leaves the records in shared memory: the agent reads them after the end of the
        process."""


class Reader:
    """Reads the records of another process.

    lost: records that were replaced before they were read.
    """

    def __init__(self, path: Path, host: str, rank: int):
        """path: of the stream; the file may be made later. host, rank: of the process."""
        self._path, self._host, self._rank = path, host, rank
        self._memory: mmap.mmap | None = None
        self._number = 0
        self.lost = 0

    def take(self) -> list[Record]:
        """Returns the records since the last call, oldest first."""
        memory = self._memory = self._memory or self._map()
        records: list[Record] = []
        while memory is not None and len(records) < SLOTS:
            number, record = self._slot(memory, self._number % SLOTS)
            if number > self._number + 1:  # the writer has gone around since
                behind = number - SLOTS // 2 - self._number
                self.lost += behind
                self._number += behind
                continue
            if record is None or number <= self._number:
                break
            self._number = number
            records.append(record)
        return records

    def _map(self) -> mmap.mmap | None:
        try:
            with open(self._path, "rb") as file:
                return mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
        except (FileNotFoundError, ValueError):  # not made, or not yet of its size
            return None

    def _slot(self, memory: mmap.mmap, place: int) -> tuple[int, Record | None]:
        """Returns (a slot's number, its record); no record where the slot is being written."""
        begin = place * _SLOT.size
        end = begin + _SLOT.size
        last = memory[end - _NUMBER : end]
        raw = memory[begin:end]
        first = memory[begin : begin + _NUMBER]
        number, at, step, amount, device, kind, length, text, _ = _SLOT.unpack(raw)
        if not first == last == raw[:_NUMBER]:
            return 0, None
        value: Value = amount
        if kind == _TEXTUAL:
            value = text[length:].rstrip(b"\0").decode(errors="replace")
        name = text[:length].decode(errors="replace")
        place_of = (self._host, self._rank, None if device < 0 else device)
        return number, Record(at, *place_of, None if step < 0 else step, name, value)


def records_file(progress: Path) -> Path:
    """Returns where a process with this progress file writes its records."""
    return progress.with_suffix(".records")


def of_process(progress: Path | None) -> list[Stream]:
    """Returns the sink of this process: none without an agent, or when shared memory is full."""
    try:
        return [] if progress is None else [Stream(records_file(progress))]
    except OSError:
        return []
