"""Paths that a user typed, and files that the processes of a user share. No jax, no NumPy."""

import errno
import os
import stat
import tempfile
from pathlib import Path

from megajax.core.errors import UserError, unwritable


def expand(name: str | Path, flag: str | None = None) -> Path:
    """Returns the path of a name that may begin with ~; the path need not exist.

    flag: which gave the name, for the message.
    Raises: UserError when the name cannot be a path of this user.
    """
    given, hint = (f"{flag}={name}", f" (--{flag})") if flag else (str(name), "")
    try:
        path = Path(name).expanduser()
        path.exists()  # raises for a name that is too long, or a parent that may not be searched
    except RuntimeError as error:  # no such user, or a user without a home
        raise UserError(f"{given}: {error}{hint}") from None
    except OSError as error:
        raise UserError(f"{given}: {error.strerror}{hint}") from None
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
