"""Setting: what is different between one simulated job and the next.

Every default is ASSUMED; what it follows is said beside it. Families of settings, for training,
validation and held-out cases, are in case_sets.py.
"""

from dataclasses import dataclass, replace
from typing import Any

from megajax.core.errors import UserError


@dataclass(frozen=True)
class Setting:
    """One job. Rates are for an hour; *_s are seconds.

    noise: factor of all noise (0: none). step_s: a training step at full speed; 5 to 20 s are
      usual for large models (MegaScale's 175B step takes about 6 s on 12,288 GPUs).
    stages, tensor: pipeline stages, and machines that share a tensor-parallel group; 0: drawn.
    exchange: share of a step that is gradient exchange. rack: machines a rack. other_make: share of
    machines of a different make. skew_s: the clocks differ by up to this. missing: share of samples
    that are lost alone; gaps of several seconds come on top (gaps, a machine).
    checkpoint_every_s, evaluate_every_s: 0: never. jitters: short disturbances, a machine;
    job_events: those of the whole job or a rack. jitter_s: their length, shortest and longest.
    """

    noise: float = 1.0
    step_s: float = 8.0
    stages: int = 0
    tensor: int = 0
    microbatches: int = 16
    exchange: float = 0.15
    rack: int = 8
    other_make: float = 0.08
    skew_s: float = 2.0
    missing: float = 0.02
    gaps: float = 0.3
    checkpoint_every_s: float = 1500.0
    checkpoint_s: float = 20.0
    evaluate_every_s: float = 5400.0
    evaluate_s: float = 120.0
    jitters: float = 0.3
    job_events: float = 4.0
    jitter_s: tuple[float, float] = (5.0, 150.0)
    daily: float = 0.04

    def __post_init__(self):
        if self.step_s <= 0:
            raise UserError(f"step_s={self.step_s} must be above 0; e.g. 8.0")
        for name in ("exchange", "other_make", "missing"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise UserError(
                    f"{name}={value} must be in [0, 1); nearest: {min(max(value, 0), 0.9)}"
                )
        for name in ("noise", "skew_s", "gaps", "jitters", "job_events", "daily"):
            if not getattr(self, name) >= 0:
                raise UserError(f"{name}={getattr(self, name)} must not be negative; nearest: 0")
        if self.skew_s > 4:
            raise UserError(f"skew_s={self.skew_s} must be at most 4 seconds; nearest: 4")
        low, high = self.jitter_s
        if not 0 < low <= high <= 1800:
            raise UserError(f"jitter_s={self.jitter_s} must be (shortest, longest), at most 1800 s")


def quiet(**changes: Any) -> Setting:
    """Returns a setting without disturbances, checkpoints, evaluation or missing samples."""
    calm = Setting(
        missing=0, gaps=0, checkpoint_every_s=0, evaluate_every_s=0, jitters=0, job_events=0
    )
    return replace(calm, **changes)
