"""Who may save: the newest attempt of a supervised job, as a record in its folder or store says.

A host that was frozen may wake up when its job has long been started again elsewhere. Each attempt
writes its number over that of an older one before it saves, and a step gets its name only while the
record is still the attempt's own. On a disk, a lock covers that check and the rename; in a store,
the record is written again if nobody changed it (compare and swap) just before the step's own
record, so a few milliseconds stay open. Attempts are numbered by the driver of a run, which also
names the run; a job that nobody supervises has no attempt, and then nothing is checked. No jax.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megajax.checkpoint.store import CheckpointError, ObjectPath
from megajax.core.files import parse_json

RECORD, LOCK = "attempt.json", "attempt.lock"
PATIENCE_S = 30.0  # for another process between check and rename (chosen)


@dataclass(frozen=True)
class Attempt:
    """One start of a job. run: the driver's name of it. number: how often it was started before."""

    run: str
    number: int


class Lease:
    """The right of one attempt to save in a place."""

    def __init__(self, place: Path, attempt: Attempt):
        """place: the folder or prefix of the steps. Nothing is written yet."""
        self._place, self._attempt, self._is_taken = place, attempt, False

    def take(self) -> None:
        """Takes the place over from an older attempt. Raises: SupersededError, OSError."""
        with self._locked():
            self._write_over()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps others from taking over for as long as a step gets its name.

        Raises: SupersededError when one did, OSError.
        """
        with self._locked():
            self._write_over()
            yield

    def is_lost(self) -> bool:
        """Tells whether a newer attempt took over."""
        try:
            self._check(self._read()[0])
        except SupersededError:
            return True
        return False

    def _write_over(self) -> None:
        held, generation = self._read()
        self._check(held)
        text = json.dumps(asdict(self._attempt)).encode()
        if isinstance(self._place, ObjectPath):
            if not (self._place / RECORD).swap(text, generation):
                self._check(self._read()[0])
                raise CheckpointError(f"{self._place / RECORD} changed while it was written")
        elif held != self._attempt:
            temporary = self._place / f".{RECORD}.{os.getpid()}"
            with open(temporary, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._place / RECORD)
        self._is_taken = True

    def _check(self, held: Attempt | None) -> None:
        mine = self._attempt
        newer = held is not None and held.run == mine.run and held.number > mine.number
        if newer or (self._is_taken and held != mine):
            raise SupersededError(
                f"a newer attempt has taken over {self._place}: {held}, and this is {mine}; "
                "nothing is saved by this process any more"
            )

    def _read(self) -> tuple[Attempt | None, Any]:
        """Returns (who may save, what a store calls this version). None: nobody yet, or torn."""
        path, generation = self._place / RECORD, None
        try:
            if isinstance(path, ObjectPath):
                text, generation = path.read_version()
            else:
                text = path.read_bytes()
            held = Attempt(**parse_json(text))
            return (held if type(held.number) is int else None), generation
        except FileNotFoundError:
            return None, generation
        except (ValueError, TypeError):
            return None, generation

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if isinstance(self._place, ObjectPath):
            yield
            return
        self._place.mkdir(parents=True, exist_ok=True)
        with open(self._place / LOCK, "ab") as file:
            until = time.monotonic() + PATIENCE_S
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise OSError(f"{self._place / LOCK} is held by another process") from None
                    time.sleep(0.01)
                    continue
                except OSError:  # some network file systems have no locks
                    pass
                break
            yield


class SupersededError(CheckpointError):
    """A newer attempt of the job saves here now."""
