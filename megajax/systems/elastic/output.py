"""What a command prints, through a pipe: into its log, and its newest part to the driver.

The command itself never meets a full disk: the agent empties the pipe, and what the log does not
take is dropped, and counted in the log as soon as there is room again. A thread writes the log, so
neither the agent's other work nor a disk that hangs holds the command up. What a killed command had
printed is still in the pipe and is taken from there. Nobody waits for the pipe's end, because a
process that the command left behind may hold it open for ever. While its agent is frozen, a command
that prints more than PIPE_BYTES waits, until its lease has run out.
"""

import codecs
import contextlib
import fcntl
import os
import select
import sys
import threading
from pathlib import Path

PIPE_BYTES = 1 << 20  # (chosen) the most that Linux gives everybody
NEWEST_BYTES = 1 << 20  # (chosen) kept for the driver between two reports; a flood is skipped
WAITING_BYTES = 1 << 24  # (chosen) that wait for a slow disk; more is dropped
TAIL_BYTES = 4096  # (chosen) of the last output, for the evidence when the log lacks some
CLOSE_S = 5.0  # (chosen) for the log of a disk that hangs


class Output:
    """The output of one command. total: bytes printed so far. lost: those that no log has."""

    def __init__(self, log: Path):
        """Opens the log; a disk that does not take one costs the log. writer: the command's end."""
        self.log, self.total, self.lost = log, 0, 0
        self._why = ""
        self._file = self._open()
        if self._file < 0:
            print(f"[agent] no log {log}: {self._why}. The job goes on", file=sys.stderr)
        self._newest, self._skipped, self._tail = bytearray(), False, b""
        self._waiting = bytearray()  # for the log
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._guard = threading.Lock()  # of all but the log; nobody writes to a disk under it
        self._read, self.writer = os.pipe()
        os.set_blocking(self._read, False)
        with contextlib.suppress(OSError):  # this user has too many pipes of this size
            fcntl.fcntl(self._read, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)

    def follow(self) -> None:
        """Begins to write the log."""
        self._thread.start()

    def new_text(self) -> str:
        """Returns what was printed since the last call, the end of it when that is much."""
        self._take()
        with contextlib.suppress(BlockingIOError):  # the disk has hung for long
            os.write(self._waker, b".")
        with self._guard:
            raw, skipped = bytes(self._newest), self._skipped
            self._newest, self._skipped = bytearray(), False
        if skipped:
            self._decoder.reset()
        return self._decoder.decode(raw)

    def missing(self) -> str:
        """Returns the last lines that were printed, '' when the log has all of them."""
        if not self.lost:
            return ""
        text = self._tail.decode(errors="replace")
        return f"{self.lost} bytes of output are not in the log ({self._why}); the last:\n{text}\n"

    def close(self) -> None:
        """Takes what is left, and lets go of log and pipe. A disk may take CLOSE_S for it."""
        os.close(self._waker)
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(CLOSE_S)

    def _follow(self) -> None:
        told, open_ = b".", True
        while told:
            files = [self._read, self._wake] if open_ else [self._wake]
            ready, _, _ = select.select(files, [], [])
            told = os.read(self._wake, 1 << 16) if self._wake in ready else told
            open_ = self._take()
            with self._guard:
                data, self._waiting = bytes(self._waiting), bytearray()
            self._log(data)
        for file in (self._read, self._wake, self._file):
            if file >= 0:
                os.close(file)

    def _take(self) -> bool:
        """Empties the pipe, of what was in it by now. Tells whether somebody may print on."""
        taken = 0
        with self._guard:
            while taken <= PIPE_BYTES:
                try:
                    data = os.read(self._read, 1 << 16)
                except BlockingIOError:
                    return True
                if not data:
                    return False
                taken += len(data)
                self._keep(data)
        return True

    def _keep(self, data: bytes) -> None:
        self.total += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        self._newest += data
        if (over := len(self._newest) - NEWEST_BYTES) > 0:
            del self._newest[:over]
            self._skipped = True
        if len(self._waiting) < WAITING_BYTES:
            self._waiting += data
        else:
            self.lost, self._why = self.lost + len(data), "the disk is too slow"

    def _log(self, data: bytes) -> None:
        """Writes what the disk takes; before it, how much it did not take."""
        if self.lost and data:
            note = f"\n[agent] {self.lost} bytes are missing here: {self._why}\n".encode()
            if not self._write(note, whole=True):
                self.lost += len(data)
                return
            self.lost = 0
        self.lost += len(data) - self._write(data)

    def _write(self, data: bytes, whole: bool = False) -> int:
        """Returns how many bytes the log took. whole: all of them, or none."""
        if self._file < 0:
            self._file = self._open()
        written = 0
        try:
            while self._file >= 0 and written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            self._why = error.strerror or str(error)
            with contextlib.suppress(OSError):
                if whole and written:
                    os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                    written = 0
        return written

    def _open(self) -> int:
        """Returns the log's descriptor, -1 where there can be none."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self.log, flags, 0o644)
        except OSError as error:
            self._why = error.strerror or str(error)
            return -1
