"""Labelled cases: windows of 15 to 30 minutes of simulated jobs, with a fault or without one.

A detector is fitted on cases of the split "train", tuned on "validate" and reported on "held_out".
The splits differ in their seeds and in their parameters: a held-out job has other step times, other
noise, weaker and stronger faults, and longer harmless disturbances than any job that was trained
on, and three mixes of fault types are for held-out cases (kinds.MIXES).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.fleet import keyed
from megajax.monitor.fleet.disturbances import Disturbance, Move
from megajax.monitor.fleet.faults import Fault, draw_fault, draw_kind
from megajax.monitor.fleet.kinds import MIXES
from megajax.monitor.fleet.settings import Setting
from megajax.monitor.fleet.simulator import EPOCH, Fleet
from megajax.monitor.grid import Grid
from megajax.monitor.sources.names import WATCHED

Split = Literal["train", "validate", "held_out"]
Noise = Literal["low", "middle", "high"]


@dataclass(frozen=True)
class Family:
    """Ranges from which the jobs of a split are drawn. noise: level -> range of the factor.

    strength: factor of the sizes of faults. lasts_s: from onset to halt, drawn log-uniformly.
    double: share of the faulty cases with a second faulty machine. joins, leaves, workload: share
    of the cases in which a machine joins, one leaves on purpose, or the batches change.
    """

    noise: MappingProxyType[str, tuple[float, float]]
    strength: tuple[float, float]
    step_s: tuple[float, float]
    jitter_s: tuple[float, float]
    jitters: tuple[float, float]
    job_events: tuple[float, float]
    missing: tuple[float, float]
    lasts_s: tuple[float, float] = (360.0, 1500.0)
    double: float = 0.05
    joins: float = 0.08
    leaves: float = 0.05
    workload: float = 0.15


def _noise(low, middle, high) -> MappingProxyType:
    return MappingProxyType({"low": low, "middle": middle, "high": high})


# ASSUMED. A factor of 1 is the noise of specs.py.
FAMILIES: MappingProxyType[str, Family] = MappingProxyType(
    {
        "train": Family(
            _noise((0.5, 0.7), (0.9, 1.1), (1.3, 1.5)),
            strength=(0.9, 1.2), step_s=(3, 20), jitter_s=(5, 120), jitters=(0.2, 0.6),
            job_events=(2, 6), missing=(0.01, 0.03),
        ),
        "validate": Family(
            _noise((0.5, 0.7), (0.9, 1.1), (1.3, 1.5)),
            strength=(0.9, 1.2), step_s=(3, 20), jitter_s=(5, 150), jitters=(0.2, 0.8),
            job_events=(2, 7), missing=(0.01, 0.03),
        ),
        "held_out": Family(
            _noise((0.6, 0.9), (1.0, 1.3), (1.4, 1.8)),
            strength=(0.75, 1.25), step_s=(1.5, 35), jitter_s=(5, 200), jitters=(0.2, 1.0),
            job_events=(2, 8), missing=(0.01, 0.05), double=0.08,
        ),
    }
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A window [start, end) of a job, Unix seconds. noise: its level, a key of Family.noise."""

    fleet: Fleet
    start: int
    end: int
    noise: str

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults of the window; empty: a healthy case."""
        return self.fleet.truth

    def read(self) -> Grid:
        """Returns the samples of the window."""
        return self.fleet.read(self.start, self.end)


def cases(
    n: int,
    machines: int | Sequence[int],
    seed: int,
    *,
    mix: str = "evaluation",
    split: Split = "train",
    noise: Noise | None = None,
    healthy: float = 0.3,
    metrics: tuple[str, ...] = WATCHED,
) -> Iterator[Case]:
    """Yields n cases; case k is a function of the other arguments and of k alone.

    Args: machines: of each job, or several numbers that take turns. mix: of kinds.MIXES. split: of
        FAMILIES. noise: None: all three in turn. healthy: share of cases without a fault.
    Raises: UserError for an unknown mix, split or level of noise.
    """
    if split not in FAMILIES:
        raise UserError(f"split={split!r} must be one of {sorted(FAMILIES)}")
    family = FAMILIES[split]
    if noise is not None and noise not in family.noise:
        raise UserError(f"noise={noise!r} must be one of {sorted(family.noise)}")
    if mix not in MIXES:
        raise UserError(f"mix={mix!r} must be one of {sorted(MIXES)}")
    if not 0 <= healthy <= 1:
        raise UserError(f"healthy={healthy} must be in 0..1; nearest: {min(max(healthy, 0), 1)}")
    sizes = [machines] if isinstance(machines, int) else list(machines)
    levels = [noise] if noise else list(family.noise)
    stream = keyed.CASES + (1 + list(FAMILIES).index(split) << 32)
    for k in range(n):
        size = sizes[k % len(sizes)]
        rng = keyed.generator(seed, stream, k, size)
        level = levels[k // len(sizes) % len(levels)]
        # Every group of cases has its share of healthy ones, whatever n is.
        faulty = np.floor((k + 1) * (1 - healthy) + 1e-9) > np.floor(k * (1 - healthy) + 1e-9)
        yield _case(rng, family, size, level, mix if faulty else "", metrics)


def draw_setting(rng: np.random.Generator, family: Family, noise: str) -> Setting:
    """Returns the setting of one job of a family."""
    low, high = np.log(family.step_s)
    return Setting(
        noise=float(rng.uniform(*family.noise[noise])),
        step_s=float(np.exp(rng.uniform(low, high))),
        microbatches=int(rng.choice((8, 16, 32))),
        exchange=float(rng.uniform(0.08, 0.25)),
        rack=int(rng.choice((4, 8, 16))),
        other_make=float(rng.uniform(0, 0.12)),
        skew_s=float(rng.uniform(0.5, 2)),
        missing=float(rng.uniform(*family.missing)),
        gaps=float(rng.uniform(0.1, 0.5)),
        checkpoint_every_s=float(rng.uniform(400, 1800)),
        checkpoint_s=float(rng.uniform(5, 45)),
        evaluate_every_s=float(rng.uniform(1500, 5400)),
        evaluate_s=float(rng.uniform(30, 300)),
        jitters=float(rng.uniform(*family.jitters)),
        job_events=float(rng.uniform(*family.job_events)),
        jitter_s=family.jitter_s,
        daily=float(rng.uniform(0, 0.06)),
    )


def _case(
    rng: np.random.Generator, family: Family, machines: int, noise: str, mix: str, metrics
) -> Case:
    setting = draw_setting(rng, family, noise)
    job = EPOCH + int(rng.integers(86400))
    start = job + int(rng.integers(600, 7200))
    end = start + int(rng.integers(900, 1801))
    fleet = Fleet(machines, int(rng.integers(1 << 62)), metrics, setting, start=job)
    events = _events(rng, family, fleet, start, end)
    faults: tuple[Fault, ...] = ()
    if mix:
        # 8 minutes of the window at least come after the onset.
        onset = float(rng.uniform(start + 60, end - 480))
        moving = {fleet.layout.names[k] for e in events if e.kind != "workload" for k in e.machines}
        faults = (_fault(rng, family, fleet, mix, onset, moving),)
        if rng.random() < family.double and machines >= 8:
            second = float(np.clip(onset + rng.uniform(-60, 60), start + 60, end - 480))
            faults += (_fault(rng, family, fleet, mix, second, {*moving, faults[0].machine}),)
            halt = min(f.end for f in faults)  # there is one job
            faults = tuple(replace(f, end=halt) for f in faults)
    seed = fleet.seed
    return Case(Fleet(machines, seed, metrics, setting, faults, events, job), start, end, noise)


def _fault(
    rng: np.random.Generator, family: Family, fleet: Fleet, mix: str, onset: float, but: set[str]
) -> Fault:
    low, high = np.log(family.lasts_s)
    end = onset + float(np.exp(rng.uniform(low, high)))
    kind = draw_kind(rng, mix)
    while True:
        fault = draw_fault(
            rng, kind, fleet.layout, onset, end, family.strength, visible=fleet.metrics
        )
        if fault.machine not in but:
            return fault


def _events(
    rng: np.random.Generator, family: Family, fleet: Fleet, start: int, end: int
) -> tuple[Disturbance, ...]:
    """Returns machines that come and go on purpose, and a change of the batches.

    The job stands for 30 to 90 s while its members change. A joiner or leaver is never the machine
    of stage 0 of a job of 4, so that 3 machines at least stay.
    """
    found: list[Disturbance] = []
    gone = (Move("*", "gone"),)
    if fleet.machines >= 8:
        if rng.random() < family.joins:
            at, machine = float(rng.uniform(start, end)), int(rng.integers(1, fleet.machines))
            found.append(Disturbance("late_joiner", fleet.start - 60, at, (machine,), gone))
            found.append(_regroup(rng, at))
        if rng.random() < family.leaves:
            at, machine = float(rng.uniform(start, end)), int(rng.integers(1, fleet.machines))
            found.append(Disturbance("leaver", at, float(fleet.start + 10**9), (machine,), gone))
            found.append(_regroup(rng, at))
    if rng.random() < family.workload:
        at = float(rng.uniform(start, end))
        shift = float(rng.uniform(0.02, 0.15))
        moves = tuple(
            Move(metric, "idle", shift)
            for metric in ("gpu_tensor_activity", "gpu_power_draw", "nvlink_bandwidth")
        )
        found.append(
            Disturbance(
                "workload", at, float(fleet.start + 10**9), (), moves,
                float(rng.uniform(0.5, 0.95)), state="workload",
            )
        )  # fmt: skip
    return tuple(found)


def _regroup(rng: np.random.Generator, at: float) -> Disturbance:
    return Disturbance("regroup", at, at + float(rng.uniform(30, 90)), speed=0.0, state="restart")
