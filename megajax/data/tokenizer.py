"""Text to token ids and back: bytes, a BPE trained on the corpus, or a Hugging Face tokenizer.json.

One method encodes everything, `Tokenizer.encode`. A document becomes [begin] tokens [end] with the
tokenizer's special ids, where it has them, and its text never becomes a special id: '<|eos|>' in it
is seven characters like any others. A prompt (`prompt_ids`) becomes [begin] tokens, and in it the
text of a special token is that token, as in transformers and llama.cpp. Chats: data/chat.py.
"""

import base64
import contextlib
import functools
import hashlib
import itertools
import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from absl import logging

from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand, model_folder
from megajax.data import token_ids, vocabulary_files
from megajax.data.token_ids import CONFIG, GENERATION, MAP, MAX_BYTES, MOST, Settings

LONGEST = 2**12  # (chosen) bytes of a token: published ones have some hundred
WORD = 256  # (chosen: real words are shorter) bytes of a word that a BPE is trained on
PIECE = 2**18  # (chosen) characters of a text that the package encodes in one piece
PART = 2**14  # (chosen) characters that are encoded before a long prompt's length is looked at
TOGETHER = 16  # (chosen: some 500 MiB of memory) pieces, one for each of its threads
WINDOW = 2**10  # (chosen) characters on both sides of a cut that are encoded to judge it
TRIES = 16  # (chosen) places of a piece that are judged
BETWEEN = re.compile(r"(?<=[A-Za-z]) (?=[A-Za-z])")  # where words are cut by all patterns
TEMPLATE = "chat_template.jinja"
FILES = "tokenizer.json, vocab.json with merges.txt, tokenizer.model or vocab.txt"
BESIDE = (CONFIG, MAP, GENERATION, TEMPLATE)  # files that say how a tokenizer is used


type Encode = Callable[[Sequence[str]], list[np.ndarray]]


class Tokenizer(Protocol):
    """A tokenizer, as the data pipeline and sampling use it.

    begin, end: the special ids around a document, or None. ends: the ids that end an answer, `end`
    among them. vocab: all ids are below it. identity: two tokenizers of the same identity give the
    same ids. template: the ids that the tokenizer's file puts before and behind a text that is one
    input of a model; empty if the file states none. strips_space: `decode` drops a space before the
    first word.
    """

    name: str
    identity: str
    vocab: int
    begin: int | None
    end: int | None
    ends: tuple[int, ...]
    template: tuple[tuple[int, ...], tuple[int, ...]]
    strips_space: bool

    def encode(
        self, texts: Sequence[str], special: bool = False, most: int | None = None
    ) -> list[np.ndarray]:
        """Returns the token ids (int32) of each text, nothing before or behind it.

        special: whether the text of a special token is that token; else it is text. most: a text
        that has far more tokens is not read to its end: what is refused anyway costs little.
        """
        ...

    def prefix(self) -> list[int]:
        """Returns the special ids before a prompt."""
        ...

    def pieces(self) -> list[bytes | None]:
        """Returns the bytes of each id, None for special ones. Raises: UserError if there are
        none."""
        ...

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Returns the text of token ids; special ids give nothing, or with `special` their text."""
        ...


class ByteTokenizer:
    """One id a byte of UTF-8; 256 begins a document, 257 ends it, 258 is spare."""

    name: str = "bytes"
    identity: str = "bytes"
    vocab: int = 259
    begin: int | None = 256
    end: int | None = 257
    ends: tuple[int, ...] = (257,)
    template: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    strips_space: bool = False

    def encode(
        self, texts: Sequence[str], special: bool = False, most: int | None = None
    ) -> list[np.ndarray]:
        """Returns the bytes of each text: no text is a special token."""
        if most is not None:
            texts = [t[: most + 1] for t in texts]
        return [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Returns the text; bytes that are not UTF-8 show as the replacement character, and special
        ids as nothing, or with `special` as <|256|>."""
        if special:
            ids = [b for i in map(int, ids) for b in (self._name(i) if i >= 256 else (i,))]
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")

    def _name(self, i: int) -> bytes:
        """Returns how a special id is written; an id that is none has no name."""
        return f"<|{i}|>".encode() if i < self.vocab else b""

    def pieces(self) -> list[bytes | None]:
        """Returns the byte of each id; None: special."""
        return [*(bytes([b]) for b in range(256)), None, None, None]

    def prefix(self) -> list[int]:
        """Returns the id that begins a document."""
        return [] if self.begin is None else [self.begin]


class JsonTokenizer:
    """A tokenizer.json, read by the `tokenizers` package, with the settings that go with it.

    raw: the tokenizer.json. settings: what the files beside it say. chat_template: in Jinja, or
    None.
    """

    def __init__(self, raw: bytes, settings: Settings | Callable[[bool], Settings], name: str):
        """settings: or what returns them, told whether the tokens are bytes.

        Raises: UserError when raw is no tokenizer, or its special tokens are not (data/
        token_ids.py).
        """
        import tokenizers  # here, so that runs on bytes need not load it

        with _errors_of(f"{name} is not a tokenizer.json"):
            parsed = files.parse_json(raw)
            _check_lengths(parsed)
            _check_normalizer(parsed.get("normalizer"))
            self._tokenizer = tokenizers.Tokenizer.from_buffer(raw)
        self._decoder, post_processor = parsed.get("decoder"), parsed.get("post_processor")
        if callable(settings):
            settings = settings(token_ids.is_byte_level(self._decoder))
        self.raw, self.settings, self.name = raw, settings, name
        self._tokenizer.encode_special_tokens = True  # special tokens' text stays text
        self._tokenizer.no_truncation()  # settings of a model's inputs, not of documents
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None  # encoding again gives the same ids
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise UserError(f"{name} has no tokens (--data.tokenizer)")
        largest = max(ids.values())  # ids may have gaps
        token_ids.check_largest(largest, len(ids), name)
        self.vocab = largest + 1
        special = token_ids.resolve(settings, post_processor, ids, name)
        self.begin, self.end, self.ends = special.begin, special.end, special.ends
        before, after = token_ids.template_ids(post_processor)
        self.template = tuple(before), tuple(after)
        self.chat_template: str | None = settings.chat_template
        content = raw + f" {self.begin} {self.end}".encode()
        self.identity = hashlib.blake2b(content, digest_size=8).hexdigest()
        self._forbidden = self._find_forbidden(parsed["model"])
        self.strips_space = token_ids.strips_space(self._decoder)

    def _find_forbidden(self, model: dict[str, Any]) -> np.ndarray:
        """Returns the ids that no text becomes: special ones but the one of unknown text."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {i for i, token in added if token.special} | {self.begin, self.end}
        unknown = model.get("unk_id")  # Unigram's has no other way
        if unknown is None and (name := model.get("unk_token")) is not None:
            unknown = self._tokenizer.token_to_id(name)
        ids = [i for i in special if i is not None and i != unknown]
        return np.array(sorted(ids), np.int32)

    def encode(
        self, texts: Sequence[str], special: bool = False, most: int | None = None
    ) -> list[np.ndarray]:
        """Returns the token ids of each text. Raises: UserError when it has none for a text.

        A text of more than PIECE characters is encoded in pieces, which keeps memory bounded. They
        end between two words where cutting changes no id; a text without such a place, as one word
        of a million letters, is cut after PIECE characters, and a warning says so.
        """
        encode = functools.partial(self._encode, special=special)
        if max(map(len, texts), default=0) <= (PIECE if most is None else PART):
            return encode(texts)
        return [self._encode_long(text, encode, most) for text in texts]

    def _encode_long(self, text: str, encode: Encode, most: int | None) -> np.ndarray:
        parts: list[np.ndarray] = []
        if len(text) <= (PIECE if most is None else PART):
            return encode([text])[0]
        if most is None:
            for pieces in itertools.batched(self._pieces_of(text, encode), TOGETHER):
                parts += encode(pieces)
            return np.concatenate(parts)
        size = 0
        for at in range(0, len(text), PART):
            parts += encode([text[at : at + PART]])
            size += len(parts[-1])
            if size > 2 * most:  # a cut adds a token or two
                return np.concatenate(parts)
        return encode([text])[0]

    def _pieces_of(self, text: str, encode: Encode) -> Iterator[str]:
        """Yields the pieces of a long text."""
        begin, warned = 0, False
        while len(text) - begin > PIECE:
            places = [m.start() for m in BETWEEN.finditer(text, begin + PIECE // 2, begin + PIECE)]
            for at in reversed(places[-TRIES:]):
                if (skipped := self._cut(text, at, encode)) is not None:
                    break
            else:
                at, skipped = begin + PIECE, 0
                if not warned:
                    logging.warning(
                        "%s: a text of %s characters has %s without a place between words where "
                        "it can be cut unseen; its tokens are cut after %r, and wherever that "
                        "happens again.",
                        self.name,
                        f"{len(text):,}",
                        f"{PIECE:,}",
                        text[at - 20 : at],
                    )
                warned = True
            yield text[begin:at]
            begin = at + skipped
        yield text[begin:]

    def _cut(self, text: str, at: int, encode: Encode) -> int | None:
        """Returns how many characters to leave out (0, or the space) so that a text that is cut
        before `at` keeps its ids; None: it does not. Judged by the characters around."""
        left, right = text[max(0, at - WINDOW) : at], text[at : at + WINDOW]
        joined, before, after, bare = encode([left + right, left, right, right[1:]])
        for skipped, ids in ((0, after), (1, bare)):
            if np.array_equal(joined, np.concatenate([before, ids])):
                return skipped
        return None

    def _encode(self, texts: Sequence[str], special: bool) -> list[np.ndarray]:
        tokenizer = self._special_too if special else self._tokenizer
        with _errors_of(f"{self.name} cannot encode"):
            batch = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            rows = [np.array(e.ids, np.int32) for e in batch]
            if special:
                return rows
            return [
                _without(self._forbidden, tokenizer, text)
                if np.isin(ids, self._forbidden).any()
                else ids
                for text, ids in zip(texts, rows, strict=True)
            ]

    def renamed(self, names: Mapping[int, str]) -> Callable[[str, int | None], np.ndarray]:
        """Returns a function (text, most) -> ids, int32, that encodes a text in which some special
        tokens are spelled by other names. chat.py takes random names, which it puts between the
        messages of a chat, so that no message can spell a special token.

        The new names become the tokens. The usual spellings of these tokens, and of all other
        special tokens, are encoded as ordinary text. most: as in `encode`.

        Args: names: {id: new name}, for ids of `added`.
        Raises: UserError if a new name would get the id of an ordinary token, which happens if the
          ids of the special tokens have gaps.
        """
        import tokenizers

        made, ids = json.loads(self._tokenizer.to_str()), {}
        for token in made["added_tokens"]:
            token["content"] = names.get(token["id"], token["content"])
            ids[token["content"]] = token["id"]
        other = tokenizers.Tokenizer.from_str(json.dumps(made))
        # The copy may number its special tokens anew: {id in the copy: id in this tokenizer}.
        usual: dict[Any, int] = {other.token_to_id(name): i for name, i in ids.items()}
        pieces = set(self._tokenizer.get_vocab(with_added_tokens=False).values())
        if any(new != old and new in pieces for new, old in usual.items()):
            raise UserError(f"{self.name}: its special tokens cannot be told from their text")
        lost = np.array([i for i in self._forbidden if i not in usual], np.int32)

        def encode(texts: Sequence[str]) -> list[np.ndarray]:
            # Ids of the copy. An id in `lost` is a special token here and an ordinary piece there;
            # a text that has one is cut inside that piece (`_without`).
            with _errors_of(f"{self.name} cannot encode"):
                batch = other.encode_batch_fast(list(texts), add_special_tokens=False)
                rows = [np.array(e.ids, np.int32) for e in batch]
                return [
                    _without(lost, other, text) if np.isin(ids, lost).any() else ids
                    for text, ids in zip(texts, rows, strict=True)
                ]

        def encode_one(text: str, most: int | None) -> np.ndarray:
            encoded = self._encode_long(text, encode, most).tolist()
            return np.array([usual.get(i, i) for i in encoded], np.int32)

        return encode_one

    def added(self) -> dict[int, tuple[str, bool]]:
        """Returns {id: (its text, whether it is special)} of the tokens that no text is cut into:
        they are looked for before."""
        listed = self._tokenizer.get_added_tokens_decoder().items()
        return {i: (token.content, token.special) for i, token in listed if token.content}

    def id_of(self, token: str) -> int | None:
        """Returns the id of a token, None for what is none."""
        return self._tokenizer.token_to_id(token)

    def copy_to(self, folder: Path) -> None:
        """Writes the files that `open_tokenizer(folder)` reads; keeps those that are there."""
        settings = self.settings
        made: dict[str, Any] = {}
        if not settings.silent:
            named = {
                k: settings.tokens[k] for k in ("bos_token", "eos_token") if k in settings.tokens
            }
            made[CONFIG] = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
            if self.chat_template:
                made[CONFIG]["chat_template"] = self.chat_template
        if settings.eos_ids is not None:
            made[GENERATION] = {"eos_token_id": list(settings.eos_ids)}
        self._write(folder, {name: json.dumps(m, indent=2) + "\n" for name, m in made.items()})

    def _write(self, folder: Path, made: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "tokenizer.json").exists():
            files.write_whole(folder / "tokenizer.json", self.raw)
        for name, text in made.items():
            if text and not (folder / name).exists():
                files.write_whole(folder / name, text)

    def pieces(self) -> list[bytes | None]:
        """Returns the bytes of each id, None for special ones, as data/token_ids.py.

        Raises: UserError for tokens that do not stand for bytes.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        return token_ids.pieces(self._decoder, vocab, {i: t.special for i, t in added.items()})

    @functools.cached_property
    def _special_too(self) -> Any:
        import tokenizers

        return tokenizers.Tokenizer.from_str(self._tokenizer.to_str())

    def prefix(self) -> list[int]:
        """Returns the special ids before a prompt: those that begin a document."""
        return [] if self.begin is None else [self.begin]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Returns the text of token ids."""
        with _errors_of(f"{self.name} cannot decode"):
            return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=not special)


class FileTokenizer(JsonTokenizer):
    """A tokenizer.json, or another file of a tokenizer, with the settings that lie beside it."""

    def __init__(self, path: Path, name: str):
        """Raises: UserError when the file is not a tokenizer."""
        read: Any = functools.partial(token_ids.read_settings, path.parent)
        if path.name in vocabulary_files.NAMES_OF_FILES:
            with _errors_of(f"{path} is not a tokenizer"):
                raw, read = vocabulary_files.convert(path)
        else:
            with _errors_of(f"{path} is not a tokenizer.json"):
                raw = files.read_bytes(path, MAX_BYTES)
        super().__init__(raw, read, str(path))
        self.name, self.path = name, path

    def copy_to(self, folder: Path) -> None:
        """Writes the files that `open_tokenizer(folder)` reads; keeps those that are there.

        The end tokens that only a config.json names are written as generation_config.json.
        """
        folder.mkdir(parents=True, exist_ok=True)
        made, ids = {}, self.settings.eos_ids
        if ids is not None or self.settings.default_eos is not None:
            file = self.path.parent / GENERATION
            said = files.read_object(file, MAX_BYTES, "data.tokenizer") if file.is_file() else {}
            if "eos_token_id" not in said:
                said["eos_token_id"] = list(self.ends if ids is None else ids)
                made[GENERATION] = json.dumps(said, indent=2) + "\n"
        if self.path.name != "tokenizer.json":  # what its class or its file says is said here
            settings = self.settings
            named = {
                k: settings.tokens[k] for k in ("bos_token", "eos_token") if k in settings.tokens
            }
            made[CONFIG] = json.dumps({**settings.members, **named}, indent=2) + "\n"
            made[MAP] = ""
        for name in BESIDE:
            path = self.path.parent / name
            if path.is_file() and name not in made and not (folder / name).exists():
                shutil.copyfile(path, folder / name)
        self._write(folder, made)


def _without(forbidden: np.ndarray, tokenizer: Any, text: str) -> np.ndarray:
    """Returns the ids of a text, cut inside what a tokenizer makes a forbidden token of.

    For models whose own pieces include a special token (Unigram, WordLevel), or whose begin and end
    are not marked as special.
    """
    encoding = tokenizer.encode(text, add_special_tokens=False)
    special = np.isin(encoding.ids, forbidden)
    spans = [encoding.offsets[i] for i in np.flatnonzero(special)]
    cuts = sorted({c for start, stop in spans if 0 < (c := (start + stop) // 2) < len(text)})
    if not cuts:  # nothing to cut: what is special is left out
        return np.array(encoding.ids, np.int32)[~special]
    pieces = zip([0, *cuts], [*cuts, len(text)], strict=True)
    return np.concatenate([_without(forbidden, tokenizer, text[a:b]) for a, b in pieces])


def _check_lengths(parsed: Any) -> None:
    """Raises: ValueError for a token of more than LONGEST bytes.

    The package keeps the tokens of a Unigram model in a tree, a byte a level, and frees it by a
    recursion that overflows the stack.
    """
    model = parsed.get("model") if isinstance(parsed, dict) else None
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


def _check_normalizer(parsed: Any) -> None:
    """Raises: ValueError for a map of characters in it that says that it is larger than it is."""
    if not isinstance(parsed, dict):
        return
    text = parsed.get("precompiled_charsmap")
    if isinstance(text, str):
        vocabulary_files.check_charsmap(base64.b64decode(text))
    parts = parsed.get("normalizers")
    for part in parts if isinstance(parts, list) else ():
        _check_normalizer(part)


@contextlib.contextmanager
def _errors_of(what: str) -> Iterator[None]:
    """Makes a UserError of what the package raises: Exception itself, and PanicException, which is
    none, where its Rust code meets what it does not expect of a file."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if isinstance(error, UserError) and "--data.tokenizer" in str(error):
            raise
        raise UserError(f"{what}: {error} (--data.tokenizer)") from None


def train_bpe(texts: Iterable[str], vocab: int, path: Path) -> None:
    """Trains a byte-level BPE with `vocab` ids and writes its tokenizer.json.

    A word of more than WORD bytes (base64, DNA, minified code) is learned from in pieces of WORD
    bytes: training takes time linear in its length, and no token is longer.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bounded = [words, pre_tokenizers.FixedLength(length=WORD)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(bounded)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_short(texts), trainer)
    tokenizer.pre_tokenizer = words  # type: ignore
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def write_characters(characters: str, path: Path) -> None:
    """Writes the tokenizer.json of a small alphabet: one id a character, behind <|bos|>, <|eos|>.

    Another character is left out of a text; `decode` gives the characters side by side.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    specials = ["<|bos|>", "<|eos|>"]
    vocab = {text: i for i, text in enumerate([*specials, *dict.fromkeys(characters)])}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab))
    pattern = tokenizers.Regex(r"[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")  # type: ignore
    tokenizer.decoder = decoders.Fuse()  # type: ignore
    tokenizer.add_special_tokens(specials)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, tokenizer.to_str(pretty=True))


def _short(texts: Iterable[str]) -> Iterator[str]:
    """Yields texts in pieces of at most PIECE characters, cut between words where there are any."""
    for text in texts:
        begin = 0
        while len(text) - begin > PIECE:
            gaps = deque(BETWEEN.finditer(text, begin + PIECE // 2, begin + PIECE), maxlen=1)
            at = gaps[0].start() if gaps else begin + PIECE
            yield text[begin:at]
            begin = at
        yield text[begin:]


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
    file = tokenizer_file(path) if path.is_dir() else path
    if file is None or not file.is_file():
        raise UserError(
            f"data.tokenizer={name} is neither bytes nor bpe:N nor a file of a tokenizer nor a "
            f"folder with one: {FILES} (--data.tokenizer)"
        )
    return FileTokenizer(file, name)


def tokenizer_file(folder: Path) -> Path | None:
    """Returns the file of a folder that says what its tokens are, or None."""
    file = folder / "tokenizer.json"
    return file if file.is_file() else vocabulary_files.find(folder)


def need_tokenizer(folder: str | Path, flag: str, chosen: str = "--tokenizer") -> Path:
    """Returns the file of a model's folder that says what its tokens are.

    Args: flag: which named the folder. chosen: the flag that names another tokenizer.
    Raises: UserError where there is none: the ids of a model are never taken for bytes unasked.
    """
    file = tokenizer_file(model_folder(folder, flag))
    if file is None:
        raise UserError(
            f"{flag}={folder} has no tokenizer ({FILES}): say what its tokens are ({chosen}=bytes, "
            f"{chosen}=FILE)"
        )
    return file


def prompt_ids(
    tokenizer: Tokenizer,
    text: str,
    special: bool = True,
    begin: bool = True,
    most: int | None = None,
) -> list[int]:
    """Returns the ids of a prompt: what begins a document, then the text. Completions,
    scripts/generate.py and the samples of a training have them.

    The end that some tokenizers put behind a text (their post_processor) is left out: what goes on
    behind it would be another text. A begin that the text itself writes is not taken out.

    Args: special, most: as `Tokenizer.encode`. begin: whether the begin id comes first.
    """
    ids = tokenizer.encode([text], special, most)[0].tolist()
    return [*tokenizer.prefix(), *ids] if begin else ids


def check_vocabulary(tokenizer: Tokenizer, vocab: int) -> None:
    """Refuses a tokenizer whose ids a model's vocabulary lacks."""
    if tokenizer.vocab > vocab:
        raise UserError(
            f"the tokenizer {tokenizer.name} has ids up to {tokenizer.vocab - 1}, the model's "
            f"vocabulary is model.vocab={vocab}; nearest: {tokenizer.vocab} (--model.vocab, "
            "--data.tokenizer)"
        )
