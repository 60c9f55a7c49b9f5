"""Prompts from the messages of a chat, by the chat template of the model.

Templates are Jinja programs of whoever made the model; they run in Jinja's sandbox, which keeps
them from everything but their variables. What they may call is what Hugging Face's transformers
gives them (chat template documentation): raise_exception, strftime_now, and the filter tojson.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from megajax.systems.open_model import ChatTemplate
from megajax.systems.server.errors import ApiError


class Chat:
    """A compiled chat template."""

    def __init__(self, template: ChatTemplate | None):
        """None, or a template that cannot be compiled: every chat is refused, and told why."""
        self._template, self._problem, self._words = None, "", {}
        if template is None:
            self._problem = (
                "this model has no chat template; use /v1/completions, or start the server with "
                "--chat_template=FILE"
            )
            return
        self._words = {"bos_token": template.begin, "eos_token": template.end}
        try:
            self._template = _environment().from_string(template.source)
        except jinja2.TemplateError as error:
            self._problem = f"this model's chat template cannot be compiled: {error}"

    def prompt(self, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any]) -> str:
        """Returns the text of a chat, up to where the assistant answers.

        more: other variables of the template. Raises: ApiError.
        """
        if self._template is None:
            raise ApiError(400, self._problem, param="messages", code="no_chat_template")
        words = {"add_generation_prompt": True, **self._words, **more}
        try:
            return self._template.render(messages=list(messages), **words)
        except Exception as error:  # a template is a program: it can fail in any way
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _to_json
    more: dict[str, Any] = {"raise_exception": _raise, "strftime_now": _now}
    made.globals.update(more)
    return made


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
