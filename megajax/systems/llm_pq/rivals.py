"""The rivals of LLM-PQ's planner, timed by the same formula and simulator.

'uniform': one width for all layers, and equally many layers on every device. 'pipeedge': one width,
and the partition with the fastest slowest stage of decoding. PipeEdge (DSD 2022) knows one phase
only; LLM-PQ's released code runs it with requests / devices in a micro-batch of both phases.
'pipeedge_tuned': the same with the best micro-batches, which PipeEdge does not search for.
'adabits': the widths with the least loss of quality that fit, and the best micro-batches.
'offload': like FlexGen: an even split at one width; layers that do not fit stay in host memory, and
their weights and cache are read through PCIe for every micro-batch, beside the arithmetic.

"One width" is the highest that fits, as in the released code.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megajax.systems.llm_pq.planning import uniform_bits
from megajax.systems.llm_pq.problem import (
    Problem,
    Stage,
    Times,
    arrange,
    even_split,
    of_stages,
    omega_of,
    partition,
    timed,
    violations,
)
from megajax.systems.llm_pq.solver import least_omega

HOST_BYTES_PER_S = 12.6e9  # (assumed: 0.8 of PCIe 3.0 x16) from host memory to a device


@dataclass(frozen=True)
class Rival:
    """A rival's plan. offloaded: number of layers in host memory; other fields as in Placement."""

    name: str
    stages: tuple[Stage, ...]
    bits: tuple[int, ...]
    prefill_batch: int
    decode_batch: int
    times: Times
    omega: float
    offloaded: int = 0


def rivals(problem: Problem) -> list[Rival]:
    """Returns the rivals that have a plan on this cluster."""
    plans = [uniform(problem), pipeedge(problem), pipeedge(problem, tuned=True), adabits(problem)]
    offloads = [offload(problem, bits) for bits in sorted(problem.bits, reverse=True)]
    return [rival for rival in (*plans, *offloads) if rival is not None]


def pairs(problem: Problem) -> Iterator[tuple[int, int]]:
    """All pairs of micro-batch sizes."""
    return itertools.product(problem.prefill_s, problem.decode_s)


def fixed(problem: Problem) -> tuple[int, int]:
    """Returns requests / devices for both phases, or the next larger size that the problem has."""
    share = -(-problem.requests // problem.devices)
    sizes = sorted(set(problem.prefill_s) & set(problem.decode_s))
    size = next((s for s in sizes if s >= share), sizes[-1])
    return size, size


def _best(problem: Problem, name: str, stages: list[Stage], bits: list[int], options) -> Rival:
    prefill, decode = min(options, key=lambda p: timed(problem, stages, bits, *p).seconds)
    times = timed(problem, stages, bits, prefill, decode)
    omega = omega_of(problem, bits)
    return Rival(name, tuple(stages), tuple(bits), prefill, decode, times, omega)


def uniform(problem: Problem) -> Rival | None:
    """The even split at the highest width that fits, with the best micro-batches."""
    bits = uniform_bits(problem)
    if bits is None:
        return None
    return _best(problem, "uniform", even_split(problem), [bits] * problem.layers, pairs(problem))


def pipeedge(problem: Problem, tuned: bool = False) -> Rival | None:
    """The partition with the fastest slowest decoding stage at the highest width that fits."""
    name = "pipeedge_tuned" if tuned else "pipeedge"
    for column in np.argsort(problem.bits)[::-1].tolist():
        bits = [problem.bits[column]] * problem.layers
        options = []
        # The bottleneck depends on the decoding micro-batch; tuned: whichever is best in the end.
        for pair in pairs(problem) if tuned else [fixed(problem)]:
            stages = partition(problem, column, problem.decode_s[pair[1]][:, column])
            if stages is not None:
                options.append((timed(problem, stages, bits, *pair).seconds, stages, pair))
        if options:
            _, stages, pair = min(options, key=lambda option: option[0])
            return _best(problem, name, stages, bits, [pair])
    return None


def adabits(problem: Problem) -> Rival | None:
    """The least sum of omega that the memory allows, with the best micro-batches."""
    counts, _ = least_omega(problem)
    plan = None if counts is None else arrange(problem, counts)
    return None if plan is None else _best(problem, "adabits", *plan, pairs(problem))


def offload(problem: Problem, bits: int) -> Rival | None:
    """The even split at a width whose layers rest in host memory where they do not fit.

    None: all layers fit, so nothing is offloaded ('uniform' is the rival), or the ends do not.
    """
    stages = even_split(problem)
    widths = [bits] * problem.layers
    if not violations(problem, stages, widths, None):
        return None
    column = problem.bits.index(bits)
    each = problem.layer_bytes[column] + problem.cache_bytes
    away = []
    for k, (d, start, stop) in enumerate(stages):
        room = problem.memory[d] - problem.first_bytes * (k == 0)
        room -= problem.last_bytes * (k == len(stages) - 1)
        if room < each:
            return None  # not even the layer that is being computed
        # One layer's room is for what arrives from the host.
        fits = int(room // each)
        away.append(0 if fits >= stop - start else stop - start - (fits - 1))

    def of_phase(table: np.ndarray, size: int) -> list[float]:
        """Returns the seconds that each stage takes for one micro-batch of `size` requests.

        While a stage computes its layers, it copies those that rest in host memory, each with its
        part of the cache, so the longer of the two times counts. table: seconds of one layer in
        this phase, (devices, widths).
        """
        share = min(size / problem.requests, 1.0)
        loaded = problem.layer_bytes[column] + problem.cache_bytes * share
        return [
            max(table[d, column] * (stop - start), gone * loaded / HOST_BYTES_PER_S)
            for (d, start, stop), gone in zip(stages, away, strict=True)
        ]

    tried = []
    for prefill, decode in pairs(problem):
        before, after = (
            of_phase(problem.prefill_s[prefill], prefill),
            of_phase(problem.decode_s[decode], decode),
        )
        times = of_stages(problem, before, after, prefill, decode)
        tried.append((times.seconds, prefill, decode, times))
    _, prefill, decode, times = min(tried, key=lambda option: option[0])
    return Rival(
        f"offload_{bits}",
        tuple(stages),
        tuple(widths),
        prefill,
        decode,
        times,
        omega_of(problem, widths),
        sum(away),
    )
