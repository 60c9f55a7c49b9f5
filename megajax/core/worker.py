"""A child process that exchanges lines of JSON with this one. No jax import.

Messages to the child arrive on its standard input, one a line. Its messages are JSON objects, one a
line, on its standard output or on a pipe of their own. `receive` never blocks, for callers that
watch several children; `messages` waits, for callers with one child or a thread for each.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CLOSE_S = 10.0  # (chosen) for the system to end a killed child, which a hung device may delay


class Worker:
    """The child. process: its subprocess.Popen. silent: whether all of its messages were read."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        apart: bool = False,
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
    ):
        """Starts the child in a session of its own: Ctrl-C does not reach it, and `kill` also ends
        what it started.

        Args: apart: its messages come through a pipe whose descriptor is the last word of the
          command, so that what a library prints cannot be taken for one; stdout: of the child then.
          stderr, env: as subprocess.Popen has them.
        Raises: OSError.
        """
        self.silent = False
        self._unfinished = b""
        write = -1
        if apart:
            self._read, write = os.pipe()
            command = [*command, str(write)]
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=stdout if apart else subprocess.PIPE,
                stderr=stderr,
                pass_fds=[write] if apart else [],
                start_new_session=True,
                env=None if env is None else dict(env),
            )
        finally:
            if apart:
                os.close(write)
        if not apart:
            assert self.process.stdout is not None
            self._read = self.process.stdout.fileno()
        os.set_blocking(self._read, False)
        self._apart = apart

    def fileno(self) -> int:
        """Returns the descriptor of the child's messages, for select."""
        return self._read

    def send(self, message: Any) -> bool:
        """Sends a message. Returns: whether the child could receive it; False: it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError):  # ValueError: `close` was called
            return False
        return True

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived since the last call.

        A line that is no object is what a library printed, and is left out. Raises: ValueError for
        an object that is no JSON.
        """
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._read, 1 << 16):
                self._unfinished += chunk
            self.silent = True
        *lines, self._unfinished = self._unfinished.split(b"\n")
        return [json.loads(line) for line in lines if line.startswith(b"{")]

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yields each message when it arrives, until the child ends. Raises: as `receive`."""
        while not self.silent:
            select.select([self._read], [], [])
            yield from self.receive()

    def kill(self) -> None:
        """Ends the child and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends the child if it runs, and frees what this process holds of it."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_S)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        if self._apart:
            os.close(self._read)
