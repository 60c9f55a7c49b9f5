"""Conversations about images, as strangers store them: folders, jsonl, parquet and tar files.

A source is a sequence of records; a record is a list of turns of texts and images. It is read anew
each time that it is asked for, so that only places in files are in memory. Images are bytes inside
of the record (data: URLs, columns of parquet, members of a tar) or files below the folder of the
source. Nothing else is opened: a name that leaves the folder, a symbolic link and any URL are
refused. No pickle is read.

  FOLDER          captions.jsonl or metadata.jsonl, lines with file_name and text (or image and
                  caption); else images with a text file of the same name beside each
  FILE.jsonl      lines of conversations or captions
  FILE.parquet    rows of them
  FILES.tar       WebDataset: the members of a sample have the same name up to the first dot of its
                  last part, and follow each other; images in the order of the tar; .txt is a
                  caption, .json a conversation or a caption

A conversation has `messages`, each with `role` and `content`, as OpenAI's API has them: a text, or
parts {"type": "text", "text"}, {"type": "image_url", "image_url": {"url"}} and {"type": "image"}.
A part without an image, or <image> in a text, takes the next one of the record's list `images`.
Instead of `messages` it may have `conversations` of ShareGPT, each with `from` and `value`
(`messages_of`). chats.py reads conversations without images from the same files.
"""

import base64
import binascii
import dataclasses
import functools
import glob
import hashlib
import io
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from megajax.core.errors import UserError
from megajax.core.files import expand, name_below, open_below, open_regular, parse_json, size_of
from megajax.data.arrow import VALUES, ArrowFile, count_values
from megajax.data.detection import printable
from megajax.data.source import files_below

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
LISTS = ("captions.jsonl", "metadata.jsonl")  # the second is what Hugging Face's imagefolder reads
RECORD = 64 * 2**20  # (chosen) bytes of a line of a jsonl file, and of a text
IMAGE = 64 * 2**20  # (chosen) bytes of the file of an image
RECORDS = 2**26  # (chosen) of a source
IMAGES = 256  # (chosen) of a record
SAMPLE = 2**28  # (chosen) bytes of all members of a sample of a tar
GROUP = 2**30  # (chosen) bytes that a row group of a parquet file may unfold to
TAR_NAMES = 2**16  # (chosen) bytes of a long name in a tar
BLOCK, BLOCKS = 2**16, 16  # (chosen) bytes, and blocks of a large file that identify its content
COLUMNS = (  # of a record
    "messages conversations system images image file_name text caption"
).split()
PLACEHOLDER = "<image>"
ROLES = ("system", "user", "assistant")
SOURCES = "rendered, FOLDER, FILE.jsonl, FILE.parquet or FILES.tar"
REMOTE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
DATA_URL = re.compile(r"data:(image/[a-z0-9.+-]{1,32})?(;[a-z0-9=_-]{1,64}){0,4},", re.IGNORECASE)


# ---- images of records


class ImageFile(Protocol):
    """The file of an image. name: for messages."""

    @property
    def name(self) -> str: ...  # noqa: D102

    def open(self) -> BinaryIO:
        """Opens it for reading. Raises: UserError; OSError."""
        ...


@dataclasses.dataclass(frozen=True)
class Inline:
    """An image whose bytes a record has."""

    name: str
    data: bytes

    def open(self) -> BinaryIO:
        """Returns the bytes as a file."""
        return io.BytesIO(self.data)


@dataclasses.dataclass(frozen=True)
class Below:
    """An image below a folder, by a name that a stranger wrote. name: for messages."""

    name: str
    folder: Path
    path: str
    follow_links: bool

    def open(self) -> BinaryIO:
        """Opens the file. Raises: UserError, also for a name that leaves the folder; OSError."""
        file = open_below(self.folder, self.path, self.follow_links)
        if (size := size_of(file)) > IMAGE:
            file.close()
            raise UserError(f"it has {size:,} bytes; {IMAGE:,} are read at most")
        return file


def image_key(file: BinaryIO) -> int:
    """Returns 64 bits of a file's bytes: all of a small file, else 16 blocks of it."""
    size = file.seek(0, os.SEEK_END)
    digest = hashlib.blake2b(str(size).encode(), digest_size=8)
    starts = [0] if size <= BLOCK * BLOCKS else [(size - BLOCK) * i // 15 for i in range(BLOCKS)]
    for start in starts:
        file.seek(start)
        digest.update(file.read(BLOCK * BLOCKS if len(starts) == 1 else BLOCK))
    return int.from_bytes(digest.digest())


# ---- records


class Turn(NamedTuple):
    """role: one of ROLES. parts: texts, and None for an image."""

    role: str
    parts: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class Record:
    """where: its file and place, for messages. turns: with as many None as there are images."""

    where: str
    turns: tuple[Turn, ...]
    images: tuple[ImageFile, ...]


class Place(NamedTuple):
    """The folder below which the names of images are looked up; None: names are refused."""

    folder: Path | None
    follow_links: bool


def record(value: Any, where: str, place: Place, images: Sequence[ImageFile] = ()) -> Record:
    """Returns the record that a value of JSON, or a row of a table, describes.

    images: those that come with it, in order. Raises: UserError that begins with `where`.
    """
    try:
        if not isinstance(value, Mapping):
            raise UserError(f"it must be an object with messages, not {value!r:.60}")
        listed = value.get("images")
        if listed is None and value.get("image") is not None:
            listed = [value["image"]]
        if listed is None and value.get("file_name") is not None:
            listed = [value["file_name"]]
        if listed is not None and (not isinstance(listed, list) or len(listed) > IMAGES):
            raise UserError(f"images must be a list of at most {IMAGES} images")
        files = [*images, *(_image(x, i, place) for i, x in enumerate(listed or ()))]
        if (messages := messages_of(value)) is not None:
            return _conversation(messages, where, place, files)
        caption = next((value[k] for k in ("text", "caption") if value.get(k) is not None), None)
        if not isinstance(caption, str) or not caption.strip() or not files:
            members = ", ".join(f"{k!r:.40}" for k in list(value)[:8]) or "none"
            raise UserError(
                "it needs messages, or an image (image, file_name) with its caption (text, "
                f"caption); its members: {members}"
            )
        return captioned(where, files, caption)
    except UserError as error:
        raise UserError(f"{where}: {error} (--data.source)") from None


# (ShareGPT, and LLaMA-Factory for what calls tools) {from: role}.
SPEAKERS = (
    {"human": "user", "user": "user", "system": "system"}
    | dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant")
    | {"function_call": "assistant", "tool": "tool", "observation": "tool"}
)


def messages_of(
    value: Mapping[str, Any], names: Sequence[str] = ("messages", "conversations")
) -> list[Any] | None:
    """Returns the messages of a record as OpenAI's API has them; None: it has none.

    What a message holds is not checked, but for those of ShareGPT, which are made anew.
    names: of the members that may hold the messages. Raises: UserError.
    """
    name = next((n for n in names if value.get(n) is not None), None)
    if name is None:
        return None
    listed = value[name]
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{name} must be a list with a message or more")
    messages = []
    for number, said in enumerate(listed):
        if not isinstance(said, Mapping) or "role" in said or "from" not in said:
            messages.append(said)
            continue
        speaker, text = said["from"], said.get("value")
        role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None or not isinstance(text, str):
            raise UserError(
                f"{name}[{number}] must have a value, which is a text, and a from of "
                f"{', '.join(SPEAKERS)}, not {speaker!r:.40}"
            )
        message: dict[str, Any] = {"role": role, "content": text}
        if speaker == "function_call":
            message = {"role": role, "content": "", "tool_calls": _calls(text, number)}
        messages.append(message)
    above = value.get("system")
    if isinstance(above, str) and above.strip():
        messages.insert(0, {"role": "system", "content": above})
    return messages


def _calls(text: str, number: int) -> list[dict[str, Any]]:
    """Returns the tool calls that a function_call of ShareGPT writes as JSON. Raises: UserError."""
    try:
        read = parse_json(text)
    except ValueError as error:
        raise UserError(f"conversations[{number}] is a function_call of no JSON: {error}") from None
    calls = read if isinstance(read, list) else [read]
    if not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        raise UserError(f"conversations[{number}] is a function_call without a name")
    return [{"type": "function", "function": call} for call in calls]


def captioned(where: str, files: Sequence[ImageFile], caption: str) -> Record:
    """Returns a record in which images are answered by a caption."""
    asked = Turn("user", (None,) * len(files))
    return Record(where, (asked, Turn("assistant", (caption.strip(),))), tuple(files))


def _conversation(messages: Any, where: str, place: Place, listed: Sequence[ImageFile]) -> Record:
    if not isinstance(messages, list) or not messages:
        raise UserError("messages must be a list with a message or more")
    files: list[ImageFile] = []
    waiting = [*listed]
    turns = []

    def take(number: int) -> None:
        if not waiting:
            raise UserError(
                f"message {number} has a placeholder without an image: the record has "
                f"{len(listed)} in images"
            )
        files.append(waiting.pop(0))

    for number, message in enumerate(messages):
        members = message if isinstance(message, Mapping) else {}
        role, content = members.get("role"), members.get("content")
        role = {"developer": "system"}.get(role, role) if isinstance(role, str) else None
        if role not in ROLES:
            raise UserError(f"message {number} must have a role of {', '.join(ROLES)}")
        parts: list[str | None] = []
        for part in [content] if isinstance(content, str) else _parts(content, number):
            if not isinstance(part, str):
                if part.get("image") is None:
                    take(number)
                else:
                    files.append(_image(part["image"], len(files), place))
                parts.append(None)
                continue
            for i, text in enumerate(part.split(PLACEHOLDER)):
                if i:
                    take(number)
                    parts.append(None)
                if text:
                    parts.append(text)
        if role == "assistant" and None in parts:
            raise UserError(f"message {number} is an answer with an image; answers are texts")
        turns.append(Turn(role, tuple(parts)))
    if waiting:
        raise UserError(
            f"{len(waiting)} of {len(listed)} images have no placeholder: write {PLACEHOLDER} in a "
            'text, or a part {"type": "image"}, for each'
        )
    if len(files) > IMAGES:
        raise UserError(f"a record may have {IMAGES} images")
    if not any(t.role == "assistant" and t.parts for t in turns):
        raise UserError("no message of the assistant has a text, so there is nothing to learn")
    return Record(where, tuple(turns), tuple(files))


def _parts(content: Any, number: int) -> Iterator[str | Mapping]:
    """Yields a text, or {'image': what describes it, or None}, for each part of a content."""
    if not isinstance(content, list):
        raise UserError(f"message {number} must have a content, a text or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind == "image_url":
            url = part.get("image_url")
            url = url.get("url") if isinstance(url, Mapping) else url
            if not isinstance(url, str):
                raise UserError(f"message {number} has an image_url without a url")
            yield {"image": url}
        elif kind == "image":
            names = ("image", "url", "path")
            yield {"image": next((part[n] for n in names if part.get(n) is not None), None)}
        else:
            raise UserError(
                f"message {number} has a part of type {kind!r:.40}; text, image_url "
                "and image are read"
            )


def _image(value: Any, number: int, place: Place) -> ImageFile:
    """Returns the image that a record describes. Raises: UserError."""
    name = f"image {number}"
    if isinstance(value, Mapping):  # a column of Hugging Face's type Image
        data = value.get("bytes")
        value = data if data is not None else value.get("path", value.get("url"))
    if isinstance(value, bytes):
        if len(value) > IMAGE:
            raise UserError(f"{name} has {len(value):,} bytes; {IMAGE:,} are read at most")
        return Inline(name, value)
    if not isinstance(value, str) or not value:
        raise UserError(f"{name} must be a name or a data: URL, not {value!r:.60}")
    if value[:5].lower() == "data:":
        return Inline(name, data_url(value, IMAGE))
    if REMOTE.match(value) or value.startswith("//"):
        raise UserError(
            f"{name} is {printable(value[:100])}: URLs are not read; an image lies below the "
            "folder, or is a data: URL"
        )
    if place.folder is None:
        raise UserError(f"{name} is the name {printable(value[:100])}; here images are bytes")
    path = name_below(value.replace("\\", "/"))
    return Below(printable(path), place.folder, path, place.follow_links)


def data_url(url: str, most: int) -> bytes:
    """Returns the bytes of a data: URL with base64. most: of bytes.

    Raises: UserError when it is none, or has more.
    """
    head = DATA_URL.match(url[:512])
    if head is None or not head[0].lower().endswith(";base64,"):
        raise UserError("a data: URL of an image must begin like data:image/png;base64,")
    size = (len(url) - head.end()) // 4 * 3
    if size > most + 2:
        raise UserError(f"a data: URL has {size:,} bytes; {most:,} are read at most")
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"a data: URL is not base64: {error}") from None


# ---- sources


class Source(Protocol):
    """A sequence of records. name: for messages. unread: how many files or members are of a kind
    that is not read, by a word for it."""

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def unread(self) -> Mapping[str, int]: ...  # noqa: D102

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, k: int) -> Record:
        """Returns record k. Raises: UserError naming its file and place."""
        ...


def open_conversations(name: str, follow_links: bool = False) -> Source:
    """Returns the records of a folder, a file, or the files that a glob matches.

    Raises: UserError when there is none, it is of another kind, or it has no record.
    """
    path = expand(name, "data.source")
    if path.is_dir():
        return _opened(name, _open_folder(path, follow_links))
    names = sorted(glob.glob(str(path))) if glob.has_magic(name) and not path.exists() else [path]
    paths = [Path(p) for p in names]
    if not paths or not all(p.is_file() for p in paths):
        raise UserError(
            f"data.source={name} must be {SOURCES}; {name} does not exist (--data.source)"
        )
    kinds = {p.suffix.lower() for p in paths}
    kind = {".jsonl": Lines, ".parquet": Table, ".tar": Archive}.get(kinds.pop())
    if kind is None or kinds:
        raise UserError(
            f"data.source={name} must be {SOURCES}; of packed files unfold the tar or the jsonl "
            "(--data.source)"
        )
    try:
        sources = [kind(p, follow_links) for p in paths]
    except OSError as error:
        raise UserError(f"cannot read {name}: {error.strerror} (--data.source)") from None
    return _opened(name, sources[0] if len(sources) == 1 else Several(name, sources))


def _opened(name: str, source: Source) -> Source:
    if not len(source):
        raise UserError(f"data.source={name} has no record (--data.source)")
    return source


class Several:
    """The records of several sources, one after the other."""

    def __init__(self, name: str, sources: Sequence[Source]):
        """sources: not empty."""
        self.name, self._sources = name, sources
        self._ends = np.cumsum([len(source) for source in sources])
        self.unread: dict[str, int] = {}
        for source in sources:
            for kind, count in source.unread.items():
                self.unread[kind] = self.unread.get(kind, 0) + count

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, k: int) -> Record:
        number = int(np.searchsorted(self._ends, k, side="right"))
        return self._sources[number][k - (int(self._ends[number - 1]) if number else 0)]


Read = Callable[[Any, str, Place], Any]  # (value, where, place) -> a record


class Lines:
    """The lines of a jsonl file. Images lie below its folder."""

    def __init__(self, path: Path, follow_links: bool, read: Read = record):
        """read: makes a record of a line's value. Raises: UserError for a line that is too long;
        OSError."""
        self.name, self.unread = str(path), {}
        self._path, self._place, self._read = path, Place(path.parent, follow_links), read
        self._starts: list[tuple[int, int, int]] = []  # line number, first byte, bytes
        with open_regular(path) as file:
            begin = 0
            for number in range(1, 2 * RECORDS):
                line = file.readline(RECORD + 1)
                if not line:
                    break
                if len(line) > RECORD:
                    raise UserError(
                        f"{path} line {number} has over {RECORD:,} bytes (--data.source)"
                    )
                if line.strip():
                    self._starts.append((number, begin, len(line)))
                begin += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, k: int) -> Record:
        number, begin, size = self._starts[k]
        where = f"{self._path} line {number}"
        try:
            with open_regular(self._path) as file:
                file.seek(begin)
                value = parse_json(file.read(size).decode())
        except OSError as error:
            raise UserError(f"cannot read {where}: {error.strerror} (--data.source)") from None
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{where} is not JSON: {error} (--data.source)") from None
        return self._read(value, where, self._place)


class Table:
    """The rows of a parquet file, of which a row group at a time is in memory. Images are columns
    of bytes, data: URLs, or lie below its folder."""

    def __init__(
        self,
        path: Path,
        follow_links: bool,
        read: Read = record,
        columns: Sequence[str] = COLUMNS,
    ):
        """read: makes a record of a row. columns: that are read. Raises: UserError when the file is
        damaged, or a row group is too large."""
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise UserError(
                f"{path} needs the package pyarrow: uv sync --extra parquet; or convert it to "
                "jsonl (--data.source)"
            ) from None
        self.name, self.unread = str(path), {}
        self._path, self._place, self._errors = path, Place(path.parent, follow_links), pyarrow
        self._parquet, self._lock = parquet, threading.Lock()
        self._read, self._columns = read, columns
        try:
            with open_regular(path) as file:
                meta = parquet.read_metadata(file)
            leaves = [meta.schema.column(i) for i in range(len(meta.schema))]
            groups = [meta.row_group(i) for i in range(meta.num_row_groups)]
            sizes = [g.num_rows for g in groups]
            largest = max((g.total_byte_size for g in groups), default=0)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise self._damaged(error) from None
        if largest > GROUP or min(sizes, default=0) < 0 or sum(sizes) > RECORDS:
            raise UserError(
                f"{path} has row groups of up to {largest:,} bytes; {GROUP:,} are read at most: "
                "write it again with smaller ones, or as tar (--data.source)"
            )
        # As a dictionary a value is in memory once, however many rows repeat it.
        self._texts = [
            c.path
            for c in leaves
            if c.physical_type == "BYTE_ARRAY" and c.path.split(".")[0] in columns
        ]
        self._ends = np.cumsum(sizes)
        self._rows = functools.lru_cache(maxsize=2)(self._group)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, k: int) -> Record:
        group = int(np.searchsorted(self._ends, k, side="right"))
        first = int(self._ends[group - 1]) if group else 0
        with self._lock:
            table = self._rows(group)
        try:
            value = table.slice(k - first, 1).to_pylist()[0]
        except (self._errors.ArrowException, IndexError, ValueError) as error:
            raise self._damaged(error) from None
        return self._read(value, f"{self._path} row {k + 1}", self._place)

    def _group(self, group: int) -> Any:
        try:
            with open_regular(self._path) as raw:
                file = self._parquet.ParquetFile(raw, read_dictionary=self._texts, pre_buffer=False)
                columns = [name for name in file.schema_arrow.names if name in self._columns]
                return file.read_row_group(group, columns=columns, use_threads=False)
        except (self._errors.ArrowException, OSError, ValueError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> UserError:
        said = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return UserError(f"cannot read {self._path}: {said} (--data.source)")


class Arrow:
    """The rows of an arrow file, which is mapped."""

    def __init__(self, path: Path, read: Read, columns: Sequence[str]):
        """read, columns: those of Table. Raises: UserError when the file is damaged, compressed, or
        has none of the columns."""
        self.name, self.unread, self._read = str(path), {}, read
        self._file = ArrowFile(path)
        names = self._file.names
        chosen = [name for name in names if name in columns]
        if not chosen or len(set(chosen)) < len(chosen):
            its = ", ".join(str(n)[:40] for n in names[:8]) or "none"
            raise UserError(
                f"{path} needs columns of {', '.join(columns)}, each once; its columns: {its} "
                "(--data.source)"
            )
        self._batches = [batch for batch in self._file.batches(chosen) if len(batch)]
        self._ends = np.cumsum([len(batch) for batch in self._batches])

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, k: int) -> Record:
        number = int(np.searchsorted(self._ends, k, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        row = self._batches[number].slice(k - first, 1)
        where = f"{self.name} row {k + 1}"
        try:
            if (values := sum(map(count_values, row.columns))) > VALUES:
                raise UserError(
                    f"{where} has {values:,} values; {VALUES:,} are read at most (--data.source)"
                )
            value = row.to_pylist()[0]
        except UserError:
            raise
        except ValueError as error:  # pyarrow's own errors too
            raise self._file.damaged(error) from None
        return self._read(value, where, Place(None, False))


def _open_folder(folder: Path, follow_links: bool) -> Source:
    """Returns the captions of a folder of images. Raises: UserError for one without any."""
    for name in LISTS:
        if (folder / name).is_file():
            return Lines(folder / name, follow_links)
    return Folder(folder, follow_links)


class Folder:
    """The images of a folder that have a text file of the same name."""

    def __init__(self, folder: Path, follow_links: bool):
        """Raises: UserError when no image has one."""
        self.name, self.unread = str(folder), {}
        self._place = Place(folder, follow_links)
        files = [p for p in files_below(folder) if not p.name.startswith(".")]
        paths = sorted(str(p.relative_to(folder)) for p in files)
        stems = {str(Path(p).with_suffix("")): p for p in paths if p.lower().endswith(".txt")}
        images = [p for p in paths if Path(p).suffix.lower() in SUFFIXES]
        pairs = [(image, stems.get(str(Path(image).with_suffix("")))) for image in images]
        self._pairs = [(image, text) for image, text in pairs if text is not None]
        if not self._pairs:
            raise UserError(
                f"data.source={folder} is a folder without captions: {len(images)} images and "
                f"neither {' nor '.join(LISTS)} nor a .txt beside an image (--data.source)"
            )
        if alone := len(images) - len(self._pairs):
            self.unread["image without a caption"] = alone

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, k: int) -> Record:
        image, text = self._pairs[k]
        folder, follow_links = self._place
        assert folder is not None
        where = str(folder / image)
        try:
            with open_below(folder, text, follow_links) as file:
                caption = file.read(RECORD).decode()
        except OSError as error:
            raise UserError(
                f"cannot read {printable(text)}: {error.strerror} (--data.source)"
            ) from None
        except UnicodeDecodeError:
            raise UserError(f"{printable(text)} is not UTF-8 (--data.source)") from None
        if not caption.strip():
            raise UserError(f"{printable(text)} is an empty caption (--data.source)")
        return captioned(where, [Below(printable(image), folder, image, follow_links)], caption)


# tar


class Archive:
    """The samples of a WebDataset tar. Its members are read by their places; names are compared,
    and never become files."""

    def __init__(self, path: Path, follow_links: bool = False):
        """Raises: UserError when it is damaged; OSError."""
        self.name, self._path = str(path), path
        self.unread: dict[str, int] = {}
        samples: dict[str, list[tuple[str, int, int]]] = {}
        with open_regular(path) as file:
            for name, begin, size in tar_members(file, str(path)):
                folder, _, last = name.rpartition("/")
                key, _, ending = last.partition(".")
                suffix = "." + ending.lower().rpartition(".")[2]
                if last.startswith("."):
                    continue
                if suffix not in (*SUFFIXES, ".txt", ".json"):
                    kind = f"member {printable(suffix)[:16]}"
                    self.unread[kind] = self.unread.get(kind, 0) + 1
                    continue
                if len(samples) > RECORDS:
                    raise UserError(f"{path} has over {RECORDS:,} samples (--data.source)")
                samples.setdefault(f"{folder}/{key}", []).append((suffix, begin, size))
        self._samples = [*samples.items()]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, k: int) -> Record:
        key, members = self._samples[k]
        where = f"{self._path} sample {printable(key.lstrip('/'))}"
        images: list[ImageFile] = []
        texts: dict[str, bytes] = {}
        count = sum(suffix in SUFFIXES for suffix, _, _ in members)
        total = sum(size for _, _, size in members)
        if count > IMAGES or total > SAMPLE:  # before a byte of them is read
            raise UserError(
                f"{where} has {count:,} images and {total:,} bytes; a sample may have {IMAGES} "
                f"images and {SAMPLE:,} bytes (--data.source)"
            )
        try:
            with open_regular(self._path) as file:
                for suffix, begin, size in members:
                    if size > (IMAGE if suffix in SUFFIXES else RECORD):
                        raise UserError(
                            f"{where} has a member {suffix} of {size:,} bytes (--data.source)"
                        )
                    file.seek(begin)
                    if suffix in SUFFIXES:
                        images.append(Inline(f"image {len(images)}", file.read(size)))
                    else:
                        texts[suffix] = file.read(size)
            if ".json" in texts:
                value = parse_json(texts[".json"].decode())
                return record(value, where, Place(None, False), images)
            caption = texts.get(".txt", b"").decode()
        except OSError as error:
            raise UserError(f"cannot read {where}: {error.strerror} (--data.source)") from None
        except UserError:
            raise
        except ValueError as error:
            raise UserError(f"{where} has a text that cannot be read: {error}") from None
        if not images or not caption.strip():
            has = f"{len(images)} images and {len(caption)} characters of caption"
            raise UserError(f"{where} has {has}: it needs both (--data.source)")
        return captioned(where, images, caption)


def tar_members(file: BinaryIO, path: str) -> Iterator[tuple[str, int, int]]:
    """Yields (name, first byte, bytes) of the regular files of a tar, by its headers alone.

    Links, devices and sparse files are passed over. path: for messages.
    Raises: UserError when it is no tar, or breaks off.
    """
    total, at, long_name = file.seek(0, os.SEEK_END), 0, ""
    while True:
        file.seek(at)
        head = file.read(512)
        if len(head) < 512 or not head.strip(b"\0"):
            if at == 0:
                raise UserError(f"{path} is no tar (--data.source)")
            if len(head) % 512:
                raise UserError(f"{path} breaks off in a header (--data.source)")
            return
        try:
            summed = sum(head) - sum(head[148:156]) + 8 * 32
            if _tar_number(head[148:156]) != summed:
                raise ValueError("its sum is another")
            size = _tar_number(head[124:136])
        except ValueError as error:
            raise UserError(f"{path} has a damaged header at byte {at}: {error}") from None
        begin, kind = at + 512, head[156:157]
        if begin + size > total:
            raise UserError(f"{path} breaks off: a member ends at byte {begin + size} of {total}")
        at = begin + -(-size // 512) * 512
        if kind in (b"L", b"x"):  # a long name of GNU, or of POSIX
            if size > TAR_NAMES:
                raise UserError(f"{path} has a name of {size:,} bytes (--data.source)")
            file.seek(begin)
            said = file.read(size)
            long_name = _posix_name(said) if kind == b"x" else _text(said)
            continue
        prefix = head[345:500] if head[257:263] == b"ustar\0" else b""
        name = long_name or "/".join(filter(None, (_text(prefix), _text(head[:100]))))
        long_name = ""
        if kind in (b"0", b"\0", b"7"):
            yield name, begin, size


def _text(data: bytes) -> str:
    return data.split(b"\0")[0].decode(errors="surrogateescape")


def _tar_number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU: in base 256
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:])
    digits = field.split(b"\0")[0].strip()
    if digits and not digits.isdigit():
        raise ValueError(f"{digits!r} is no number")
    return int(digits or b"0", 8)


def _posix_name(said: bytes) -> str:
    """Returns the path of a POSIX header: lines of 'LENGTH path=NAME'."""
    while said:
        size, _, line = said.partition(b" ")
        if not size.isdigit() or len(size) > 6 or not 0 < int(size) <= len(said):
            return ""
        if line.startswith(b"path="):
            return _text(said[len(size) + 6 : int(size) - 1])
        said = said[int(size) :]
    return ""
