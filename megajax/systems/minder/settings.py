"""The times and limits of Minder. No jax import."""

import math
from dataclasses import dataclass

from megajax.core.errors import UserError

WINDOW = 8  # seconds of a window (Minder section 4.2)
WINDOWS = 3  # windows of a tick, side by side
TICK = WINDOW * WINDOWS  # seconds
CHANNELS = 2  # of a metric: level, residual (features.py)
LEAST = 4  # machines: among three, the one that differs has no majority against it


@dataclass(frozen=True)
class Settings:
    """How long and how far a machine must differ until it is named.

    continuity_s: how long it must differ (Minder section 4.3: four minutes), rounded up to whole
    ticks of 24 s. clear_s: how long a named machine must be like the others again before it can be
    named again. grace_s: how long a machine that joined a running job is not judged. group_s:
    machines that begin to differ within this time of each other have one cause (chosen: a fault
    reaches its peers in up to a minute). widely: if more than this share of the machines differs at
    the same time, the job as a whole has changed and nobody is named. strict: factor on the learnt
    limits; above 1: fewer alerts.
    """

    continuity_s: float = 240.0
    clear_s: float = 600.0
    grace_s: float = 300.0
    group_s: float = 120.0
    widely: float = 0.4
    strict: float = 1.0

    def __post_init__(self):
        """Checks the values."""
        for name in ("continuity_s", "clear_s", "group_s", "strict"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name}={value} must be a number above 0 (--minder.{name})")

    @property
    def ticks(self) -> int:
        """Ticks of 24 s in continuity_s, at least 2."""
        return max(2, math.ceil(self.continuity_s / TICK))

    @property
    def needed(self) -> int:
        """Ticks of `ticks` in which the machine must differ: nine in ten."""
        return math.ceil(0.9 * self.ticks)
