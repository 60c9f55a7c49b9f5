"""Turns of several processes at one GPU, so that only one of them runs kernels at a time.

A process holds an exclusive lock on a file while it has its turn. The operating system frees the
lock when the process ends in any way. The file says who holds the lock since when, so that another
process can end a holder that hangs.
"""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path


class Turns:
    """Turns at what a file stands for."""

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
    """Returns the numbers below `programs` of one process; each number has one process.

    Of each `processes` numbers in sequence a process has one. Which one moves on when the families
    of its programs would repeat, so that each process gets programs of every family.
    """
    period = math.lcm(processes, families)
    rounds = range(-(-programs // processes))
    numbers = [i * processes + (process + i * processes // period) % processes for i in rounds]
    return [number for number in numbers if number < programs]
