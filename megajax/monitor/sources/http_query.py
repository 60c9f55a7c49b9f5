"""Asks a Prometheus server over HTTP, and names what goes wrong.

A request has one deadline for all of its answer, so that a server that sends a byte a second holds
nobody. Answers are bounded. What may pass (no connection, a restart, half an answer, 5xx) is tried
again with growing pauses; what will not pass (401, an expression that cannot be parsed) is told at
once. A redirect is followed on the same host only, because the password goes with it.

Not here: pages and expressions (server.py, promql.py). Source: the HTTP API of Prometheus, v1.
"""

import base64
import collections
import contextlib
import http.client
import random
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlencode, urljoin, urlsplit

from megajax.core.errors import UserError
from megajax.monitor.sources import answers

MOST = 2**25  # (chosen: 32 MiB, 1.2 million points, which take 300 MB as objects) of an answer
CHUNK = 2**20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # (chosen) between tries
REDIRECTS = 3
LONG_URL = 4000  # (chosen: below the 8 KiB of usual proxies) bytes; more goes into a POST


class Refused(UserError):
    """The server answers, and will answer the same again: somebody must change something."""


class Unavailable(UserError):
    """The server gives no usable answer now. It may the next time."""

    exit_code = 75


class TooLarge(Unavailable):
    """The answer, or the work for it, is more than one request may have."""


class _Again(Exception):
    """Worth another try. after: seconds that the server asks for."""

    def __init__(self, why: str, after: float = 0.0):
        super().__init__(why)
        self.after = after


class Client:
    """Sends requests to one server; threads may share it."""

    def __init__(
        self,
        url: str,
        user: str | None = None,
        password: str | None = None,
        token: str | None = None,
        ca_file: str | Path | None = None,
        timeout_s: float = 10.0,
        retries: int = 3,
        name: str = "prometheus",
    ):
        """url: http(s)://host[:port][/prefix], without /api/v1. name: what messages call it by.
        Raises: UserError for an address that cannot be, for both a password and a token, and for a
        ca_file that cannot be read."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise UserError(
                f"{name}={shown(url)} must be an address such as http://host:9090 (--{name})"
            )
        if timeout_s <= 0 or retries < 0:
            raise UserError(
                f"timeout_s={timeout_s} must be more than 0 and retries={retries} 0 or more"
            )
        if user is None and parts.username is not None:
            user, password = unquote(parts.username), unquote(parts.password or "")
        if (user is None) != (password is None) or (user is not None and token is not None):
            raise UserError("give a user with a password, or a token, or neither, and not both")
        self._origin = (parts.scheme, parts.hostname, port)
        self._prefix = parts.path.rstrip("/").removesuffix("/api/v1").removesuffix("/api/v2")
        self._timeout_s, self.retries = timeout_s, retries
        self._headers = {"Accept": "application/json", "User-Agent": "megajax"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        elif user is not None:
            pair = base64.b64encode(f"{user}:{password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        if any(not c.isprintable() for c in "".join(self._headers.values())):
            raise UserError("the token has a line end or another character that no header can have")
        self._tls = _context(ca_file) if parts.scheme == "https" else None
        self._idle: collections.deque[http.client.HTTPConnection] = collections.deque(maxlen=8)
        self.where = f"{parts.scheme}://{parts.hostname}" + (f":{port}" if port else "")

    def ask(
        self, path: str, parameters: Mapping[str, str], retries: int | None = None
    ) -> tuple[Any, list[str]]:
        """Returns (the answer's data, its warnings). path: below /api/v1/.

        Raises: Refused, Unavailable or TooLarge.
        """
        tries = 1 + (self.retries if retries is None else retries)
        pause = FIRST_PAUSE_S
        for left in reversed(range(tries)):
            try:
                return self._once(f"{self._prefix}/api/v1/{path}", urlencode(parameters))
            except _Again as error:
                if not left:
                    tried = f" ({tries} tries)" if tries > 1 else ""
                    raise Unavailable(f"{self.where}: {error}{tried}") from None
                time.sleep(max(pause * random.uniform(0.8, 1.2), error.after))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        raise AssertionError

    def post(self, path: str, body: bytes, kind: str = "application/json") -> tuple[int, bytes]:
        """Sends a body to a path below the address, once; returns (status, answer).

        Raises: Unavailable when no whole answer comes; TooLarge.
        """
        try:
            status, _, text = self._exchange(f"{self._prefix}/{path}", body, kind)
        except _Again as error:
            raise Unavailable(f"{self.where}: {error}") from None
        return status, text

    def _once(self, path: str, query: str) -> tuple[Any, list[str]]:
        """One request with its redirects."""
        target, body = f"{path}?{query}", None
        if len(target) > LONG_URL:
            target, body = path, query.encode()
        for _ in range(REDIRECTS + 1):
            status, headers, text = self._exchange(target, body)
            if status not in (301, 302, 303, 307, 308):
                return self._judge(status, headers, text)
            address = urljoin(f"{self.where}{target}", headers.get("location", ""))
            parts = urlsplit(address)
            if (parts.scheme, parts.hostname, parts.port) != self._origin:
                shown = f"{parts.scheme}://{parts.netloc}"
                raise Refused(
                    f"{self.where}: redirects to {shown}, which gets no password from here; "
                    "give the address that answers itself (--prometheus)"
                )
            target = parts.path + (f"?{parts.query}" if parts.query else "")
        raise Refused(f"{self.where}: redirects more than {REDIRECTS} times")

    def _exchange(
        self, target: str, body: bytes | None, kind: str = "application/x-www-form-urlencoded"
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Returns (status, headers in lower case, body)."""
        reused = bool(self._idle)
        try:
            connection = self._idle.pop()
        except IndexError:
            connection, reused = self._connect(), False
        late = threading.Event()
        timer = threading.Timer(self._timeout_s, _expire, (late, connection))
        timer.daemon = True
        timer.start()
        try:
            answer = self._talk(connection, target, body, kind)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if late.is_set():
                raise _Again(f"no whole answer within {self._timeout_s:g} s") from None
            if reused:  # the server has closed it meanwhile
                self.close()
                return self._exchange(target, body, kind)
            raise _Again(_why(error)) from None
        except BaseException:
            connection.close()
            raise
        finally:
            timer.cancel()
        if late.is_set():
            connection.close()
        else:
            self._idle.append(connection)
        return answer

    def _talk(
        self, connection: http.client.HTTPConnection, target: str, body: bytes | None, kind: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = kind
        connection.request("GET" if body is None else "POST", target, body, headers)
        response = connection.getresponse()
        parts, size = [], 0
        while part := response.read(CHUNK):
            parts.append(part)
            size += len(part)
            if size > MOST:
                raise TooLarge(f"{self.where}: an answer of more than {MOST >> 20} MiB")
        if response.length:  # what is read in parts does not notice this by itself
            raise http.client.IncompleteRead(b"", response.length)
        return response.status, {k.lower(): v for k, v in response.headers.items()}, b"".join(parts)

    def _judge(self, status: int, headers: Mapping[str, str], text: bytes) -> tuple[Any, list[str]]:
        """Returns what a good answer holds. Raises for all others."""
        try:
            said = answers.load(text)
        except (ValueError, RecursionError):
            said = None
        good = isinstance(said, dict)
        if status == 200 and good and said.get("status") == "success" and "data" in said:
            warnings = said.get("warnings")
            return said["data"], [str(w) for w in warnings] if isinstance(warnings, list) else []
        kind = str(said.get("errorType", "")) if good else ""
        message = str(said.get("error", "")) if good else ""
        self._raise(status, kind, message[:500], headers, text)
        raise AssertionError

    def _raise(
        self, status: int, kind: str, message: str, headers: Mapping[str, str], text: bytes
    ) -> None:
        where = self.where
        words = " ".join(text[:80].decode(errors="replace").split())
        if status == 401:
            said = "the user and password, or the token, are" if self._has_secret() else "a user is"
            wrong = "not accepted" if self._has_secret() else "wanted and none is given"
            raise Refused(f"{where}: 401 Unauthorized: {said} {wrong} (user, password, token)")
        if status == 403:
            raise Refused(f"{where}: 403 Forbidden: this user may not ask ({message or words})")
        if "too many samples" in message or "maximum resolution" in message or kind == "timeout":
            raise TooLarge(f"{where}: {message}")
        if status in (429, 500, 502, 503, 504) or kind in ("canceled", "internal", "unavailable"):
            after = headers.get("retry-after", "")
            pause = float(after) if after.isdecimal() else 0.0
            raise _Again(f"{status} {message or words}", min(pause, self._timeout_s))
        if kind:
            raise Refused(f"{where}: {kind}: {message}")
        if status == 200:
            raise _Again(
                f"the answer breaks off or is none of Prometheus' API; it begins with {words!r}"
            )
        raise Refused(f"{where}: {status}: is this a Prometheus server? It says {words!r}")

    def _has_secret(self) -> bool:
        return "Authorization" in self._headers

    def _connect(self) -> http.client.HTTPConnection:
        _, host, port = self._origin
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._tls)

    def close(self) -> None:
        """Closes the connections that are kept open."""
        while self._idle:
            self._idle.pop().close()


def _expire(late: threading.Event, connection: http.client.HTTPConnection) -> None:
    """Ends a request: who reads from its socket comes back at once."""
    late.set()
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def _context(ca_file: str | Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:  # an SSLError is one
        raise UserError(f"ca_file={ca_file} cannot be used: {error}") from None


def _why(error: Exception) -> str:
    """Returns what an error of a connection means."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not trusted: {error.verify_message} (ca_file)"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, http.client.IncompleteRead):
        return f"the answer breaks off, {error.expected} bytes are missing"
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return f"no answer of HTTP: {str(error)[:200] or type(error).__name__}"


def shown(url: str) -> str:
    """Returns an address without its password."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('//')[0]}//***@{tail}" if at else url
