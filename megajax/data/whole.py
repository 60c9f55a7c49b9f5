"""Files and folders that appear as a whole, and are checked when they are read again.

A folder of the cache is filled under another name and renamed, so several runs can make it at one
time: the first one wins, and the others use its folder. digests.json, written last, has the size
and the hash of each file; a folder whose files differ from it is made again. The hash of a file
beyond HASHED bytes is not computed at each start: its size is compared.
"""

import fcntl
import hashlib
import io
import json
import os
import tempfile
import tokenize
from collections.abc import Callable
from pathlib import Path

import numpy as np

DIGESTS = "digests.json"
HASHED = 1 << 26  # bytes


def make_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes a folder by `fill(new folder)`, in place of a damaged one. Raises: OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True
    ) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()  # with the permissions that others have: the cache may be shared
        fill(new)
        (new / DIGESTS).write_text(json.dumps(_digests(new)) + "\n")
        with _alone(folder.parent):
            if is_whole(folder):  # another process was first
                return
            if folder.exists():
                folder.rename(Path(scratch) / "damaged")
            new.rename(folder)


def is_whole(folder: Path) -> bool:
    """Tells whether the files of a folder are those that `make_folder` left there."""
    try:
        return json.loads((folder / DIGESTS).read_text()) == _digests(folder)
    except (OSError, ValueError, RecursionError):
        return False


def _digests(folder: Path) -> dict[str, list]:
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f != folder / DIGESTS]
    return {f.relative_to(folder).as_posix(): [f.stat().st_size, _digest(f)] for f in files}


def _digest(file: Path) -> str | None:
    if file.stat().st_size > HASHED:
        return None
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()


class _alone:
    """Holds the lock of a folder where the file system has locks."""

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> None:
        self._handle = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX)
        except OSError:  # no locks there: what remains is the time between two renames
            pass

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def publish(scratch: Path, prefix: Path, suffixes: tuple[str, ...], last: str) -> None:
    """Moves scratch + suffix to prefix + suffix, for files and folders; what is not there goes.

    The file with the suffix `last` says that the others are complete: it appears after them.
    Raises: FileExistsError when it exists, OSError.
    """
    with _alone(prefix.parent):
        if os.path.lexists(f"{prefix}{last}"):
            raise FileExistsError(17, "File exists", f"{prefix}{last}")
        for suffix in (*suffixes, last):
            made, place = Path(f"{scratch}{suffix}"), Path(f"{prefix}{suffix}")
            if place.is_dir() and not place.is_symlink():
                place.rename(f"{scratch}.former{suffix}")  # a folder cannot be replaced
            if made.exists():
                made.replace(place)
            elif os.path.lexists(place):
                place.unlink()


def save_table(path: Path, table: np.ndarray) -> None:
    """Writes an array with its hash, by a rename. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.save(content, table)
    raw = content.getvalue()
    with tempfile.TemporaryDirectory(prefix=path.name, dir=path.parent) as scratch:
        new = Path(scratch) / "new"
        new.write_bytes(hashlib.blake2b(raw, digest_size=16).digest() + raw)
        new.replace(path)


def load_table(path: Path) -> np.ndarray | None:
    """Returns what `save_table` wrote; None when there is nothing, or something else."""
    try:
        raw = path.read_bytes()
        if hashlib.blake2b(raw[16:], digest_size=16).digest() != raw[:16]:
            return None
        return read_array(raw[16:])
    except (OSError, ValueError):
        return None


def read_array(raw: bytes) -> np.ndarray:
    """Returns the array of a .npy file's bytes. Raises: ValueError when they are no such file."""
    try:  # np.load would also open archives
        return np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False)
    except (
        EOFError, SyntaxError, tokenize.TokenError, OverflowError, MemoryError, TypeError,
        SystemError,  # CPython 3.12's tokenizer, on some headers that are no text
    ) as error:  # fmt: skip
        raise ValueError(str(error)) from None
