"""The encoder's server: /v1/embeddings or /v1/classify, with OpenAI's and vLLM's members.

A body becomes rows of token ids, which a thread computes batch by batch (systems/encoder.py), so
the batches of several requests take turns.
"""

import asyncio
import base64
import dataclasses
import time
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megajax.systems.encoder import Encoder
from megajax.systems.server.base import (
    ApiError,
    Base,
    Metrics,
    in_time,
    parse,
    stopping,
    until_gone,
    write,
)
from megajax.systems.server.openapi import Example
from megajax.systems.server.options import HttpOptions
from megajax.systems.server.protocol import IGNORED, Fields, check_model, is_ids, none_of

INPUTS = 2048  # (OpenAI) inputs of a request
TOKENS = 300_000  # (OpenAI) tokens of all inputs of a request


@dataclasses.dataclass(frozen=True)
class Job:
    """The content of a request. base64: the form of its vectors. tokens: of all rows."""

    rows: list[np.ndarray]
    base64: bool = False

    @property
    def tokens(self) -> int:
        """Returns the number of tokens of all rows."""
        return sum(map(len, self.rows))


class EncoderReader:
    """Reads requests for one encoder."""

    def __init__(self, encoder: Encoder, name: str, parse_special: bool = True):
        """name: of the model. parse_special: whether the text of a special token is that token,
        where the request does not say."""
        self._encoder, self._name, self._special = encoder, name, parse_special

    def embeddings(self, body: dict[str, Any]) -> Job:
        """Reads a body of /v1/embeddings. Raises: ApiError."""
        fields, width = Fields(body), self._encoder.width
        form = fields.any("encoding_format")
        fields.only("encoding_format", none_of("float", "base64"), "must be float or base64")
        fields.only("dimensions", none_of(width), f"must be {width}: the model has no other length")
        return self._job(fields, form == "base64")

    def classify(self, body: dict[str, Any]) -> Job:
        """Reads a body of /v1/classify. Raises: ApiError."""
        return self._job(Fields(body), False)

    def examples(self) -> dict[str, Example]:
        """Returns {path: a body that has been read}, for the document of the endpoints."""
        example = Example(input="x")
        if self._encoder.labels:
            self.classify(example)
            return {"/v1/classify": example}
        self.embeddings(example)
        return {"/v1/embeddings": example}

    def _job(self, fields: Fields, is_base64: bool) -> Job:
        check_model(fields, [self._name])
        cut = fields.take("truncate", bool, True)
        special = fields.take("parse_special", bool, self._special)
        fields.ignore(*IGNORED)
        value = fields.any("input")
        fields.end()
        if value is None:
            raise fields.error("input", "is missing: give a text, a list of texts, or token ids")
        listed = value if isinstance(value, list) and not is_ids(value) else [value]
        if not listed or not all(isinstance(x, str) or is_ids(x) for x in listed):
            raise fields.error("input", "must be a text, token ids, or a list of one of them")
        if len(listed) > INPUTS:
            raise _refused(f"input has {len(listed)} texts; at most {INPUTS}")
        rows: list[np.ndarray] = []
        tokens = 0
        for i, one in enumerate(listed):
            row, complete = self._row(i, one, special)
            if not (complete or cut):
                most = self._encoder.pooling.most
                raise _refused(f"input[{i}] has more than the {most} tokens that are read", True)
            rows.append(row)
            tokens += len(row)
            if tokens > TOKENS:
                raise _refused(f"input has more than {TOKENS} tokens; send it in parts", True)
        return Job(rows, is_base64)

    def _row(self, i: int, value: Any, special: bool) -> tuple[np.ndarray, bool]:
        """Returns the row of one input, and whether nothing of it is cut off."""
        if isinstance(value, str):
            return self._encoder.row(value, special)
        vocab, most = self._encoder.opened.cfg.vocab, self._encoder.pooling.most
        if not all(0 <= token < vocab for token in value):
            raise _refused(f"input[{i}] must have token ids from 0 to {vocab - 1}")
        # Token ids are those of a complete row: a client's tokenizer adds the special ones.
        return np.array(value[:most], np.int32), len(value) <= most


def _refused(rule: str, too_long: bool = False) -> ApiError:
    code = "context_length_exceeded" if too_long else "invalid_value"
    return ApiError(400, rule, param="input", code=code)


class EncoderWork:
    """A thread that computes batches of requests (base.Work)."""

    def __init__(self, encoder: Encoder, max_waiting: int):
        """max_waiting: requests that may be unanswered at a time, in addition to one."""
        self.encoder, self._most = encoder, max_waiting + 1
        self._thread = ThreadPoolExecutor(1, "encoder")
        self._stopping = self._aborted = False
        self.failure: str | None = None  # a call that fails ends its request alone
        self.live = 0

    def start(self) -> None:
        """Begins. The caller runs on the event loop that will use it."""
        self.failed, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    def stop(self) -> None:
        """Takes no new request."""
        self._stopping = True

    def abort(self) -> None:
        """Ends the running requests behind their current batch."""
        self._aborted = True

    async def join(self) -> None:
        """Waits until the running requests have ended."""
        await self._idle.wait()

    def check(self) -> None:
        """Raises: ApiError where no request is taken."""
        if self._stopping:
            raise stopping()

    async def run(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Returns what the encoder makes of the rows. Raises: ApiError."""
        self.check()
        if self.live >= self._most:
            raise ApiError(
                429,
                f"{self.live} requests wait for the model (--max_waiting)",
                code="too_many_waiting",
                headers={"Retry-After": "1"},
            )
        self.live += 1
        self._idle.clear()
        try:
            loop, made = asyncio.get_running_loop(), []
            for batch in self.encoder.batches(rows):
                if self._aborted:
                    raise stopping()
                made.append(await loop.run_in_executor(self._thread, self.encoder.compute, batch))
            return np.concatenate(made)
        finally:
            self.live -= 1
            if not self.live:
                self._idle.set()


class EncoderServer:
    """The application around an encoder; `app` is what an ASGI server runs."""

    def __init__(
        self,
        work: EncoderWork,
        *,
        name: str,
        keys: Collection[str] = (),
        limits: HttpOptions | None = None,
        parse_special: bool = True,
    ):
        """name: of the model. keys: as of Base. parse_special: as of EncoderReader."""
        limits = limits or HttpOptions()
        self._work, self.name, self._timeout_s = work, name, limits.request_timeout_s
        self._reader = EncoderReader(work.encoder, name, parse_special)
        self._born = int(time.time())
        self._path = "/v1/classify" if work.encoder.labels else "/v1/embeddings"
        handle = self._classify if work.encoder.labels else self._embed
        self._base = Base(
            {
                self._path: ("POST", handle),
                "/v1/models": ("GET", self._models),
                "/v1/models/{name:path}": ("GET", self._models),
            },
            work,
            Metrics(name),
            keys=keys,
            max_body=limits.max_body,
            help="see /docs and docs/serving.md",
            examples=self._reader.examples(),
            log=limits.request_log,
        )
        self.app = self._base.app

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self.name,
            "object": "model",
            "created": self._born,
            "owned_by": "megajax",
            "max_model_len": self._work.encoder.pooling.most,
            "endpoints": [self._path],
        }
        name = request.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": [model]})
        if name != self.name:
            raise ApiError(404, f"the model {name!r:.200} does not exist", code="model_not_found")
        return JSONResponse(model)

    async def _embed(self, request: Request) -> Response:
        job, vectors_BD = await self._answer(request, self._reader.embeddings)

        def form(vector_D: np.ndarray) -> Any:
            raw = vector_D.astype("<f4")
            return base64.b64encode(raw.tobytes()).decode() if job.base64 else raw.tolist()

        data = [
            {"object": "embedding", "index": i, "embedding": form(vector_D)}
            for i, vector_D in enumerate(vectors_BD)
        ]
        return await self._written(job, {"data": data})

    async def _classify(self, request: Request) -> Response:
        job, chances_BD = await self._answer(request, self._reader.classify)
        labels = self._work.encoder.labels
        data = [
            {
                "index": i,
                "label": labels[int(chances_D.argmax())],
                "probs": chances_D.tolist(),
                "num_classes": len(labels),
            }
            for i, chances_D in enumerate(chances_BD)
        ]
        return await self._written(job, {"data": data, "labels": [*labels]})

    async def _answer(self, request: Request, read: Any) -> tuple[Job, np.ndarray]:
        deadline = time.monotonic() + self._timeout_s
        self._work.check()
        body = await self._base.body(request)
        job = await asyncio.to_thread(lambda: read(parse(body)))
        gone = asyncio.create_task(until_gone(request))
        try:
            made_BD = await in_time(self._work.run(job.rows), gone, deadline)
        finally:
            gone.cancel()
        if not np.isfinite(made_BD).all():
            raise ApiError(500, "the model's numbers are not finite", code="answer_failed")
        request.scope["usage"] = lambda: {"prompt_tokens": job.tokens, "completion_tokens": 0}
        return job, made_BD

    async def _written(self, job: Job, members: dict[str, Any]) -> Response:
        usage = {"prompt_tokens": job.tokens, "total_tokens": job.tokens}
        head = {"id": f"emb-{uuid.uuid4().hex}", "object": "list", "created": int(time.time())}
        answer = {**head, "model": self.name, **members, "usage": usage}
        return Response(await asyncio.to_thread(write, answer), media_type="application/json")
