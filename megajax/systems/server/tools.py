"""Tools in chats: functions that a request names, and the calls that a model writes.

The server calls nothing: it gives the functions to the chat template, and reads calls in the
answer. The form of a call is that of the template:

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere (Hermes, Qwen)
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], as the complete answer
llama    {"name": ..., "parameters": {...}}, as the complete answer (Llama 3); several: with ';'

What is no call of one of the request's functions stays text.
"""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from megajax.core.files import parse_json
from megajax.systems.server.base import ApiError

MOST = 128  # (OpenAI) functions of a request
NAME = re.compile(r"[\w-]{1,64}", re.ASCII)  # (OpenAI)
CALL, LIST = "<tool_call>", "[TOOL_CALLS]"

Form = Literal["hermes", "mistral", "llama"]


def form_of(source: str) -> Form | None:
    """Returns the form of calls of a chat template; None: it has no tools."""
    if "tools" not in source:
        return None
    if CALL in source:
        return "hermes"
    if LIST in source:
        return "mistral"
    return "llama" if '"parameters"' in source else None


def check_tools(tools: Sequence[Any]) -> None:
    """Refuses what are no functions. Raises: ApiError."""
    if len(tools) > MOST:
        raise _refused("tools", f"has {len(tools)} functions; at most {MOST}")
    for i, tool in enumerate(tools):
        place = f"tools[{i}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise _refused(place, "must be an object with type='function'")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str) or not NAME.fullmatch(name):
            rule = "must have a name of 1 to 64 letters, digits, '_' or '-'"
            raise _refused(f"{place}.function", rule)
        if not isinstance(function.get("description", ""), str | None):
            raise _refused(f"{place}.function.description", "must be a text")
        if not isinstance(function.get("parameters", {}), dict | None):
            raise _refused(f"{place}.function.parameters", "must be a JSON schema, an object")


def check_calls(message: dict[str, Any], place: str) -> None:
    """Refuses the calls of an assistant's message that are none. Raises: ApiError."""
    calls = message.get("tool_calls")
    if calls is None:
        return
    for i, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or not isinstance(function.get("arguments", ""), str | dict)
        ):
            raise _refused(
                f"{place}.tool_calls[{i}]",
                "must be {'function': {'name': text, 'arguments': text of JSON}}",
            )


def _refused(place: str, rule: str) -> ApiError:
    return ApiError(400, f"{place} {rule}", param=place, code="invalid_value")


class CallReader:
    """Reads the calls of one answer while it grows."""

    def __init__(self, form: Form, names: frozenset[str]):
        """names: of the request's functions."""
        self._form, self._names = form, names
        self._text, self._holds, self._passes = "", False, False
        self._held: list[str] = []

    def add(self, text: str) -> str:
        """Returns what is surely no part of a call."""
        if self._holds:
            self._held.append(text)
            return ""
        self._text += text
        if self._form == "hermes":
            at = self._text.find(CALL)
            self._holds = at >= 0
            if at < 0:  # the beginning of the mark may be at the end
                sizes = range(min(len(CALL) - 1, len(self._text)), 0, -1)
                tail = next((n for n in sizes if CALL.startswith(self._text[-n:])), 0)
                at = len(self._text) - tail
            shown, self._text = self._text[:at], self._text[at:]
            return shown
        begin = self._text.lstrip()
        if not self._passes:
            marks = ("{",) if self._form == "llama" else (LIST, "[{")
            self._holds = begin.startswith(marks)
            if self._holds or not begin or any(mark.startswith(begin) for mark in marks):
                return ""
            self._passes = True
        shown, self._text = self._text, ""
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """Returns (the text that was held back and is no call, the calls)."""
        self._text += "".join(self._held)
        calls = self._calls() if self._holds else None
        made = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(value, ensure_ascii=False)},
            }
            for name, value in calls or ()
        ]
        return ("", made) if made else (self._text, [])

    def _calls(self) -> list[tuple[str, dict[str, Any]]] | None:
        """Returns (name, arguments) of each call; None: something in the text is no call."""
        text = self._text.strip()
        try:
            if self._form == "hermes":
                parts = [p.strip() for p in text.split(CALL)[1:]]
                values = [parse_json(p.removesuffix("</tool_call>")) for p in parts]
            elif self._form == "mistral":
                values = parse_json(text.removeprefix(LIST))
            else:
                values = _objects(text)
        except ValueError:
            return None
        made = []
        for value in values if isinstance(values, list) else [values]:
            if not isinstance(value, dict) or value.get("name") not in self._names:
                return None
            arguments = value.get("arguments", value.get("parameters", {}))
            if not isinstance(arguments, dict):
                return None
            made.append((value["name"], arguments))
        return made


def _objects(text: str) -> list[Any]:
    """Returns the JSON objects of a text, between which there may be ';'. Raises: ValueError."""
    decoder, made, at = json.JSONDecoder(), [], 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            made.append(value)
            at += len(text[at:]) - len(text[at:].lstrip("; \n"))
    except RecursionError as error:
        raise ValueError(f"{error}") from None
    return made
