"""The server's endpoints: /v1/completions, /v1/chat/completions, /v1/models, /tokenize,
/detokenize, /health, /metrics.

A body is read up to a limit, becomes a Job (protocol.py), each of whose prompts is a request of the
engine (worker.py). A client that leaves, streaming or not, ends its requests, whose pages are free
from the next step on.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from typing import Any

from absl import logging
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megajax.core.errors import UserError
from megajax.systems.server import fields
from megajax.systems.server.answers import Answer, Shapes
from megajax.systems.server.errors import ApiError, EngineFailed
from megajax.systems.server.metrics import Metrics
from megajax.systems.server.protocol import Job, Reader
from megajax.systems.server.text import Decoder, pieces_of
from megajax.systems.server.worker import Stream, Worker

BODY_S = 30  # (chosen) for a client to send its body
LARGE = 2**10  # (chosen) tokens of an answer that a thread writes
GONE = 499  # (nginx) status of a request whose client has closed; nobody reads it


class Server:
    """The application around a worker; `app` is what an ASGI server runs."""

    def __init__(
        self,
        worker: Worker,
        reader: Reader,
        metrics: Metrics,
        *,
        name: str,
        keys: Collection[str] = (),
        max_body: int = 2**22,
        timeout_s: float = 600,
    ):
        """name: of the model. keys: one of which a client must send; none: everybody may ask.

        max_body: bytes of a request. timeout_s: of a request, from its arrival to its last token.
        """
        self._worker, self._reader, self._metrics, self.name = worker, reader, metrics, name
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._max_body, self._timeout_s = max_body, timeout_s
        self._tokenizer = worker.engine.tokenizer
        self._tokenizing = asyncio.Semaphore()  # what no model's context bounds, one at a time
        self._pieces, self._born = pieces_of(self._tokenizer), int(time.time())
        made = Starlette(
            routes=[
                Route("/v1/completions", self._guard(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", self._guard(self._chat), methods=["POST"]),
                Route("/v1/models", self._guard(self._models)),
                Route("/v1/models/{name:path}", self._guard(self._models)),
                Route("/tokenize", self._guard(self._tokenize), methods=["POST"]),
                Route("/detokenize", self._guard(self._detokenize), methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._measured),
            ],
            exception_handlers={HTTPException: self._no_route},
        )
        self.app = _with_one_length(made)

    # ---- endpoints

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, self._reader.completion)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, self._reader.chat)

    async def _models(self, request: Request) -> Response:
        context = self._worker.engine.context
        model = {
            "id": self.name,
            "object": "model",
            "created": self._born,
            "owned_by": "megajax",
            "max_model_len": context,
        }
        wanted = request.path_params.get("name")
        if wanted is None:
            return JSONResponse({"object": "list", "data": [model]})
        if wanted != self.name:
            raise ApiError(404, f"the model {wanted!r:.200} does not exist", code="model_not_found")
        return JSONResponse(model)

    async def _tokenize(self, request: Request) -> Response:
        body = fields.parse(await self._body(request))
        context = self._worker.engine.context

        def work() -> str:
            ids = self._reader.tokenize(body)
            return fields.write({"count": len(ids), "max_model_len": context, "tokens": ids})

        async with self._tokenizing:
            return Response(await asyncio.to_thread(work), media_type="application/json")

    async def _detokenize(self, request: Request) -> Response:
        body = fields.parse(await self._body(request))
        async with self._tokenizing:
            text = await asyncio.to_thread(self._reader.detokenize, body)
        return JSONResponse({"prompt": text})

    async def _health(self, _: Request) -> Response:
        try:
            self._worker.check()
        except ApiError as error:
            return JSONResponse({"status": error.code, **error.body}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _measured(self, _: Request) -> Response:
        page, kind = self._metrics.text()
        return Response(page, headers={"Content-Type": kind})

    # ---- around each request

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
                401, "give a valid key: Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    async def _no_route(self, _: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        made = ApiError(error.status_code, f"{error.detail}: see /v1/models and docs/serving.md")
        return JSONResponse(made.body, status_code=made.status, headers=error.headers)

    async def _body(self, request: Request) -> bytes:
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

    # ---- answers

    async def _answer(self, request: Request, read: Callable[[dict], Job]) -> Response:
        deadline = time.monotonic() + self._timeout_s
        raw = await self._body(request)
        self._worker.check()
        body = fields.parse(raw)
        job = await asyncio.to_thread(read, body)
        shapes = Shapes(job, body.get("model") or self.name, self._tokenizer, self._pieces)
        run = Run(self._worker, job, shapes, deadline, self._decoder)
        gone = asyncio.create_task(_until_gone(request))
        try:
            await _or_gone(run.submit(), gone)
            if job.stream:
                return EventStream(run)
            return Response(await _or_gone(run.whole(), gone), media_type="application/json")
        finally:
            gone.cancel()
            if not job.stream:
                run.cancel()

    def _decoder(self, job: Job) -> Decoder:
        # A text that an answer goes on from needs the space; a chat's answer begins a text, but
        # what has a form has it exactly.
        free = job.kind == "chat" and job.params.structured_outputs is None
        strip = free and getattr(self._tokenizer, "strips_space", False)
        return Decoder(self._tokenizer, self._pieces, strip)


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


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _or_gone[T](work: Awaitable[T], gone: asyncio.Task) -> T:
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


class Run:
    """A job in the engine: a request for each of its prompts."""

    def __init__(
        self,
        worker: Worker,
        job: Job,
        shapes: Shapes,
        deadline: float,
        decoder: Callable[[Job], Decoder],
    ):
        """deadline: of time.monotonic. decoder: makes one for an answer."""
        self._worker, self.job, self.shapes, self._deadline = worker, job, shapes, deadline
        self._streams: list[Stream] = []
        n, echo = job.params.n, job.echo or [""] * len(job.prompts)
        self._answers = [
            Answer(job, decoder, text, prompt)
            for text, prompt in zip(echo, job.prompts, strict=True)
            for _ in range(n)
        ]

    async def submit(self) -> None:
        """Hands all prompts to the engine. Raises: ApiError, UserError, EngineFailed."""
        async with self.limit():
            for prompt in self.job.prompts:
                self._streams.append(await self._worker.submit(prompt, self.job.params))

    def cancel(self) -> None:
        """Ends what has not ended."""
        for stream in self._streams:
            self._worker.cancel(stream)

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Ends the run when its time is over. Raises: ApiError."""
        try:
            async with asyncio.timeout(self._deadline - time.monotonic()):
                yield
        except TimeoutError:
            self.cancel()
            raise ApiError(
                504, "the request took longer than it may (--request_timeout_s)", code="timeout"
            ) from None
        except BaseException:
            self.cancel()
            raise

    async def deltas(self) -> AsyncGenerator[tuple[int, Any]]:
        """Yields (number of the answer, what is new of it). Raises: ApiError, EngineFailed."""
        outputs: asyncio.Queue = asyncio.Queue()

        async def pump(first: int, stream: Stream) -> None:
            try:
                async for output in stream:
                    outputs.put_nowait((first + output.index, output))
            except EngineFailed as error:
                outputs.put_nowait((first, error))
            outputs.put_nowait(None)

        n, open_ = self.job.params.n, len(self._streams)
        pumps = [asyncio.create_task(pump(i * n, s)) for i, s in enumerate(self._streams)]
        try:
            while open_:
                found = await outputs.get()
                await asyncio.sleep(0)  # with a full queue nothing else here waits
                if found is None:
                    open_ -= 1
                    continue
                index, output = found
                if isinstance(output, Exception):
                    raise output
                if (delta := self._answers[index].add(output)) is not None:
                    yield index, delta
        finally:
            for task in pumps:
                task.cancel()

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of tokens; each prompt counts once."""
        prompt = sum(map(len, self.job.prompts))
        drawn = sum(a.tokens for a in self._answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
        }

    async def whole(self) -> str:
        """Returns the response, as JSON, when all answers have ended."""
        found: list[list] = [[] for _ in self._answers]
        async with self.limit(), contextlib.aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                found[index].append(delta)

        def work() -> str:
            return fields.write(self.shapes.whole(found, self.usage))

        listed = sum(len(delta.entries) for parts in found for delta in parts)
        return work() if listed < LARGE else await asyncio.to_thread(work)

    async def events(self) -> AsyncGenerator[str]:
        """Yields the data of a stream's events. An error is one, and the last before the end."""
        try:
            for index in range(len(self._answers)):
                if (first := self.shapes.first(index)) is not None:
                    yield json.dumps(first, ensure_ascii=False)
            async with contextlib.aclosing(self.deltas()) as deltas:
                async for index, delta in deltas:
                    yield json.dumps(self.shapes.part(index, delta), ensure_ascii=False)
            if self.job.usage:
                yield json.dumps(self.shapes.last(self.usage))
        except (ApiError, EngineFailed) as error:
            made = error if isinstance(error, ApiError) else ApiError(500, str(error))
            yield json.dumps(made.body)
        yield "[DONE]"


class EventStream(Response):
    """Server-sent events of a run, whose requests end when the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, run: Run):
        """The run has been submitted."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._run = run

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Sends what comes, until it ends or nobody listens."""
        gone = asyncio.create_task(_until_gone(Request(scope, receive)))
        try:
            await _or_gone(self._send(send), gone)
        except (Gone, OSError):
            pass
        finally:
            gone.cancel()
            self._run.cancel()

    async def _send(self, send: Any) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)

        async def show(event: str) -> None:
            body = f"data: {event}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        try:  # the limit holds while a client that does not read makes `send` wait, too
            async with self._run.limit(), contextlib.aclosing(self._run.events()) as events:
                async for event in events:
                    await show(event)
        except ApiError as error:
            await show(json.dumps(error.body))
            await show("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
