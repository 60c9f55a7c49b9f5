"""Token ids of a chat: only what the template writes becomes a control token.

The chat template of a model joins the texts of messages with control tokens such as <|im_end|>. A
message's own text may contain the same characters, and whoever wrote it could then end the message
and begin one of another role. So the messages are marked before the template runs (`protect`), and
the marks say afterwards which of the control tokens in the result were a message's (`encode`).
transformers does the same on request (5.24: apply_chat_template's sanitize_control_tokens). No jax.
"""

import functools
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.data.tokenizer import JsonTokenizer, Tokenizer

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # (Unicode) never characters of a text


class ControlTokens:
    """The control tokens of a chat template: the special tokens of the tokenizer, and those of its
    other added tokens that the template writes."""

    def __init__(self, tokenizer: Tokenizer, template: str):
        """template: in Jinja. A tokenizer of bytes has no control tokens."""
        self._tokenizer = tokenizer
        added = tokenizer.added() if isinstance(tokenizer, JsonTokenizer) else {}
        self._ids = {
            text: i
            for i, (text, special) in added.items()
            if special or (text.strip() and text in template)
        }
        self._longest = max(map(len, self._ids), default=0)
        self._beginnings = {text[:n] for text in self._ids for n in range(1, len(text))}

    def mark(self, *values: Any) -> str:
        """Returns a character that none of these values of JSON contains. Raises: UserError."""
        text = json.dumps(values, ensure_ascii=False)
        if (free := next((m for m in MARKS if m not in text), None)) is None:
            raise UserError("the messages contain all of the non-characters U+FDD0 to U+FDEF")
        return free

    def protect(self, value: Any, mark: str) -> Any:
        """Returns a value of JSON with `mark` behind each character of a control token's text.

        Also behind a text that ends like the beginning of one, which what follows may complete.
        """
        if isinstance(value, dict):
            return {self.protect(k, mark): self.protect(v, mark) for k, v in value.items()}
        if isinstance(value, list):
            return [self.protect(v, mark) for v in value]
        if not isinstance(value, str):
            return value
        parts, at = [], 0
        for start, stop in self._find(value):
            parts += [value[at:start], *(c + mark for c in value[start:stop])]
            at = stop
        parts.append(value[at:])
        tails = range(1, min(self._longest, len(value) + 1))
        if any(value[-n:] in self._beginnings for n in tails):
            parts.append(mark)
        return "".join(parts)

    def encode(self, text: str, mark: str, most: int | None = None) -> list[int]:
        """Returns the ids of a text that a template made of values that are marked.

        most: as `Tokenizer.encode`. Raises: UserError.
        """
        if mark not in text:
            return self._tokenizer.encode([text], True, most)[0].tolist()
        names, encode = self._names
        parts, at = [], 0
        for start, stop in self._find(text):
            if text[stop : stop + 1] != mark:  # a mark behind it: a message's
                parts += [text[at:start], names[self._ids[text[start:stop]]]]
                at = stop
        parts.append(text[at:])
        return encode("".join(parts).replace(mark, ""), most).tolist()

    @functools.cached_property
    def _names(self) -> tuple[dict[int, str], Callable[[str, int | None], np.ndarray]]:
        """({id: a name that nobody can guess}, what encodes texts with these names)."""
        assert isinstance(self._tokenizer, JsonTokenizer)
        secret = secrets.token_hex(16)
        names = {i: f"{MARKS[-1]}{secret}{i}{MARKS[-1]}" for i in self._ids.values()}
        return names, self._tokenizer.renamed(names)

    @functools.cached_property
    def _finder(self) -> Any:
        """A tokenizer whose only tokens are control tokens: it finds them in linear time."""
        from tokenizers import AddedToken, Tokenizer, models

        made = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        made.add_special_tokens([AddedToken(text, normalized=False) for text in self._ids])
        return made

    def _find(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields where control tokens are in a text: the leftmost, of those the longest."""
        if not self._ids or not text:
            return
        found = self._finder.encode(text, add_special_tokens=False)
        for i, span in zip(found.ids, found.offsets, strict=True):
            if i:
                yield span
