"""The records of one process in shared memory: the process writes them, its agent reads them.

A ring of SLOTS records beside the progress record (heartbeat.py). Writing takes no system call and
never waits; a reader that comes too late loses the oldest records. A slot begins and ends with its
number and is written from front to back. A reader reads the last number, then the slot, then the
first number, so it never takes a record that is half written. Values are numbers, or texts that are
cut to fit the slot. No jax import.
"""

import mmap
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from megajax.core.paths import open_own
from megajax.monitor.records import Record, Value

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
                memory, (number - 1) % SLOTS * _SLOT.size,
                number, at, -1 if step is None else step, value,
                -1 if device is None else device, kind, length, text, number,
            )  # fmt: skip
        self._number = number

    def close(self) -> None:
        """Leaves what is there: the agent reads it after the end of the process."""


class Reader:
    """Reads what a process has added. lost: records that were replaced before they were read."""

    def __init__(self, path: Path, host: str, rank: int):
        """host, rank: whose records these are. The file may come later."""
        self._path, self._host, self._rank = path, host, rank
        self._memory: mmap.mmap | None = None
        self._number = 0
        self.lost = 0

    def take(self) -> list[Record]:
        """Returns the records since the last call, oldest first."""
        memory = self._memory = self._memory or self._map()
        found: list[Record] = []
        while memory is not None and len(found) < SLOTS:
            number, record = self._slot(memory, self._number % SLOTS)
            if number > self._number + 1:  # the writer has gone around since
                behind = number - SLOTS // 2 - self._number
                self.lost += behind
                self._number += behind
                continue
            if record is None or number <= self._number:
                break
            self._number = number
            found.append(record)
        return found

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


def beside(progress: Path) -> Path:
    """Returns where a process with this progress file writes its records."""
    return progress.with_suffix(".records")


def of_process(progress: Path | None) -> list[Stream]:
    """Returns the sink of this process: none without an agent, or when shared memory is full."""
    try:
        return [] if progress is None else [Stream(beside(progress))]
    except OSError:
        return []
