"""Fleet: per-second metrics of the machines of one training job, with faults that are known.

It stands in for Prometheus when a detector of faulty machines is trained or judged. What a minute
shows is a function of (configuration, seed, minute) and of nothing else, so any cut of the data
into windows gives the same numbers. What is assumed: docs/fleet.md, and the tables in specs.py,
settings.py, background.py and kinds.py.

Legend: C metrics, N machines, T seconds (of a block), S seconds with a margin for the clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megajax.core.errors import UserError, did_you_mean
from megajax.monitor.fleet import keyed
from megajax.monitor.fleet.disturbances import Disturbance, Move
from megajax.monitor.fleet.faults import Fault
from megajax.monitor.fleet.job import Job
from megajax.monitor.fleet.roles import Layout, draw_layout
from megajax.monitor.fleet.settings import Setting
from megajax.monitor.fleet.specs import METRICS, NUMBERS, Spec
from megajax.monitor.fleet.work import People, Work, people, work
from megajax.monitor.grid import Grid
from megajax.monitor.sources.names import WATCHED

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
        """Returns all samples of [start, end), Unix seconds; NaN: there is none.

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
            made_CNT = self._block(block)
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

    def _block(self, block: int) -> np.ndarray:
        """Returns minute `block` of all metrics, float32 (C, N, 60); the last one is kept."""
        if block not in self._cache:
            made = self._make(block * BLOCK)
            self._cache.clear()
            self._cache[block] = made
        return self._cache[block]

    def _make(self, second: int) -> np.ndarray:
        tracks = self._job.window(second - MARGIN, BLOCK + 2 * MARGIN)
        done = work(tracks, self._people, self.setting, self.seed, second)
        rough = self._roughness(second)
        active = self._job.disturbances(second - MARGIN, second + BLOCK + MARGIN)
        active = [d for d in active if d.moves]
        lost_NT = self._lost(keyed.SCRAPES, second)
        names = sorted(self.metrics)
        values_CNT = np.empty((len(names), self.machines, BLOCK), np.float32)
        for c, name in enumerate(names):
            spec = METRICS[name]
            value_NT = self._healthy(spec, done, rough, second)
            self._disturb(value_NT, spec, active, second)
            lost = lost_NT | self._lost(keyed.METRIC + NUMBERS[name], second)
            values_CNT[c] = _reading(value_NT, spec)
            values_CNT[c][lost] = np.nan
        return values_CNT

    def _roughness(self, second: int) -> np.ndarray:
        """Factor of the noise of a machine, (N, T): quiet and restless times make heavy tails."""
        calm_NT = keyed.interpolated(
            self.seed, keyed.SHARED + (7 << 32), 10, second, BLOCK, self.machines
        )
        return np.exp(np.float32(0.45) * calm_NT)

    def _healthy(self, spec: Spec, done: Work, rough_NT: np.ndarray, second: int) -> np.ndarray:
        """Returns what a metric shows without disturbances, float32 (N, T)."""
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
        stream = keyed.METRIC + NUMBERS[spec.name]
        white = keyed.generator(self.seed, stream + (1 << 32), second)
        white_NT = white.standard_normal((self.machines, BLOCK), np.float32)
        white_NT *= rough_NT
        # What is beyond 3 sigma goes twice as far: rare readings far outside.
        white_NT = np.where(np.abs(white_NT) > 3, white_NT * 2, white_NT)
        share_NT += np.float32(noise * spec.white) * white_NT
        for number, (spacing, share) in enumerate(((5, 0.7), (40, 0.5), (900, 0.5))):
            slow_NT = keyed.interpolated(
                self.seed, stream + ((2 + number) << 32), spacing, second, BLOCK, self.machines
            )
            share_NT += np.float32(noise * spec.slow * share) * slow_NT
        return share_NT

    def _persistent(self, spec: Spec) -> np.ndarray:
        """Returns the constant differences between machines and makes in shares of the span."""
        rng = keyed.generator(self.seed, keyed.OFFSETS, NUMBERS[spec.name])
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
                _lead(
                    value_NT, rows, move, spec, np.where(inside, now_RT - disturbance.start, -1e9)
                )

    def _lost(self, stream: int, second: int) -> np.ndarray:
        """Returns which samples are lost alone: half with the whole scrape, half of one metric."""
        rng = keyed.generator(self.seed, stream + (9 << 32), second)
        draw_NT = rng.integers(0, 1 << 16, (self.machines, BLOCK), np.uint16)
        return draw_NT < round(self.setting.missing / 2 * (1 << 16))


def _lead(
    value_NT: np.ndarray, rows: np.ndarray, move: Move, spec: Spec, since_RT: np.ndarray
) -> None:
    weight_RT = move.weight(since_RT)
    if move.target == "gone":
        value_NT[rows] = np.where(weight_RT > 0, np.float32(np.nan), value_NT[rows])
    else:
        value_NT[rows] += weight_RT * (np.float32(move.level(spec)) - value_NT[rows])


def _reading(value_NT: np.ndarray, spec: Spec) -> np.ndarray:
    """Returns what an exporter shows: saturated and quantised."""
    value_NT = np.clip(value_NT, spec.low, spec.high)
    if spec.log:
        value_NT = np.exp(value_NT)
    if spec.quantum:
        value_NT = np.rint(value_NT / np.float32(spec.quantum)) * np.float32(spec.quantum)
    return value_NT
