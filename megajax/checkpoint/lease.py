"""Who may save: the newest attempt of the newest run, as a record in its folder or store says.

A host that was frozen may wake up when its job has long been started again elsewhere. Each attempt
takes the record over before it saves, and a step gets its name only while the record is still its
own. No clock decides who is newer. Of one run, which is what one driver starts, the greater number
is. Of two runs, the one that took later is: each take adds one to the record's generation and
leaves the run before it on a list, and a run on that list never takes again. So a new driver takes
a folder over by starting; what an old one still runs, and starts, is refused and ends.

On a disk, a lock covers the check and the rename. Where a file system has no locks, and in a store,
a few milliseconds between the check and the step's own record stay open. A store gets the record by
compare and swap (If-Match on S3, ifGenerationMatch on GCS), so of two that write it at one time one
wins. A store that ignores the condition keeps the check and loses the swap: the last of two that
write within milliseconds of one another counts, and the other sees it at its next look. A store
that refuses conditions (501) refuses the save. A job that nobody supervises has no attempt, and
then nothing is checked. No jax.
"""

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megajax.checkpoint.store import CheckpointError, ObjectPath, SaveError
from megajax.core.errors import SUPERSEDED
from megajax.core.files import lock, parse_json, write_whole

RECORD, LOCK = "attempt.json", "attempt.lock"
PATIENCE_S = 30.0  # for another process between check and rename (chosen)
SWAPS = 5  # (chosen) tries against others who write the record of a store at the same time
NEVER = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
FORMER = 1000  # (chosen) runs that are remembered as taken over


@dataclass(frozen=True)
class Attempt:
    """One start of a job. run: the driver's name of it. number: how often it was started before."""

    run: str
    number: int

    @property
    def tag(self) -> str:
        """A name for files of this attempt only."""
        return hashlib.sha256(f"{self.number} {self.run}".encode()).hexdigest()[:12]


@dataclass(frozen=True)
class _Held:
    """The record. generation: grows with each take. former: runs that others took over."""

    run: str
    number: int
    generation: int = 0
    former: tuple[str, ...] = ()


class Lease:
    """The right of one attempt to save in a place."""

    def __init__(self, place: Path, attempt: Attempt):
        """place: the folder or prefix of the steps. Nothing is written yet."""
        self._place, self.attempt = place, attempt
        self._written: _Held | None = None  # as this process wrote it

    def take(self) -> None:
        """Takes the place over from older attempts; later, makes sure that nobody newer did.

        Raises: SupersededError, OSError.
        """
        with self._locked():
            self._write()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps others from taking over for as long as a step gets its name.

        Raises: SupersededError when one did, OSError.
        """
        with self._locked():
            self._write()
            yield

    def check(self) -> None:
        """Raises: SupersededError when a newer attempt took over."""
        self._refuse_older(self._read()[0])

    def is_lost(self) -> bool:
        """Tells whether a newer attempt took over."""
        try:
            self.check()
        except SupersededError:
            return True
        return False

    def _write(self) -> None:
        """Writes the record unless it is there; in a store, always, to see who else writes."""
        for _ in range(SWAPS):
            held, version = self._read()
            self._refuse_older(held)
            record = self._next_record(held)
            text = json.dumps(asdict(record)).encode()
            path = self._place / RECORD
            if isinstance(path, ObjectPath):
                if not path.swap(text, version):
                    continue  # another wrote it: look who
            elif held != record:
                write_whole(path, text)
            self._written = record
            return
        raise SaveError(f"{self._place / RECORD} changed {SWAPS} times while it was written")

    def _next_record(self, held: _Held | None) -> _Held:
        """Returns the record of this attempt after that of an older one, or none."""
        if held is not None and held == self._written:
            return held
        generation, former = (held.generation, held.former) if held is not None else (0, ())
        if held is not None and held.run != self.attempt.run:
            former = (*former, held.run)[-FORMER:]
        if self._written is not None:  # the record was removed, or torn
            generation = max(generation, self._written.generation)
            former = former or self._written.former
        return _Held(self.attempt.run, self.attempt.number, generation + 1, former)

    def _refuse_older(self, held: _Held | None) -> None:
        """Raises SupersededError when this is older than who may save."""
        attempt, written = self.attempt, self._written
        if held is None or held == written:
            return
        if held.run == attempt.run and held.number != attempt.number:
            newer = held.number > attempt.number
        elif written is not None:
            newer = held.generation >= written.generation
        else:
            newer = held.run != attempt.run and attempt.run in held.former
        if newer:
            raise SupersededError(
                f"a newer attempt has taken over {self._place}: attempt {held.number} of run "
                f"{held.run}, and this is attempt {attempt.number} of run {attempt.run}; nothing "
                "is saved by this process any more"
            )

    def _read(self) -> tuple[_Held | None, Any]:
        """Returns (who may save, what a store calls this version). None: nobody yet, or torn."""
        path, version = self._place / RECORD, None
        try:
            if isinstance(path, ObjectPath):
                text, version = path.read_version()
            else:
                text = path.read_bytes()
            held = _Held(**parse_json(text))
            types = type(held.run), type(held.number), type(held.generation)
            if types != (str, int, int):
                return None, version
            return replace(held, former=tuple(map(str, held.former))), version
        except (FileNotFoundError, ValueError, TypeError):
            return None, version

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if isinstance(self._place, ObjectPath):
            yield
            return
        self._place.mkdir(parents=True, exist_ok=True)
        with open(self._place / LOCK, "ab") as file:
            is_locked = True
            with contextlib.suppress(OSError):  # some network file systems have no locks
                is_locked = lock(file.fileno(), wait_s=PATIENCE_S)
            if not is_locked:
                raise OSError(f"{self._place / LOCK} is held by another process")
            yield


class LeaseError(SaveError):
    """Storage does not take the record of who may save; a later start may find it in order."""


def lease_error(place: Path, error: OSError) -> CheckpointError:
    """Returns the error of a place that an attempt could not take over. It has exit code 75, but
    for a place that will never do (no permission, a folder where a file must be)."""
    kind = CheckpointError if error.errno in NEVER else LeaseError
    return kind(
        f"cannot take {place} over from earlier attempts: {error.filename or RECORD}: "
        f"{error.strerror or error}; nothing was changed there (--run_dir)"
    )


class SupersededError(SaveError):
    """A newer attempt of the job, or a newer driver's, saves here now. Trying again is no use."""

    exit_code = SUPERSEDED
