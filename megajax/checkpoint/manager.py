"""Checkpoints of a run: asynchronous, by step, through Orbax, and never a lie.

A save takes the arrays' fingerprints, copies the arrays off the devices and returns; storage goes
on in the background (sealing.py): Orbax's files, then the integrity record (trust.py), then the
step's name (steps.py), with which it counts; then it is read back. A restore compares every element
with the record where it comes to lie, and raises an error that names what is not as it was saved.
Plain Orbax can read every step, and steps that plain Orbax wrote are read here.

Layout: <folder>/<step>/state/..., integrity.json, and the data position in Orbax's own metadata.
Sources: ByteCheckpoint section 4 (two stages, integrity), MegaScale section 4.4.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import numpy as np
from absl import logging

from megajax.checkpoint import agreement, orbax_io, sealing, trust
from megajax.checkpoint.lease import Attempt, SupersededError
from megajax.checkpoint.orbax_io import Compression
from megajax.checkpoint.sealing import Fingerprints, Job, ReadBackError, SaveHandle, Sealer
from megajax.checkpoint.steps import OURS, open_steps
from megajax.checkpoint.store import SaveError, no_step
from megajax.checkpoint.trust import (
    CheckpointError,
    DamagedError,
    ForbiddenError,
    Keys,
    Record,
)
from megajax.core.boxes import stored_rows
from megajax.core.errors import did_you_mean
from megajax.core.tree import Tree, named_leaves

# ---- leaves
#
# What a save accepts, and how it is stored: names, types, random keys, arrays of the host.
#
# A tree that could not be restored is refused before anything is written. Storage has types for
# numbers only, so typed random keys (jax.random.key) are stored as the uint32 words of their
# `key_data`; a restore makes keys of them again when `like` holds keys. The implementation of a key
# is not stored: `like` must have the one that was saved.


# What zarr3 of tensorstore 0.1 has a type for (tried, one by one).
NUMBERS = (
    "bool int2 int4 int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 "
    "bfloat16 complex64 complex128 float4_e2m1fn float8_e3m4 float8_e4m3b11fnuz float8_e4m3fn "
    "float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()

# {leaf: the row of the model at each place of its first dimension}, of leaves in another order.
Order = Mapping[str, Sequence[int]]

NUMBER: Any = (bool, int, float, complex, np.generic)  # a leaf of the host without dimensions


def check_leaves(state: Tree) -> None:
    """Raises CheckpointError, which names the leaf, for a tree that could not be restored."""
    leaves = named_leaves(state)
    if not leaves:
        raise CheckpointError("the state holds no array, so there is nothing to save")
    seen: set[str] = set()
    for name, x in leaves:
        if name in seen:
            raise CheckpointError(
                f"two leaves are named {name}: names are the keys with dots between; rename one"
            )
        seen.add(name)
        if not _is_text(name):
            raise CheckpointError(f"leaf {name!r}: its name cannot be written as UTF-8; rename it")
        if name.endswith("/"):
            raise CheckpointError(f"leaf {name}: a name must not end in a slash; rename it")
        if not is_key(x) and (kind := type_name(x)) not in NUMBERS:
            raise CheckpointError(
                f"leaf {name} is {kind}, which storage has no type for; convert it to one of "
                f"{', '.join(NUMBERS)}, or leave it out"
            )


def is_key(x: Any) -> bool:
    """Tells typed random keys, and their ShapeDtypeStructs, from numbers."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def type_name(x: Any) -> str:
    """Returns the name of a leaf's type, whatever the order of its bytes is."""
    return np.dtype(x.dtype).name if hasattr(x, "dtype") else np.asarray(x).dtype.name


def storable(state: Tree) -> Tree:
    """Returns the tree as it is stored. Arrays of the host are copied, for they may change."""
    return jax.tree.map(_storable, state)


def _storable(x: Any) -> Any:
    if is_key(x):
        return jax.random.key_data(x)
    if isinstance(x, jax.Array):
        return x
    if isinstance(x, np.memmap) and not x.flags.writeable:  # of a file: nobody writes through it
        return np.asarray(x, _native(x.dtype))
    x = np.asarray(x)
    return np.array(x, _native(x.dtype))


def _native(dtype: np.dtype) -> np.dtype:
    return dtype.newbyteorder("=") if dtype.byteorder in "<>" else dtype


def template(like: Tree) -> Tree:
    """Returns the tree of arrays to ask storage for: `storable` of the tree that `like` describes.

    Numbers of the host are asked for as NumPy arrays; so are types that this process's devices do
    not have (float64 without jax_enable_x64), where `like` names no sharding.
    Raises: CheckpointError for a leaf that is no number, no array and no ShapeDtypeStruct, and for
    a sharding of a type that devices do not have.
    """
    for name, x in named_leaves(like):
        if not isinstance(x, NUMBER) and not (hasattr(x, "shape") and hasattr(x, "dtype")):
            raise CheckpointError(
                f"leaf {name} of `like` is {x!r}; give a number, an array or a jax.ShapeDtypeStruct"
            )
        if getattr(x, "sharding", None) is not None and not _on_devices(x):
            raise CheckpointError(
                f"leaf {name} of `like` is {x.dtype} with a sharding, and devices have that type "
                "only with jax_enable_x64; set it, or give a NumPy array or leave the sharding out"
            )
    return jax.tree.map(_template_leaf, like)


def _on_devices(x: Any) -> bool:
    return is_key(x) or jax.dtypes.canonicalize_dtype(x.dtype) == x.dtype


def _template_leaf(x: Any) -> Any:
    if is_key(x):
        abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
        words = jax.eval_shape(jax.random.key_data, abstract)
        return jax.ShapeDtypeStruct(words.shape, words.dtype, sharding=x.sharding)
    leaf = np.asarray(x) if isinstance(x, NUMBER) else x
    if not leaf.dtype.isnative:
        leaf = np.empty(leaf.shape, _native(leaf.dtype))
    return leaf if _on_devices(leaf) else np.empty(leaf.shape, leaf.dtype)


def from_storage(state: Tree, like: Tree) -> Tree:
    """Returns what storage gave for `template(like)` as `like` has it: words become keys again,
    and arrays of the host numbers.
    """

    def leaf(x: Any, as_: Any) -> Any:
        if is_key(as_):
            return jax.random.wrap_key_data(x, impl=as_.dtype._impl)
        if isinstance(as_, NUMBER):
            return x[()] if isinstance(as_, np.generic) else x.item()
        return x

    return jax.tree.map(leaf, state, like)


def step_number(step: Any) -> int:
    """Returns a step as an int. Raises: CheckpointError for what no folder can be named by."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0 or isinstance(step, bool):
        raise CheckpointError(f"step {step!r} must be a whole number from 0 on")
    return number


def metric_number(metric: Any) -> float | None:
    """Returns a metric as a float; NaN as None: it ranks nowhere. Raises: CheckpointError."""
    try:
        number = None if metric is None else float(metric)
    except (TypeError, ValueError):
        raise CheckpointError(f"metric {metric!r} must be a number or None") from None
    return None if number is None or math.isnan(number) else number


def check_json(value: Any, where: str = "data_state") -> None:
    """Raises CheckpointError, which names the member, for what JSON would change or refuse."""
    if isinstance(value, dict):
        for key, member in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; JSON has text for keys")
            check_json(member, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, member in enumerate(value):
            check_json(member, f"{where}[{i}]")
    elif value is not None and not isinstance(value, str | int | float):
        raise CheckpointError(
            f"{where} is {value!r} of type {type(value).__name__}; JSON has text, int, float, "
            "bool, None, lists and dicts"
        )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_fits(step: int, folder: Path, like: Tree, record: Record, partial: bool) -> None:
    """Raises CheckpointError when `like` is not the tree that was saved."""
    asked = dict(named_leaves(like))
    strange = [n for n in asked if n not in record.leaves]
    missing = [] if partial else [n for n in record.leaves if n not in asked]
    problems = [f"leaf {n} is not there.{did_you_mean(n, record.leaves)}" for n in strange[:3]]
    problems += [f"leaf {n} is there and not in `like`" for n in missing[:3]]
    for name, x in asked.items():
        stored = record.leaves.get(name)
        if stored and (tuple(stored.shape), stored.dtype) != (tuple(x.shape), str(x.dtype)):
            problems.append(
                f"leaf {name} is {stored.dtype}{tuple(stored.shape)} there and "
                f"{x.dtype}{tuple(x.shape)} in `like`"
            )
    if problems:
        raise CheckpointError(f"cannot restore step {step} of {folder}: {'; '.join(problems[:5])}")


def orders_of(tree: Tree, order: Order | None) -> list[list[int]]:
    """Returns the order of the rows of each leaf, [] for one in the model's order.

    Raises: CheckpointError when `order` names no leaf, or is no order of its rows.
    """
    remaining, orders = dict(order or {}), []
    for name, x in named_leaves(tree):
        rows = [int(row) for row in remaining.pop(name, ())]
        if rows and sorted(rows) != list(range(x.shape[0] if x.shape else 0)):
            raise CheckpointError(
                f"order of leaf {name} must hold each of its {x.shape[:1]} rows once, found {rows}"
            )
        orders.append([] if rows == sorted(rows) else rows)
    if remaining:
        raise CheckpointError(f"order names {next(iter(remaining))}, which is no leaf of the state")
    return orders


def rows_of(record: Record | None, orders: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Returns {leaf: the stored row of each of its rows}, of the leaves that are not stored in the
    order that `orders` has. record: None: all are stored in the model's order. orders: [] stands
    for that one."""
    known = {} if record is None else record.leaves
    moved = {}
    for name, order in orders.items():
        rows = stored_rows(known[name].order if name in known else (), order)
        if rows is not None:
            moved[name] = rows
    return moved


Verify = Literal["full", "fast"] | None  # what a restore checks


def check_settings(keep: int, best: int, compression: str, verify: str | None) -> None:
    """Raises CheckpointError for a setting of a manager that cannot be."""
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


# ---- manager


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
        """Removes what killed saves left, and nothing that others put there (steps.py).

        directory: a folder, or an address: s3://bucket/prefix, gs://bucket/prefix (store.py says
        where endpoint and credentials come from, steps.py what such a store allows). keep:
        steps kept after a newer one is stored; 0: all. best: steps kept beside them for having the
        lowest metric. compression: auto compresses arrays that are mostly bytes. verify: what
        restore checks: full: every element and the step's small files; fast: the small files and
        all sizes; None: nothing.
        attempt: who saves; a newer one of its run takes over (lease.py). None: nobody does.
        verify_saves: read each step back in the background before older ones go (Sealer): a bit
        that flipped on the way to storage is an error in the log, the step counts no more, `close`
        raises. key_file: of the keys that sign what is saved; a step counts only if one of them
        signed it (trust.py). None: who wrote a step is not asked.
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
        self._saving = threading.Lock()  # of the threads that save
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
                if record is not None:
                    trust.check_small_files(self._steps.step(step), record)
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
        Raises: CheckpointError for arguments that could not be restored.
        """
        began = time.perf_counter()
        step, metric = step_number(step), metric_number(metric)
        if not isinstance(data_state, dict | None) or OURS in (data_state or {}):
            raise CheckpointError(f"data_state must be a dict without the key {OURS}")
        check_json(data_state)
        check_leaves(state)
        orders = orders_of(state, order)
        with self._saving:
            if (former := self._pending) is not None:
                _warn(former.result)  # what it still reads back it reads beside this save
            todo = self._start(step, former, state, data_state or {}, metric, orders)
            handle = self._pending = SaveHandle(step, self.folder, todo)
        handle.blocking_s = time.perf_counter() - began
        return handle

    def _start(
        self,
        step: int,
        former: SaveHandle | None,
        state: Tree,
        data_state: dict[str, Any],
        metric: float | None,
        orders: list[list[int]],
    ) -> list[Callable[[], None]]:
        """Copies the state. Returns: the second stage, or the report of a failure."""
        number = next(_save_numbers())
        try:
            unread = self._open(step, former)
        except Exception as error:
            reason = error  # raised where the handle reports it
            return [lambda: self._fail(reason, former)]
        try:
            state = storable(state)
            arrays = named_leaves(state)
            prints = Fingerprints([x for _, x in arrays], orders=[o or None for o in orders])
            compress = orbax_io.compresses(self._compression, state)
            where, file_bytes = self._steps.saving(step), self._steps.file_bytes
            response = orbax_io.write(where, state, data_state | {OURS: 1}, compress, file_bytes)
            table = [
                (n, x.shape, str(x.dtype), o) for (n, x), o in zip(arrays, orders, strict=True)
            ]
        except Exception as error:  # the others have begun, and must hear of it
            response, table, prints = orbax_io.Failed(error), [], Fingerprints()
        sealer = self._sealer
        job = Job(step, number, response, table, prints, metric, former, unread)
        todo = [functools.partial(sealer.store, job), functools.partial(sealer.check, step, number)]
        return [*todo, self._steps.free_removed] if jax.process_index() == 0 else todo

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
            step = step_number(step)
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
            latest = self.latest()
        newest = agreement.first(latest)
        if newest != latest:
            self._bad |= {s for s in self.steps() if newest is None or s > newest}
        return newest

    def _restore(self, step: int, like: Tree, partial: bool, order: Order | None) -> Tree:
        folder = self._steps.step(step)
        with self.together(step):
            self._existing(step)
            record = self._steps.record(step) if self._verify else None
            asked = template(like)
            if record is not None:
                if damage := self._find_damage(folder, record):
                    raise trust.damaged(folder, damage, home=record.home)
                check_fits(step, self.folder, asked, record, partial)
            names, orders = [n for n, _ in named_leaves(asked)], orders_of(asked, order)
            known = record or self._steps.unchecked(step)
            rows = rows_of(known, dict(zip(names, orders, strict=True)))
        bare = agreement.tell(record is None)
        if bare.any() and not bare.all():
            raise CheckpointError(f"step {step} of {self.folder}: not all processes see its record")
        prints = None
        if record is not None and self._verify == "full":
            prints = Fingerprints(at_once=True, orders=[o or None for o in orders])
        with self.together(step):
            home = folder if known is None else folder / known.home
            state = orbax_io.load(home, asked, partial, prints.add if prints else None, rows)
        if prints is not None and record is not None:
            with self.together(step):
                names = [n for n, _ in named_leaves(state)]
                wrong = prints.wrong([record.leaves[n].fingerprint for n in names])
                if wrong:
                    damage = trust.find_damage(folder, record)
                    wrong = [names[i] for i in wrong]
                    raise trust.damaged(folder, damage, wrong, record.home)
        return from_storage(state, like)

    def together(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Returns the context in which all processes read a step: `agreement.together`. An error
        inside becomes one that says what is wrong with the step."""
        what = f"step {step} of {self.folder}"
        return agreement.together(what, functools.partial(self._explain, step))

    def _find_damage(self, folder: Path, record: Record) -> list[trust.Damage]:
        """Returns what is wrong with the files of a step, before its arrays are read.

        With keys each process reads its share of all files: fingerprints are no secret.
        """
        if self._steps.keys is None:
            return trust.find_damage(folder, record, fast=True)
        part, parts = jax.process_index(), jax.process_count()
        share = dict(list(record.files.items())[part::parts])
        damage = trust.find_damage(folder, dataclasses.replace(record, files=share))
        return damage or trust.unrecorded_files(folder, record)

    def _explain(self, step: int, error: Exception) -> CheckpointError:
        """Returns the error to raise: damage if there is any, else what storage said."""
        if isinstance(error, CheckpointError):
            return error
        folder, record = self._steps.step(step), None
        with contextlib.suppress(Exception):  # it was read before, or cannot be
            record = self._steps.record(step) if self._verify else None
        try:
            if record is not None and (damage := trust.find_damage(folder, record)):
                return trust.damaged(folder, damage, home=record.home)
        except CheckpointError as why:
            return why
        text = f"cannot restore step {step} of {self.folder}: {orbax_io.reason(error)}"
        if record is None and self._verify:  # not ours, and perhaps not even Orbax's
            return DamagedError(f"{text}; it has no integrity record that would tell why")
        return CheckpointError(text)

    def _report(self, step: int, error: Exception) -> None:
        if step not in self._bad:
            self._bad.add(step)
            logging.error("%s", error)

    def verify(self, step: int) -> Record:
        """Reads every byte of a step and returns its record. Raises: as `sealing.verify`."""
        self.wait()
        return sealing.verify(self._steps, step)

    def data_state(self, step: int) -> dict[str, Any]:
        """Returns the data_state of a stored step, without its arrays. Raises: CheckpointError."""
        self.wait()
        step = self._existing(step)
        if (record := self._steps.record(step)) is not None:
            trust.check_small_files(self._steps.step(step), record)
        return self._steps.data_state(step)

    def _existing(self, step: int) -> int:
        if (number := step_number(step)) not in self.steps():
            raise no_step(self.folder, step, self.steps())
        return number


def _of_listing(error: Exception) -> CheckpointError:
    return error if isinstance(error, CheckpointError) else CheckpointError(orbax_io.reason(error))


def _warn(call: Callable[[], None]) -> None:
    """Warns when a save failed, unless the failure was logged when it was detected.

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
