"""The steps of a run in an object store, which has no folders, no rename and no locks.

Orbax cannot write to s3://, and to gs:// only with other packages. So a step is staged: Orbax
writes it on the local disk (under TMPDIR, room for one step; the processes of a job must share it),
and once its record is made, process 0 sends it file by file, WORKERS in memory at a time. The
integrity record goes last, and a step without one does not exist: writing it is what a rename is
on a disk. Each object is read back when it was sent, because the new step lets older ones go.
What kill -9 leaves carries a mark, written before anything else, and goes when a job next saves
there. One job may save under a prefix at a time, and many may read. A step saved again is sent
beside the old copy (STEP/copy-xxxxxxxx/...); writing its record over the old one is what makes it
count, and then the old copy goes: kill -9 leaves the one or the other.
Steps read back straight from the store (reads.py). No jax.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import secrets
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megajax.checkpoint import integrity
from megajax.checkpoint.directory import StepFolder, is_ours, is_step_name, refuse_run
from megajax.checkpoint.integrity import (
    CHUNK,
    COPY,
    RECORD,
    CheckpointError,
    DamagedError,
    list_files,
    read_record,
    write_record,
)
from megajax.checkpoint.lease import Attempt
from megajax.checkpoint.signature import Keys
from megajax.checkpoint.store import ObjectPath, StoreError, is_address
from megajax.core.paths import expand

MARK = "unfinished"  # an object of a step that is being written or removed
WORKERS = 4  # files sent at once (chosen: a gigabyte of memory, copies counted)
STAGES = 100  # (chosen) names of the local folder that are tried
ASKED = 10  # (chosen) objects of which one must be there for a prefix to be taken
FILE_BYTES = 128 * 2**20  # at which Orbax begins another file; one chunk may be more


class ObjectFolder(StepFolder):
    """Paths and state of the steps under one prefix."""

    file_bytes = FILE_BYTES

    def __init__(self, path: ObjectPath, keys: Keys | None = None):
        """path: the prefix; nothing need be there. keys: that sign what counts.

        Raises: CheckpointError: it has no bucket.
        """
        super().__init__(path, keys)
        self._home = path
        server = path.spec().get("endpoint", "")
        name = hashlib.sha256(f"{server} {path}".encode()).hexdigest()[:16]
        self._stage = StepFolder(_stage_folder(f"megajax-{os.geteuid()}-{name}"))

    def fence(self, attempt: Attempt | None, takes: bool) -> None:
        """Does what it does on a disk; an older attempt may share the stage."""
        super().fence(attempt, takes)
        self._stage.fence(attempt, takes=False)

    def _is_plain(self, folder: Path) -> bool:
        return False  # Orbax alone does not write here

    def step(self, step: int) -> ObjectPath:
        """Returns the place of a saved step."""
        return self._home / str(step)

    def saving(self, step: int) -> Path:
        """Returns the local folder in which a step is staged."""
        return self._stage.saving(step)

    def steps(self) -> list[int]:
        """Returns the stored steps, oldest first, good or not. Raises: StoreError."""
        return sorted(self._found(RECORD))

    def begin(self, step: int) -> None:
        """Takes the stage, and removes what killed saves left. Raises: OSError, StoreError."""
        with contextlib.suppress(FileExistsError):
            self._stage.path.mkdir(mode=0o700)
        if not _is_private(self._stage.path):
            raise OSError(
                f"{self._stage.path}, where steps are staged, is not a folder of this user alone; "
                "set TMPDIR to a folder that only this user may write to"
            )
        self._refuse_foreign(step)
        if self.lease is not None:
            self.lease.take()
        self._stage.begin(step)
        with self.cleaning:
            marked = self._found(MARK)
            for left in marked & self._found(RECORD) if marked else ():
                self._settle(left)  # killed after the record was written, or while it was replaced
            self.empty()

    def _refuse_foreign(self, step: int) -> None:
        place = self.step(step)
        names = place.names()
        refuse_run(place, [n.partition("/")[0] for n in names])
        if not names or (place / RECORD).exists() or (place / MARK).exists():
            return
        # A listing may name objects that are gone.
        there = next((n for n in names[:ASKED] if (place / n).exists()), None)
        if there is not None and not is_ours(place):
            raise CheckpointError(
                f"{place / there} was not written by megajax, and saving step {step} would remove "
                "it; move it, or save elsewhere"
            )

    def commit(self, step: int) -> None:
        """Sends a staged step, its record last. Raises: StoreError, OSError."""
        saving, home = self.saving(step), self.step(step)
        if self.lease is not None:
            self.lease.take()  # before the step of that name goes
        again = (home / RECORD).exists()
        if again:
            place = home / f"{COPY}{secrets.token_hex(4)}"
            record = dataclasses.replace(read_record(saving), home=place.name)
            write_record(saving, record, self.keys)
        elif (place := home).is_dir():
            self._clear(step)
        (home / MARK).write(b"")

        def send(name: str, to: ObjectPath) -> None:
            if self.lease is not None:
                self.lease.check()  # a newer attempt may be sending the same step
            content = (saving / name).read_bytes()
            (to / name).write(content)
            _read_back(to / name, content)

        with ThreadPoolExecutor(WORKERS) as pool:
            sent = [pool.submit(send, name, place) for name in list_files(saving)]
            try:
                for one in sent:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)  # a store that is gone is asked once, not always
        try:
            with self.lease.held() if self.lease is not None else contextlib.nullcontext():
                send(RECORD, home)
        except StoreError:
            with contextlib.suppress(StoreError):
                if not again:  # else: of the old copy, or of the new one, which is whole
                    (home / RECORD).delete()
            raise
        if again:
            self._clear(step, place.name)
        (home / MARK).delete()
        self._stage.drop_saving(step)

    def drop_saving(self, step: int) -> None:
        """Frees what a failed save wrote, as far as the store answers."""
        self._stage.drop_saving(step)
        try:
            if self.lease is not None and self.lease.is_lost():
                return  # the newer attempt may be sending the same step
            if (self.step(step) / MARK).exists():
                if (self.step(step) / RECORD).exists():
                    self._settle(step)
                else:
                    self._clear(step)
        except StoreError:
            return  # the next save removes it

    def remove(self, step: int) -> None:
        """Takes a step's record away, so that it is never half there. Raises: StoreError."""
        (self.step(step) / MARK).write(b"")
        (self.step(step) / RECORD).delete()

    def empty(self) -> None:
        """Frees the objects of removed steps. Raises: StoreError."""
        marked = self._found(MARK)
        for step in marked - self._found(RECORD) if marked else ():
            if not (self.step(step) / RECORD).exists():  # a listing may leave objects out
                self._clear(step)

    def lock(self, shared: bool = False, wait_s: float = 0.0) -> bool:
        """Takes the stage; False: another process of this machine saves there."""
        return self._stage.lock(shared, wait_s)

    def unlock(self) -> None:
        """Gives the stage back."""
        self._stage.unlock()

    def collect(self) -> None:
        """Removes what killed processes left on the stage; `begin` does the rest.

        Another machine may be saving, of which no lock tells.
        """
        self._stage.collect()

    def _settle(self, step: int) -> None:
        """Frees what the record of a marked step does not speak of, and the mark."""
        try:
            record = read_record(self.step(step))
        except DamagedError:
            return  # which of two copies is good is not known
        self._clear(step, record.home)
        (self.step(step) / MARK).delete()

    def _clear(self, step: int, home: str | None = None) -> None:
        """Removes all objects of a step that has no record, the mark last.

        home: of the record that there is: those of other copies go, and no mark.
        A number after the step's own is a step of another run, whose prefix lies in ours.
        """
        folder = self.step(step)
        names = [n for n in folder.names() if n != MARK and not is_step_name(n.partition("/")[0])]
        if home is not None:
            copies = [(n, n.partition("/")[0]) for n in names if n not in (RECORD, integrity.MARK)]
            names = [n for n, c in copies if (c if c.startswith(COPY) else "") != home]
        with ThreadPoolExecutor(4 * WORKERS) as pool:
            list(pool.map(lambda name: (folder / name).delete(), names))
        if home is None:
            (folder / MARK).delete()

    def _found(self, name: str) -> set[int]:
        """Returns the steps that have an object of this name."""
        pairs = (key.split("/") for key in self._home.names())
        return {int(p[0]) for p in pairs if len(p) == 2 and is_step_name(p[0]) and p[1] == name}


def _stage_folder(name: str) -> Path:
    """Returns where steps are staged: all processes of a job must find it, so its name can be
    guessed. What somebody else put there, a link too, is passed over."""
    home = Path(tempfile.gettempdir())
    places = [home / name, *(home / f"{name}-{i}" for i in range(1, STAGES))]
    return next((p for p in places if _is_private(p) or not os.path.lexists(p)), places[0])


def _is_private(folder: Path) -> bool:
    """Tells a folder that only this user may enter."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return own and not facts.st_mode & 0o077


def _read_back(path: ObjectPath, content: bytes) -> None:
    """Raises StoreError when a store that took an object does not have it."""
    try:
        for begin in range(0, max(len(content), 1), CHUNK):
            wanted = content[begin : begin + CHUNK]
            if path.read_range(begin, len(wanted)) != wanted:
                raise StoreError(f"{path} was sent, and other bytes are read back")
    except FileNotFoundError:
        raise StoreError(f"{path} was sent, the store accepted it, and it is not there") from None


def open_steps(directory: str | Path, keys: Keys | None = None) -> StepFolder:
    """Returns the steps at a local path or at an address. keys: that sign what counts.

    Raises: CheckpointError for a bad one.
    """
    if is_address(directory):
        if ".." in Path(directory).parts:  # a key for the signature, a way up for HTTP
            raise CheckpointError(f"{directory} must not hold ..; write the prefix out")
        return ObjectFolder(ObjectPath(str(directory)), keys)
    if "://" in str(directory):
        raise CheckpointError(f"{directory} is no place: s3://BUCKET/..., gs://... or a local path")
    folder = expand(directory).absolute()
    if special := sorted(set(str(folder)) & set("*?[\\")):
        # Orbax takes these for patterns and tensorstore a backslash for a slash: what is saved
        # there could not be read again.
        near = re.sub(r"[*?[\\]", "_", str(folder))
        raise CheckpointError(f"{folder} must not hold {' '.join(special)}; nearest: {near}")
    if os.path.isfile(folder):
        raise CheckpointError(f"{folder} is a file; name a folder for the checkpoints")
    return StepFolder(folder, keys)
