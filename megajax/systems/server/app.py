"""The language server's endpoints: /v1/completions, /v1/chat/completions, /v1/models, /tokenize,
/detokenize, and those of every server (base.py).

A body is read up to a limit, becomes a Job (protocol.py), each of whose prompts is a request of the
engine (worker.py), whose outputs become the response (answers.py). A client that leaves, streaming
or not, ends its requests, whose pages are free from the next step on.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megajax.systems.server.answers import Run, pieces_of
from megajax.systems.server.base import (
    BODY_S,
    ApiError,
    Base,
    EventStream,
    Metrics,
    in_time,
    parse,
    until_gone,
    write,
)
from megajax.systems.server.images import (
    LARGE_BODIES,
    LONGER,
    THREADS,
    has_images,
    url_characters,
)
from megajax.systems.server.options import HttpOptions
from megajax.systems.server.protocol import Job, Reader
from megajax.systems.server.worker import Worker

SHORT = 2**20  # (chosen) bytes of a body that the event loop parses; a thread parses a longer one


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
        limits: HttpOptions | None = None,
        image_bytes: int = 0,
    ):
        """name: of the model. keys: one of which a client must send; none: everybody may ask.

        limits: of a request: its bytes, and the time from its arrival to its last token.
        image_bytes: of the images of a chat, which its body may have in addition; 0: the model sees
        none.
        """
        limits = limits or HttpOptions()
        max_body, timeout_s = limits.max_body, limits.request_timeout_s
        self._worker, self._reader, self.name, self._timeout_s = worker, reader, name, timeout_s
        self._tokenizer = worker.engine.tokenizer
        self._tokenizing = asyncio.Semaphore()  # what no model's context bounds, one at a time
        self._max_body, self._chat_body = max_body, max_body + LONGER * image_bytes
        self._large = asyncio.Semaphore(LARGE_BODIES)
        self._decoding = ThreadPoolExecutor(THREADS, "images")
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
            help="see /docs and docs/serving.md",
            examples=reader.examples(),
            log=limits.request_log,
        )
        self.app = self._base.app

    # ---- endpoints

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, self._reader.completion, self._max_body)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, self._reader.chat, self._chat_body)

    async def _models(self, request: Request) -> Response:
        context = self._worker.engine.context
        name = request.path_params.get("name")
        base = {
            "id": self.name,
            "object": "model",
            "created": self._born,
            "owned_by": "megajax",
            "max_model_len": context,
            "endpoints": ["/v1/chat/completions"] * self._reader.chats + ["/v1/completions"],
        }
        names = self._worker.engine.adapters.names
        models = [base, *(base | {"id": one, "parent": self.name} for one in names)]
        if name is None:
            return JSONResponse({"object": "list", "data": models})
        for model in models:
            if model["id"] == name:
                return JSONResponse(model)
        raise ApiError(404, f"the model {name!r:.200} does not exist", code="model_not_found")

    async def _tokenize(self, request: Request) -> Response:
        body = parse(await self._base.body(request))
        context = self._worker.engine.context

        def work() -> str:
            ids = self._reader.tokenize(body)
            return write({"count": len(ids), "max_model_len": context, "tokens": ids})

        async with self._tokenizing:
            return Response(await asyncio.to_thread(work), media_type="application/json")

    async def _detokenize(self, request: Request) -> Response:
        body = parse(await self._base.body(request))
        async with self._tokenizing:
            text = await asyncio.to_thread(self._reader.detokenize, body)
        return JSONResponse({"prompt": text})

    # ---- answers

    async def _read(
        self, request: Request, read: Callable[[dict], Job], most: int, deadline: float
    ) -> tuple[Job, str]:
        """Returns (what a request asks for, its name of the model). most: bytes of its body, of
        which max_body may be no image. deadline: of time.monotonic.

        A body with images is in memory several times until they are decoded, so few are read at a
        time, and a few threads decode them.
        """
        flags = "--max_body" if most == self._max_body else "--max_body, --max_image_bytes"
        length = request.headers.get("content-length", "")
        is_small = most == self._max_body or (
            length.isdecimal() and int(length[:18]) <= self._max_body
        )
        async with contextlib.nullcontext() if is_small else self._reading(deadline):
            raw = await self._base.body(request, most, flags)
            self._worker.check()
            body = parse(raw) if len(raw) <= SHORT else await asyncio.to_thread(parse, raw)
            if len(raw) > self._max_body:
                # Some clients escape each '/', also those of base64.
                text = len(raw) - raw.count(b"\\/") - url_characters(body)
                if text > self._max_body:
                    rule = f"the limit is {self._max_body} (--max_body)"
                    raise ApiError(413, f"the body without images has {text} bytes; {rule}")
            del raw
            if not has_images(body):
                job = await asyncio.to_thread(read, body)
            else:
                self._worker.check_room()  # before the work of decoding
                loop = asyncio.get_running_loop()
                job = await loop.run_in_executor(self._decoding, read, body)
        return job, body.get("model") or self.name

    @contextlib.asynccontextmanager
    async def _reading(self, deadline: float) -> AsyncIterator[None]:
        """Waits until one of few large bodies may be read. Raises: ApiError where others are read
        for too long."""
        try:
            async with asyncio.timeout(min(BODY_S, deadline - time.monotonic())):
                await self._large.acquire()
        except TimeoutError:
            raise ApiError(
                429,
                f"{LARGE_BODIES} other bodies of over {self._max_body} bytes are being read "
                "(--max_body)",
                code="too_many_images",
                headers={"Retry-After": "1"},
            ) from None
        try:
            yield
        finally:
            self._large.release()

    async def _answer(self, request: Request, read: Callable[[dict], Job], most: int) -> Response:
        deadline = time.monotonic() + self._timeout_s
        job, model = await self._read(request, read, most, deadline)
        run = Run(self._worker, job, model, self._tokenizer, self._pieces)
        request.scope["usage"] = run.usage
        gone = asyncio.create_task(until_gone(request))
        try:
            await in_time(run.submit(), gone, deadline)
            if job.stream:
                return EventStream(run.events(), deadline, run.cancel)
            answer = await in_time(run.response(), gone, deadline)
            return Response(answer, media_type="application/json")
        except BaseException:
            run.cancel()
            raise
        finally:
            gone.cancel()
