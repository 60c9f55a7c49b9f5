"""How many tokens a second an engine can serve on given hardware: ESTIMATES of the cost model.

A replica is one engine on the ranks of `tensor`; the other GPUs of a cluster hold more replicas. A
decode step reads the weights once and the keys and values of every sequence, so it is bound by
memory until the batch is large; a prefill is bound by arithmetic. Weights rest in the compute type,
and pages fill the memory that they leave (megajax/serving/engine.py). The host's work is not
counted. Sources: the operations and links of megajax/cost; PagedAttention (arXiv 2309.06180).
"""

import dataclasses
from collections.abc import Callable

from megajax.core.axes import MESH_AXES
from megajax.core.errors import UserError
from megajax.core.hardware import Cluster
from megajax.cost import memory
from megajax.cost.base import CostModel, Phase, Workload
from megajax.cost.estimate import Estimate, estimate
from megajax.cost.roofline import Roofline
from megajax.cost.step import StepShape
from megajax.cost.traffic import transfers

# (rows, tokens of a row, phase) -> the forward pass of the model.
LoadOf = Callable[[int, int, Phase], Workload]


@dataclasses.dataclass(frozen=True)
class Rate:
    """The speed of one replica that serves `batch` sequences at a time.

    decode_s: seconds of a decode step, which gives each sequence a token. first_token_s: seconds of
    the prefill of one prompt of half the context, without other work. tokens_per_s: tokens that
    decode steps alone give in a second. served_per_s: tokens of answers a second if prompt and
    answer have half the context each and the prefills take their time. needed: bytes that a GPU
    holds. bound_s: the memory roofline of a decode step, in which weights, pages and activations
    move at the card's bandwidth.
    """

    batch: int
    decode_s: float
    first_token_s: float
    tokens_per_s: float
    served_per_s: float
    needed: float
    bound_s: float


@dataclasses.dataclass(frozen=True)
class Serving:
    """The plan of a cluster. largest: sequences of a replica whose pages fit; 0: not one."""

    context: int
    tensor: int
    replicas: int
    largest: int
    weight_bytes: float  # of a GPU
    token_bytes: float  # of a GPU, keys and values of one token
    rates: tuple[Rate, ...]


def plan(
    load_of: LoadOf,
    cluster: Cluster,
    *,
    tensor: int,
    context: int,
    room: float,
    model: CostModel = Roofline(),
) -> Serving:
    """Returns the rates of batches of powers of two up to the largest one that fits.

    Args: tensor: GPUs of a replica. context: tokens of every sequence, prompt and answer. room:
      bytes of a GPU that weights, pages and the working set may fill.
    Raises: UserError for a tensor that does not divide the cluster or a context below 2.
    """
    gpus = cluster.devices
    if tensor < 1 or gpus % tensor:
        raise UserError(f"mesh.tensor={tensor} must divide the {gpus} GPUs (--mesh.tensor)")
    if context < 2:
        raise UserError(f"train.seq_len={context} must be at least 2 (--train.seq_len)")
    sizes = dict.fromkeys(MESH_AXES, 1) | {"tensor": tensor}

    def step(rows: int, tokens: int, phase: Phase) -> StepShape:
        return StepShape(load_of(rows, tokens, phase), sizes, (), fused_attention=True)

    def timed(shape: StepShape) -> Estimate:
        return estimate(shape, cluster, transfers(shape), model)

    prefill = timed(step(1, max(context // 2, 1), "prefill")).step_s

    def rate(batch: int) -> Rate:
        shape = step(batch, context, "decode")
        decode = timed(shape).step_s
        answer = context - context // 2
        return Rate(
            batch,
            decode,
            prefill,
            batch / decode,
            answer * batch / (answer * decode + batch * prefill),
            memory.bound(memory.terms(shape)),
            _bound(shape, cluster),
        )

    one, two = (memory.terms(step(n, context, "decode")) for n in (1, 2))

    def fits(batch: int) -> bool:
        return memory.bound(memory.terms(step(batch, context, "decode"))) <= room

    # Memory grows with the batch, so the largest that fits is searched for by halves.
    largest, high = 0, 1
    while fits(high):
        largest, high = high, 2 * high
    while high - largest > 1:
        middle = (largest + high) // 2
        largest, high = (middle, high) if fits(middle) else (largest, middle)
    batches = [n for n in (1, 4, 16, 64, 256, 1024) if n < largest]
    batches += [largest] if largest else []
    return Serving(
        context,
        tensor,
        gpus // tensor,
        largest,
        one["parameters"],
        (two["cache"] - one["cache"]) / context,
        tuple(map(rate, batches)),
    )


def decode_bound(load_of: LoadOf, cluster: Cluster, batch: int, context: int) -> float:
    """Returns the memory roofline of a decode step on one GPU, seconds: Rate.bound_s."""
    shape = StepShape(load_of(batch, context, "decode"), dict.fromkeys(MESH_AXES, 1), ())
    return _bound(dataclasses.replace(shape, fused_attention=True), cluster)


def _bound(shape: StepShape, cluster: Cluster) -> float:
    ops = (op for op in shape.forward.ops if op.part != "embedding")
    return sum(op.nbytes * op.count for op in ops) / cluster.card.memory_bytes_per_s
