"""The folder of an agent in shared memory: progress records, and copies of the training state.

The agent removes it at its end, its reaper when the agent was killed. Where all were killed at one
time (a scheduler does so) the next agent of that machine does: each folder is locked by its agent
as long as that lives, whatever its name or its namespace of process numbers. A training that
watches itself (minder/in_run.py) has such a folder too.

Everybody may write to /dev/shm, so nothing there is known by its name. A folder has a name that
nobody can guess, no other user may enter it, and the file MARK tells it from what this user keeps
there under a similar name. Folders of other users are never looked into.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from megajax.core.errors import UserError
from megajax.core.files import open_own

PREFIX = "megajax-"
MARK = ".megajax-agent"
YOUNG_S = 60.0  # (chosen) a folder may be without its lock for a moment after it was made


def root() -> Path:
    """Returns where shared memory is, or else the folder for temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def claim(parent: Path) -> tuple[Path, int]:
    """Returns (a new folder, the descriptor that holds its lock until this process ends).

    Raises: OSError.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.close(open_own(folder / MARK))
    return folder, lock


def sweep(parent: Path) -> list[Path]:
    """Removes this user's folders whose agents are gone. Returns them."""
    found = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                facts = os.fstat(lock)
                if facts.st_uid != os.geteuid() or time.time() - facts.st_ctime < YOUNG_S:
                    continue
                os.stat(MARK, dir_fd=lock, follow_symlinks=False)  # raises when it is not ours
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises when it is held
                shutil.rmtree(folder, ignore_errors=True)
                found.append(folder)
            finally:
                os.close(lock)
    return found


# ---- the folder of a driver: events, logs and evidence of one job, of one driver at a time


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
