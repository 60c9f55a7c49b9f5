"""Messages between driver and agents: one JSON object a line over TCP."""

import json
import socket
from typing import Any

LONGEST = 64 * 2**20  # (chosen) bytes of a message: stacks and spans of all ranks of a host
PATIENCE = 10.0  # (chosen) seconds that a send may block, before the other side counts as gone


class Line:
    """One connection. `receive` never blocks when its socket is readable."""

    def __init__(self, sock: socket.socket):
        """Takes the socket over."""
        sock.settimeout(PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self._rest = b""

    def fileno(self) -> int:
        """For selectors."""
        return self.sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises: OSError when the other side is gone."""
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Returns what has come. Raises: OSError when the other side is gone or talks nonsense."""
        data = self.sock.recv(1 << 20)
        if not data:
            raise ConnectionResetError("closed by the other side")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST:
            raise ConnectionAbortedError("a message without an end")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError as error:
            raise ConnectionAbortedError("not a message") from error
        if not all(isinstance(m, dict) for m in found):
            raise ConnectionAbortedError("not a message")
        return found

    def close(self) -> None:
        """Hangs up."""
        self.sock.close()


def dial(address: str) -> Line:
    """Returns a connection to host:port. Raises: OSError."""
    host, _, port = address.rpartition(":")
    return Line(socket.create_connection((host, int(port)), timeout=PATIENCE))
