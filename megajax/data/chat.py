"""Chats: their prompts, by the chat template of the model, as token ids, and what a model learns.

A template is a Jinja program that comes with the model; it runs in Jinja's sandbox, which gives it
access to its variables only. Its variables and functions are those of transformers (5.24,
utils/chat_template_utils.py).

Only what the template writes becomes a control token. The template joins the texts of messages with
control tokens such as <|im_end|>. A message's own text may contain the same characters, and whoever
wrote it could then end the message and begin one of another role. So the messages are marked before
the template runs (`protect`), and the marks say afterwards which of the control tokens in the
result were a message's (`encode`). transformers does the same on request (5.24:
apply_chat_template's sanitize_control_tokens).

`rows` makes a conversation what a model is trained on: its ids, and which of them the model would
have written. No jax.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
from jinja2 import nodes

from megajax.core import files
from megajax.core.errors import UserError
from megajax.data import tokenizer as tokenizer_
from megajax.data.tokenizer import PART, JsonTokenizer, Tokenizer

# ---- control tokens


MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # (Unicode) never characters of a text


class TooLongError(UserError):
    """Values whose control tokens alone are far more than a prompt may have."""


class ControlTokens:
    """The control tokens of a chat template: the special tokens of the tokenizer, and those of its
    other added tokens that the template writes."""

    def __init__(self, tokenizer: Tokenizer, template: str):
        """template: in Jinja. A tokenizer of bytes has no control tokens."""
        self.tokenizer = tokenizer
        added = tokenizer.added() if isinstance(tokenizer, JsonTokenizer) else {}
        self._ids = {
            text: i
            for i, (text, special) in added.items()
            if special or (text.strip() and text in template)
        }
        self._tokens = frozenset(self._ids.values())
        sizes = [len(text) for text in self._ids]
        self._shortest, self._longest = min(sizes, default=0), max(sizes, default=0)
        self._beginnings = {text[:n] for text in self._ids for n in range(1, len(text))}

    def has(self, token: int) -> bool:
        """Says whether an id is a control token."""
        return token in self._tokens

    def mark(self, *values: Any) -> str:
        """Returns a character that none of these values of JSON contains. Raises: UserError."""
        text = json.dumps(values, ensure_ascii=False)
        if (free := next((m for m in MARKS if m not in text), None)) is None:
            raise UserError("the messages contain all of the non-characters U+FDD0 to U+FDEF")
        return free

    def protect(self, value: Any, mark: str, most: int | None = None) -> Any:
        """Returns a value of JSON with `mark` behind each character of a control token's text.

        Also behind a text that ends like the beginning of one, which what follows may complete.
        most: tokens of a prompt; values with twice as many control tokens are read no further.
        Raises: TooLongError for these.
        """
        bound, count = math.inf if most is None else 2 * most, 0

        def of_text(text: str) -> str:
            nonlocal count
            parts, at = [], 0
            for start, stop, _ in self._find(text):
                count += 1
                if count > bound:
                    raise TooLongError(f"the text of control tokens is there over {bound} times")
                parts += [text[at:start], mark.join(text[start:stop]), mark]
                at = stop
            parts.append(text[at:])
            tails = range(1, min(self._longest, len(text) + 1))
            if any(text[-n:] in self._beginnings for n in tails):
                parts.append(mark)
            return "".join(parts)

        def walk(value: Any) -> Any:
            if isinstance(value, dict):
                return {walk(k): walk(v) for k, v in value.items()}
            if isinstance(value, list):
                return [walk(v) for v in value]
            return of_text(value) if isinstance(value, str) else value

        return walk(value)

    def encode(self, text: str, mark: str, most: int | None = None) -> list[int]:
        """Returns the ids of a text that a template made of values that are marked.

        most: as `Tokenizer.encode`. Raises: UserError.
        """
        if mark not in text:
            return self.tokenizer.encode([text], True, most)[0].tolist()
        names, encode = self._names
        parts, at = [], 0
        for start, stop, i in self._find(text):
            if text[stop : stop + 1] != mark:  # a mark behind it: a message's
                parts += [text[at:start], names[i]]
                at = stop
                if most is not None and len(parts) > 4 * most:  # two parts a token
                    break
        else:
            parts.append(text[at:])
        return encode("".join(parts).replace(mark, ""), most).tolist()

    @functools.cached_property
    def _names(self) -> tuple[dict[int, str], Callable[[str, int | None], np.ndarray]]:
        """Returns ({id: a random name}, a function that encodes texts with these names)."""
        assert isinstance(self.tokenizer, JsonTokenizer)
        secret = secrets.token_hex(16)
        names = {i: f"{MARKS[-1]}{secret}{i}{MARKS[-1]}" for i in self._ids.values()}
        return names, self.tokenizer.renamed(names)

    @functools.cached_property
    def _finder(self) -> tuple[Any, dict[int, int]]:
        """(A tokenizer whose only tokens are control tokens, {its id: theirs}): it finds them in
        linear time."""
        from tokenizers import AddedToken, Tokenizer, models

        made = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        made.add_special_tokens([AddedToken(text, normalized=False) for text in self._ids])
        ids: dict[Any, int] = {made.token_to_id(text): i for text, i in self._ids.items()}
        return made, ids

    def _find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Yields (begin, end, id) of the control tokens in a text: the leftmost, of those the
        longest. The text is read in parts, so that whoever stops early pays for little."""
        begin = 0 if self._ids and len(text) >= self._shortest else len(text)
        while begin < len(text):
            limit = following = begin + PART
            finder, ids = self._finder
            # A token that begins before the limit ends before the longest one behind it.
            part = text[begin : limit + self._longest]
            encoding = finder.encode(part, add_special_tokens=False)
            for i, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
                if not i:
                    continue
                if begin + start >= limit:
                    break
                yield begin + start, begin + stop, ids[i]
                following = max(following, begin + stop)
            begin = following


# ---- templates


MAX_TEMPLATE = 2**20  # (chosen) bytes of a chat template: published ones have at most some 2^13
BETWEEN = "\n"  # (vLLM, llama.cpp) joins the texts of one message
PROBES = ("first probe", "second probe", "third probe")  # (chosen) texts of the trial's messages

type Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A program that turns the messages of a chat into a prompt, as Hugging Face's tokenizers store
    it.

    source: in Jinja. begin, end: the values of its variables bos_token and eos_token, or "".
    first: token ids before the text, which a tokenizer of bytes has no text for.
    """

    source: str
    begin: str
    end: str
    first: tuple[int, ...] = ()


def chat_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Returns the chat template in the folder of a tokenizer.json: chat_template.jinja, or the
    member chat_template of tokenizer_config.json; if that has several, the one named 'default'.

    path: the tokenizer.json or its folder.
    Raises: UserError for a file that cannot be read or a template that is no text.
    """
    folder = path if path.is_dir() else path.parent
    if tokenizer.name == "bytes" or not folder.is_dir():
        return None
    begin, end = bos_and_eos(tokenizer)
    file = folder / tokenizer_.TEMPLATE
    if file.is_file():
        return ChatTemplate(read_template(file, "tokenizer"), begin, end)
    file = folder / tokenizer_.CONFIG
    if not file.is_file():
        return None
    source = files.read_object(file, tokenizer_.MAX_BYTES, "tokenizer").get("chat_template")
    if isinstance(source, list):
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise UserError(
            f"{file}: chat_template is no text; it must be a Jinja template, or a list of objects "
            "with the members name and template (--tokenizer)"
        )
    return ChatTemplate(source, begin, end) if source else None


def read_template(file: Path, flag: str) -> str:
    """Returns the text of a template's file. flag: which named it. Raises: UserError."""
    try:
        return files.read_bytes(file, MAX_TEMPLATE).decode()
    except UserError as error:
        raise UserError(f"{error} (--{flag})") from None
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror} (--{flag})") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text in UTF-8: {error} (--{flag})") from None


def bos_and_eos(tokenizer: Tokenizer) -> tuple[str, str]:
    """Returns the texts of bos_token and eos_token, "" for one that is missing."""
    if not isinstance(tokenizer, JsonTokenizer):
        return "", ""
    tokens, added = tokenizer.settings.tokens, tokenizer.added()
    if tokenizer.settings.silent:  # a bare tokenizer.json, whose tokens have usual names
        begin, end = (added.get(i, ("",))[0] for i in (tokenizer.begin, tokenizer.end))  # type: ignore
        return begin, end
    return tokens.get("bos_token") or "", tokens.get("eos_token") or ""


class Chat:
    """A compiled chat template.

    A message has the members of OpenAI's API: `role`, and `content`, a text, or a list of texts and
    parts {"type": "text", "text"}. Any other part of such a list stands for an image.
    `tool_calls` whose arguments are a text of JSON are given to the template as an object, as vLLM
    does. problem: why every chat is refused, or "". refusal: why the template refuses a chat of one
    message of a user, or "". doubts: warnings of the trial of the template, with the refusal.
    """

    def __init__(
        self,
        template: ChatTemplate | str | None,
        tokenizer: Tokenizer | None = None,
        image_token: int | None = None,
    ):
        """template: a text takes bos_token and eos_token from the tokenizer. If it is None or does
        not compile, every chat is refused with the reason. tokenizer: of `encode`. image_token: the
        placeholder of an image; None: the model sees none."""
        self.problem, self.refusal, self.doubts = "", "", []  # type: ignore[var-annotated]
        self._tokenizer, self._takes_texts, self._takes_parts = tokenizer, True, False
        self._image_token, self._takes_images = image_token, False
        self._text_alone = isinstance(template, str)
        if isinstance(template, str):
            words = ("", "") if tokenizer is None else bos_and_eos(tokenizer)
            template = ChatTemplate(template, *words)
        self.template = template
        self._first = () if template is None else template.first
        self._known: tuple[Tokenizer, ControlTokens] | None = None
        if template is None:
            self.problem = "there is no chat template: name one (--chat_template)"
            return
        self._words = {"bos_token": template.begin, "eos_token": template.end}
        try:
            self._template = _environment().from_string(template.source)
        except Exception as error:  # of Jinja, and of Python, to which it is compiled
            line = (
                getattr(error, "lineno", None) if isinstance(error, jinja2.TemplateError) else None
            )
            where = "" if line is None else f" (line {line})"
            nested = isinstance(error, RecursionError)
            said = "it is nested too deep" if nested else f"{error}"[:500]
            self.problem = f"the chat template cannot be compiled: {said}{where}"
            return
        self._try()

    def prompt(self, messages: Messages, more: Mapping[str, Any] | None = None) -> str:
        """Returns the text of a chat, up to where the assistant answers.

        more: other variables of the template, such as `tools`. Raises: UserError.
        """
        self._check()
        with _refusals():
            return self._render([self._with_content(m, "") for m in messages], more or {})

    def encode(
        self,
        messages: Messages,
        more: Mapping[str, Any] | None = None,
        special: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a chat. Only the template writes control tokens.

        An image becomes one placeholder, with what the template writes around it, if it has a form
        for images.

        Args: messages, more: as of `prompt`. special: whether the text of special tokens in
          messages becomes these tokens too. most: as `Tokenizer.encode`. Raises: UserError; a
          TooLongError for messages that have far more than `most` tokens.
        """
        self._check()
        assert self._tokenizer is not None, "a chat without a tokenizer has texts only"
        more = more or {}
        if most is not None and len(messages) > 2 * most:
            raise TooLongError(f"there are {len(messages)} messages")
        controls = self.controls(self._tokenizer)
        with _refusals():
            # A character that no text contains stands for an image until texts are ids.
            stand = controls.mark([self._with_content(m, "") for m in messages], more)
            made = [self._with_content(m, stand) for m in messages]
            mark = controls.mark(made, more, stand)
            if not special:
                made, more = controls.protect([made, dict(more)], mark, most)
            text = self._render(made, more)
        first, *others = text.split(stand)
        ids = [*self._first, *controls.encode(first, mark, most)]
        for part in others:
            assert self._image_token is not None
            ids += [self._image_token, *(controls.encode(part, mark, most) if part else [])]
        return ids

    def controls(self, tokenizer: Tokenizer) -> ControlTokens:
        """Returns the control tokens of the template in a tokenizer."""
        if self._known is None or self._known[0] is not tokenizer:
            source = "" if self.template is None else self.template.source
            self._known = tokenizer, ControlTokens(tokenizer, source)
        return self._known[1]

    def rendered(
        self, messages: Messages, tokenizer: Tokenizer, more: Mapping[str, Any] | None = None
    ) -> "Rendered":
        """Returns the texts and ids of a chat and of its beginnings. Raises: UserError."""
        self._check()
        controls = self.controls(tokenizer)
        words: dict[str, Any] = {}
        if self._text_alone:
            words = dict(zip(self._words, bos_and_eos(tokenizer), strict=True))
        with _refusals():
            made = [self._with_content(m, "") for m in messages]
            mark = controls.mark(made, more)
            made, protected = controls.protect([made, dict(more or {})], mark)
        render = functools.partial(self._render_some, made, {**words, **protected})
        return Rendered(render, controls, mark, self._first)

    def _render_some(
        self, made: Messages, words: Mapping[str, Any], count: int, asked: bool
    ) -> str:
        with _refusals():
            return self._render(made[:count], {**words, "add_generation_prompt": asked})

    def _check(self) -> None:
        if self.problem:
            raise UserError(self.problem)

    def _render(self, messages: Messages, more: Mapping[str, Any]) -> str:
        words: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        return self._template.render(messages=list(messages), **{**words, **self._words, **more})

    def _with_content(self, message: Mapping[str, Any], stand: str) -> Mapping[str, Any]:
        """Returns a message whose content has the form that the template reads: text or parts.

        stand: text in the place of an image for which the template has no form."""
        message = _with_arguments(message)
        content = message.get("content")
        content = "" if content is None else content
        if isinstance(content, str):
            if self._takes_texts:
                return {**message, "content": content}
            content = [content]
        if not isinstance(content, list):
            return message
        content = [_text_of(part) for part in content]
        if self._takes_images:
            shown = ({"type": "image"} if p is None else _text(p) for p in content)
            return {**message, "content": [*shown]}
        texts: list[str] = []
        for number, part in enumerate(content):
            if number and part is not None and content[number - 1] is not None:
                texts.append(part)
            elif number:  # nothing is between a placeholder and the text beside it
                texts[-1] += stand if part is None else part
            else:
                texts.append(stand if part is None else part)
        if not self._takes_parts:
            return {**message, "content": BETWEEN.join(texts)}
        return {**message, "content": [_text(text) for text in texts]}

    # ---- the trial

    def _try(self) -> None:
        """Renders a chat of one turn and one of two, and notes in what form the template reads
        contents."""
        first, second, third = PROBES
        one = [{"role": "user", "content": first}]
        two = [*one, {"role": "assistant", "content": second}, {"role": "user", "content": third}]
        text, error = self._attempt(one)
        parts = [{"type": "text", "text": first}, {"type": "text", "text": second}]
        with_parts, _ = self._attempt([{"role": "user", "content": parts}])
        self._takes_parts = first in with_parts and second in with_parts and "{'" not in with_parts
        self._takes_texts = first in text or not self._takes_parts
        if self._image_token is not None and self._takes_parts:
            assert self._tokenizer is not None
            with_image, _ = self._attempt(
                [{"role": "user", "content": [{"type": "image"}, *parts]}]
            )
            ids = self._tokenizer.encode([with_image], True)[0].tolist()
            self._takes_images = ids.count(self._image_token) == 1
        if error is not None and self._takes_texts:
            self.refusal = f"the chat template refuses a message of a user: {error}"
            self.doubts.append(self.refusal)
        elif first not in text and not self._takes_parts:
            self.doubts.append("the chat template leaves out the text of a user's message")
        else:
            text, error = self._attempt([self._with_content(m, "") for m in two])
            if error is not None:
                self.doubts.append(f"the chat template refuses a second turn: {error}")
            elif third not in text:
                self.doubts.append("the chat template leaves out the text of a second turn")

    def _attempt(self, messages: Messages) -> tuple[str, Exception | None]:
        try:
            return self._render(messages, {}), None
        except Exception as error:
            return "", error


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """A template is a program: it can fail in any way. Raises: UserError for all of them."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"the model's chat template refuses these messages: {error}") from None


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _text_of(part: Any) -> str | None:
    """Returns the text of a part of a content; None: it stands for an image."""
    if isinstance(part, Mapping) and part.get("type") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message whose tool calls have objects as arguments where it has texts of JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    made = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                value = files.parse_json(function["arguments"])
            except ValueError:
                value = None
            if isinstance(value, dict):
                call = {**call, "function": {**function, "arguments": value}}
        made.append(call)
    return {**message, "tool_calls": made}


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} renders what is between them.

    transformers marks with it what a model wrote, for masks of training.
    """

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> str:
        return caller()


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    more: dict[str, Any] = {"raise_exception": _raise, "strftime_now": _now}
    made.globals.update(more)
    return made


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


# ---- rows
#
# The mask of a conversation comes from token ids, not from its text. For each message of the
# assistant the conversation is rendered up to it, with the template's request for an answer: that
# is the prompt that a server would make. What follows these ids, up to the token that ends the
# answer, is what a model is to draw.
#
# A template may write earlier messages differently once others follow: Qwen3's leaves the thinking
# out of them, Mistral's moves the system message to the last message of the user. Then the ids of
# the conversation do not begin with the earlier prompt, or its answer stands there otherwise, and
# a model must not learn that answer in this row. `conversation_rows` gives such an answer a row of
# its own, which ends with it.


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A chat whose messages are protected. render(n, asked): the text of its first n messages, if
    `asked` with the request for an answer. first: ids before every text."""

    render: Callable[[int, bool], str]
    controls: ControlTokens
    mark: str
    first: tuple[int, ...]

    def ids(self, text: str) -> list[int]:
        """Returns the ids of a text of `render`, or of its beginning."""
        return [*self.first, *self.controls.encode(text, self.mark)]

    def joined(self, prompt: str, text: str) -> list[int] | None:
        """Returns the ids of a prompt, then those of what a text has behind it, where they mean the
        text; None: they do not.

        A text may be encoded otherwise: its tokenizer may join the last characters of the prompt
        with the first ones of the answer, which a model that draws tokens does not.
        """
        if not text.startswith(prompt):
            return None
        ids = [*self.ids(prompt), *self.controls.encode(text[len(prompt) :], self.mark)]
        decode = functools.partial(self.controls.tokenizer.decode, special=True)
        return ids if decode(ids) == decode(self.ids(text)) else None


@dataclasses.dataclass(frozen=True)
class ChatRow:
    """A conversation to learn from. ids: of all of it. spans: [begin, end) in `ids` of each answer
    that is learnt, its end token included. skipped: {number of a message of the assistant: why it
    is not learnt}."""

    ids: list[int]
    spans: tuple[tuple[int, int], ...]
    skipped: Mapping[int, str]

    @property
    def tokens(self) -> np.ndarray:
        """The ids as int32."""
        return np.array(self.ids, np.int32)

    @property
    def mask(self) -> np.ndarray:
        """Whether each token is learnt, bool."""
        mask = np.zeros(len(self.ids), bool)
        for begin, end in self.spans:
            mask[begin:end] = True
        return mask


def rows(
    messages: Messages, tokenizer: Tokenizer, chat: Chat, more: Mapping[str, Any] | None = None
) -> dict[str, np.ndarray]:
    """Returns a conversation to learn from: its `tokens`, int32 (n,), and `mask`, bool (n,), which
    is True for exactly the ids that an engine would draw: the text of each message of the assistant
    and the token that ends it, without the header.

    Answers that the template writes differently once others follow are not masked, unless it is the
    last one (`conversation_rows` has rows for these).
    Args: chat: of the tokenizer's model. more: other variables of the template, such as `tools`.
    Raises: UserError for a conversation without an answer that can be learnt, with the reason.
    """
    row = learnt_row(messages, tokenizer, chat, more)
    return {"tokens": row.tokens, "mask": row.mask}


def conversation_rows(
    messages: Messages, tokenizer: Tokenizer, chat: Chat, more: Mapping[str, Any] | None = None
) -> list[ChatRow]:
    """Returns rows in which each answer of a conversation is learnt once: the row of all of it, and
    for each answer that the template writes differently later a row that ends with that answer.

    An answer that cannot be learnt at all is in `skipped` of the first row.
    Raises: UserError as `rows`.
    """
    first = learnt_row(messages, tokenizer, chat, more)
    made, skipped = [first], {}
    for number, reason in first.skipped.items():
        try:
            alone = learnt_row(messages[: number + 1], tokenizer, chat, more)
        except UserError:
            skipped[number] = reason
            continue
        if number in alone.skipped:
            skipped[number] = alone.skipped[number]
        else:
            made.append(dataclasses.replace(alone, spans=alone.spans[-1:], skipped={}))
    return [dataclasses.replace(first, skipped=skipped), *made[1:]]


def learnt_row(
    messages: Messages, tokenizer: Tokenizer, chat: Chat, more: Mapping[str, Any] | None = None
) -> ChatRow:
    """Returns the row of `rows`. Raises: UserError as it does."""
    answers = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
    if not answers:
        raise UserError("the conversation has no message of the assistant, so nothing is learnt")
    rendered = chat.rendered(messages, tokenizer, more)
    text = rendered.render(len(messages), False)
    ids, spans, skipped = rendered.ids(text), [], {}
    for number in reversed(answers):
        is_last = number + 1 == len(messages)
        try:  # a template may refuse a chat that ends there, or has no message of a user
            done = text if is_last else rendered.render(number + 1, False)
            prompt = rendered.render(number, True)
        except UserError as error:
            skipped[number] = str(error)
            continue
        try:
            again = rendered.ids(rendered.render(number + 1, True))
        except UserError:
            again = []
        asked = rendered.ids(prompt)
        answered = ids if is_last else rendered.ids(done)
        if answered[: len(asked)] != asked and (joined := rendered.joined(prompt, done)):
            answered = joined
            ids = joined if is_last else ids
        end = _end(answered, again, len(asked), tokenizer.ends, rendered.controls)
        if answered[: len(asked)] != asked:
            skipped[number] = (
                "the prompt that the template makes for it is not the beginning of the chat with "
                "the answer"
            )
        elif end is None:
            skipped[number] = (
                "the template writes no control token behind an answer, so a model would never "
                "learn to stop"
            )
        elif ids[:end] != answered[:end]:
            skipped[number] = "the template writes it differently once other messages follow"
        else:
            spans.append((len(asked), end))
    if not spans:
        raise UserError(f"no answer can be learnt: {skipped[answers[-1]]}")
    return ChatRow(ids, tuple(reversed(spans)), dict(reversed(skipped.items())))


def _end(
    done: list[int], again: list[int], begin: int, ends: Sequence[int], controls: ControlTokens
) -> int | None:
    """Returns the place behind the token that ends an answer, or None if there is none.

    It is the first at which generation stops, else the last control token of those ids that stand
    there whether or not another message follows.
    Args: done: the chat that ends with the answer. again: the same with a request for a second
      answer, or empty. begin: where the answer begins. ends: ids at which generation stops.
    """
    common = len(done)
    if again[:begin] == done[:begin]:
        pairs = zip(done[begin:], again[begin:], strict=False)
        common = next((begin + i for i, (a, b) in enumerate(pairs) if a != b), len(done))
    answer = done[begin:common]
    stops = [i for i, token in enumerate(answer) if token in ends]
    others = [i for i, token in enumerate(answer) if controls.has(token)]
    place = stops[0] if stops else others[-1] if others else None
    return None if place is None else begin + place + 1
