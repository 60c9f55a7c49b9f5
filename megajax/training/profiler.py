"""Records chosen steps with jax.profiler."""

from pathlib import Path

import jax
from absl import logging


class Profiler:
    """Starts before the first chosen step and stops after the last; a resumed run may miss both."""

    def __init__(self, span: tuple[int, int] | None, folder: Path):
        """span: first and last step; None: never."""
        self._span, self._folder, self._active = span, folder, False

    def before(self, step: int) -> None:
        """Starts recording when its span begins with this step."""
        if self._span is not None and self._span[0] == step:
            jax.profiler.start_trace(str(self._folder))
            self._active = True

    def ends(self, step: int) -> bool:
        """Tells whether this step is the last to record, so that the loop waits for it."""
        return self._active and self._span is not None and step >= self._span[1]

    def after(self, step: int) -> None:
        """Stops recording when its span ends with this step."""
        if self.ends(step):
            self._active = False
            try:
                jax.profiler.stop_trace()
            except (OSError, RuntimeError) as error:  # of XLA: a RuntimeError
                logging.warning("The profile in %s cannot be written: %s", self._folder, error)
