"""The server's endpoints: /v1/completions, /v1/chat/completions, /v1/models, /tokenize,
/detokenize, /health, /metrics.

A body is read up to a limit, becomes a Job (protocol.py), each of whose prompts is a request of the
engine (worker.py). A client that leaves, streaming or not, ends its requests, whose pages are free
from the next step on.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megajax.systems.server import fields
from megajax.systems.server.answers import Answer, Shapes
from megajax.systems.server.base import Base, Gone, or_gone, until_gone
from megajax.systems.server.errors import ApiError, EngineFailed
from megajax.systems.server.metrics import Metrics
from megajax.systems.server.protocol import Job, Reader
from megajax.systems.server.text import Decoder, pieces_of
from megajax.systems.server.worker import Stream, Worker

LARGE = 2**10  # (chosen) tokens of an answer that a thread writes


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
        self._worker, self._reader, self.name, self._timeout_s = worker, reader, name, timeout_s
        self._tokenizer = worker.engine.tokenizer
        self._tokenizing = asyncio.Semaphore()  # what no model's context bounds, one at a time
        self._pieces, self._born = pieces_of(self._tokenizer), int(time.time())
        self._base = Base(
            {
                "/v1/completions": ("POST", self._completions),
                "/v1/chat/completions": ("POST", self._chat),
                "/v1/models": ("GET", self._models),
                "/v1/models/{name:path}": ("GET", self._models),
                "/tokenize": ("POST", self._tokenize),
                "/detokenize": ("POST", self._detokenize),
            },
            worker,
            metrics,
            keys=keys,
            max_body=max_body,
            help="see /v1/models and docs/serving.md",
        )
        self.app = self._base.app

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
        body = fields.parse(await self._base.body(request))
        context = self._worker.engine.context

        def work() -> str:
            ids = self._reader.tokenize(body)
            return fields.write({"count": len(ids), "max_model_len": context, "tokens": ids})

        async with self._tokenizing:
            return Response(await asyncio.to_thread(work), media_type="application/json")

    async def _detokenize(self, request: Request) -> Response:
        body = fields.parse(await self._base.body(request))
        async with self._tokenizing:
            text = await asyncio.to_thread(self._reader.detokenize, body)
        return JSONResponse({"prompt": text})

    # ---- answers

    async def _answer(self, request: Request, read: Callable[[dict], Job]) -> Response:
        deadline = time.monotonic() + self._timeout_s
        raw = await self._base.body(request)
        self._worker.check()
        body = fields.parse(raw)
        job = await asyncio.to_thread(read, body)
        shapes = Shapes(job, body.get("model") or self.name, self._tokenizer, self._pieces)
        run = Run(self._worker, job, shapes, deadline, self._decoder)
        gone = asyncio.create_task(until_gone(request))
        try:
            await or_gone(run.submit(), gone)
            if job.stream:
                return EventStream(run)
            return Response(await or_gone(run.whole(), gone), media_type="application/json")
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
        gone = asyncio.create_task(until_gone(Request(scope, receive)))
        try:
            await or_gone(self._send(send), gone)
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
