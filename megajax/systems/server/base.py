"""What every server of megajax is made of: keys, bounded bodies, errors, health and metrics.

A server gives its endpoints and the work behind them (`Work`); http.py puts connections with limits
around it, and drains it. The language server is app.py. A client that leaves ends its request.
"""

import asyncio
import contextlib
import hashlib
import hmac
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

from absl import logging
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megajax.core.errors import UserError
from megajax.systems.server.errors import ApiError, EngineFailed

BODY_S = 30  # (chosen) for a client to send its body
GONE = 499  # (nginx) status of a request whose client has closed; nobody reads it
Handler = Callable[[Request], Awaitable[Response]]


class Work(Protocol):
    """What answers come from, such as an engine in a thread of its own.

    start, stop: begins, and takes no new work. join: waits until what runs has ended; abort: ends
    it. live: requests that run. failed, failure: set when it answers nothing any more, and why.
    check: raises ApiError where a request would not be answered.
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


class Measures(Protocol):
    """Metrics of a server. count(path, status): of an answered request. text(): (the page for
    Prometheus, its content type)."""

    def count(self, path: str, status: int) -> None: ...  # noqa: D102

    def text(self) -> tuple[bytes, str]: ...  # noqa: D102


class Base:
    """Endpoints with a guard around each; `app` is what an ASGI server runs."""

    def __init__(
        self,
        endpoints: Mapping[str, tuple[str, Handler]],
        work: Work,
        metrics: Measures,
        *,
        keys: Collection[str] = (),
        max_body: int = 2**22,
        help: str = "",
    ):
        """endpoints: {path: (method, handler)}; /health and /metrics are added, and need no key.
        keys: one of which a client must send; none: everybody may ask. max_body: bytes of a
        request. help: where a client reads which paths there are."""
        self._work, self._metrics, self._help = work, metrics, help
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._max_body = max_body
        made = Starlette(
            routes=[
                *(
                    Route(path, self._guard(handle), methods=[method])
                    for path, (method, handle) in endpoints.items()
                ),
                Route("/health", self._health),
                Route("/metrics", self._measured),
            ],
            exception_handlers={HTTPException: self._no_route},
        )
        self.app = _with_one_length(made)

    async def _health(self, _: Request) -> Response:
        try:
            self._work.check()
        except ApiError as error:
            return JSONResponse({"status": error.code, **error.body}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _measured(self, _: Request) -> Response:
        page, kind = self._metrics.text()
        return Response(page, headers={"Content-Type": kind})

    def _guard(
        self, handle: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
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
                logging.exception("a request to %s failed", request.scope["route"].path)
                response = JSONResponse(ApiError(500, f"{error!r:.300}").body, status_code=500)
            response.headers.update(headers)
            path = request.scope["route"].path
            self._metrics.count(path, response.status_code)
            return response

        return guarded

    def _check_key(self, request: Request) -> None:
        if not self._keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        # Digests have one length, and all of them are compared, whichever fits.
        known = [hmac.compare_digest(given, k) for k in self._keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiError(
                401,
                "give a valid key: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _no_route(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        made = ApiError(error.status_code, f"{error.detail}: {self._help}")
        return JSONResponse(made.body, status_code=made.status, headers=error.headers)

    async def body(self, request: Request) -> bytes:
        """Reads a body. Raises: ApiError for one that is too long, too slow or of another kind."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            # A browser asks before it sends this type to another site, so no web page that somebody
            # opens can use a server on their machine.
            raise ApiError(415, "the header must be Content-Type: application/json")
        too_long = ApiError(413, f"the body is longer than {self._max_body} bytes (--max_body)")
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:18]) > self._max_body:
            raise too_long
        raw = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    raw += part
                    if len(raw) > self._max_body:
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


class Gone(Exception):
    """The client closed its connection."""


async def until_gone(request: Request) -> None:
    """Returns when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def or_gone[T](work: Awaitable[T], gone: asyncio.Task) -> T:
    """Returns what work returns, unless the client leaves before. Raises: Gone."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Gone
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(BaseException):
                await task
