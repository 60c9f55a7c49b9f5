"""Token ids of a chat: only what the template writes becomes a control token.

The chat template of a model joins the texts of messages with control tokens such as <|im_end|>. A
message's own text may contain the same characters, and whoever wrote it could then end the message
and begin one of another role. So the messages are marked before the template runs (`protect`), and
the marks say afterwards which of the control tokens in the result were a message's (`encode`).
transformers does the same on request (5.24: apply_chat_template's sanitize_control_tokens). No jax.
"""

import functools
import json
import math
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from megajax.core.errors import UserError
from megajax.data.tokenizer import PART, JsonTokenizer, Tokenizer

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # (Unicode) never characters of a text


class TooLongError(UserError):
    """Values whose control tokens alone are far more than a prompt may have."""


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
        sizes = [len(text) for text in self._ids]
        self._shortest, self._longest = min(sizes, default=0), max(sizes, default=0)
        self._beginnings = {text[:n] for text in self._ids for n in range(1, len(text))}

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
            return self._tokenizer.encode([text], True, most)[0].tolist()
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
        assert isinstance(self._tokenizer, JsonTokenizer)
        secret = secrets.token_hex(16)
        names = {i: f"{MARKS[-1]}{secret}{i}{MARKS[-1]}" for i in self._ids.values()}
        return names, self._tokenizer.renamed(names)

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
