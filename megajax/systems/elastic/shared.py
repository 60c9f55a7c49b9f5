"""The folder of an agent in shared memory: progress records, and copies of the training state.

The agent removes it at its end, its reaper when the agent was killed. Where all were killed at one
time (a scheduler does so) the next agent of that machine does: each folder is locked by its agent
as long as that lives, whatever its name or its namespace of process numbers.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

PREFIX = "megajax-"
YOUNG_S = 60.0  # (chosen) a folder may be without its lock for a moment after it was made


def root() -> Path:
    """Returns where shared memory is, or else the folder for temporary files."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())


def claim(parent: Path) -> tuple[Path, int]:
    """Returns (a new folder, the descriptor that holds its lock until this process ends)."""
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def sweep(parent: Path) -> list[Path]:
    """Removes this user's folders whose agents are gone. Returns them."""
    found = []
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            facts = folder.stat()
            if facts.st_uid != os.getuid() or time.time() - facts.st_ctime < YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises when it is held
                shutil.rmtree(folder, ignore_errors=True)
                found.append(folder)
            finally:
                os.close(lock)
    return found
