"""The bytes that each id of a tokenizer.json stands for.

Two kinds of published tokenizers are made of bytes, told apart by their decoder: byte-level BPE
(GPT-2, Llama 3, Qwen), whose tokens are spelled in an alphabet of 256 printable characters, and
SentencePiece (Llama 2, Mistral, Gemma), whose tokens are text with '\u2581' for a space, and the
bytes <0x00> to <0xFF> for what has no token. Streams of text and constraints of answers need them:
a token may be half a character.
"""

import re
from collections.abc import Iterator
from typing import Any

from megajax.core.errors import UserError

BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE = "\u2581"


def byte_alphabet() -> dict[str, int]:
    """Returns character -> byte of byte-level BPE (GPT-2, encoder.py): printable ones of Latin-1
    stand for themselves, the others for 256 and what follows, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    printable += range(ord("®"), ord("ÿ") + 1)
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def pieces(decoder: Any, vocab: dict[str, int], added: dict[int, bool]) -> list[bytes | None]:
    """Returns the bytes of each id; None for special ids and those that no token has.

    decoder: of the tokenizer.json. vocab: token -> id, added ones too. added: id of an added token
    -> whether it is special.
    Raises: UserError for a decoder of neither kind.
    """
    kinds = [part.get("type") for part in _parts(decoder)]
    if is_byte_level(decoder):
        alphabet = byte_alphabet()

        def of(token: str, id: int) -> bytes:
            if id in added or not all(c in alphabet for c in token):
                return token.encode(errors="replace")  # as the decoder takes it
            return bytes(alphabet[c] for c in token)

    elif "Metaspace" in kinds or _replaces_space(decoder):
        falls_back = "ByteFallback" in kinds

        def of(token: str, id: int) -> bytes:
            if falls_back and (byte := BYTE.fullmatch(token)):
                return bytes([int(byte[1], 16)])
            return token.replace(SPACE, " ").encode(errors="replace")

    else:
        raise UserError(
            f"the tokens of this tokenizer do not stand for bytes: its decoder is "
            f"{'+'.join(map(str, kinds)) or 'none'}; ByteLevel, Metaspace and the one of "
            "SentencePiece are known (--tokenizer)"
        )
    made: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for token, id in vocab.items():
        if not added.get(id, False):
            made[id] = of(token, id)
    return made


def is_byte_level(decoder: Any) -> bool:
    """Whether tokens are spelled in the alphabet of bytes."""
    return any(part.get("type") == "ByteLevel" for part in _parts(decoder))


def strips_space(decoder: Any) -> bool:
    """Whether the decoder drops a space before the first word, as SentencePiece's does."""
    for part in _parts(decoder):
        if part.get("type") == "Strip" and part.get("content") == " " and part.get("start"):
            return True
        if part.get("type") == "Metaspace":
            return part.get("prepend_scheme", "always") != "never"
    return False


def _parts(decoder: Any) -> Iterator[dict[str, Any]]:
    """Yields a decoder's parts, those of sequences one by one."""
    if isinstance(decoder, dict):
        yield decoder
        for part in decoder.get("decoders") or ():
            yield from _parts(part)


def _replaces_space(decoder: Any) -> bool:
    return any(
        part.get("type") == "Replace"
        and part.get("content") == " "
        and part.get("pattern") == {"String": SPACE}
        for part in _parts(decoder)
    )
