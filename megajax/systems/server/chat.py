"""Prompts from the messages of a chat, by the chat template of the model.

A template is a Jinja program that comes with the model; it runs in Jinja's sandbox, which gives it
access to its variables only. Its variables and functions are those of transformers (5.24,
utils/chat_template_utils.py). data/chat.py tells the control tokens of a template from the text of
messages.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from megajax.core.errors import UserError
from megajax.data.chat import ControlTokens, TooLongError
from megajax.data.tokenizer import Tokenizer
from megajax.systems.open_model import ChatTemplate
from megajax.systems.server.base import ApiError
from megajax.systems.server.images import ImagePart

BETWEEN = "\n"  # (vLLM, llama.cpp) joins the texts of one message
PROBES = ("first probe", "second probe", "third probe")  # (chosen) texts of the trial's messages

type Messages = Sequence[Mapping[str, Any]]


class Chat:
    """A compiled chat template.

    problem: why every chat is refused, or "". refusal: why the template refuses a chat of one
    message of a user, or "". doubts: warnings of the trial of the template, with the refusal.
    """

    def __init__(
        self, template: ChatTemplate | None, tokenizer: Tokenizer, image_token: int | None = None
    ):
        """template: if it is None or does not compile, every chat is refused with the reason.
        image_token: the placeholder of an image; None: the model sees none."""
        self.problem, self.refusal, self.doubts = "", "", []  # type: ignore[var-annotated]
        self._tokenizer, self._takes_texts, self._takes_parts = tokenizer, True, False
        self._image_token, self._takes_images = image_token, False
        source, self._first = ("", ()) if template is None else (template.source, template.first)
        self._controls = ControlTokens(tokenizer, source)
        if template is None:
            self.problem = (
                "this model has no chat template; use /v1/completions, or start the server with "
                "--chat_template=FILE"
            )
            return
        self._words = {"bos_token": template.begin, "eos_token": template.end}
        try:
            self._template = _environment().from_string(source)
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

    def prompt(self, messages: Messages, more: Mapping[str, Any]) -> str:
        """Returns the text of a chat, up to where the assistant answers.

        more: other variables of the template. Raises: ApiError.
        """
        self._check()
        try:
            return self._render([self._with_content(m, "") for m in messages], more)
        except Exception as error:  # a template is a program: it can fail in any way
            raise _refused(error) from None

    def encode(
        self,
        messages: Messages,
        more: Mapping[str, Any],
        special: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a chat. Only the template writes control tokens.

        An image becomes one placeholder, with what the template writes around it, if it has a form
        for images.

        Args: messages, more: as of `prompt`. special: whether the text of special tokens in
          messages becomes these tokens too. most: as `Tokenizer.encode`. Raises: ApiError.
        """
        self._check()
        if most is not None and len(messages) > 2 * most:
            raise _too_long(most, f"there are {len(messages)} messages")
        controls = self._controls
        try:
            # A character that no text contains stands for an image until texts are ids.
            stand = controls.mark([self._with_content(m, "") for m in messages], more)
            made = [self._with_content(m, stand) for m in messages]
            mark = controls.mark(made, more, stand)
            if not special:
                made, more = controls.protect([made, dict(more)], mark, most)
            text = self._render(made, more)
        except TooLongError as error:
            raise _too_long(most, str(error)) from None
        except Exception as error:
            raise _refused(error) from None
        first, *others = text.split(stand)
        ids = [*self._first, *controls.encode(first, mark, most)]
        for part in others:
            assert self._image_token is not None
            ids += [self._image_token, *(controls.encode(part, mark, most) if part else [])]
        return ids

    def _check(self) -> None:
        if self.problem:
            raise ApiError(400, self.problem, param="messages", code="no_chat_template")

    def _render(self, messages: Messages, more: Mapping[str, Any]) -> str:
        words: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        return self._template.render(messages=list(messages), **{**words, **self._words, **more})

    def _with_content(self, message: Mapping[str, Any], stand: str) -> Mapping[str, Any]:
        """Returns a message whose content has the form that the template reads: text or parts.

        stand: text in the place of an image for which the template has no form."""
        content = message.get("content")
        if isinstance(content, str):
            if self._takes_texts:
                return message
            content = [content]
        if not isinstance(content, list):
            return message
        if self._takes_images:
            shown = ({"type": "image"} if isinstance(part, ImagePart) else part for part in content)
            return {**message, "content": [_text(p) if isinstance(p, str) else p for p in shown]}
        texts: list[str] = []
        for number, part in enumerate(content):
            is_image = isinstance(part, ImagePart)
            if number and not is_image and not isinstance(content[number - 1], ImagePart):
                texts.append(part)
            elif number:  # nothing is between a placeholder and the text beside it
                texts[-1] += stand if is_image else part
            else:
                texts.append(stand if is_image else part)
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


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _too_long(most: int | None, reason: str) -> ApiError:
    return ApiError(
        400,
        f"the model's context has {most} tokens; {reason}: shorten the messages",
        param="messages",
        code="context_length_exceeded",
    )


def _refused(error: Exception) -> ApiError:
    if isinstance(error, UserError):
        return ApiError(400, str(error), param="messages")
    return ApiError(
        400, f"the model's chat template refuses these messages: {error}", param="messages"
    )


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
