"""Requests of OpenAI's API, read strictly: members that are unknown or unsupported are refused.

In addition to OpenAI's members, vLLM's "extra parameters" are read: top_k, min_p, min_tokens,
repetition_penalty, stop_token_ids, ignore_eos, priority, include_stop_str_in_output,
add_special_tokens, chat_template_kwargs, add_generation_prompt, structured_outputs. vLLM's older
guided_json, guided_regex and guided_choice are read as members of structured_outputs. parse_special
is llama.cpp's. Members that only say who asks (IGNORED) are ignored, and so are members that other
models heed (HINTS), unless the server is told to refuse those. The limits of numbers are those of
SamplingParams.
"""

import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from megajax.core.errors import UserError, did_you_mean
from megajax.data.tokenizer import prompt_ids
from megajax.serving import SamplingParams, StructuredOutputsParams
from megajax.serving.images import Picture, further
from megajax.serving.params import WHOLE
from megajax.systems.server.base import ApiError
from megajax.systems.server.chat import Chat
from megajax.systems.server.images import ImagePart, ImageReader, part_of
from megajax.systems.server.openapi import Example
from megajax.systems.server.options import HttpOptions
from megajax.systems.server.tools import Form, check_calls, check_tools

STOPS = 16  # (chosen; OpenAI has 4, vLLM no limit) stop strings
STOP = 2**10  # (chosen) characters of each: as many tokens are decoded anew with every token
PROMPTS = 64  # (chosen) prompts of one request
PART = 2**12  # (chosen) tokens whose text is looked at before more is decoded
TEXT = 2**22  # (chosen) characters that /detokenize answers: an id may stand for thousands
ANSWERS = 128  # (OpenAI) n
ROLE = re.compile(r"[\w .-]{1,64}")  # (chosen) templates write a role between parts of tokens
PASSED = (
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "repetition_penalty",
)
WHOLE_NUMBERS = ("top_k", "seed", "priority", "min_tokens")
IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
)
# Members that current clients send and on which no answer of this server depends, with the values
# that are accepted; (): every value.
HINTS: dict[str, tuple[Any, ...]] = {
    "reasoning_effort": (), "verbosity": (), "prediction": (), "parallel_tool_calls": (),
    "include_reasoning": (), "cache_prompt": (), "modalities": (["text"],),
    "function_call": ("none", "auto"), "use_beam_search": (False,), "length_penalty": (1, 1.0),
    "early_stopping": (False,), "spaces_between_special_tokens": (True,),
    "continue_final_message": (False,), "return_token_ids": (False,), "detokenize": (True,),
}  # fmt: skip
JSON = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


# ---- the members of a body


class Fields:
    """The members of a body. Members that have not been taken before `end` are refused."""

    def __init__(self, body: dict[str, Any], where: str = ""):
        """where: prefix of the names in messages, with a dot."""
        self._body, self._where, self._known = body, where, set()  # type: ignore[var-annotated]
        # Of an openapi.Example: the schema of each member that is asked for.
        self._seen: dict[str, dict[str, Any]] = getattr(body, "seen", {})

    def take[T](self, name: str, kind: type[T], default: Any = None) -> Any:
        """Returns the value of a member; the default if the member is missing or null.

        kind: the Python type of its JSON type (KINDS). An integer is accepted as a float, a boolean
        not as a number. `end` accepts the member afterwards. Raises: ApiError for another type.
        """
        self._note(name, type=JSON[kind], default=default)
        value = self._body.get(name)
        if value is None:
            return default
        legal = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not legal or (isinstance(value, bool) and kind is not bool):
            raise self.error(name, f"must be {KINDS[kind]}")
        return value

    def any(self, name: str) -> Any:
        """Returns a member of any type, or None."""
        self._note(name)
        return self._body.get(name)

    def between(self, name: str, low: int, high: int, default: int | None) -> Any:
        """Returns a whole number in a range."""
        value = self.take(name, int, default)
        self._note(name, minimum=low, maximum=high)
        if value is not None and not low <= value <= high:
            raise self.error(name, f"must be from {low} to {high}")
        return value

    def only(self, name: str, legal: Callable[[Any], bool], words: str) -> None:
        """Refuses a member unless its value is legal, or null. words: why."""
        value = self.any(name)
        self._note(name, **getattr(legal, "schema", {}))
        if value is not None and not legal(value):
            raise self.error(name, words)

    def ignore(self, *names: str) -> None:
        """Accepts members whatever their values."""
        for name in names:
            self._note(name)

    def _note(self, name: str, **schema: Any) -> None:
        self._known.add(name)
        self._seen.setdefault(name, {}).update(schema)

    def end(self) -> None:
        """Raises: ApiError for a member that has not been taken."""
        for name in self._body:
            if name not in self._known:
                near = did_you_mean(name, self._known)
                raise ApiError(
                    400,
                    f"there is no member {self._where}{name!s:.80}.{near}",
                    param=f"{self._where}{name!s:.80}",
                    code="unknown_parameter",
                )

    def error(self, name: str, rule: str) -> ApiError:
        """Returns an error about a member."""
        value, full = self._body.get(name), self._where + name
        return ApiError(400, f"{full}={value!r:.100} {rule}", param=full, code="invalid_value")

    def strings(self, name: str, most: int, longest: int) -> list[str]:
        """Returns a member that is a string or a list of some. longest: characters of each."""
        value = self.any(name)
        text = {"type": "string", "maxLength": longest}
        self._note(name, anyOf=[text, {"type": "array", "items": text, "maxItems": most}])
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(s, str) for s in listed):
            raise self.error(name, "must be a string or a list of strings")
        if len(listed) > most:
            raise self.error(name, f"has {len(listed)} strings; at most {most}")
        if (length := max(map(len, listed), default=0)) > longest:
            raise self.error(name, f"has a string of {length} characters; at most {longest}")
        return listed


def is_ids(value: Any) -> bool:
    """Whether a value is a list of token ids."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    )


def none_of(*values: Any) -> Callable[[Any], bool]:
    """Returns a predicate that holds for these values."""

    def legal(value: Any) -> bool:
        return any(type(value) is type(v) and value == v for v in values)

    legal.schema = {"enum": [*values]}  # type: ignore[attr-defined]
    return legal


def empty(value: Any) -> bool:
    """Whether a value is an empty list or object."""
    return isinstance(value, Collection) and not value


empty.schema = {"enum": [[], {}]}  # type: ignore[attr-defined]


def check_model(fields: Fields, names: Sequence[str]) -> str | None:
    """Returns the adapter that a request names as its model; None: the base, the first of names.

    Raises: ApiError for a model of another name.
    """
    name = fields.take("model", str, names[0])
    if name not in names:
        raise ApiError(
            404,
            f"the model {name!r:.200} does not exist; this server has "
            f"{', '.join(map(repr, names))}",
            param="model",
            code="model_not_found",
        )
    return None if name == names[0] else name


# ---- requests


@dataclasses.dataclass(frozen=True)
class Job:
    """The content of a request.

    prompts: token ids of each. echo: for each prompt, the text that its answers begin with.
    logprobs: how many likeliest tokens are listed for each token; None: no log-probabilities. ends:
    ids that end an answer and do not belong to its text. silent: the answer has no token, and only
    the prompt is sent back. images: of the one prompt of a chat, which has a placeholder for each.
    form, names: of the calls of functions that are read in answers; None: none are.
    adapter: that answers; None: the base.
    """

    kind: Literal["completion", "chat"]
    prompts: list[list[int]]
    params: SamplingParams
    echo: list[str]
    stream: bool
    usage: bool
    logprobs: int | None
    include_stop: bool
    ends: frozenset[int]
    silent: bool = False
    images: Sequence[Picture] = ()
    form: Form | None = None
    names: frozenset[str] = frozenset()
    adapter: str | None = None

    @property
    def size(self) -> int:
        """Returns the number of tokens of all prompts; each prompt counts once."""
        return sum(map(len, self.prompts)) + further(self.images)


class Reader:
    """Reads requests for one model."""

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: Any,
        chat: Chat,
        context: int,
        *,
        strict: bool = False,
        parse_special: bool = True,
        sampling: Mapping[str, Any] | None = None,
        images: ImageReader | None = None,
    ):
        """names: of the model, then of its adapters. context: most tokens of prompt and answer.

        strict: refuse HINTS.

        parse_special: whether the text of a special token in a completion's prompt is that token,
          where the request does not say. sampling: members of SamplingParams for requests that
          do not have them. images: reads those of chats; None: the model sees none.
        """
        self._images = images or ImageReader(None, HttpOptions())
        self._sampling = dict(sampling or {})
        self._strict = strict
        self._names, self._tokenizer, self._chat = tuple(names), tokenizer, chat
        self._context, self._special = context, parse_special

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return not self._chat.problem

    def completion(self, body: dict[str, Any]) -> Job:
        """Reads a body of /v1/completions. Raises: ApiError."""
        fields = Fields(body)
        adapter = check_model(fields, self._names)
        prompts, texts = self._prompts(fields)
        logprobs = fields.between("logprobs", 0, 20, None)
        echo = fields.take("echo", bool, False)
        fields.only("suffix", none_of(""), "is not supported")
        fields.only("best_of", none_of(body.get("n") or 1), "must equal n: no answer is dropped")
        most = fields.between("max_tokens", 0, WHOLE, 16)
        if most == 0 and not echo:
            raise fields.error("max_tokens", "must be at least 1, or 0 with echo=true")
        job = self._job(fields, "completion", prompts, most, logprobs, texts if echo else [])
        return dataclasses.replace(job, adapter=adapter)

    def chat(self, body: dict[str, Any]) -> Job:
        """Reads a body of /v1/chat/completions. Raises: ApiError."""
        fields = Fields(body)
        adapter = check_model(fields, self._names)
        prompt, parts = self._chat_prompt(fields, self._context)
        names = frozenset(tool["function"]["name"] for tool in self._tools(fields))
        listed = fields.between("top_logprobs", 0, 20, None)
        has_logprobs = fields.take("logprobs", bool, False)
        if listed is not None and not has_logprobs:
            raise fields.error("top_logprobs", "needs logprobs=true")
        most = fields.between("max_completion_tokens", 1, WHOLE, None)
        older = fields.between("max_tokens", 1, WHOLE, None)
        most = older if most is None else most
        self._check_context(len(prompt), 1)
        logprobs = (listed or 0) if has_logprobs else None
        left = self._context - len(prompt) if most is None else most
        job = self._job(fields, "chat", [prompt], left, logprobs, [])
        form = self._chat.form if names else None
        job = dataclasses.replace(job, form=form, names=names, adapter=adapter)
        if not parts:
            return job
        # Images are decoded last, when nothing else of the request is to be refused.
        images = self._images.read(parts)
        size = len(prompt) + further(images)
        self._check_context(size, 1)
        most = self._context - size if most is None else most
        self._check_context(size, most)
        try:
            params = dataclasses.replace(job.params, max_tokens=most)
        except UserError as error:  # min_tokens is more than the images leave
            raise _refused(error) from None
        return dataclasses.replace(job, params=params, images=images)

    def tokenize(self, body: dict[str, Any]) -> list[int]:
        """Reads a body of /tokenize: a prompt or messages, as the endpoints above read them.

        Returns: its token ids, with one placeholder for each image. Raises: ApiError.
        """
        fields = Fields(body)
        check_model(fields, self._names)
        if fields.any("messages") is not None:
            ids, _ = self._chat_prompt(fields, None)
        else:
            text = fields.take("prompt", str)
            if text is None:
                raise fields.error("prompt", "is missing: give a text, or messages")
            ids = self._prompt(fields, text, None)
        fields.end()
        return ids

    def detokenize(self, body: dict[str, Any]) -> str:
        """Reads a body of /detokenize. Returns: the text of its ids, special tokens too.

        Raises: ApiError, also for a text of more than TEXT characters, which few ids can have.
        """
        fields = Fields(body)
        check_model(fields, self._names)
        ids, most = fields.take("tokens", list), self._tokenizer.vocab - 1
        fields.end()
        if ids is None or (ids and not is_ids(ids)) or not all(0 <= i <= most for i in ids):
            raise ApiError(
                400,
                f"tokens must be a list of ids from 0 to {most}",
                param="tokens",
                code="invalid_value",
            )
        size = 0
        for part in itertools.batched(ids, PART) if len(ids) > PART else ():
            size += len(self._tokenizer.decode(part, special=True))
            if size > TEXT:
                raise ApiError(
                    400,
                    f"the text of these {len(ids)} tokens has over {TEXT} characters; ask for "
                    "it in parts",
                    param="tokens",
                    code="invalid_value",
                )
        return self._tokenizer.decode(ids, special=True)

    def examples(self) -> dict[str, Example]:
        """Returns {path: a body that has been read}, for the document of the endpoints."""
        reader, message = copy.copy(self), {"role": "user", "content": "x"}
        reader._chat = _AnyChat()  # type: ignore  # the members are the same without a template
        text = Example(prompt="x", stream_options=Example(), structured_outputs=Example(regex="x"))
        chat = Example(**{n: text[n] for n in text if n != "prompt"}, messages=[message])
        tokenize, ids = Example(messages=[message]), Example(tokens=[])
        reader.completion(text)
        reader.chat(chat)
        reader.tokenize(tokenize)
        del tokenize["messages"]
        tokenize["prompt"] = "x"
        reader.tokenize(tokenize)
        reader.detokenize(ids)
        return {
            "/v1/completions": text,
            "/v1/chat/completions": chat,
            "/tokenize": tokenize,
            "/detokenize": ids,
        }

    # ---- parts

    def _prompt(self, fields: Fields, text: str, most: int | None) -> list[int]:
        begin = fields.take("add_special_tokens", bool, True)
        special = fields.take("parse_special", bool, self._special)
        return prompt_ids(self._tokenizer, text, special, begin, most)

    def _chat_prompt(self, fields: Fields, most: int | None) -> tuple[list[int], list[ImagePart]]:
        """Returns (token ids with one placeholder an image, the images, not decoded)."""
        more = dict(fields.take("chat_template_kwargs", dict, {}))
        more["add_generation_prompt"] = fields.take("add_generation_prompt", bool, True)
        begin = fields.take("add_special_tokens", bool, False)
        special = fields.take("parse_special", bool, False)
        fields.only("functions", empty, "is not supported: give tools")
        if tools := self._tools(fields):
            more["tools"] = tools
        messages = _messages(fields, self._images.sees)
        contents = (m["content"] for m in messages if isinstance(m["content"], list))
        parts = [part for content in contents for part in content if isinstance(part, ImagePart)]
        self._images.check(parts)
        ids = self._chat.encode(messages, more, special, most)
        return [*self._tokenizer.prefix(), *ids] if begin else ids, parts

    def _tools(self, fields: Fields) -> list[dict[str, Any]]:
        """Returns the functions that the model may ask to be called. Raises: ApiError."""
        tools = fields.take("tools", list, [])
        rule = "is not supported: it may be auto or none, since the model decides"
        fields.only("tool_choice", none_of("none", "auto"), rule)
        if not tools or fields.any("tool_choice") == "none":
            return []
        if self._chat.form is None:
            raise ApiError(
                400, "tools: the model's chat template has none", param="tools", code="no_tools"
            )
        check_tools(tools)
        return tools

    def _prompts(self, fields: Fields) -> tuple[list[list[int]], list[str]]:
        """Returns (token ids, texts) of each prompt."""
        value = fields.any("prompt")
        if value is None:
            raise fields.error("prompt", "is missing: give a text, a list of texts, or token ids")
        listed = value if isinstance(value, list) and not is_ids(value) else [value]
        if not listed or not all(isinstance(p, str) or is_ids(p) for p in listed):
            raise fields.error("prompt", "must be a text, token ids, or a list of one of them")
        if len(listed) > PROMPTS:
            raise ApiError(
                400, f"prompt has {len(listed)} texts; at most {PROMPTS}", param="prompt"
            )
        fields.ignore("add_special_tokens", "parse_special")  # of ids; `_prompt` reads them
        ids, texts = [], []
        for prompt in listed:
            if isinstance(prompt, str):
                ids.append(self._prompt(fields, prompt, self._context))
                self._check_context(len(ids[-1]), 0)
                texts.append(prompt)
            else:
                self._check_context(len(prompt), 0)
                ids.append(prompt)
                texts.append(self._tokenizer.decode([i for i in prompt if 0 <= i < 2**31]))
        if not all(ids):
            raise fields.error("prompt", "must have at least one token")
        return ids, texts

    def _check_context(self, size: int, most: int) -> None:
        """Refuses a prompt of so many tokens. most: that it is to draw."""
        if size + most > self._context:
            raise ApiError(
                400,
                f"the model's context has {self._context} tokens; the prompt has {size}"
                f"{' or more' if size > self._context else ''}, and {most} more are asked "
                "for: shorten the prompt, or max_tokens",
                param="messages" if most == 1 else "max_tokens",
                code="context_length_exceeded",
            )

    def _job(
        self,
        fields: Fields,
        kind: Literal["completion", "chat"],
        prompts: list[list[int]],
        most: int,
        logprobs: int | None,
        echo: list[str],
    ) -> Job:
        silent, most = most == 0, max(most, 1)  # the engine draws at least one token
        for prompt in prompts:
            self._check_context(len(prompt), most)
        stream = fields.take("stream", bool, False)
        options = Fields(fields.take("stream_options", dict, {}), "stream_options.")
        usage = options.take("include_usage", bool, False)
        options.ignore("continuous_usage_stats", "include_obfuscation")
        options.end()
        fields.ignore(*IGNORED)
        for name, legal in HINTS.items():
            if self._strict:
                fields.only(name, none_of(), "changes no answer of this server (--strict_members)")
            elif legal:
                fields.only(name, none_of(*legal), "is not supported")
            else:
                fields.ignore(name)
        fields.only("skip_special_tokens", none_of(True), "is not supported: they have no text")
        include = fields.take("include_stop_str_in_output", bool, False)
        params = self._params(fields, most, logprobs, logprobs if echo else None)
        fields.end()
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= frozenset(self._tokenizer.ends)
        made = prompts, params, echo, stream, usage, logprobs, include, ends, silent
        return Job(kind, *made)

    def _params(
        self, fields: Fields, most: int, logprobs: int | None, prompt_logprobs: int | None
    ) -> SamplingParams:
        members = {name: fields.take(name, float) for name in PASSED}
        members |= {name: fields.take(name, int) for name in WHOLE_NUMBERS}
        members["n"] = fields.between("n", 1, ANSWERS, 1)
        members["logit_bias"] = fields.take("logit_bias", dict)
        members["ignore_eos"] = fields.take("ignore_eos", bool, False)
        stops = fields.take("stop_token_ids", list, [])
        if stops and not is_ids(stops):
            raise fields.error("stop_token_ids", "must be a list of token ids")
        members["stop_token_ids"] = stops
        members["stop"] = fields.strings("stop", STOPS, STOP)
        members["structured_outputs"] = _structured(fields)
        try:
            return SamplingParams(
                max_tokens=most,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                **self._sampling | {n: value for n, value in members.items() if value is not None},
            )
        except UserError as error:
            raise _refused(error) from None


class _AnyChat:
    """A chat template in the place of the model's, for examples."""

    form = None

    def encode(self, *_: Any) -> list[int]:
        return [0]


def _refused(error: UserError) -> ApiError:
    """Returns the error of a request whose SamplingParams are refused, by a message that begins
    with the name of a member."""
    name = str(error).partition("=")[0].partition("[")[0].partition(" ")[0]
    return ApiError(400, str(error), param=name, code="invalid_value")


def _messages(fields: Fields, sees: bool) -> list[dict[str, Any]]:
    """Returns the messages of a chat, whose contents are texts or lists of texts and images.

    sees: whether the model reads images."""
    messages = fields.take("messages", list)
    if not messages:
        raise fields.error("messages", "must be a list of at least one message")
    made = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(
                400, f"messages[{i}] must be an object with a role", param=f"messages[{i}]"
            )
        if not ROLE.fullmatch(message["role"]):
            raise ApiError(
                400,
                f"messages[{i}].role={message['role']!r:.80} must have 1 to 64 letters, "
                "digits, blanks, '.', '_' or '-'",
                param=f"messages[{i}].role",
            )
        content = message.get("content")
        if isinstance(content, list):
            place = f"messages[{i}].content"
            images = [sees and part_of(part, f"{place}[{k}]") for k, part in enumerate(content)]
            content = [image or _text_of(part) for image, part in zip(images, content, strict=True)]
        if None in content if isinstance(content, list) else not isinstance(content, str | None):
            raise ApiError(
                400,
                f"messages[{i}].content must be a text, or a list of parts with texts"
                f"{' or images (image_url)' if sees else '; this model sees no images'}",
                param=f"messages[{i}].content",
            )
        check_calls(message, f"messages[{i}]")
        made.append({**message, "content": content or ""})
    return made


def _text_of(part: Any) -> str | None:
    """Returns the text of a part of a message's content, or None."""
    if isinstance(part, dict):
        part = part.get("refusal" if part.get("type") == "refusal" else "text")
    return part if isinstance(part, str) else None


def _structured(fields: Fields) -> StructuredOutputsParams | None:
    """Returns the form that an answer must have. Several members of a body can set it."""
    forms: list[tuple[str, dict[str, Any]]] = []
    form = fields.take("structured_outputs", dict)
    if form is not None:
        inner = Fields(form, "structured_outputs.")
        forms.append(
            (
                "structured_outputs",
                {n: inner.any(n) for n in ("json", "regex", "choice", "json_object")},
            )
        )
        inner.end()
    for name in ("json", "regex", "choice"):
        if (value := fields.any(f"guided_{name}")) is not None:
            forms.append((f"guided_{name}", {name: value}))
    response_format = fields.take("response_format", dict, {})
    if response_format:
        forms += _response_format(response_format)
    if len(forms) > 1:
        raise ApiError(400, f"{' and '.join(n for n, _ in forms)} exclude each other")
    if not forms:
        return None
    name, values = forms[0]
    try:
        return StructuredOutputsParams(**values)
    except UserError as error:
        raise ApiError(400, str(error), param=name, code="invalid_value") from None


def _response_format(form: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    kind, name = form.get("type"), "response_format"
    if kind == "text":
        return []
    if kind == "json_object":
        return [(name, {"json_object": True})]
    inner = form.get("json_schema")
    if kind == "json_schema" and isinstance(inner, dict):
        return [(name, {"json": inner.get("schema", True)})]
    raise ApiError(
        400,
        "response_format must be {'type': 'text'}, {'type': 'json_object'} or {'type': "
        "'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}",
        param=name,
        code="invalid_value",
    )
