"""Where connections come in: few, small and quick until they have proved that they belong here.

Whoever reaches the port may try: a connection has GREETING_S to prove that it holds the secret
(wire.py), in lines of 4 kB; so many may wait at a time, and the oldest of the busiest address gives
way to a new one, so a flood delays nobody for long. What goes wrong with one connection ends that
connection and nothing else. Each kind of refusal of an address is told once, then counted.
"""

import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection

from megajax.systems.elastic.tls import Tls
from megajax.systems.elastic.wire import GREETING_S, Line

WAITING = 64  # (chosen) connections that have not proved themselves, at a time
WAITING_OF_ONE = 16  # (chosen) of one address
REST_S = 0.5  # (chosen) seconds without accepting after the system refused a connection
TOLD = 256  # (chosen) refusals that are told one by one; a table of strangers may not grow

Refused = Callable[[str, str, int], None]


class Door:
    """Accepts connections of a listening socket into a selector."""

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        secret: str,
        serves: Collection[str],
        refused: Refused = lambda address, why, count: None,
        tls: Tls | None = None,
    ):
        """serves: the purposes that callers may have. refused: hears (address, why, how often)."""
        listener.setblocking(False)
        self.listener, self._selector = listener, selector
        self._secret, self._serves, self._refused, self._tls = secret, serves, refused, tls
        if tls is not None:
            tls.channel(False)  # a file that does not fit is found before anybody comes
        self._waiting: dict[Line, tuple[str, float]] = {}  # address, when it came
        self._counts: Counter[tuple[str, str]] = Counter()
        self._rests_until: float | None = None
        selector.register(listener, selectors.EVENT_READ)

    def accept(self) -> None:
        """Lets one connection in, to prove itself. Never raises for what the network does."""
        try:
            sock, where = self.listener.accept()
        except BlockingIOError:
            return  # it has left again
        except OSError as error:  # out of descriptors, or of memory
            self._selector.unregister(self.listener)
            self._rests_until = time.monotonic() + REST_S
            self.refuse("", f"cannot accept: {error.strerror}")
            return
        address = str(where[0])
        try:
            line = Line(sock, self._secret, False, self._tls)
        except OSError:
            sock.close()  # reset before it was looked at
            return
        own = [k for k, (a, _) in self._waiting.items() if a == address]
        if len(own) >= WAITING_OF_ONE or len(self._waiting) >= WAITING:
            busiest = Counter(a for a, _ in self._waiting.values()).most_common(1)[0][0]
            oldest = own[0] if own else next(
                k for k, (a, _) in self._waiting.items() if a == busiest
            )  # fmt: skip
            self.turn_away(oldest, "too many connections that prove nothing")
        self._waiting[line] = (address, time.monotonic())
        self._selector.register(line, selectors.EVENT_READ)

    def admits(self, line: Line) -> bool:
        """Tells whether a line that was heard has proved itself and wants what is served here."""
        if line.ready and line in self._waiting:
            if line.purpose not in self._serves:
                raise ConnectionRefusedError("it wants what is not served here")
            del self._waiting[line]
        return line.ready

    def turn_away(self, line: Line, why: str) -> None:
        """Ends a connection, and tells of one that never proved itself."""
        address, _ = self._waiting.pop(line, (None, 0.0))
        if not line.closed:
            self._selector.unregister(line)
            line.close()
        if address is not None:
            self.refuse(address, why)

    def refuse(self, address: str, why: str) -> None:
        """Tells of a refusal: the first of its kind, and every hundredth."""
        if len(self._counts) >= TOLD and (address, why) not in self._counts:
            address, why = "", "others, not told one by one"
        self._counts[address, why] += 1
        count = self._counts[address, why]
        if count == 1 or count % 100 == 0:
            self._refused(address, why, count)

    def sweep(self) -> None:
        """Ends what takes too long to prove itself; call it at every turn of the loop."""
        now = time.monotonic()
        for line, (_, came) in list(self._waiting.items()):
            if now - came > GREETING_S:
                self.turn_away(line, f"did not prove itself in {GREETING_S:g} s")
        if self._rests_until is not None and now > self._rests_until:
            self._rests_until = None
            self._selector.register(self.listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Ends all that wait, and listens no more."""
        for line in list(self._waiting):
            self.turn_away(line, "the driver has ended")
        if self._rests_until is None:
            self._selector.unregister(self.listener)
        self.listener.close()
