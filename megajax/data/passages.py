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
from megajax.core.paths import expand
from megajax.data.config import DataConfig
from megajax.data.corpus import open_tokenizer_for
from megajax.data.pack import mix
from megajax.data.source import open_source
from megajax.data.tokenizer import Tokenizer

HELD_OUT = 0.2
# Packages of 12 files and more, and of 200 kB and more, whose text says little by its first line.
PACKAGES = (
    "asyncio", "email", "idlelib", "lib2to3", "multiprocessing", "tkinter", "unittest", "xml",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Passages:
    """Rows of S tokens, the first a begin token, int32, of each label (its number: its place).

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
    whole = open_source("stdlib", cfg)
    files = {p: [f for f in whole.files if _label(f, whole.root) == p] for p in packages}
    cut = _with_copies(files, {p: _held_out(found, holdout) for p, found in files.items()})
    learned = tuple(f for p in packages for f in files[p] if f not in cut[p])
    source = dataclasses.replace(whole, files=learned)
    tokens_of = open_tokenizer_for(cfg, [source], expand(cache_dir, "cache_dir"))
    begin = tokens_of.vocab if tokens_of.begin is None else tokens_of.begin

    def passages(package: str, wanted: bool) -> np.ndarray:
        chosen = tuple(f for f in files[package] if (f in cut[package]) == wanted)
        documents = dataclasses.replace(whole, files=chosen).documents()
        rows = [
            np.insert(
                ids[: ids.size // (tokens - 1) * (tokens - 1)].reshape(-1, tokens - 1), 0, begin, 1
            )  # noqa: E501
            for ids in tokens_of.encode([d.text for d in documents])
        ]
        found = np.concatenate(rows) if rows else np.zeros((0, tokens), np.int32)
        if not len(found):
            raise UserError(f"the standard library's {package} holds no passage of {tokens} tokens")
        return found.astype(np.int32)

    held = [passages(p, True) for p in packages]
    least = min(map(len, held))
    even = [x[np.linspace(0, len(x) - 1, least).astype(int)] for x in held]
    return Passages(
        packages,
        tuple(passages(p, False) for p in packages),
        np.stack(even, 1).reshape(-1, tokens),
        max(tokens_of.vocab, begin + 1),
        tokens_of,
    )


def _label(file: Path, root: Path) -> str:
    parts = file.relative_to(root).parts
    return parts[0] if len(parts) > 1 else ""


def _with_copies(files: dict[str, list[Path]], cut: dict[str, set[Path]]) -> dict[str, set[Path]]:
    """Returns the held-out files of each label with all that have the same content."""
    content = {f: f.read_bytes() for found in files.values() for f in found}
    held = {content[f] for chosen in cut.values() for f in chosen}
    return {p: {f for f in found if content[f] in held} for p, found in files.items()}


def _held_out(files: list[Path], share: float) -> set[Path]:
    """Returns the first files, by the hash of their names, that hold the share of the bytes."""
    total, taken, chosen = sum(f.stat().st_size for f in files), 0, set()
    for file in sorted(files, key=lambda f: mix("held out", f.parent.name, f.name)):
        if taken >= share * total:
            break
        chosen.add(file)
        taken += file.stat().st_size
    return chosen
