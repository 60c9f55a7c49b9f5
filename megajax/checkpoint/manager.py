"""Checkpoints of a run: asynchronous, atomic, by step, through Orbax.

A save copies the arrays off the devices and returns; storage goes on in the background. Orbax
writes into a temporary folder and renames it at the end, so a step that has its name is whole. A
failed save (a full disk) removes its leavings, says so once and harms nothing that was there. Plain
Orbax can read every step. The only module that imports Orbax: it costs seconds to load.

Layout: <folder>/<step>/state/... with the data position in the step's custom metadata.
"""

import logging as standard_logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint.experimental.v1 as ocp
from absl import logging

from megajax.core.errors import UserError
from megajax.core.tree import Tree

TEMPORARY = ".orbax-checkpoint-tmp"


class SaveError(UserError):
    """A save did not reach storage; earlier steps are as they were."""


class SaveHandle:
    """A save under way."""

    def __init__(self, step: int, folder: Path, response: Any):
        """response: Orbax's, or the exception that stopped it at once."""
        self.step, self._folder, self._response = step, folder, response
        self._error: SaveError | None = None

    def result(self) -> None:
        """Waits until the step is stored. Raises: SaveError, each time it is asked."""
        if self._response is not None:
            response, self._response = self._response, None
            try:
                if isinstance(response, Exception):
                    raise response
                response.result()
            except Exception as error:  # tensorstore raises many kinds, some bare
                self._error = SaveError(
                    f"step {self.step} was not saved in {self._folder}: {_reason(error)}; "
                    "earlier checkpoints are untouched"
                )
                _remove_leavings(self._folder, self.step)
        if self._error is not None:
            raise self._error


class CheckpointManager:
    """The checkpoints in one folder. All processes of a job must make the same calls."""

    def __init__(self, folder: str | Path, keep: int = 3):
        """keep: steps kept after a newer one is stored; 0: all."""
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._pending: SaveHandle | None = None
        # Compression costs 4-5 times the wall time of a save on few cores and gains little on
        # float noise (measured, 2-core CPU).
        self._context = ocp.Context()
        self._context.array.saving.use_compression = False
        for leftover in self.folder.glob(f"*{TEMPORARY}*"):  # of a killed run
            if jax.process_index() == 0:
                shutil.rmtree(leftover, ignore_errors=True)

    @property
    def steps(self) -> list[int]:
        """The stored steps, oldest first."""
        if not self.folder.is_dir():
            return []
        found = self.folder.glob("[0-9]*/_CHECKPOINT_METADATA")
        return sorted(int(p.parent.name) for p in found if p.parent.name.isdigit())

    @property
    def latest(self) -> int | None:
        """The newest stored step, or None."""
        return max(self.steps, default=None)

    def save(self, step: int, state: Tree, *, data_state: dict[str, Any]) -> SaveHandle:
        """Starts saving; waits for the one before. The state may be donated when this returns.

        data_state: JSON values, the position of the data pipeline.
        Returns: a handle; a failure shows there, not here.
        """
        self.wait()
        _quieten_orbax()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._context:
                response: Any = ocp.save_async(
                    str(self.folder / str(step)), state, overwrite=True, custom_metadata=data_state
                )
        except Exception as error:
            response = error
        self._pending = SaveHandle(step, self.folder, response)
        return self._pending

    def wait(self) -> None:
        """Waits for the save under way and drops old steps; only warns when it failed."""
        try:
            self.close()
        except SaveError as error:
            logging.warning("%s", error)

    def close(self) -> None:
        """Waits for the save under way. Raises: SaveError when it failed."""
        if self._pending is None:
            return
        handle, self._pending = self._pending, None
        handle.result()
        if self._keep and jax.process_index() == 0:
            for step in self.steps[: -self._keep]:
                shutil.rmtree(self.folder / str(step), ignore_errors=True)

    def restore(
        self, step: int | None = None, *, like: Tree, partial: bool = False
    ) -> tuple[Tree, dict[str, Any]]:
        """Returns (the state placed as `like` says, its data_state).

        step: None: the latest. like: ShapeDtypeStructs with shardings. partial: `like` may leave
        parts of the stored tree out.
        Raises: UserError when there is no such step or it does not fit `like`.
        """
        self.wait()
        step = self.latest if step is None else step
        if step is None or step not in self.steps:
            raise UserError(f"{self.folder} has no step {step}; it has {self.steps}")
        path = self.folder / str(step)
        context = ocp.Context(self._context)
        context.pytree.loading.partial_load = partial
        data = self.data_state(step)
        try:
            with context:
                return ocp.load(str(path), like), data
        except Exception as error:
            raise UserError(f"cannot restore {path}: {_reason(error)}") from error

    def data_state(self, step: int) -> dict[str, Any]:
        """Returns the data_state of a stored step, without its arrays."""
        path = self.folder / str(step)
        try:
            with self._context:
                found = ocp.metadata(str(path)).custom_metadata
        except Exception as error:
            raise UserError(f"cannot read {path}: {_reason(error)}") from error
        return dict(found or {})  # type: ignore[arg-type]


def _from_elsewhere(record: standard_logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _quieten_orbax() -> None:
    """Keeps Orbax's threads from printing the tracebacks of errors that SaveHandle explains."""
    standard_logging.getLogger("absl").addFilter(_from_elsewhere)  # adding it again changes nothing


def _reason(error: BaseException) -> str:
    """Returns the first line that a person can use of a storage error."""
    text = str(error)
    for words, meaning in (
        ("No space left", "no space left on the device"),
        ("RESOURCE_EXHAUSTED", "storage is full"),
        ("File too large", "a file would be larger than allowed"),
        ("Read-only file system", "the file system is read-only"),
        ("Permission denied", "permission denied"),
    ):
        if words in text:
            return meaning
    lines = [line for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return lines[0][:300]


def _remove_leavings(folder: Path, step: int) -> None:
    """Frees what a failed save wrote; a full disk would stay full."""
    if jax.process_index() == 0:
        for leftover in folder.glob(f"{step}{TEMPORARY}*"):
            shutil.rmtree(leftover, ignore_errors=True)
