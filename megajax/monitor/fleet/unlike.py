"""Three fleets whose assumptions differ from the simulator's and from each other's.

A detector that is fitted and judged on one simulator learns what that simulator's author believes.
These fleets share no noise, no load and no reading with simulator.py, so that a rule which holds on
all four rests on none of them. Everything here is ASSUMED.

autoregressive: rectangular training steps of one period and a slow common drift; Gaussian AR(1)
noise; real numbers.
counters: bursts at random times and a daily course, no steps; Student's t noise and spikes; rates
of counters that are scraped at uneven times, whole percents, steps of 5 W, two metrics every second
second, no pause packet most of the time.
trapezoid: training steps with ramps, a phase for each pipeline stage, jitter of every step, pauses
for checkpoints; Laplace noise and collections of garbage; clocks up to half a second wrong.

Faults: "order" (PFC rises and NVLink falls on one machine, and some seconds later on others, as
far or further), "spread" (the noise of power and CPU grows, their levels stay), "lag" (a machine
does the work of the job a second later), "level" (one metric moves, which is what simulator.py
makes). Harmless: short faults of all these kinds on one machine, stalls and changes of the whole
job, PFC on all machines at once, hosts with a role, a make or a noise of their own.

Legend: C metrics, N machines, T seconds, S tenths of a second.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import numpy as np

from megajax.core.errors import UserError
from megajax.monitor.samples import Grid

Kind = Literal["order", "spread", "lag", "level"]
KINDS: tuple[Kind, ...] = ("order", "spread", "lag", "level")
PFC, CPU, DUTY, POWER, TENSOR, NVLINK = METRICS = (
    "pfc_tx_packet_rate",
    "cpu_usage",
    "gpu_duty_cycle",
    "gpu_power_draw",
    "gpu_tensor_activity",
    "nvlink_bandwidth",
)
EPOCH = 1_700_000_000
FINE = 10  # parts of a second in which the work of a job is drawn
MARGIN = 10  # seconds before a scene that a machine which lags shows


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fault of one machine in [start, end), Unix seconds. followers: (machine, seconds later)."""

    machine: str
    kind: Kind
    start: float
    end: float
    followers: tuple[tuple[str, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Scene:
    """Some minutes of a job. harmless: disturbances that are no fault, (kind, machine or "", start,
    end)."""

    background: str
    grid: Grid
    faults: tuple[Planted, ...]
    harmless: tuple[tuple[str, str, float, float], ...]


@dataclasses.dataclass
class _Course:
    """What happens second by second. work_T: factor of the job's work. late_NT: seconds by which a
    machine is behind. noise, factor, more: by metric; factor of the noise and of the level, and
    what is added to the level, as a share of its usual one."""

    work_T: np.ndarray
    late_NT: np.ndarray
    noise: dict[str, np.ndarray]
    factor: dict[str, np.ndarray]
    more: dict[str, np.ndarray]

    @classmethod
    def calm(cls, machines: int, seconds: int) -> "_Course":
        """Returns the course of a job to which nothing happens."""

        def each(value: float) -> dict[str, np.ndarray]:
            return {m: np.full((machines, seconds), value) for m in METRICS}

        late_NT = np.zeros((machines, seconds))
        return cls(np.ones(seconds), late_NT, each(1.0), each(1.0), each(0.0))

    def do(
        self, rng: np.random.Generator, kind: Kind, row: int, start: int, end: int, size: float
    ) -> None:
        """Applies a fault to one machine. size: share of the full size of a fault."""
        during = slice(start, end)
        if kind == "order":
            self.more[PFC][row, during] += size * 10 ** rng.uniform(0.5, 1.3)
            self.factor[NVLINK][row, during] *= 1 - size * rng.uniform(0.25, 0.6)
        elif kind == "spread":
            ramp_T = np.minimum(np.arange(end - start) / rng.uniform(30, 240), 1.0)
            for metric in (POWER, CPU):
                self.noise[metric][row, during] *= 1 + ramp_T * size * rng.uniform(2.5, 5.0)
        elif kind == "lag":
            self.late_NT[row, during] += size * rng.uniform(0.8, 1.6)
        else:
            metric = (CPU, POWER, TENSOR, NVLINK)[rng.integers(4)]
            factor = (
                1 + size * rng.uniform(0.5, 1.0)
                if metric == CPU
                else 1 - size * rng.uniform(0.25, 0.6)
            )
            self.factor[metric][row, during] *= factor


@dataclasses.dataclass(frozen=True)
class _Curve:
    """A course of time: value_S, in steps of a FINE-th second, from MARGIN seconds before 0."""

    value_S: np.ndarray

    def mean(self, at_NT: np.ndarray) -> np.ndarray:
        """Returns the mean over the second that begins at each time."""
        sum_S = np.concatenate([[0.0], np.cumsum(self.value_S)]) / FINE
        place_S = np.arange(len(sum_S)) / FINE - MARGIN
        return np.interp(at_NT + 1, place_S, sum_S) - np.interp(at_NT, place_S, sum_S)


def _fine(seconds: int) -> np.ndarray:
    return np.arange((seconds + 2 * MARGIN) * FINE) / FINE - MARGIN


def _stalled(value_S: np.ndarray, course: _Course, low: float) -> np.ndarray:
    """Returns the work after the disturbances of the job as a whole."""
    second_S = np.clip(np.floor(_fine(len(course.work_T))), 0, len(course.work_T) - 1).astype(int)
    return low + (value_S - low) * course.work_T[second_S]


# ---- backgrounds


def _autoregressive(rng: np.random.Generator, course: _Course) -> dict[str, np.ndarray]:
    N, T = course.late_NT.shape
    at_S = _fine(T)
    period, share = rng.uniform(4, 15), rng.uniform(0.6, 0.85)
    busy_S = (at_S / period % 1 < share).astype(float)
    drift_S = 1 + 0.1 * np.sin(2 * np.pi * (at_S / rng.uniform(1500, 4000) + rng.random()))
    at_NT = np.arange(T) - course.late_NT
    busy_NT = _Curve(_stalled(busy_S * drift_S, course, 0.0)).mean(at_NT)
    send_NT = _Curve(_stalled(1 - busy_S, course, 0.0)).mean(at_NT)
    make_N = rng.random(N) < 0.15
    usual = {
        CPU: (0.25, 0.2, send_NT),
        DUTY: (0.15, 0.75, busy_NT),
        POWER: (150.0, 450.0, busy_NT),
        TENSOR: (0.02, 0.5, busy_NT),
        NVLINK: (5e9, 1.2e11, send_NT),
    }
    metrics = {}
    for metric, (low, height, work_NT) in usual.items():
        gain_N = np.where(make_N, 0.9, 1.0) * (1 + 0.03 * rng.standard_normal(N))
        level_NT = low + height * gain_N[:, None] * work_NT
        if metric == CPU:
            level_NT[0] *= 1.3  # it loads the data
        sigma = height * rng.uniform(0.03, 0.08)
        noise_NT = sigma * _ar1(rng, N, T, rng.uniform(0.2, 0.85))
        metrics[metric] = level_NT * course.factor[metric] + course.noise[metric] * noise_NT
    log_NT = 0.6 * _ar1(rng, N, T, 0.7) + 0.8 * send_NT + 0.2 * rng.standard_normal((N, 1))
    metrics[PFC] = 20 * np.exp(log_NT) * (1 + course.more[PFC])
    return metrics


def _ar1(rng: np.random.Generator, N: int, T: int, memory: float) -> np.ndarray:
    """Returns AR(1) noise of unit variance.

    memory: share of the last second's value that is carried over.
    """
    noise_NT = rng.standard_normal((N, T))
    noise_NT[:, 1:] *= np.sqrt(1 - memory**2)
    for t in range(1, T):
        noise_NT[:, t] += memory * noise_NT[:, t - 1]
    return noise_NT


def _counters(rng: np.random.Generator, course: _Course) -> dict[str, np.ndarray]:
    N, T = course.late_NT.shape
    at_S = _fine(T)
    load_S = np.full(len(at_S), 0.35)
    at = -float(MARGIN)
    while at < T + MARGIN:  # bursts that all machines share
        at += rng.exponential(6.0)
        height, length = 0.15 * rng.lognormal(0, 0.7), rng.lognormal(1.2, 0.7)
        load_S[(at_S >= at) & (at_S < at + length)] += height
    load_S *= 1 + 0.25 * np.sin(2 * np.pi * (at_S / 7200 + rng.random()))
    uneven_NT = rng.uniform(-0.15, 0.15, (N, T))  # a scrape is not exactly on the second
    load_NT = _Curve(_stalled(np.minimum(load_S, 1.2), course, 0.02)).mean(
        np.arange(T) - course.late_NT + uneven_NT
    )
    stage_N = np.where(np.arange(N) >= N - max(1, N // 6), 0.7, 1.0)  # less work in the last stage
    heavy = rng.uniform(2.5, 4.0)

    def noise_NT(size: float) -> np.ndarray:
        return size * rng.standard_t(heavy, (N, T)) / np.sqrt(heavy / (heavy - 2))

    metrics = {}
    for metric, base, height, size in (
        (CPU, 0.1, 0.3, 0.03),
        (DUTY, 0.35, 0.75, 0.06),
        (POWER, 120.0, 500.0, 25.0),
        (TENSOR, 0.05, 0.6, 0.04),
        (NVLINK, 2e9, 8e10, 4e9),
    ):
        level_NT = (
            base + height * (stage_N * (1 + 0.05 * rng.standard_normal(N)))[:, None] * load_NT
        )
        value_NT = level_NT * course.factor[metric] + course.noise[metric] * noise_NT(size)
        spikes_NT = rng.random((N, T)) < 0.002
        metrics[metric] = np.maximum(
            value_NT + spikes_NT * height * rng.exponential(0.5, (N, T)), 0
        )
    metrics[CPU], metrics[DUTY] = (np.minimum(np.round(metrics[m], 2), 1) for m in (CPU, DUTY))
    metrics[POWER] = np.round(metrics[POWER] / 5) * 5
    pauses_NT = rng.random((N, T)) < np.minimum(0.15 * load_NT * (1 + course.more[PFC]), 0.95)
    size_NT = 30 * rng.pareto(2.5, (N, T)) * (1 + course.more[PFC] / 3)
    metrics[PFC] = np.where(pauses_NT, np.round(size_NT), 0.0)
    for metric in (DUTY, POWER):
        metrics[metric][:, 1::2] = np.nan
    for value_NT in metrics.values():
        value_NT[rng.random((N, T)) < 0.015] = np.nan
    return metrics


def _trapezoid(rng: np.random.Generator, course: _Course) -> dict[str, np.ndarray]:
    N, T = course.late_NT.shape
    period, ramp = rng.uniform(6, 20), rng.uniform(0.5, 1.5)
    lengths = period * (1 + 0.04 * rng.standard_normal(int(2 * (T + 2 * MARGIN) / period)))
    lengths[rng.random(len(lengths)) < 0.03] += rng.uniform(1, 4)  # one machine was late
    begins = np.cumsum(lengths) - MARGIN - period
    pauses, at = np.zeros(T + 2 * MARGIN), rng.uniform(100, 400)
    every = rng.uniform(300, 540)
    while at < T:  # checkpoints
        pauses[int(at) + MARGIN : int(at + rng.uniform(15, 40)) + MARGIN] = 1
        at += every
    stages = rng.integers(1, 5)
    clock_N = rng.uniform(-0.5, 0.5, N)
    busy_NT, send_NT, load_NT = (np.empty((N, T)) for _ in range(3))
    on_S = np.repeat(1 - pauses, FINE)
    for n in range(N):
        phase = 0.4 * (n * stages // N) + 0.1 * rng.standard_normal(len(begins))
        at_NT = np.arange(T) - course.late_NT[n] + clock_N[n]
        for out_NT, (first, last) in (
            (busy_NT, (0.02, 0.7)),
            (send_NT, (0.68, 0.95)),
            (load_NT, (0.9, 1.1)),
        ):
            up, down = begins + phase + first * lengths, begins + phase + last * lengths
            points = np.stack([up, up + ramp, down, down + ramp], 1)
            points = np.maximum.accumulate(points.ravel())
            value_S = np.interp(_fine(T), points, np.tile([0.0, 1.0, 1.0, 0.0], len(begins)))
            out_NT[n] = _Curve(_stalled(value_S * on_S, course, 0.0)).mean(at_NT)
    metrics = {}
    for metric, base, height, work_NT in (
        (CPU, 0.15, 0.35, load_NT),
        (DUTY, 0.0, 0.98, busy_NT),
        (POWER, 110.0, 480.0, busy_NT),
        (TENSOR, 0.0, 0.45, busy_NT),
        (NVLINK, 1e9, 1.6e11, send_NT),
    ):
        gain_N1 = 1 + 0.06 * rng.uniform(-1, 1, (N, 1))
        noise_NT = height * 0.04 * rng.laplace(0, 1, (N, T))
        value_NT = (base + height * gain_N1 * work_NT) * course.factor[metric]
        metrics[metric] = np.maximum(value_NT + course.noise[metric] * noise_NT, 0)
    metrics[DUTY] = np.minimum(metrics[DUTY], 1.0)
    every_N1, phase_N1 = rng.uniform(50, 80, (N, 1)), rng.uniform(0, 80, (N, 1))
    metrics[CPU] += 0.3 * ((np.arange(T) + phase_N1) % every_N1 < 2)  # garbage is collected
    pfc_NT = 5 + 60 * send_NT + 10 * rng.laplace(0, 1, (N, T))
    metrics[PFC] = np.maximum(pfc_NT, 0) * (1 + course.more[PFC])
    return metrics


BACKGROUNDS: Mapping[str, Callable] = MappingProxyType(
    {"autoregressive": _autoregressive, "counters": _counters, "trapezoid": _trapezoid}
)


# ---- scenes


def scene(
    background: str,
    machines: int,
    seed: int,
    kind: Kind | None = None,
    *,
    seconds: int = 1700,
    restless: float = 1.0,
) -> Scene:
    """Returns some minutes of a job with a fault of this kind, or without a fault.

    A fault begins at 40 to 55 % of the time and lasts to the end.
    Args: background: a key of BACKGROUNDS. seed: decides everything that is drawn. restless: factor
      on the number of harmless disturbances.
    Raises: UserError for an unknown background or kind.
    """
    if background not in BACKGROUNDS:
        raise UserError(f"background={background!r} must be one of {sorted(BACKGROUNDS)}")
    if kind is not None and kind not in KINDS:
        raise UserError(f"kind={kind!r} must be one of {KINDS}")
    place = [list(BACKGROUNDS).index(background), machines, seed]
    rng = np.random.default_rng([*place, 0 if kind is None else 1 + KINDS.index(kind)])
    course = _Course.calm(machines, seconds)
    names = tuple(f"node{n:03d}" for n in range(machines))
    harmless = _harmless(rng, course, restless)
    faults: tuple[Planted, ...] = ()
    if kind is not None:
        row, start = int(rng.integers(machines)), int(seconds * rng.uniform(0.4, 0.55))
        course.do(rng, kind, row, start, seconds, 1.0)
        later = _followers(rng, course, row, start) if kind == "order" else []
        faults = (
            Planted(
                names[row],
                kind,
                EPOCH + start,
                EPOCH + seconds,
                tuple((names[n], float(delay)) for n, delay in later),
            ),
        )
    values = BACKGROUNDS[background](rng, course)
    values_CNT = np.stack([values[m] for m in sorted(METRICS)]).astype(np.float32)
    told = tuple(
        (what, "" if row is None else names[row], EPOCH + a, EPOCH + b)
        for what, row, a, b in harmless
    )
    grid = Grid(EPOCH, 1, values_CNT, names, tuple(sorted(METRICS)))
    return Scene(background, grid, faults, told)


def scenes(
    background: str, counts: Mapping[Kind | None, int], machines: Sequence[int], seed: int
) -> Iterator[Scene]:
    """Yields scenes of each kind, None for healthy ones; sizes take turns. See `scene`."""
    for kind, count in counts.items():
        for k in range(count):
            yield scene(background, machines[k % len(machines)], 1000 * seed + k, kind)


def _followers(
    rng: np.random.Generator, course: _Course, row: int, start: int
) -> list[tuple[int, int]]:
    """Makes neighbours show the fault of a machine later; returns (machine, seconds later)."""
    N, T = course.late_NT.shape
    count = int(rng.integers(1, max(2, N // 3) + 1))
    rows = [(row + k) % N for k in range(1, count + 1)]
    delay, followers = 0.0, []
    for neighbour in rows:
        delay += float(rng.uniform(6, 40)) if not followers else float(rng.uniform(0, 15))
        begin = start + round(delay)
        if begin < T:
            course.do(rng, "order", neighbour, begin, T, float(rng.uniform(0.6, 1.1)))
            followers.append((neighbour, round(delay)))
    return followers


def _harmless(
    rng: np.random.Generator, course: _Course, restless: float
) -> list[tuple[str, int | None, int, int]]:
    """Applies disturbances that are no fault; returns (kind, machine, start, end)."""
    N, T = course.late_NT.shape
    events: list[tuple[str, int | None, int, int]] = []
    for _ in range(rng.poisson(restless * T / 900)):  # the whole job
        start = int(rng.integers(T))
        what = ("stall", "slow", "packets", "restart")[rng.integers(4)]
        end = min(
            T,
            start
            + int(
                rng.uniform(
                    *{
                        "stall": (10, 60),
                        "slow": (200, 900),
                        "packets": (30, 400),
                        "restart": (60, 120),
                    }[what]
                )
            ),
        )
        if what == "packets":
            course.more[PFC][:, start:end] += 10 ** rng.uniform(0.2, 0.8)
        else:
            course.work_T[start:end] *= {"stall": 0.1, "slow": rng.uniform(0.6, 0.9)}.get(what, 0.0)
        events.append((what, None, start, end))
    for _ in range(rng.poisson(restless * N * T / 3600 * 0.5)):  # one machine
        kind, row, start = KINDS[rng.integers(4)], int(rng.integers(N)), int(rng.integers(T))
        end = min(T, start + int(np.exp(rng.uniform(np.log(5), np.log(150)))))
        course.do(rng, kind, row, start, end, float(rng.uniform(0.5, 1.0)))
        events.append((kind, row, start, end))
    row = int(rng.integers(N))  # a host that has always been noisier
    for metric in METRICS:
        course.noise[metric][row] *= 1.4
    return events
