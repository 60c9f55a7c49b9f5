"""Paths of users, and files that others wrote, opened and parsed within a budget.

Only regular files are opened: opening a named pipe blocks until somebody writes to it, and a device
has no end. Symbolic links are followed, but by `open_below`, which opens names that a stranger
wrote and never leaves their folder. JSON is read only when its values cannot take far more memory
than its text does: `[[],[],...` takes 20 times its size. `read_object` is the reader of the JSON
files that strangers write: one rule and one sentence for all of them; `read_lists` is that of JSON
that is too long for it, whose lists it gives one element at a time; `read_arrays` is that of
archives of arrays. `model_folder` is the one place that downloads: a model that is named as at
huggingface.co. Files are replaced (`write_whole`, `write_arrays`) and locked (`lock`) here, and
nowhere else; folders are written by `new_folder`. No jax.
"""

import codecs
import contextlib
import errno
import fcntl
import functools
import io
import json
import math
import os
import re
import reprlib
import secrets
import shutil
import stat
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megajax.core.errors import TemporaryError, UserError, unwritable

SLACK = 64 * 2**20  # (chosen) bytes of memory that any file may take
GROWTH = 10  # (chosen) bytes of memory that one byte of a file may take beyond that
VALUE_BYTES = 80  # (measured with CPython 3.12: 32 to 70) bytes of memory for each such mark
ARRAYS = 2**28  # (chosen) bytes of the arrays of an archive
ARRAYS_RATIO = 64  # (chosen: published labels pack to a 24th) times its size, where that is more
LOOK_S = 0.01  # (chosen) between two tries to lock a file
MARKS = (b",", b":", b"[", b"{")
ELEMENT = 8 * 2**20  # (chosen: 160 MB of memory at worst) characters of an element of a list
CHUNK = 2**20  # (chosen) bytes that are read at a time
TOKEN = 16  # characters before the end of a text that is cut, where a parser may see it first
BLANK = re.compile(r"[ \t\n\r]*")
COMMA = re.compile(r"[ \t\n\r]*,[ \t\n\r]*")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*")
MODEL_FILES = (  # patterns of what is read of a model at huggingface.co: no pickles, no other forms
    "*.json *.safetensors *.model *.jinja merges.txt vocab.txt chat_template* "
    "LICENSE* LICENCE* COPYING* NOTICE* USE_POLICY* README.md"
).split()
UNREAD_FILES = ("*/*", "consolidated*")  # other forms of the same weights
FILE_ENDS = (".gguf", ".json", ".safetensors", ".bin", ".pt", ".pth")  # a path, not a model's name
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
HEADER = 2**14  # bytes that hold the header of a .npy: NumPy reads at most 10,000
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a regular file, or a link to one, for reading. Never blocks.

    Raises: UserError for what is no regular file; OSError as `open` does.
    """
    return _open_regular(path, path, 0, None)


def _open_regular(
    name: str | os.PathLike[str], shown: object, flags: int, folder: int | None
) -> BinaryIO:
    """folder: a descriptor that the name is relative to. shown: the name that messages have."""
    try:
        flags |= os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        number = os.open(name, flags, dir_fd=folder)
    except ValueError:  # a zero byte in the name, or what no encoding of names has
        raise UserError(f"{str(shown)!r:.300} is not a name that a file can have") from None
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            kind = next((word for test, word in KINDS if test(mode)), "no file")
            raise UserError(f"cannot read {shown}: it is {kind}; only regular files are read")
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


class OutsideError(UserError):
    """A name, read from a file of a stranger, that leads out of its folder, or could."""


class LinkError(OutsideError):
    """Such a name that goes over a symbolic link."""


def name_below(name: str) -> str:
    """Returns a name without empty parts, if it stays below the folder that it is looked up in.

    Raises: OutsideError for an absolute name, a URL, one with `..`, and one without parts.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or not parts or URL.match(name):
        raise OutsideError(f"{name!r:.300} is not a name below the folder that says it")
    return "/".join(parts)


def open_below(folder: Path, name: str, follow_links: bool = False) -> BinaryIO:
    """Opens a regular file by a name that a stranger wrote, which must stay below the folder.

    Args: folder: trusted; may be a link itself. name: with / between its parts. follow_links: False
      refuses a symbolic link at any of the parts; no link can come between check and opening.
    Raises: OutsideError as name_below does; LinkError; UserError for what is no regular file;
      OSError as `open` does.
    """
    parts = name_below(name).split("/")
    if follow_links:
        return open_regular(folder.joinpath(*parts))
    step = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    number = os.open(folder, step)
    try:
        for part in parts[:-1]:
            below = os.open(part, step | os.O_NOFOLLOW, dir_fd=number)
            os.close(number)
            number = below
        return _open_regular(parts[-1], folder / name, os.O_NOFOLLOW, number)
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name!r:.300} is not a name that a file can have") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and _has_link(folder, parts):
            raise LinkError(f"{folder / name} goes over a symbolic link") from None
        raise
    finally:
        os.close(number)


def _has_link(folder: Path, parts: Sequence[str]) -> bool:
    return any(folder.joinpath(*parts[: i + 1]).is_symlink() for i in range(len(parts)))


def size_of(file: BinaryIO) -> int:
    """Returns the bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def read_bytes(path: str | Path, most: int) -> bytes:
    """Returns what a regular file holds. most: bytes. Raises: UserError; OSError."""
    with open_regular(path) as file:
        size = size_of(file)
        if size > most:
            raise UserError(f"{path} has {size:,} bytes; {most:,} are read at most")
        return file.read(size)  # reading `most` would take as much memory


def write_whole(path: Path, content: bytes | str | Callable[[BinaryIO], Any]) -> None:
    """Replaces a file by a rename: a reader sees all of it, or the file as it was before, also on a
    disk that fills up and after a power failure. The file is on the disk when this returns.

    Args: content: or a function that writes it into the open file.
    Raises: OSError, and what the function does; nothing is left of what was written then.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")  # nobody else's name
    try:
        with open(part, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Gives a folder to write in, which gets its name when the block ends. It is removed when the
    block raises.

    target: must not exist, or be an empty folder. Raises: UserError when storage fails.
    """
    folder: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield folder
        folder.chmod(0o755)
        folder.rename(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror}; nothing was left") from None
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def write_arrays(path: Path, arrays: Mapping[str, Any], compress: bool = False) -> None:
    """Replaces an npz file, without pickles, as `write_whole` does; `read_arrays` reads it."""
    save: Any = np.savez_compressed if compress else np.savez
    write_whole(path, lambda file: save(file, allow_pickle=False, **arrays))


def lock(file: int, shared: bool = False, wait_s: float | None = 0.0) -> bool:
    """Locks an open file or folder (flock) until its descriptor is closed. The system also releases
    the lock when the process ends, however it ends.

    Args: file: its descriptor. shared: whether other processes may hold the lock as well, if they
      ask for it with `shared` too. wait_s: seconds to wait while another process holds the lock in
      a way that excludes this one. 0: do not wait; None: wait without a limit, so that the function
      returns only with the lock.
    Returns: whether the file is locked now; False: another process still holds it.
    Raises: OSError where the file system has no locks.
    """
    # The package filelock cannot stand in. Its locks are of files that it makes, never of a folder,
    # and whether it locks a file or a marker beside it depends on the file system; a marker stays
    # after a crash, and its shared lock is a database in a file.
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    until = time.monotonic() + (wait_s or 0.0)
    while True:
        try:
            fcntl.flock(file, kind if wait_s is None else kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(LOOK_S)


def map_bytes(path: str | Path) -> np.ndarray:
    """Returns a regular file as a read-only memory map, uint8. Raises: UserError; OSError."""
    with open_regular(path) as file:
        if size_of(file) == 0:
            raise UserError(f"{path} is empty")
        return np.memmap(file, np.uint8, "r")


def read_arrays(path: str | os.PathLike[str], what: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an npz file without pickles. They take no more memory than the members
    of the archive say that they have, and these are bounded.

    what: the kind of file, for messages. Raises: UserError when the file is damaged, is another
    one, or holds too much; OSError when it cannot be opened.
    """
    with open_regular(path) as file:
        most = max(ARRAYS, ARRAYS_RATIO * size_of(file))
        try:
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                total = sum(member.file_size for member in members)
                if total > most:
                    raise ValueError(f"its arrays have {total:,} bytes; {most:,} are read at most")
                arrays = {}
                for member in members:
                    data = bytearray(member.file_size)
                    with archive.open(member) as opened:
                        size = opened.readinto(data)  # type: ignore[missing-attribute]
                        if size != len(data) or opened.read(1):
                            raise ValueError(f"{member.filename!r:.60} breaks off")
                    arrays[member.filename.removesuffix(".npy")] = _array(member.filename, data)
                return arrays
        except Exception as error:  # zipfile and NumPy raise many kinds for what is damaged
            said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise UserError(f"{path} is no {what}, or it is damaged: {said:.300}") from None


def _array(name: str, data: bytearray) -> np.ndarray:
    """Returns the array of a .npy, over the same bytes. Raises: ValueError, and what NumPy does."""
    head = io.BytesIO(data[:HEADER])
    version = np.lib.format.read_magic(head)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{name!r:.60} has the version {version} of NumPy's format")
    first = version == (1, 0)
    read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(head)
    begin, size = head.tell(), math.prod(shape)
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{name!r:.60} has the type {dtype} and shape {shape}")
    if size * dtype.itemsize != len(data) - begin:
        raise ValueError(
            f"{name!r:.60} has {len(data) - begin:,} bytes; its shape {shape} of {dtype} needs "
            f"{size * dtype.itemsize:,}"
        )
    if not size:
        return np.empty(shape, dtype)
    flat = np.frombuffer(data, dtype, size, begin)
    return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)


def json_text(value: Any) -> str:
    """Returns indented JSON text with a line end. Inf and NaN, which JSON lacks, become null.

    NumPy's scalars become plain numbers; keys may also be numbers, which become text, as json.dumps
    has it. `or_nan` reads such numbers back.
    Raises: ValueError for a key of inf or NaN, which could not be told apart from other text;
        TypeError for what JSON cannot hold, arrays too.
    """
    return json.dumps(_finite(value), indent=2, allow_nan=False) + "\n"


def or_nan(value: Any, null: float = math.nan) -> Any:
    """Returns a value that json_text wrote: `null` in the place of JSON's null."""
    return null if value is None else value


def _finite(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {_key(key): _finite(member) for key, member in value.items()}
    return [_finite(member) for member in value] if isinstance(value, list | tuple) else value


def _key(key: Any) -> Any:
    key = key.item() if isinstance(key, np.generic) else key
    if isinstance(key, float) and not math.isfinite(key):
        raise ValueError(f"JSON has no key {key!r}; keys are text or finite numbers")
    return key


class TooManyValues(ValueError):
    """JSON whose values would take far more memory than its text."""


def parse_json(
    text: bytes | str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """Returns what JSON says. pairs: makes the value of an object, as json.loads has it.

    Raises: ValueError for what is no JSON or nested too deep; TooManyValues, which is one.
    """
    if len(text) * VALUE_BYTES > SLACK:
        marks = MARKS if isinstance(text, bytes) else [m.decode() for m in MARKS]
        values, budget = sum(map(text.count, marks)), SLACK + GROWTH * len(text)  # type: ignore
        if values * VALUE_BYTES > budget:
            raise TooManyValues(
                f"{values:,} values in {len(text):,} bytes; {budget // VALUE_BYTES:,} are read at "
                "most in a file of this size"
            )
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object's members, for parse_json. Raises: ValueError for a name that comes twice:
    readers disagree on which of the two counts."""
    members = dict(pairs)
    if len(members) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"the member {twice!r:.200} comes twice")
    return members


def read_object(path: str | Path, most: int, flag: str = "") -> dict[str, Any]:
    """Returns the object that a JSON file holds.

    Args: most: bytes. flag: which named the file, for messages.
    Raises: UserError when it cannot be read, is no JSON, holds no object, or a member twice.
    """
    hint = f" (--{flag})" if flag else ""
    try:
        value = parse_json(read_bytes(path, most), each_once)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}{hint}") from None
    except UserError as error:
        raise UserError(f"{error}{hint}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}{hint}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {reprlib.repr(value):.40}{hint}")
    return value


def read_lists(file: BinaryIO, numbers: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (member, element) for each element of the lists of a JSON object, in their order.

    Only one element is in memory, and what the caller keeps; so there is no limit to the size of
    the file. Members that are no lists are passed over. In an element the last of two equal names
    counts.
    numbers: the name of a member of elements that holds lists of numbers, however nested, which
      nobody needs: it becomes 0, unparsed, which takes a tenth of the time.
    Raises: ValueError when the text is no such object or breaks off, or an element has over ELEMENT
      characters; OSError.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    decode = json.JSONDecoder().raw_decode
    # What follows the last bracket tells a list that is complete from one that is still being read.
    # A quote inside a string has a \ before it.
    unneeded = re.compile(
        rf'(?<!\\)"{numbers}"\s*:\s*\[[][0-9eE.,+\-\s]*\](?=\s*(?:,\s*"|}}))' if numbers else "(?!)"
    )
    buffer, at = "", 0

    def more() -> bool:
        nonlocal buffer, at
        data = file.read(max(CHUNK, len(buffer) - at))  # doubles: an element is tried few times
        text = buffer[at:] + decoder.decode(data, final=not data)
        buffer, at = unneeded.sub(f'"{numbers}":0', text), 0
        return bool(data)

    def mark() -> str:
        nonlocal at
        while True:
            at = BLANK.match(buffer, at).end()  # type: ignore[union-attr]
            if at < len(buffer):
                return buffer[at]
            if not more():
                raise ValueError("it breaks off")

    def expect(marks: str) -> str:
        nonlocal at
        if (mark_ := mark()) not in marks:
            raise ValueError(f"{mark_!r} stands where one of {' '.join(marks)} must")
        at += 1
        return mark_

    def value() -> Any:
        nonlocal at
        if at >= len(buffer) or buffer[at] in " \t\n\r":
            mark()
        ended = False
        while True:
            parsed, end, wrong = None, len(buffer), ""
            try:
                parsed, end = decode(buffer, at)
            except RecursionError:
                raise ValueError("it is nested too deep") from None
            except json.JSONDecodeError as error:
                wrong = f"{error.msg}, but there is {buffer[error.pos : error.pos + 20]!r}"
                ended |= error.pos < len(buffer) - TOKEN and "Unterminated" not in error.msg
            if end - at > ELEMENT:
                raise ValueError(f"an element has over {ELEMENT:,} characters")
            if end < len(buffer) or ended:  # a number at the end of the buffer may go on
                if wrong:
                    raise ValueError(wrong)
                at = end
                return parsed
            ended = not more()

    expect("{")
    names: set[str] = set()
    after = "," if mark() != "}" else expect("}")
    while after == ",":
        if mark() != '"':
            raise ValueError(f"{mark()!r} stands where a name must")
        name = value()
        if name in names:
            raise ValueError(f"the member {name!r:.200} comes twice")
        names.add(name)
        expect(":")
        if mark() != "[":
            value()
        else:
            expect("[")
            following = "," if mark() != "]" else expect("]")
            while following == ",":
                yield name, value()
                comma = COMMA.match(buffer, at)
                if comma and comma.end() < len(buffer):  # most often, and quicker than what follows
                    at = comma.end()
                else:
                    following = expect(",]")
        after = expect(",}")


# ---- paths
#
# Paths that a user typed, and files that the processes of a user share.


def expand(name: str | Path, flag: str | None = None) -> Path:
    """Returns the path of a name that may begin with ~; the path need not exist.

    flag: which gave the name, for the message.
    Raises: UserError when the name cannot be a path of this user.
    """
    label, hint = (f"{flag}={name}", f" (--{flag})") if flag else (str(name), "")
    try:
        path = Path(name).expanduser()
        path.exists()  # raises for a name that is too long, or a parent that may not be searched
    except RuntimeError as error:  # no such user, or a user without a home
        raise UserError(f"{label}: {error}{hint}") from None
    except OSError as error:
        raise UserError(f"{label}: {error.strerror}{hint}") from None
    return path


def model_folder(name: str | Path, flag: str | None = None) -> Path:
    """Returns the folder of a model: an existing path as it is, else of ORG/NAME the snapshot.

    A snapshot is downloaded into the cache of huggingface_hub, unless it is there; the settings of
    that library (HF_HOME, HF_HUB_OFFLINE, a login) count. A process asks for a name once.
    flag: which gave the name.
    Raises: UserError for what is neither, a model that cannot be read, and a failing network.
    """
    path = expand(name, flag)
    if path.exists():
        return path
    label, hint = (f"{flag}={name}", f" (--{flag})") if flag else (str(name), "")
    if not MODEL_NAME.fullmatch(str(name)) or str(name).endswith(FILE_ENDS):
        raise UserError(
            f"{label} does not exist: give a folder with config.json, or ORG/NAME of a model at "
            f"huggingface.co{hint}"
        )
    return _snapshot(str(name), label, hint)


@functools.cache
def _snapshot(name: str, label: str, hint: str) -> Path:
    import huggingface_hub  # takes 0.3 s, and no folder needs it
    from huggingface_hub import constants, errors

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list[str](MODEL_FILES), ignore_patterns=list(UNREAD_FILES)
        )
        return Path(folder)
    except errors.GatedRepoError:
        raise UserError(
            f"{label} is no folder here, and the model of that name is open to those alone "
            f"who accept its terms: do so at {constants.ENDPOINT}/{name}, then run `hf auth login`"
            f"{hint}"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{label} is neither a folder nor a model at {constants.ENDPOINT} that this user "
            f"may read; for a private one run `hf auth login`{hint}"
        ) from None
    except Exception as error:  # a network fails with the classes of several libraries
        if constants.HF_HUB_OFFLINE:
            raise UserError(
                f"{label} is no folder here, and no complete copy of that model is in the "
                f"cache {constants.HF_HUB_CACHE}; HF_HUB_OFFLINE forbids to download it: unset "
                f"that, or run `hf download {name}` where there is a network{hint}"
            ) from None
        cause = error.__cause__ or error
        reason = (str(cause) or type(cause).__name__).splitlines()[0]
        raise TemporaryError(
            f"{label} is no folder here, and the model of that name cannot be downloaded "
            f"from {constants.ENDPOINT}: {reason:.200}{hint}"
        ) from None


def check_writable(folder: Path, flag: str, make: bool = False) -> None:
    """Refuses a folder that cannot be made or written in.

    Args: flag: which named it. make: makes the folder; else nothing is made.
    Raises: UserError.
    """
    there = folder
    try:
        there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
        if make:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(
            f"cannot write to {folder}: {there}: {error.strerror}; name another folder (--{flag})",
            error,
        ) from None


def open_own(path: str | Path, make: bool = True) -> int:
    """Opens a file that processes of one user share, for reading and writing.

    In a folder that others may write to (/dev/shm, /tmp) a name proves nothing: a link there may
    lead to a file of this user, and a file may belong to somebody who goes on writing into it.
    make: makes a missing file, which no other user may read. Returns: the descriptor.
    Raises: OSError, also for a symbolic link and for what is not a regular file of this user with
        this one name.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    number = os.open(path, flags | (os.O_CREAT if make else 0), 0o600)
    facts = os.fstat(number)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_nlink > 1:
        os.close(number)
        raise PermissionError(errno.EPERM, "it is not a file of this user alone", str(path))
    return number
