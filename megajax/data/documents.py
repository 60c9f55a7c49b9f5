"""The documents of a token file by content, their cache, and which of them are held out.

Three parts: folders of the cache that are complete or absent; keys of documents, which copies share
wherever they lie; and the split into training and held-out documents.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import tempfile
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from megajax.core import files
from megajax.core.errors import UserError
from megajax.data.indexed import TokenFile
from megajax.data.pack import Split, mix
from megajax.data.tokenizer import Tokenizer

# ---- folders of the cache
#
# A folder of the cache is filled under another name and renamed, so several runs can make it at one
# time: the first one wins, and the others use its folder. digests.json, written last, has the size
# and the hash of each file; a folder whose files differ from it is made again. The hash of a file
# beyond HASHED bytes is not computed at each start: its size is compared.


DIGESTS = "digests.json"
HASHED = 1 << 26  # bytes


def make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder by `fill(new folder)`, in place of a damaged one. Raises: OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()  # with the permissions that others have: the cache may be shared
        fill(new)
        (new / DIGESTS).write_text(json.dumps(_digests(new)) + "\n")
        with _alone(folder.parent):
            if is_whole(folder):  # another process was first
                return
            if folder.exists():
                folder.rename(Path(scratch) / "damaged")
            new.rename(folder)


def is_whole(folder: Path) -> bool:
    """Tells whether the files of a folder are those that `make_folder` left there."""
    try:
        return json.loads((folder / DIGESTS).read_text()) == _digests(folder)
    except (OSError, ValueError, RecursionError):
        return False


def _digests(folder: Path) -> dict[str, list]:
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f != folder / DIGESTS]
    return {f.relative_to(folder).as_posix(): [f.stat().st_size, _digest(f)] for f in files}


def _digest(file: Path) -> str | None:
    if file.stat().st_size > HASHED:
        return None
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


class _alone:
    """Holds the lock of a folder where the file system has locks."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> None:
        self._handle = os.open(self._folder, os.O_RDONLY)
        with contextlib.suppress(OSError):  # no locks there: the time between two renames remains
            files.lock(self._handle, wait_s=None)

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def publish(scratch: Path, prefix: Path, suffixes: tuple[str, ...], last: str) -> None:
    """Moves the files and folders scratch + suffix to prefix + suffix.

    If scratch has nothing with a suffix, an earlier file with that suffix at prefix is deleted. The
    file with the suffix `last` is moved after all others, so its existence says that they are
    complete. Raises: FileExistsError if prefix + last exists, OSError.
    """
    with _alone(prefix.parent):
        if os.path.lexists(f"{prefix}{last}"):
            raise FileExistsError(17, "File exists", f"{prefix}{last}")
        for suffix in (*suffixes, last):
            made, place = Path(f"{scratch}{suffix}"), Path(f"{prefix}{suffix}")
            if place.is_dir() and not place.is_symlink():
                place.rename(f"{scratch}.former{suffix}")  # a folder cannot be replaced
            if made.exists():
                made.replace(place)
            elif os.path.lexists(place):
                place.unlink()


def save_table(path: Path, table: np.ndarray) -> None:
    """Writes an array with its hash, by a rename. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.save(content, table)
    raw = content.getvalue()
    files.write_whole(path, hashlib.blake2b(raw, digest_size=16).digest() + raw)


def load_table(path: Path) -> np.ndarray | None:
    """Returns what `save_table` wrote; None when there is nothing, or something else."""
    try:
        raw = path.read_bytes()
        if hashlib.blake2b(raw[16:], digest_size=16).digest() != raw[:16]:
            return None
        return read_array(raw[16:])
    except (OSError, ValueError):
        return None


def read_array(raw: bytes) -> np.ndarray:
    """Returns the array of a .npy file's bytes. Raises: ValueError when they are no such file."""
    try:  # np.load would also open archives
        return np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False)
    except (
        EOFError,
        SyntaxError,
        tokenize.TokenError,
        OverflowError,
        MemoryError,
        TypeError,
        SystemError,  # CPython 3.12's tokenizer, on some headers that are no text
    ) as error:
        raise ValueError(str(error)) from None


# ---- keys of documents
#
# The key of a text or of its tokens is a 64-bit hash of all of it, so equal documents have equal
# keys whatever file, line or source holds them; the begin and end tokens do not count. A file that
# scripts/tokenize.py wrote has a second file with its keys; any other pair is read once, and the
# keys are cached. A pair beyond `data.hash_gib` is not read: its documents are known by their
# number only.


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


# ---- held-out documents
#
# A document is held out when the hash of its content is below the fraction, so copies are on one
# side whatever file, line or source holds them, and the split stays the same when files are added.
# Copies are known by their tokens; where a source has text, the hash is the text's, so the side
# does not depend on the tokenizer (which is trained on the other side only).
#
# A part all of whose documents are on one side has the tail of its longest document held out, in
# every part that holds a copy of it.


@dataclasses.dataclass(frozen=True)
class Parted:
    """One token file in two. held_out: None when nothing is. bytes_per_token: of what is held out,
    None when unknown. copies: documents that equal an earlier one, of this file or a former; None
    when the file was not compared."""

    train: Split
    held_out: Split | None
    bytes_per_token: float | None
    copies: int | None


def is_held_out(text: str, fraction: float) -> bool:
    """Tells by its content whether a text is held out."""
    return text_key(text) < int(fraction * 2**64)


def part(
    files: Sequence[TokenFile],
    documents: Sequence[Documents],
    fraction: float,
    begin: int | None = None,
    end: int | None = None,
) -> list[Parted]:
    """Splits every file; documents[i] has the keys of files[i]. begin, end: of the tokenizer."""
    keys, copies = _identify(documents)
    limit = np.uint64(int(fraction * 2**64))
    sides = [k < limit for k in keys]
    cut: list[int] = []
    for file, key, held in zip(files, keys, sides, strict=True):
        tokens = int(file.lengths[held].sum(dtype=np.int64))
        if fraction > 0 and len(file) and tokens in (0, int(file.lengths.sum(dtype=np.int64))):
            cut.append(int(key[np.argmax(file.lengths)]))
            logging.warning(
                "%s has too few documents to hold some out; the last %.0f %% of its longest are "
                "held out instead.",
                file.prefix,
                100 * fraction,
            )
    cuts = [np.isin(key, np.array(cut, np.uint64)) for key in keys]
    return [
        _part(
            file,
            key,
            held,
            cuts[i],
            _heads(file, cuts[i], fraction, begin, end),
            documents[i].sizes,
            copies[i],
        )
        for i, (file, key, held) in enumerate(zip(files, keys, sides, strict=True))
    ]


def _heads(
    file: TokenFile, cut: np.ndarray, fraction: float, begin: int | None, end: int | None
) -> np.ndarray:
    """Returns how many tokens of each document are learned if it is: all, or up to its tail.

    Copies with and without begin and end tokens are cut at the same place of the text.
    """
    heads = file.lengths.astype(np.int64)
    specials = (begin is not None) + (end is not None)
    for i in np.flatnonzero(cut).tolist():
        length = int(heads[i])
        first = length > 0 and file.read(i, 0, 1)[0] == begin
        last = length > first and file.read(i, length - 1, length)[0] == end
        text = length - int(first) - int(last)
        head = int((text + specials) * (1 - fraction)) - (begin is not None)
        heads[i] = int(first) + min(max(head, 0), text)
    return heads


def _part(
    file: TokenFile,
    keys: np.ndarray,
    held: np.ndarray,
    cut: np.ndarray,
    heads: np.ndarray,
    sizes: np.ndarray | None,
    copies: int | None,
) -> Parted:
    lengths = file.lengths.astype(np.int64)
    learned = np.flatnonzero(~held | cut)
    train = Split(file, learned, np.zeros_like(learned), heads[learned])
    once = np.zeros_like(cut)
    once[np.unique(keys, return_index=True)[1]] = True
    held_out = np.flatnonzero((held & ~cut) | (cut & once))
    if not len(held_out):
        return Parted(train, None, None, copies)
    starts = np.where(cut, heads, 0)[held_out]
    tokens = float(lengths[held_out].sum())  # a tokenizer may make none of a text
    ratio = None if sizes is None or not tokens else float(sizes[held_out].sum()) / tokens
    return Parted(train, Split(file, held_out, starts, lengths[held_out]), ratio, copies)


def _identify(documents: Sequence[Documents]) -> tuple[list[np.ndarray], list[int | None]]:
    """Returns, file by file, a key that all copies share, and how many copies of earlier ones."""
    compared = [d for d in documents if d.compared]
    unknown = np.uint64(2**64 - 1)
    none = [np.zeros(0, np.uint64)]
    tokens = np.concatenate([d.tokens for d in compared] or none)
    texts = np.concatenate(
        [np.full_like(d.tokens, unknown) if d.texts is None else d.texts for d in compared] or none
    )
    each, first, group = np.unique(tokens, return_index=True, return_inverse=True)
    least = np.full(len(each), unknown)
    np.minimum.at(least, group, texts)
    shared = np.where(least == unknown, each, least)[group]
    is_first = np.zeros(len(tokens), bool)
    is_first[first] = True
    keys: list[np.ndarray] = []
    copies: list[int | None] = []
    at = 0
    for d in documents:
        if d.compared:
            keys.append(shared[at : at + len(d.tokens)])
            copies.append(int((~is_first[at : at + len(d.tokens)]).sum()))
            at += len(d.tokens)
        else:
            keys.append(d.tokens)
            copies.append(None)
    return keys, copies
