"""Paths that a user typed. No jax import."""

from pathlib import Path

from megajax.core.errors import UserError


def expand(name: str | Path, flag: str) -> Path:
    """Returns the path of a name that may begin with ~; the path need not exist.

    Raises: UserError naming the flag when the name cannot be a path of this user.
    """
    try:
        path = Path(name).expanduser()
        path.exists()  # raises for a name that is too long, or a parent that may not be searched
    except RuntimeError as error:  # no such user, or a user without a home
        raise UserError(f"{flag}={name}: {error} (--{flag})") from None
    except OSError as error:
        raise UserError(f"{flag}={name}: {error.strerror} (--{flag})") from None
    return path
