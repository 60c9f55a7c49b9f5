"""Text to token ids and back: bytes, a BPE trained on the corpus, or a Hugging Face tokenizer.json.

A document becomes [begin] tokens [end] with the tokenizer's special ids, where it has them. Text
never becomes a special id: '<|eos|>' in a document is seven characters like any others.
"""

import contextlib
import functools
import hashlib
import json
import reprlib
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.paths import expand
from megajax.data import pieces as pieces_

MOST = 1 << 24  # ids of a trained BPE (chosen: the trainer reserves memory for them)
MAX_BYTES = 2**28  # (chosen) of a tokenizer.json: the largest published ones have 2^25
MAX_ID = 2**31 - 1
LONGEST = 2**12  # (chosen) bytes of a token: published ones have some hundred
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
BEGIN_NAMES = ("<|begin_of_text|>", "<|bos|>", "<s>", "<bos>", "<|endoftext|>", "[CLS]")
END_NAMES = ("<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "<|endoftext|>", "[SEP]")


class Tokenizer(Protocol):
    """What the data pipeline and sampling need. begin, end: special ids, or None.

    vocab: all ids are below it. identity: two tokenizers that share it give the same ids.
    strips_space: `decode` drops a space before the first word.
    """

    name: str
    identity: str
    vocab: int
    begin: int | None
    end: int | None
    strips_space: bool

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token ids of each text, without special ids."""
        ...

    def encode_special(self, text: str) -> list[int]:
        """Returns the ids of a text in which the text of a special token is that token."""
        ...

    def prefix(self) -> list[int]:
        """Returns the special ids before a prompt."""
        ...

    def pieces(self) -> list[bytes | None]:
        """Returns the bytes of each id, None for special ones. Raises: UserError if there are
        none."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids; special ids give nothing."""
        ...


class ByteTokenizer:
    """One id a byte of UTF-8; 256 begins a document, 257 ends it, 258 is spare."""

    name: str = "bytes"
    identity: str = "bytes"
    vocab: int = 259
    begin: int | None = 256
    end: int | None = 257
    strips_space: bool = False

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the bytes of each text."""
        return [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text; bytes that are not UTF-8 show as the replacement character."""
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")

    def pieces(self) -> list[bytes | None]:
        """Returns the byte of each id; None: special."""
        return [*(bytes([b]) for b in range(256)), None, None, None]

    def encode_special(self, text: str) -> list[int]:
        """Returns the bytes of a text: no text is a special token."""
        return list(text.encode())

    def prefix(self) -> list[int]:
        """Returns the id that begins a document."""
        return [256]


class JsonTokenizer:
    """A tokenizer.json, read by the `tokenizers` package, with the settings that go with it.

    settings: as given. chat_template: in Jinja, or None.
    """

    def __init__(self, raw: bytes, settings: Mapping[str, Any], name: str):
        """settings: bos_token and eos_token (texts), add_bos_token (False: no text begins with the
        begin token) and chat_template, where there are any. Raises: UserError when raw is no
        tokenizer."""
        import tokenizers  # here, so that runs on bytes need not load it

        with _errors_of(f"{name} is not a tokenizer.json"):
            found = files.parse_json(raw)
            _check_lengths(found)
            self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        self._raw, self.settings, self.name = raw, dict(settings), name
        self._tokenizer.encode_special_tokens = True  # special tokens' text stays text
        self._tokenizer.no_truncation()  # settings of a model's inputs, not of documents
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None  # encoding again gives the same ids
        ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
        if not ids:
            raise UserError(f"{name} has no tokens (--data.tokenizer)")
        self.vocab = max(ids) + 1  # ids may have gaps
        if self.vocab > MAX_ID + 1:
            raise UserError(
                f"{name} has the id {max(ids)}; ids are stored in 32 bits, so the largest legal "
                f"one is {MAX_ID} (--data.tokenizer)"
            )
        self.begin = self._special(settings.get("bos_token"), BEGIN_NAMES)
        if settings.get("add_bos_token") is False:
            self.begin = None
        self.end = self._special(settings.get("eos_token"), END_NAMES)
        self.chat_template: str | None = settings.get("chat_template")
        content = raw + f" {self.begin} {self.end}".encode()
        self.identity = hashlib.blake2b(content, digest_size=8).hexdigest()
        self._forbidden = self._find_forbidden(found["model"])
        self._decoder, self._post = found.get("decoder"), found.get("post_processor")
        self.strips_space = pieces_.strips_space(self._decoder)

    def _find_forbidden(self, model: dict[str, Any]) -> np.ndarray:
        """Returns the ids that no text becomes: special ones but the one of unknown text."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {i for i, token in added if token.special} | {self.begin, self.end}
        unknown = model.get("unk_id")  # Unigram's has no other way
        if unknown is None and (name := model.get("unk_token")) is not None:
            unknown = self._tokenizer.token_to_id(name)
        found = [i for i in special if i is not None and i != unknown]
        return np.array(sorted(found), np.int32)

    def _special(self, declared: str | None, usual: tuple[str, ...]) -> int | None:
        names = (declared, *usual) if declared else usual
        ids = (self._tokenizer.token_to_id(n) for n in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token ids of each text. Raises: UserError when it has none for a text."""
        with _errors_of(f"{self.name} cannot encode"):
            batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            found = [np.array(e.ids, np.int32) for e in batch]
            return [
                self._without_special(text) if np.isin(ids, self._forbidden).any() else ids
                for text, ids in zip(texts, found, strict=True)
            ]

    def _without_special(self, text: str) -> np.ndarray:
        """Returns the ids of a text, cut inside what its tokenizer makes a special token of.

        For models whose own pieces include a special token (Unigram, WordLevel), or whose begin and
        end are not marked as special.
        """
        found = self._tokenizer.encode(text, add_special_tokens=False)
        special = np.isin(found.ids, self._forbidden)
        spans = [found.offsets[i] for i in np.flatnonzero(special)]
        cuts = sorted({c for start, stop in spans if 0 < (c := (start + stop) // 2) < len(text)})
        if not cuts:  # nothing to cut: what is special is left out
            return np.array(found.ids, np.int32)[~special]
        pieces = zip([0, *cuts], [*cuts, len(text)], strict=True)
        return np.concatenate([self._without_special(text[a:b]) for a, b in pieces])

    def copy_to(self, folder: Path) -> None:
        """Writes the files that `open_tokenizer(folder)` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_bytes(self._raw)
        (folder / CONFIG).write_text(json.dumps(self.settings, indent=2) + "\n")

    def pieces(self) -> list[bytes | None]:
        """Returns the bytes of each id, None for special ones, as data/pieces.py.

        Raises: UserError for tokens that do not stand for bytes.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        return pieces_.pieces(self._decoder, vocab, {i: t.special for i, t in added.items()})

    @functools.cached_property
    def _special_too(self) -> Any:
        import tokenizers

        return tokenizers.Tokenizer.from_str(self._tokenizer.to_str())

    def encode_special(self, text: str) -> list[int]:
        """Returns the ids of a text in which the text of a special token is that token, for chat
        templates, which write them. Raises: UserError as `encode`."""
        with _errors_of(f"{self.name} cannot encode"):
            return self._special_too.encode(text, add_special_tokens=False).ids

    def prefix(self) -> list[int]:
        """Returns the special ids that the file itself puts before a prompt; the begin of a
        document where it does not say."""
        if self._post is None or self.settings.get("add_bos_token") is False:
            return [] if self.begin is None else [self.begin]
        with _errors_of(f"{self.name} cannot encode"):
            whole = self._special_too.encode("a").ids
            text = self._special_too.encode("a", add_special_tokens=False).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(text)] == text), 0)
        return whole[:at]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids."""
        with _errors_of(f"{self.name} cannot decode"):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


class FileTokenizer(JsonTokenizer):
    """A tokenizer.json with the tokenizer_config.json beside it."""

    def __init__(self, path: Path, name: str):
        """Raises: UserError when the file is not a tokenizer."""
        with _errors_of(f"{path} is not a tokenizer.json"):
            raw = files.read_bytes(path, MAX_BYTES)
        super().__init__(raw, _settings(path.parent), str(path))
        self.name, self.path = name, path

    def copy_to(self, folder: Path) -> None:
        """Writes the files that `open_tokenizer(folder)` reads."""
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.path, folder / "tokenizer.json")
        for name in (CONFIG, TEMPLATE):
            beside = self.path.parent / name
            if beside.is_file():
                shutil.copyfile(beside, folder / name)


def _check_lengths(found: Any) -> None:
    """Raises: ValueError for a token of more than LONGEST bytes.

    The package keeps the tokens of a Unigram model in a tree, a byte a level, and frees it by a
    recursion that overflows the stack.
    """
    model = found.get("model") if isinstance(found, dict) else None
    vocab = model.get("vocab") if isinstance(model, dict) else None
    tokens = vocab if isinstance(vocab, dict) else ()
    if isinstance(vocab, list):  # pieces with their scores
        tokens = [piece[0] for piece in vocab if isinstance(piece, list) and piece]
    for token in tokens:
        if isinstance(token, str) and len(token.encode(errors="replace")) > LONGEST:
            raise ValueError(
                f"the token {token[:20]!r}... has {len(token):,} letters; at most {LONGEST:,} "
                "bytes are read"
            )


@contextlib.contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """Makes a UserError of what the package raises: Exception itself, and PanicException, which is
    none, where its Rust code meets what it does not expect of a file."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{what}: {error} (--data.tokenizer)") from None


def special_tokens(folder: Path) -> dict[str, str]:
    """Returns bos_token and eos_token of a tokenizer_config.json beside the tokenizer.

    Raises: UserError when the file cannot be read or one of the two is no token.
    """
    found = _settings(folder)
    return {key: found[key] for key in ("bos_token", "eos_token") if key in found}


def _settings(folder: Path) -> dict[str, Any]:
    """Returns what `JsonTokenizer` wants of a tokenizer_config.json, but its chat template."""
    file = folder / CONFIG
    if not file.is_file():
        return {}
    found = files.read_object(file, MAX_BYTES, "data.tokenizer")
    named: dict[str, Any] = {}
    for key in ("bos_token", "eos_token"):
        value = found.get(key)
        token = value.get("content") if isinstance(value, dict) else value
        if value is not None and not (isinstance(token, str) and _is_unicode(token)):
            raise UserError(
                f"{file}: {key} is {reprlib.repr(value):.40}; it must be a string of Unicode "
                "characters, or an object whose member content is one (--data.tokenizer)"
            )
        if token:
            named[key] = token
    return named | {"add_bos_token": found.get("add_bos_token")}


def _is_unicode(text: str) -> bool:
    """Whether text can be written as UTF-8: JSON may escape half of a surrogate pair."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def train_bpe(texts: Iterable[str], vocab: int, path: Path) -> None:
    """Trains a byte-level BPE with `vocab` ids and writes its tokenizer.json."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def bpe_size(name: str) -> int | None:
    """Returns N of 'bpe:N', or None for another kind of name. Raises: UserError for a bad N."""
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return None
    if not (size.isdecimal() and size.isascii() and len(size) < 12 and 258 <= int(size) <= MOST):
        raise UserError(
            f"data.tokenizer={name}: bpe:N needs N of at least 258, the bytes and two specials, "
            f"and at most {MOST} (--data.tokenizer=bpe:8192)"
        )
    return int(size)


def open_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer 'bytes' or the one of a tokenizer.json (or its folder)."""
    if name == "bytes":
        return ByteTokenizer()
    path = expand(name, "data.tokenizer")
    file = expand(path / "tokenizer.json" if path.is_dir() else path, "data.tokenizer")
    if not file.is_file():
        raise UserError(
            f"data.tokenizer={name} is neither bytes nor bpe:N nor a tokenizer.json that exists "
            "(--data.tokenizer)"
        )
    return FileTokenizer(file, name)


def check_vocabulary(tokenizer: Tokenizer, vocab: int) -> None:
    """Refuses a tokenizer whose ids a model's vocabulary lacks."""
    if tokenizer.vocab > vocab:
        raise UserError(
            f"the tokenizer {tokenizer.name} has ids up to {tokenizer.vocab - 1}, the model's "
            f"vocabulary is model.vocab={vocab}; nearest: {tokenizer.vocab} (--model.vocab, "
            "--data.tokenizer)"
        )
