"""Which documents are held out: decided by content, over all parts of a mixture at one time.

A document is held out when the hash of its content is below the fraction, so copies are on one side
whatever file, line or source holds them, and the split stays the same when files are added. Copies
are known by their tokens; where a source has text, the hash is the text's, so the side does not
depend on the tokenizer (which is trained on the other side only).

A part all of whose documents are on one side has the tail of its longest document held out, in
every part that holds a copy of it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from absl import logging

from megajax.data.documents import Documents, text_key
from megajax.data.indexed import TokenFile
from megajax.data.pack import Split


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
            file, key, held, cuts[i], _heads(file, cuts[i], fraction, begin, end),
            documents[i].sizes, copies[i],
        )
        for i, (file, key, held) in enumerate(zip(files, keys, sides, strict=True))
    ]  # fmt: skip


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
        kept = int((text + specials) * (1 - fraction)) - (begin is not None)
        heads[i] = int(first) + min(max(kept, 0), text)
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
    kept = np.flatnonzero((held & ~cut) | (cut & once))
    if not len(kept):
        return Parted(train, None, None, copies)
    starts = np.where(cut, heads, 0)[kept]
    tokens = float(lengths[kept].sum())  # a tokenizer may make none of a text
    ratio = None if sizes is None or not tokens else float(sizes[kept].sum()) / tokens
    return Parted(train, Split(file, kept, starts, lengths[kept]), ratio, copies)


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
