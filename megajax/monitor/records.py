"""Record: one measured value. Every meter writes them, every sink and watcher reads them.

No jax import: a watchdog reads the stream without touching a device.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

Value = float | int | str | None


@dataclass(frozen=True)
class Record:
    """A value with its place and moment.

    time: seconds since the epoch. host: process number. device: local number, None: the host's.
    step: optimizer step, from 1.
    """

    time: float
    host: int
    device: int | None
    step: int
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
    """Stamps values and hands them to all sinks."""

    def __init__(self, sinks: Sequence[Sink], host: int = 0):
        """host: the number of this process."""
        self._sinks, self._host = list(sinks), host

    def emit(self, step: int, values: Mapping[str, Value]) -> None:
        """Records named values of a step, now."""
        now = time.time()
        records = [Record(now, self._host, None, step, n, v) for n, v in values.items()]
        for sink in self._sinks:
            sink.write(records)

    def close(self) -> None:
        """Closes all sinks."""
        for sink in self._sinks:
            sink.close()
