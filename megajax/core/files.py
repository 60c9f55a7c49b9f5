"""Paths of users, and files that others wrote, opened and parsed within a budget.

Only regular files are opened: opening a named pipe blocks until somebody writes to it, and a device
has no end. Symbolic links are followed. JSON is read only when its values cannot take far more
memory than its text does: `[[],[],...` takes 20 times its size. `read_object` is the reader of the
JSON files that strangers write: one rule and one sentence for all of them; `read_arrays` is that of
archives of arrays. Files are replaced (`write_whole`, `write_arrays`) and locked (`lock`) here, and
nowhere else; folders are written by `new_folder`. No jax.
"""

import contextlib
import errno
import fcntl
import io
import json
import math
import os
import reprlib
import secrets
import shutil
import stat
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megajax.core.errors import UserError, unwritable

SLACK = 64 * 2**20  # (chosen) bytes of memory that any file may take
GROWTH = 10  # (chosen) bytes of memory that one byte of a file may take beyond that
VALUE_BYTES = 80  # (measured with CPython 3.12: 32 to 70) bytes of memory for each such mark
ARRAYS = 2**28  # (chosen) bytes of the arrays of an archive
ARRAYS_RATIO = 64  # (chosen: published labels pack to a 24th) times its size, where that is more
LOOK_S = 0.01  # (chosen) between two tries to lock a file
MARKS = (b",", b":", b"[", b"{")
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
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a zero byte in the name
        raise UserError(f"{str(path)!r:.300} is not a name that a file can have") from None
    try:
        mode = os.fstat(number).st_mode
        if not stat.S_ISREG(mode):
            kind = next((word for test, word in KINDS if test(mode)), "no file")
            raise UserError(f"cannot read {path}: it is {kind}; only regular files are read")
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


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
