"""What a driver is told of its job. No jax import."""

import dataclasses
from collections.abc import Mapping

from megajax.monitor.detectors import DETECTORS, Limits, Maker
from megajax.systems.elastic.policy import Guard, Policy


@dataclasses.dataclass(frozen=True)
class Settings:
    """hosts: wanted at a time. processes: of a host. join: seconds to wait for agents.

    grace: seconds to save for a job that was told to stop. grid: of devices, 'pipe=2,tensor=8'.
    invite: how a person starts an agent that is missing. detectors: by name. guard: of evictions.
    again: the command line of this driver, to be typed again.
    """

    command: tuple[str, ...]
    hosts: int = 1
    processes: int = 1
    join: float = 600.0
    grace: float = 600.0
    period: float = 1.0
    grid: str | None = None
    limits: Limits = Limits()
    policy: Policy = Policy()
    invite: str = ""
    detectors: Mapping[str, Maker] = dataclasses.field(default_factory=lambda: DETECTORS)
    guard: Guard | None = None
    again: str = "the same command"
