"""One simulated job: its Setting, its random numbers, the roles of its machines.

Machines are numbered as Megatron numbers ranks: the tensor group is innermost, then data
parallelism, then the pipeline. Legend: N machines, P stages, K bins of a step.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from megajax.core.errors import UserError, divisors
from megajax.schedule import build, simulator

# ---- what is different between one simulated job and the next
#
# Every default is ASSUMED; what it follows is said beside it. Families of settings, for training,
# validation and held-out cases, are in simulator.py.


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


# ---- random numbers that are a function of (seed, stream, place), whatever was drawn before
#
# Philox is a block cipher of a counter (Salmon et al., SC'11). The key is (seed, stream); three of
# the four words of the counter are the place, for example the number of a minute. The fourth counts
# the draws of one place, so that two places never share a number.


_WORD = 2**64 - 1

# Streams. A metric's own streams are METRIC + its number in faults.METRICS.
LAYOUT, OFFSETS, EVENTS, SHARED, SCRAPES, CASES = range(1, 7)
METRIC = 1 << 20
KNOTS = 12  # (chosen) of a group: with 5 s between them, a minute


def generator(seed: int, stream: int, *place: int) -> np.random.Generator:
    """Returns the generator of one place.

    Args: seed: any integer of at most 64 bits. stream: one of this module's. place: up to three
        integers; negative ones are legal.
    """
    words = [0, *(p & _WORD for p in place)]
    counter = np.array(words + [0] * (4 - len(words)), np.uint64)
    key = np.array([seed & _WORD, stream], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def knots(seed: int, stream: int, first: int, count: int, machines: int) -> np.ndarray:
    """Returns standard normal values, float32 (count, machines): row k belongs to knot first + k.

    Noise with a correlation time of `s` seconds is drawn at every s-th second and interpolated, so
    that it needs no past. Knots are drawn in groups of KNOTS.
    """
    rows = []
    for group in range(first // KNOTS, (first + count - 1) // KNOTS + 1):
        low, high = max(first - group * KNOTS, 0), min(first + count - group * KNOTS, KNOTS)
        drawn = generator(seed, stream, group).standard_normal((high, machines), np.float32)
        rows.append(drawn[low:])
    return np.concatenate(rows)


def interpolated(seed: int, stream: int, spacing: int, second: int, seconds: int, machines: int):
    """Returns correlated noise of unit variance at its knots, float32 (machines, seconds).

    Args: spacing: seconds between knots. second: the first second. seconds: how many.
    """
    first, last = second // spacing, (second + seconds - 1) // spacing + 1
    values = knots(seed, stream, first, last - first + 1, machines).T
    position = np.arange(second, second + seconds)
    left = position // spacing - first
    weight = ((position % spacing) / spacing).astype(np.float32)
    return values[:, left] * (1 - weight) + values[:, left + 1] * weight


# ---- the roles of machines, and what a pipeline stage does during a step


BINS = 256
DEEPEST = 12  # stages at most, as in the 1-trillion-parameter runs of 2021-2024 (8 to 64): ASSUMED


@dataclass(frozen=True)
class Layout:
    """The role of each machine. stages x data x tensor = machines."""

    stages: int
    data: int
    tensor: int
    rack: int

    @property
    def machines(self) -> int:
        """Machines of the job."""
        return self.stages * self.data * self.tensor

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the machines; the sorted order is the order of the numbers."""
        return tuple(f"node{k:05d}" for k in range(self.machines))

    @cached_property
    def stage_N(self) -> np.ndarray:
        """Pipeline stage of each machine, int64."""
        return np.arange(self.machines) // (self.data * self.tensor)

    @cached_property
    def data_N(self) -> np.ndarray:
        """Data-parallel rank of each machine, int64."""
        return np.arange(self.machines) // self.tensor % self.data

    @cached_property
    def tensor_N(self) -> np.ndarray:
        """Place of each machine in its tensor group, int64."""
        return np.arange(self.machines) % self.tensor

    @cached_property
    def rack_N(self) -> np.ndarray:
        """Rack of each machine, int64: neighbours stand together."""
        return np.arange(self.machines) // self.rack

    def peers(self, machine: int) -> list[int]:
        """Returns those that exchange activations with a machine: the other stages of its pipeline
        and its tensor group; where it has neither, its neighbours in data parallelism."""
        same = (self.data_N == self.data_N[machine]) | (
            (self.stage_N == self.stage_N[machine])
            & (np.abs(self.data_N - self.data_N[machine]) <= 1)
            & (self.stages * self.tensor == 1)
        )
        return [int(k) for k in np.flatnonzero(same) if k != machine]


def draw_layout(machines: int, seed: int, setting: Setting) -> Layout:
    """Returns the layout that a setting names, or a drawn one.

    A drawn one has at most 12 stages and, where that is possible, 2 machines in every stage.
    Raises: UserError where the stages and the tensor group do not divide the machines.
    """
    if machines < 1:
        raise UserError(f"machines={machines} must be at least 1; nearest: 1")
    rng = generator(seed, LAYOUT)
    tensor = setting.tensor or (
        2 if machines % 2 == 0 and machines >= 16 and rng.random() < 0.3 else 1
    )
    groups = machines // tensor
    legal = [d for d in divisors(groups) if d <= min(DEEPEST, max(groups // 2, 1))]
    stages = setting.stages or int(rng.choice(legal))
    if stages * tensor * (machines // (stages * tensor)) != machines:
        raise UserError(
            f"stages={stages} x tensor={tensor} must divide machines={machines};"
            f" legal stages with tensor={tensor}: {legal}"
        )
    return Layout(stages, machines // (stages * tensor), tensor, max(1, setting.rack))


def step_profile(stages: int, microbatches: int, exchange: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the cumulated (compute_PK, exchange_PK) of a step, float64 (stages, BINS + 1).

    Column k: the share of the step that a stage has spent so by the time k / BINS. The pipeline is
    1F1B with a backward pass of twice the forward pass (schedule.build), so the bubbles are the
    real ones; then come the gradient exchange and 2 % for the optimizer.
    """
    table = build.one_f_one_b(stages, microbatches)
    timeline = simulator.simulate(table, {"F": 1.0, "B": 2.0})
    optimizer = 0.02
    pipeline = 1 - exchange - optimizer
    edges = np.linspace(0, 1, BINS + 1)
    compute_PK = np.zeros((stages, BINS + 1))
    for span in timeline.spans:
        if span.task.stage >= 0 and span.task.kind in "FBW":
            low, high = (pipeline * t / timeline.end for t in (span.start, span.end))
            compute_PK[span.task.stage] += np.clip(edges - low, 0, high - low)
    compute_PK += np.clip(edges - (1 - optimizer), 0, optimizer)
    # Activations pass between the stages meanwhile: ASSUMED a tenth of the exchange's intensity.
    sent = 0.1 * compute_PK + np.clip(edges - pipeline, 0, exchange)
    return compute_PK, sent
