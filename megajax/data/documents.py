"""What the documents of a token file are, by content: keys that copies share wherever they lie.

The key of a text or of its tokens is a 64-bit hash of all of it, so equal documents have equal keys
whatever file, line or source holds them; the begin and end tokens do not count. A file that
scripts/tokenize.py wrote has its keys beside it; any other pair is read once, and the keys are
cached. A pair beyond `data.hash_gib` is not read: its documents are known by their number only.
"""

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from megajax.core import files
from megajax.core.errors import UserError
from megajax.data.indexed import TokenFile
from megajax.data.pack import mix
from megajax.data.tokenizer import Tokenizer
from megajax.data.whole import load_table, read_array, save_table

MAX_STATS = 2**20  # (chosen) bytes of a record of statistics
FORMAT = 2  # of the tables, the split and the encoding: part of every name in the cache
BATCH = 1 << 20  # tokens hashed at a time
SAMPLED = 1 << 24  # tokens that are looked at when a file is opened
COMPARED = 64  # documents whose recorded keys are compared with the tokens
PLACES = 1 << 10  # where a larger file is sampled


@dataclasses.dataclass(frozen=True)
class Documents:
    """Keys (n,) of a file's documents, uint64. texts, sizes (bytes of UTF-8): None when unknown.

    compared: whether `tokens` follow from the content; if not, copies are not found.
    """

    tokens: np.ndarray
    texts: np.ndarray | None
    sizes: np.ndarray | None
    compared: bool = True


def text_key(text: str) -> int:
    """Returns the key of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def token_key(tokens: np.ndarray) -> int:
    """Returns the key of tokens, begin and end left out by the caller."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def write_documents(prefix: Path, texts: list[int], tokens: list[int], sizes: list[int]) -> None:
    """Writes prefix.documents.npy."""
    np.save(f"{prefix}.documents.npy", np.array([texts, tokens, sizes], np.uint64))


def read_stats(prefix: Path) -> dict[str, Any]:
    """Returns what tokenise wrote into prefix.json, {} where there is none.

    Raises: UserError when the file is no such record.
    """
    path = Path(f"{prefix}.json")
    if not path.is_file():
        return {}
    return files.read_object(path, MAX_STATS, "data.source")


def open_documents(
    file: TokenFile,
    tokenizer: Tokenizer,
    hashed_bytes: float,
    cache: Path,
    say: Callable[[str], None],
) -> Documents:
    """Returns the keys of a file's documents: recorded beside it, cached, or read now.

    hashed_bytes: a pair that is larger and not recorded is not read. Its ids are sampled, as those
    of any pair are that is opened without a full reading; each row is checked when it is packed.
    Raises: UserError for a record that does not fit, and for ids that the vocabulary lacks.
    """
    recorded = _recorded(file)
    if recorded is not None:
        _check_sample(file)
        _check_recorded(file, recorded, tokenizer)
        return recorded
    if file.nbytes > hashed_bytes:
        _check_sample(file)
        return Documents(_numbers(len(file)), None, None, compared=False)
    begin, end = tokenizer.begin, tokenizer.end
    stats = [os.stat(f"{file.prefix}{s}") for s in (".bin", ".idx")]
    seen = [f"{s.st_size} {s.st_mtime_ns}" for s in stats]
    name = mix(FORMAT, str(file.prefix.resolve()), *seen, str(begin), str(end))
    path = cache / "documents" / f"{name:016x}.npy"
    keys = load_table(path)
    if keys is not None and keys.shape == (len(file),) and keys.dtype == np.uint64:
        _check_sample(file)
        return Documents(keys, None, None)
    if file.nbytes > SAMPLED:
        say(f"reading {file.prefix}.bin once to know copies: {file.nbytes / 2**30:.1f} GiB")
    keys = _hash(file, begin, end)
    _keep(path, keys)
    return Documents(keys, None, None)


def _recorded(file: TokenFile) -> Documents | None:
    path = Path(f"{file.prefix}.documents.npy")
    if not path.is_file():
        return None
    try:
        table = read_array(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {error} (--data.source)") from None
    if table.dtype != np.uint64 or table.shape != (3, len(file)):
        raise UserError(
            f"{path} is of another file, or an older format: it must be a (3, {len(file)}) table of"
            f" uint64, and is {table.shape} of {table.dtype}; tokenise the text again, or remove "
            "the table to have the tokens themselves read (--data.source)"
        )
    return Documents(table[1], table[0], table[2].astype(np.int64))


def _check_recorded(file: TokenFile, documents: Documents, tokenizer: Tokenizer) -> None:
    """Refuses a table whose keys are not those of the tokens, at some documents of the file."""
    for i in np.unique(np.linspace(0, len(file) - 1, COMPARED).astype(int)) if len(file) else ():
        tokens = file.read(i, 0, int(file.lengths[i]))
        if _key(tokens.astype("<i4"), tokenizer.begin, tokenizer.end) != documents.tokens[i]:
            raise UserError(
                f"{file.prefix}.documents.npy is of other tokens than {file.prefix}.bin (document "
                f"{i} differs); tokenise the text again, or remove the table to have the tokens "
                "themselves read (--data.source)"
            )


def _numbers(count: int) -> np.ndarray:
    """Returns well mixed 64-bit numbers of 0..count-1 (SplitMix64)."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _batches(file: TokenFile) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (first document, tokens of some documents one after the other, where each ends)."""
    ends = np.cumsum(file.lengths, dtype=np.int64)
    first = 0
    while first < len(file):
        before = int(ends[first - 1]) if first else 0
        stop = max(int(np.searchsorted(ends, before + BATCH, side="right")), first + 1)
        pieces = [file.read(i, 0, int(file.lengths[i])) for i in range(first, stop)]
        yield first, np.concatenate(pieces), ends[first:stop] - before
        first = stop


def _hash(file: TokenFile, begin: int | None, end: int | None) -> np.ndarray:
    keys = np.empty(len(file), np.uint64)
    for first, tokens, ends in _batches(file):
        _check(file, first, tokens, ends)
        tokens, start = tokens.astype("<i4"), 0
        for i, stop in enumerate(ends.tolist(), first):
            keys[i] = _key(tokens[start:stop], begin, end)
            start = stop
    return keys


def _key(tokens: np.ndarray, begin: int | None, end: int | None) -> int:
    """Returns the key of a document's tokens, which may begin and end with special ones."""
    skip = len(tokens) > 0 and tokens[0] == begin
    left_out = len(tokens) > skip and tokens[-1] == end
    return token_key(tokens[int(skip) : len(tokens) - int(left_out)])


def _check(file: TokenFile, first: int, tokens: np.ndarray, ends: np.ndarray) -> None:
    """Checks a batch in one go; names the document of the largest id when one is wrong."""
    most = (2**31 if file.vocab is None else file.vocab) - 1
    if len(tokens) and (tokens.min() < 0 or tokens.max() > most):
        place = int(tokens.argmax() if tokens.max() > most else tokens.argmin())
        i = int(np.searchsorted(ends, place, side="right"))
        file.check_ids(tokens[place : place + 1], first + i, place - (int(ends[i - 1]) if i else 0))


def _check_sample(file: TokenFile) -> None:
    """Checks all tokens of a small file, those at evenly spaced places of a large one."""
    if file.lengths.sum(dtype=np.int64) <= SAMPLED:
        for batch in _batches(file):
            _check(file, *batch)
        return
    for document, start, stop in _places(file):
        file.check_ids(file.read(document, start, stop), document, start)


def sample(file: TokenFile) -> np.ndarray:
    """Returns tokens of evenly spaced places: what tells one unread file from another."""
    pieces = [file.read(*place) for place in _places(file)]
    return np.concatenate(pieces) if pieces else np.zeros(0, file.dtype)


def _places(file: TokenFile) -> Iterator[tuple[int, int, int]]:
    """Yields (document, start, stop)."""
    ends = np.cumsum(file.lengths, dtype=np.int64)
    for place in np.linspace(0, ends[-1] - 1, PLACES).astype(np.int64) if ends[-1:].any() else ():
        i = int(np.searchsorted(ends, place, side="right"))
        start = int(place - (ends[i] - file.lengths[i]))
        yield i, start, min(start + SAMPLED // PLACES, int(file.lengths[i]))


def _keep(path: Path, keys: np.ndarray) -> None:
    """Caches keys where the cache can be written; else they are computed at every start."""
    try:
        save_table(path, keys)
    except OSError as error:
        logging.warning(
            "The keys of documents are not kept, the next start computes them again: cannot write "
            "to %s: %s (--cache_dir).",
            path.parent,
            error.strerror,
        )
