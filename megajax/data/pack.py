"""Packing: documents to full rows, and mixtures of such rows.

Row i is a pure function of (seed, i). Each epoch shuffles the documents, lays them end to end and
cuts the stream into rows of seq_len tokens, in shuffled order: no padding, and no state. Because
row i needs nothing but (seed, i), the position of a run is one global count, whatever the number of
hosts or the batch size.

Legend: S tokens of a row.
"""

import dataclasses
import hashlib
import math
import os
import threading
from collections.abc import Sequence

import numpy as np

from megajax.core.errors import UserError
from megajax.data.indexed import TokenFile

IGNORED = -1  # target of a position that predicts nothing


@dataclasses.dataclass(frozen=True)
class Split:
    """A part of a token file: token ranges start..stop of some documents."""

    file: TokenFile
    document: np.ndarray
    start: np.ndarray
    stop: np.ndarray

    @property
    def tokens(self) -> int:
        """Tokens of all ranges."""
        return int((self.stop - self.start).sum())

    def rows(self, seq_len: int) -> int:
        """Rows of seq_len tokens that an epoch fills; none where no token follows another."""
        lengths = self.stop - self.start
        return (self.tokens - 1) // seq_len if lengths.max(initial=0) > 1 else 0


def whole_documents(file: TokenFile, documents: np.ndarray) -> Split:
    """Returns the split of these documents of a token file."""
    stop = file.lengths[documents].astype(np.int64)
    return Split(file, documents, np.zeros_like(stop), stop)


class PackedRows:
    """An endless sequence of packed rows over one split."""

    def __init__(self, split: Split, seq_len: int, seed: int, shuffle: bool = True):
        """Raises: UserError when the text does not fill one row, or no token follows another."""
        self.split, self.seq_len, self.seed, self.shuffle = split, seq_len, seed, shuffle
        self.rows_per_epoch = split.rows(seq_len)
        if split.tokens <= seq_len:
            raise UserError(
                f"{split.file.prefix} has {split.tokens} tokens in this split, fewer than one row "
                f"of {seq_len} (--train.seq_len, --data.source)"
            )
        if not self.rows_per_epoch:
            raise UserError(
                f"{split.file.prefix} has no document of two tokens in this split: no token is "
                "predicted from another, so nothing is learned (--data.source, --data.tokenizer)"
            )
        self._epochs: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i: tokens_S, targets_S, segments_S (from 1), positions_S, all int32.

        Raises: UserError when the file holds an id there that its vocabulary lacks.
        """
        epoch, row = divmod(i, self.rows_per_epoch)
        if self.shuffle:
            row = permute(row, self.rows_per_epoch, mix(self.seed, epoch, "rows"))
        order, ends = self._order(epoch)
        S, begin = self.seq_len, row * self.seq_len
        tokens_S1 = np.empty(S + 1, np.int64)  # as wide as any file's: nothing wraps unseen
        pieces = []
        segments_S1 = np.empty(S + 1, np.int32)
        positions_S1 = np.empty(S + 1, np.int32)
        k, filled, segment = int(np.searchsorted(ends, begin, side="right")), 0, 1
        while filled < S + 1:
            which = order[k]
            length = int(self.split.stop[which] - self.split.start[which])
            skip = begin + filled - (int(ends[k]) - length)
            take = min(length - skip, S + 1 - filled)
            first = int(self.split.start[which]) + skip
            place = slice(filled, filled + take)
            document = int(self.split.document[which])
            tokens_S1[place] = self.split.file.read(document, first, first + take)
            pieces.append((place, document, first))
            segments_S1[place] = segment
            positions_S1[place] = np.arange(take)
            filled, k, segment = filled + take, k + 1, segment + (take > 0)
        most = (self.split.file.vocab or 2**31) - 1
        if tokens_S1.min() < 0 or tokens_S1.max() > most:
            for place, document, first in pieces:
                self.split.file.check_ids(tokens_S1[place], document, first)
        same = segments_S1[1:] == segments_S1[:-1]
        return {
            "tokens": tokens_S1[:-1].astype(np.int32),
            "targets": np.where(same, tokens_S1[1:], IGNORED).astype(np.int32),
            "segments": segments_S1[:-1],
            "positions": positions_S1[:-1],
        }

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (documents in this epoch's order, where each ends in the stream)."""
        with self._lock:
            if epoch not in self._epochs:
                lengths = self.split.stop - self.split.start
                order = np.arange(len(lengths))
                if self.shuffle:  # RandomState: NumPy promises that its stream never changes
                    seed = mix(self.seed, epoch, "documents") % 2**32
                    order = np.random.RandomState(seed).permutation(len(lengths))
                while len(self._epochs) > 1:
                    self._epochs.pop(min(self._epochs))
                self._epochs[epoch] = (order, np.cumsum(lengths[order]))
            return self._epochs[epoch]


def mix(*parts: int | str) -> int:
    """Returns 64 bits that depend on all parts, equal in every process."""
    text = " ".join(map(str, parts))  # a path may hold bytes that are not UTF-8
    digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8)
    return int.from_bytes(digest.digest())


def permute(i: int, n: int, key: int) -> int:
    """Returns where a pseudo-random permutation of 0..n-1 sends i, in constant memory.

    A four-round Feistel network over the next even power of two, walked until it lands inside.
    """
    half = max(((n - 1).bit_length() + 1) // 2, 1)
    mask = (1 << half) - 1
    while True:
        left, right = i >> half, i & mask
        for r in range(4):
            x = (right * 0x9E3779B97F4A7C15 + (key >> (8 * r)) + key * (r + 1)) & (2**64 - 1)
            x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
            left, right = right, left ^ ((x >> 32) & mask)
        i = left << half | right
        if i < n:
            return i


def packed(
    numbers: Sequence[int], sizes: np.ndarray, budgets: Sequence[int], open_rows: int = 1
) -> list[list[int]]:
    """Returns the samples of each row, none of them cut: in this order, each into the first of the
    last rows that has room for it, else into a new one.

    Args: sizes: (n, k) by sample number. budgets: (k,) of a row, which every sample keeps to.
      open_rows: how many of the last rows may still take a sample.
    """
    rows: list[list[int]] = []
    left = np.zeros((open_rows, len(budgets)), np.int64)  # of the last rows, the oldest first
    for k in numbers:
        fitting = np.flatnonzero((sizes[k] <= left).all(1))
        first = int(fitting[0]) if len(fitting) else open_rows
        if first == open_rows:
            rows.append([])
            left = np.concatenate([left[1:], np.array([budgets], np.int64)])
            first = open_rows - 1
        rows[first - open_rows].append(k)
        left[first] -= sizes[k]
    return rows


# ---- mixtures
#
# Weighted mixtures of row sequences, in exact proportion and without state: a fixed pattern of
# 65,536 places, repeated without end, says which component fills which place. So row i of the
# mixture, and how many rows of each component come before it, follow from i alone.


PATTERN = 1 << 16  # (chosen: a weight is met to 1.5e-5)


class MixedRows:
    """Rows of several components by weight; each component's own order is kept."""

    def __init__(self, components: Sequence[PackedRows], weights: Sequence[float], seed: int):
        """weights: positive and finite, need not add up to 1."""
        self.components = components
        counts = _count(weights)
        pattern = np.repeat(np.arange(len(counts)), counts)
        np.random.RandomState(mix(seed, "mixture") % 2**32).shuffle(pattern)
        self._pattern, self._counts = pattern, counts
        # How many rows its own component has given before each place of the pattern.
        self._before = np.zeros(PATTERN, np.int64)
        for k in range(len(counts)):
            self._before[pattern == k] = np.arange(counts[k])

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i of the mixture."""
        round_, place = divmod(i, PATTERN)
        k = int(self._pattern[place])
        return self.components[k][int(round_ * self._counts[k] + self._before[place])]


def _count(weights: Sequence[float]) -> np.ndarray:
    """Returns how many of the pattern's places each weight has. Raises: UserError for none."""
    weight = np.asarray(weights, np.float64)
    if not (np.isfinite(weight) & (weight > 0)).all():
        raise UserError(
            f"mixture weights {list(weights)} must be positive and finite (--data.source)"
        )
    share = weight / weight.max()  # their sum may be beyond float64
    share /= share.sum()
    counts = np.floor(share * PATTERN).astype(int)
    missing = PATTERN - counts.sum()  # largest remainders take what rounding left
    counts[np.argsort(counts - share * PATTERN)[:missing]] += 1
    if counts.min() == 0:
        raise UserError(
            f"the mixture weight {weight.min():g} is below 1/{PATTERN} of the sum of the weights: "
            "raise it, or leave its part out (--data.source)"
        )
    return counts


def parse(source: str) -> list[tuple[str, float]]:
    """Returns [(name, weight)] of 'a:0.7,b:0.3'; one name alone needs no weight.

    A path that exists is one name, whatever its characters. A name that comes several times is one
    part with the sum of the weights, because two parts of one text would give each row twice.

    Raises: UserError for a weight that is not positive and finite, that one of several lacks, or
    that is too small a share.
    """
    if any(os.path.lexists(os.path.expanduser(source + s)) for s in ("", ".idx")):
        return [(source, 1.0)]
    parts = [part.strip() for part in source.split(",") if part.strip()]
    if not parts:
        raise UserError("data.source is empty (--data.source)")
    parsed: dict[str, float] = {}
    for part in parts:
        head, _, tail = part.rpartition(":")
        weight = _number(tail) if head else None
        if weight is None and len(parts) == 1:
            return [(part, 1.0)]
        if weight is None or not 0 < weight < math.inf:
            raise UserError(
                f"data.source={source}: every part of a mixture needs a positive, finite weight, "
                f"as in stdlib:0.7,notes/:0.3; {part!r} has none (--data.source)"
            )
        parsed[head] = parsed.get(head, 0.0) + weight
    if len(parsed) == 1:
        return [(name, 1.0) for name in parsed]
    _count(list(parsed.values()))
    return list(parsed.items())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
