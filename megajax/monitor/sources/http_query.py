"""Asks Prometheus and Alertmanager over HTTP, and names what goes wrong.

httpcore2 speaks HTTP; what a server may cost is bounded here, below it: one limit holds the time
and the bytes of a whole exchange, from the name of the host to the last byte, so that neither a
byte a second nor endless headers hold anybody. Every exchange has a connection of its own. What may
pass (no connection, a restart, half an answer, 5xx) is tried again with growing pauses; what will
not pass (401, an expression that cannot be parsed) is told at once. A redirect is followed on the
same host only, because the password goes with it. Whatever a server answers, the caller sees
Refused, Unavailable or TooLarge, and nothing else.

Not here: pages and expressions (server.py). Source: the HTTP API of Prometheus, v1.
"""

import base64
import contextlib
import math
import random
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlencode, urljoin, urlsplit

import httpcore2
import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import TooManyValues, parse_json

# ---- answers of Prometheus' HTTP API as Python values, fast
#
# A range query's answer is nearly all points, `[1700000000,"0.25"]`. As objects each takes 200
# bytes and the garbage collector's time, so that the points of a series are read as numbers at
# once, and only what is left of the text is given to the JSON parser. What does not look like
# points goes to the JSON parser as a whole. Either text is refused when its values would take far
# more memory.


_KEY = b'"values":'
_POINTS = b'0123456789+-.eE,NaInf[]"'  # the bytes that points are made of


def load(text: bytes) -> Any:
    """Returns what json.loads returns, but each "values" of points as float64 (points, 2).

    Raises: ValueError for what is no JSON; core.files.TooManyValues, which is one.
    """
    pieces, arrays, at = [], [], 0
    begin = text.find(_KEY) + len(_KEY)
    while begin >= len(_KEY):  # a series at a time: all of them at once are the text again
        following = text.find(_KEY, begin)
        end = text.find(b"]]", begin, following if following >= 0 else len(text)) + 2
        points = _numbers(text[begin:end]) if text.startswith(b"[[", begin) and end > 2 else None
        if points is None:
            return parse_json(text)
        pieces.append(b"%b%d" % (text[at:begin], len(arrays)))
        arrays.append(points)
        begin, at = following + len(_KEY), end
    pieces.append(text[at:])
    said = parse_json(b"".join(pieces))
    if arrays:
        try:
            for series in said["data"]["result"]:
                if "values" in series:
                    series["values"] = arrays[series["values"]]
        except (LookupError, TypeError):  # the word stands elsewhere
            return parse_json(text)
    return said


def _numbers(points: bytes) -> np.ndarray | None:
    """Returns [[time,"value"],...] as numbers, None for what is something else."""
    size = points.count(b",") + 1
    if size % 2 or points.count(b'"') != size or points.translate(None, _POINTS):
        return None
    text = points.translate(None, b'[]"').decode()
    try:
        numbers = np.fromstring(text, np.float64, sep=",")
    except (ValueError, DeprecationWarning):
        return None
    return numbers.reshape(-1, 2) if numbers.size == size else None


# ---- requests


MOST = 2**25  # (chosen: 32 MiB, 1.2 million points, which take 300 MB as objects) of an answer
FRAMING = 4  # (chosen) times MOST that an answer may have with its headers and lengths of chunks
PART = 2**14  # bytes that are sent at a time: the time that is left is looked at between them
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 8.0  # (chosen) between tries
REDIRECTS = 3
LONG_URL = 4000  # (chosen: below the 8 KiB of usual proxies) bytes; more goes into a POST
WARNINGS = 10  # (chosen) of an answer that are told
PORTS = {"http": 80, "https": 443}


class Refused(UserError):
    """The server refuses the request and will refuse it again, until a person changes something."""


class Unavailable(UserError):
    """The server gives no usable answer now; a later request may succeed."""

    exit_code = 75


class TooLarge(Unavailable):
    """The answer, or the work for it, is more than one request may have."""


class _Again(Exception):
    """Worth another try. after: seconds that the server asks for."""

    def __init__(self, why: str, after: float = 0.0):
        super().__init__(why)
        self.after = after


class _Limit(httpcore2.NetworkBackend):
    """What one exchange may take: seconds and received bytes. It makes the exchange's connection,
    and asks the library for no more than is left."""

    def __init__(self, seconds: float, most: int):
        self._until, self._left = time.monotonic() + seconds, most
        self._inner = httpcore2.SyncBackend()

    def left_s(self) -> float:
        """Returns the seconds that are left. Raises: httpcore2.ReadTimeout if there are none."""
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise httpcore2.ReadTimeout
        return seconds

    def receive(self, data: bytes) -> bytes:
        """Counts received bytes, and returns them. Raises: _TooMuch."""
        self._left -= len(data)
        if self._left < 0:
            raise _TooMuch
        return data

    def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):
        """Connects; see httpcore2."""
        return _Stream(self._inner.connect_tcp(host, port, self.left_s()), self)


class _Stream(httpcore2.NetworkStream):
    """A connection within a limit."""

    def __init__(self, inner: httpcore2.NetworkStream, limit: _Limit):
        self._inner, self._limit = inner, limit
        self.close, self.get_extra_info = inner.close, inner.get_extra_info  # type: ignore

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._limit.receive(self._inner.read(max_bytes, self._limit.left_s()))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for at in range(0, len(buffer), PART):
            self._inner.write(buffer[at : at + PART], self._limit.left_s())

    def start_tls(self, ssl_context, server_hostname=None, timeout=None):
        inner = self._inner.start_tls(ssl_context, server_hostname, self._limit.left_s())
        return _Stream(inner, self._limit)


class _TooMuch(Exception):
    """More bytes than an exchange may have."""


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
        """url: http(s)://[user:password@]host[:port][/prefix], with or without /api/v1. user,
        password, token: the server's secret, a user with a password or a token. ca_file: PEM file
        of the authority that signed the server's certificate; None: those of the system. timeout_s:
        seconds for one exchange, from the connection to the last byte. retries: further tries of
        `ask` after an error that may pass. name: the kind of server, in messages and their flag.

        Raises: UserError for a url that is no address of HTTP, a timeout_s that is not above 0 or
        is infinite, negative retries, a user without a password or the reverse, a user and a token,
        a secret with a character that no header can have, or a ca_file that cannot be read.
        """
        try:
            self._origin, parts = _split(url)
        except ValueError:  # a UnicodeError is one
            raise UserError(
                f"{name}={shown(url)} must be an address such as http://host:9090 (--{name})"
            ) from None
        if not 0 < timeout_s < math.inf or retries < 0:
            raise UserError(
                f"timeout_s={timeout_s} must be more than 0 and retries={retries} 0 or more"
            )
        if user is None and parts.username is not None:
            user, password = unquote(parts.username), unquote(parts.password or "")
        if (user is None) != (password is None) or (user is not None and token is not None):
            raise UserError("give a user with a password, or a token, or neither, and not both")
        prefix = parts.path.rstrip("/").removesuffix("/api/v1").removesuffix("/api/v2")
        self._prefix, self.timeout_s, self.retries = prefix, timeout_s, retries
        scheme, host, port = self._origin
        at = f"[{host}]" if ":" in host else host
        shown_port = f":{port}" if parts.port is not None else ""
        self.where = f"{scheme}://{at}{shown_port}"
        self._headers = {
            "Host": at + shown_port,
            "Accept": "application/json",
            "User-Agent": "megajax",
        }
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        elif user is not None:
            pair = base64.b64encode(f"{user}:{password}".encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        told = "".join(self._headers.values())
        if not (told.isprintable() and told.isascii()):
            raise UserError("the token has a line end or another character that no header can have")
        self._tls = _context(ca_file) if scheme == "https" else None
        # Parsed answers take most of the memory, so threads parse one answer at a time.
        self._answer_lock = threading.Lock()

    def ask[T](
        self,
        path: str,
        parameters: Mapping[str, str],
        take: Callable[[Any], T],
        retries: int | None = None,
        until: float = math.inf,
    ) -> tuple[T, list[str]]:
        """Returns (what `take` makes of the answer's data, the answer's warnings).

        Args: path: below /api/v1/. take: turns the data into what is kept of it; whatever it raises
          says that the answer has another form. until: time.monotonic() at which all tries end.
        Raises: Refused, Unavailable or TooLarge.
        """
        tries = 1 + (self.retries if retries is None else retries)
        pause = FIRST_PAUSE_S
        for left in reversed(range(tries)):
            try:
                return self._once(
                    f"{self._prefix}/api/v1/{path}", urlencode(parameters), take, until
                )
            except _Again as error:
                wait = max(pause * random.uniform(0.8, 1.2), error.after)
                if not left or time.monotonic() + wait > until:
                    tried = f" ({tries - left} tries)" if tries - left > 1 else ""
                    raise Unavailable(f"{self.where}: {error}{tried}") from None
                time.sleep(wait)
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

    def _once[T](
        self, path: str, query: str, take: Callable[[Any], T], until: float
    ) -> tuple[T, list[str]]:
        """One request with its redirects."""
        target, body = f"{path}?{query}", None
        if len(target) > LONG_URL:
            target, body = path, query.encode()
        for _ in range(REDIRECTS + 1):
            status, headers, text = self._exchange(target, body, until=until)
            if status not in (301, 302, 303, 307, 308):
                return self._judge(status, headers, text, take)
            target = self._redirected(target, headers.get("location", ""))
        raise Refused(f"{self.where}: redirects more than {REDIRECTS} times")

    def _redirected(self, target: str, location: str) -> str:
        """Returns the target that a redirect names. Raises: Refused for another host, and for what
        is no address."""
        try:
            origin, parts = _split(urljoin(f"{self.where}{target}", location))
        except ValueError:
            raise Refused(
                f"{self.where}: redirects to {plain(location)[:80]!r}, which is no address of "
                "HTTP; give the address that answers itself (--prometheus)"
            ) from None
        if origin != self._origin:
            scheme, host, port = origin
            raise Refused(
                f"{self.where}: redirects to {scheme}://{host}:{port}, which gets no password from "
                "here; give the address that answers itself (--prometheus)"
            )
        return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")

    def _exchange(
        self,
        target: str,
        body: bytes | None,
        kind: str = "application/x-www-form-urlencoded",
        until: float = math.inf,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Returns (status, headers in lower case, body)."""
        seconds = min(self.timeout_s, until - time.monotonic())
        if seconds <= 0:
            raise Unavailable(f"{self.where}: no time is left to ask")
        scheme, host, port = self._origin
        url = httpcore2.URL(
            scheme=scheme.encode(), host=host.encode(), port=port, target=target.encode()
        )
        headers = [(name.encode(), value.encode()) for name, value in self._headers.items()]
        if body is not None:
            size = str(len(body)).encode()
            headers += [(b"Content-Type", kind.encode()), (b"Content-Length", size)]
        request = httpcore2.Request(
            "GET" if body is None else "POST", url, headers=headers, content=body
        )
        connection = httpcore2.HTTPConnection(
            url.origin, self._tls, network_backend=_Limit(seconds, FRAMING * MOST + 2**20)
        )
        parts, size = [], 0
        try:
            with contextlib.closing(connection):
                response = connection.handle_request(request)
                for part in response.stream:  # type: ignore[union-attr]
                    parts.append(part)
                    size += len(part)
                    if size > MOST:
                        raise _TooMuch
        except _TooMuch:
            raise TooLarge(f"{self.where}: an answer of more than {MOST >> 20} MiB") from None
        except httpcore2.TimeoutException:
            raise _Again(f"no whole answer within {seconds:.3g} s") from None
        except Exception as error:  # whatever the libraries raise, the answer is none
            raise _Again(_why(error)) from None
        told = {k.decode("latin1").lower(): v.decode("latin1") for k, v in response.headers}
        return response.status, told, b"".join(parts)

    def _judge[T](
        self, status: int, headers: Mapping[str, str], text: bytes, take: Callable[[Any], T]
    ) -> tuple[T, list[str]]:
        """Returns the content of a good answer. Raises an error for all others."""
        with self._answer_lock:
            try:
                said = load(text)
            except TooManyValues as error:
                raise Unavailable(f"{self.where}: an answer of {error}") from None
            except ValueError:
                said = None
            good = isinstance(said, dict)
            if status == 200 and good and said.get("status") == "success" and "data" in said:
                told = said.get("warnings")
                warnings = told[:WARNINGS] if isinstance(told, list) else []
                try:
                    taken = take(said["data"])
                except UserError:
                    raise
                except Exception as error:  # whatever is wrong with its form
                    raise Unavailable(
                        f"{self.where}: the answer has another form than Prometheus' API says: "
                        f"{plain(f'{error!r:.200}')}"
                    ) from None
                return taken, [plain(w)[:500] for w in warnings if isinstance(w, str)]
            kind, message = (said.get(k) if good else "" for k in ("errorType", "error"))
            kind, message = (x if isinstance(x, str) else "" for x in (kind, message))
        self._raise(status, plain(kind[:50]), plain(message[:500]), headers, text)
        raise AssertionError

    def _raise(
        self, status: int, kind: str, message: str, headers: Mapping[str, str], text: bytes
    ) -> None:
        where = self.where
        words = plain(text[:80].decode(errors="replace"))
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
            raise _Again(f"{status} {message or words}", min(pause, self.timeout_s))
        if kind:
            raise Refused(f"{where}: {kind}: {message}")
        if status == 200:
            raise _Again(
                f"the answer breaks off or is none of Prometheus' API; it begins with {words!r}"
            )
        raise Refused(f"{where}: {status}: is this a Prometheus server? It says {words!r}")

    def _has_secret(self) -> bool:
        return "Authorization" in self._headers


def _split(address: str) -> tuple[tuple[str, str, int], SplitResult]:
    """Returns ((scheme, host, port), all parts). Raises: ValueError for no address of HTTP."""
    parts = urlsplit(address)
    scheme, host, place = parts.scheme, parts.hostname or "", f"{parts.path}{parts.query}"
    port = PORTS.get(scheme, 0) if parts.port is None else parts.port
    if not (port and host and place.isascii() and place.isprintable() and " " not in place):
        raise ValueError(address)
    return (scheme, host.encode("idna").decode(), port), parts


def _context(ca_file: str | Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
    except OSError as error:  # an SSLError is one
        raise UserError(f"ca_file={ca_file} cannot be used: {error}") from None


def _why(error: Exception) -> str:
    """Returns a sentence for an error of a connection."""
    cause = error.__cause__ or error  # httpcore2 keeps what the socket or h11 raised
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not trusted: {cause.verify_message} (ca_file)"
    if isinstance(cause, ssl.SSLError):
        return f"TLS: {cause.reason or cause}"
    if isinstance(cause, OSError):
        return cause.strerror or str(cause) or type(cause).__name__
    text = plain(str(cause))[:200] or type(cause).__name__
    if "without sending complete" in text:  # h11's words, with the numbers of bytes
        return f"the answer breaks off: {text}"
    return f"no answer of HTTP: {text.partition(': bytearray')[0]}"  # h11 quotes what it got


def plain(text: str) -> str:
    """Returns a stranger's words as one line that a terminal and a log can show."""
    words = " ".join(text.split())
    return words if words.isprintable() else "".join(c if c.isprintable() else "?" for c in words)


def shown(url: str) -> str:
    """Returns an address without its password."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('//')[0]}//***@{tail}" if at else url
