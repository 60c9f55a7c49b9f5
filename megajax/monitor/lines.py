"""Telemetry that may be lost: lines and files that a full, read-only or vanished disk cannot hold.

A run never ends because its measurements cannot be written. What could not be written is counted,
and written about as soon as there is room again. No jax import.
"""

import os
import sys
from pathlib import Path
from typing import TextIO

CHUNK = 1 << 16  # bytes read at a time to find the last line


class Lines:
    """Appends whole lines to a file. lost: lines that could not be written since the last success.

    A line is written in one system call and flushed, so another reader never sees half of one; what
    a full disk took of a line is cut off again.
    """

    def __init__(self, path: Path):
        """Makes the folder; half a line that a killed process left at the end is dropped.

        Raises: OSError when it cannot: at the start somebody can still choose another place.
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
        """Tells whether the line was written; one that was not is counted in `lost`."""
        data = line.encode(errors="backslashreplace") + b"\n"
        try:
            if self._file < 0 or os.fstat(self._file).st_nlink == 0:  # the file was removed
                self._reopen()
            size = os.fstat(self._file).st_size
            if os.write(self._file, data) < len(data):
                os.ftruncate(self._file, size)
                raise OSError(28, "No space left on device")
        except OSError as error:
            self.lost += 1
            self.why = error.strerror or str(error)
            return False
        return True

    def _reopen(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

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
    """A text stream that drops what a full disk, or a pipe that nobody reads, does not take."""

    def __init__(self, stream: TextIO, pipes: bool = True):
        """Does for all else what the stream does. pipes: False: a pipe's end is an error still."""
        self._stream, self._pipes = stream, pipes

    def __getattr__(self, name: str):
        """Returns what the stream has under this name."""
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
        """Flushes what can be written."""
        try:
            self._stream.flush()
        except OSError as error:
            self._pass(error)

    def _pass(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError) and not self._pipes:
            raise error


def keep_standard_streams(pipes: bool = True) -> None:
    """Lets no print and no exit of this process fail for a log that cannot be written.

    pipes: False: who reads a pipe may still end the process by closing it, as `head` does.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Lossy):
            setattr(sys, name, Lossy(stream, pipes))
