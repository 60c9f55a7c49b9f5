"""Seconds and bytes of LLM-PQ's problem from the shared cost model: ESTIMATES, no measurements.

The time of a layer depends on device, width, phase, micro-batch and context. LLM-PQ (arXiv
2403.01136) fits linear models to profiles of them; here any CostModel gives the times. A product
with at most FUSED_ROWS rows reads the packed weight and dequantizes it in registers. A product with
more rows first dequantizes the weight in a separate pass and then multiplies in float16, as the
paper's kernels do. Decoding is timed at the mean context: prompt + half of the new tokens.

Not counted are the times of embedding and head (Problem has no place for them; the head of
BLOOM-176B has the weights of 1.5 of its layers), the bytes of norms and biases, and the host.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megajax.core.errors import UserError
from megajax.core.hardware import Cluster, DeviceCard, MixedCluster
from megajax.cost.base import CostModel, Op, Stack
from megajax.cost.kernels import Matmul, Rowwise
from megajax.cost.roofline import Roofline
from megajax.systems.llm_pq.problem import Problem, whole

FUSED_ROWS = 64  # rows up to which a product is memory bound on every card: decoding's kernel
GROUP = 128  # weights that share a scale of 16 bits
USABLE, CONTEXT_BYTES = 0.95, 1.93e9  # of a device: released code of LLM-PQ (CUDA and temporaries)
WIDTHS = (3, 4, 8, 16)  # released code of LLM-PQ; 2 bits were dropped for their accuracy
DTYPE = "float16"  # V100, T4 and P100 compute no bfloat16


@dataclass(frozen=True, eq=False)
class Workload:
    """A model and the requests that it answers, all known in advance (offline serving).

    name: of the model. stack: shapes of its layers. vocab: rows of the embedding, which the first
    stage holds, and of the head, which the last stage holds (both hold a copy if they are tied,
    since a stage cannot read another's table). positions: rows of a learned table of positions.
    prompt, new_tokens: tokens of each request. requests: their number. bits: widths that a layer
    may have. omega: (layers, widths) loss of quality; None: `assumed_omega`.
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
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if self.positions != 0:
            whole("positions, where they are not 0,", self.positions)
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
    stack: Stack, device: DeviceCard, bits: int, rows: int, queries: int, keys: int,
    model: CostModel = Roofline(),
) -> float:  # fmt: skip
    """Returns the estimated seconds of one layer for one micro-batch.

    Args: bits: of the layer's weights. rows: requests of the micro-batch. queries: tokens of each
      request: the prompt, or 1 in decoding. keys: tokens that they attend to, with themselves.
    """
    seconds = 0.0
    for op in _ops(stack, rows, queries, keys):
        extra = 0.0
        if bits < 16 and isinstance(op.kernel, Matmul):
            packed = f"int{bits}/{GROUP}"
            if op.kernel.m <= FUSED_ROWS:
                op = dataclasses.replace(op, dtypes=(DTYPE, packed, DTYPE))
            else:
                whole = Rowwise("dequantize", op.kernel.k, op.kernel.n)
                extra = model.op_time(Op(op.part, whole, dtypes=(packed, DTYPE)), device)[0]
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
