"""Labelled texts as rows for a classifier, and rows with masked tokens.

A row holds one text, with its label at the first token. A set is `stdlib` (passages of Python's
standard library with their packages, passages.py), jsonl lines with a text and a label, or a folder
with a folder of text files for each label. Examples are held out by the hash of their text, so a
text and its copies lie on one side. Row i is a pure function of (seed, i), as in pack.py. The
number of a label is its place in a list of names: that of a trained classifier where there is one,
else the set's labels in their natural order.

Legend: N examples, S tokens of a row.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.data.config import LabelledConfig
from megajax.data.corpus import open_tokenizer_for
from megajax.data.documents import is_held_out
from megajax.data.loader import Rows
from megajax.data.pack import IGNORED, mix, permute
from megajax.data.passages import Template, open_passages
from megajax.data.source import open_source
from megajax.data.tokenizer import Tokenizer

PAD = 0  # the id of what pads a row; segments say that it is dead
SHOWN = 12  # (chosen) labels that a message names


@dataclasses.dataclass(frozen=True)
class Examples:
    """Token rows of any length, each with the special tokens of its template, which a text that is
    too long keeps, and at most a row's tokens."""

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


def majority(labels_N: np.ndarray) -> float:
    """Returns the fraction of the most frequent label: what a constant answer gets right."""
    return float(np.bincount(labels_N).max() / len(labels_N))


@dataclasses.dataclass(frozen=True)
class LabelledSet:
    """A set of examples with the names of its labels, cut into two sides.

    labels: the name of each class, in the order of their numbers; a trained classifier may know
    some that no example has. vocab: token ids, the begin token included. fingerprint: changes when
    examples or sides would.
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


@dataclasses.dataclass(frozen=True)
class Classes:
    """The classes of a trained classifier: their names in the order of their numbers, and what it
    is called in messages. remedy: what to do where a set has other labels."""

    names: tuple[str, ...]
    whose: str
    remedy: str

    def numbers(self, labels: Sequence[str], source: str) -> list[int]:
        """Returns the number of each label of a set.

        Labels are names of classes. A set whose labels are whole numbers may have the numbers
        themselves: where the classes have no names but LABEL_0, LABEL_1, ..., or where the labels
        are the numbers of all classes. Raises: UserError for a label that is no class.
        """
        if set(labels) <= set(self.names):
            return [self.names.index(label) for label in labels]
        every = [str(i) for i in range(len(self.names))]
        nameless = self.names == tuple(f"LABEL_{i}" for i in every)
        if set(labels) == set(every) or (nameless and set(labels) <= set(every)):
            return [int(label) for label in labels]
        strange = [label for label in labels if label not in self.names]
        raise UserError(
            f"data.source={source} has labels that {self.whose} does not know: {shown(strange)}; "
            f"its classes are {shown(self.names)}. {self.remedy} (--data.source, --data.label_key)"
        )


def shown(labels: Sequence[str]) -> str:
    """Returns the first labels for a message."""
    more = f" and {len(labels) - SHOWN} more" if len(labels) > SHOWN else ""
    return ", ".join(labels[:SHOWN]) + more


def natural_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Returns the labels as a person would list them: numbers by their value; other texts by the
    alphabet, with the numbers inside them by value (class2 before class10)."""
    listed = list(labels)
    if all(map(_is_number, listed)):
        return tuple(sorted(listed, key=lambda label: (float(label), label)))

    def key(label: str) -> tuple:
        parts = re.split(r"0*([0-9]+)", label)  # texts at even places, numbers at odd ones
        return [(len(p) * (i % 2), p) for i, p in enumerate(parts)], label

    return tuple(sorted(listed, key=key))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def open_labelled(
    cfg: LabelledConfig,
    seq_len: int,
    cache_dir: str | Path,
    say: Callable[[str], None] = print,
    classes: Classes | None = None,
) -> LabelledSet:
    """Returns the labelled set of `data.source`; say hears which files are not read.

    classes: of the classifier that is trained on; None: a new one. Raises: UserError when there is
    no set, or it has a label that the classifier does not know.
    """
    if cfg.source == "stdlib":
        return _passages(cfg, seq_len, cache_dir, classes)
    source = dataclasses.replace(open_source(cfg.source, cfg), label_key=cfg.label_key)
    if said := source.coverage():
        say(said)
    tokenizer = open_tokenizer_for(cfg, [source], expand(cache_dir, "cache_dir"))
    texts = [(d.text, d.label) for d in source.documents()]
    labels = natural_order({label for _, label in texts if label is not None})
    if len(labels) < 2 or any(label is None for _, label in texts):
        raise UserError(
            f"data.source={cfg.source} has the labels {shown(labels) or 'none'}: a labelled "
            f"set is jsonl lines with {cfg.text_key!r} and {cfg.label_key!r}, or a folder that has "
            "a folder of text files for each of two labels or more (--data.source, "
            "--data.label_key)"
        )
    template = Template.of(tokenizer, seq_len)
    encoded = tokenizer.encode([text for text, _ in texts])
    rows = [template.row(ids) for ids in encoded]
    number = {label: i for i, label in enumerate(labels)}
    found_N = np.array([number[str(label)] for _, label in texts], np.int32)
    held_N = np.array([is_held_out(text, cfg.holdout) for text, _ in texts], bool)

    def side(chosen_N: np.ndarray) -> Examples:
        return Examples([rows[i] for i in np.flatnonzero(chosen_N)], found_N[chosen_N])

    sides = side(~held_N), side(held_N)
    return _checked(
        labels, sides, tokenizer, max(tokenizer.vocab, template.before[0] + 1), cfg, classes
    )


def _passages(
    cfg: LabelledConfig, seq_len: int, cache_dir: str | Path, classes: Classes | None
) -> LabelledSet:
    passages = open_passages(seq_len, cfg.tokenizer, cache_dir, holdout=cfg.holdout)
    counts = [len(rows) for rows in passages.train]
    held_N = np.arange(len(passages.held_out_NS)) % len(passages.labels)
    sides = (
        Examples(np.concatenate(passages.train), np.repeat(np.arange(len(counts)), counts)),
        Examples(passages.held_out_NS, held_N),
    )
    return _checked(passages.labels, sides, passages.tokenizer, passages.vocab, cfg, classes)


def _checked(
    labels: tuple[str, ...],
    sides: tuple[Examples, Examples],
    tokenizer: Tokenizer,
    vocab: int,
    cfg: LabelledConfig,
    classes: Classes | None,
) -> LabelledSet:
    if classes is not None:
        number = np.array(classes.numbers(labels, cfg.source), np.int32)
        labels = classes.names
        learned, held = (dataclasses.replace(s, labels_N=number[s.labels_N]) for s in sides)
        sides = learned, held
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


# ---- masked tokens
#
# Packed rows of text of which a model predicts some hidden tokens: BERT's corruption (arXiv
# 1810.04805, section 3.1). 15 % of the tokens are targets; of these 80 % are replaced by the mask,
# 10 % by any token, and 10 % stay. Row i is a pure function of (seed, i).


SHARE, MASKED, REPLACED = 0.15, 0.8, 0.1  # (arXiv 1810.04805, section 3.1)


class MaskedRows:
    """Rows of text with some tokens hidden, whose ids are the targets."""

    def __init__(self, rows: Rows, mask: int, vocab: int, seed: int):
        """mask: the id that hides a token. vocab: ids below it may replace one."""
        self.rows, self.mask, self.vocab, self.seed = rows, mask, vocab, seed

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        """Returns row i."""
        row = self.rows[i]
        tokens_S = row["tokens"]
        random = np.random.default_rng(mix(self.seed, i, "masks"))
        draw_S, kind_S = random.random(tokens_S.shape), random.random(tokens_S.shape)
        other_S = random.integers(0, self.vocab, tokens_S.shape, np.int32)
        chosen_S = draw_S < SHARE
        hidden_S = np.where(kind_S < MASKED, np.int32(self.mask), other_S)
        changes_S = chosen_S & (kind_S < MASKED + REPLACED)
        return row | {
            "tokens": np.where(changes_S, hidden_S, tokens_S),
            "targets": np.where(chosen_S, tokens_S, np.int32(IGNORED)),
        }
