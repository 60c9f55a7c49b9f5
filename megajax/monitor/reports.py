"""What goes between agents, watchdog and driver: reports, limits, actions. No jax import."""

import math
from dataclasses import dataclass
from typing import Literal

from megajax.monitor.heartbeat import Progress


@dataclass(frozen=True)
class Limits:
    """How long is too long, in seconds, and how much too much.

    start: from the start of a process to its first step, and its first two steps, which compile.
    step: in each section of a step. save, evaluate: in a save; in an evaluation and at the end.
    silence: of an agent; of a stopped process. settle: between the first sign of a fault and its
    judgement, so that the signs of the rank that caused it are in.
    """

    start: float = 1800.0
    step: float = 180.0
    save: float = 600.0
    evaluate: float = 1800.0
    silence: float = 15.0
    settle: float = 2.0
    flood_bytes_per_s: float = 20e6
    disk_free: float = 2**30

    def floor(self, section: str) -> float:
        """Returns the least that a section may take."""
        if section in ("start", "compile"):
            return self.start
        if section == "save":
            return self.save
        return self.evaluate if section in ("evaluate", "end", "told") else self.step


@dataclass(frozen=True)
class RankReport:
    """What an agent sees of a rank. state: of the process as Linux names it, X: ended.

    code: how it ended, negative for a signal. log_bytes: written so far. words: lines of its log
    that held a keyword since the last report.
    """

    rank: int
    state: str = "S"
    code: int | None = None
    progress: Progress | None = None
    log_bytes: int = 0
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostReport:
    """What an agent sees of its host. traffic: bytes through its network cards since they began."""

    host: str
    ranks: tuple[RankReport, ...]
    disk_free: float = math.inf
    traffic: int = 0


@dataclass(frozen=True)
class Action:
    """What to do, and why. kind done: the job ended well, with `code`; stop: trying is no use."""

    kind: Literal["restart", "stop", "done", "warn"]
    rule: str
    message: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    step: int | None = None
    code: int = 0
