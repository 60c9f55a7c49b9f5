"""Labelled passages: from which package of Python's standard library does this text come?

Real text with real labels that is wherever Python is: a file's top folder is its label. Files are
held out whole, with their copies, so that no passage of a held-out file is near one that was
learned, and the BPE is trained on the others. Of each label the files come in the order of their
names' hashes; the first that together hold the share are held out.

Legend: N passages, S tokens of one.
"""

import dataclasses
from pathlib import Path

import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.data.config import DataConfig
from megajax.data.corpus import open_tokenizer_for
from megajax.data.pack import mix
from megajax.data.source import open_source
from megajax.data.tokenizer import Tokenizer

HELD_OUT = 0.2
# Packages of 12 files and more, and of 200 kB and more, whose text says little by its first line.
PACKAGES = (
    "asyncio",
    "email",
    "idlelib",
    "lib2to3",
    "multiprocessing",
    "tkinter",
    "unittest",
    "xml",
)


@dataclasses.dataclass(frozen=True)
class Template:
    """The special tokens around a text that is one row. before: at least one, which a classifier
    reads. room: tokens of the text that a row has."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    room: int

    @classmethod
    def of(cls, tokenizer: Tokenizer, tokens: int) -> "Template":
        """Returns that of the tokenizer's file ([CLS] text [SEP]); where it has none, its begin
        token, or an id of our own, stands before the text. tokens: of a row.

        Raises: UserError when there is no room for a text.
        """
        before, after = tokenizer.template
        begin = tokenizer.vocab if tokenizer.begin is None else tokenizer.begin
        before = before or (begin,)
        room = tokens - len(before) - len(after)
        if room < 1:
            raise UserError(
                f"train.seq_len={tokens} has no room for a text: {tokenizer.name} puts "
                f"{len(before) + len(after)} special tokens around it; at least "
                f"{tokens - room + 1} (--train.seq_len)"
            )
        return cls(before, after, room)

    def row(self, ids: np.ndarray) -> np.ndarray:
        """Returns a text as a row, cut behind the tokens that there is room for."""
        return np.concatenate([self.before, ids[: self.room], self.after]).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Passages:
    """Rows of S tokens, special ones of the tokenizer's template included, int32, of each label
    (its number: its place).

    held_out_NS has equally many of each label, in turn: passage i is of label i modulo labels.
    vocab: token ids, the begin token included. tokenizer: what made them.
    """

    labels: tuple[str, ...]
    train: tuple[np.ndarray, ...]
    held_out_NS: np.ndarray
    vocab: int
    tokenizer: Tokenizer

    def batch(self, seed: int, step: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns tokens (rows, S) and labels (rows,), every label as likely; of (seed, step)."""
        random = np.random.default_rng((seed, step))
        labels_B = random.integers(0, len(self.labels), rows, np.int32)
        picks = [self.train[k][random.integers(len(self.train[k]))] for k in labels_B]
        return np.stack(picks), labels_B

    def held_out(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first held-out tokens (rows, S) and labels (rows,). Raises: UserError."""
        most = len(self.held_out_NS)
        if not 0 < rows <= most:
            raise UserError(f"{rows} held-out passages must be from 1 to {most}")
        return self.held_out_NS[:rows], (np.arange(rows) % len(self.labels)).astype(np.int32)


def open_passages(
    tokens: int,
    tokenizer: str,
    cache_dir: str | Path,
    packages: tuple[str, ...] = PACKAGES,
    holdout: float = HELD_OUT,
) -> Passages:
    """Cuts the packages' files into passages of `tokens` tokens, begin token included.

    tokenizer: as DataConfig's. holdout: share of a package's text.
    Raises: UserError for a package without enough text.
    """
    cfg = DataConfig(tokenizer=tokenizer)
    stdlib = open_source("stdlib", cfg)
    files = {p: [f for f in stdlib.files if _label(f, stdlib.root) == p] for p in packages}
    cut = _with_copies(files, {p: _held_out(listed, holdout) for p, listed in files.items()})
    learned = tuple(f for p in packages for f in files[p] if f not in cut[p])
    source = dataclasses.replace(stdlib, files=learned)
    tokens_of = open_tokenizer_for(cfg, [source], expand(cache_dir, "cache_dir"))
    template = Template.of(tokens_of, tokens)
    room = template.room

    def passages(package: str, is_held_out: bool) -> np.ndarray:
        chosen = tuple(f for f in files[package] if (f in cut[package]) == is_held_out)
        documents = dataclasses.replace(stdlib, files=chosen).documents()
        rows = [
            template.row(ids[first : first + room])
            for ids in tokens_of.encode([d.text for d in documents])
            for first in range(0, ids.size - room + 1, room)
        ]
        passages_NS = np.stack(rows) if rows else np.zeros((0, tokens), np.int32)
        if not len(passages_NS):
            raise UserError(f"the standard library's {package} holds no passage of {tokens} tokens")
        return passages_NS.astype(np.int32)

    held = [passages(p, True) for p in packages]
    least = min(map(len, held))
    even = [x[np.linspace(0, len(x) - 1, least).astype(int)] for x in held]
    return Passages(
        packages,
        tuple(passages(p, False) for p in packages),
        np.stack(even, 1).reshape(-1, tokens),
        max(tokens_of.vocab, template.before[0] + 1),
        tokens_of,
    )


def _label(file: Path, root: Path) -> str:
    parts = file.relative_to(root).parts
    return parts[0] if len(parts) > 1 else ""


def _with_copies(files: dict[str, list[Path]], cut: dict[str, set[Path]]) -> dict[str, set[Path]]:
    """Returns the held-out files of each label with all that have the same content."""
    content = {f: f.read_bytes() for listed in files.values() for f in listed}
    held = {content[f] for chosen in cut.values() for f in chosen}
    return {p: {f for f in listed if content[f] in held} for p, listed in files.items()}


def _held_out(files: list[Path], share: float) -> set[Path]:
    """Returns the first files, by the hash of their names, that hold the share of the bytes."""
    total, taken, chosen = sum(f.stat().st_size for f in files), 0, set()
    for file in sorted(files, key=lambda f: mix("held out", f.parent.name, f.name)):
        if taken >= share * total:
            break
        chosen.add(file)
        taken += file.stat().st_size
    return chosen
