"""What the ids of a tokenizer.json mean: which of them begin and end a text, and the bytes of each.

The special ids come from the files of a Hugging Face folder, read as transformers 5 reads them. No
jax.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megajax.core import files
from megajax.core.errors import UserError

# ---- special tokens
#
# Source of each id; the first row that applies wins. `begin` and `end` are a document's, `ends`
# stop an answer:
#
# | id | from | note |
# |---|---|---|
# | begin | post_processor of tokenizer.json: the ids before a text | bos_token alone adds none |
# | | no file says anything: a usual name (BEGIN_NAMES) | a bare tokenizer.json, as `bpe:N` |
# | end | post_processor: the ids after a text | |
# | | eos_token: special_tokens_map.json | only without added_tokens_decoder in the next |
# | | eos_token: tokenizer_config.json | text, or object with `content`; null: none |
# | | eos_token: the tokenizer class (EOS_OF_CLASS) | where the member is absent |
# | | the first of eos_token_id: generation_config.json, else config.json | |
# | | no file says anything: a usual name (END_NAMES) | never against a null |
# | | eos_token_id of the model's class (EOS_OF_FAMILY) | nothing names one, nor null |
# | ends | eos_token_id: generation_config.json, else config.json; and `end` | a number or a list |
#
# add_bos_token and add_eos_token do not count if there is a tokenizer.json (transformers drops
# them). If other files are read (vocabulary_files.py), they decide which post_processor is made.


MOST = 1 << 24  # ids of a trained BPE (chosen: the trainer reserves memory for them)
CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
GENERATION = "generation_config.json"
MAX_BYTES = 2**28  # (chosen) of a tokenizer.json: the largest published ones have 2^25
MAX_CONFIG = 2**24  # (chosen) of a config.json
MAX_ID = 2**31 - 1
GAPS = 2**20  # (chosen) ids without a token: tables by id take memory for each of them
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BEGIN_NAMES = ("<|begin_of_text|>", "<|bos|>", "<s>", "<bos>", "<|endoftext|>", "[CLS]")
END_NAMES = ("<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "<|endoftext|>", "[SEP]")
BACKEND = "TokenizersBackend"

# (transformers 5.24, models/*/tokenization_*.py) {class: its bos_token and eos_token by default}.
_LLAMA, _GPT2 = ("<s>", "</s>"), ("<|endoftext|>", "<|endoftext|>")
OF_CLASS: dict[str, tuple[str | None, str | None]] = {
    "GPT2Tokenizer": _GPT2,
    "GPTNeoXTokenizer": _GPT2,
    "Qwen2Tokenizer": (None, _GPT2[1]),
    "Qwen3_5Tokenizer": (None, _GPT2[1]),
    "LlamaTokenizer": _LLAMA,
    "CodeLlamaTokenizer": _LLAMA,
    "RobertaTokenizer": _LLAMA,
    "GemmaTokenizer": ("<bos>", "<eos>"),
    "CohereTokenizer": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "BertTokenizer": (None, None),
    "AlbertTokenizer": ("[CLS]", "[SEP]"),
    "XLMRobertaTokenizer": _LLAMA,
}
# (transformers 5.24, models/auto/tokenization_auto.py) {model_type: class where none is named}.
CLASS_OF_FAMILY = {
    "gpt2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    "mistral": BACKEND,
    "mixtral": BACKEND,
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "albert": "AlbertTokenizer",
}
FORCED = ("qwen2",)  # families whose class transformers takes whatever tokenizer_config.json names
# (transformers 5.24, models/*/configuration_*.py) {model_type: eos_token_id by default}.
EOS_OF_FAMILY = {"llama": 2, "mistral": 2, "mixtral": 2, "gpt2": 50256, "roberta": 2, "albert": 3}


@dataclass(frozen=True)
class Settings:
    """The settings in the files of a tokenizer's folder.

    tokens: {member of NAMES: its text; None: a file has null}; members that no file has are left
    out. eos_ids: the values of eos_token_id, at which generation stops; None: no file has it.
    default_eos: the ids to use instead: those of config.json if generation_config.json has none,
    else those of the model family. silent: no file states a special token. tokenizer_class: the
    class that transformers chooses. members: of tokenizer_config.json.
    """

    tokens: Mapping[str, str | None] = field(default_factory=dict)
    eos_ids: tuple[int, ...] | None = None
    default_eos: int | None = None
    silent: bool = True
    tokenizer_class: str = BACKEND
    members: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None  # in Jinja, where the file of the tokenizer has it inside


def read_settings(folder: Path, byte_level: bool = True) -> Settings:
    """Returns what the files of a folder say about special tokens.

    byte_level: whether the tokenizer's tokens are bytes: transformers then takes LlamaTokenizer for
      its plain class. Raises: UserError for a file that is damaged.
    """
    config = _read(folder / CONFIG, MAX_BYTES)
    members = dict(config or {})
    said = config is not None
    if "added_tokens_decoder" not in members and (listed := _read(folder / MAP, MAX_BYTES)):
        members |= listed
        said = True
    model = _read(folder / "config.json", MAX_CONFIG) or {}
    if not isinstance(model.get("model_type", model.get("architectures")), str | list):
        model = {}  # of a run of ours
    family = model.get("model_type")
    kind = tokenizer_class(
        members.get("tokenizer_class") or model.get("tokenizer_class"), family, byte_level
    )
    tokens = {key: _token(members[key], key, folder) for key in NAMES if key in members}
    if said and kind in OF_CLASS:
        for key, name in zip(("bos_token", "eos_token"), OF_CLASS[kind], strict=True):
            tokens.setdefault(key, name)
    generation = _read(folder / GENERATION, MAX_CONFIG)
    ids, default = None, None
    source, file = (model, "config.json") if generation is None else (generation, GENERATION)
    if "eos_token_id" in source:
        ids = id_list(source["eos_token_id"], folder / file)
    elif "eos_token_id" in model:  # transformers then stops at nothing; documents need an end
        default = next(iter(id_list(model["eos_token_id"], folder / "config.json")), None)
    elif generation is None:
        default = EOS_OF_FAMILY.get(str(family))
    return Settings(tokens, ids, default, not said, kind, members)


def tokenizer_class(named: Any, family: Any, byte_level: bool) -> str:
    """Returns the class that transformers' AutoTokenizer takes, without its ending Fast.

    named: by tokenizer_config.json, else config.json. family: model_type, or None.
    """
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    usual = CLASS_OF_FAMILY.get(family) if isinstance(family, str) else None
    if named in ("PreTrainedTokenizer", "PythonBackend"):
        named = BACKEND
    if family in FORCED:
        return usual or BACKEND
    if named is None:
        return usual or BACKEND
    if named == "LlamaTokenizer" and byte_level or usual == BACKEND:
        return BACKEND
    return named


@dataclass(frozen=True)
class Special:
    """The special ids of a tokenizer.

    begin, end: the ids around a document. ends: the ids that end an answer.
    """

    begin: int | None
    end: int | None
    ends: tuple[int, ...]


def resolve(
    settings: Settings, post_processor: Any, vocab: Mapping[str, int], name: str
) -> Special:
    """Returns the special ids, by the table above.

    Args: post_processor: of the tokenizer.json. vocab: token -> id. name: of the tokenizer.
    Raises: UserError for an eos_token that is no token, for an id that no token has, and for
      several tokens before a text.
    """
    before, after = template_ids(post_processor)
    if len(before) > 1 or len(after) > 1:
        raise UserError(
            f"{name}: its post_processor puts {len(before)} tokens before a text and {len(after)} "
            "behind it; at most 1 on each side is known (--data.tokenizer)"
        )
    silent = settings.silent and post_processor is None
    begin = before[0] if before else _usual(BEGIN_NAMES, vocab) if silent else None
    eos = settings.tokens.get("eos_token")
    if eos is not None and eos not in vocab:
        if settings.members.get("eos_token") is not None or not settings.members:
            raise UserError(
                f"{name}: eos_token is {eos!r:.60}, which is none of its tokens "
                f"({CONFIG}, {MAP}, --data.tokenizer)"
            )
        eos = None  # only the class names it
    listed = settings.eos_ids
    end = after[0] if after else vocab[eos] if eos is not None else None
    if end is None and listed:
        end = listed[0]
    if end is None and settings.silent and listed is None:
        end = _usual(END_NAMES, vocab)
    default = settings.default_eos
    if end is None and default is not None and default <= max(vocab.values(), default=-1):
        end = default
    ends = dict.fromkeys((*(listed or ()), *(() if end is None else (end,))))
    return Special(begin, end, tuple(ends))


def template_ids(post_processor: Any) -> tuple[list[int], list[int]]:
    """Returns (ids before, ids behind) that a post_processor of a tokenizer.json adds to a text."""
    if not isinstance(post_processor, dict):
        return [], []
    kind = post_processor.get("type")
    if kind in ("RobertaProcessing", "BertProcessing"):
        return [post_processor["cls"][1]], [post_processor["sep"][1]]
    before: list[int] = []
    after: list[int] = []
    if kind == "Sequence":
        for part in post_processor["processors"]:
            more = template_ids(part)
            before, after = more[0] + before, after + more[1]
    if kind == "TemplateProcessing":
        side = before
        for piece in post_processor["single"]:
            if "Sequence" in piece:
                side = after
            else:
                side += post_processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return before, after


def check_largest(largest: int, tokens: int, name: str | Path) -> None:
    """Raises: UserError for ids that do not fit 32 bits, and for ids that are nearly all gaps.

    largest: id. tokens: how many. name: of the tokenizer or its file."""
    most = min(MAX_ID, tokens + GAPS)
    if largest > most:
        raise UserError(
            f"{name} has {tokens:,} tokens and the id {largest}; the largest legal one is {most} "
            f"(32 bits, and at most {GAPS:,} ids without a token) (--data.tokenizer)"
        )


def id_list(value: Any, file: Path) -> tuple[int, ...]:
    """Returns eos_token_id as a tuple; null is an empty one. Raises: UserError."""
    listed = value if isinstance(value, list) else [] if value is None else [value]
    good = [i for i in listed if isinstance(i, int) and not isinstance(i, bool)]
    if len(good) < len(listed) or any(i > MAX_ID for i in good):
        raise UserError(
            f"{file}: eos_token_id is {reprlib.repr(value):.60}; it must be an id, a list of ids, "
            "or null"
        )
    return tuple(i for i in good if i >= 0)  # some write -1 for none


def template(begin: tuple[str, int] | None, end: tuple[str, int] | None = None) -> dict[str, Any]:
    """Returns the post_processor of a tokenizer.json that puts these tokens around a text."""
    named = [token for token in (begin, end) if token is not None]

    def around(sequence: str, type_id: int) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = [{"Sequence": {"id": sequence, "type_id": type_id}}]
        sides = [
            [{"SpecialToken": {"id": t[0], "type_id": type_id}}] if t else [] for t in (begin, end)
        ]
        return sides[0] + parts + sides[1]

    return {
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0) + around("B", 1),
        "special_tokens": {t: {"id": t, "ids": [i], "tokens": [t]} for t, i in named},
    }


def _usual(names: tuple[str, ...], vocab: Mapping[str, int]) -> int | None:
    return next((vocab[n] for n in names if n in vocab), None)


def _read(file: Path, most: int) -> dict[str, Any] | None:
    return files.read_object(file, most, "data.tokenizer") if file.is_file() else None


def _token(value: Any, key: str, folder: Path) -> str | None:
    """Returns the text of a special token."""
    token = value.get("content") if isinstance(value, dict) else value
    if value is not None and not (isinstance(token, str) and is_unicode(token)):
        raise UserError(
            f"{folder / CONFIG}: {key} is {reprlib.repr(value):.40}; it must be a string of "
            "Unicode characters, an object whose member content is one, or null "
            "(--data.tokenizer)"
        )
    return token or None


def is_unicode(text: str) -> bool:
    """Whether text can be written as UTF-8: JSON may escape half of a surrogate pair."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


# ---- bytes
#
# The bytes that each id stands for. Two kinds of published tokenizers are made of bytes, told apart
# by their decoder: byte-level BPE (GPT-2, Llama 3, Qwen), whose tokens are spelled in an alphabet
# of 256 printable characters, and SentencePiece (Llama 2, Mistral, Gemma), whose tokens are text
# with '▁' for a space, and the bytes <0x00> to <0xFF> for what has no token. Streams of text and
# constraints of answers need them: a token may be half a character.


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
