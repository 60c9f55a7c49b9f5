"""Fleet: per-second metrics of the machines of one training job, with faults that are known.

It stands in for Prometheus when a detector of faulty machines is trained or judged. What a minute
shows is a function of (configuration, seed, minute) and of nothing else, so any cut of the data
into windows gives the same numbers. What is assumed: docs/fleet.md, and the tables in
roles.py, job.py and faults.py. Labelled cases for training and judging detectors follow.

Legend: C metrics, N machines, T seconds (of a block), S seconds with a margin for the clocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.monitor.fleet import roles
from megajax.monitor.fleet.faults import (
    METRICS,
    MIXES,
    NUMBERS,
    Disturbance,
    Fault,
    Move,
    Spec,
    draw_fault,
    draw_kind,
)
from megajax.monitor.fleet.job import Job, People, Work, people, work
from megajax.monitor.fleet.roles import Layout, Setting, draw_layout
from megajax.monitor.samples import Grid
from megajax.monitor.sources.convert import WATCHED

BLOCK = 60  # seconds that are made at a time
EPOCH = 1_700_000_000  # (chosen) 2023-11-14, when a job starts unless told otherwise
MARGIN = 6  # seconds around a block that machines with other clocks show


@dataclass(frozen=True)
class Fleet:
    """A job of `machines` hosts that started at `start` (Unix s).

    seed: everything that is drawn. metrics: any of specs.METRICS. faults: see faults.draw_fault.
    events: further disturbances; one of kind "late_joiner" or "leaver" is a machine that comes or
    goes on purpose.
    """

    machines: int
    seed: int
    metrics: tuple[str, ...] = WATCHED
    setting: Setting = field(default_factory=Setting)
    faults: tuple[Fault, ...] = ()
    events: tuple[Disturbance, ...] = ()
    start: int = EPOCH

    def __post_init__(self):
        for name in self.metrics:
            if name not in METRICS:
                raise UserError(f"unknown metric {name!r}.{did_you_mean(name, METRICS)}")
        if not self.metrics or len(set(self.metrics)) != len(self.metrics):
            raise UserError(f"metrics={self.metrics} must be different names, at least one")
        unknown = {f.machine for f in self.faults} - set(self.layout.names)
        if unknown:
            names = self.layout.names
            raise UserError(f"no such machine: {sorted(unknown)}; they are {names[0]}..{names[-1]}")

    @cached_property
    def layout(self) -> Layout:
        """Roles of the machines; Grid.machines is layout.names."""
        return draw_layout(self.machines, self.seed, self.setting)

    @property
    def truth(self) -> tuple[Fault, ...]:
        """The faults, by their onset."""
        return tuple(sorted(self.faults, key=lambda f: (f.start, f.machine)))

    @property
    def departures(self) -> tuple[tuple[str, float], ...]:
        """(machine, Unix s) of those that leave on purpose, as a scheduler would declare them."""
        gone = [e for e in self.events if e.kind == "leaver"]
        return tuple((self.layout.names[k], e.start) for e in gone for k in e.machines)

    def read(self, start: float, end: float) -> Grid:
        """Returns all samples of [start, end), Unix seconds; NaN where a sample is missing.

        Raises: UserError where the interval is empty or begins before the job.
        """
        first, last = int(np.floor(start)), int(np.ceil(end))
        if first >= last:
            raise UserError(f"read({start}, {end}): end must be after start")
        if first < self.start:
            raise UserError(f"read({start}, {end}): the job starts at {self.start}")
        names = tuple(sorted(self.metrics))
        values_CNT = np.empty((len(names), self.machines, last - first), np.float32)
        for block in range(first // BLOCK, (last - 1) // BLOCK + 1):
            low, high = max(first, block * BLOCK), min(last, (block + 1) * BLOCK)
            # Minute `block` of all metrics, float32 (C, N, 60); the last one is kept.
            if block not in self._cache:
                made = self._make(block * BLOCK)
                self._cache.clear()
                self._cache[block] = made
            made_CNT = self._cache[block]
            inside = slice(low - block * BLOCK, high - block * BLOCK)
            values_CNT[:, :, low - first : high - first] = made_CNT[:, :, inside]
        return Grid(first, 1, values_CNT, self.layout.names, names)

    def disturbances(self, start: float, end: float) -> list[Disturbance]:
        """Returns all that happens in [start, end), harmless or not, to explain a reading."""
        return sorted(self._job.disturbances(start, end), key=lambda d: (d.start, d.kind))

    @cached_property
    def _cache(self) -> dict[int, np.ndarray]:
        return {}

    @cached_property
    def _job(self) -> Job:
        faults = [d for fault in self.truth for d in fault.disturbances(self.layout)]
        return Job(self.setting, self.layout, self.seed, self.start, (*self.events, *faults))

    @cached_property
    def _people(self) -> People:
        return people(self.layout, self.setting, self.seed)

    def _make(self, second: int) -> np.ndarray:
        tracks = self._job.window(second - MARGIN, BLOCK + 2 * MARGIN)
        done = work(tracks, self._people, self.setting, self.seed, second)
        # Factor of the noise of a machine, (N, T): quiet and restless times make heavy tails.
        calm_NT = roles.interpolated(
            self.seed, roles.SHARED + (7 << 32), 10, second, BLOCK, self.machines
        )
        rough = np.exp(np.float32(0.45) * calm_NT)
        active = self._job.disturbances(second - MARGIN, second + BLOCK + MARGIN)
        active = [d for d in active if d.moves]
        lost_NT = self._lost(roles.SCRAPES, second)
        names = sorted(self.metrics)
        values_CNT = np.empty((len(names), self.machines, BLOCK), np.float32)
        for c, name in enumerate(names):
            spec = METRICS[name]
            value_NT = self._healthy(spec, done, rough, second)
            self._disturb(value_NT, spec, active, second)
            lost = lost_NT | self._lost(roles.METRIC + NUMBERS[name], second)
            values_CNT[c] = _reading(value_NT, spec)
            values_CNT[c][lost] = np.nan
        return values_CNT

    def _healthy(self, spec: Spec, done: Work, rough_NT: np.ndarray, second: int) -> np.ndarray:
        """Returns a metric's values without disturbances, float32 (N, T)."""
        value_NT = np.zeros((self.machines, BLOCK), np.float32)
        for driver, level in spec.levels.items():
            part = done.drivers.get(driver)
            if part is not None:
                value_NT += np.float32(level) * part
        share_NT = self._noise(spec, rough_NT, second)
        day = 2 * np.pi * ((np.arange(BLOCK) + second) / 86400 + NUMBERS[spec.name] / 21)
        share_NT += (self.setting.daily * np.sin(day)).astype(np.float32)
        if spec.log:
            share_NT *= np.float32(spec.span)
        else:  # most of the noise is of the work
            share_NT *= np.float32(0.2 * spec.span) + np.float32(0.8) * value_NT
        value_NT += share_NT
        value_NT += np.float32(spec.base)
        return value_NT

    def _noise(self, spec: Spec, rough_NT: np.ndarray, second: int) -> np.ndarray:
        """Returns the noise of a metric in shares of its span, float32 (N, T)."""
        share_NT = np.repeat(self._persistent(spec)[:, None], BLOCK, axis=1)
        noise = self.setting.noise
        if not noise:
            return share_NT
        stream = roles.METRIC + NUMBERS[spec.name]
        white = roles.generator(self.seed, stream + (1 << 32), second)
        white_NT = white.standard_normal((self.machines, BLOCK), np.float32)
        white_NT *= rough_NT
        # What is beyond 3 sigma goes twice as far: rare readings far outside.
        white_NT = np.where(np.abs(white_NT) > 3, white_NT * 2, white_NT)
        share_NT += np.float32(noise * spec.white) * white_NT
        for number, (spacing, share) in enumerate(((5, 0.7), (40, 0.5), (900, 0.5))):
            slow_NT = roles.interpolated(
                self.seed, stream + ((2 + number) << 32), spacing, second, BLOCK, self.machines
            )
            share_NT += np.float32(noise * spec.slow * share) * slow_NT
        return share_NT

    def _persistent(self, spec: Spec) -> np.ndarray:
        """Returns the constant differences between machines and makes in shares of the span."""
        rng = roles.generator(self.seed, roles.OFFSETS, NUMBERS[spec.name])
        own_N = rng.standard_normal(self.machines, np.float32) * np.float32(spec.offset)
        rack = rng.standard_normal(self.machines, np.float32)[self.layout.rack_N]
        make = np.float32(rng.uniform(-0.08, 0.08)) * self._people.other_N
        total = own_N + np.float32(0.4 * spec.offset) * rack + make
        return (self.setting.noise * total).astype(np.float32)

    def _disturb(
        self, value_NT: np.ndarray, spec: Spec, active: Sequence[Disturbance], second: int
    ) -> None:
        """Leads the readings of a metric where its disturbances say, in place."""
        skew_N = self._people.skew_N
        time_T = np.arange(BLOCK) + second
        for disturbance in active:
            moves = [m for m in disturbance.moves if m.metric in (spec.name, "*")]
            if not moves:
                continue
            rows = np.array(disturbance.machines or range(self.machines))
            now_RT = time_T + skew_N[rows][:, None]
            inside = (now_RT >= disturbance.start) & (now_RT < disturbance.end)
            for move in moves:
                since_RT = np.where(inside, now_RT - disturbance.start, -1e9)
                weight_RT = move.weight(since_RT)
                if move.target == "gone":
                    value_NT[rows] = np.where(weight_RT > 0, np.float32(np.nan), value_NT[rows])
                else:
                    value_NT[rows] += weight_RT * (np.float32(move.level(spec)) - value_NT[rows])

    def _lost(self, stream: int, second: int) -> np.ndarray:
        """Returns which samples are lost alone: half with the whole scrape, half of one metric."""
        rng = roles.generator(self.seed, stream + (9 << 32), second)
        draw_NT = rng.integers(0, 1 << 16, (self.machines, BLOCK), np.uint16)
        return draw_NT < round(self.setting.missing / 2 * (1 << 16))


def _reading(value_NT: np.ndarray, spec: Spec) -> np.ndarray:
    """Returns the reading of an exporter: saturated and quantised."""
    value_NT = np.clip(value_NT, spec.low, spec.high)
    if spec.log:
        value_NT = np.exp(value_NT)
    if spec.quantum:
        value_NT = np.rint(value_NT / np.float32(spec.quantum)) * np.float32(spec.quantum)
    return value_NT


# ---- labelled cases: windows of 15 to 30 minutes of simulated jobs, with a fault or without
#
# A detector is fitted on cases of the split "train", tuned on "validate" and reported on
# "held_out". The splits differ in their seeds and in their parameters: a held-out job has other
# step times, other noise, weaker and stronger faults, and longer harmless disturbances than any job
# that was trained on, and three mixes of fault types are for held-out cases (faults.MIXES).


Split = Literal["train", "validate", "held_out"]
Noise = Literal["low", "middle", "high"]


@dataclass(frozen=True)
class Family:
    """Ranges from which the jobs of a split are drawn.

    noise: {level: range of the factor on the noise}. strength: factor on the sizes of faults.
    lasts_s: from onset to halt, drawn log-uniformly. double: share of the faulty cases with a
    second faulty machine. joins, leaves, workload: share of the cases in which a machine joins, one
    leaves on purpose, or the batches change.
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


# ASSUMED. A factor of 1 is the noise of faults.py.
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

    Args: machines: number of machines of each job, or several numbers that are used in turn. mix: a
        key of faults.MIXES. split: a key of FAMILIES. noise: a level; None: all three in turn.
        healthy: share of cases without a fault.
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
    stream = roles.CASES + (1 + list(FAMILIES).index(split) << 32)
    for k in range(n):
        size = sizes[k % len(sizes)]
        rng = roles.generator(seed, stream, k, size)
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
    """Returns machines that join and leave on purpose, and a change of the batches.

    The job stands for 30 to 90 s while its members change. A joiner or leaver is never the machine
    of stage 0 of a job of 4, so that 3 machines at least stay.
    """
    disturbances: list[Disturbance] = []
    gone = (Move("*", "gone"),)
    if fleet.machines >= 8:
        if rng.random() < family.joins:
            at, machine = float(rng.uniform(start, end)), int(rng.integers(1, fleet.machines))
            disturbances.append(Disturbance("late_joiner", fleet.start - 60, at, (machine,), gone))
            disturbances.append(_regroup(rng, at))
        if rng.random() < family.leaves:
            at, machine = float(rng.uniform(start, end)), int(rng.integers(1, fleet.machines))
            disturbances.append(
                Disturbance("leaver", at, float(fleet.start + 10**9), (machine,), gone)
            )
            disturbances.append(_regroup(rng, at))
    if rng.random() < family.workload:
        at = float(rng.uniform(start, end))
        shift = float(rng.uniform(0.02, 0.15))
        moves = tuple(
            Move(metric, "idle", shift)
            for metric in ("gpu_tensor_activity", "gpu_power_draw", "nvlink_bandwidth")
        )
        disturbances.append(
            Disturbance(
                "workload",
                at,
                float(fleet.start + 10**9),
                (),
                moves,
                float(rng.uniform(0.5, 0.95)),
                state="workload",
            )
        )
    return tuple(disturbances)


def _regroup(rng: np.random.Generator, at: float) -> Disturbance:
    return Disturbance("regroup", at, at + float(rng.uniform(30, 90)), speed=0.0, state="restart")
