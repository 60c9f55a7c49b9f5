"""Tokenizers that lie in other files than tokenizer.json, made into one as transformers 5 does.

| files | classes (tokenizer_config.json, else the model's family) | words are cut by |
|---|---|---|
| vocab.json, merges.txt | GPT2, Roberta, Bart, Qwen2, GPTNeoX | the class: byte-level BPE |
| vocab.txt | Bert, DistilBert, Electra | WordPiece, with Bert's normalizer |
| tokenizer.model | Llama (BPE only), or none of its own (BPE and Unigram) | SentencePiece's file |
| arrays in a GGUF file | none | the file's model: `gpt2` or `llama` |

A class that is not in the table is refused by name: its way of cutting words is in code, not in a
file. SentencePiece's file is a protobuf; the reader here knows the wire format and the members that
it needs (sentencepiece_model.proto), and reads no more than the file has. Source: transformers 5.24
(convert_slow_tokenizer.py, tokenization_utils_tokenizers.py, models/*/tokenization_*.py). No jax.
"""

import dataclasses
import functools
import itertools
import json
import re
import reprlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import GROWTH
from megajax.data.token_ids import (
    BACKEND,
    BEGIN_NAMES,
    END_NAMES,
    MAX_BYTES,
    MOST,
    NAMES,
    OF_CLASS,
    Settings,
    check_largest,
    read_settings,
    template,
)

MODEL, VOCAB, MERGES, WORDS = "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt"
NAMES_OF_FILES = (MODEL, VOCAB, WORDS)
MAX_MODEL = 2**26  # (chosen) bytes of a tokenizer.model: published ones have some 2^22
MAX_PIECES = 2**21  # (chosen) pieces of a tokenizer.model: published ones have some 2^18
MAX_PIECE = 256  # (chosen: published ones have at most some 100) letters of a piece that is merged
MAX_LETTERS = 2**23  # (chosen) letters of all pieces that are merged
SPACE = "\u2581"  # SentencePiece's sign for a blank
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = range(1, 5)  # (the specification)

_END = "<|endoftext|>"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# {class: its special tokens by default, beside bos_token and eos_token}.
_BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA = {
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
_DEFAULTS: dict[str, dict[str, str]] = {
    "GPT2Tokenizer": {"unk_token": _END},
    "Qwen2Tokenizer": {"unk_token": _END, "pad_token": _END},
    "GPTNeoXTokenizer": {"unk_token": _END, "pad_token": "<|padding|>"},
    "RobertaTokenizer": _ROBERTA,
    "BertTokenizer": _BERT,
    "LlamaTokenizer": {"unk_token": "<unk>"},
}
_SAME = {
    "BartTokenizer": "RobertaTokenizer",
    "DistilBertTokenizer": "BertTokenizer",
    "ElectraTokenizer": "BertTokenizer",
}
BYTE_LEVEL = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "RobertaTokenizer")


def find(folder: Path) -> Path | None:
    """Returns the file of a folder that has the tokens, where there is no tokenizer.json."""
    if (folder / VOCAB).is_file() and (folder / MERGES).is_file():
        return folder / VOCAB
    named = (folder / MODEL, folder / WORDS)
    return next((file for file in named if file.is_file()), None)


def convert(file: Path) -> tuple[bytes, Settings]:
    """Returns (a tokenizer.json, the settings that go with it) of the tokenizer in a file.

    Raises: UserError for a class that is not known, and for a file that is damaged.
    """
    settings = read_settings(file.parent, byte_level=False)
    kind = _SAME.get(settings.tokenizer_class, settings.tokenizer_class)
    tokens = {**_DEFAULTS.get(kind, {}), **settings.tokens}
    for key, name in zip(("bos_token", "eos_token"), OF_CLASS.get(kind, (None, None)), strict=True):
        if name is not None:
            tokens.setdefault(key, name)
    settings = dataclasses.replace(settings, tokens=tokens, silent=False)
    if file.name == MODEL:
        made, settings = _sentencepiece(file, kind, settings)
    elif file.name == VOCAB and kind in BYTE_LEVEL:
        made = _byte_level(file, kind, settings)
    elif file.name == WORDS and kind == "BertTokenizer":
        made = _word_piece(file, settings)
    else:
        known = {MODEL: ("LlamaTokenizer", BACKEND), VOCAB: BYTE_LEVEL, WORDS: ("BertTokenizer",)}
        raise UserError(
            f"{file}: the class {kind} cuts words in a way that is not known here; known for "
            f"{file.name} are {', '.join(known.get(file.name, ()))}. Save a tokenizer.json "
            "(AutoTokenizer.from_pretrained(...).save_pretrained(...)) and name it "
            "(--data.tokenizer, --tokenizer)"
        )
    return made, settings


# ---- vocab.json and vocab.txt


def _byte_level(file: Path, kind: str, settings: Settings) -> bytes:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = files.read_object(file, MAX_BYTES, "data.tokenizer")
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in vocab.values()):
        raise UserError(f"{file}: its members must be ids (--data.tokenizer)")
    check_largest(max(vocab.values(), default=0), len(vocab), file)
    lines = _text(file.parent / MERGES).split("\n")
    merges = []
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#version"):
            continue
        parts = line.rstrip("\r").split(" ")
        if len(parts) != 2:
            raise UserError(
                f"{file.parent / MERGES}: line {number} is {line!r:.60}, not two tokens"
            )
        merges.append((parts[0], parts[1]))
    made: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    prefix = bool(settings.members.get("add_prefix_space") or False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=kind != "Qwen2Tokenizer")
    made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = level
    if kind in ("Qwen2Tokenizer", "GPTNeoXTokenizer"):
        made.normalizer = normalizers.NFC()
    if kind == "Qwen2Tokenizer":
        split = pre_tokenizers.Split(Regex(_QWEN), behavior="isolated", invert=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    _add_tokens(made, settings, [], file)
    if kind != "RobertaTokenizer":
        return _with_template(made, settings)
    around = _around(made, settings, "cls_token", "sep_token")
    return _json(
        made,
        {
            "type": "RobertaProcessing",
            "sep": around[1],
            "cls": around[0],
            "trim_offsets": True,
            "add_prefix_space": prefix,
        },
    )


def _word_piece(file: Path, settings: Settings) -> bytes:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    words = [line.rstrip("\r\n") for line in _text(file).split("\n")]
    if words and not words[-1]:
        words.pop()
    vocab = {word: i for i, word in enumerate(words)}
    said = settings.members
    made: Any = Tokenizer(models.WordPiece(vocab, unk_token=settings.tokens.get("unk_token") or ""))
    made.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(said.get("tokenize_chinese_chars", True)),
        strip_accents=said.get("strip_accents"),
        lowercase=bool(said.get("do_lower_case", True)),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(prefix="##")
    _add_tokens(made, settings, [], file)
    begin, end = _around(made, settings, "cls_token", "sep_token")
    return _json(made, template(begin, end))


def _around(made: Any, settings: Settings, *keys: str) -> list[tuple[str, int]]:
    """Returns (token, id) of special tokens that a class puts around every text."""
    pairs = []
    for key in keys:
        token = settings.tokens.get(key)
        if token is None:
            raise UserError(f"tokenizer_config.json: {key} is null, and its class needs one")
        pairs.append((token, made.token_to_id(token)))
    return pairs


def _text(file: Path) -> str:
    try:
        return files.read_bytes(file, MAX_BYTES).decode()
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror} (--data.tokenizer)") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text in UTF-8: {error} (--data.tokenizer)") from None


# ---- special tokens


def _add_tokens(made: Any, settings: Settings, more: Sequence[Any], file: Path) -> None:
    """Adds tokens in the order of transformers: added_tokens_decoder by their ids, the named
    special ones, then additional ones (more: of the file, where tokenizer_config.json has none)."""
    said, ids_of, listed = settings.members, {}, {}
    decoder = said.get("added_tokens_decoder")
    legacy = file.parent / "added_tokens.json"
    if decoder is None and legacy.is_file():
        ids = files.read_object(legacy, MAX_BYTES, "data.tokenizer")
        named = set(settings.tokens.values())
        decoder = {
            i: {"content": t, "special": t in named, "normalized": t not in named}
            for t, i in ids.items()
        }
    try:
        for id, token in sorted(((int(i), t) for i, t in (decoder or {}).items()), key=_first):
            ids_of[token["content"]] = id
            listed[token["content"]] = _added(token, bool(token.get("special")))
    except (TypeError, ValueError, KeyError, AttributeError):
        raise UserError(
            f"{file.parent}: added_tokens_decoder must map ids to objects with a content "
            "(--data.tokenizer)"
        ) from None
    others = [
        k for k in said if k.endswith("_token") and k not in NAMES and isinstance(said[k], str)
    ]
    for key in (*NAMES, *others):
        token = settings.tokens.get(key) if key in NAMES else said[key]
        if token is not None and token not in listed:
            listed[token] = _added(
                said.get(key) if isinstance(said.get(key), dict) else token, True
            )
        elif token is not None:
            listed[token].special = True
    extra = (
        next(
            (said[k] for k in ("extra_special_tokens", "additional_special_tokens") if k in said),
            more,
        )
        or ()
    )
    for token in extra.values() if isinstance(extra, dict) else extra:
        added = token if not isinstance(token, str | dict) else _added(token, True)
        listed.setdefault(added.content, added)
    made.add_tokens(list(listed.values()))
    for token, id in ids_of.items():
        if made.token_to_id(token) != id:
            raise UserError(
                f"{file.parent}: added_tokens_decoder gives {token!r:.60} the id {id}, but after "
                f"the tokens of {file.name} it gets {made.token_to_id(token)} (--data.tokenizer)"
            )


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def _added(token: Any, special: bool) -> Any:
    from tokenizers import AddedToken

    if isinstance(token, str):
        return AddedToken(token, special=special, normalized=not special)
    flags = {n: bool(token.get(n, False)) for n in ("lstrip", "rstrip", "single_word")}
    normal = bool(token.get("normalized", not special))
    return AddedToken(token["content"], normalized=normal, special=special, **flags)


def _with_template(made: Any, settings: Settings) -> bytes:
    """Returns the tokenizer.json with the tokens around a text that add_bos_token and add_eos_token
    ask for."""
    pairs: list[tuple[str, int] | None] = []
    for flag, key in (("add_bos_token", "bos_token"), ("add_eos_token", "eos_token")):
        token = settings.tokens.get(key)
        is_added = settings.members.get(flag) and token is not None
        pairs.append((str(token), made.token_to_id(token)) if is_added else None)
    return _json(made, template(*pairs))


def _json(made: Any, post_processor: Mapping[str, Any]) -> bytes:
    members = json.loads(made.to_str()) | {"post_processor": post_processor}
    return json.dumps(members, ensure_ascii=False).encode()


# ---- tokenizer.model


@dataclasses.dataclass
class Spm:
    """The content of a tokenizer.model, with the defaults of sentencepiece_model.proto."""

    pieces: list[tuple[str, float, int]] = dataclasses.field(default_factory=list)
    model_type: int = 1  # 1: Unigram, 2: BPE, 3: words, 4: characters
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    unk_piece: str = "<unk>"
    bos_piece: str = "<s>"
    eos_piece: str = "</s>"
    byte_fallback: bool = False
    suffix: bool = False
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


# {field number: (member of Spm, how it is read)}.
_TRAINER = {
    3: ("model_type", int),
    24: ("suffix", bool),
    35: ("byte_fallback", bool),
    40: ("unk_id", int),
    41: ("bos_id", int),
    42: ("eos_id", int),
    45: ("unk_piece", str),
    46: ("bos_piece", str),
    47: ("eos_piece", str),
}
_NORMALIZER = {
    2: ("charsmap", bytes),
    3: ("add_dummy_prefix", bool),
    4: ("remove_extra_whitespaces", bool),
    5: ("escape_whitespaces", bool),
}


def read_model(data: bytes) -> Spm:
    """Returns what a tokenizer.model says. Raises: ValueError for what is no such file."""
    model = Spm()
    for number, value in _fields(memoryview(data)):
        if number == 1:
            text, score, kind = "", 0.0, NORMAL
            for inner, x in _fields(_bytes(value)):
                if inner == 1:
                    text = bytes(_bytes(x)).decode()
                elif inner == 2:
                    if not isinstance(x, memoryview) or len(x) != 4:
                        raise ValueError("a score is no float")
                    (score,) = struct.unpack("<f", x)
                elif inner == 3:
                    kind = int(x)
            model.pieces.append((text, score, kind))
            if len(model.pieces) > MAX_PIECES:
                raise ValueError(f"it has over {MAX_PIECES:,} pieces")
        elif number in (2, 3):
            members = _TRAINER if number == 2 else _NORMALIZER
            for inner, x in _fields(_bytes(value)):
                if inner in members:
                    name, read = members[inner]
                    if read in (int, bool):
                        if isinstance(x, memoryview):
                            raise ValueError(f"{name} is no number")
                        setattr(model, name, read(x))
                    else:
                        raw = bytes(_bytes(x))
                        setattr(model, name, raw if read is bytes else raw.decode())
    if not model.pieces:
        raise ValueError("it has no pieces")
    check_charsmap(model.charsmap)
    return model


def check_charsmap(data: bytes) -> None:
    """Raises: ValueError for a precompiled_charsmap that says that its tree is larger than it is.

    It begins with the bytes of the tree. The `tokenizers` package reserves that much memory before
    it looks at the rest, and ends the process where there is not so much."""
    size = int.from_bytes(data[:4], "little")
    if data and size > len(data) - 4:
        raise ValueError(
            f"its precompiled_charsmap has {len(data):,} bytes and says that {size:,} follow its "
            "first 4"
        )


def _bytes(value: int | memoryview) -> memoryview:
    if not isinstance(value, memoryview):
        raise ValueError("a number stands where bytes should")
    return value


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yields (number, value) of the fields of a protobuf message: int32 of a varint, else bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value - 2**64 if value >= 2**63 else value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _varint(data, at)
        if size is None or number == 0 or size > len(data) - at:
            raise ValueError(f"byte {at} is no part of a protobuf message")
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ValueError("it ends inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), at
    raise ValueError(f"byte {at} is no part of a number")


def _sentencepiece(file: Path, kind: str, settings: Settings) -> tuple[bytes, Settings]:
    """Returns (a tokenizer.json, the settings with the special tokens of the file)."""
    try:
        spm = read_model(files.read_bytes(file, MAX_MODEL))
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror} (--data.tokenizer)") from None
    except ValueError as error:
        raise UserError(
            f"{file} is no SentencePiece model: {error}; one of tiktoken is not read "
            "(--data.tokenizer)"
        ) from None
    if spm.model_type not in (1, 2) or spm.suffix:
        what = "with blanks behind words" if spm.suffix else f"of model_type {spm.model_type}"
        raise UserError(f"{file} is a SentencePiece model {what}; Unigram and BPE are known")
    from tokenizers import AddedToken

    more = [
        AddedToken(text, normalized=False, special=k == CONTROL)
        for text, _, k in spm.pieces
        if k in (CONTROL, USER_DEFINED)
    ]
    if kind == "LlamaTokenizer":
        if spm.model_type != 2:
            raise UserError(
                f"{file} is a Unigram model, which the class LlamaTokenizer would read as a BPE "
                "(tokenizer_class of tokenizer_config.json)"
            )
        made = _llama(spm, settings, file)
    elif kind == BACKEND:
        tokens = dict(settings.tokens)
        for name, id in (("bos", spm.bos_id), ("eos", spm.eos_id), ("unk", spm.unk_id)):
            if id >= 0:
                tokens.setdefault(f"{name}_token", getattr(spm, f"{name}_piece"))
        settings, more = _renamed(spm, dataclasses.replace(settings, tokens=tokens), more)
        made = _from_model(spm, settings, file)
    else:
        raise UserError(
            f"{file}: the class {kind} cuts words in a way that is not known here; known for "
            f"{MODEL} are LlamaTokenizer and {BACKEND} (--data.tokenizer, --tokenizer)"
        )
    _add_tokens(made, settings, more, file)
    return _with_template(made, settings), settings


def _renamed(spm: Spm, settings: Settings, more: list[Any]) -> tuple[Settings, list[Any]]:
    """Gives pieces the names that added_tokens_decoder has for them; user-defined pieces are no
    special tokens."""
    decoder = settings.members.get("added_tokens_decoder")
    user = {text for text, _, k in spm.pieces if k == USER_DEFINED}
    if isinstance(decoder, dict) and decoder:
        names = {int(i): t["content"] for i, t in decoder.items()}
        if spm.model_type == 2:
            others = {text for i, (text, _, _) in enumerate(spm.pieces) if i not in names}
            spm.pieces = [
                (names[i] if i in names and names[i] not in others else text, score, k)
                for i, (text, score, k) in enumerate(spm.pieces)
            ]
        if spm.add_dummy_prefix:
            plain = {i: {**t, "normalized": False} for i, t in decoder.items()}
            said = {**settings.members, "added_tokens_decoder": plain}
            settings = dataclasses.replace(settings, members=said)
    return settings, [token for token in more if token.content not in user]


def _vocabulary(spm: Spm, file: Path) -> dict[str, int]:
    vocab = {text: i for i, (text, _, _) in enumerate(spm.pieces)}
    if len(vocab) < len(spm.pieces):
        raise UserError(f"{file} has two pieces of one text (--data.tokenizer)")
    letters = [len(text) for text in vocab]
    if max(letters) > MAX_PIECE or sum(letters) > MAX_LETTERS:
        raise UserError(
            f"{file} has a piece of {max(letters):,} letters, {sum(letters):,} in all; at most "
            f"{MAX_PIECE:,} and {MAX_LETTERS:,} are merged (--data.tokenizer)"
        )
    return vocab


def _llama(spm: Spm, settings: Settings, file: Path) -> Any:
    """transformers' LlamaTokenizer: merges in the order of ids, no normalizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = _vocabulary(spm, file)
    ranked = [
        (id, len(piece[:at]), piece[:at], piece[at:])
        for piece, id in vocab.items()
        for at in range(1, len(piece))
        if piece[:at] in vocab and piece[at:] in vocab
    ]
    merges = [(left, right) for _, _, left, right in sorted(ranked)]
    made: Any = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    said = settings.members.get("add_prefix_space")
    prefix = True if said is None else bool(said)
    scheme = "never" if not prefix else "always" if settings.members.get("legacy") else "first"
    made.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=SPACE, prepend_scheme=scheme, split=False
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps + [decoders.Strip(content=" ", left=1)] * prefix)
    return made


def _from_model(spm: Spm, settings: Settings, file: Path) -> Any:
    """transformers' plain class: everything as the file says."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    user = [text for text, _, k in spm.pieces if k == USER_DEFINED]
    if spm.model_type == 2:
        vocab = _vocabulary(spm, file)
        normal = {t: (-s, i) for i, (t, s, k) in enumerate(spm.pieces) if k == NORMAL}
        ranked = [
            (*rank, piece[:at], piece[at:])
            for piece, rank in normal.items()
            for at in range(1, len(piece))
            if piece[:at] in normal and piece[at:] in normal
        ]
        model: Any = models.BPE(
            vocab=vocab,
            merges=[(left, right) for _, _, left, right in sorted(ranked)],
            unk_token=spm.unk_piece,
            fuse_unk=True,
            byte_fallback=spm.byte_fallback,
            ignore_merges=bool(user),
        )
    else:
        scores = [(text, score) for text, score, _ in spm.pieces]
        model = models.Unigram(scores, spm.unk_id, spm.byte_fallback)
    made: Any = Tokenizer(model)
    legacy = bool(settings.members.get("legacy", True))
    steps: list[Any] = [normalizers.Precompiled(spm.charsmap)] if spm.charsmap else []
    if spm.remove_extra_whitespaces:
        steps += [
            normalizers.Replace(Regex(r"\A +| +\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    if spm.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    if spm.add_dummy_prefix and legacy:
        steps.append(normalizers.Replace(Regex(r"\A" + SPACE), SPACE * 2))
    made.normalizer = normalizers.Sequence(steps)
    cuts: list[Any] = []
    if spm.add_dummy_prefix:
        scheme = "always" if legacy else "first"
        cuts.append(pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False))
    if user:
        pattern = "|".join(re.escape(t) for t in sorted(user, key=len, reverse=True))
        cuts.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    if cuts:
        made.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    back: list[Any] = [decoders.Replace(SPACE, " ")]
    if spm.byte_fallback:
        back.append(decoders.ByteFallback())
    if spm.add_dummy_prefix:
        back += [decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    elif spm.byte_fallback:
        back.append(decoders.Fuse())
    made.decoder = decoders.Sequence(back)
    return made


# ---- GGUF
#
# The tokenizer that a GGUF file describes, as a tokenizer.json.
#
# Two models: `gpt2`, a byte-level BPE with its merges, whose words are cut as `tokenizer.ggml.pre`
# names, and `llama`, SentencePiece's BPE, whose merges follow from the scores of its pieces. Source
# of names and of their regular expressions: llama.cpp (src/llama-vocab.cpp) and the tokenizer.json
# of the models that the names are called after.


# {argument of tokenizer_json: the file's array}.
ARRAYS = {
    "tokens": "tokenizer.ggml.tokens",
    "merges": "tokenizer.ggml.merges",
    "scores": "tokenizer.ggml.scores",
    "types": "tokenizer.ggml.token_type",
}
ENTRY_BYTES = 768  # (measured: 630 to 680) of memory that a token, or a merge, takes to be read
APART_BYTES = 1280  # (measured: 1,160) more for a token that is found before words are cut
SLACK = 48 * 2**20  # (chosen) bytes of memory that any vocabulary may take

# (llama.cpp, src/llama-vocab.cpp) Tokens that end an answer by their text, whatever the file says.
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
)  # fmt: skip
# {key of a token of code models that ends an answer: its texts}, the first that there is.
CODE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}

_GPT2 = "gpt2"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASES % ("", "", "")
_GPT4O = _CASES % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}")

# {name: (how words are cut, whether a word that is a token is not merged from its parts, whether a
# text begins with the begin token)}.
_PRE: dict[str, tuple[str, bool, bool]] = {
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "gigachat"), (_GPT2, False, False)
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        ("digits", False, False),
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1"), (_LLAMA3, True, True)
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), (_LLAMA3, False, False)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2, False, False)
    ),
    "tekken": (_TEKKEN, True, True),
    **dict.fromkeys(("gpt-4o", "llama4"), (_GPT4O, False, False)),
}
_COMPOSED = ("qwen2", "deepseek-r1-qwen")  # their text is normalised to NFC


def check_counts(counts: Mapping[str, int], size: int) -> int:
    """Refuses a vocabulary that would take far more memory than its file has bytes.

    counts: {member of ARRAYS: its elements}. size: of the file, bytes.
    Returns: bytes of memory that are left for `tokenizer_json`.
    """
    if not counts.get("tokens"):
        raise UserError("it has no tokens, so no tokenizer can be made of it")
    entries = counts["tokens"] + counts.get("merges", 0)
    budget = SLACK + (GROWTH - 2) * size
    if entries * ENTRY_BYTES > budget or counts["tokens"] > MOST:
        raise UserError(
            f"{entries:,} tokens and merges in a file of {size:,} bytes; at most "
            f"{min(MOST, budget // ENTRY_BYTES):,} are read in one of this size"
        )
    return budget - entries * ENTRY_BYTES


def tokenizer_json(
    metadata: Mapping[str, Any],
    spare: int,
    tokens: Sequence[str],
    merges: Sequence[str] = (),
    scores: np.ndarray | None = None,
    types: np.ndarray | None = None,
) -> tuple[bytes, Settings]:
    """Returns (a tokenizer.json, the settings that go with it).

    Args: metadata: of the file. spare: what `check_counts` returned. tokens: by their ids. merges:
      'left right', the first ones first. scores, types: one for each token.
    Raises: UserError for a tokenizer that cannot be built here.
    """
    for name, array in (("scores", scores), ("token_type", types)):
        if array is not None and len(array) != len(tokens):
            raise UserError(f"it has {len(tokens):,} tokens and {len(array):,} {name}")
    kinds = np.full(len(tokens), NORMAL) if types is None else np.array(types)
    vocab: dict[str, int] = {}
    for number, token in enumerate(tokens):
        text = token or f"[EMPTY_{number}]"  # llama.cpp's name for it
        if vocab.setdefault(text, number) != number:
            raise UserError(f"the tokens {vocab[text]} and {number} are both {text!r:.80}")
    model = metadata.get("tokenizer.ggml.model")
    special = _specials(metadata, tokens)
    if model == "gpt2":
        members, adds = _byte_level_of_gguf(metadata, vocab, merges)
    elif model == "llama":
        if scores is None:
            raise UserError("tokenizer.ggml.model is llama, but there are no scores of its tokens")
        unknown = special.get(
            "unknown", next((i for i, k in enumerate(kinds) if k == UNKNOWN), None)
        )
        pairs = _merges(vocab, scores, kinds, spare)
        members, adds = _sentencepiece_of_gguf(metadata, vocab, pairs, unknown), True
    else:
        raise UserError(
            f"tokenizer.ggml.model is {reprlib.repr(model):.60}; it must be gpt2 or llama"
        )
    ends = _ends(special, vocab)
    texts = {*ENDS, *itertools.chain(*CODE_ENDS.values())}
    kinds[[i for i in ends if tokens[i] in texts and kinds[i] != UNKNOWN]] = CONTROL
    apart = [i for i, k in enumerate(kinds.tolist()) if k in (UNKNOWN, CONTROL, USER_DEFINED)]
    if len(apart) * APART_BYTES > spare:
        raise UserError(f"{len(apart):,} of its tokens are special; the file is too short for them")
    for name, usual in (("bos", BEGIN_NAMES), ("eos", END_NAMES)):  # where the file says nothing
        if name not in special and (there := next((n for n in usual if n in vocab), None)):
            special[name] = vocab[there]
    begin = special.get("bos") if _truth(metadata, "add_bos_token", adds) else None
    members |= {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "post_processor": None if begin is None else template((list(vocab)[begin], begin)),
        "added_tokens": [
            {
                "id": i,
                "content": tokens[i],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kinds[i] != USER_DEFINED,
            }
            for i in apart
            if tokens[i]
        ],
    }
    texts = list(vocab)  # by their ids
    names = {f"{n}_token": texts[special[n]] if n in special else None for n in ("bos", "eos")}
    settings = Settings(names, ends, silent=False, chat_template=_template(metadata))
    return json.dumps(members, ensure_ascii=False, default=bool).encode(), settings


def _ends(special: Mapping[str, int], vocab: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the ids that end an answer in llama.cpp: those that the file names, then those of
    ENDS and CODE_ENDS."""
    by_text = [name for name in ENDS if name in vocab]
    calls, others = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
    if not calls.isdisjoint(by_text) and not others.isdisjoint(by_text):  # it ends a message there
        by_text = [name for name in by_text if name != "<|end|>"]
    if "<|tool_response>" in vocab:  # text, in Gemma 4
        by_text = [name for name in by_text if name != "</s>"]
    ids = [special[n] for n in ("eos", "eot", "eom") if n in special]
    ids += [vocab[name] for name in by_text]
    for key, texts in CODE_ENDS.items():
        there = (vocab[t] for t in texts if t in vocab)
        if (code := special.get(key, next(there, None))) is not None:
            ids.append(code)
    return tuple(dict.fromkeys(ids))


def _template(metadata: Mapping[str, Any]) -> str | None:
    """Returns the chat template, where there is one."""
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise UserError(f"tokenizer.chat_template is {reprlib.repr(template):.60}, not a text")
    return template or None


def _truth(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise UserError(f"tokenizer.ggml.{key} is {reprlib.repr(value):.60}, not true or false")
    return value


def _specials(metadata: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, int]:
    """Returns {bos, eos, eot, eom, unknown, one of CODE_ENDS: its id} of what the file names."""
    ids = {}
    for name in ("bos", "eos", "eot", "eom", "unknown", *CODE_ENDS):
        key = f"tokenizer.ggml.{name}_token_id"
        value = metadata.get(key)
        if value is None or value == 2**32 - 1:  # llama.cpp's word for none
            continue
        if not isinstance(value, int) or not 0 <= value < len(tokens):
            raise UserError(
                f"{key} is {reprlib.repr(value):.40}; tokens have the ids 0 to {len(tokens) - 1}"
            )
        ids[name] = value
    return ids


def _byte_level_of_gguf(
    metadata: Mapping[str, Any], vocab: dict[str, int], merges: Sequence[str]
) -> tuple[dict[str, Any], bool]:
    """Returns (a tokenizer.json's members, whether a text begins with the begin token)."""
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _PRE:
        raise UserError(
            f"tokenizer.ggml.pre is {reprlib.repr(name):.60}; the ways of cutting words that are "
            f"known are {', '.join(_PRE)}"
        )
    words, ignores_merges, adds = _PRE[name]
    pairs = []
    for merge in merges:
        left, blank, right = merge[:1], *merge[1:].partition(" ")[1:]
        left += merge[1:].partition(" ")[0]
        if not blank or not right:
            raise UserError(f"a merge is {merge!r:.80}; it must be two tokens and a blank")
        pairs.append((left, right))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cuts: list[dict[str, Any]] = [byte_level | {"use_regex": words in (_GPT2, "digits")}]
    if words == "digits":
        cuts.insert(0, {"type": "Digits", "individual_digits": True})
    elif words != _GPT2:
        split = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated"}
        cuts.insert(0, split | {"invert": False})
    return {
        "normalizer": {"type": "NFC"} if name in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts},
        "decoder": byte_level | {"use_regex": True},
        "model": _bpe(vocab, pairs, ignore_merges=ignores_merges),
    }, adds


def _merges(
    vocab: dict[str, int], scores: np.ndarray, kinds: np.ndarray, spare: int
) -> list[tuple[str, str]]:
    """Returns the merges that do what SentencePiece does with the scores of its pieces.

    SentencePiece merges the two neighbours whose piece has the highest score; so the merges are all
    ways to cut a piece into two, in the order of the pieces' scores. spare: bytes of memory.
    """
    pieces = [(token, i) for token, i in vocab.items() if kinds[i] in (NORMAL, USER_DEFINED)]
    if sum(len(piece) for piece, _ in pieces) > MAX_LETTERS:
        raise UserError(f"its pieces have over {MAX_LETTERS:,} letters")
    pieces.sort(key=functools.partial(_rank, scores))
    pairs: list[tuple[str, str]] = []
    for piece, _ in pieces:
        if len(piece) > MAX_PIECE:
            raise UserError(f"the token {piece[:20]!r}... has {len(piece):,} letters")
        # Of runs of one letter SentencePiece merges the leftmost: the longer left part first.
        cuts = ((piece[:at], piece[at:]) for at in range(len(piece) - 1, 0, -1))
        pairs += [(a, b) for a, b in cuts if a in vocab and b in vocab]
        if len(pairs) * ENTRY_BYTES > spare:
            raise UserError(
                f"its {len(vocab):,} pieces have over {len(pairs):,} merges; the file is too short "
                "for them"
            )
    return pairs


def _sentencepiece_of_gguf(
    metadata: Mapping[str, Any],
    vocab: dict[str, int],
    pairs: Sequence[tuple[str, str]],
    unknown: int | None,
) -> dict[str, Any]:
    """Returns a tokenizer.json's members."""
    prefix = _truth(metadata, "add_space_prefix", True)
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    steps = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    name = None if unknown is None else next(t for t, i in vocab.items() if i == unknown)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*steps, blanks]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": _bpe(vocab, pairs, unknown=name, bytes_too=True),
    }


def _rank(scores: np.ndarray, entry: tuple[str, int]) -> float:
    return -float(scores[entry[1]])


def _bpe(
    vocab: dict[str, int],
    merges: Sequence[tuple[str, str]],
    unknown: str | None = None,
    bytes_too: bool = False,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": bytes_too,
        "byte_fallback": bytes_too,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }
