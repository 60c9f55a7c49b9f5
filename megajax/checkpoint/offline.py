"""The arrays of a stored step one by one, on a machine without devices: for tools.

tensorstore reads what Orbax wrote; a leaf is in memory only while it is used. No jax.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint import store, trust
from megajax.checkpoint.steps import StepFolder, is_step_name, open_steps
from megajax.checkpoint.store import stored_values
from megajax.checkpoint.trust import CheckpointError, Keys, Record
from megajax.core import files
from megajax.core.errors import UserError
from megajax.core.files import expand
from megajax.foreign.safetensors import CODES, DTYPES


def open_folder(path: str | Path, keys: Keys | None = None) -> tuple[StepFolder, int | None]:
    """Returns (the checkpoints, the step) that a path means: of a run, a folder of steps, a step.

    path: local, or s3://bucket/prefix, gs://bucket/prefix. keys: that sign what counts.
    Raises: UserError when there is no step, or the store does not answer.
    """
    folder = open_steps(path).path
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    if is_step_name(folder.name):
        steps = open_steps(folder.parent, keys)
        if int(folder.name) in steps.steps():
            return steps, int(folder.name)
    steps = open_steps(folder, keys)
    if not steps.steps():
        raise UserError(f"{folder} has no checkpoint: name a run's folder, or DIR or DIR/STEP")
    return steps, None


def keep_apart(steps: StepFolder, target: str | Path) -> None:
    """Raises UserError when `target` is the run that the steps belong to, lies in it or around it.

    What a tool writes there would count as steps of the run, which would go on from them.
    """
    run = steps.path.parent if steps.path.name == "checkpoints" else steps.path
    if store.is_address(run) != store.is_address(target):
        return
    if store.is_address(target):
        ours, theirs = run.parts, store.ObjectPath(str(target)).parts
    else:
        ours, theirs = run.resolve().parts, expand(target).resolve().parts
    common = min(len(ours), len(theirs))
    if ours[:common] == theirs[:common]:
        where = "is" if len(ours) == len(theirs) else "lies in" if ours[common:] == () else "holds"
        raise UserError(
            f"{target} {where} {run}, which is read: the result must have a folder of its own; "
            f"nearest: {run}-new"
        )


def verify(steps: StepFolder, step: int) -> Record:
    """Reads every byte of a step and returns its record.

    Raises: DamagedError naming each damaged file; CheckpointError when the step does not exist or
    has no record because plain Orbax wrote it.
    """
    if step not in steps.steps():
        raise store.no_step(steps.path, step, steps.steps())
    record = steps.record(step)
    if record is None:
        raise CheckpointError(
            f"step {step} of {steps.path} has no integrity record: plain Orbax wrote it; "
            "restore it and save it here"
        )
    folder = steps.step(step)
    damage = trust.find_damage(folder, record)
    if damage or (damage := trust.unrecorded_files(folder, record) if record.signature else []):
        raise trust.damaged(folder, damage, home=record.home)
    return record


class StoredLeaves(Mapping[str, np.ndarray]):
    """{dotted name: array} of a step, its rows in the model's order; each is read when it is asked
    for."""

    def __init__(self, folder: Path, record: Record):
        """folder: of the step."""
        self._folder, self._record = folder / record.home, record

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads a leaf. Raises: KeyError for an unknown one; CheckpointError when it fails."""
        leaf = self._record.leaves[name]
        if 0 in leaf.shape:
            return np.zeros(leaf.shape, _dtype(leaf.dtype))
        import tensorstore as ts  # here: half a second, and listing needs none of it

        base = store.kvstore(self._folder / "state")
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        try:
            array: Any = ts.open({"driver": "zarr3", "kvstore": kvstore}, open=True).result()
            if leaf.order:  # the index is sorted out while reading: no second copy
                array = array[np.argsort(leaf.order)]
            return array.read().result()
        except Exception as error:  # tensorstore raises many kinds
            reason = str(error).splitlines()[0][:200]
            raise CheckpointError(
                f"step {self._folder.name} of {self._folder.parent}: leaf {name}: {reason}"
            ) from error

    def __iter__(self) -> Iterator[str]:
        """Goes over the names, in the tree's order."""
        return iter(self._record.leaves)

    def __len__(self) -> int:
        """Returns the number of leaves."""
        return len(self._record.leaves)


class Spool:
    """Arrays on their way through a tool, in a file: the kernel may drop what is not in use."""

    ALIGNMENT = 64  # bytes: memory that begins so needs no copy to become an array on the CPU

    def __init__(self, path: Path):
        """path: of the file, which must not exist."""
        self._path = path
        self._file = open(path, "xb")
        self._leaves: dict[str, tuple[int, tuple[int, ...], np.dtype]] = {}

    def add(self, name: str, x: np.ndarray) -> None:
        """Writes an array. Raises: UserError for a name that is there already; OSError."""
        if name in self._leaves:
            raise UserError(f"two leaves would become {name}")
        begin = self._file.seek(-self._file.tell() % self.ALIGNMENT, os.SEEK_CUR)
        self._leaves[name] = (begin, x.shape, x.dtype)
        self._file.write(memoryview(np.ascontiguousarray(x).reshape(-1).view(np.uint8)))

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns {name: array}, mapped from the file, which is complete now."""
        self._file.close()
        if not self._path.stat().st_size:
            return {n: np.zeros(shape, dtype) for n, (_, shape, dtype) in self._leaves.items()}
        raw = np.memmap(self._path, np.uint8, "r")
        return {
            n: raw[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for n, (begin, shape, dtype) in self._leaves.items()
        }


@contextmanager
def spool_for(target: str | Path) -> Iterator[Spool]:
    """Gives a spool on the disk of a folder, for as long as it is used. Raises: UserError.

    target: local; or in an object store, whose spool is in the folder for temporary files (TMPDIR).
    """
    folder = expand(tempfile.gettempdir() if store.is_address(target) else target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".spool.", dir=folder) as temporary:
            yield Spool(Path(temporary) / "leaves")
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror}; nothing was left") from None


def _dtype(name: str) -> np.dtype:
    code = CODES.get(name)
    return np.dtype(name if code is None else DTYPES[code])


def differences(a: Record, b: Record) -> list[str]:
    """Returns, leaf by leaf, how two steps differ; their fingerprints tell, no array is read."""
    lines = []
    for name in dict.fromkeys([*a.leaves, *b.leaves]):
        x, y = a.leaves.get(name), b.leaves.get(name)
        if x is None or y is None:
            lines.append(f"{name}: only in the {'second' if x is None else 'first'}")
        elif (x.shape, x.dtype) != (y.shape, y.dtype):
            lines.append(f"{name}: {x.dtype}{tuple(x.shape)} and {y.dtype}{tuple(y.shape)}")
        elif x.fingerprint != y.fingerprint:
            lines.append(f"{name}: other values")
    return lines


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """Gives a folder to write in, which gets its name when all is well and else goes.

    Raises: UserError when something of that name exists, or storage fails.
    """
    target = expand(path).absolute()
    if target.exists():
        raise UserError(f"{target} exists; name a new folder")
    with files.new_folder(target) as folder:
        yield folder


def data_state_text(steps: StepFolder, step: int) -> str:
    """Returns the data position and whatever else a step was saved with, as one line."""
    return json.dumps(steps.data_state(step))


def size(record: Record) -> int:
    """Returns the bytes of a step's files, without the record."""
    return sum(f.bytes for f in record.files.values())


def files_by_leaf(folder: Path) -> dict[str, list[tuple[str, int, int]]]:
    """Returns {leaf: [(file, first byte, last byte + 1)]}, as the index says."""
    pieces: dict[str, list[tuple[str, int, int]]] = {}
    for leaf, file, begin, end in stored_values(folder):
        pieces.setdefault(leaf, []).append((os.path.basename(file), begin, end))
    return pieces
