"""From a configuration to tokens on disk: each source is tokenised once and cached.

The cache is keyed by the corpus (names, sizes, times of its files) and the tokenizer, and appears
by one rename, so a killed run leaves nothing half-made. A document is held out when the hash of
its name says so: the split stays the same when files are added, and never cuts a document.
"""

import dataclasses
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from absl import logging

from megajax.core.errors import UserError
from megajax.data.config import DataConfig
from megajax.data.indexed import TokenFile, TokenWriter
from megajax.data.mixture import parse
from megajax.data.pack import Split, mix, whole_documents
from megajax.data.source import Source, open_source
from megajax.data.tokenizer import Tokenizer, bpe_size, open_tokenizer, train_bpe

BATCH = 256  # documents tokenised at a time


@dataclasses.dataclass(frozen=True)
class Corpus:
    """One source, tokenised and split.

    held_out: None when nothing is held out. bytes_per_token: of the held-out text, or None when
    nobody knows (a foreign .bin). fingerprint: changes when the tokens would.
    """

    name: str
    weight: float
    train: Split
    held_out: Split | None
    bytes_per_token: float | None
    fingerprint: str


def open_corpora(
    cfg: DataConfig, cache_dir: str | Path, say: Callable[[str], None] = print
) -> tuple[list[Corpus], Tokenizer]:
    """Returns the corpora of `data.source` and the tokenizer, from the cache where possible.

    say: hears what takes long.

    Raises: UserError for sources and tokenizers that do not exist or cannot be read.
    """
    cache = Path(cache_dir).expanduser()
    named = parse(cfg.source)
    files = {name: _megatron_prefix(name) for name, _ in named}
    sources = {name: open_source(name, cfg) for name, prefix in files.items() if prefix is None}
    tokenizer = open_tokenizer_for(cfg, list(sources.values()), cache, say)
    corpora = []
    for name, weight in named:
        if (prefix := files[name]) is not None:
            corpora.append(_open(name, weight, prefix, cfg.holdout))
        else:
            folder = _tokenised(sources[name], tokenizer, cache, say)
            corpora.append(_open(name, weight, folder / "tokens", cfg.holdout))
    return corpora, tokenizer


def _megatron_prefix(name: str) -> Path | None:
    path = Path(name).expanduser()
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    pair = [Path(f"{prefix}{s}").is_file() for s in (".bin", ".idx")]
    if path.suffix in (".bin", ".idx") and not all(pair):
        raise UserError(f"data.source={name} needs both {prefix}.bin and {prefix}.idx")
    return prefix if all(pair) else None


def open_tokenizer_for(
    cfg: DataConfig, sources: list[Source], cache: Path, say: Callable[[str], None] = print
) -> Tokenizer:
    """Returns the tokenizer of a configuration; a BPE is trained on the sources and cached."""
    size = bpe_size(cfg.tokenizer)
    if size is None:
        return open_tokenizer(cfg.tokenizer)
    if not sources:
        raise UserError(f"data.tokenizer={cfg.tokenizer} needs text to train on, not a .bin")
    key = "-".join(s.fingerprint() for s in sources)
    path = cache / "tokenizers" / f"bpe-{size}-{key}" / "tokenizer.json"
    if not path.is_file():
        say(f"training a BPE of {size} ids")
        kept = (d.text for s in sources for d in s.documents() if not is_held_out(d.name, cfg))
        train_bpe(kept, size, path)
    return open_tokenizer(str(path))


def is_held_out(name: str, cfg: DataConfig) -> bool:
    """Tells by the hash of its name whether a document is held out."""
    return _share(name) < cfg.holdout


def _share(name: str) -> float:
    return mix("held out", name) / 2**64


def tokenise(source: Source, tokenizer: Tokenizer, prefix: Path) -> dict:
    """Writes prefix.bin, .idx, .documents.npy (hold-out hash, bytes) and .json (statistics).

    Returns: the statistics {documents, tokens, tokenizer, source}.
    """
    shares, sizes = [], []
    with TokenWriter(prefix, tokenizer.vocab) as writer:
        for batch in _batches(source.documents()):
            encoded = tokenizer.encode([d.text for d in batch])
            for document, ids in zip(batch, encoded, strict=True):
                writer.add(_with_specials(ids, tokenizer))
                shares.append(_share(document.name))
                sizes.append(len(document.text.encode()))
    if not shares:
        raise UserError(f"data.source={source.name} holds no text (--data.source)")
    np.save(f"{prefix}.documents.npy", np.array([shares, sizes], np.float64))
    stats = {
        "source": source.name,
        "tokenizer": tokenizer.name,
        "documents": len(shares),
        "tokens": writer.tokens,
        "bytes": int(sum(sizes)),
        "fingerprint": source.fingerprint(),
    }
    Path(f"{prefix}.json").write_text(json.dumps(stats, indent=2) + "\n")
    return stats


def _with_specials(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    end = [] if tokenizer.end is None else [tokenizer.end]
    return np.concatenate([begin, ids, end]).astype(np.int32)


def _batches(items: Iterable) -> Iterator[list]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, BATCH)):
        yield batch


def _tokenised(
    source: Source, tokenizer: Tokenizer, cache: Path, say: Callable[[str], None]
) -> Path:
    """Returns the folder with the tokens of a source, made now if it is not in the cache."""
    identity = mix(source.name, str(source.root), source.fingerprint(), _identity(tokenizer))
    folder = cache / "corpora" / f"{identity:016x}"
    if (folder / "tokens.json").is_file():
        return folder
    say(f"tokenising {source.name}: {len(source.files)} files")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        tokenise(source, tokenizer, temporary / "tokens")
        temporary.rename(folder)
    except OSError as error:
        if not (folder / "tokens.json").is_file():  # else another process was first: use its result
            raise UserError(f"cannot cache the tokens in {folder}: {error} (--cache_dir)") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _identity(tokenizer: Tokenizer) -> str:
    path = getattr(tokenizer, "path", None)
    return tokenizer.name if path is None else f"{mix(path.read_text()):016x}"


def _open(name: str, weight: float, prefix: Path, holdout: float) -> Corpus:
    """Opens a token file and splits its documents."""
    file = TokenFile(prefix)
    table = Path(f"{prefix}.documents.npy")
    if table.is_file():
        shares, sizes = np.load(table)
    else:  # a foreign file: the document's number is its name
        shares, sizes = np.array([_share(f"#{i}") for i in range(len(file))]), None
    held = shares < holdout
    stats = Path(f"{prefix}.json")
    fingerprint = (
        json.loads(stats.read_text())["fingerprint"]
        if stats.is_file()
        else f"{Path(f'{prefix}.bin').stat().st_size:x}"
    )
    train = whole_documents(file, np.flatnonzero(~held))
    held_out = whole_documents(file, np.flatnonzero(held)) if held.any() else None
    if (held_out is None or not train.tokens) and holdout > 0:
        train, held_out = _cut_tail(file, holdout)
        logging.warning(
            "%s has too few documents to hold some out; its last %.0f %% are held out instead.",
            name,
            100 * holdout,
        )
        held = np.ones_like(held)
    ratio = None
    if sizes is not None and held.any():
        ratio = float(sizes[held].sum()) / float(file.lengths[held].sum())
    return Corpus(name, weight, train, held_out, ratio, f"{fingerprint}-{holdout}")


def _cut_tail(file: TokenFile, holdout: float) -> tuple[Split, Split]:
    """Splits the longest document: its tail is held out, never a random window."""
    documents = np.arange(len(file))
    stop = file.lengths.astype(np.int64)
    longest = int(np.argmax(stop))
    cut = int(stop[longest] * (1 - holdout))
    tail = Split(
        file, np.array([longest]), np.array([cut], np.int64), np.array([stop[longest]], np.int64)
    )
    shortened = stop.copy()
    shortened[longest] = cut
    return Split(file, documents, np.zeros_like(stop), shortened), tail
