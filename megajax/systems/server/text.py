"""Text from tokens as they come: no half characters, and nothing behind a stop string.

The text of an answer is the bytes of its tokens, read as UTF-8, where each longest invalid part is
one replacement character. A token may end inside a character; what is incomplete waits for the next
token. So the pieces of a stream, put together, are the text that is sent without streaming.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from megajax.core.errors import UserError

UNKNOWN = "\ufffd"


class Decoder:
    """Turns the tokens of one answer into text."""

    def __init__(self, tokenizer: Any, pieces: Sequence[bytes | None] | None, strip: bool):
        """pieces: of the tokenizer; None: it has none, and decodes the whole answer every time.

        strip: drop a space before the first word, as SentencePiece's decoders do; a text that goes
        on behind another one needs it.
        """
        self._tokenizer, self._pieces, self._strip = tokenizer, pieces, strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens: list[int] = []
        self._sent = ""

    def add(self, token: int) -> str:
        """Returns the text that is complete with this token."""
        if self._pieces is None:
            self._tokens.append(token)
            return self._grow(final=False)
        piece = (self._pieces[token] if token < len(self._pieces) else None) or b""
        if self._strip and piece:
            self._strip, piece = False, piece.removeprefix(b" ")
        return self._utf8.decode(piece)

    def finish(self) -> str:
        """Returns the text of bytes that no token completed."""
        return self._grow(final=True) if self._pieces is None else self._utf8.decode(b"", True)

    def _grow(self, final: bool) -> str:
        text = self._tokenizer.decode(self._tokens)
        if not final:  # it may be the beginning of a character
            text = text.rstrip(UNKNOWN)
        if not text.startswith(self._sent):
            return ""
        new, self._sent = text[len(self._sent) :], text
        return new


def pieces_of(tokenizer: Any) -> Sequence[bytes | None] | None:
    """Returns the bytes of a tokenizer's ids, or None where they do not stand for bytes."""
    try:
        return tokenizer.pieces()
    except (AttributeError, UserError):
        return None


class Stopper:
    """Holds text back that may be the beginning of a stop string, and cuts at a whole one."""

    def __init__(self, stops: Sequence[str], include: bool = False):
        """include: the stop string is part of the text."""
        self._stops, self._include, self._held = tuple(stops), include, ""
        self.stopped = False

    def add(self, text: str) -> str:
        """Returns what may be shown now. After a stop string that is nothing."""
        if self.stopped:
            return ""
        text, self._held = self._held + text, ""
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            at, stop = min(found, key=lambda pair: pair[0])
            return text[: at + len(stop) * self._include]
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                self._held = text[-size:]
                return text[:-size]
        return text

    def finish(self) -> str:
        """Returns what was held back, when nothing follows."""
        held, self._held = self._held, ""
        return held
