"""Messages between driver, agents and operators: one JSON object a line over TCP, each signed.

Both ends of a connection hold the job's secret, which never travels. The caller sends a nonce, the
called end answers with a nonce of its own and an HMAC over both, and the caller proves itself in
the same way; neither end acts on anything before the other has proved that it holds the secret.
After that every line carries an HMAC of a session key, of its direction and of its number, so that
nothing can be forged, replayed, reordered or moved to another connection. With TLS (tls.py) the
proofs cover the certificate too, so a stranger in the middle is found whatever certificate it has.

    caller                                          called
    {"purpose", "name", "nonce"}         ->
                                         <-         {"nonce", "proof": HMAC(secret, called + both)}
    {"proof": HMAC(secret, caller + both)} ->
    <HMAC> <JSON>                        <->        <HMAC> <JSON>

The limits on a connection that has not proved itself are in door.py.
"""

import hashlib
import hmac
import json
import secrets
import socket
import time
from typing import Any

from megajax.core.errors import UserError
from megajax.systems.elastic.tls import Channel, Tls

LONGEST = 64 * 2**20  # (chosen) bytes of a message: stacks and spans of all ranks of a host
LONGEST_GREETING = 4096  # (chosen) bytes of a line from an end that has not proved itself
PATIENCE = 10.0  # (chosen) seconds that a send may block, before the other end counts as gone
GREETING_S = 5.0  # (chosen) seconds in which an end must prove itself
SHORTEST_SECRET = 16  # (chosen) characters: whoever hears a greeting can try secrets at leisure
NONCE_BYTES = 32
MAC = 64  # hexadecimal digits of HMAC-SHA256
CALLED, CALLER = b"called", b"caller"


class StrangerError(ConnectionAbortedError):
    """The other end has not proved that it holds the secret, or sent what nobody signed."""


def check_secret(secret: str, flag: str) -> str:
    """Returns the secret. Raises: UserError when it is short enough to be tried out."""
    if len(secret) < SHORTEST_SECRET:
        raise UserError(
            f"the job's secret has {len(secret)} characters and needs at least {SHORTEST_SECRET}: "
            f"python3 -c 'import secrets; print(secrets.token_hex(16))' makes one ({flag})"
        )
    return secret


def _sign(key: bytes, *parts: bytes) -> bytes:
    """Returns HMAC-SHA256 over the parts and their lengths, as hexadecimal digits."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8) + part)
    return mac.hexdigest().encode()


class Line:
    """One connection, not to be used before `ready`. `receive` never blocks on a readable socket.

    purpose: what the caller wants; the called end lists what it serves. name: of the caller.
    """

    def __init__(self, sock: socket.socket, secret: str, calls: bool, tls: Tls | None = None):
        """Takes the socket over. calls: whether this end made the connection."""
        sock.settimeout(PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.ready = self.closed = False
        self.purpose = self.name = ""
        self._secret, self._calls = secret.encode(), calls
        self._tls: Channel | None = None if tls is None else tls.channel(calls)
        self._nonce = secrets.token_hex(NONCE_BYTES)
        self._said: tuple[bytes, ...] = ()  # what both ends must agree on
        self._keys = (b"", b"")  # of what is sent, of what is received
        self._sent = self._received = 0
        self._data, self._searched = bytearray(), 0

    def fileno(self) -> int:
        """Returns the socket's file descriptor, for selectors; -1 after close."""
        return self.sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a signed message. Raises: OSError when the other end is gone."""
        if not self.ready:
            raise StrangerError("the other end has not proved itself")
        body = json.dumps(message).encode()
        mac = _sign(self._keys[0], self._sent.to_bytes(8), body)
        self._sent += 1
        self._write(mac + b" " + body + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have come; greetings are answered here.

        Raises: OSError when the other end is gone; StrangerError when it is not who it must be.
        """
        data = self.sock.recv((1 << 20) if self.ready else LONGEST_GREETING)
        if not data:
            raise ConnectionResetError("closed by the other end")
        if self._tls is not None:
            data, answer = self._tls.take(data)
            self.sock.sendall(answer)
        self._data += data
        found = []
        while (end := self._data.find(b"\n", self._searched)) >= 0:
            line = bytes(self._data[:end])
            del self._data[: end + 1]
            self._searched = 0
            if not self.ready and len(line) > LONGEST_GREETING:
                raise StrangerError("its greeting is too long")
            if self.ready:
                found.append(self._open(line))
            else:
                self._greeted(line)
        self._searched = len(self._data)
        if self._searched > (LONGEST if self.ready else LONGEST_GREETING):
            raise StrangerError("a message without an end")
        return found

    def close(self) -> None:
        """Hangs up."""
        self.closed = True
        self.sock.close()

    def _write(self, data: bytes) -> None:
        self.sock.sendall(data if self._tls is None else self._tls.seal(data))

    def _open(self, line: bytes) -> dict[str, Any]:
        """Returns the message of a signed line."""
        mac, body = line[:MAC], line[MAC + 1 :]
        if not hmac.compare_digest(mac, _sign(self._keys[1], self._received.to_bytes(8), body)):
            raise StrangerError("sent a message that nobody signed")
        self._received += 1
        return _parse(body)

    # ---- greetings

    def greet(self, purpose: str, name: str) -> None:
        """Proves both ends to one another, as the caller. Raises: OSError; StrangerError."""
        self.purpose, self.name = purpose, name
        end = time.monotonic() + GREETING_S
        if self._tls is not None:
            self.sock.sendall(self._tls.begin())
        else:
            self._hello()
        while not self.ready:
            self.sock.settimeout(max(end - time.monotonic(), 0.001))
            try:
                self.receive()
            except TimeoutError:
                raise StrangerError(f"did not prove itself in {GREETING_S:g} s") from None
            if self._tls is not None and self._tls.open and not self._said:
                self._hello()
        self.sock.settimeout(PATIENCE)

    def _hello(self) -> None:
        hello = {"purpose": self.purpose, "name": self.name, "nonce": self._nonce}
        self._said = (b"",)
        self._write(json.dumps(hello).encode() + b"\n")

    def _greeted(self, line: bytes) -> None:
        """Takes one line of the other end's greeting."""
        message = _parse(line)
        if not self._calls and not self._said:  # 1: the caller says who it is
            self.purpose, self.name = _text(message, "purpose"), _text(message, "name")
            self._agree(_text(message, "nonce"), self._nonce)
            proof = _sign(self._secret, CALLED, *self._said).decode()
            self._write(json.dumps({"nonce": self._nonce, "proof": proof}).encode() + b"\n")
            return
        if self._calls:  # 2: the called end proves itself first, because callers do as told
            self._agree(self._nonce, _text(message, "nonce"))
        theirs, mine = (CALLED, CALLER) if self._calls else (CALLER, CALLED)
        proof = _text(message, "proof").encode()
        if not hmac.compare_digest(proof, _sign(self._secret, theirs, *self._said)):
            raise StrangerError("it does not hold this job's secret")
        if self._calls:  # 3: the caller proves itself
            own = _sign(self._secret, mine, *self._said).decode()
            self._write(json.dumps({"proof": own}).encode() + b"\n")
        keys = [_sign(self._secret, b"key of " + end, *self._said) for end in (mine, theirs)]
        self._keys = (keys[0], keys[1])
        self.ready = True

    def _agree(self, caller: str, called: str) -> None:
        """Fixes what the proofs and the keys are made of."""
        if min(len(caller), len(called)) < 2 * NONCE_BYTES:
            raise StrangerError("its nonce is too short")
        bound = b"" if self._tls is None else self._tls.certificate()
        words = (self.purpose, self.name, caller, called)
        self._said = (*(w.encode() for w in words), bound)


def _parse(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise StrangerError("sent what is not a message") from None
    if not isinstance(message, dict):
        raise StrangerError("sent what is not a message")
    return message


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not value.isascii():
        raise StrangerError("its greeting is not a greeting")
    return value


def split_address(text: str, flag: str) -> tuple[str, int]:
    """Returns (host, port) of host:port, or of [host]:port. Raises: UserError, naming the flag."""
    host, colon, port = text.rpartition(":")
    if not (colon and port.isascii() and port.isdecimal() and int(port) < 2**16):
        raise UserError(
            f"{text!r} must be host:port with a port from 0 to 65535, e.g. 127.0.0.1:8475 or "
            f"[::1]:8475 ({flag})"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Returns host:port, with brackets around an address that has colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial(address: str, secret: str, purpose: str, name: str, tls: Tls | None = None) -> Line:
    """Returns a connection to host:port whose both ends have proved themselves.

    Raises: OSError when nobody answers there, StrangerError when a stranger does; UserError.
    """
    where = split_address(address, "--agent")
    sock = socket.create_connection(where, timeout=PATIENCE)
    try:
        line = Line(sock, secret, True, tls)
    except BaseException:
        sock.close()
        raise
    try:
        line.greet(purpose, name)
    except BaseException:
        line.close()
        raise
    return line
