"""The network between an agent and its driver, which can fall silent: no FIN, no RST, no byte.

A relay listens on a port of its own and hands on what comes, in a thread. While it is cut it takes
nothing and gives nothing, as a switch without power does; both ends keep their connections. It can
also hold back what comes, end its connections, and change a byte.
"""

import contextlib
import selectors
import socket
import threading

TICK_S = 0.1  # (chosen)


class Relay:
    """Hands connections on to a port of this machine.

    cut: set to silence it. held_s: seconds for which all that comes waits. wrong: set, changes a
    byte of what comes next, and is set back. ends: set, ends all connections, and is set back.
    """

    def __init__(self, to: int):
        """to: the port of the driver."""
        self._to = to
        self.cut = self.wrong = self.ends = False
        self.held_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._others: dict[socket.socket, socket.socket] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            if self.cut:
                self._ended.wait(TICK_S)
                continue
            if self.ends:
                self.ends = False
                for sock in list(self._others):
                    self._end(sock)
            for key, _ in self._selector.select(TICK_S):
                sock = key.fileobj
                if sock is self._listener:
                    self._accept()
                elif isinstance(sock, socket.socket) and sock in self._others:
                    self._hand_on(sock)

    def _accept(self) -> None:
        here, _ = self._listener.accept()
        try:
            there = socket.create_connection(("127.0.0.1", self._to), timeout=5)
        except OSError:  # no driver is there
            here.close()
            return
        for one, other in ((here, there), (there, here)):
            one.settimeout(5)
            self._others[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _hand_on(self, sock: socket.socket) -> None:
        other = self._others[sock]
        try:
            data = sock.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            if self.held_s:
                self._ended.wait(self.held_s)
            if self.wrong:
                self.wrong = False
                at = len(data) // 2
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            other.sendall(data)
        except OSError:
            self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        for one in (sock, self._others.get(sock)):
            if one is not None:
                self._others.pop(one, None)
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(one)
                one.close()

    def close(self) -> None:
        """Ends it, with its connections."""
        self._ended.set()
        self._thread.join()
        for sock in (*self._others, self._listener):
            sock.close()
        self._selector.close()
