"""One run at a time in a folder: a lock that ends with its process.

The kernel holds the lock (flock) for the open file `lock` in the folder and drops it when the
process ends, however it ends. So after kill -9 the folder is free at once, and nothing judges a
leftover file by its age. The file names the holder for the message of whoever comes second.
Process 0 of a job takes the lock and tells the others. Programs that only read a run need none.
A newer attempt of a supervised run does not wait for an older one that is frozen and keeps its lock
(lease.py keeps that one from saving): it puts a lock file of its own in the place of the other's.

Between hosts the lock holds where the file system passes flock on: NFS on Linux, Lustre mounted
with `flock`, GPFS and CephFS. Lustre mounted with `localflock` locks the processes of one host
only. A file system without locks gets a warning, and the run goes on. Checkpoints that
--checkpoint.dir puts elsewhere are not covered.
"""

import atexit
import contextlib
import json
import os
import socket
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from megajax.checkpoint.lease import Attempt, SupersededError
from megajax.core import script
from megajax.core.errors import TemporaryError, UserError, unwritable
from megajax.core.files import lock, parse_json

FILE = "lock"
# How long a second process waits for the first to end (chosen: a supervisor starts the next attempt
# while the kernel still frees the memory of the last one).
PATIENCE_S = 10.0
POLL_S = 0.1
MESSAGE_BYTES = 2048  # of a refusal, as process 0 sends it to the others


class RunLock:
    """The right to write into a folder, until `release` or the end of the process."""

    def __init__(
        self, folder: Path, patience_s: float = PATIENCE_S, attempt: Attempt | None = None
    ):
        """Makes the folder if needed. patience_s: how long another process may take to end.

        Raises: UserError when another process keeps the folder, or it cannot be written, a
        TemporaryError where that may pass; SupersededError when that is a newer attempt of this
        one's run.
        """
        self._path, self._file, self._made = folder / FILE, -1, not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = _take(self._path, patience_s, attempt)
        except OSError as error:
            why = f"cannot write to {folder}: {error.strerror} (--run_dir)"
            raise unwritable(why, error) from None
        try:
            if self._file >= 0:
                os.ftruncate(self._file, 0)
                since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
                command = script.command_line()
                about = {"host": socket.gethostname(), "pid": os.getpid(), "since": since}
                about |= {"command": command} | (asdict(attempt) if attempt is not None else {})
                os.pwrite(self._file, json.dumps(about).encode(), 0)
        except OSError as error:  # a full disk: the lock holds without the name of its holder
            logging.warning("%s does not name its holder: %s", self._path, error.strerror)
        # A fork shares the open file and thus the lock: a child that outlives us would keep it.
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self.release)

    def release(self) -> None:
        """Frees the folder, and removes it if it was made for nothing."""
        if self._file < 0:
            return
        with contextlib.suppress(OSError):
            if _is_at(self._file, self._path):  # else a newer attempt has put its own there
                self._path.unlink()  # before the lock goes: nobody else can hold this file yet
                if self._made:
                    self._path.parent.rmdir()  # refused unless empty
        self._forget()

    def _forget(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def lock_run(
    folder: Path, patience_s: float = PATIENCE_S, attempt: Attempt | None = None
) -> RunLock | None:
    """Locks a folder for this job: process 0 does, and all of them fail if it cannot.

    attempt: of a supervised run. Returns: the lock, in process 0. Raises: UserError, the same one
    in every process; in process 0 SupersededError when a newer attempt of the run has the lock.
    """
    lock, refused, kind = None, "", UserError
    if jax.process_index() == 0:
        try:
            lock = RunLock(folder, patience_s, attempt)
        except SupersededError:
            raise  # this process ends at once, and the job with it
        except UserError as error:
            refused, kind = str(error), type(error)
    if jax.process_count() > 1:
        told = np.zeros(MESSAGE_BYTES, np.uint8)
        text = np.frombuffer(refused.encode()[: MESSAGE_BYTES - 1], np.uint8)
        told[: text.size] = text
        told[-1] = kind is TemporaryError
        told = np.asarray(multihost_utils.broadcast_one_to_all(told), np.uint8)
        kind = TemporaryError if told[-1] else UserError
        refused = told[:-1].tobytes().rstrip(b"\0").decode(errors="ignore")
    if refused:
        raise kind(refused)
    return lock


def _take(path: Path, patience_s: float, attempt: Attempt | None = None) -> int:
    """Returns a descriptor that holds the lock, -1 where the file system has no locks.

    Raises: UserError when another process keeps it; SupersededError. OSError.
    """
    end, told = time.monotonic() + patience_s, False
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # a program that we start gets no copy
        try:
            is_locked = lock(file)
        except OSError as error:
            os.close(file)
            logging.warning(
                "%s cannot be locked (%s): do not start a second run in it", path.parent, error
            )
            return -1
        if not is_locked:
            holder, lead = _holder(file), _lead(file, attempt)
            is_late = time.monotonic() >= end
            if is_late and lead > 0 and _is_at(file, path):
                path.unlink()
            os.close(file)
            if lead < 0:
                raise SupersededError(f"a newer attempt is in {path.parent}: {holder}")
            if is_late and lead == 0:
                # Beside a supervised run it may be what an earlier driver left, and ends soon.
                kind = UserError if attempt is None else TemporaryError
                raise kind(
                    f"{path.parent} is in use by {holder}: stop that run or give another --run_dir"
                )
            if not told:
                logging.warning("%s is in use by %s; waiting for its end", path.parent, holder)
                told = True
            time.sleep(POLL_S)
            continue
        if _is_at(file, path):
            return file
        os.close(file)  # its holder removed it in the meantime: the next file counts


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _lead(file: int, attempt: Attempt | None) -> int:
    """Returns by how much an attempt is newer than the holder of a lock file, 0 if that is not of
    the same supervised run."""
    try:
        holder = json.loads(os.pread(file, 1 << 16, 0))
        if attempt is None or holder["run"] != attempt.run:
            return 0
        return attempt.number - int(holder["number"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _holder(file: int) -> str:
    try:
        holder = parse_json(os.pread(file, 1 << 16, 0))
        return (
            f"process {holder['pid']} on {holder['host']} since {holder['since']} "
            f"({holder['command'][:500]})"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # it has not said yet who it is
