"""Labelled texts as rows for a classifier: one text a row, its label at the first token.

A set is `stdlib` (passages of Python's standard library with their packages, passages.py), jsonl
lines with a text and a label, or a folder with a folder of text files for each label. Examples are
held out by the hash of their text, so a text and its copies lie on one side. Row i is a pure
function of (seed, i), as in pack.py.

Legend: N examples, S tokens of a row.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megajax.core.errors import UserError
from megajax.core.paths import expand
from megajax.data.config import LabelledConfig
from megajax.data.corpus import open_tokenizer_for
from megajax.data.holdout import is_held_out
from megajax.data.pack import IGNORED, mix, permute
from megajax.data.passages import open_passages
from megajax.data.source import open_source
from megajax.data.tokenizer import Tokenizer

PAD = 0  # the id of what pads a row; segments say that it is dead


@dataclasses.dataclass(frozen=True)
class Examples:
    """Token rows of any length, each with its begin token and at most a row's tokens."""

    tokens: Sequence[np.ndarray] | np.ndarray
    labels_N: np.ndarray

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.tokens)

    def row(self, i: int, seq_len: int) -> dict[str, np.ndarray]:
        """Returns example i as a row: tokens_S, targets_S, segments_S (-1: dead), positions_S."""
        ids = self.tokens[i][:seq_len]
        live_S = np.arange(seq_len) < len(ids)
        tokens_S = np.full(seq_len, PAD, np.int32)
        tokens_S[: len(ids)] = ids
        targets_S = np.full(seq_len, IGNORED, np.int32)
        targets_S[0] = self.labels_N[i]
        return {
            "tokens": tokens_S,
            "targets": targets_S,
            "segments": np.where(live_S, 1, -1).astype(np.int32),
            "positions": np.where(live_S, np.arange(seq_len), 0).astype(np.int32),
        }

    @property
    def majority(self) -> float:
        """The fraction of the most frequent label: what a constant answer gets right."""
        return float(np.bincount(self.labels_N).max() / max(len(self), 1))


@dataclasses.dataclass(frozen=True)
class LabelledSet:
    """A set of examples with the names of its labels, cut into two sides.

    vocab: token ids, the begin token included. fingerprint: changes when examples or sides would.
    """

    labels: tuple[str, ...]
    train: Examples
    held_out: Examples
    tokenizer: Tokenizer
    vocab: int
    fingerprint: str


@dataclasses.dataclass(frozen=True)
class FixedRows:
    """The rows of examples in their own order."""

    examples: Examples
    seq_len: int

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i."""
        return self.examples.row(i, self.seq_len)


class ShuffledRows:
    """An endless sequence of training rows; each epoch has every example once, shuffled."""

    def __init__(self, examples: Examples, seq_len: int, seed: int):
        """seq_len: tokens of a row; longer examples end there."""
        self.examples, self.seq_len, self.seed = examples, seq_len, seed

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i."""
        epoch, place = divmod(i, len(self.examples))
        key = mix(self.seed, epoch, "examples")
        return self.examples.row(permute(place, len(self.examples), key), self.seq_len)


def open_labelled(
    cfg: LabelledConfig,
    seq_len: int,
    cache_dir: str | Path,
    say: Callable[[str], None] = print,
) -> LabelledSet:
    """Returns the labelled set of `data.source`; say hears which files are not read.

    Raises: UserError when there is none.
    """
    if cfg.source == "stdlib":
        return _passages(cfg, seq_len, cache_dir)
    source = dataclasses.replace(open_source(cfg.source, cfg), label_key=cfg.label_key)
    if said := source.coverage():
        say(said)
    tokenizer = open_tokenizer_for(cfg, [source], expand(cache_dir, "cache_dir"))
    texts = [(d.text, d.label) for d in source.documents()]
    labels = tuple(sorted({label for _, label in texts if label is not None}))
    if len(labels) < 2 or any(label is None for _, label in texts):
        raise UserError(
            f"data.source={cfg.source} has the labels {', '.join(labels) or 'none'}: a labelled "
            f"set is jsonl lines with {cfg.text_key!r} and {cfg.label_key!r}, or a folder that has "
            "a folder of text files for each of two labels or more (--data.source, "
            "--data.label_key)"
        )
    begin = tokenizer.vocab if tokenizer.begin is None else tokenizer.begin
    encoded = tokenizer.encode([text for text, _ in texts])
    rows = [np.insert(ids[: seq_len - 1], 0, begin).astype(np.int32) for ids in encoded]
    number = {label: i for i, label in enumerate(labels)}
    found_N = np.array([number[str(label)] for _, label in texts], np.int32)
    held_N = np.array([is_held_out(text, cfg.holdout) for text, _ in texts], bool)

    def side(chosen_N: np.ndarray) -> Examples:
        return Examples([rows[i] for i in np.flatnonzero(chosen_N)], found_N[chosen_N])

    sides = side(~held_N), side(held_N)
    return _checked(labels, sides, tokenizer, max(tokenizer.vocab, begin + 1), cfg)


def _passages(cfg: LabelledConfig, seq_len: int, cache_dir: str | Path) -> LabelledSet:
    found = open_passages(seq_len, cfg.tokenizer, cache_dir, holdout=cfg.holdout)
    counts = [len(rows) for rows in found.train]
    held_N = np.arange(len(found.held_out_NS)) % len(found.labels)
    sides = (
        Examples(np.concatenate(found.train), np.repeat(np.arange(len(counts)), counts)),
        Examples(found.held_out_NS, held_N),
    )
    return _checked(found.labels, sides, found.tokenizer, found.vocab, cfg)


def _checked(
    labels: tuple[str, ...],
    sides: tuple[Examples, Examples],
    tokenizer: Tokenizer,
    vocab: int,
    cfg: LabelledConfig,
) -> LabelledSet:
    for side, what in zip(sides, ("to learn from", "held out"), strict=True):
        if not len(side):
            raise UserError(
                f"data.source={cfg.source} leaves no example {what} with "
                f"data.holdout={cfg.holdout} (--data.holdout)"
            )
    digest = hashlib.sha256(repr(labels).encode())
    for side in sides:
        digest.update(np.asarray(side.labels_N, np.int64).tobytes())
        for ids in side.tokens:
            digest.update(np.asarray(ids, np.int32).tobytes())
    train, held_out = sides
    return LabelledSet(labels, train, held_out, tokenizer, vocab, digest.hexdigest()[:16])
