"""From the engine's outputs to what a client reads: texts, reasons, log-probabilities.

A stream and a complete response come from the same parts: an Answer turns outputs into deltas; a
stream sends them, and a complete response is what they add up to. A Run does this for all answers
of a job.

The text of an answer is the bytes of its tokens, read as UTF-8, where each longest invalid part is
one replacement character. A token may end inside a character; what is incomplete waits for the next
token. So the pieces of a stream, put together, are the text that is sent without streaming.
"""

import asyncio
import codecs
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from megajax.core.errors import UserError
from megajax.serving import Output
from megajax.systems.server.base import ApiError, stopping, write
from megajax.systems.server.protocol import Job
from megajax.systems.server.tools import CallReader
from megajax.systems.server.worker import Stream, Worker

LARGE = 2**10  # (chosen) tokens of an answer that a thread writes


# ---- text


UNKNOWN = "\ufffd"


class Decoder:
    """Turns the tokens of one answer into text."""

    def __init__(self, tokenizer: Any, pieces: Sequence[bytes | None] | None, strip: bool):
        """pieces: the bytes of the tokenizer's ids; None: ids do not stand for bytes, and the
        answer is decoded from its beginning at every token. strip: drop a space before the first
        word, as SentencePiece's decoders do; a text that continues another one needs the space.
        """
        self._tokenizer, self._pieces, self._strip = tokenizer, pieces, strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []
        self._sent = ""

    def add(self, token: int) -> str:
        """Returns the text that is complete with this token."""
        if self._pieces is None:
            self._tokens.append(token)
            return self._grow(final=False)
        piece = (self._pieces[token] if token < len(self._pieces) else None) or b""
        if self._strip and piece:
            self._strip, piece = False, piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """Returns the text of bytes that no token completed."""
        return self._grow(final=True) if self._pieces is None else self._utf8.decode(b"", True)

    def _grow(self, final: bool) -> str:
        text = self._tokenizer.decode(self._tokens)
        if not final:  # it may be the beginning of a character
            text = text.rstrip(UNKNOWN)
        if not text.startswith(self._sent):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new


def pieces_of(tokenizer: Any) -> Sequence[bytes | None] | None:
    """Returns the bytes of a tokenizer's ids, or None where they do not stand for bytes."""
    try:
        return tokenizer.pieces()
    except (AttributeError, UserError):
        return None


class Stopper:
    """Holds text back that may be the beginning of a stop string, and cuts at a complete one."""

    def __init__(self, stops: Sequence[str], include: bool = False):
        """include: the stop string is part of the text."""
        self._stops, self._include, self._held = tuple(stops), include, ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Returns what may be shown now. After a stop string that is nothing."""
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        matches = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            at, stop = min(matches, key=lambda pair: pair[0])
            return text[: at + len(stop) * self._include]
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        return text

    def finish(self) -> str:
        """Returns what was held back, when nothing follows."""
        held, self._held = self._held, ""
        return held


# ---- one answer


@dataclasses.dataclass(frozen=True)
class Entry:
    """A token with its log-probability.

    logprob: None for the first token of a prompt. top: {id: log-probability} of the likeliest
    tokens in its place and of the token itself. start, end: its characters in the text.
    """

    token: int
    logprob: float | None
    top: dict[int, float]
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Delta:
    """The growth of an answer. reason: 'stop', 'length' or 'tool_calls' if the answer ended, else
    None. calls: of functions, as OpenAI's objects."""

    text: str
    entries: list[Entry]
    reason: str | None
    calls: Sequence[dict[str, Any]] = ()


class Answer:
    """One answer while it grows."""

    def __init__(
        self,
        job: Job,
        tokenizer: Any,
        pieces: Sequence[bytes | None] | None,
        echo: str,
        prompt: Sequence[int],
    ):
        """pieces: as `pieces_of` returns them. echo: text that the first delta begins with. prompt:
        the tokens of the prompt."""
        self._job, self._echo, self._prompt = job, echo, prompt
        # A text that an answer goes on from needs the space; a chat's answer begins a text, but
        # what has a form has it exactly.
        free = job.kind == "chat" and job.params.structured_outputs is None
        strip = free and getattr(tokenizer, "strips_space", False)
        self._decoder = Decoder(tokenizer, pieces, strip)
        self._decoder_of_prompt = Decoder(tokenizer, pieces, strip)
        self._stopper = Stopper(job.params.stop, job.include_stop)
        self._decoded, self._shown = len(echo), 0
        self._pending: list[Entry] = []
        self._reader = None if job.form is None else CallReader(job.form, job.names)
        self.tokens = 0
        self.reason: str | None = None

    def add(self, output: Output) -> Delta | None:
        """Returns the growth by an output, or None. Raises: ApiError for an answer that failed."""
        if output.finish_reason == "cancelled":
            raise stopping()
        if output.finish_reason == "constraint":
            raise ApiError(
                400,
                "the form of the answer (its schema or expression) is too complex to be followed",
                param="structured_outputs",
                code="invalid_value",
            )
        if output.finish_reason == "error":
            raise ApiError(
                500,
                "the answer failed: the model's logits are not finite, or see the server's log",
                code="answer_failed",
            )
        if output.prompt_logprobs is not None:
            self._pending += self._of_prompt(output.prompt_logprobs)
        if self._job.silent:
            output = dataclasses.replace(
                output, tokens=[], logprobs=[], top_logprobs=None, finish_reason="length"
            )
        before, self.tokens = self.tokens, self.tokens + len(output.tokens)
        if self.reason is not None:
            return None
        shown, tops = self._echo, output.top_logprobs or [{}] * len(output.tokens)
        self._echo = ""
        for token, logprob, top in zip(output.tokens, output.logprobs, tops, strict=True):
            start, before = self._decoded, before + 1
            if token in self._job.ends:  # the last one, since it ended the answer
                if self._job.kind == "completion":
                    self._pending.append(Entry(token, logprob, top, start, start))
                break
            text = self._decoder.add(token)
            self._decoded += len(text)
            self._pending.append(Entry(token, logprob, top, start, self._decoded))
            # The engine looks for stop strings behind the least length.
            shown += text if before <= self._job.params.min_tokens else self._stopper.add(text)
        reason = output.finish_reason
        if reason is not None:
            shown += self._stopper.add(self._decoder.finish()) + self._stopper.finish()
        self.reason = "stop" if self._stopper.stopped else reason
        self._shown += len(shown)
        entries, calls = self._release(), []
        if self._reader is not None:
            shown = self._reader.add(shown)
            if self.reason is not None:
                held, calls = self._reader.finish()
                shown += held
            if calls:
                self.reason = "tool_calls"
        if not shown and not entries and self.reason is None:
            return None
        return Delta(shown, entries, self.reason, calls)

    def _of_prompt(self, scores: Sequence[dict[int, float] | None]) -> Iterator[Entry]:
        """Yields the entries of the prompt's tokens."""
        at, most = 0, len(self._echo)
        for token, top in zip(self._prompt, scores, strict=True):
            text = self._decoder_of_prompt.add(token)
            logprob = None if top is None else top[token]
            yield Entry(token, logprob, top or {}, min(at, most), min(at + len(text), most))
            at += len(text)

    def _release(self) -> list[Entry]:
        """Removes and returns the entries of the text that was shown, with a token that a stop
        string cut."""
        if self._job.logprobs is None:
            self._pending.clear()
            return []
        if self.reason is not None:
            ready = [e for e in self._pending if e.start < self._shown or e.end <= self._shown]
            self._pending.clear()
            return ready
        count = 0
        while count < len(self._pending) and self._pending[count].end <= self._shown:
            count += 1
        ready, self._pending = self._pending[:count], self._pending[count:]
        return ready


# ---- OpenAI's objects


class Shapes:
    """Writes deltas and answers as OpenAI's objects, for one request."""

    def __init__(self, job: Job, model: str, tokenizer: Any, pieces: Sequence[bytes | None] | None):
        """model: its name in the request. pieces: as `pieces_of` returns them."""
        self._job, self._tokenizer, self._pieces = job, tokenizer, pieces
        chat = job.kind == "chat"
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        kind = "chat.completion" if chat else "text_completion"
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._kinds = (kind, kind + ".chunk" if chat else kind)

    def complete(self, deltas: Sequence[Sequence[Delta]], usage: dict[str, int]) -> dict[str, Any]:
        """Returns a response without streaming. deltas: of each answer."""
        choices = []
        for index, parts in enumerate(deltas):
            text, entries = "".join(d.text for d in parts), [e for d in parts for e in d.entries]
            choice: dict[str, Any] = {"index": index, "logprobs": self._logprobs(entries)}
            if self._job.kind == "chat":
                calls = [call for d in parts for call in d.calls]
                content = text if text or not calls else None
                message = {"role": "assistant", "content": content, "refusal": None}
                choice["message"] = message | ({"tool_calls": calls} if calls else {})
            else:
                choice["text"] = text
            choices.append(choice | {"finish_reason": parts[-1].reason})
        return {**self._head, "object": self._kinds[0], "choices": choices, "usage": usage}

    def first(self, index: int) -> dict[str, Any] | None:
        """Returns the first part of the stream of an answer; None: it has no such part."""
        if self._job.kind != "chat":
            return None
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, [], None)

    def part(self, index: int, delta: Delta) -> dict[str, Any]:
        """Returns the part of a stream that sends a delta."""
        text = delta.text
        chat: dict[str, dict[str, Any]] = {
            "delta": {"content": text} if text or delta.reason is None else {}
        }
        if delta.calls:
            calls = [{"index": i, **call} for i, call in enumerate(delta.calls)]
            chat["delta"] = {**chat["delta"], "tool_calls": calls}
        body = chat if self._job.kind == "chat" else {"text": text}
        return self._chunk(index, body, delta.entries, delta.reason)

    def last(self, usage: dict[str, int]) -> dict[str, Any]:
        """Returns the part of a stream that has the number of tokens."""
        return {**self._head, "object": self._kinds[1], "choices": [], "usage": usage}

    def _chunk(
        self, index: int, body: dict[str, Any], entries: list[Entry], reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(entries) if entries else None
        choice = {"index": index, **body, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self._job.usage else {}
        return {**self._head, "object": self._kinds[1], "choices": [choice], **usage}

    # ---- log-probabilities

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any] | None:
        if self._job.logprobs is None:
            return None
        if self._job.kind == "chat":
            return {"content": [self._chat_entry(e) for e in entries], "refusal": None}
        return {
            "tokens": [self._name(e.token) for e in entries],
            "token_logprobs": [_finite(e.logprob) for e in entries],
            "top_logprobs": [self._by_name(e) for e in entries],
            "text_offset": [e.start for e in entries],
        }

    def _by_name(self, entry: Entry) -> dict[str, float | None] | None:
        """Returns {name: log-probability} of the tokens in an entry's place. In a few vocabularies
        several tokens have one name; the first of them gets it."""
        if entry.logprob is None:
            return None
        first = {entry.token: entry.logprob}
        logprobs: dict[str, float | None] = {}
        for token, logprob in (first | entry.top).items():
            name = self._name(token)
            logprobs[name if name not in logprobs else f"token_id:{token}"] = _finite(logprob)
        return dict(sorted(logprobs.items(), key=lambda pair: -(pair[1] or 0)))

    def _chat_entry(self, entry: Entry) -> dict[str, Any]:
        # (OpenAI) exactly the likeliest; a completion lists the token itself, too.
        likeliest = list(entry.top.items())[: self._job.logprobs]
        top = [self._named(token, logprob) for token, logprob in likeliest]
        return self._named(entry.token, entry.logprob) | {"top_logprobs": top}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self._bytes(token)
        text = self._name(token) if data is None else data.decode(errors="replace")
        numbers = None if data is None else list(data)
        return {"token": text, "logprob": _finite(logprob), "bytes": numbers}

    def _bytes(self, token: int) -> bytes | None:
        if self._pieces is None:
            return self._tokenizer.decode([token]).encode()
        return self._pieces[token] if token < len(self._pieces) else None

    def _name(self, token: int) -> str:
        """Returns the text of a token; for a part of a character and for a special token, a name in
        its place, as OpenAI writes them."""
        data = self._bytes(token)
        if data is None:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _finite(logprob: float | None) -> float | None:
    # (OpenAI's least value) JSON has no infinity
    return None if logprob is None else max(logprob, -9999.0)


# ---- the answers of a job


class Run:
    """A job in the engine: a request for each of its prompts, and the answers to all of them."""

    def __init__(
        self,
        worker: Worker,
        job: Job,
        model: str,
        tokenizer: Any,
        pieces: Sequence[bytes | None] | None,
    ):
        """model: its name in the request. pieces: as `pieces_of` returns them."""
        self._worker, self._job = worker, job
        self._shapes = Shapes(job, model, tokenizer, pieces)
        self._streams: list[Stream] = []
        self._outputs: asyncio.Queue = asyncio.Queue()  # of all streams
        echo = job.echo or [""] * len(job.prompts)
        self._answers = [
            Answer(job, tokenizer, pieces, text, prompt)
            for text, prompt in zip(echo, job.prompts, strict=True)
            for _ in range(job.params.n)
        ]

    async def submit(self) -> None:
        """Hands all prompts to the engine. Raises: ApiError, UserError, EngineFailed."""
        params = self._job.params
        for i, prompt in enumerate(self._job.prompts):
            first = i * params.n
            self._streams.append(
                await self._worker.submit(
                    prompt, params, self._outputs, first, self._job.images, self._job.adapter
                )
            )

    def cancel(self) -> None:
        """Ends what has not ended."""
        for stream in self._streams:
            self._worker.cancel(stream)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Yields (index of the answer, its new text and tokens) until all answers have ended.

        Answers are numbered prompt by prompt, params.n of each. Raises: ApiError, EngineFailed.
        """
        running = len(self._answers)
        while running:
            index, output = await self._outputs.get()
            # `get` does not suspend while the queue has items: without this line, a full queue
            # could keep all other requests from running.
            await asyncio.sleep(0)
            if isinstance(output, Exception):
                raise output
            running -= output.finish_reason is not None
            if (delta := self._answers[index].add(output)) is not None:
                yield index, delta

    def usage(self) -> dict[str, int]:
        """Returns the numbers of tokens so far; each prompt counts once."""
        prompt = self._job.size
        drawn = sum(a.tokens for a in self._answers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": drawn,
            "total_tokens": prompt + drawn,
        }

    async def response(self) -> str:
        """Returns the response, as JSON, when all answers have ended."""
        parts: list[list[Delta]] = [[] for _ in self._answers]
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)

        def work() -> str:
            return write(self._shapes.complete(parts, self.usage()))

        listed = sum(len(delta.entries) for answer in parts for delta in answer)
        return work() if listed < LARGE else await asyncio.to_thread(work)

    async def events(self) -> AsyncGenerator[str]:
        """Yields the data of a stream's events. Raises: ApiError, EngineFailed."""
        for index in range(len(self._answers)):
            if (first := self._shapes.first(index)) is not None:
                yield json.dumps(first, ensure_ascii=False)
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                yield json.dumps(self._shapes.part(index, delta), ensure_ascii=False)
        if self._job.usage:
            yield json.dumps(self._shapes.last(self.usage()))
