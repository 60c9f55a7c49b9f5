"""The folder of a driver: events, logs and evidence of one job, of one driver at a time. No jax."""

import errno
import fcntl
import os
import tempfile
import time
from pathlib import Path

from megajax.core.errors import UserError


def new_folder() -> Path:
    """Returns a folder of this driver alone, named by the time."""
    parent = Path("runs/supervised").absolute()
    parent.mkdir(parents=True, exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S")
    for other in ("", *(f"-{i}" for i in range(2, 1000))):
        try:
            (parent / f"{name}{other}").mkdir()
            return parent / f"{name}{other}"
        except FileExistsError:
            continue  # of another driver that started in the same second
    raise UserError(f"{parent} is full of folders of this second (--out)")


def hold(out: Path) -> int:
    """Returns the lock of a folder, which lasts as long as this process. Raises: UserError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        try:
            tempfile.TemporaryFile(dir=out).close()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk may lose telemetry
                raise
        lock = os.open(out, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another driver writes into {out} (--out)") from None
    except OSError as error:
        raise UserError(f"cannot write into {out}: {error.strerror} (--out)") from None
    return lock
