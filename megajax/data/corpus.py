"""From a configuration to tokens on disk: each source is tokenised once and cached.

The cache is keyed by the corpus (folder, names, sizes and times of its files) and the tokenizer. A
killed run leaves nothing half-made, and what is damaged is made again (documents.py). Which
documents are held out is decided by their content, over all parts of a mixture (documents.py).
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from absl import logging

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.data import documents as documents_
from megajax.data.config import DataConfig
from megajax.data.documents import (
    FORMAT,
    Documents,
    Parted,
    is_held_out,
    is_whole,
    make_folder,
    open_documents,
    part,
    publish,
    text_key,
    token_key,
)
from megajax.data.indexed import TokenFile, TokenWriter
from megajax.data.pack import Split, mix, parse
from megajax.data.source import Document, Source, open_source
from megajax.data.tokenizer import (
    FileTokenizer,
    Tokenizer,
    bpe_size,
    check_vocabulary,
    open_tokenizer,
    train_bpe,
)

SUFFIXES = (".bin", ".documents.npy", ".json", ".tokenizer")  # beside the .idx of a pair
BATCH = 256  # documents tokenised at a time
BATCH_CHARACTERS = 2**24  # (chosen) of these documents together, but for one that is longer


@dataclasses.dataclass(frozen=True)
class Corpus:
    """One source, tokenised and split.

    held_out: None when nothing is held out. bytes_per_token: of the held-out text, or None when
    nobody knows (a foreign .bin). fingerprint: changes when the tokens or the split would.
    copies: documents that equal an earlier one, of this corpus or one before it in the mixture;
    None when they were not compared.
    """

    name: str
    weight: float
    train: Split
    held_out: Split | None
    bytes_per_token: float | None
    fingerprint: str
    copies: int | None = None


def open_corpora(
    cfg: DataConfig,
    cache_dir: str | Path,
    say: Callable[[str], None] = print,
    vocab: int | None = None,
) -> tuple[list[Corpus], Tokenizer]:
    """Returns the corpora of `data.source` and the tokenizer, from the cache where possible.

    say: is called with a line before work that takes long. vocab: the vocabulary size of the model;
    rows with a larger id are refused.

    Raises: UserError for sources and tokenizers that do not exist, cannot be read or do not fit.
    """
    cache = expand(cache_dir, "cache_dir")
    named = parse(cfg.source)
    prefixes = {name: _megatron_prefix(name) for name, _ in named}
    sources = {name: open_source(name, cfg) for name, prefix in prefixes.items() if prefix is None}
    for source in sources.values():
        if said := source.coverage():
            say(said)
    tokenizer = open_tokenizer_for(cfg, list(sources.values()), cache, say)
    if vocab is not None:
        check_vocabulary(tokenizer, vocab)
    files, keys = [], []
    for name, _ in named:
        if (prefix := prefixes[name]) is not None:
            _check_recorded(prefix, tokenizer, cfg)
        else:
            prefix = _tokenised(sources[name], tokenizer, cache, say) / "tokens"
        files.append(TokenFile(prefix, vocab))
        hashed = cfg.hash_gib * 2**30 if cfg.holdout else 0
        keys.append(open_documents(files[-1], tokenizer, hashed, cache, say))
        if cfg.holdout and not keys[-1].compared:
            logging.warning(
                "%s.bin is %.1f GiB and was not read as a whole: its documents are held out by "
                "their number, so a copy of one may be trained on (--data.hash_gib).",
                prefix,
                files[-1].nbytes / 2**30,
            )
    parts = part(files, keys, cfg.holdout, tokenizer.begin, tokenizer.end)
    return [
        Corpus(
            name,
            weight,
            p.train,
            p.held_out,
            p.bytes_per_token,
            _fingerprint(file, key, p),
            p.copies,
        )
        for (name, weight), file, key, p in zip(named, files, keys, parts, strict=True)
    ], tokenizer


def _megatron_prefix(name: str) -> Path | None:
    if name.endswith("/"):
        return None  # the folder of that name
    path = expand(name, "data.source")
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = [os.path.isfile(f"{prefix}{s}") for s in (".bin", ".idx")]
    if path.suffix in (".bin", ".idx") and not all(pair):
        raise UserError(
            f"data.source={name} needs both {prefix}.bin and {prefix}.idx (--data.source)"
        )
    return prefix if all(pair) else None


def recorded_tokenizer(source: str) -> str | None:
    """Returns the tokenizer that a .bin of `data.source` was made with; None: no file states it."""
    for name, _ in parse(source):
        prefix = _megatron_prefix(name)
        if prefix is not None and (recorded := _recorded(prefix)) is not None:
            return recorded
    return None


def _recorded(prefix: Path) -> str | None:
    name = documents_.read_stats(prefix).get("tokenizer")
    folder = Path(f"{prefix}.tokenizer")
    if (folder / "tokenizer.json").is_file():
        return str(folder)
    return "bytes" if name == "bytes" else None


def _check_recorded(prefix: Path, tokenizer: Tokenizer, cfg: DataConfig) -> None:
    """Refuses another tokenizer than the one that a .bin was made with."""
    identity = documents_.read_stats(prefix).get("tokenizer_identity")
    if identity is None:
        if tokenizer.name == "bytes":  # nobody chose another
            logging.warning(
                "%s.bin says nothing about its tokenizer: samples take its ids for bytes "
                "(--data.tokenizer).",
                prefix,
            )
        return
    if identity != tokenizer.identity:
        recorded = _recorded(prefix)
        raise UserError(
            f"{prefix}.bin was made with another tokenizer than data.tokenizer={cfg.tokenizer}: "
            f"{prefix}.json names {recorded or identity}"
            + (f" (--data.tokenizer={recorded})" if recorded else " (--data.tokenizer)")
        )


def open_tokenizer_for(
    cfg: DataConfig, sources: list[Source], cache: Path, say: Callable[[str], None] = print
) -> Tokenizer:
    """Returns the tokenizer of a configuration; a BPE is trained on the sources and cached."""
    size = bpe_size(cfg.tokenizer)
    if size is None:
        return open_tokenizer(cfg.tokenizer)
    if not sources:
        raise UserError(f"data.tokenizer={cfg.tokenizer} needs text to train on, not a .bin")
    key = mix(FORMAT, str(cfg.holdout), *(f"{s.place()} {s.fingerprint()}" for s in sources))
    folder = cache / "tokenizers" / f"bpe-{size}-{key:016x}"

    def fill(new: Path) -> None:
        train_bpe(_learned_text(sources, cfg.holdout), size, new / "tokenizer.json")

    _cached(folder, f"training a BPE of {size} ids", fill, say)
    return open_tokenizer(str(folder / "tokenizer.json"))


def _cached(
    folder: Path, what: str, fill: Callable[[Path], None], say: Callable[[str], None]
) -> None:
    """Makes a folder of the cache, unless it is there and whole. Raises: UserError."""
    if is_whole(folder):
        return
    say(what)
    try:
        make_folder(folder, fill)
    except OSError as error:
        raise _cannot_cache(folder, error) from None


def _learned_text(sources: list[Source], fraction: float) -> Iterator[str]:
    """Yields the texts that are not held out; of a source with all on one side, all the heads.

    The tail of one of these is held out; which one is the longest in tokens is not known yet.
    """
    for source in sources:
        sides = set()
        is_split = any(
            sides.add(is_held_out(d.text, fraction)) or len(sides) == 2 for d in source.documents()
        )
        for text in (d.text for d in source.documents()):
            if not is_split:
                yield text[: int(len(text) * (1 - fraction))]
            elif not is_held_out(text, fraction):
                yield text


def _cannot_cache(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write to the cache {folder}: {error.strerror or error}; name a folder that can be "
        "written (--cache_dir)"
    )


def tokenise(source: Source, tokenizer: Tokenizer, prefix: Path) -> dict:
    """Writes prefix.bin, .idx, .documents.npy (keys, bytes), .json (statistics) and .tokenizer/.

    All of them appear at the end, the .idx last.

    Returns: the statistics {documents, tokens, tokenizer, source, ...}.
    Raises: OSError, FileExistsError when prefix.idx exists; UserError for text that cannot be read.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{prefix.name}.", dir=prefix.parent) as scratch:
        stats = _write_tokens(source, tokenizer, Path(scratch) / "tokens")
        publish(Path(scratch) / "tokens", prefix, SUFFIXES, ".idx")
    return stats


def _write_tokens(source: Source, tokenizer: Tokenizer, prefix: Path) -> dict:
    texts, tokens, sizes = [], [], []
    begin, end = (
        np.array([] if i is None else [i], np.int32) for i in (tokenizer.begin, tokenizer.end)
    )
    with TokenWriter(prefix, tokenizer.vocab) as writer:
        for batch in _batches(source.documents()):
            encoded = tokenizer.encode([d.text for d in batch])
            for document, ids in zip(batch, encoded, strict=True):
                writer.add(begin, ids, end)
                texts.append(text_key(document.text))
                tokens.append(token_key(ids))
                sizes.append(len(document.text.encode()))
    if not texts:
        raise UserError(f"data.source={source.name} holds no text (--data.source)")
    documents_.write_documents(prefix, texts, tokens, sizes)
    if isinstance(tokenizer, FileTokenizer):
        tokenizer.copy_to(Path(f"{prefix}.tokenizer"))
    stats = {
        "source": source.name,
        "tokenizer": tokenizer.name,
        "tokenizer_identity": tokenizer.identity,
        "vocab": tokenizer.vocab,
        "documents": len(texts),
        "tokens": writer.tokens,
        "bytes": int(sum(sizes)),
        "fingerprint": source.fingerprint(),
    }
    Path(f"{prefix}.json").write_text(json.dumps(stats, indent=2) + "\n")
    return stats


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yields documents together, few of them where they are long, which bounds the memory."""
    batch, characters = [], 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == BATCH or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _tokenised(
    source: Source, tokenizer: Tokenizer, cache: Path, say: Callable[[str], None]
) -> Path:
    """Returns the folder with the tokens of a source, made now if it is not in the cache."""
    identity = mix(FORMAT, source.place(), source.fingerprint(), tokenizer.identity)
    folder = cache / "corpora" / f"{identity:016x}"
    what = f"tokenising {source.name}: {len(source.files)} files"

    def fill(new: Path) -> None:
        tokenise(source, tokenizer, new / "tokens")

    _cached(folder, what, fill, say)
    return folder


def _fingerprint(file: TokenFile, keys: Documents, parted: Parted) -> str:
    """Returns a hash of the tokens (of a sample where they were not read) and of the split."""
    digest = hashlib.blake2b(f"{FORMAT} {file.nbytes}".encode(), digest_size=8)
    digest.update(keys.tokens.tobytes() + file.lengths.tobytes())
    if not keys.compared:
        digest.update(documents_.sample(file).tobytes())
    for split in (parted.train, parted.held_out):
        for array in (split.document, split.start, split.stop) if split is not None else ():
            digest.update(np.ascontiguousarray(array, np.int64).tobytes())
    return digest.hexdigest()
