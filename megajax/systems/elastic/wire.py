"""Messages between driver, agents and operators: one JSON object a line over TCP, each signed.

Both ends of a connection hold the job's secret, which never travels. The caller sends a nonce, the
called end answers with a nonce of its own and an HMAC over both, and the caller proves itself in
the same way; neither end acts on anything before the other has proved that it holds the secret.
After that every line carries an HMAC of a session key, of its direction and of its number, so that
nothing can be forged, replayed, reordered or moved to another connection. With TLS the
proofs cover the certificate too, so a stranger in the middle is found whatever certificate it has.

    caller                                          called
    {"purpose", "name", "nonce"}         ->
                                         <-         {"nonce", "proof": HMAC(secret, called + both)}
    {"proof": HMAC(secret, caller + both)} ->
    <HMAC> <JSON>                        <->        <HMAC> <JSON>

Door holds the limits on a connection that has not proved itself. The address at which agents find
the driver follows. No jax import.
"""

import dataclasses
import functools
import hashlib
import hmac
import json
import os
import secrets
import selectors
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from megajax.core.errors import UserError

# ---- TLS under the messages, for networks where commands and logs must not be read
#
# Who is who is decided by the job's secret: its proofs cover the certificate of the called end, so
# a self-signed one, made at the start, is enough. A certificate of an authority is checked on top
# where its file is given. The channel works on bytes in memory, so that a stranger who stops in the
# middle of a TLS handshake can never block the driver.


@dataclasses.dataclass(frozen=True)
class Tls:
    """The files of TLS.

    certificate, key: PEM files of the called end. authority: PEM file of the authority that callers
    trust.
    """

    certificate: str | None = None
    key: str | None = None
    authority: str | None = None

    def channel(self, calls: bool) -> "Channel":
        """Returns one end of a connection. Raises: UserError when a file does not fit.

        The files are read once, so that a later removal, or a lack of descriptors, ends no
        connection.
        """
        context, bound = _context(self, calls)
        return Channel(context, calls, bound)

    def context(self, calls: bool) -> tuple[ssl.SSLContext, bytes | None]:
        """Returns the context that connections of one end share, and the digest of its
        certificate."""
        kind = ssl.PROTOCOL_TLS_CLIENT if calls else ssl.PROTOCOL_TLS_SERVER
        context = ssl.SSLContext(kind)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            if calls:
                context.check_hostname = False  # the secret says who it is, a name would not
                context.verify_mode = ssl.CERT_NONE
                if self.authority is not None:
                    context.load_verify_locations(self.authority)
                    context.verify_mode = ssl.CERT_REQUIRED
            else:
                context.load_cert_chain(self.certificate or "", self.key)
        except OSError as error:  # an SSLError is one
            raise UserError(f"TLS cannot use {self}: {error} (--tls_cert, --tls_ca)") from None
        if calls:
            return context, None
        return context, _digest(ssl.PEM_cert_to_DER_cert(_first(self.certificate or "")))


@functools.cache
def _context(tls: Tls, calls: bool) -> tuple[ssl.SSLContext, bytes | None]:
    return tls.context(calls)


class Channel:
    """Bytes of a connection, sealed and opened. open: whether the TLS handshake has ended."""

    def __init__(self, context: ssl.SSLContext, calls: bool, bound: bytes | None):
        """bound: digest of this end's certificate; None: that of the certificate that the other end
        shows."""
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=not calls)
        self._bound = bound
        self.open = False

    def begin(self) -> bytes:
        """Returns the first bytes that the caller sends."""
        return self.take(b"")[1]

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns (what was in the bytes that came, what must be sent back).

        Raises: ConnectionAbortedError for what is not TLS, or a certificate that is not trusted.
        """
        self._in.write(data)
        plain = bytearray()
        try:
            if not self.open:
                self._tls.do_handshake()
                self.open = True
            while chunk := self._tls.read(1 << 16):
                plain += chunk
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise ConnectionAbortedError(f"TLS: {error.reason or error}") from None
        return bytes(plain), self._out.read()

    def seal(self, data: bytes) -> bytes:
        """Returns the bytes to send."""
        self._tls.write(data)
        return self._out.read()

    def certificate(self) -> bytes:
        """Returns the digest of the called end's certificate, the same at both ends."""
        if self._bound is not None:
            return self._bound
        return _digest(self._tls.getpeercert(binary_form=True) or b"")


def _digest(der: bytes) -> bytes:
    return hashlib.sha256(der).digest()


def _first(path: str) -> str:
    """Returns the first certificate of a PEM file: the called end's own."""
    end = "-----END CERTIFICATE-----"
    text = Path(path).read_text()
    begin = text.index("-----BEGIN CERTIFICATE-----")
    return text[begin : text.index(end) + len(end)] + "\n"


def self_signed(folder: Path) -> Tls:
    """Makes a self-signed certificate in a new folder of this user, and returns its files.

    Raises: UserError where there is no openssl to make one.
    """
    if shutil.which("openssl") is None:
        raise UserError("--tls makes its certificate with openssl, which is not here (--tls_cert)")
    place = Path(tempfile.mkdtemp(prefix="tls-", dir=folder))  # mode 0700
    certificate, key = place / "certificate.pem", place / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650"
    subprocess.run(
        [*command.split(), "-subj", "/CN=megajax", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    return Tls(str(certificate), str(key))


# ---- signed messages


LONGEST = 64 * 2**20  # (chosen) bytes of a message: stacks and spans of all ranks of a host
LONGEST_GREETING = 4096  # (chosen) bytes of a line from an end that has not proved itself
PATIENCE = 10.0  # (chosen) seconds that a send may block, before the other end counts as gone
GREETING_S = 5.0  # (chosen) seconds in which an end must prove itself
SHORTEST_SECRET = 16  # (chosen) characters: whoever hears a greeting can try secrets at leisure
NONCE_BYTES = 32
MAC = 64  # hexadecimal digits of HMAC-SHA256
AGENT, OPERATOR = "agent", "evict"  # the purposes of connections to a driver
CALLED, CALLER = b"called", b"caller"


class StrangerError(ConnectionAbortedError):
    """The other end has not proved that it holds the secret, or sent an unsigned message."""


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

    purpose: what the caller wants to do; the called end lists what it serves. name: the caller's
    name.
    """

    def __init__(self, sock: socket.socket, secret: str, calls: bool, tls: Tls | None = None):
        """Takes over the socket. calls: whether this end made the connection."""
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
        """Returns the messages that have arrived; greetings are answered here.

        Raises: OSError when the other end is gone; StrangerError when it is not who it must be.
        """
        data = self.sock.recv((1 << 20) if self.ready else LONGEST_GREETING)
        if not data:
            raise ConnectionResetError("closed by the other end")
        if self._tls is not None:
            data, answer = self._tls.take(data)
            self.sock.sendall(answer)
        self._data += data
        messages = []
        while (end := self._data.find(b"\n", self._searched)) >= 0:
            line = bytes(self._data[:end])
            del self._data[: end + 1]
            self._searched = 0
            if not self.ready and len(line) > LONGEST_GREETING:
                raise StrangerError("its greeting is too long")
            if self.ready:
                messages.append(self._open(line))
            else:
                self._greeted(line)
        self._searched = len(self._data)
        if self._searched > (LONGEST if self.ready else LONGEST_GREETING):
            raise StrangerError("a message without an end")
        return messages

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
        """Handles one line of the other end's greeting."""
        message = _parse(line)
        if not self._calls and not self._said:  # 1: the caller says who it is
            self.purpose, self.name = _text(message, "purpose"), _text(message, "name")
            self._agree(_text(message, "nonce"), self._nonce)
            proof = _sign(self._secret, CALLED, *self._said).decode()
            self._write(json.dumps({"nonce": self._nonce, "proof": proof}).encode() + b"\n")
            return
        if self._calls:  # 2: the called end proves itself first, because callers do as told
            self._agree(self._nonce, _text(message, "nonce"))
        theirs, this_end = (CALLED, CALLER) if self._calls else (CALLER, CALLED)
        proof = _text(message, "proof").encode()
        if not hmac.compare_digest(proof, _sign(self._secret, theirs, *self._said)):
            raise StrangerError("it does not hold this job's secret")
        if self._calls:  # 3: the caller proves itself
            answer = _sign(self._secret, this_end, *self._said).decode()
            self._write(json.dumps({"proof": answer}).encode() + b"\n")
        keys = [_sign(self._secret, b"key of " + end, *self._said) for end in (this_end, theirs)]
        self._keys = (keys[0], keys[1])
        self.ready = True

    def _agree(self, caller: str, called: str) -> None:
        """Fixes the words of which the proofs and the keys are made."""
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


def family(address: str) -> socket.AddressFamily:
    """Returns which kind of address this is."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


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


# ---- where connections come in: few, small and quick until they have proved that they may
#
# Whoever reaches the port may try: a connection has GREETING_S to prove that it holds the secret
# in lines of 4 kB; so many may wait at a time, and the oldest of the busiest address
# gives way to a new one, so a flood delays nobody for long. What goes wrong with one connection
# ends that connection and nothing else. Each kind of refusal of an address is told once, then
# counted.


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
        """serves: purposes that callers may have.

        refused: is called with (address, why, how often).
        """
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
        """Accepts one connection, which must prove itself. Never raises for network errors."""
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
        same_address = [k for k, (a, _) in self._waiting.items() if a == address]
        if len(same_address) >= WAITING_OF_ONE or len(self._waiting) >= WAITING:
            busiest = Counter(a for a, _ in self._waiting.values()).most_common(1)[0][0]
            oldest = (
                same_address[0]
                if same_address
                else next(k for k, (a, _) in self._waiting.items() if a == busiest)
            )
            self.turn_away(oldest, "too many connections that prove nothing")
        self._waiting[line] = (address, time.monotonic())
        self._selector.register(line, selectors.EVENT_READ)

    def admits(self, line: Line) -> bool:
        """Tells whether a connection has proved itself.

        Raises: OSError if its purpose is not served.
        """
        if line.ready and line in self._waiting:
            if line.purpose not in self._serves:
                raise ConnectionRefusedError("it wants what is not served here")
            del self._waiting[line]
        return line.ready

    def turn_away(self, line: Line, why: str) -> None:
        """Ends a connection, and reports it if it never proved itself."""
        address, _ = self._waiting.pop(line, (None, 0.0))
        if not line.closed:
            self._selector.unregister(line)
            line.close()
        if address is not None:
            self.refuse(address, why)

    def refuse(self, address: str, why: str) -> None:
        """Reports a refusal if it is the first of its kind, or every hundredth."""
        if len(self._counts) >= TOLD and (address, why) not in self._counts:
            address, why = "", "others, not told one by one"
        self._counts[address, why] += 1
        count = self._counts[address, why]
        if count == 1 or count % 100 == 0:
            self._refused(address, why, count)

    def sweep(self) -> None:
        """Ends connections that take too long to prove themselves; to be called in every loop."""
        now = time.monotonic()
        for line, (_, came) in list(self._waiting.items()):
            if now - came > GREETING_S:
                self.turn_away(line, f"did not prove itself in {GREETING_S:g} s")
        if self._rests_until is not None and now > self._rests_until:
            self._rests_until = None
            self._selector.register(self.listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Ends all connections that have not proved themselves, and stops listening."""
        for line in list(self._waiting):
            self.turn_away(line, "the driver has ended")
        if self._rests_until is None:
            self._selector.unregister(self.listener)
        self.listener.close()


# ---- where the agents of other hosts find the driver, and how an operator does


BACKLOG = 1024  # (chosen) connections that wait to be accepted


def listen(where: str) -> socket.socket:
    """Returns the socket on which agents connect. Raises: UserError."""
    host, port = split_address(where, "--listen")
    try:
        if ":" not in host:
            return socket.create_server((host, port), backlog=BACKLOG)
        both = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(
            (host, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise UserError(f"cannot listen on {where}: {error} (--listen)") from None


def own_address(listener: socket.socket) -> str:
    """Returns the address for agents on this machine."""
    host, port = listener.getsockname()[:2]
    return join_address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def announce(file: Path, address: str, secret: str) -> None:
    """Writes the address and the secret for --evict into a file that only this user can read."""
    try:
        file.unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            json.dump({"address": address, "token": secret}, out)
    except OSError as error:
        print(f"no {file}: {error.strerror}; --evict will not find this driver", file=sys.stderr)


def invitation(host: str, port: int, out: Path) -> str:
    """Returns how to start agents on other hosts. host: the address that the driver listens on."""
    near = host.startswith("127.") or host in ("::1", "localhost")
    name = socket.gethostname() if host in ("", "0.0.0.0", "::") else host
    place = join_address(name, port)
    return (
        f"; on each of them: scripts/supervise.py --agent={place}, with MEGAJAX_TOKEN set to "
        f"the token in {out / 'driver.json'}"
    ) + (f"; only this machine reaches {host} (--listen)" if near else "")
