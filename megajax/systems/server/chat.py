"""The chats of requests: data/chat.py with the errors of a server, and images.

Here a part of a content that is an image is an ImagePart (images.py).
"""

from collections.abc import Mapping
from typing import Any

from megajax.core.errors import UserError
from megajax.data import chat as chat_
from megajax.data.chat import ChatTemplate, Messages, TooLongError
from megajax.data.tokenizer import Tokenizer
from megajax.systems.server.base import ApiError
from megajax.systems.server.tools import form_of


class Chat:
    """A chat template that refuses with answers of HTTP. problem, refusal, doubts: as of
    data.chat.Chat. form: of the calls of functions; None: the template has no tools."""

    def __init__(
        self, template: ChatTemplate | None, tokenizer: Tokenizer, image_token: int | None = None
    ):
        """Args: as of data.chat.Chat."""
        self._chat = chat_.Chat(template, tokenizer, image_token)
        self.problem, self.refusal = self._chat.problem, self._chat.refusal
        self.doubts = self._chat.doubts
        self.form = None if template is None else form_of(template.source)
        if template is None:
            self.problem = (
                "this model has no chat template; use /v1/completions, or start the server with "
                "--chat_template=FILE"
            )

    def prompt(self, messages: Messages, more: Mapping[str, Any]) -> str:
        """Returns the text of a chat, up to where the assistant answers. Raises: ApiError."""
        self._check()
        try:
            return self._chat.prompt(messages, more)
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None

    def encode(
        self,
        messages: Messages,
        more: Mapping[str, Any],
        special: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """Returns the token ids of a chat, as data.chat.Chat does. Raises: ApiError."""
        self._check()
        try:
            return self._chat.encode(messages, more, special, most)
        except TooLongError as error:
            raise ApiError(
                400,
                f"the model's context has {most} tokens; {error}: shorten the messages",
                param="messages",
                code="context_length_exceeded",
            ) from None
        except UserError as error:
            raise ApiError(400, str(error), param="messages") from None

    def _check(self) -> None:
        if self.problem:
            raise ApiError(400, self.problem, param="messages", code="no_chat_template")
