"""Where text comes from: the interpreter's own library, folders, globs, files.

A source lists its files first (so that a missing or empty one fails at once) and reads them one by
one later. A document is one text file, one line of a jsonl file, one object of a json file or one
row of a parquet or arrow file. What is not read is counted by its ending (Source.coverage).
Symbolic links are followed, and a file that several names reach is read once. Nothing is downloaded
and no text leaves the machine. Parquet, arrow and .zst files need pyarrow, an extra.
"""

import contextlib
import dataclasses
import errno
import fnmatch
import glob
import gzip
import hashlib
import importlib.util
import io
import os
import re
import stat
import sysconfig
import zlib
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from absl import logging

from megajax.core.errors import UserError, did_you_mean
from megajax.core.files import expand, open_regular, parse_json
from megajax.data.arrow import ArrowFile, is_data
from megajax.data.config import DataConfig

# ---- walks over folders
#
# Files below a folder, or those that a glob matches, whatever symbolic links there are.
#
# Links to folders are followed, but each real folder is walked once for each part of the pattern,
# so a link to an ancestor ends the walk there. Folders that are reached without a link come first:
# a file keeps the name under which it really lies, where it has one below the root.


def files_below(root: Path) -> Iterator[Path]:
    """Yields the files of a folder and of those below it. Raises: UserError as files_matching."""
    return _walk(root, ("**",), hidden=True)


def files_matching(root: Path, pattern: Sequence[str]) -> Iterator[Path]:
    """Yields the files below `root` that a glob's parts match, with the rules of glob.glob.

    '**' stands for any folders, none included; names that begin with a dot are matched only by
    parts that do. Raises: UserError when a folder cannot be listed.
    """
    return _walk(root, tuple(pattern), hidden=False)


def each_file_once(files: Iterable[Path]) -> tuple[Path, ...]:
    """Returns the files in order; of several names of one file, one that is no link is kept."""
    by_inode: dict[tuple[int, int], Path] = {}
    for file in sorted(files, key=lambda f: (f.is_symlink(), f)):
        try:
            its = file.stat()
        except OSError as error:  # it vanished since it was listed
            raise UserError(f"cannot read {file}: {error.strerror} (--data.source)") from None
        by_inode.setdefault((its.st_dev, its.st_ino), file)
    return tuple(sorted(by_inode.values()))


def _walk(root: Path, pattern: tuple[str, ...], hidden: bool) -> Iterator[Path]:
    waiting, linked = deque([(root, pattern)]), deque()
    walked = set()
    while waiting or linked:
        folder, parts = (waiting or linked).popleft()
        place = os.path.realpath(folder), len(parts)
        if place in walked or not os.path.isdir(folder):
            continue
        walked.add(place)
        part, following = parts[0], parts[1:]
        if part == "**" and following:
            waiting.append((folder, following))
        for path in _named(folder, part, hidden):
            mode = _mode(path)
            if stat.S_ISDIR(mode):
                if below := parts if part == "**" else following:
                    (linked if path.is_symlink() else waiting).append((path, below))
            elif not following and stat.S_ISREG(mode):
                yield path


def _mode(path: Path) -> int:
    """Returns what a path is after its links, 0 for nothing and for a link that leads nowhere.

    Raises: UserError when that may not be asked, so that no text is left out in silence.
    """
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return 0
        raise UserError(f"cannot read {path}: {error.strerror} (--data.source)") from None


def _named(folder: Path, part: str, hidden: bool) -> list[Path]:
    """Returns what one part of a pattern matches in a folder."""
    if not glob.has_magic(part):
        return [folder / part]  # it need not exist; '..' is not listed
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise UserError(f"cannot list {folder}: {error.strerror} (--data.source)") from None
    hidden = hidden or part.startswith(".")
    visible = (n for n in names if hidden or not n.startswith("."))
    return [folder / n for n in visible if part == "**" or fnmatch.fnmatch(n, part)]


# ---- sources


READING = 2  # how a file becomes texts: part of every fingerprint of a source
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".json", ".parquet", ".arrow")
TABLES = (".parquet", ".arrow")  # which pyarrow reads
PACKED = (".gz", ".zst")
SURROGATE = re.compile("[\ud800-\udfff]")
GZIP_SLACK = 8 * 2**20  # (chosen) bytes that any compressed file may unfold to
GZIP_GROWTH = 32  # (chosen: text has 3 to 10) bytes that each compressed byte may come to beyond it
HEAD = 2**16  # (chosen) bytes of a json file of a folder that are searched for the text's member
ROWS = 1024  # (chosen) rows of a parquet file that are in memory at a time
ENDINGS = 8  # (chosen) endings that a message lists
ENDING = 12  # (chosen) characters of an ending; more are a part of a name
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

    label_key: the member of a line, object or row that is the label of its text; the label of
    another file is the folder that it is in, below the root. None: documents have no labels.
    unread: how many files with which ending there are beside `files`.
    """

    name: str
    root: Path
    files: tuple[Path, ...]
    undecodable: str
    text_key: str
    label_key: str | None = None
    unread: tuple[tuple[str, int], ...] = ()

    def coverage(self) -> str | None:
        """Returns how many of the files are read and which are not; None when all are."""
        if not self.unread:
            return None
        total = len(self.files) + sum(n for _, n in self.unread)
        return (
            f"data.source={self.name}: read {len(self.files):,} of {total:,} files; "
            f"not read: {_listed(self.unread)}"
        )

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
            kind = _suffix(file)
            if kind == ".jsonl":
                yield from self._lines(file)
            elif kind == ".json":
                yield from self._json(file)
            elif kind == ".parquet":
                yield from self._rows(file)
            elif kind == ".arrow":
                yield from self._arrow_rows(file)
            else:
                for raw in file_parts(file, lines=False):
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
        for number, raw in enumerate(file_parts(file, lines=True), 1):
            where = f"{file} line {number}"
            line = self._decoded(raw, where)
            if line and line.strip():
                value = _parsed(line, where)
                yield from self._of_object(value, where, f"{self._relative(file)}#{number}")

    def _json(self, file: Path) -> Iterator[Document]:
        """Yields the texts of a list of objects, of one object, or of an object a line."""
        with contextlib.closing(file_parts(file, lines=True)) as lines:
            first = next((raw for raw in lines if raw.strip()), b"").strip()
        if first.startswith((b"{", b"\xef\xbb\xbf{")) and first.endswith(b"}"):
            yield from self._lines(file)
            return
        for raw in file_parts(file, lines=False):
            if (text := self._decoded(raw, str(file))) is None:
                return
            value = _parsed(text, str(file))
            if not isinstance(value, list):
                yield from self._of_object(value, str(file), self._relative(file))
                return
            for number, item in enumerate(value, 1):
                where = f"{file} item {number}"
                yield from self._of_object(item, where, f"{self._relative(file)}#{number}")

    def _rows(self, file: Path) -> Iterator[Document]:
        """Yields the texts of a parquet file. A batch of rows at a time is in memory."""
        import pyarrow
        from pyarrow import parquet

        columns = [self.text_key, *([] if self.label_key is None else [self.label_key])]
        left = most = GZIP_SLACK + GZIP_GROWTH * file.stat().st_size
        number = 0
        try:
            with _opened(file) as raw:
                # As a dictionary a value is in memory once, however many rows repeat it.
                names = _check_columns(parquet.read_schema(raw), columns, file)
                table = parquet.ParquetFile(raw, read_dictionary=names, pre_buffer=False)
                groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
                # Asked only where it matters: pyarrow 26 ends the process where statistics of a
                # column are bad. Reading such a column raises an error.
                large = sum(max(g.total_byte_size, 0) for g in groups) > most
                parts = [g.column(i) for g in groups for i in range(g.num_columns * large)]
                sizes = {c: 0 for c in columns}
                for part in parts:
                    if part.path_in_schema in sizes:
                        sizes[part.path_in_schema] += part.total_uncompressed_size
                if max(sizes.values()) > most:
                    raise _bomb(file, most, "write it again with smaller values")
                for batch in table.iter_batches(ROWS, columns=columns):
                    for values in zip(*map(_values, batch.columns), strict=True):
                        number += 1
                        left -= len(values[0] or b"") + 1
                        if left < 0:
                            raise _bomb(file, most, "write it again as jsonl")
                        yield from self._of_row(values, file, number)
        except (pyarrow.ArrowException, UnicodeDecodeError, KeyError) as error:
            said = str(error).splitlines()[0][:200]
            raise UserError(f"cannot read {file}: {said} (--data.source)") from None

    def _arrow_rows(self, file: Path) -> Iterator[Document]:
        """Yields the texts of an arrow file. The file is mapped."""
        columns = [self.text_key, *([] if self.label_key is None else [self.label_key])]
        arrow = ArrowFile(file)
        _check_columns(arrow.schema, columns, file)
        left = most = GZIP_SLACK + GZIP_GROWTH * file.stat().st_size
        number = 0
        for batch in arrow.batches(columns):
            for values in zip(*map(_values, batch.columns), strict=True):
                number += 1
                left -= len(values[0] or b"") + 1  # of a dictionary, many rows share a value
                if left < 0:
                    raise _bomb(file, most, "write it again as jsonl")
                yield from self._of_row(values, file, number)

    def _of_row(self, values: tuple, file: Path, number: int) -> Iterator[Document]:
        where, text = f"{file} row {number}", values[0]
        if isinstance(text, bytes):
            text = self._decoded(text, where)
            if text is None:
                return
        members = {self.text_key: text}
        if self.label_key is not None:
            label = values[1]
            label = label.decode(errors="replace") if isinstance(label, bytes) else label
            members[self.label_key] = label
        yield from self._of_object(members, where, f"{self._relative(file)}#{number}")

    def _of_object(self, value: Any, where: str, name: str) -> Iterator[Document]:
        """Yields the text of a parsed object, with its label."""
        if text := self._text_of(value, where):
            yield Document(name, text, self._label_of(value, where))

    def _folder(self, file: Path) -> str | None:
        """Returns the name of the folder below the root that a file is in, as its label."""
        parts = file.relative_to(self.root).parts
        return parts[0] if self.label_key is not None and len(parts) > 1 else None

    def _label_of(self, members: dict[str, Any], where: str) -> str | None:
        """Returns the label of an object whose text was read: a string or a whole number."""
        if self.label_key is None:
            return None
        value = members.get(self.label_key)
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise UserError(
                f"{where}: member {self.label_key!r} must be a label, a string or a whole number, "
                f"found {value!r}: remove the line, or name the member (--data.label_key)"
            )
        return str(value)

    def _text_of(self, parsed: Any, where: str) -> str | None:
        """Returns the text of a parsed object, or None where `undecodable` says to skip it."""
        key = self.text_key
        if not isinstance(parsed, dict) or key not in parsed:
            its = ""
            if isinstance(parsed, dict):
                members = ", ".join(repr(m)[:40] for m in list(parsed)[:ENDINGS])
                its = f"; its members: {members or 'none'}"
            raise UserError(f"{where} has no member {key!r}{its} (--data.text_key)")
        value = parsed[key]
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
    root, files, unread = _find(name, cfg.text_key)
    if not files:
        has = f" it has {_listed(unread)};" if unread else ""
        raise UserError(
            f"data.source={name} has no {', '.join(SUFFIXES)} file (nor {' or '.join(PACKED)} of "
            f"one):{has} convert the texts to one of these (--data.source)"
        )
    for file in files:
        check_pyarrow(file)
    files = each_file_once(files)
    return Source(name, root, files, cfg.undecodable, cfg.text_key, unread=unread)


def check_pyarrow(file: Path) -> None:
    """Raises UserError for a file that only pyarrow reads, where pyarrow is absent."""
    packed = file.suffix.lower() == ".zst"
    if (packed or _suffix(file) in TABLES) and importlib.util.find_spec("pyarrow") is None:
        other = "unfold it with zstd -d" if packed else "convert it to jsonl"
        raise UserError(
            f"{file} needs the package pyarrow: uv sync --extra parquet; or {other} (--data.source)"
        )


def _listed(unread: Iterable[tuple[str, int]]) -> str:
    """Returns '.pdf 4, .docx 3, without ending 1': the most frequent endings."""
    ordered = sorted(unread, key=lambda pair: (-pair[1], pair[0]))
    more = sum(n for _, n in ordered[ENDINGS:])
    first = ", ".join(f"{ending} {n:,}" for ending, n in ordered[:ENDINGS])
    return f"{first}, others {more:,}" if more else first


def _parsed(text: str, where: str) -> Any:
    """Returns what JSON says. Raises: UserError naming the place."""
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error} (--data.source)") from None


def _check_columns(schema: Any, columns: list[str], file: Path) -> list[str]:
    """Returns those of the columns that hold text, not numbers.

    Raises: UserError for a table without the columns of text and label, or of other types.
    """
    from pyarrow import types

    names, text_columns = schema.names, []
    for name, flag in zip(columns, ("text_key", "label_key"), strict=False):
        if names.count(name) != 1:
            its = ", ".join(str(n)[:40] for n in names[:ENDINGS])
            raise UserError(f"{file} has no column {name!r}; its columns: {its} (--data.{flag})")
        kind = schema.field(name).type
        value = kind.value_type if types.is_dictionary(kind) else kind
        texts = types.is_string(value) or types.is_large_string(value) or types.is_binary(value)
        if not texts and not (flag == "label_key" and types.is_integer(value)):
            raise UserError(f"{file}: column {name!r} has the type {kind}, no text (--data.{flag})")
        text_columns += [name] if texts else []
    return text_columns


def _values(column: Any) -> Iterator[Any]:
    """Yields the values of a column: bytes of a text, numbers, None."""
    for scalar in column:
        value = getattr(scalar, "value", scalar)  # of a dictionary's entry
        if value is None or not getattr(value, "is_valid", True):
            yield None
        elif hasattr(value, "as_buffer"):
            yield value.as_buffer().to_pybytes()
        else:
            yield value.as_py()


def _bomb(file: Path, most: int, remedy: str) -> UserError:
    return UserError(
        f"{file} unfolds to over {most:,} bytes, {GZIP_GROWTH} times its size and more: a file "
        f"made to fill the memory; if it is not, {remedy} (--data.source)"
    )


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[BinaryIO | gzip.GzipFile | io.BufferedReader]:
    """Opens a regular file, unpacked if it is packed. Raises: UserError when it cannot be read."""
    packing = file.suffix.lower()
    try:
        with open_regular(file) as raw:
            if packing == ".gz":
                with gzip.GzipFile(fileobj=raw) as unfolded:
                    yield unfolded
            elif packing == ".zst":
                import pyarrow

                stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, "r"), "zstd")
                yield io.BufferedReader(stream)
            else:
                yield raw
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {file}: {error} (--data.source)") from None


def file_parts(file: Path, lines: bool) -> Generator[bytes]:
    """Yields the lines of a file, or all of it as one part. Raises: UserError."""
    is_packed = file.suffix.lower() in PACKED
    with _opened(file) as stream:
        size = file.stat().st_size
        most = GZIP_SLACK + GZIP_GROWTH * size if is_packed else max(size, 1)
        asked = most + is_packed  # what somebody appends to a plain file meanwhile is not read
        while raw := stream.readline(asked) if lines else stream.read(asked):
            if len(raw) > most:  # a small .gz can unfold to terabytes
                unfold = "gunzip" if file.suffix.lower() == ".gz" else "zstd -d"
                raise _bomb(file, most, f"unfold it with {unfold}")
            yield raw
            if not lines:
                return


def _suffix(file: Path) -> str:
    """Returns the ending that says what a file holds, in small letters, without .gz and .zst."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in PACKED else suffix


def _is_read(file: Path) -> bool:
    """Tells by its ending whether a file is one of texts."""
    inner = _suffix(file)
    if inner in TABLES and (file.suffix.lower() in PACKED or not is_data(file)):
        return False
    return inner in SUFFIXES


def _ending(file: Path) -> str:
    """Returns what a file is counted as: its ending, with the one before .gz and the like."""
    last = file.suffix.lower()
    before = Path(file.stem).suffix.lower() if last in (*PACKED, ".bz2", ".xz", ".zip") else ""
    if not 1 < len(last) <= ENDING or any(c.isspace() or not c.isprintable() for c in last):
        return "without ending"
    return before + last if len(before) <= ENDING and before.isprintable() else last


def _has_texts(file: Path, key: str) -> bool:
    """Tells whether the beginning of a json file names the member of the text.

    A folder of texts may hold settings in json files: those are not read, but counted.
    """
    with _opened(file) as stream:
        head = stream.read(HEAD)
    return re.search(rb'"%s"\s*:\s*"' % re.escape(key.encode()), head) is not None


def _sorted_out(files: Iterable[Path], key: str) -> tuple[list[Path], tuple[tuple[str, int], ...]]:
    """Returns (the files that are read, how many of which ending are not)."""
    taken: list[Path] = []
    others: Counter[str] = Counter()
    can_unfold = importlib.util.find_spec("pyarrow") is not None
    for file in files:
        packed = file.suffix.lower() == ".zst"
        if not _is_read(file):
            others[_ending(file)] += 1
        elif _suffix(file) == ".json" and (can_unfold or not packed) and not _has_texts(file, key):
            others[f".json without a text {key[:40]!r}"] += 1
        else:
            taken.append(file)
    return taken, tuple(sorted(others.items()))


def _find(name: str, key: str) -> tuple[Path, list[Path], tuple[tuple[str, int], ...]]:
    """Returns (the folder that names are relative to, the text files, what else there is)."""
    path = expand(name, "data.source")
    if path.is_dir():
        return path, *_sorted_out(files_below(path), key)
    if path.is_file():
        if not _is_read(path):
            raise UserError(
                f"data.source={name} is not a {', '.join(SUFFIXES)} file (nor "
                f"{' or '.join(PACKED)} of one) (--data.source)"
            )
        return path.parent, [path], ()
    if glob.has_magic(name):
        root = Path(*_before_magic(path.parts))
        pattern = path.parts[len(root.parts) :]
        if _suffix(Path(pattern[-1])) == ".json":  # asked for by name
            matching = list(files_matching(root, pattern))
            return root, [f for f in matching if _is_read(f)], ()
        return root, *_sorted_out(files_matching(root, pattern), key)
    raise UserError(
        f"data.source={name} is neither {' nor '.join(BUILT_IN)} nor a folder, file or glob that "
        f"exists.{did_you_mean(name, BUILT_IN)} (--data.source)"
    )


def _before_magic(parts: tuple[str, ...]) -> list[str]:
    plain_parts = []
    for part in parts[:-1]:
        if glob.has_magic(part):
            break
        plain_parts.append(part)
    return plain_parts or ["."]
