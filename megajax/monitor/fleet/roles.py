"""Roles of machines, and what a pipeline stage does during a step.

Machines are numbered as Megatron numbers ranks: the tensor group is innermost, then data
parallelism, then the pipeline. Legend: N machines, P stages, K bins of a step.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megajax.core.errors import UserError, divisors
from megajax.monitor.fleet import keyed
from megajax.monitor.fleet.settings import Setting
from megajax.schedule import build, simulator

BINS = 256
DEEPEST = 12  # stages at most, as in the 1-trillion-parameter runs of 2021-2024 (8 to 64): ASSUMED


@dataclass(frozen=True)
class Layout:
    """Who does what. stages x data x tensor = machines."""

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
    rng = keyed.generator(seed, keyed.LAYOUT)
    tensor = setting.tensor or (
        2 if machines % 2 == 0 and machines >= 16 and rng.random() < 0.3 else 1
    )
    rest = machines // tensor
    legal = [d for d in divisors(rest) if d <= min(DEEPEST, max(rest // 2, 1))]
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
