"""Disturbance: anything that is not the undisturbed step: jitters, phases of the job, faults.

A Move leads the readings of a metric from their healthy value towards a target. A fault and a
harmless jitter are made of the same moves, of the same sizes: only how long they last, and on how
many machines, tells them apart. Legend: R rows (machines), T seconds.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.fleet.specs import METRICS, Spec

Target = Literal["idle", "zero", "high", "nominal", "gone"]
Shape = Literal["step", "ramp", "oscillation", "flapping"]
# What the whole job does meanwhile. write: a checkpoint that stops the GPUs; write_behind: one that
# does not; starve: the GPUs wait for data; disk: slow storage; workload: other batches.
State = Literal[
    "", "write", "write_behind", "evaluate", "restart", "starve", "disk", "workload"
]  # fmt: skip


class Move(NamedTuple):
    """What one metric does. metric "*": all.

    target: idle: as without a process; zero; high: the metric's surge; nominal: as at full speed,
    without noise (a flat line at size 1); gone: no samples. size: 0..1, the share of the way.
    seconds: length of a ramp; period of an oscillation or of flapping. delay_s: after the start.
    """

    metric: str
    target: Target
    size: float = 1.0
    shape: Shape = "step"
    seconds: float = 60.0
    delay_s: float = 0.0

    def scaled(self, share: float, delay_s: float) -> "Move":
        """Returns a weaker and later copy, for a peer."""
        return self._replace(size=self.size * share, delay_s=self.delay_s + delay_s)

    def weight(self, since_RT: np.ndarray) -> np.ndarray:
        """Returns the share of the way, float32 (R, T), `since_RT` seconds after the start."""
        since_RT = since_RT - self.delay_s
        if self.shape == "ramp":
            envelope = np.clip(since_RT / self.seconds, 0, 1)
        elif self.shape == "oscillation":  # never quite back: 0.2 .. 1
            envelope = 0.6 - 0.4 * np.cos(2 * np.pi * since_RT / self.seconds)
        elif self.shape == "flapping":  # on for 0.7 of the period
            envelope = np.where(since_RT % self.seconds < 0.7 * self.seconds, 1.0, 0.0)
        else:
            envelope = np.ones_like(since_RT)
        return np.where(since_RT >= 0, self.size * envelope, 0).astype(np.float32)

    def level(self, spec: Spec) -> float:
        """Returns the target in the metric's own scale (its logarithm where spec.log)."""
        zero = spec.low if spec.log else 0.0
        levels = {"idle": spec.base, "zero": zero, "high": spec.surge, "nominal": spec.nominal}
        return levels.get(self.target, np.nan)


@dataclass(frozen=True)
class Disturbance:
    """Something that happens in [start, end), Unix seconds.

    machines: numbers of those that show the moves; empty: all. speed: 0..1, of the whole job, since
    all machines wait for the slowest. ramp_s: the speed falls over so many seconds.
    """

    kind: str
    start: float
    end: float
    machines: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()
    speed: float = 1.0
    ramp_s: float = 0.0
    state: State = ""

    def __post_init__(self):
        if not self.start <= self.end:
            raise UserError(f"{self.kind}: end={self.end} must not be before start={self.start}")
        if not 0 <= self.speed <= 1:
            nearest = min(max(self.speed, 0), 1)
            raise UserError(f"{self.kind}: speed={self.speed} must be in 0..1; nearest: {nearest}")
        unknown = [m.metric for m in self.moves if m.metric != "*" and m.metric not in METRICS]
        if unknown:
            raise UserError(f"{self.kind}: unknown metrics {unknown}; known: {sorted(METRICS)}")

    @property
    def changes_the_job(self) -> bool:
        """Whether machines that it does not name notice it."""
        return self.speed < 1 or bool(self.state)
