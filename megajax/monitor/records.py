"""Record: one measured value. Every meter writes them, every sink and watcher reads them.

No jax import: a watchdog reads the stream without touching a device.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
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
    """Stamps values and hands them to all sinks. A sink that cannot write ends no run."""

    def __init__(
        self, sinks: Sequence[Sink], host: int = 0, tell: Callable[[str], object] | None = None
    ):
        """host: the number of this process. tell: hears once that a sink cannot write, and once
        that it can again."""
        self._sinks, self._host, self._tell = list(sinks), host, tell or (lambda message: None)
        self._lost: Counter[int] = Counter()  # by the place of the sink

    def emit(self, step: int, values: Mapping[str, Value]) -> None:
        """Records named values of a step, now."""
        now = time.time()
        records = [Record(now, self._host, None, step, n, v) for n, v in values.items()]
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
