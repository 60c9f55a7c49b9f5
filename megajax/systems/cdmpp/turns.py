"""Lets several processes use one GPU in turn, so that only one of them runs kernels at a time.

A process holds an exclusive lock on a file while it has its turn. The operating system releases the
lock when the process ends, even in a crash. The file contains the process that holds the lock and
the time since when it does, so that another process can end a holder that hangs.
"""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Turns of processes at a resource, such as a GPU, that a lock on a file stands for."""

    def __init__(self, path: Path):
        """Names the file; it is made on the first turn."""
        self.path = path

    @contextlib.contextmanager
    def turn(self) -> Iterator[float]:
        """Waits until no other process has a turn, then has one. Yields the seconds waited."""
        began = time.monotonic()
        with open(self.path, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            now = time.monotonic()
            file.truncate(0)
            file.write(f"{os.getpid()} {now}\n")
            file.flush()
            try:
                yield now - began
            finally:
                file.truncate(0)

    def seconds_of(self, process: int) -> float:
        """Returns for how long a living process has had its turn; 0.0: it has none."""
        words = self.path.read_text().split() if self.path.exists() else []
        if len(words) != 2 or words[0] != str(process):
            return 0.0
        return time.monotonic() - float(words[1])


def share(process: int, processes: int, programs: int, families: int) -> list[int]:
    """Returns the numbers of the programs, from 0 to `programs` - 1, that one process is to time.

    Each number belongs to one process, and each process has one of every `processes` consecutive
    numbers. Families take turns over the numbers, so with a fixed choice a process could get the
    same few families again and again. The choice moves on by one before they would repeat, so that
    each process gets programs of every family.
    """
    period = math.lcm(processes, families)
    rounds = range(-(-programs // processes))
    numbers = [i * processes + (process + i * processes // period) % processes for i in rounds]
    return [number for number in numbers if number < programs]
