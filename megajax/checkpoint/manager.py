"""Checkpoints of a run: asynchronous, by step, through Orbax, and never a lie.

A save takes the arrays' fingerprints, copies the arrays off the devices and returns; storage goes
on in the background: Orbax's files, then the integrity record (integrity.py), then the step's name
(directory.py). A restore is checked against the record, element by element where they come to lie,
and what is not as it was saved is an error that names it. Plain Orbax can read every step, and
steps that plain Orbax wrote are read here.

Layout: <folder>/<step>/state/..., integrity.json, and the data position in Orbax's own metadata.
Sources: ByteCheckpoint section 4 (two stages, integrity), MegaScale section 4.4.
"""

import dataclasses
import functools
import itertools
import json
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from megajax.checkpoint import fingerprint, integrity, leaves, offline, read_back, storage
from megajax.checkpoint.directory import OURS
from megajax.checkpoint.fingerprint import Fingerprints
from megajax.checkpoint.integrity import CheckpointError, DamagedError, LeafSum, Record
from megajax.checkpoint.lease import Attempt, SupersededError
from megajax.checkpoint.object_folder import open_steps
from megajax.checkpoint.storage import Compression, SaveError, SaveHandle
from megajax.checkpoint.store import no_step
from megajax.core.tree import Tree, named_leaves

Table = list[tuple[str, tuple[int, ...], str]]  # name, shape, dtype
Verify = Literal["full", "fast"] | None
PATIENCE_MS = 1_800_000  # how long the processes of a job wait for each other's storage (chosen)


class CheckpointManager:
    """The checkpoints in one folder. All processes of a job must make the same calls."""

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 3,
        best: int = 0,
        compression: Compression = "auto",
        verify: Verify = "full",
        attempt: Attempt | None = None,
        verify_saves: bool = False,
    ):
        """Removes what killed saves left.

        directory: a folder, or an address: s3://bucket/prefix, gs://bucket/prefix (store.py says
        where endpoint and credentials come from, object_folder.py what such a store allows). keep:
        steps kept after a newer one is stored; 0: all. best: steps kept beside them for having the
        lowest metric. compression: auto compresses arrays that are mostly bytes. verify: what
        restore checks: full: every element and the step's small files; fast: the small files and
        all sizes; None: nothing.
        attempt: who saves; a newer one of its run takes over (lease.py). None: nobody does.
        verify_saves: read each step back before it counts and older ones go (read_back.py): a bit
        that flips on the way to storage fails the save, which takes about as long again.
        Raises: CheckpointError for a folder, a setting or an attempt that cannot be.
        """
        _check_settings(keep, best, compression, verify)
        self._steps = open_steps(directory)
        self.folder = self._steps.path
        self._keep, self._best, self._verify = keep, best, verify
        self._compression, self._verify_saves = compression, verify_saves
        self._pending: SaveHandle | None = None
        self._bad: set[int] = set()
        self._turn = threading.Lock()  # of the threads that save
        self._steps.fence(attempt, takes=jax.process_index() == 0)
        if jax.process_index() == 0:
            self._steps.collect()

    def steps(self) -> list[int]:
        """Returns the stored steps, oldest first."""
        return self._steps.steps()

    def latest(self) -> int | None:
        """Returns the newest step whose record is whole, or None. Reads records, not arrays.

        A step that was found bad, here or in a restore, is forgotten.
        """
        for step in reversed(self.steps()):
            if step in self._bad:
                continue
            try:
                record = self._steps.record(step)
                self._check_few(step, record)
            except DamagedError as error:
                self._report(step, error)
                continue
            return step
        return None

    def save(
        self,
        step: int,
        state: Tree,
        *,
        data_state: dict[str, Any] | None = None,
        metric: float | None = None,
    ) -> SaveHandle:
        """Starts saving; waits for the one before. The state may be donated, and its arrays of the
        host changed, when this returns.

        state: any tree of arrays. data_state: JSON values, the position of the data pipeline.
        metric: what `best` ranks by, the lower the better; NaN is not ranked.
        Returns: a handle; a failure of storage shows there, not here.
        Raises: CheckpointError for arguments that could not be restored (leaves.py).
        """
        began = time.perf_counter()
        step, metric = leaves.step_number(step), leaves.metric_number(metric)
        if not isinstance(data_state, dict | None) or OURS in (data_state or {}):
            raise CheckpointError(f"data_state must be a dict without the key {OURS}")
        leaves.check_json(data_state)
        leaves.check(state)
        with self._turn:
            self.wait()
            handle = self._pending = SaveHandle(step)
            self._start(handle, state, data_state or {}, metric)
        handle.blocking_s = time.perf_counter() - began
        return handle

    def _start(
        self, handle: SaveHandle, state: Tree, data_state: dict[str, Any], metric: float | None
    ) -> None:
        """The first stage: copies the state, and starts the second, or the report of a failure."""
        step, response = handle.step, None
        try:
            self._open(step)
            state = leaves.storable(state)
            arrays = named_leaves(state)
            prints = Fingerprints(x for _, x in arrays)
            metadata = data_state | {OURS: 1}
            compress = storage.compresses(self._compression, state)
            where, file_bytes = self._steps.saving(step), self._steps.file_bytes
            response = storage.write(where, state, metadata, compress, file_bytes)
        except Exception as error:
            reason = error  # raised where the handle reports it
            handle.run(lambda: self._fail(reason), self._tidy, self.folder)
        else:
            table = [(n, x.shape, str(x.dtype)) for n, x in arrays]
            handle.run(
                lambda: self._store(step, response, table, prints, metric), self._tidy, self.folder
            )

    def _open(self, step: int) -> None:
        """Takes the folder and tries to write there. Raises, on all processes: as `begin`.

        Orbax's threads, once started, wait minutes for each other when they cannot write.
        """
        problem: Exception | None = None
        if jax.process_index() == 0:
            try:
                self._steps.begin(step)
            except (OSError, CheckpointError) as error:
                problem = error
        if jax.process_count() > 1:
            failed = multihost_utils.broadcast_one_to_all(np.array(problem is not None))
            if failed and problem is None:
                problem = OSError("process 0 cannot write there")
            place = self._steps.saving(step).parent
            blind = np.flatnonzero(multihost_utils.process_allgather(np.array(not place.is_dir())))
            if blind.size and not failed:
                problem = OSError(f"process {blind[0]} does not see {place}, which all must share")
        if problem is not None:
            raise problem

    def _store(
        self, step: int, response: Any, table: Table, prints: Fingerprints, metric: float | None
    ) -> None:
        """The second stage: waits for Orbax, seals the step and gives it its name."""
        saving, first = self._steps.saving(step), jax.process_index() == 0
        number, meet = next(_save_numbers()), storage.barrier()
        problem: Exception | None = None
        sums, files = [], {}
        try:
            try:
                sums = prints.local()  # beside Orbax's writing, which must end before anything goes
            finally:
                storage.wait(response, f"megajax_failed_{number}")
            mine = integrity.list_files(saving)[jax.process_index() :: jax.process_count()]
            files = {n: asdict(f) for n, f in integrity.sum_files(saving, mine).items()}
        except Exception as error:
            problem = error
            storage.give_up(f"megajax_failed_{number}", error)
        # A process that failed meets the others all the same, or they would wait in vain. What is
        # read back was summed before, by whichever process: a bit that flips later shows there.
        meet(key=f"megajax_written_{number}", timeout_ms=PATIENCE_MS)
        try:
            if problem is not None:
                raise problem
            own = read_back.share(table, jax.process_index(), jax.process_count())
            found = read_back.fingerprints(saving, own if self._verify_saves else [])
            part = {"files": files, "fingerprints": sums, "read_back": found}
            name = f"{integrity.PART}{jax.process_index()}"
            integrity.write_file(saving / name, json.dumps(part))
        except Exception as error:
            problem = error
        meet(key=f"megajax_summed_{number}", timeout_ms=PATIENCE_MS)
        if first:
            try:
                if problem is not None:
                    raise problem
                self._seal(step, table, metric)
            except Exception as error:
                problem = error
                self._steps.drop_saving(step)
            finally:
                self._steps.unlock()
        meet(key=f"megajax_named_{number}", timeout_ms=PATIENCE_MS)
        if problem is None and not (self._steps.step(step) / integrity.RECORD).exists():
            problem = OSError("another process could not write")
        if problem is not None:
            raise problem
        self._bad.discard(step)

    def _seal(self, step: int, table: Table, metric: float | None) -> None:
        """Writes the record, from what each process found, and the name; old steps lose theirs."""
        saving = self._steps.saving(step)
        paths = sorted(saving.glob(f"{integrity.PART}*"))
        if len(paths) != jax.process_count():
            raise OSError(f"only {len(paths)} of {jax.process_count()} processes wrote their part")
        parts = [json.loads(p.read_text()) for p in paths]
        files = {n: integrity.FileSum(**f) for part in parts for n, f in part["files"].items()}
        sums = [
            fingerprint.add(own) for own in zip(*(p["fingerprints"] for p in parts), strict=True)
        ]
        found = {
            name: LeafSum(list(shape), dtype, list(total))
            for (name, shape, dtype), total in zip(table, sums, strict=True)
        }
        stored = {n: tuple(x) for part in parts for n, x in part["read_back"].items()}
        wrong = [n for n, x in found.items() if stored.get(n) != tuple(x.fingerprint)]
        if wrong and self._verify_saves:
            raise OSError(
                f"what is read back of leaf {', '.join(wrong[:5])} is not what was written; "
                "storage or memory is faulty"
            )
        for path in paths:
            path.unlink()
        integrity.write_record(saving, Record(step, files, found, metric))
        self._steps.commit(step)
        try:
            self._steps.retain(self._keep, self._best, self._bad - {step}, step)
        except (OSError, CheckpointError) as error:  # the step counts all the same
            logging.warning("older steps than %d stay: %s", step, error)

    def _tidy(self) -> None:
        if jax.process_index() == 0:
            self._steps.empty()

    def _fail(self, error: Exception) -> None:
        self._steps.unlock()
        raise error

    def wait(self) -> None:
        """Waits for the save under way; only warns when it failed. Raises: SupersededError."""
        try:
            self.close()
        except SupersededError:
            raise
        except SaveError as error:
            logging.warning("%s", error)

    def close(self) -> None:
        """Waits for the save under way. Raises: SaveError when it failed."""
        if self._pending is not None:
            handle, self._pending = self._pending, None
            handle.finish()

    def restore(self, step: int | None = None, *, like: Tree, partial: bool = False) -> Tree:
        """Returns the state of a step, placed as `like` says.

        step: None: the newest good one; a damaged one is reported once and the one before it is
        taken (`latest` says afterwards which it was). like: arrays or ShapeDtypeStructs with
        shardings. partial: `like` may leave parts of the stored tree out.
        Raises: CheckpointError when there is no such step or it does not fit `like`; DamagedError
        when it is not what was saved, after which `latest` passes it over.
        """
        self.wait()
        if step is not None:
            step = self._existing(step)
            try:
                return self._restore(step, like, partial)
            except DamagedError:
                self._bad.add(step)
                raise
        while (newest := self.latest()) is not None:
            try:
                return self._restore(newest, like, partial)
            except DamagedError as error:
                self._report(newest, error)
        raise no_step(self.folder, None, self.steps(), self._bad)

    def _restore(self, step: int, like: Tree, partial: bool) -> Tree:
        folder = self._steps.step(step)
        problem: Exception | None = None
        record, state, prints = None, None, None
        try:
            record = self._steps.record(step) if self._verify else None
            asked = leaves.wanted(like)
            if record is not None:
                if damage := integrity.find_damage(folder, record, fast=True):
                    raise integrity.damaged(folder, damage)
                leaves.check_fits(step, self.folder, asked, record, partial)
            if record is not None and self._verify == "full":
                prints = Fingerprints(at_once=True)
            state = storage.load(folder, asked, partial, prints.add if prints else None)
        except Exception as error:
            problem = self._explain(step, error, record)
            problem.__cause__ = error
        if jax.process_count() > 1:  # all or none, and of one kind, or some would wait for others
            kind = 0 if problem is None else 1 if isinstance(problem, DamagedError) else 2
            worst = int(multihost_utils.process_allgather(np.array(kind)).max())
            if worst > kind:
                kinds = {1: DamagedError, 2: CheckpointError}
                what = problem or f"step {step} of {self.folder} failed on another process"
                problem = kinds[worst](str(what))
        if problem is not None:
            raise problem
        if prints is not None and record is not None:
            names = [n for n, _ in named_leaves(state)]
            wrong = prints.wrong([record.leaves[n].fingerprint for n in names])
            if wrong:
                damage = integrity.find_damage(folder, record)
                raise integrity.damaged(folder, damage, [names[i] for i in wrong])
        return leaves.returned(state, like)

    def _explain(self, step: int, error: Exception, record: Record | None) -> CheckpointError:
        """Returns the error to raise: damage if there is any, else what storage said."""
        if isinstance(error, CheckpointError):
            return error
        folder = self._steps.step(step)
        if record is not None and (damage := integrity.find_damage(folder, record)):
            return integrity.damaged(folder, damage)
        text = f"cannot restore step {step} of {self.folder}: {storage.reason(error)}"
        if record is None and self._verify:  # not ours, and perhaps not even Orbax's
            return DamagedError(f"{text}; it has no integrity record that would tell why")
        return CheckpointError(text)

    def _report(self, step: int, error: Exception) -> None:
        if step not in self._bad:
            self._bad.add(step)
            logging.error("%s", error)

    def verify(self, step: int) -> Record:
        """Reads every byte of a step and returns its record. Raises: as `offline.verify`."""
        self.wait()
        return offline.verify(self._steps, step)

    def data_state(self, step: int) -> dict[str, Any]:
        """Returns the data_state of a stored step, without its arrays. Raises: CheckpointError."""
        self.wait()
        step = self._existing(step)
        self._check_few(step, self._steps.record(step))
        return self._steps.data_state(step)

    def _existing(self, step: int) -> int:
        if (number := leaves.step_number(step)) not in self.steps():
            raise no_step(self.folder, step, self.steps())
        return number

    def _check_few(self, step: int, record: Record | None) -> None:
        """Raises DamagedError when one of the files that describe the step is not as saved."""
        if record is None:
            return
        files = {n: f for n, f in record.files.items() if os.sep not in n}
        folder = self._steps.step(step)
        if damage := integrity.find_damage(folder, dataclasses.replace(record, files=files)):
            raise integrity.damaged(folder, damage)


def _check_settings(keep: int, best: int, compression: str, verify: str | None) -> None:
    for name, value, flag in (("keep", keep, " (--checkpoint.keep)"), ("best", best, "")):
        if type(value) is not int or value < 0:
            raise CheckpointError(
                f"{name}={value!r} must be a whole number from 0 on; nearest: 0{flag}"
            )
    for name, word, words in (
        ("compression", compression, get_args(Compression)),
        ("verify", verify, (None, "fast", "full")),
    ):
        if word not in words:
            raise CheckpointError(f"{name}={word!r} must be one of {', '.join(map(str, words))}")


@functools.cache
def _save_numbers() -> itertools.count:
    """Numbers saves, equally on all processes: a barrier's name must be new."""
    return itertools.count()
