"""LLM-PQ's planner from end to end: a workload and a cluster become a placement.

The shared cost model gives the seconds and bytes of the problem (problem.py), solver.py solves it.
The presets are the clusters and models of the paper (arXiv 2403.01136).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, ETHERNET, Cluster, DeviceCard, MixedCluster
from megajax.cost.base import CostModel, Op, Stack
from megajax.cost.kernels import Matmul, Rowwise
from megajax.cost.roofline import Roofline
from megajax.systems.llm_pq.problem import (
    Placement,
    Problem,
    check_count,
    even_split,
    held,
    omega_of,
)
from megajax.systems.llm_pq.solver import Solver, solve

# ---- costs of a workload
#
# Seconds and bytes of the problem: ESTIMATES of the cost model, no measurements.
#
# The time of a layer depends on device, width, phase, micro-batch and context. LLM-PQ (arXiv
# 2403.01136) fits linear models to profiles of them; here any CostModel gives the times. A product
# with at most FUSED_ROWS rows reads the packed weight and dequantizes it in registers. A product
# with more rows first dequantizes the weight in a separate pass and then multiplies in float16, as
# the paper's kernels do. Decoding is timed at the mean context: prompt + half of the new tokens.
#
# Not counted are the times of embedding and head (Problem has no place for them; the head of
# BLOOM-176B has the weights of 1.5 of its layers), the bytes of norms and biases, and the host.


FUSED_ROWS = 64  # rows up to which a product is memory bound on every card: decoding's kernel
GROUP = 128  # weights that share a scale of 16 bits
USABLE, CONTEXT_BYTES = 0.95, 1.93e9  # of a device: released code of LLM-PQ (CUDA and temporaries)
WIDTHS = (3, 4, 8, 16)  # released code of LLM-PQ; 2 bits were dropped for their accuracy
DTYPE = "float16"  # V100, T4 and P100 compute no bfloat16


@dataclass(frozen=True, eq=False)
class Workload:
    """A model and the requests that it answers, all known in advance (offline serving).

    name: that of the model. stack: the shapes of its layers. vocab: rows of the embedding, which
    the first stage holds, and of the head, which the last stage holds (both hold a copy if they are
    tied, since a stage cannot read another's table). positions: rows of a learned table of
    positions. prompt, new_tokens: tokens of each request. requests: their number. bits: widths that
    a layer may have. omega: (layers, widths) loss of quality; None: `assumed_omega`.
    """

    name: str
    stack: Stack
    vocab: int
    positions: int = 0
    prompt: int = 512
    new_tokens: int = 100
    requests: int = 32
    bits: tuple[int, ...] = WIDTHS
    omega: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Raises: UserError for widths without a kernel, and counts that are none."""
        for name in ("vocab", "prompt", "new_tokens", "requests"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if self.positions != 0:
            check_count("positions, where they are not 0,", self.positions)
        if unknown := set(self.bits) - set(WIDTHS):
            raise UserError(f"bits={min(unknown)} must be of {WIDTHS} (--bits)")


def assumed_omega(layers: int, bits: Sequence[int], seed: int = 0) -> np.ndarray:
    """Returns an ASSUMED loss of quality, (layers, widths), which nobody measured.

    By width it follows the paper's indicator, the square of the step, 1 / (2^(b - 1) - 1)^2, and is
    0 at 16 bits. The weight of each layer is DRAWN (gamma, shape 2, falling to 0.6 with depth). If
    all layers have 4 bits, the sum is 1. Give `Workload` the losses of a real model instead.
    """
    rng = np.random.default_rng(seed)
    counts_L = rng.gamma(2.0, 1.0, layers) * np.linspace(1.0, 0.6, layers)
    step_B = np.array([0.0 if b >= 16 else 1 / (2 ** (b - 1) - 1) ** 2 for b in bits])
    return counts_L[:, None] / counts_L.sum() * step_B * 49  # 4 bits: (2^3 - 1)^2


def layer_s(
    stack: Stack,
    device: DeviceCard,
    bits: int,
    rows: int,
    queries: int,
    keys: int,
    model: CostModel = Roofline(),
) -> float:
    """Returns the estimated seconds of one layer for one micro-batch.

    Args: bits: the width of the layer's weights. rows: requests of the micro-batch. queries: tokens
      of each request: the prompt, or 1 in decoding. keys: tokens that they attend to, with
      themselves.
    """
    seconds = 0.0
    for op in _ops(stack, rows, queries, keys):
        extra = 0.0
        if bits < 16 and isinstance(op.kernel, Matmul):
            packed = f"int{bits}/{GROUP}"
            if op.kernel.m <= FUSED_ROWS:
                op = dataclasses.replace(op, dtypes=(DTYPE, packed, DTYPE))
            else:
                unpacking = Rowwise("dequantize", op.kernel.k, op.kernel.n)
                extra = model.op_time(Op(op.part, unpacking, dtypes=(packed, DTYPE)), device)[0]
        seconds += op.count * (model.op_time(op, device)[0] + extra)
    return seconds


@functools.cache
def _ops(stack: Stack, rows: int, queries: int, keys: int) -> tuple[Op, ...]:
    return dataclasses.replace(stack, layers=1).ops(rows, queries, keys, DTYPE)


def layer_params(stack: Stack) -> float:
    """Returns the elements of the matrices of a layer."""
    return sum(op.params for op in _ops(stack, 1, 1, 1))


def micro_batches(requests: int, devices: int) -> list[int]:
    """Returns the sizes that are tried: powers of two, all requests, requests / devices."""
    powers = {2**k for k in range(requests.bit_length()) if 2**k <= requests}
    return sorted(powers | {requests, math.ceil(requests / devices)})


def problem_of(
    workload: Workload, cluster: MixedCluster | Cluster, model: CostModel = Roofline()
) -> Problem:
    """Returns the planning problem of a workload on a cluster, with estimated seconds and bytes.

    Args: cluster: every GPU of a Cluster may be a stage, and its slowest link joins them. model:
      gives the times.
    """
    if isinstance(cluster, Cluster):
        link = cluster.between if cluster.hosts > 1 else cluster.inside
        cluster = MixedCluster((cluster.card,) * cluster.devices, link)
    stack, bits, w = workload.stack, workload.bits, workload
    sizes = micro_batches(w.requests, cluster.devices)
    context = w.prompt + max(w.new_tokens // 2, 1)

    def table(rows: int, queries: int, keys: int) -> np.ndarray:
        known: dict[tuple[str, float, float], list[float]] = {}
        for card in cluster.cards:
            key = (card.name, card.memory_bytes_per_s, card.peak(DTYPE))
            if key not in known:
                known[key] = [layer_s(stack, card, b, rows, queries, keys, model) for b in bits]
        return np.array([known[c.name, c.memory_bytes_per_s, c.peak(DTYPE)] for c in cluster.cards])

    def hop(rows: int, queries: int) -> float:
        return model.transfer_time(rows * queries * stack.width * 2, cluster.link)

    bytes_B = [b / 8 + (2 / GROUP if b < 16 else 0) for b in bits]
    tokens = w.requests * (w.prompt + w.new_tokens)
    omega = w.omega if w.omega is not None else assumed_omega(stack.layers, bits)
    return Problem(
        bits=bits,
        omega=omega,
        prefill_s={n: table(n, w.prompt, w.prompt) for n in sizes},
        decode_s={n: table(n, 1, context) for n in sizes},
        prefill_hop_s={n: hop(n, w.prompt) for n in sizes},
        decode_hop_s={n: hop(n, 1) for n in sizes},
        layer_bytes=layer_params(stack) * np.array(bytes_B),
        cache_bytes=tokens * 2 * stack.kv_heads * stack.head_width * 2,
        first_bytes=(w.vocab + w.positions) * stack.width * 2,
        last_bytes=w.vocab * stack.width * 2,
        memory=np.array([max(USABLE * c.memory_bytes - CONTEXT_BYTES, 0) for c in cluster.cards]),
        requests=w.requests,
        new_tokens=w.new_tokens,
    )


# ---- plan


def uniform_bits(problem: Problem) -> int | None:
    """Returns the largest number of bits with which an even split of the layers fits, or None."""
    stages = even_split(problem)
    for bits in sorted(problem.bits, reverse=True):
        need = held(problem, stages, [bits] * problem.layers)
        rooms = (problem.memory[d] for d, _, _ in stages)
        if all(n <= room * (1 + 1e-9) for n, room in zip(need, rooms, strict=True)):
            return bits
    return None


def equal_quality(problem: Problem) -> float:
    """Returns the sum of omega if all layers have the bits of `uniform_bits`.

    If no width fits, it is the sum at the lowest width.
    """
    bits = uniform_bits(problem)
    return omega_of(problem, [min(problem.bits) if bits is None else bits] * problem.layers)


def plan(
    workload: Workload,
    cluster: MixedCluster | Cluster,
    *,
    quality: Literal["equal"] | float | None = "equal",
    solver: Solver = "exact",
    time_limit_s: float = 60,
    model: CostModel = Roofline(),
) -> Placement:
    """Returns the placement with the most tokens a second.

    Args: quality: bound on the loss of quality, the sum of omega; 'equal': `equal_quality`; None:
      no bound. solver, time_limit_s: as in `solve`. model: gives the times; the default has assumed
      efficiencies.
    Raises: UserError as `solve`, and for a workload or a cluster of another type.
    """
    if not isinstance(workload, Workload):
        raise UserError(f"plan: workload must be an llm_pq.Workload, got {_named(workload)}")
    if not isinstance(cluster, MixedCluster | Cluster):
        raise UserError(
            "plan: cluster must be a MixedCluster or a Cluster of megajax.core.hardware, got "
            f"{_named(cluster)}; parse_mixed('t4:3,v100:1') of that module makes one"
        )
    problem = problem_of(workload, cluster, model)
    if isinstance(quality, str):
        if quality != "equal":
            raise UserError(f"quality={quality} must be 'equal', a number, or None (--quality)")
        quality = equal_quality(problem)
    return solve(problem, quality=quality, solver=solver, time_limit_s=time_limit_s)


def _named(value: Any) -> str:
    """Returns a value of the wrong type for a message: its text if that is short, and its type."""
    if value is None:
        return "None"
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, str | int | float) else f"a {kind}"


# ---- presets
#
# The eleven clusters and models of LLM-PQ (table of clusters; released scripts). 32 requests of 512
# tokens, 100 new ones each: the released defaults. The paper's clusters have one host for each kind
# of GPU; that all stages talk over 100 Gbit/s Ethernet is ASSUMED.


class Preset(NamedTuple):
    """A model with its requests, and the devices that serve it."""

    workload: Workload
    cluster: MixedCluster


def _stack(layers: int, width: int, heads: int) -> Stack:
    return Stack(layers, width, heads, heads, width // heads, 4 * width)


# OPT (arXiv 2205.01068, table 1), BLOOM (arXiv 2211.05100, table 3). OPT's positions: 2048 + 2.
OPT_13B = Workload("OPT-13B", _stack(40, 5120, 40), 50272, 2050)
OPT_30B = Workload("OPT-30B", _stack(48, 7168, 56), 50272, 2050)
OPT_66B = Workload("OPT-66B", _stack(64, 9216, 72), 50272, 2050)
BLOOM_176B = Workload("BLOOM-176B", _stack(70, 14336, 112), 250880)

# The smaller GPUs of a name, from the same datasheets as their cards.
A100_40 = dataclasses.replace(
    CARDS["A100"], name="A100-40", memory_bytes=40 * 10**9, memory_bytes_per_s=1.555e12
)
P100_12 = dataclasses.replace(
    CARDS["P100"],
    name="P100-12",
    memory_bytes=12 * 10**9,
    memory_bytes_per_s=549e9,
    flops={"float32": 9.3e12, "float16": 18.7e12},
    link_bytes_per_s=16e9,
)
V100, T4, A100 = CARDS["V100"], CARDS["T4"], CARDS["A100"]


def _case(workload: Workload, *kinds) -> Preset:
    cards = tuple(card for count, card in kinds for _ in range(count))
    return Preset(workload, MixedCluster(cards, ETHERNET))


PRESETS = {
    "case1": _case(OPT_13B, (1, V100)),
    "case2": _case(OPT_13B, (1, A100_40)),
    "case3": _case(OPT_30B, (3, T4), (1, V100)),
    "case4": _case(OPT_30B, (3, P100_12), (1, V100)),
    "case5": _case(OPT_66B, (4, T4), (2, V100)),
    "case6": _case(OPT_66B, (2, V100), (2, A100_40)),
    "case7": _case(BLOOM_176B, (4, V100), (4, A100_40)),
    "case8": _case(BLOOM_176B, (4, V100), (2, A100)),
    "case9": _case(OPT_30B, (4, T4)),
    "case10": _case(OPT_66B, (4, V100)),
    "case11": _case(BLOOM_176B, (4, A100)),
}
