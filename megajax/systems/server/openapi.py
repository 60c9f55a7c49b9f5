"""The OpenAPI document of a server, made of what its readers ask of a request.

A reader takes each member of a body with its type, its limits and its default (`protocol.Fields`).
It reads an Example of each endpoint once, which notes them; so the document says what is checked.
Meanings and limits of sampling members are those of SamplingParams. Only what a reader checks
without Fields is written here: the shapes of messages, of forms and of answers.
Source: OpenAPI 3.1.1, whose schemas are those of JSON Schema 2020-12.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import megajax
from megajax.serving.params import BIAS, WHOLE, SamplingParams

type Schema = dict[str, Any]


class Example(dict[str, Any]):
    """A body that a reader reads. seen: {member: schema of what it asked}."""

    def __init__(self, **members: Any):
        """members: of the body, those of objects Examples themselves."""
        super().__init__(members)
        self.seen: dict[str, Schema] = {}


@dataclasses.dataclass(frozen=True)
class Operation:
    """An endpoint. answer: schema of its JSON, or the content type of an answer that is none.
    required: members of its body. either: members of which it must have one. streams: whether the
    answer can be server-sent events."""

    summary: str
    answer: Schema | str
    required: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    streams: bool = False


# ---- schemas


def thing(**members: Schema) -> Schema:
    """Returns the schema of an object that has all of these members, and may have others."""
    return {"type": "object", "properties": members, "required": [*members]}


def listed(schema: Schema, **limits: int) -> Schema:
    """Returns the schema of a list."""
    return {"type": "array", "items": schema} | limits


def ref(name: str) -> Schema:
    """Returns a reference to a schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
IDS = listed({"type": "integer"})
USAGE = thing(prompt_tokens=COUNT, total_tokens=COUNT)
DRAWN = thing(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
MODEL = thing(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT)
REASON: Schema = {"enum": ["stop", "length", "tool_calls"]}


def answer(kind: str, **choice: Schema) -> Schema:
    """Returns the schema of drawn answers."""
    choices = listed(thing(index=COUNT, finish_reason=REASON, **choice))
    return thing(
        id=TEXT, object={"const": kind}, created=COUNT, model=TEXT, choices=choices, usage=DRAWN
    )


SCHEMAS: dict[str, Schema] = {
    "Error": thing(
        error=thing(
            message=TEXT,
            type=TEXT,
            param={"type": ["string", "null"]},
            code={"type": ["string", "null"]},
        )
    ),
    "Message": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "pattern": r"^[A-Za-z0-9_ .-]{1,64}$"},
            "content": {
                "anyOf": [
                    {"type": ["string", "null"]},
                    listed({"type": "object", "properties": {"type": TEXT, "text": TEXT}}),
                ]
            },
        },
    },
    "Tool": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                },
            },
        },
    },
    "ResponseFormat": {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "properties": {"schema": {}}},
        },
    },
}
# Schemas of members that their readers check without Fields.
SHAPES: dict[str, Schema] = {
    "messages": listed(ref("Message"), minItems=1),
    "prompt": {"anyOf": [TEXT, IDS, listed(TEXT), listed(IDS)]},
    "input": {"anyOf": [TEXT, IDS, listed(TEXT), listed(IDS)]},
    "stop_token_ids": listed({"type": "integer", "minimum": 0, "maximum": WHOLE}),
    "tokens": listed({"type": "integer", "minimum": 0}),
    "best_of": {"type": "integer", "minimum": 1},
    "tools": listed(ref("Tool"), maxItems=128),
    "response_format": ref("ResponseFormat"),
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -BIAS, "maximum": BIAS},
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
    },
}
ABOUT = {
    "model": "name of the model; it may be left out",
    "prompt": "text to continue, token ids, or a list of one of them",
    "messages": "the messages of the chat, of which the template of the model makes a prompt",
    "max_tokens": SamplingParams.__dataclass_fields__["max_tokens"].metadata["help"],
    "max_completion_tokens": "OpenAI's newer name of max_tokens",
    "stream": "whether the answer comes as server-sent events while it is drawn",
    "stream_options": "include_usage: an event with the numbers of tokens before the last one",
    "echo": "whether the answer begins with the prompt",
    "logprobs": "log-probabilities: of a completion the number of likeliest tokens, of a chat "
    "whether there are any",
    "top_logprobs": "number of likeliest tokens that are listed in the place of each",
    "stop": "texts at which the answer ends; they are no part of it",
    "stop_token_ids": "tokens at which the answer ends",
    "include_stop_str_in_output": "whether a stop text is part of the answer",
    "ignore_eos": "whether the model's end tokens end no answer",
    "logit_bias": "{token id: number that is added to its logit}",
    "add_special_tokens": "whether the token that begins documents comes before the prompt",
    "parse_special": "whether the text of a special token is that token",
    "add_generation_prompt": "whether the template ends with the beginning of an answer",
    "chat_template_kwargs": "further variables of the chat template",
    "response_format": "the form of the answer: text, a JSON object, or one of a schema",
    "structured_outputs": "the form of the answer: json (a schema), regex, choice or json_object",
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "tokens": "token ids",
    "suffix": "text behind the answer, which no model here is given",
    "best_of": "must equal n: no answer is dropped",
    "skip_special_tokens": "whether special tokens have no text, as here",
    "tools": "functions that the model may ask to be called",
    "tool_choice": "auto: the model decides; none: as without tools",
    "input": "a text, token ids, or a list of one of them",
    "encoding_format": "form of a vector: a list of numbers, or float32 in base64",
    "dimensions": "length of the vector, which has to be the model's",
    "truncate": "whether an input that is too long is cut; if not, it is refused",
}
OPERATIONS: dict[str, Operation] = {
    "/v1/completions": Operation(
        "Continues texts, or lists of token ids.",
        answer("text_completion", text=TEXT),
        ("prompt",),
        streams=True,
    ),
    "/v1/chat/completions": Operation(
        "Answers messages, through the model's chat template.",
        answer("chat.completion", message=thing(role=TEXT)),
        ("messages",),
        streams=True,
    ),
    "/v1/embeddings": Operation(
        "Vectors of texts, or of lists of token ids.",
        thing(
            object={"const": "list"},
            data=listed(
                thing(
                    object={"const": "embedding"},
                    index=COUNT,
                    embedding={"anyOf": [listed(NUMBER), TEXT]},
                )
            ),
            model=TEXT,
            usage=USAGE,
        ),
        ("input",),
    ),
    "/v1/classify": Operation(
        "Probabilities of classes of texts, or of lists of token ids.",
        thing(
            object={"const": "list"},
            data=listed(thing(index=COUNT, label=TEXT, probs=listed(NUMBER), num_classes=COUNT)),
            labels=listed(TEXT),
            model=TEXT,
            usage=USAGE,
        ),
        ("input",),
    ),
    "/v1/models": Operation("The model.", thing(object={"const": "list"}, data=listed(MODEL))),
    "/v1/models/{name}": Operation("The model of this name.", MODEL),
    "/tokenize": Operation(
        "The token ids of a prompt or of messages, as a completion or a chat would read them.",
        thing(tokens=IDS, count=COUNT, max_model_len=COUNT),
        either=("prompt", "messages"),
    ),
    "/detokenize": Operation(
        "The text of token ids, that of special tokens too.", thing(prompt=TEXT), ("tokens",)
    ),
    "/version": Operation("The version of megajax.", thing(version=TEXT)),
    "/health": Operation(
        "Whether requests are answered: 200, or 503 with the reason.", thing(status=TEXT)
    ),
    "/metrics": Operation("Counters and histograms for Prometheus.", "text/plain"),
    "/": Operation("A page to chat with the model.", "text/html"),
    "/docs": Operation("This document as a page.", "text/html"),
    "/openapi.json": Operation("This document.", thing(openapi=TEXT)),
}


# ---- the document


def document(
    endpoints: Iterable[tuple[str, str]], examples: Mapping[str, Example], keys: bool
) -> Schema:
    """Returns the OpenAPI document of a server.

    endpoints: (path, method) of each. examples: what the readers of bodies have read. keys: whether
    a request must have a key.
    """
    paths: dict[str, Any] = {}
    for path, method in endpoints:
        path = path.replace(":path}", "}")
        paths[path] = {method.lower(): _operation(path, examples.get(path), keys)}
    schemes = {"key": {"type": "http", "scheme": "bearer"}} if keys else {}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "megajax",
            "version": megajax.__version__,
            "description": "A model behind OpenAI's interface.",
        },
        "paths": paths,
        "components": {"schemas": SCHEMAS, "securitySchemes": schemes},
    }


def _operation(path: str, example: Example | None, keys: bool) -> dict[str, Any]:
    about = OPERATIONS[path]
    kind = about.answer if isinstance(about.answer, str) else "application/json"
    content: Schema = {kind: {"schema": TEXT if kind is about.answer else about.answer}}
    if about.streams:
        content["text/event-stream"] = {"schema": TEXT}
    error = {"content": {"application/json": {"schema": ref("Error")}}}
    made: dict[str, Any] = {
        "summary": about.summary,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "4XX": {"description": "The request is refused.", **error},
            "5XX": {"description": "The server cannot answer.", **error},
        },
    }
    if keys and path.startswith(("/v1", "/tok", "/detok", "/version")):
        made["security"] = [{"key": []}]
    if "{name}" in path:
        made["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    if example is not None:
        schema = body_of(example, (*about.required, *about.either))
        schema["required"] = [*about.required]
        if about.either:
            schema["anyOf"] = [{"required": [name]} for name in about.either]
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return made


def body_of(example: Example, needed: Sequence[str] = ()) -> Schema:
    """Returns the schema of a body, of what its reader asked of an example. needed: members that
    null does not leave out."""
    members = {
        name: _member(name, schema, example, name in needed)
        for name, schema in example.seen.items()
    }
    return {"type": "object", "properties": members, "additionalProperties": False}


def _member(name: str, schema: Schema, example: Example, needed: bool) -> Schema:
    inner, default = example.get(name), schema.get("default")
    shape = {key: value for key, value in schema.items() if key != "default"}
    if isinstance(inner, Example):
        shape = body_of(inner)
    elif shape.get("type") in (None, "array", "object"):  # of which readers check more themselves
        shape = SHAPES.get(name, shape)
    sampling, about = SamplingParams.__dataclass_fields__.get(name), ABOUT.get(name, "")
    if sampling is not None and "limits" in sampling.metadata and name not in ABOUT:
        about, limits = sampling.metadata["help"], sampling.metadata["limits"]
        pairs = ("minimum", limits.at_least), ("maximum", limits.at_most)
        pairs += (("exclusiveMinimum", limits.above),)
        shape = {key: value for key, value in pairs if value is not None} | shape
    shape = shape if needed else _or_null(shape)
    made = {**shape, "description": about or "accepted from clients of other servers"}
    return made if default in (None, {}, []) else made | {"default": default}


def _or_null(schema: Schema) -> Schema:
    """Returns a schema that allows null, which every reader takes for a missing member."""
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return schema | {"type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]} if schema else {}
