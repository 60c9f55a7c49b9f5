"""The steps of a run: which there are, how one appears, how one goes; on a disk or in a store.

A step is written elsewhere and counts from one moment on: on a disk a rename (StepFolder), in an
object store the writing of its record (ObjectFolder). `open_steps` chooses. No jax.
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from absl import logging

from megajax.checkpoint import trust
from megajax.checkpoint.lease import Attempt, Lease, lease_error
from megajax.checkpoint.store import ObjectPath, StoreError, is_address
from megajax.checkpoint.trust import (
    CHUNK,
    COPY,
    FLAG,
    RECORD,
    CheckpointError,
    DamagedError,
    ForbiddenError,
    Keys,
    Record,
    absent,
    find_damage,
    list_files,
    read_record,
    sync_folder,
    write_record,
)
from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand, open_regular, parse_json, read_bytes

# ---- a folder on a disk
#
# A step is written elsewhere, as N.saving/new, and gets its own name by one rename when all of it
# is on the disk, the integrity record last: kill -9 at any moment leaves steps that are whole and,
# at most, leavings that the next start removes. Every process that saves holds a shared lock on the
# folder (flock, so it ends with the process), and who removes leavings holds it alone.
#
# Others may keep things there too, under whatever names. So what is removed or replaced is known by
# what is inside: N.saving and N.trash by the file MARK, which is made before anything else and goes
# last, and a step by its record or its metadata, which Orbax alone would not write so.


METADATA = "_CHECKPOINT_METADATA"  # Orbax's mark of a whole checkpoint
OURS = "megajax.integrity"  # in a step's metadata: it was given a record, so it must have one
MAX_METADATA = 2**30  # (chosen) bytes
SAVING, TRASH = ".saving", ".trash"
MARK = ".megajax-leavings"  # in what has these names, and may be removed
NEW, FORMER = "new", "former"  # in N.saving: the step, and that of its name before it
BEGINNING = b'{"crc32": "'  # of a record
PATIENCE_S = 30.0  # for one who removes leavings; then a save goes on beside him (chosen)


class StepFolder:
    """Paths and state of the steps in one folder."""

    file_bytes: int | None = None  # at which Orbax begins another file; None: as it likes

    def __init__(self, path: Path, keys: Keys | None = None):
        """path: need not exist yet. keys: that sign what counts; None: nobody need sign."""
        self.path = path
        self._lock: int | None = None
        self._key: tuple[str, int] | None = None  # of the step that is being saved
        self.lease: Lease | None = None  # of a supervised attempt
        self.keys, self._noted = keys, False
        self._closed: set[int] = set()  # steps that this user may not look into, and was told so
        self.cleaning = threading.Lock()  # of the threads that remove what is not needed any more
        self._tag = ""  # of what it writes: an older attempt may wake up and write the same step

    def fence(self, attempt: Attempt | None, takes: bool) -> None:
        """Lets a supervised attempt save for as long as no newer one does.

        takes: whether this process writes the record of the attempt, which one process of a job
        does. Raises: SupersededError; LeaseError, or CheckpointError
        where trying again is no use.
        """
        if attempt is None:
            return
        self._tag = f"-{attempt.tag}"
        if takes:
            self.lease = Lease(self.path, attempt)
            try:
                self.lease.take()
            except OSError as error:
                raise lease_error(self.path, error) from None

    def step(self, step: int) -> Path:
        """Returns the folder of a saved step."""
        return self.path / str(step)

    def saving(self, step: int) -> Path:
        """Returns the folder in which a step is written before it counts."""
        return self.path / f"{step}{SAVING}{self._tag}" / NEW

    def steps(self) -> list[int]:
        """Returns the stored steps, oldest first, good or not. Raises: UnreadableError.

        A folder is a step when its name is a number as `str` writes it and it holds an integrity
        record, or what Orbax describes a whole checkpoint with. One that this user may not look
        into is named once and passed over, unless no other step is there.
        """
        try:
            names = os.listdir(self.path)
        except OSError as error:
            absent(self.path, error)
            return []
        steps, closed = [], None
        for step in sorted(int(name) for name in names if is_step_name(name)):
            try:
                folder = self.path / str(step)
                if _is_there(folder / RECORD) or _description(folder) is not None:
                    steps.append(step)
            except ForbiddenError as error:
                closed = error
                if step not in self._closed:
                    self._closed.add(step)
                    logging.warning("%s. It is passed over", error)
        if closed is not None and not steps:
            raise closed
        return steps

    def record(self, step: int) -> Record | None:
        """Returns a step's record; None: Orbax alone wrote the step, there never was one.

        Raises: DamagedError when the record is damaged or gone, or that of another step, or when
        the step was read back after its save and was not what was written.
        """
        folder = self.step(step)
        if self._is_plain(folder):
            if self.keys is not None:
                raise DamagedError(
                    f"step {step} of {self.path} is of plain Orbax and not signed, and only signed "
                    f"steps count {FLAG}; restore it without a key and save it again with one"
                )
            return None
        record = read_record(folder, self.keys)
        if record.signature and self.keys is None and not self._noted:
            self._noted = True
            logging.warning("steps of %s are signed, and not checked without %s", self.path, FLAG)
        if record.step != step:
            raise DamagedError(
                f"step {step} of {self.path} holds step {record.step} ({RECORD} says so); "
                "give the folder its own name back"
            )
        if wrong := trust.read_mark(folder, record):
            raise trust.refuted(folder, wrong)
        return record

    def is_read_back(self, step: int, record: Record) -> bool:
        """Tells whether a step was read back after it was saved, and was what was written."""
        return trust.read_mark(self.step(step), record) == []

    def unread(self, among: int, but: Collection[int] = ()) -> int | None:
        """Returns the newest of the `among` newest good steps that was not read back, or None.

        but: steps that are left out. Raises: UnreadableError, StoreError.
        """
        seen = 0
        for step in reversed(self.steps()):
            if seen == among:
                break
            with contextlib.suppress(DamagedError, ForbiddenError):
                if step in but or (record := self.record(step)) is None:
                    continue
                if not self.is_read_back(step, record):
                    return step
                seen += 1
        return None

    def home(self, step: int) -> Path:
        """Returns where the files of a step are, which is below `step` if it was saved again in a
        store; `step` itself when the record does not say. Raises: UnreadableError, StoreError."""
        record = self.unchecked(step)
        return self.step(step) if record is None else self.step(step) / record.home

    def unchecked(self, step: int) -> Record | None:
        """Returns what the record of a step says, whoever signed it; None when it says nothing.

        Raises: UnreadableError, StoreError.
        """
        try:
            return read_record(self.step(step))
        except DamagedError:
            return None

    def _is_plain(self, folder: Path) -> bool:
        """Tells a step that Orbax alone wrote. Raises: UnreadableError."""
        if _is_there(folder / RECORD):
            return False
        described = _description(folder)
        if described is None:
            return False
        metadata = described.get("custom_metadata")
        return not (isinstance(metadata, dict) and OURS in metadata)

    def data_state(self, step: int) -> dict[str, Any]:
        """Returns the metadata that the step was saved with. Raises: CheckpointError."""
        path = self.home(step) / METADATA
        try:
            metadata = parse_json(_bytes(path))["custom_metadata"] or {}
            return {k: v for k, v in metadata.items() if k != OURS}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"cannot read step {step}: {path}: {error!r}") from None

    def begin(self, step: int) -> None:
        """Takes the folder and tries to write there. Raises: OSError, CheckpointError."""
        self._refuse_foreign(step)
        if self.lease is not None:
            with self.lease.held():  # an attempt that lost it never comes here
                for leftover in self.path.glob(f"[0-9]*{SAVING}-*"):
                    if not leftover.name.partition(SAVING)[2].startswith(self._tag):
                        self._settle_saving(
                            leftover
                        )  # an older attempt was frozen or killed in a save
        key = (os.path.realpath(self.path), step)
        if key in _being_saved():
            raise OSError(f"another manager of this process is saving step {step} there")
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock(shared=True, wait_s=PATIENCE_S)
        self._key = key
        _being_saved().add(key)
        self.drop_saving(step)
        if not _mark(self.saving(step).parent):
            raise CheckpointError(
                f"{self.saving(step).parent}, where step {step} would be written, is not of "
                "megajax; move it, or save elsewhere"
            )

    def commit(self, step: int) -> None:
        """Gives a written step its name; one of that name before it goes.

        Raises: OSError; CheckpointError when somebody else's things have the name.
        """
        saving = self.saving(step)
        with self.lease.held() if self.lease is not None else contextlib.nullcontext():
            self._refuse_foreign(step)
            if os.path.lexists(self.step(step)):
                self.step(step).rename(saving.with_name(FORMER))
            saving.rename(self.step(step))
        sync_folder(self.path)
        _free(saving.parent)

    def _refuse_foreign(self, step: int) -> None:
        """Raises CheckpointError when what has the name of a step is no step of ours."""
        place = self.step(step)
        if not os.path.lexists(place):
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            refuse_run(place, os.listdir(place))
        if not is_ours(place):
            raise CheckpointError(
                f"{place} was not saved by megajax, and saving step {step} would replace it; move "
                "it, or save elsewhere"
            )

    def drop_saving(self, step: int) -> None:
        """Frees what a failed save wrote; a full disk would stay full."""
        lost = self.lease is not None and self.lease.is_lost()  # to one that may be naming it
        self._settle_saving(self.saving(step).parent, gives_back=not lost)

    def _settle_saving(self, leftover: Path, gives_back: bool = True) -> None:
        """Removes N.saving. gives_back: a step that was there before gets its name again."""
        former, step = leftover / FORMER, self.path / leftover.name.partition(SAVING)[0]
        if _is_marked(leftover) and os.path.lexists(former) and not os.path.lexists(step):
            if not gives_back:
                return
            former.rename(step)
        _free(leftover)

    def remove(self, step: int) -> None:
        """Moves a step into a trash folder, so that no reader sees part of it; `empty` frees its
        bytes.

        A step that is not of megajax stays. Raises: UnreadableError.
        """
        if not is_ours(self.step(step)):
            return
        with contextlib.suppress(OSError):  # gone already, or storage does not let us
            for i in itertools.count():  # until a name is free of what others keep
                trash = self.path / f"{step}{TRASH}{f'-{i}' if i else ''}"
                if _mark(trash):
                    self.step(step).rename(trash / secrets.token_hex(4))
                    return

    def empty(self) -> None:
        """Frees the bytes of removed steps: a second for 500 MB on a slow disk."""
        for trash in self.path.glob(f"[0-9]*{TRASH}*"):
            _free(trash)

    def free_removed(self) -> None:
        """Does `empty` while no other thread removes steps. Raises: OSError, StoreError."""
        with self.cleaning:
            self.empty()

    def retain(
        self, newest: int, best: int, bad: Collection[int], saved: int, read_back: bool = False
    ) -> None:
        """Removes the steps that have `newest` verified steps after them; 0 newest: none.

        A step is verified when its record is valid, its files have the sizes of the record and, if
        read_back, it was read back. best: so many verified steps with the lowest metric stay too,
        and those with a still lower one that were not read back yet. bad: steps that are known not
        to be verified. saved: the step that was just stored, which stays in every case.
        Raises: UnreadableError, StoreError.
        """
        if not newest:
            return
        records: dict[int, Record] = {}
        staying, steps = {saved}, self.steps()
        if len(steps) <= newest:
            return  # none has so many after it
        for step in steps:
            try:
                record = self.record(step)
            except DamagedError:
                continue
            except ForbiddenError:  # it may be whole
                staying.add(step)
                continue
            if record is not None and step not in bad:
                records[step] = record
        intact = functools.cache(lambda s: not find_damage(self.step(s), records[s], fast=True))
        verified = functools.cache(
            lambda s: (not read_back or self.is_read_back(s, records[s])) and intact(s)
        )
        after = list(itertools.islice(filter(verified, sorted(records, reverse=True)), newest))
        if len(after) < newest:
            return
        ranked = sorted((r.metric, s) for s, r in records.items() if r.metric is not None)
        for _, step in ranked:
            if not best:
                break
            if intact(step):
                staying.add(step)
                best -= verified(step)
        for step in steps:
            if step < after[-1] and step not in staying:
                with contextlib.suppress(ForbiddenError):
                    self.remove(step)

    def lock(self, shared: bool = False, wait_s: float = 0.0) -> bool:
        """Locks the folder. Returns: False: another process holds the lock; True also where the
        file system has no locks.

        shared: others may hold it with this process. wait_s: for those who hold it otherwise.
        """
        if self._lock is not None:
            return True
        try:
            number = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            absent(self.path, error)
            raise
        try:
            is_locked = files.lock(number, shared, wait_s)
        except OSError:  # some network file systems have no locks
            os.close(number)
            return True
        if is_locked:
            self._lock = number
        else:
            os.close(number)
        return is_locked

    def unlock(self) -> None:
        """Releases the lock of the folder."""
        if self._key is not None:
            _being_saved().discard(self._key)
            self._key = None
        if self._lock is not None:
            number, self._lock = self._lock, None
            os.close(number)

    def collect(self) -> None:
        """Removes what killed processes left, unless somebody saves here now."""
        if not _is_there(self.path) or not self.lock():
            return
        try:
            for leftover in self.path.glob(f"[0-9]*{SAVING}*"):
                self._settle_saving(leftover)
            for trash in self.path.glob(f"[0-9]*{TRASH}*"):
                _free(trash)
        except OSError:
            return  # a read-only file system: nothing was left by a save, or nothing can be done
        finally:
            self.unlock()


@functools.cache
def _being_saved() -> set[tuple[str, int]]:
    """The (folder, step) that managers of this process are saving: locks do not part those."""
    return set()


def _mark(folder: Path) -> bool:
    """Makes a folder that may be removed, or takes one that has the mark or is empty.

    Returns: whether it is one; not when it holds what somebody else keeps. Raises: OSError.
    """
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:  # a file
        return False
    if not _is_marked(folder):
        if folder.is_symlink() or any(folder.iterdir()):
            return False
        (folder / MARK).touch(exist_ok=False)
    return True


def _is_marked(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return not folder.is_symlink() and stat.S_ISREG((folder / MARK).lstat().st_mode)
    return False


def _free(folder: Path) -> None:
    """Removes a marked folder, its mark last; of a step that was moved away, the link to it."""
    with contextlib.suppress(OSError):
        if not _is_marked(folder):
            folder.rmdir()  # refused unless it is empty: killed before the mark was made
            return
        for name in os.listdir(folder):
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif name != MARK:
                path.unlink()
        if os.listdir(folder) == [MARK]:
            (folder / MARK).unlink()
            folder.rmdir()


def is_ours(step: Path) -> bool:
    """Tells a step that megajax saved, damaged or not, from what else may have such a name.

    Raises: UnreadableError.
    """
    described = _description(step) or {}
    metadata = described.get("custom_metadata")
    if isinstance(metadata, dict) and OURS in metadata:
        return True
    if isinstance(step, ObjectPath):
        return False
    try:
        with open_regular(step / RECORD) as file:
            return file.read(len(BEGINNING)) == BEGINNING
    except UserError:  # no file
        return False
    except OSError as error:
        absent(step / RECORD, error)
        return False


def is_step_name(name: str) -> bool:
    """Tells the name of a step: 5, not 05, 5.saving or a digit of another script."""
    return name.isascii() and name.isdigit() and (name == "0" or name[0] != "0")


def refuse_run(place: Path, names: Iterable[str]) -> None:
    """Raises CheckpointError when what has the name of a step holds the steps of another run."""
    if held := next(filter(is_step_name, names), None):
        raise CheckpointError(
            f"{place} holds {held}/, a step of another run, and saving step {place.name} would "
            "replace it; move that run, or save elsewhere"
        )


def _is_there(path: Path) -> bool:
    """Tells whether a file exists. Raises: UnreadableError when that cannot be known."""
    try:
        path.stat()
    except OSError as error:
        absent(path, error)
        return False
    return True


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if isinstance(path, ObjectPath) else read_bytes(path, MAX_METADATA)


def _description(folder: Path) -> dict[str, Any] | None:
    """Returns what Orbax wrote about a checkpoint, or None. Raises: UnreadableError."""
    path = folder / METADATA
    try:
        description = parse_json(_bytes(path))
    except OSError as error:
        absent(path, error)
        return None
    except ValueError:
        return None
    return description if isinstance(description, dict) and description else None


# ---- a prefix of an object store
#
# An object store has no folders, no rename and no locks.
#
# Orbax cannot write to s3://, and to gs:// only with other packages. So a step is staged: Orbax
# writes it on the local disk (under TMPDIR, room for one step; the processes of a job must share
# it), and once its record is made, process 0 sends it file by file, WORKERS in memory at a time.
# The integrity record goes last, and a step without one does not exist: writing it is what a rename
# is on a disk. Each object is read back when it was sent, because the new step lets older ones go.
# What kill -9 leaves carries a mark, written before anything else, and goes when a job next saves
# there. One job may save under a prefix at a time, and many may read. A step saved again is sent
# beside the old copy (STEP/copy-xxxxxxxx/...); writing its record over the old one is what makes it
# count, and then the old copy goes: kill -9 leaves the one or the other. Steps read back straight
# from the store (store.open_leaf).


UNFINISHED_MARK = "unfinished"  # an object of a step that is being written or removed
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
        return sorted(self._steps_with(RECORD))

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
            marked = self._steps_with(UNFINISHED_MARK)
            for left in marked & self._steps_with(RECORD) if marked else ():
                self._settle(left)  # killed after the record was written, or while it was replaced
            self.empty()

    def _refuse_foreign(self, step: int) -> None:
        place = self.step(step)
        names = place.names()
        refuse_run(place, [n.partition("/")[0] for n in names])
        if not names or (place / RECORD).exists() or (place / UNFINISHED_MARK).exists():
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
        (home / UNFINISHED_MARK).write(b"")

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
        (home / UNFINISHED_MARK).delete()
        self._stage.drop_saving(step)

    def drop_saving(self, step: int) -> None:
        """Frees what a failed save wrote, as far as the store answers."""
        self._stage.drop_saving(step)
        try:
            if self.lease is not None and self.lease.is_lost():
                return  # the newer attempt may be sending the same step
            if (self.step(step) / UNFINISHED_MARK).exists():
                if (self.step(step) / RECORD).exists():
                    self._settle(step)
                else:
                    self._clear(step)
        except StoreError:
            return  # the next save removes it

    def remove(self, step: int) -> None:
        """Deletes the record of a step, so that no reader sees part of it. Raises: StoreError."""
        (self.step(step) / UNFINISHED_MARK).write(b"")
        (self.step(step) / RECORD).delete()

    def empty(self) -> None:
        """Frees the objects of removed steps. Raises: StoreError."""
        marked = self._steps_with(UNFINISHED_MARK)
        for step in marked - self._steps_with(RECORD) if marked else ():
            if not (self.step(step) / RECORD).exists():  # a listing may leave objects out
                self._clear(step)

    def lock(self, shared: bool = False, wait_s: float = 0.0) -> bool:
        """Locks the stage. Returns: False: another process of this machine saves there."""
        return self._stage.lock(shared, wait_s)

    def unlock(self) -> None:
        """Releases the lock of the stage."""
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
        (self.step(step) / UNFINISHED_MARK).delete()

    def _clear(self, step: int, home: str | None = None) -> None:
        """Removes all objects of a step that has no record, the mark last.

        home: of the record that there is: those of other copies go, and no mark.
        A number after the step's own is a step of another run, whose prefix lies in ours.
        """
        folder = self.step(step)
        names = [
            n
            for n in folder.names()
            if n != UNFINISHED_MARK and not is_step_name(n.partition("/")[0])
        ]
        if home is not None:
            copies = [(n, n.partition("/")[0]) for n in names if n not in (RECORD, trust.MARK)]
            names = [n for n, c in copies if (c if c.startswith(COPY) else "") != home]
        with ThreadPoolExecutor(4 * WORKERS) as pool:
            list(pool.map(lambda name: (folder / name).delete(), names))
        if home is None:
            (folder / UNFINISHED_MARK).delete()

    def _steps_with(self, name: str) -> set[int]:
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
    is_own_folder = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return is_own_folder and not facts.st_mode & 0o077


def _read_back(path: ObjectPath, content: bytes) -> None:
    """Raises StoreError when a store that took an object does not have it."""
    try:
        for begin in range(0, max(len(content), 1), CHUNK):
            expected = content[begin : begin + CHUNK]
            if path.read_range(begin, len(expected)) != expected:
                raise StoreError(f"{path} was sent, and other bytes are read back")
    except FileNotFoundError:
        raise StoreError(f"{path} was sent, the store accepted it, and it is not there") from None


def open_steps(directory: str | Path, keys: Keys | None = None) -> StepFolder:
    """Returns the steps at a local path or at an address. keys: that sign what counts.

    Raises: CheckpointError for a bad one.
    """
    if "://" in str(directory):
        if not is_address(directory):
            raise CheckpointError(
                f"{directory} is no place: s3://BUCKET/..., gs://... or a local path"
            )
        if ".." in Path(directory).parts:  # a key for the signature, the parent folder for HTTP
            raise CheckpointError(f"{directory} must not hold ..; write the prefix out")
        return ObjectFolder(ObjectPath(str(directory)), keys)
    folder = expand(directory).absolute()
    if special := sorted(set(str(folder)) & set("*?[\\")):
        # Orbax takes these for patterns and tensorstore a backslash for a slash: what is saved
        # there could not be read again.
        near = re.sub(r"[*?[\\]", "_", str(folder))
        raise CheckpointError(f"{folder} must not hold {' '.join(special)}; nearest: {near}")
    if os.path.isfile(folder):
        raise CheckpointError(f"{folder} is a file; name a folder for the checkpoints")
    return StepFolder(folder, keys)
