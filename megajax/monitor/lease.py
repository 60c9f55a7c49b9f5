"""The lease of a host's training processes: without a fresh one they end themselves.

The driver renews it with every report of the host's agent, and the agent leaves its moment in a
file beside the progress records. When the agent is frozen or dead, or cannot reach the driver, the
moment grows old, and each process ends before the driver starts its successor elsewhere. The moment
is the agent's own, from before the driver answered: an answer that was long on its way renews
nothing. Moments are CLOCK_BOOTTIME, which goes on while a machine sleeps; they are compared on one
host only. No jax import.
"""

import contextlib
import os
import select
import struct
import threading
import time
from pathlib import Path

from megajax.core.paths import open_own

EXPIRED = 75  # the exit code: nothing is wrong with the command, start it elsewhere
LOOK_S = 0.5  # (chosen) between two looks at the lease
_RECORD = struct.Struct("<ddQQ")  # moment, longest age in seconds, process, its namespace


def now() -> float:
    """Returns the moment, in seconds since this machine started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def beside(progress: Path) -> Path:
    """Returns where the lease is of a process that leaves its progress there."""
    return progress.with_name("lease")


def _namespace() -> int:
    """Returns in which namespace this process has its number; 0 when nobody knows."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Lease:
    """The writer: an agent."""

    def __init__(self, path: Path):
        """Makes the file. Raises: OSError."""
        self._file = open_own(path)
        self._moment = self._longest = 0.0

    def renew(self, moment: float, longest: float | None = None) -> None:
        """Lets the processes go on until `longest` seconds after the moment; None: as before."""
        self._longest = self._longest if longest is None else longest
        self._moment = max(self._moment, moment)
        record = _RECORD.pack(self._moment, self._longest, os.getpid(), _namespace())
        with contextlib.suppress(OSError):  # no memory is left: the lease grows old
            os.pwrite(self._file, record, 0)

    def is_there(self) -> bool:
        """Tells whether processes can find it: not when somebody has removed the file."""
        return os.fstat(self._file).st_nlink > 0

    def close(self) -> None:
        """Closes the file; it is removed with its folder."""
        os.close(self._file)


class Watch:
    """The reader: a training process. A thread looks at the lease as long as the process lives."""

    def __init__(self, path: Path):
        """Begins to watch. Raises: OSError when there is no lease."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._agent = -1
        _, _, agent, namespace = self._read()
        if namespace == _namespace() != 0:
            try:
                self._agent = os.pidfd_open(agent)
            except ProcessLookupError:
                end("its agent is dead")
            except OSError:  # an old kernel, or no descriptor is left: the lease grows old
                self._agent = -1
        threading.Thread(target=self._look, name="lease", daemon=True).start()

    def _read(self) -> tuple[float, float, int, int]:
        raw = os.pread(self._file, _RECORD.size, 0)
        return _RECORD.unpack(raw) if len(raw) == _RECORD.size else (0.0, 0.0, 0, 0)

    def lost(self) -> str | None:
        """Returns why this process may not go on, None while it may."""
        try:
            if os.fstat(self._file).st_nlink == 0:
                return "its agent has ended"
            moment, longest, _, _ = self._read()
        except OSError as error:  # else the thread that looks would end, and nobody would look
            return f"its lease cannot be read: {error.strerror}"
        age = now() - moment
        if age > longest:
            return f"its agent heard nothing of the driver for {age:.1f} s of {longest:g}"
        return None

    def check(self) -> None:
        """Ends this process at once when its lease has run out."""
        if (why := self.lost()) is not None:
            end(why)

    def _look(self) -> None:
        while True:
            if self._agent < 0:
                time.sleep(LOOK_S)
            elif select.select([self._agent], [], [], LOOK_S)[0]:
                end("its agent is dead")
            self.check()


def of_process(progress: Path) -> Watch | None:
    """Returns what watches the lease beside this file; None when nobody gives one."""
    try:
        return Watch(beside(progress))
    except FileNotFoundError:
        return None


def end(why: str) -> None:
    """Ends this process without a clean-up, which could wait for others or write into storage."""
    with contextlib.suppress(OSError):
        if select.select([], [2], [], 0)[1]:  # a pipe that nobody empties would hold us up
            os.write(2, f"[lease] process {os.getpid()} ends: {why}\n".encode())
    os._exit(EXPIRED)
