"""Signals and the garbage collector: what must not surprise a training step.

The first SIGINT or SIGTERM asks the loop to save after the step it is in; the second ends the
process at once. In a multi-host job SIGTERM goes to jax's preemption service instead, which makes
all hosts stop at the same step. An older attempt of a supervised job, which may not save any more,
ends at once. Garbage is collected on the same step on all hosts, because a collection on one host
delays all hosts (MegaScale section 6.3).
"""

import contextlib
import gc
import os
import signal
import sys
import types
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from megajax.checkpoint.lease import SupersededError


class Interrupts:
    """Remembers a signal until the loop asks. Use it as a context manager."""

    def __init__(self) -> None:
        """Nothing has happened yet."""
        self.signal: int | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        """Takes the signals over."""
        taken = [signal.SIGINT]
        if jax.process_count() == 1:
            taken.append(signal.SIGTERM)
        for number in taken:
            self._former[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives them back."""
        for number, handler in self._former.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: types.FrameType | None) -> None:
        if self.signal is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal = number
        if jax.process_count() > 1:  # let all hosts know, through the service
            os.kill(os.getpid(), signal.SIGTERM)

    def asked(self, step: int) -> bool:
        """Tells, equally on all hosts, whether the run should stop after this step."""
        if jax.process_count() > 1:
            reached = multihost_utils.reached_preemption_sync_point(step)
            self.signal = self.signal or (signal.SIGTERM if reached else None)
            return reached
        return self.signal is not None


@contextlib.contextmanager
def ends_when_superseded() -> Iterator[None]:
    """Ends this process where a newer attempt of its job may save in its place.

    Without a clean-up, which could wait for the other processes of the job or write into storage.
    """
    try:
        yield
    except SupersededError as error:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)


class QuietGarbage:
    """Freezes what exists, then collects only when told."""

    def __init__(self, every: int):
        """every: steps between collections."""
        self._every = every
        self._was_enabled = True

    def __enter__(self) -> "QuietGarbage":
        """Stops automatic collection."""
        self._was_enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        """Collects automatically again, if it did before."""
        if self._was_enabled:
            gc.enable()
        gc.unfreeze()

    def after(self, step: int) -> None:
        """Collects on every N-th step."""
        if self._every and step % self._every == 0:
            gc.collect()
