"""Record: one measured value. Every meter of every rank writes them; sinks and detectors read them.

Sources: the training loop of each rank (Recorder), the agent of each host for what is seen from
outside (host_meter.py), and the fault injector, which records what it does. Readers: console,
JSONL, TensorBoard, Prometheus (sinks.py), and the detectors of a supervised job (watchdog.py),
which get the records of all ranks. No jax import: a driver reads the stream without a device.
"""

import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

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


class Sink(Protocol):
    """Takes the records of one moment."""

    def write(self, records: Sequence[Record]) -> None:
        """Takes records that share their time and step."""
        ...

    def close(self) -> None:
        """Writes what is left."""
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
        """rank: the number of this process. host: None: the name of this machine. tell: is called
        once when a sink cannot write, and once when it can again."""
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
    """Returns the row of a host's message: who receives it knows the host."""
    at, _, *rest = record
    return [at, *rest]


def parse(host: str, rows: Sequence[Sequence]) -> list[Record]:
    """Returns the records of a host's message: rows of Record's fields without `host`.

    Raises: ValueError for a row that is not of this form.
    """
    found = []
    for row in rows:
        match row:
            case [
                int() | float() as at, int() | None as rank, int() | None as device,
                int() | None as step, str() as name, (int() | float() | str() | None) as value,
            ]:  # fmt: skip
                found.append(Record(at, host, rank, device, step, name, value))
            case _:
                raise ValueError(f"{row!r:.100} is no record")
    return found
