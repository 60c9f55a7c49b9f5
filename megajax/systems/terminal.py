"""A chat in a terminal: lines in, streamed answers out, with a model of this process or a server.

scripts/chat.py opens the model. Answers go to standard output; all else, such as prompts and tokens
a second, goes to standard error, so that a pipe gets the answers alone. What a model writes is
shown without control characters, which could change the terminal.
"""

import contextlib
import json
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from megajax.core.errors import UserError
from megajax.core.files import expand, parse_json, write_whole
from megajax.serving import SamplingParams

HELP = """\
/reset          forget the conversation     /system TEXT    set the system prompt
/save FILE      write the conversation      /exit           leave (also Ctrl-D)
A line that ends with \\ goes on in the next one; lines between two lines of
\"\"\" are one message. Ctrl-C stops an answer; at the prompt, twice leaves."""
BLOCK = '"""'
WAIT_S = 600  # (chosen) for the next part of a server's answer
MAX_LINE = 2**22  # (chosen) bytes of a server's event
# Control characters but for the tab and the line end.
HIDDEN = {i: None for i in [*range(32), *range(127, 160)] if chr(i) not in "\t\n"}

type Message = dict[str, str]


class Model(Protocol):
    """What answers. tokens: of the newest answer, as far as they are known."""

    name: str
    tokens: int

    def answer(self, messages: list[Message], raw: bool) -> Iterator[str]:
        """Yields an answer to messages, or with `raw` the continuation of their texts, as it grows.
        Raises: UserError. Closing the iterator ends the work."""
        ...


class LocalModel:
    """A megajax.LLM."""

    def __init__(self, llm: Any, sampling: Mapping[str, Any], most: int):
        """sampling: members of SamplingParams. most: tokens of an answer."""
        self._llm, self._sampling, self._most = llm, dict(sampling), most
        self.name, self.tokens = llm.name, 0

    def answer(self, messages: list[Message], raw: bool) -> Iterator[str]:
        """Yields the answer, as Model says; the iterator may be closed between two steps."""
        from megajax.systems.server.answers import Decoder, pieces_of

        llm, engine = self._llm, self._llm.engine
        ids = llm.encode("".join(m["content"] for m in messages)) if raw else llm.prompt(messages)
        left = engine.context - len(ids)
        if left < 1:
            raise UserError(
                f"the conversation has {len(ids)} tokens, and the model's context "
                f"{engine.context}: /reset begins anew (--context)"
            )
        params = SamplingParams(max_tokens=min(left, self._most), **self._sampling)
        tokenizer = llm.tokenizer
        strips = not raw and getattr(tokenizer, "strips_space", False)
        decoder = Decoder(tokenizer, pieces_of(tokenizer), strips)
        self.tokens, request = 0, engine.submit(ids, params)
        try:
            while engine.busy:
                for output in engine.step():
                    self.tokens += len(output.tokens)
                    ends = tokenizer.ends
                    yield "".join(decoder.add(i) for i in output.tokens if i not in ends)
            yield decoder.finish()
        finally:
            engine.cancel(request)
            while engine.busy:
                engine.step()


class RemoteModel:
    """A server with OpenAI's interface."""

    def __init__(
        self,
        url: str,
        key: str | None,
        sampling: Mapping[str, Any],
        most: int,
        name: str | None = None,
    ):
        """url: of the server, with /v1 or without. name: of one of its models; None: the first.

        Raises: UserError if it does not answer, or has no such model.
        """
        if not url.startswith(("http://", "https://")):
            raise UserError(f"url={url:.200} must begin with http:// or https:// (--url)")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        self._body = {"max_tokens": most, **sampling}
        self.tokens = 0
        with self._open("/v1/models", None) as answer:
            try:
                models = {m["id"]: m for m in parse_json(answer.read(MAX_LINE))["data"]}
            except (ValueError, KeyError, TypeError):
                models = {}
        if not models:
            raise UserError(f"{self._url} lists no models at /v1/models (--url)")
        self.name = next(iter(models)) if name is None else name
        if self.name not in models:
            raise UserError(
                f"model={name:.200}: {self._url} has {', '.join(map(str, models)):.300} (--model)"
            )
        self.endpoints = models[self.name].get("endpoints", ["/v1/chat/completions"])

    def _open(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=WAIT_S)
        except urllib.error.HTTPError as error:
            try:
                said = json.loads(error.read(MAX_LINE))["error"]["message"]
            except (ValueError, KeyError, TypeError):
                said = error.reason
            raise UserError(f"{self._url}: {error.code}: {said}") from None
        except OSError as error:
            raise UserError(
                f"{self._url} does not answer: {getattr(error, 'reason', error)} (--url)"
            ) from None

    def answer(self, messages: list[Message], raw: bool) -> Iterator[str]:
        """Yields the answer, as Model says."""
        body = {"model": self.name, "stream": True, **self._body}
        body["stream_options"] = {"include_usage": True}
        if raw:
            path, body["prompt"] = "/v1/completions", "".join(m["content"] for m in messages)
        else:
            path, body["messages"] = "/v1/chat/completions", messages
        self.tokens = 0
        with self._open(path, body) as lines:
            while line := lines.readline(MAX_LINE):
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if not data:
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise UserError(f"{self._url}: {event['error']['message']}")
                if usage := event.get("usage"):
                    self.tokens = usage["completion_tokens"]
                for choice in event["choices"]:
                    text = choice["text"] if raw else choice["delta"].get("content")
                    self.tokens += not usage
                    yield text or ""
        raise UserError(f"{self._url} closed the connection before the answer was complete")


class Chat:
    """A conversation: `run` reads messages and commands until the input ends."""

    def __init__(
        self,
        model: Model,
        *,
        raw: bool = False,
        system: str = "",
        lines: TextIO | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ):
        """raw: the texts of messages are continued as they are. system: the system prompt. lines,
        out, err: where messages come from, and answers and all else go to; None: the terminal."""
        self._model, self._raw, self._system = model, raw, system
        self._lines, self._out, self._err = lines, out or sys.stdout, err or sys.stderr
        self.messages: list[Message] = []
        self._prompts = lines is None and sys.stdin.isatty()
        if self._prompts:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  lines can be edited, and earlier ones taken again

    def run(self) -> None:
        """Talks until /exit, the end of the input, or two Ctrl-C at the prompt."""
        if self._prompts:
            self._say(f"{self._model.name}: /help lists the commands.")
        warned = False
        while True:
            try:
                text = self._read()
            except EOFError:
                return
            except KeyboardInterrupt:
                if warned:
                    return
                warned = True
                self._say("\nCtrl-C again or /exit leaves.")
                continue
            warned = False
            if not text.strip():
                continue
            if text.startswith("/") and "\n" not in text:
                if not self._command(text):
                    return
                continue
            try:
                self._answer(text)
            except UserError as error:
                self.messages.pop()
                self._say(f"error: {error}")

    # ---- input

    def _line(self, prompt: str) -> str:
        if self._lines is None:
            if not self._prompts:
                line = sys.stdin.readline()
            else:
                return input(prompt)
        else:
            line = self._lines.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    def _read(self) -> str:
        """Returns the next message or command. Raises: EOFError."""
        line = self._line("> ")
        if line.strip() == BLOCK:
            block: list[str] = []
            while (line := self._line(". ")).strip() != BLOCK:
                block.append(line)
            return "\n".join(block)
        parts = [line]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            parts.append(self._line(". "))
        return "\n".join(parts)

    def _command(self, text: str) -> bool:
        """Does a command. Returns whether the chat goes on."""
        name, _, value = text.strip().partition(" ")
        value = value.strip()
        if name in ("/exit", "/quit"):
            return False
        if name == "/reset":
            self.messages.clear()
            self._say("the conversation is empty")
        elif name == "/system" and self._raw:
            self._say("error: a completion has no system prompt (--raw)")
        elif name == "/system":
            self._system = value
            self._say("the system prompt is set" if value else "there is no system prompt")
        elif name == "/save" and value:
            self._save(value)
        elif name == "/help":
            self._say(HELP)
        else:
            self._say(f"error: there is no command {text[:40]!r}; /help lists them")
        return True

    def _save(self, name: str) -> None:
        try:
            path: Path = expand(name)
            if path.exists():
                raise UserError(f"{path} exists; name a new file")
            write_whole(path, json.dumps({"messages": self._all()}, ensure_ascii=False) + "\n")
        except (UserError, OSError) as error:
            self._say(f"error: {error}")
        else:
            self._say(f"{len(self._all())} messages are in {path}")

    # ---- answers

    def _all(self) -> list[Message]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*(system if not self._raw else []), *self.messages]

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        begun, parts, first = time.monotonic(), [], None
        stopped = False
        answer: Any = self._model.answer(self._all(), self._raw)
        with _stopping() as stop, contextlib.closing(answer) as grown:
            try:
                for part in grown:
                    first = first or time.monotonic()
                    parts.append(part)
                    self._out.write(part.translate(HIDDEN))
                    self._out.flush()
                    if stop.is_set():
                        break
            except KeyboardInterrupt:
                stop.set()
            stopped = stop.is_set()
        self._out.write("\n")
        self._out.flush()
        self.messages.append({"role": "assistant", "content": "".join(parts)})
        now, count = time.monotonic(), self._model.tokens
        rate = f", {(count - 1) / (now - first):.1f} tokens/s" if first and count > 1 else ""
        wait = f", first after {first - begun:.2f} s" if first else ""
        self._say(f"[{count} tokens{rate}{wait}{', stopped' if stopped else ''}]")

    def _say(self, text: str) -> None:
        print(text, file=self._err, flush=True)


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C sets: a step of the engine must not be broken off. A
    second one raises KeyboardInterrupt, should the step hang."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def note(*_: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
