"""Paths that a user typed. No jax import."""

import tempfile
from pathlib import Path

from megajax.core.errors import UserError


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
        raise UserError(
            f"cannot write to {folder}: {there}: {error.strerror}; name another folder (--{flag})"
        ) from None
