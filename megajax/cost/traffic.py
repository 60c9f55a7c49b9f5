"""Lists the collectives of a step from the sizes of its workload and mesh, without compiling it.

The list mirrors parallel/tensor.py, expert.py, context.py, tick.py and models/parts.py; tests
compare it with compiled H100 programs. Weights are sent in the compute dtype. Sequence parallelism
gathers and scatters the residual stream around every sublayer, or once around a block whose
attention and feed-forward layer are parallel (MegaScale section 3.1). The idle ticks of a pipeline
send, too, as its program does.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

from megajax.core.axes import MESH_AXES, ZERO_AXES
from megajax.cost import exchange
from megajax.cost.flops import block_flops_per_token
from megajax.cost.memory import MASTER, expert_weights, layer_weights, residual, slotted
from megajax.cost.step import StepShape


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One kind of collective of a step.

    nbytes: on one device in one execution, of the operand or the result, whichever is larger.
    flops_beside: of the matrix products that run at the same time on one device. what: the array
    that is sent.
    """

    kind: str
    axes: tuple[str, ...]
    nbytes: float
    executions: float
    flops_beside: float
    what: str

    @property
    def total(self) -> float:
        """Bytes of all executions."""
        return self.nbytes * self.executions


@dataclasses.dataclass(frozen=True)
class Overlap:
    """How much of a block's matmuls runs beside each kind of transfer, 0..1.

    Nothing by default. data: weight gathers and gradient scatters; tensor: of the residual stream;
    pipe: sends to the next stage (MegaScale section 3.2 hides all three).
    """

    data: float = 0.0
    tensor: float = 0.0
    pipe: float = 0.0


def members(axes: tuple[str, ...], sizes: Mapping[str, int]) -> list[int]:
    """Returns the device numbers of the first group along these axes."""
    strides, stride = {}, 1
    for axis in reversed(MESH_AXES):
        strides[axis] = stride
        stride *= sizes.get(axis, 1)
    steps = [range(0, sizes.get(a, 1) * strides[a], strides[a]) for a in MESH_AXES if a in axes]
    return [sum(place) for place in itertools.product(*steps)]


def transfers(step: StepShape, overlap: Overlap = Overlap()) -> list[Transfer]:
    """Returns the collectives of one step above the size of norms and scalars."""
    if not step.trains:
        return [t for t in _generation(step) if t.total and step.ways(*t.axes) > 1]
    found = [
        *_weights(step, overlap), *_residuals(step, overlap), *_keys(step), *_experts(step),
        *_stages(step, overlap), _shared_heads(step),
    ]  # fmt: skip
    return [t for t in found if t.nbytes * t.executions and step.ways(*t.axes) > 1]


def _layer_flops(step: StepShape) -> float:
    """Forward FLOPs of one layer of one micro-batch on one device."""
    return step.tokens * block_flops_per_token(step.used) / step.load.layers / step.ways("tensor")


def _live(step: StepShape, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in axes if step.ways(a) > 1)


def _weights(step: StepShape, overlap: Overlap) -> list[Transfer]:
    """Weights into use and gradients home."""
    if step.exchanges:
        return _exchanged(step, overlap)
    load, pipeline = step.load, step.pipeline
    piped = pipeline.stages > 1
    again = 1 if piped or step.remat == "none" else 2  # gathered again in the backward pass
    beside = overlap.data * _layer_flops(step)
    layers = (
        step.stored_layers,
        again,
        pipeline.ticks["W" if pipeline.is_split else "B"] / pipeline.chunks,
    )
    # Embedding and head meet each micro-batch both, also where they are one table.
    params = load.table_params if piped else load.used_table_params
    tables = step.itemsize * params / step.ways("tensor", "pipe")
    times = 1, 1, step.micro_steps * load.used_table_params / max(params, 1)
    dense = step.zero_axes, ZERO_AXES
    routed = step.expert_zero_axes, tuple(a for a in ZERO_AXES if a != "expert")
    found = _matrices(step, "embedding and head", tables, dense, times, 0.0)
    shares = [(1.0, beside, 0.0)]
    if piped and pipeline.hides:  # while the stages take turns on one chunk, another's travel
        first, window = 1 / pipeline.chunks, pipeline.stages * _layer_flops(step)
        shares = [(first, beside, 0.0), (1 - first, max(beside, window), window)]
    for share, dense_beside, expert_beside in shares:
        cut = share * layers[0], *layers[1:]
        found += _matrices(step, "layer", layer_weights(step), dense, cut, dense_beside)
        found += _matrices(step, "expert", expert_weights(step), routed, cut, expert_beside)
    return found


def _exchanged(step: StepShape, overlap: Overlap) -> list[Transfer]:
    """A layer's weights and gradients travel beside other layers, if not all do at once."""
    by_layer = step.streams or not step.resident
    beside = overlap.data * _layer_flops(step) if by_layer else 0.0
    found = []
    for m in exchange.messages(step):
        ours = 0.0 if m.bucket.is_table else beside if m.level == "weights" else 2 * beside
        what = f"{m.bucket.what} {m.level}"
        found.append(Transfer(m.kind, m.axes, m.nbytes, m.count, ours, what))
    return found


def _matrices(
    step: StepShape,
    what: str,
    nbytes: float,
    axes: tuple[tuple[str, ...], tuple[str, ...]],
    times: tuple[float, float, float],
    beside: float,
) -> list[Transfer]:
    """Returns the transfers of some weight matrices and of their gradients.

    Weights are gathered and gradients scattered over the axes that shard the matrices; over other
    axes, on which the matrices have copies, the shards of the gradients are summed. A pipeline
    gathers weights once a step. It scatters gradients either in every tick, those of one
    micro-batch, or at the end of the step, as float32 sums; copies are summed at the end.
    Args: axes: those that shard the matrices at rest, and those over which their gradients are
      partial sums. times: the number of matrices, gathers of each, and scatters of each in a
      pipeline's ticks. beside: FLOPs that run at the same time.
    """
    (rests, partial), (count, gathers, ticks) = axes, times
    cut = _live(step, rests)
    copied = _live(step, tuple(a for a in partial if a not in rests))
    in_ticks = step.pipeline.stages > 1 and not step.local_gradients  # scattered, hidden by nothing
    count, once, home, wide = count * step.accumulate, 1.0, nbytes, nbytes
    if step.pipeline.stages > 1:
        wide = nbytes * MASTER / step.itemsize
        once, home = (ticks, nbytes) if in_ticks else (1.0, wide)
    grads = f"{what} gradients"
    return [
        Transfer("all-gather", cut, nbytes, gathers * count, beside, f"{what} weights"),
        Transfer("reduce-scatter", cut, home, once * count, 0 if in_ticks else 2 * beside, grads),
        Transfer("all-reduce", copied, wide / step.ways(*cut), count, beside, grads),
    ]


def _shared_heads(step: StepShape) -> Transfer:
    """Gradients of key-value heads that several tensor ranks use, on the shard; none otherwise."""
    load, pieces = step.load, step.accumulate if step.pipeline.stages == 1 else 1
    one = MASTER * load.kv_params / load.stored_layers / step.ways(*step.zero_axes)
    times = step.stored_layers * pieces if step.kv_copies > 1 else 0
    return Transfer("all-reduce", ("tensor",), one, times, 0.0, "shared key-value gradients")


def _residuals(step: StepShape, overlap: Overlap) -> list[Transfer]:
    whole = residual(step) * step.ways("tensor")
    sublayers = step.load.gathers
    again = 0 if step.remat == "none" else sublayers
    # A stage's `dots` keep one rank's sums, else what all ranks' add up to (models/parts.py).
    again_for = ("full", "dots") if step.pipeline.stages > 1 else ("full",)
    remade = 1 if step.remat in again_for and sublayers > 1 else 0
    beside = overlap.tensor * _layer_flops(step) / sublayers
    axes, pieces = ("tensor",), step.micro_steps
    # Embedding and head: a scatter and a gather forward, their mirrors backward.
    return [
        Transfer(
            "all-gather", axes, whole, step.executions(sublayers, sublayers + again), beside,
            "residual stream",
        ),
        Transfer(
            "reduce-scatter", axes, whole, step.executions(sublayers, sublayers + remade), beside,
            "residual stream",
        ),
        Transfer("all-gather", axes, whole, 2 * pieces, 0.0, "embedding and head"),
        Transfer("reduce-scatter", axes, whole, 2 * pieces, 0.0, "embedding and head"),
        # The softmax over a cut vocabulary: small, but waited for. Two arrays forward, and again
        # where the logits are cut into chunks, and one backward.
        Transfer(
            "all-reduce", _live(step, ("pipe", "tensor")), 4 * step.tokens / step.loss_chunks,
            (3 + 2 * (step.loss_chunks > 1)) * step.loss_chunks * pieces, 0.0, "softmax sums",
        ),
    ]  # fmt: skip


def _generation(step: StepShape) -> list[Transfer]:
    """A forward pass whose residual stream is whole over tensor (serving/forward.py). Experts are
    taken as training exchanges them; an engine adds up all ranks' parts instead."""
    load, axes = step.load, ("tensor",)
    stream = step.itemsize * step.tokens * load.width
    logits = 4 * load.scores / step.pieces
    dense, routed = _live(step, step.zero_axes), _live(step, step.expert_zero_axes)
    tables = step.itemsize * load.used_table_params / step.ways("tensor")
    sums = step.executions(load.gathers, 0) + 1  # and one of the embedding
    layers = step.stored_layers
    return [
        Transfer("all-gather", dense, layer_weights(step), layers, 0.0, "layer weights"),
        Transfer("all-gather", routed, expert_weights(step), layers, 0.0, "expert weights"),
        Transfer("all-gather", dense, tables, 1, 0.0, "embedding and head weights"),
        Transfer("all-reduce", axes, stream, sums, 0.0, "residual stream"),
        Transfer("all-gather", axes, logits, 1, 0.0, "logits"),
        *_experts(step),
    ]


def _stages(step: StepShape, overlap: Overlap) -> list[Transfer]:
    """A pipeline's sends in every tick, and the vocabulary that its stages share."""
    pipeline, pipe, stream = step.pipeline, ("pipe",), residual(step)
    sends = pipeline.ticks["F"] + pipeline.ticks["B"]
    beside = overlap.pipe * _layer_flops(step) * step.layers / pipeline.chunks
    whole = stream * step.ways("tensor")
    return [
        Transfer("collective-permute", pipe, stream, sends, beside, "residual stream"),
        Transfer("all-reduce", pipe, stream, 2 * step.micro_steps, 0.0, "head"),
        Transfer("all-reduce", pipe, whole, 2 * step.micro_steps, 0.0, "embedding"),
    ]


def _keys(step: StepShape) -> list[Transfer]:
    """Context parallelism: keys and values meet all queries, forward and again backward."""
    ways, axes = step.ways("context"), ("context",)
    cut = step.itemsize * step.rows * step.load.seq_len / step.ways("tensor")
    again = 0 if step.remat == "none" else 1
    if step.context == "ring":
        # Each device sends its keys and values around the ring, and in the backward pass their
        # gradients after them, in float32. remat='outputs' keeps the result, so that the forward
        # hops are not repeated.
        own = 2 * cut * step.used.kv_width / ways
        hops = ways - 1
        remade = hops if step.remat in ("full", "dots") else 0
        return [
            Transfer(
                "collective-permute", axes, own, step.executions(hops, hops + remade), 0.0,
                "keys and values",
            ),
            Transfer(
                "collective-permute", axes, own * MASTER / step.itemsize,
                step.executions(0, ways), 0.0, "gradients of keys and values",
            ),
        ]  # fmt: skip
    if step.context == "ulysses":
        queries = cut * step.load.attention_width / ways
        keys = cut * step.used.kv_width / ways
        found = step.used.attention
        heads = int(found.kv_heads) // step.ways("tensor") if found else 1
        keys *= ways // math.gcd(ways, heads)  # repeated if too few
        both_ways = step.executions(2, 2 + 2 * again)
        return [
            Transfer("all-to-all", axes, queries, both_ways, 0.0, "queries and results"),
            Transfer("all-to-all", axes, keys, both_ways, 0.0, "keys and values"),
        ]
    both = 2 * cut * step.used.kv_width
    return [
        Transfer("all-gather", axes, both, step.executions(1, again), 0.0, "keys and values"),
        Transfer(
            "reduce-scatter", axes, both, step.executions(0, 1), 0.0, "gradients of keys and values"
        ),
    ]


def _experts(step: StepShape) -> list[Transfer]:
    """Returns the transfers around routed experts (parallel/expert.py), their routing included.

    Over `tensor`, tokens are gathered and the sums of their results scattered. Over `expert`, the
    same is done for dropless experts; with a fixed capacity, an all-to-all sends slots to their
    experts and back.
    """
    routed = step.load.routed
    if routed is None:
        return []
    again = 0 if step.remat == "none" else 1
    tokens = residual(step) * step.ways("tensor")
    routing = 4 * step.tokens * routed.top_k  # int32 experts, float32 weights: one array each
    tensor, expert = ("tensor",), ("expert",)
    rows = slotted(step)
    there = Transfer("all-to-all", expert, step.itemsize * rows * step.load.width, 0, 0.0, "slots")
    exchanges = [(tensor, 1), (expert, step.ways("expert"))]
    if rows:
        exchanges = [(tensor, 1)]
        there = dataclasses.replace(there, executions=step.executions(2, 2 + 2 * again))
    found = [there]
    for axes, wide in exchanges:
        found += [
            Transfer("all-gather", axes, wide * tokens, step.executions(1, 1 + again), 0, "tokens"),
            Transfer("reduce-scatter", axes, wide * tokens, step.executions(1, 1), 0, "sums"),
            Transfer(
                "all-gather", axes, wide * 2 * routing, step.executions(1, again), 0, "routing"
            ),
            Transfer("reduce-scatter", axes, wide * routing, step.executions(0, 1), 0, "routing"),
        ]
    return found
