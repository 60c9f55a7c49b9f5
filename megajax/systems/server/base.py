"""What every server of megajax is made of: keys, bodies, deadlines, errors, health, metrics.

A server gives its endpoints and the work behind them (`Work`); http.py puts connections with limits
around it, and drains it. The language server is app.py. A client that leaves ends its request.
Errors have the form that OpenAI's clients know.
"""

import asyncio
import contextlib
import hashlib
import hmac
import itertools
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

import prometheus_client as prometheus
from absl import logging
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import megajax
from megajax.core.errors import UserError
from megajax.systems.server.openapi import Example, document
from megajax.systems.server.pages import PAGES, Page, pages

BODY_S = 30  # (chosen) for a client to send its body
GONE = 499  # (nginx) status of a request whose client has closed; nobody reads it
PATH = 100  # (chosen) characters of a path in the log
WRITTEN = 2**10  # (chosen) members of a list that are written at a time
Handler = Callable[[Request], Awaitable[Response]]


# ---- errors


class ApiError(Exception):
    """The error with which a request is answered.

    status: of HTTP. param, code: members of the body, as OpenAI names them; the body's type follows
    from the status. headers: further ones of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        """The arguments are the members."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that a client reads."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "overloaded_error"}
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {
            "message": self.message,
            "type": kinds.get(self.status, kind),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


class EngineFailed(Exception):
    """The engine raised, and answers nothing any more."""


def stopping() -> ApiError:
    """Returns the error of a request that a stopping server does not answer."""
    return ApiError(503, "the server is stopping", code="stopping")


# ---- the application


class Work(Protocol):
    """What answers come from, such as an engine in a thread of its own.

    start: begins. stop: takes no new work from now on. join: waits until the running requests have
    ended. abort: ends them. live: number of requests that run. failed, failure: the event is set
    when nothing is answered any more, and failure says why. check: raises ApiError if a request
    would not be answered.
    """

    failed: asyncio.Event
    failure: Any

    @property
    def live(self) -> int: ...  # noqa: D102

    def start(self) -> None: ...  # noqa: D102

    def stop(self) -> None: ...  # noqa: D102

    def abort(self) -> None: ...  # noqa: D102

    async def join(self) -> Any: ...  # noqa: D102

    def check(self) -> None: ...  # noqa: D102


class Immediate:
    """The work of a server whose handlers answer by themselves: there is nothing to begin, to wait
    for or to fail."""

    live, failure = 0, None

    def __init__(self) -> None:
        """Makes the event, which nothing sets."""
        self.failed = asyncio.Event()

    def start(self) -> None:
        """Begins nothing."""

    stop = abort = check = start

    async def join(self) -> None:
        """Waits for nothing."""


class Metrics:
    """The metrics of a server, for Prometheus: the answered HTTP requests, and those that its work
    adds. Each server has a registry, so that several can run in one process.

    Names are vLLM's, with the prefix megajax. Source: vLLM, docs/design/metrics.md.
    """

    def __init__(self, model: str):
        """model: the label model_name of every metric."""
        self.model, self._registry = model, prometheus.CollectorRegistry()
        self._http = self.add(
            prometheus.Counter, "http_requests", "Requests by status.", "path", "status"
        )

    def add[T](self, kind: type[T], name: str, about: str, *labels: str, **options: Any) -> T:
        """Returns a new metric. labels: further ones, behind model_name; with none of them, the
        metric has its label already."""
        names = ("model_name", *labels)
        metric: Any = kind(f"megajax:{name}", about, names, registry=self._registry, **options)  # type: ignore[call-arg]
        return metric if labels else metric.labels(self.model)

    def count(self, path: str, status: int) -> None:
        """Records an answered HTTP request."""
        self._http.labels(self.model, path, str(status)).inc()

    def text(self) -> tuple[bytes, str]:
        """Returns (the page, its content type)."""
        return prometheus.generate_latest(self._registry), prometheus.CONTENT_TYPE_LATEST


class Base:
    """Endpoints with a guard around each; `app` is what an ASGI server runs."""

    def __init__(
        self,
        endpoints: Mapping[str, tuple[str, Handler]],
        work: Work,
        metrics: Metrics,
        *,
        keys: Collection[str] = (),
        max_body: int = 2**22,
        help: str = "",
        examples: Mapping[str, Example] | None = None,
        log: bool = False,
    ):
        """endpoints: {path: (method, handler)}; /health and /metrics are added, and need no key.
        keys: one of which a client must send; none: everybody may ask. max_body: bytes of a
        request. help: where a client reads which paths there are. examples: a body of each path
        that takes one, as a reader has read it; with them there are /version and pages, too.
        log: print a line for each request."""
        self._work, self._metrics, self._help = work, metrics, help
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._max_body = max_body
        if examples is not None:
            endpoints = {**endpoints, "/version": ("GET", self._version)}
        routes = [
            Route(path, self._guard(path, handle), methods=[method])
            for path, (method, handle) in endpoints.items()
        ]
        routes += [Route("/health", self._health), Route("/metrics", self._measured)]
        if examples is not None:
            methods = [(path, method) for path, (method, _) in endpoints.items()]
            methods += [(path, "GET") for path in ("/health", "/metrics", *PAGES)]
            shown = pages(document(methods, examples, bool(keys)))
            routes += [Route(path, self._show(path, page)) for path, page in shown.items()]
        app = Starlette(routes=routes, exception_handlers={HTTPException: self._no_route})
        self.app = _with_one_length(_logged(app) if log else app)

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"version": megajax.__version__})

    async def _health(self, _: Request) -> Response:
        try:
            self._work.check()
        except ApiError as error:
            return JSONResponse({"status": error.code, **error.body}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _measured(self, _: Request) -> Response:
        page, kind = self._metrics.text()
        return Response(page, headers={"Content-Type": kind})

    def _show(self, path: str, page: Page) -> Handler:
        async def show(_: Request) -> Response:
            self._metrics.count(path, 200)
            return page.response()

        return show

    def _guard(self, path: str, handle: Handler) -> Handler:
        """Checks the key, and makes a response of what is raised."""

        async def guarded(request: Request) -> Response:
            headers = {"X-Request-Id": uuid.uuid4().hex}
            try:
                self._check_key(request)
                response = await handle(request)
            except ApiError as error:
                headers |= error.headers
                response = JSONResponse(error.body, status_code=error.status)
            except (UserError, EngineFailed) as error:
                status = 400 if isinstance(error, UserError) else 500
                response = JSONResponse(ApiError(status, str(error)).body, status_code=status)
            except (Gone, ClientDisconnect):
                logging.log_every_n_seconds(
                    logging.INFO, "clients close connections before they are answered", 60
                )
                response = Response(status_code=GONE)
            except Exception as error:
                logging.exception("a request to %s failed", path)
                response = JSONResponse(ApiError(500, f"{error!r:.300}").body, status_code=500)
            response.headers.update(headers)
            self._metrics.count(path, response.status_code)
            return response

        return guarded

    def _check_key(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        # Digests have one length, and all of them are compared, whichever fits.
        known = [hmac.compare_digest(digest, k) for k in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401,
                "give a valid key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _no_route(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        shown = ApiError(error.status_code, f"{error.detail}: {self._help}")
        return JSONResponse(shown.body, status_code=shown.status, headers=error.headers)

    async def body(
        self, request: Request, most: int | None = None, flags: str = "--max_body"
    ) -> bytes:
        """Reads a body. most: bytes that it may have; None: max_body. flags: that set it.

        Raises: ApiError for one that is too long, too slow or of another kind.
        """
        most = self._max_body if most is None else most
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A browser asks before it sends this type to another site, so no web page that somebody
            # opens can use a server on their machine.
            raise ApiError(415, "the header must be Content-Type: application/json")
        too_long = ApiError(413, f"the body is longer than {most} bytes ({flags})")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:18]) > most:
            raise too_long
        raw = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    raw += part
                    if len(raw) > most:
                        raise too_long
        except TimeoutError:
            raise ApiError(408, f"the body took more than {BODY_S} seconds") from None
        return bytes(raw)


def _with_one_length(app: Any) -> Any:
    """Refuses requests with two lengths, which a proxy in front may end elsewhere (RFC 9112, 6.1:
    request smuggling)."""

    async def checked(scope: Any, receive: Any, send: Any) -> None:
        names = {name for name, _ in scope.get("headers", ())}
        if {b"content-length", b"transfer-encoding"} <= names:
            error = ApiError(400, "a request has Content-Length or Transfer-Encoding, not both")
            response = JSONResponse(error.body, 400, headers={"Connection": "close"})
            return await response(scope, receive, send)
        await app(scope, receive, send)

    return checked


QUIET = ("/health", "/metrics")  # asked every few seconds by programs


def _logged(app: Any) -> Any:
    """Prints a line when a request has been answered: method, path, status, numbers of tokens of
    prompt and answer, seconds. Nothing of what it says: a text may be confidential."""

    async def logged(scope: Any, receive: Any, send: Any) -> None:
        begun, status = time.monotonic(), GONE

        async def note(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await app(scope, receive, note)
        finally:
            seconds = time.monotonic() - begun
            if scope["type"] == "http" and not (scope["path"] in QUIET and status == 200):
                print(_line(scope, status, seconds), flush=True)

    return logged


def _line(scope: Any, status: int, seconds: float) -> str:
    """Returns a request's line in the log. scope["usage"] returns its numbers of tokens."""
    path = scope["path"][:PATH].encode("unicode_escape").decode()  # a client writes it
    words = [time.strftime("%H:%M:%S"), scope["method"], path, str(status)]
    usage = scope["usage"]() if "usage" in scope else {}
    drawn = usage.get("completion_tokens", 0)
    if usage:
        words.append(f"{usage['prompt_tokens']} tokens in, {drawn} out,")
    words.append(f"{seconds:.2f} s")
    return " ".join(words) + (f", {drawn / seconds:.1f} tokens/s" if drawn and seconds else "")


# ---- JSON


def parse(raw: bytes) -> dict[str, Any]:
    """Returns the object of a request's body. Raises: ApiError."""

    def no_number(text: str) -> Any:
        raise ValueError(f"{text} is no JSON")

    try:
        value = json.loads(raw, parse_constant=no_number)
        if b"\\u" in raw:  # halves of a surrogate pair are no text
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half of a surrogate pair, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return value


def write(value: Any) -> str:
    """Returns a value as JSON. A long list is written in parts, between which other threads run:
    json.dumps of a million numbers would stop all of them for as long."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dump(k)}:{write(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list) and len(value) > WRITTEN:
        parts = itertools.batched(value, WRITTEN)
        return "[" + ",".join(_dump(part)[1:-1] for part in parts) + "]"
    if isinstance(value, list):
        return "[" + ",".join(map(write, value)) + "]"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


# ---- deadlines, and clients that leave


class Gone(Exception):
    """The client closed its connection."""


async def until_gone(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def in_time[T](work: Awaitable[T], gone: asyncio.Task, deadline: float) -> T:
    """Returns what work returns, or cancels it.

    gone: a task that ends when the client leaves. deadline: of time.monotonic. Raises: Gone.
    ApiError at the deadline.
    """
    task = asyncio.ensure_future(work)
    try:
        left_s = max(0.0, deadline - time.monotonic())
        await asyncio.wait({task, gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if gone.done():
            raise Gone
        raise ApiError(
            504, "the request took longer than it may (--request_timeout_s)", code="timeout"
        )
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(BaseException):
                await task


class EventStream(Response):
    """Server-sent events, whose work is cancelled when they end or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], deadline: float, cancel: Callable[[], None]):
        """events: the data of each. An ApiError or EngineFailed that they raise is sent as an
        event, and [DONE] is the last one (as OpenAI's). deadline: of time.monotonic. cancel: ends
        the work."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._deadline, self._cancel = events, deadline, cancel

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends what comes, until it ends or nobody listens."""

        async def show(event: str) -> None:
            body = f"data: {event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async def show_all() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self._events) as events:
                async for event in events:
                    await show(event)

        gone = asyncio.create_task(until_gone(Request(scope, receive)))
        try:
            try:  # the limit holds while a client that does not read makes `send` wait, too
                await in_time(show_all(), gone, self._deadline)
            except (ApiError, EngineFailed) as error:
                self._cancel()
                shown = error if isinstance(error, ApiError) else ApiError(500, str(error))
                await show(json.dumps(shown.body))
            await show("[DONE]")
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (Gone, OSError):
            pass
        finally:
            gone.cancel()
            self._cancel()
