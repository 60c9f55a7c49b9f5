"""Where text comes from: the interpreter's own library, folders, globs, files.

A source lists its files first (so that a missing or empty one fails at once) and reads them one by
one later. A document is one file, or one line of a jsonl file. Symbolic links are followed
(walk.py), and a file that several names reach is read once. Nothing is downloaded and no text
leaves the machine.
"""

import contextlib
import dataclasses
import glob
import gzip
import hashlib
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from absl import logging

from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import open_regular, parse_json
from megajax.core.paths import expand
from megajax.data.config import DataConfig
from megajax.data.walk import each_file_once, files_below, files_matching

READING = 2  # how a file becomes texts: part of every fingerprint of a source
SUFFIXES = (".txt", ".md", ".py", ".jsonl")
SURROGATE = re.compile("[\ud800-\udfff]")
GZIP_SLACK = 8 * 2**20  # (chosen) bytes that any compressed file may unfold to
GZIP_GROWTH = 32  # (chosen: text has 3 to 10) bytes that each compressed byte may come to beyond it
BUILT_IN = ("stdlib", "site-packages")
SKIPPED_FOLDERS = {"test", "tests", "__pycache__", "site-packages", "idle_test"}


@dataclasses.dataclass(frozen=True)
class Document:
    """One text with the name that identifies it, and its label where the source has labels."""

    name: str
    text: str
    label: str | None = None


@dataclasses.dataclass(frozen=True)
class Source:
    """A list of files. undecodable: error, skip or replace; text_key: for jsonl lines.

    label_key: the member of a jsonl line that is the label of its text; the label of another file
    is the folder that it is in, below the root. None: documents have no labels.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    undecodable: str
    text_key: str
    label_key: str | None = None

    def fingerprint(self) -> str:
        """Returns a hash of the files' names, sizes and times: it changes when the text does."""
        digest = hashlib.sha256(f"{READING} {self.undecodable} {self.text_key}\n".encode())
        for file in self.files:
            try:
                stat = file.stat()
            except OSError as error:
                raise UserError(f"cannot read {file}: {error.strerror} (--data.source)") from None
            digest.update(os.fsencode(self._relative(file)))
            digest.update(f" {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()[:16]

    def place(self) -> str:
        """Returns what tells this source from another whose files have the same fingerprint."""
        return f"{self.name} {self.root.resolve()}"

    def documents(self) -> Iterator[Document]:
        """Yields the documents in the order of the files. Raises: UserError naming the file."""
        for file in self.files:
            if _suffix(file) == ".jsonl":
                yield from self._lines(file)
                continue
            for raw in _parts(file, lines=False):
                if text := self._decoded(raw, str(file)):
                    yield Document(self._relative(file), text, self._folder(file))

    def _relative(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    def _decoded(self, raw: bytes, where: str) -> str | None:
        """Returns the text without a byte order mark, or None where `undecodable` skips it."""
        try:
            text = raw.decode(errors="replace" if self.undecodable == "replace" else "strict")
        except UnicodeDecodeError as error:
            if self.undecodable == "skip":
                logging.info("Skipped %s: not UTF-8.", where)
                return None
            raise UserError(
                f"{where} is not UTF-8 text (byte 0x{raw[error.start]:02x} at offset "
                f"{error.start}): remove or convert it, or give --data.undecodable=skip or replace"
            ) from None
        return text.removeprefix("\ufeff")

    def _lines(self, file: Path) -> Iterator[Document]:
        """Yields the lines' texts. One line at a time is in memory, and one is skipped."""
        # JSON lines end with \n alone: text lines would also end at U+2028, which JSON allows.
        for number, raw in enumerate(_parts(file, lines=True), 1):
            where = f"{file} line {number}"
            line = self._decoded(raw, where)
            if line and line.strip() and (value := self._text_of(line, where)):
                label = self._label_of(line, where)
                yield Document(f"{self._relative(file)}#{number}", value, label)

    def _folder(self, file: Path) -> str | None:
        """Returns the name of the folder below the root that a file is in, as its label."""
        parts = file.relative_to(self.root).parts
        return parts[0] if self.label_key is not None and len(parts) > 1 else None

    def _label_of(self, line: str, where: str) -> str | None:
        """Returns the label of a jsonl line whose text was read: a string or a whole number."""
        if self.label_key is None:
            return None
        value = parse_json(line).get(self.label_key)
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise UserError(
                f"{where}: member {self.label_key!r} must be a label, a string or a whole number, "
                f"found {value!r}: remove the line, or name the member (--data.label_key)"
            )
        return str(value)

    def _text_of(self, line: str, where: str) -> str | None:
        """Returns the text of one jsonl line, or None where `undecodable` says to skip it."""
        key = self.text_key
        try:
            found = parse_json(line)
        except ValueError as error:
            raise UserError(f"{where} is not JSON: {error} (--data.source)") from None
        if not isinstance(found, dict) or key not in found:
            raise UserError(f"{where} has no member {key!r} (--data.text_key)")
        value = found[key]
        if not isinstance(value, str):
            kind = "null" if value is None else type(value).__name__
            raise UserError(
                f"{where}: member {key!r} is {kind}, it must be a string: remove the line, or name "
                "the member that holds the text (--data.text_key)"
            )
        if (lone := SURROGATE.search(value)) is None:  # json.loads joins the pairs
            return value
        if self.undecodable == "replace":
            return SURROGATE.sub("\ufffd", value)
        if self.undecodable == "skip":
            logging.info("Skipped %s: a lone surrogate.", where)
            return None
        raise UserError(
            f"{where}: member {key!r} has the lone surrogate \\u{ord(lone[0]):04x} at character "
            f"{lone.start()}, which is not text: mend or remove the line, or give "
            "--data.undecodable=skip or replace"
        )


def open_source(name: str, cfg: DataConfig) -> Source:
    """Returns the source of one name of `data.source`. Raises: UserError when it has no files."""
    if name in BUILT_IN:
        paths = sysconfig.get_paths()
        root = Path(paths["stdlib"] if name == "stdlib" else paths["purelib"])
        skipped = SKIPPED_FOLDERS if name == "stdlib" else {"__pycache__"}
        named = (f for f in root.rglob("*.py") if f.is_file())  # no folder, no broken link
        files = [f for f in named if not skipped & set(f.relative_to(root).parts[:-1])]
        return Source(name, root, each_file_once(files), "skip", cfg.text_key)
    root, files = _find(name)
    if not files:
        raise UserError(
            f"data.source={name} has no {', '.join(SUFFIXES)} file (nor .gz of one) (--data.source)"
        )
    return Source(name, root, each_file_once(files), cfg.undecodable, cfg.text_key)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Opens a regular file, unpacked if it is a .gz. Raises: UserError when it cannot be read."""
    try:
        with open_regular(file) as raw:
            if file.suffix != ".gz":
                yield raw
            else:
                with gzip.GzipFile(fileobj=raw) as unfolded:
                    yield unfolded
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {file}: {error} (--data.source)") from None


def _parts(file: Path, lines: bool) -> Iterator[bytes]:
    """Yields the lines of a file, or all of it as one part. Raises: UserError."""
    is_packed = file.suffix == ".gz"
    with _opened(file) as stream:
        size = file.stat().st_size
        most = GZIP_SLACK + GZIP_GROWTH * size if is_packed else max(size, 1)
        asked = most + is_packed  # what somebody appends to a plain file meanwhile is not read
        while raw := stream.readline(asked) if lines else stream.read(asked):
            if len(raw) > most:  # a small .gz can unfold to terabytes
                raise UserError(
                    f"{file} unfolds to over {most:,} bytes, {GZIP_GROWTH} times its size and "
                    "more: a file made to fill the memory; if it is not, unfold it with gunzip "
                    "(--data.source)"
                )
            yield raw
            if not lines:
                return


def _suffix(file: Path) -> str:
    """Returns the suffix that says what the file holds, without .gz."""
    return Path(file.stem).suffix if file.suffix == ".gz" else file.suffix


def _find(name: str) -> tuple[Path, list[Path]]:
    """Returns (the folder that names are relative to, the text files)."""
    path = expand(name, "data.source")
    if path.is_dir():
        return path, [f for f in files_below(path) if _suffix(f) in SUFFIXES]
    if path.is_file():
        if _suffix(path) not in SUFFIXES:
            raise UserError(
                f"data.source={name} is not a {', '.join(SUFFIXES)} file (nor .gz of one) "
                "(--data.source)"
            )
        return path.parent, [path]
    if glob.has_magic(name):
        root = Path(*_before_magic(path.parts))
        pattern = path.parts[len(root.parts) :]
        return root, [f for f in files_matching(root, pattern) if _suffix(f) in SUFFIXES]
    raise UserError(
        f"data.source={name} is neither {' nor '.join(BUILT_IN)} nor a folder, file or glob that "
        f"exists.{did_you_mean(name, BUILT_IN)} (--data.source)"
    )


def _before_magic(parts: tuple[str, ...]) -> list[str]:
    kept = []
    for part in parts[:-1]:
        if glob.has_magic(part):
            break
        kept.append(part)
    return kept or ["."]
