"""Checkpoints of a run: asynchronous, by step, through Orbax, and never a lie.

A save takes the arrays' fingerprints, copies the arrays off the devices and returns; storage goes
on in the background (sealing.py): Orbax's files, then the integrity record (integrity.py), then the
step's name (directory.py), with which it counts; then it is read back. A restore is checked against
the record, element by element where they come to lie, and what is not as it was saved is an error
that names it. Plain Orbax can read every step, and steps that plain Orbax wrote are read here.

Layout: <folder>/<step>/state/..., integrity.json, and the data position in Orbax's own metadata.
Sources: ByteCheckpoint section 4 (two stages, integrity), MegaScale section 4.4.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from megajax.checkpoint import agreement, integrity, leaves, read_back, storage
from megajax.checkpoint.directory import OURS
from megajax.checkpoint.fingerprint import Fingerprints
from megajax.checkpoint.integrity import CheckpointError, DamagedError, ForbiddenError, Record
from megajax.checkpoint.lease import Attempt, SupersededError
from megajax.checkpoint.leaves import Order
from megajax.checkpoint.object_folder import open_steps
from megajax.checkpoint.sealing import Job, Sealer, Verify, check_settings
from megajax.checkpoint.signature import Keys
from megajax.checkpoint.storage import Compression, ReadBackError, SaveError, SaveHandle
from megajax.checkpoint.store import no_step
from megajax.core.tree import Tree, named_leaves

PASSED_OVER = (DamagedError, ForbiddenError)  # steps of which another one is restored instead


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
        verify_saves: bool = True,
        key_file: str | Path | None = None,
    ):
        """Removes what killed saves left, and nothing that others put there (directory.py).

        directory: a folder, or an address: s3://bucket/prefix, gs://bucket/prefix (store.py says
        where endpoint and credentials come from, object_folder.py what such a store allows). keep:
        steps kept after a newer one is stored; 0: all. best: steps kept beside them for having the
        lowest metric. compression: auto compresses arrays that are mostly bytes. verify: what
        restore checks: full: every element and the step's small files; fast: the small files and
        all sizes; None: nothing.
        attempt: who saves; a newer one of its run takes over (lease.py). None: nobody does.
        verify_saves: read each step back in the background before older ones go (sealing.py): a bit
        that flipped on the way to storage is an error in the log, the step counts no more, `close`
        raises. key_file: of the keys that sign what is saved; a step counts only if one of them
        signed it (signature.py). None: who wrote a step is not asked.
        Raises: CheckpointError for a folder, a setting or an attempt that cannot be.
        """
        check_settings(keep, best, compression, verify)
        if key_file is not None and verify != "full":
            raise CheckpointError(
                f"verify={verify!r} must be full where steps are signed (key_file)"
            )
        self._steps = open_steps(directory, None if key_file is None else Keys(key_file))
        self.folder = self._steps.path
        self._keep, self._best, self._verify = keep, best, verify
        self._compression, self._verify_saves = compression, verify_saves
        self._pending: SaveHandle | None = None
        self._bad: set[int] = set()
        self._sealer = Sealer(self._steps, keep, best, verify_saves, self._bad)
        self._turn = threading.Lock()  # of the threads that save
        self._steps.fence(attempt, takes=jax.process_index() == 0)
        if jax.process_index() == 0:
            self._steps.collect()

    def steps(self) -> list[int]:
        """Returns the stored steps, oldest first; waits while old ones are about to go."""
        if (pending := self._pending) is not None:
            pending.wait_checked()
        return self._steps.steps()

    def refuted(self) -> list[int]:
        """Returns the steps that this process, the first of its job, read back and found wrong."""
        return list(self._sealer.refuted)

    def latest(self) -> int | None:
        """Returns the newest step whose record is whole, or None. Reads records, not arrays.

        A step that was found bad, here or in a restore, or that this user may not read, is named
        and passed over.
        """
        for step in reversed(self.steps()):
            if step in self._bad:
                continue
            try:
                record = self._steps.record(step)
                self._check_few(step, record)
            except PASSED_OVER as error:
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
        order: Order | None = None,
    ) -> SaveHandle:
        """Starts saving; waits until the save before counts. The state may be donated, and its
        arrays of the host changed, when this returns.

        state: any tree of arrays. data_state: JSON values, the position of the data pipeline.
        metric: what `best` ranks by, the lower the better; NaN is not ranked.
        order: of leaves whose rows are not held in the model's order: the model's row at each
        place. They are stored as they are held, and every reader puts them in order.
        Returns: a handle; a failure of storage shows there, not here.
        Raises: CheckpointError for arguments that could not be restored (leaves.py).
        """
        began = time.perf_counter()
        step, metric = leaves.step_number(step), leaves.metric_number(metric)
        if not isinstance(data_state, dict | None) or OURS in (data_state or {}):
            raise CheckpointError(f"data_state must be a dict without the key {OURS}")
        leaves.check_json(data_state)
        leaves.check(state)
        orders = leaves.orders_of(state, order)
        with self._turn:
            former, handle = self._pending, SaveHandle(step)
            if former is not None:
                _warn(former.result)  # what it still reads back it reads beside this save
            self._pending = handle
            self._start(handle, former, state, data_state or {}, metric, orders)
        handle.blocking_s = time.perf_counter() - began
        return handle

    def _start(
        self,
        handle: SaveHandle,
        former: SaveHandle | None,
        state: Tree,
        data_state: dict[str, Any],
        metric: float | None,
        orders: list[list[int]],
    ) -> None:
        """The first stage: copies the state, and starts the second, or the report of a failure."""
        step, number = handle.step, next(_save_numbers())
        table, prints = [], Fingerprints()
        try:
            unread = self._open(step, former)
        except Exception as error:
            reason = error  # raised where the handle reports it
            return handle.run([lambda: self._fail(reason, former)], self.folder)
        try:
            state = leaves.storable(state)
            arrays = named_leaves(state)
            prints = Fingerprints((x for _, x in arrays), orders=[o or None for o in orders])
            compress = storage.compresses(self._compression, state)
            where, file_bytes = self._steps.saving(step), self._steps.file_bytes
            response = storage.write(where, state, data_state | {OURS: 1}, compress, file_bytes)
            table = [
                (n, x.shape, str(x.dtype), o) for (n, x), o in zip(arrays, orders, strict=True)
            ]
        except Exception as error:
            response = storage.Failed(error)  # the others have begun, and must hear of it
        job = Job(step, number, response, table, prints, metric, former, unread)
        work = self._sealer
        store = functools.partial(work.store, job)
        check = functools.partial(work.check, step, number)
        handle.run([store, check, work.empty], self.folder)

    def _open(self, step: int, former: SaveHandle | None) -> int | None:
        """Takes the folder and tries to write there. Raises, on all processes: as `begin`.

        Orbax's threads, once started, wait minutes for each other when they cannot write.
        former: the save before. Returns: an older step that was not read back, or None.
        """
        problem: Exception | None = None
        unread = None
        if jax.process_index() == 0:
            try:
                self._steps.begin(step)
                if self._verify_saves:
                    but = {step} if former is None else {step, former.step}
                    unread = self._steps.unread(max(self._keep, 1), but)
            except (OSError, CheckpointError) as error:
                problem = error
        if jax.process_count() > 1:
            told = agreement.tell([problem is not None, -1 if unread is None else unread])
            failed, older = told[0].tolist()
            unread = None if older < 0 else older
            if failed and problem is None:
                problem = OSError("process 0 cannot write there")
            place = self._steps.saving(step).parent
            blind = np.flatnonzero(agreement.tell(not place.is_dir()))
            if blind.size and not failed:
                problem = OSError(f"process {blind[0]} does not see {place}, which all must share")
        if problem is not None:
            raise problem
        return unread

    def _fail(self, error: Exception, former: SaveHandle | None) -> None:
        self._steps.unlock()
        if former is not None:
            former.join()
        raise error

    def wait(self) -> None:
        """Waits for the save under way, reading back too; only warns when it failed.

        Raises: SupersededError.
        """
        _warn(self.close)

    def close(self) -> None:
        """Waits for the save under way, reading back too. Raises: SaveError when it failed."""
        if self._pending is not None:
            handle, self._pending = self._pending, None
            handle.finish()

    def restore(
        self,
        step: int | None = None,
        *,
        like: Tree,
        partial: bool = False,
        order: Order | None = None,
    ) -> Tree:
        """Returns the state of a step, placed as `like` says.

        step: None: the newest good one; one that is damaged, or that this user may not read, is
        reported once and the one before it is taken (`latest` says afterwards which it was). like:
        arrays or ShapeDtypeStructs with shardings. partial: `like` may leave parts of the stored
        tree out. order: in which the rows of leaves are wanted, as `save` has it; each row is read
        straight to its place.
        Raises: CheckpointError when there is no such step or it does not fit `like`; DamagedError
        when it is not what was saved, after which `latest` passes it over.
        """
        self.wait()
        if step is not None:
            step = leaves.step_number(step)
            try:
                return self._restore(step, like, partial, order)
            except DamagedError:
                self._bad.add(step)
                raise
        while (newest := self.agreed_latest()) is not None:
            try:
                return self._restore(newest, like, partial, order)
            except PASSED_OVER as error:
                self._report(newest, error)
        raise no_step(self.folder, None, self.steps(), self._bad)

    def agreed_latest(self) -> int | None:
        """Returns process 0's `latest`, which counts on all: listings of a store may differ.

        A collective. Newer steps that this process sees and process 0 does not are passed over.
        """
        with agreement.together(f"the steps of {self.folder}", _of_listing):
            own = self.latest()
        newest = agreement.first(own)
        if newest != own:
            self._bad |= {s for s in self.steps() if newest is None or s > newest}
        return newest

    def _restore(self, step: int, like: Tree, partial: bool, order: Order | None) -> Tree:
        folder = self._steps.step(step)
        with self.together(step):
            self._existing(step)
            record = self._steps.record(step) if self._verify else None
            asked = leaves.wanted(like)
            if record is not None:
                if damage := self._find_damage(folder, record):
                    raise integrity.damaged(folder, damage, home=record.home)
                leaves.check_fits(step, self.folder, asked, record, partial)
            names, orders = [n for n, _ in named_leaves(asked)], leaves.orders_of(asked, order)
            known = record or self._steps.unchecked(step)
            rows = leaves.rows_of(known, dict(zip(names, orders, strict=True)))
        bare = agreement.tell(record is None)
        if bare.any() and not bare.all():
            raise CheckpointError(f"step {step} of {self.folder}: not all processes see its record")
        prints = None
        if record is not None and self._verify == "full":
            prints = Fingerprints(at_once=True, orders=[o or None for o in orders])
        with self.together(step):
            home = folder if known is None else folder / known.home
            state = storage.load(home, asked, partial, prints.add if prints else None, rows)
        if prints is not None and record is not None:
            with self.together(step):
                names = [n for n, _ in named_leaves(state)]
                wrong = prints.wrong([record.leaves[n].fingerprint for n in names])
                if wrong:
                    damage = integrity.find_damage(folder, record)
                    wrong = [names[i] for i in wrong]
                    raise integrity.damaged(folder, damage, wrong, record.home)
        return leaves.returned(state, like)

    def together(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Returns what to read a step in: `agreement.together`. Errors tell what is wrong in it."""
        what = f"step {step} of {self.folder}"
        return agreement.together(what, functools.partial(self._explain, step))

    def _find_damage(self, folder: Path, record: Record) -> list[integrity.Damage]:
        """Returns what is wrong with the files of a step, before its arrays are read.

        With keys each process reads its share of all files: fingerprints are no secret.
        """
        if self._steps.keys is None:
            return integrity.find_damage(folder, record, fast=True)
        part, parts = jax.process_index(), jax.process_count()
        mine = dict(list(record.files.items())[part::parts])
        damage = integrity.find_damage(folder, dataclasses.replace(record, files=mine))
        return damage or integrity.strangers(folder, record)

    def _explain(self, step: int, error: Exception) -> CheckpointError:
        """Returns the error to raise: damage if there is any, else what storage said."""
        if isinstance(error, CheckpointError):
            return error
        folder, record = self._steps.step(step), None
        with contextlib.suppress(Exception):  # it was read before, or cannot be
            record = self._steps.record(step) if self._verify else None
        try:
            if record is not None and (damage := integrity.find_damage(folder, record)):
                return integrity.damaged(folder, damage, home=record.home)
        except CheckpointError as why:
            return why
        text = f"cannot restore step {step} of {self.folder}: {storage.reason(error)}"
        if record is None and self._verify:  # not ours, and perhaps not even Orbax's
            return DamagedError(f"{text}; it has no integrity record that would tell why")
        return CheckpointError(text)

    def _report(self, step: int, error: Exception) -> None:
        if step not in self._bad:
            self._bad.add(step)
            logging.error("%s", error)

    def verify(self, step: int) -> Record:
        """Reads every byte of a step and returns its record. Raises: as `read_back.verify`."""
        self.wait()
        return read_back.verify(self._steps, step)

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
            raise integrity.damaged(folder, damage, home=record.home)


def _of_listing(error: Exception) -> CheckpointError:
    return error if isinstance(error, CheckpointError) else CheckpointError(storage.reason(error))


def _warn(call: Callable[[], None]) -> None:
    """Warns when a save failed, unless that was said when it was found.

    Raises: SupersededError.
    """
    try:
        call()
    except SupersededError:
        raise
    except ReadBackError:
        pass
    except SaveError as error:
        logging.warning("%s", error)


@functools.cache
def _save_numbers() -> itertools.count:
    """Numbers saves, equally on all processes: a barrier's name must be new."""
    return itertools.count()
