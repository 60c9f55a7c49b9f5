"""Text to token ids and back: bytes, a BPE trained on the corpus, or a Hugging Face tokenizer.json.

A document becomes [begin] tokens [end] with the tokenizer's special ids, where it has them.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megajax.core.errors import UserError

BEGIN_NAMES = ("<|begin_of_text|>", "<|bos|>", "<s>", "<bos>", "<|endoftext|>", "[CLS]")
END_NAMES = ("<|end_of_text|>", "<|eos|>", "</s>", "<eos>", "<|endoftext|>", "[SEP]")


class Tokenizer(Protocol):
    """What the data pipeline and sampling need. begin, end: special ids, or None."""

    name: str
    vocab: int
    begin: int | None
    end: int | None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token ids of each text, without special ids."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids; special ids give nothing."""
        ...


class ByteTokenizer:
    """One id a byte of UTF-8; 256 begins a document, 257 ends it, 258 is spare."""

    name: str = "bytes"
    vocab: int = 259
    begin: int | None = 256
    end: int | None = 257

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the bytes of each text."""
        return [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text; bytes that are not UTF-8 show as the replacement character."""
        return bytes(i for i in map(int, ids) if i < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, read by the `tokenizers` package."""

    def __init__(self, path: Path, name: str):
        """Raises: UserError when the file is not a tokenizer."""
        import tokenizers  # here, so that runs on bytes need not load it

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise UserError(f"{path} is not a tokenizer.json: {error} (--data.tokenizer)") from None
        self.name, self.path = name, path
        self.vocab = self._tokenizer.get_vocab_size(with_added_tokens=True)
        declared = _special_tokens(path.parent)
        self.begin = self._special(declared.get("bos_token"), BEGIN_NAMES)
        self.end = self._special(declared.get("eos_token"), END_NAMES)

    def _special(self, declared: str | None, usual: tuple[str, ...]) -> int | None:
        names = (declared, *usual) if declared else usual
        ids = (self._tokenizer.token_to_id(n) for n in names)
        return next((i for i in ids if i is not None), None)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token ids of each text."""
        batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(e.ids, np.int32) for e in batch]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of token ids."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)


def _special_tokens(folder: Path) -> dict[str, str]:
    """Returns bos_token and eos_token of a tokenizer_config.json beside the tokenizer."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text())
    named = {k: found.get(k) for k in ("bos_token", "eos_token")}
    return {
        k: v["content"] if isinstance(v, dict) else v for k, v in named.items() if v is not None
    }


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
    temporary = path.with_suffix(".tmp")
    tokenizer.save(str(temporary))
    temporary.replace(path)


def bpe_size(name: str) -> int | None:
    """Returns N of 'bpe:N', or None for another kind of name. Raises: UserError for a bad N."""
    kind, _, size = name.partition(":")
    if kind != "bpe":
        return None
    if not size.isdigit() or int(size) < 258:
        raise UserError(
            f"data.tokenizer={name}: bpe:N needs N of at least 258, the bytes and two specials "
            "(--data.tokenizer=bpe:8192)"
        )
    return int(size)


def open_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer 'bytes' or the one of a tokenizer.json (or its folder)."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
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
            f"the tokenizer {tokenizer.name} has {tokenizer.vocab} ids, the model's vocabulary is "
            f"model.vocab={vocab}; nearest: {tokenizer.vocab} (--model.vocab, --data.tokenizer)"
        )
