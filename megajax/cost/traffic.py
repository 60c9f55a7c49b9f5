"""Lists the collectives of a step from the sizes of its workload and mesh, without compiling it.

The list mirrors parallel/tensor.py, expert.py, context.py, pipeline.py and models/parts.py; tests
compare it with compiled H100 programs. Weights are sent in the compute dtype. Sequence parallelism
gathers and scatters the residual stream around every sublayer, or once around a block whose
attention and feed-forward layer are parallel (MegaScale section 3.1). The idle ticks of a pipeline
send, too, as its program does.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping

from megajax.core.axes import MESH_AXES, ZERO_AXES
from megajax.core.hardware import DeviceCard, Link
from megajax.cost.base import ITEMSIZE, CostModel, Op, block_flops_per_token
from megajax.cost.kernels import Matmul, Rowwise
from megajax.cost.memory import MASTER, expert_weights, layer_weights, residual, slotted
from megajax.cost.roofline import in_waves
from megajax.cost.step import Payload, StepShape

# ---- exchange
#
# What data parallelism sends: weights gathered from shards, gradients summed into shards.
#
# Two kinds of training steps are described here. With ZeRO-1/2 (`StepShape.resident`), each rank
# holds all weights in use and a shard ("piece") of the float32 masters; weights and gradients are
# exchanged once a step. With ZeRO-3 and a codec that quantizes what is sent (`StepShape.coding`),
# each rank holds shards only; for every micro-batch it fetches each layer twice, the second time
# for the backward pass, and sends its gradients.
#
# Sizes are those of parallel/exchange.py and parallel/zero.py. What is sent at once is a bucket:
# the matrices of one layer, the routed experts of one layer, or one table (embedding or head). A
# rank's piece of a bucket is padded as `gradient_length` and `weight_length` say. In an all-to-all
# each rank sends one row to every rank, and the bytes include the row that it keeps. Routers are
# small, may not be rounded and are sent in float32. Norms and biases are left out. Tables are
# counted without the padding of the vocabulary.
#
# Sources: SDP4Bit (arXiv 2410.15526) section 3, ZeRO++ (arXiv 2306.10209) section 3.
#
# Legend: N elements of a bucket on one device, W ranks that share its gradient, C = N / W of a
# piece.


BETWEEN = "node"
TABLES = ("embedding", "head")
# The fused kernels need pieces whose length is a multiple of TILE for gradients, of WEIGHT_TILE for
# weights (pallas_kernels/quantize/README.md, Limits). A piece is padded to such a length if the
# zeros are at most the fraction MOST_ZEROS of it (chosen).
TILE, WEIGHT_TILE, MOST_ZEROS = 4096, 8192, 1 / 256


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Parameters whose weights or gradients are sent in one message.

    what: a name such as 'layer' or 'experts'. elements: N of the legend. count: how many equal
    buckets a step has. axes: mesh axes whose ranks share the gradient, those of size 1 left out.
    exact: whether it is sent in float32 whatever the codec is.
    """

    what: str
    elements: int
    count: float
    axes: tuple[str, ...]
    exact: bool = False

    @property
    def is_table(self) -> bool:
        """Whether it is in no layer."""
        return self.what in TABLES


@dataclasses.dataclass(frozen=True)
class Message:
    """One collective of a bucket.

    level: 'weights', 'gradients' (without a codec), or with a codec 'inside' (gradients inside a
    node) or 'between' (gradients between nodes). nbytes: on one device, of its operands or its
    results, whichever are larger. elements: how many numbers those bytes encode. count: how many
    equal messages a step has.
    """

    bucket: Bucket
    level: str
    kind: str
    axes: tuple[str, ...]
    nbytes: float
    elements: float
    count: float


@dataclasses.dataclass(frozen=True)
class Row:
    """The messages of a level over the same axes. nbytes, elements: sums over a step, on one
    device."""

    level: str
    kind: str
    axes: tuple[str, ...]
    nbytes: float
    elements: float

    @property
    def bits(self) -> float:
        """Bits of an element, scales and padding included."""
        return 8 * self.nbytes / self.elements


def gradient_length(piece: int, block: int, *levels: Payload) -> int:
    """Returns the elements of a piece of gradients as it travels.

    Whole blocks of the transform; in a codec with groups also whole tiles of the fused kernels,
    where these add at most 1/256. levels: inside a node and between nodes.
    """
    return _padded(-(-piece // block) * block, TILE, levels)


def weight_length(piece: int, weights: Payload) -> int:
    """Returns the elements of a piece of weights as it travels: as `gradient_length`."""
    return _padded(piece, WEIGHT_TILE, (weights,))


def _padded(length: int, tile: int, levels: tuple[Payload, ...]) -> int:
    tiled = -(-length // tile) * tile
    few = tiled - length <= MOST_ZEROS * length
    return tiled if few and any(level.format is not None for level in levels) else length


def buckets(step: StepShape) -> list[Bucket]:
    """Returns what a device exchanges in a step; nothing where one rank has all gradients."""
    load, layers = step.load, step.stored_layers
    tensor = step.ways("tensor")
    routers = load.params_of("router")
    shared = load.kv_params if step.kv_copies > 1 else 0.0
    dense, routed = _live(step, ZERO_AXES), _live(step, ("node", "data", "context"))
    per = load.stored_layers
    candidates = [
        Bucket("layer", _ceil(load.dense_params - routers - shared, per * tensor), layers, dense),
        # Each tensor rank stores all of the key-value heads that ranks share; they travel apart.
        Bucket("key-value heads", _ceil(shared, per), layers, dense),
        Bucket("router", _ceil(routers, per), layers, dense, exact=True),
        Bucket(
            "experts",
            _ceil(load.routed_params, per * step.ways("expert") * tensor),
            layers,
            routed,
        ),
    ]
    for op in load.ops:
        if op.part in TABLES:
            cut = step.ways("pipe", "tensor")
            candidates.append(Bucket(op.part, _ceil(op.params, cut), 1.0, dense))
    return [b for b in candidates if b.elements and b.axes]


def messages(step: StepShape) -> Iterator[Message]:
    """Yields the collectives of all buckets."""
    for bucket in buckets(step):
        n, coding = bucket.elements, step.coding
        fetches, sums = _times(step, bucket)
        if coding is None or bucket.exact:
            weights = MASTER if bucket.exact else step.itemsize
            home = MASTER if bucket.exact or step.resident else step.itemsize
            yield Message(bucket, "weights", "all-gather", bucket.axes, weights * n, n, fetches)
            yield Message(bucket, "gradients", "reduce-scatter", bucket.axes, home * n, n, sums)
            continue
        inside, nodes, ranks = _levels(step, bucket)
        piece = math.ceil(n / (nodes * ranks))
        row = gradient_length(piece, coding.block, coding.inside, coding.between)
        fetched = weight_length(piece, coding.weights)
        gathered = nodes * ranks * coding.weights.wire_bytes(fetched)
        yield Message(bucket, "weights", "all-gather", bucket.axes, gathered, n, fetches)
        if ranks > 1:
            near = ranks * coding.inside.wire_bytes(nodes * row)
            yield Message(bucket, "inside", "all-to-all", inside, near, n, sums)
        if nodes > 1:
            far = nodes * coding.between.wire_bytes(row)
            yield Message(bucket, "between", "all-to-all", (BETWEEN,), far, n / ranks, sums)


def rows(step: StepShape) -> list[Row]:
    """Returns the traffic of a step by level and axes, in the order of `messages`."""
    table: dict[tuple, Row] = {}
    for m in messages(step):
        key, times = (m.level, m.kind, m.axes), m.count
        old = table.get(key, Row(*key, 0.0, 0.0))
        table[key] = Row(*key, old.nbytes + times * m.nbytes, old.elements + times * m.elements)
    return list(table.values())


def coded_bytes(step: StepShape) -> float:
    """Returns the bytes a step that quantizing reads and writes on one device; 0 without a codec.

    The count assumes fused kernels. For gradients, they read the float32 gradients once, write the
    sums once, and on every level write the payload to send and read the one received. For weights,
    they read the piece of the masters, write its payload, read all payloads and write all weights.
    If weights are sent as differences (`Coding.difference`), the rank's piece of the old copy and
    all old weights are read, too.
    """
    coding = step.coding
    if coding is None:
        return 0.0
    total = 0.0
    sent = {(m.bucket, m.level): m.nbytes for m in messages(step)}
    for bucket in buckets(step):
        if bucket.exact:
            continue
        n, (_, nodes, ranks) = bucket.elements, _levels(step, bucket)
        piece, gathered = n / (nodes * ranks), sent[bucket, "weights"]
        copies = 2 if coding.difference else 1
        fetch = MASTER * piece + gathered / (nodes * ranks) + gathered + copies * step.itemsize * n
        fetch += step.itemsize * piece * (copies - 1)
        home = MASTER * n + MASTER * piece
        home += sum(2 * sent.get((bucket, level), 0.0) for level in ("inside", "between"))
        fetches, sums = _times(step, bucket)
        total += fetches * fetch + sums * home
    return total


def coding_op(step: StepShape) -> Op:
    """Returns the passes over memory that quantize and dequantize, as one operation of a step."""
    return Op("update", Rowwise("quantize", coded_bytes(step), 1, reads=0), dtypes=("int8",))


def _times(step: StepShape, bucket: Bucket) -> tuple[float, float]:
    """Returns how often a step gathers the weights of such buckets and sums their gradients."""
    if step.resident:
        return bucket.count, bucket.count
    sums = bucket.count * step.accumulate
    return (sums if bucket.is_table else 2 * sums), sums


def _live(step: StepShape, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(a for a in axes if step.ways(a) > 1)


def _ceil(elements: float, cut: float) -> int:
    return math.ceil(elements / cut)


def _levels(step: StepShape, bucket: Bucket) -> tuple[tuple[str, ...], int, int]:
    """Returns (the axes inside a node, nodes, ranks inside one)."""
    inside = tuple(a for a in bucket.axes if a != BETWEEN)
    nodes = step.ways(BETWEEN) if BETWEEN in bucket.axes else 1
    return inside, nodes, step.ways(*inside)


# ---- traffic


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One kind of collective of a step.

    nbytes: the bytes on one device in one execution, of the operand or the result, whichever is
    larger. flops_beside: the FLOPs of the matrix products that run at the same time on one device.
    what: the array that is sent.
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

    Nothing by default. data: gathers of weights and scatters of gradients. tensor: gathers and
    scatters of the residual stream. pipe: sends to the next stage (MegaScale section 3.2 hides all
    three).
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
    sent = [
        *_weights(step, overlap),
        *_residuals(step, overlap),
        *_keys(step),
        *_experts(step),
        *_stages(step, overlap),
        _shared_heads(step),
    ]
    return [t for t in sent if t.nbytes * t.executions and step.ways(*t.axes) > 1]


def _layer_flops(step: StepShape) -> float:
    """Forward FLOPs of one layer of one micro-batch on one device."""
    return step.tokens * block_flops_per_token(step.used) / step.load.layers / step.ways("tensor")


def _weights(step: StepShape, overlap: Overlap) -> list[Transfer]:
    """Weights into use and gradients home."""
    if step.exchanges:
        # A layer's weights and gradients travel beside other layers, if not all do at once.
        by_layer = step.streams or not step.resident
        hiding = overlap.data * _layer_flops(step) if by_layer else 0.0
        sent = []
        for m in messages(step):
            ours = 0.0 if m.bucket.is_table else hiding if m.level == "weights" else 2 * hiding
            what = f"{m.bucket.what} {m.level}"
            sent.append(Transfer(m.kind, m.axes, m.nbytes, m.count, ours, what))
        return sent
    load, pipeline = step.load, step.pipeline
    piped = pipeline.stages > 1
    again = 1 if piped or step.remat == "none" else 2  # gathered again in the backward pass
    hiding = overlap.data * _layer_flops(step)
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
    sent = _matrices(step, "embedding and head", tables, dense, times, 0.0)
    shares = [(1.0, hiding, 0.0)]
    if piped and pipeline.hides:  # while the stages take turns on one chunk, another's travel
        first, window = 1 / pipeline.chunks, pipeline.stages * _layer_flops(step)
        shares = [(first, hiding, 0.0), (1 - first, max(hiding, window), window)]
    for share, dense_beside, expert_beside in shares:
        cut = share * layers[0], *layers[1:]
        sent += _matrices(step, "layer", layer_weights(step), dense, cut, dense_beside)
        sent += _matrices(step, "expert", expert_weights(step), routed, cut, expert_beside)
    return sent


def _matrices(
    step: StepShape,
    what: str,
    nbytes: float,
    axes: tuple[tuple[str, ...], tuple[str, ...]],
    times: tuple[float, float, float],
    flops_beside: float,
) -> list[Transfer]:
    """Returns the transfers of some weight matrices and of their gradients.

    Weights are gathered and gradients scattered over the axes that shard the matrices; over other
    axes, on which the matrices have copies, the shards of the gradients are summed. A pipeline
    gathers weights once a step. It scatters gradients either in every tick, those of one
    micro-batch, or at the end of the step, as float32 sums; copies are summed at the end.
    Args: axes: those that shard the matrices at rest, and those over which their gradients are
      partial sums. times: the number of matrices, gathers of each, and scatters of each in a
      pipeline's ticks. flops_beside: FLOPs of one device that run at the same time.
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
        Transfer("all-gather", cut, nbytes, gathers * count, flops_beside, f"{what} weights"),
        Transfer(
            "reduce-scatter", cut, home, once * count, 0 if in_ticks else 2 * flops_beside, grads
        ),
        Transfer("all-reduce", copied, wide / step.ways(*cut), count, flops_beside, grads),
    ]


def _shared_heads(step: StepShape) -> Transfer:
    """Gradients of key-value heads that several tensor ranks use, on the shard; none otherwise."""
    load, pieces = step.load, step.accumulate if step.pipeline.stages == 1 else 1
    one = MASTER * load.kv_params / load.stored_layers / step.ways(*step.zero_axes)
    times = step.stored_layers * pieces if step.kv_copies > 1 else 0
    return Transfer("all-reduce", ("tensor",), one, times, 0.0, "shared key-value gradients")


def _residuals(step: StepShape, overlap: Overlap) -> list[Transfer]:
    gathered = residual(step) * step.ways("tensor")
    sublayers = step.load.gathers
    again = 0 if step.remat == "none" else sublayers
    # A stage's `dots` keep one rank's sums, else what all ranks' add up to (models/parts.py).
    again_for = ("full", "dots") if step.pipeline.stages > 1 else ("full",)
    remade = 1 if step.remat in again_for and sublayers > 1 else 0
    hiding = overlap.tensor * _layer_flops(step) / sublayers
    axes, pieces = ("tensor",), step.micro_steps
    # Embedding and head: a scatter and a gather forward, their mirrors backward.
    return [
        Transfer(
            "all-gather", axes, gathered, step.executions(sublayers, sublayers + again), hiding,
            "residual stream",
        ),
        Transfer(
            "reduce-scatter", axes, gathered, step.executions(sublayers, sublayers + remade),
            hiding, "residual stream",
        ),
        Transfer("all-gather", axes, gathered, 2 * pieces, 0.0, "embedding and head"),
        Transfer("reduce-scatter", axes, gathered, 2 * pieces, 0.0, "embedding and head"),
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
    hiding = overlap.pipe * _layer_flops(step) * step.layers / pipeline.chunks
    gathered = stream * step.ways("tensor")
    return [
        Transfer("collective-permute", pipe, stream, sends, hiding, "residual stream"),
        Transfer("all-reduce", pipe, stream, 2 * step.micro_steps, 0.0, "head"),
        Transfer("all-reduce", pipe, gathered, 2 * step.micro_steps, 0.0, "embedding"),
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
        sent = 2 * cut * step.used.kv_width / ways
        hops = ways - 1
        remade = hops if step.remat in ("full", "dots") else 0
        return [
            Transfer(
                "collective-permute",
                axes,
                sent,
                step.executions(hops, hops + remade),
                0.0,
                "keys and values",
            ),
            Transfer(
                "collective-permute",
                axes,
                sent * MASTER / step.itemsize,
                step.executions(0, ways),
                0.0,
                "gradients of keys and values",
            ),
        ]
    if step.context == "ulysses":
        queries = cut * step.load.attention_width / ways
        keys = cut * step.used.kv_width / ways
        attention = step.used.attention
        heads = int(attention.kv_heads) // step.ways("tensor") if attention else 1
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
    sent = [there]
    for axes, wide in exchanges:
        sent += [
            Transfer("all-gather", axes, wide * tokens, step.executions(1, 1 + again), 0, "tokens"),
            Transfer("reduce-scatter", axes, wide * tokens, step.executions(1, 1), 0, "sums"),
            Transfer(
                "all-gather", axes, wide * 2 * routing, step.executions(1, again), 0, "routing"
            ),
            Transfer("reduce-scatter", axes, wide * routing, step.executions(0, 1), 0, "routing"),
        ]
    return sent


# ---- rings
#
# Estimates whether matrix products of tensor and expert parallelism are faster as a ring.
#
# A ring overlaps communication: each rank multiplies the piece that it has while it sends that
# piece to the next rank. Plain XLA gathers all pieces before the product, or scatters all sums
# after it. The functions here return SIMULATED seconds of both, for the forward and the backward
# pass of one rank. Because the pieces of a ring are small, their cost model rounds a product up to
# whole waves of tiles (cost/roofline.py:in_waves). parallel/overlap.py and
# parallel/expert_matmul.py decide by these times.
#
# Legend: R ranks.


# Fixed costs in seconds of one step of a ring and of one collective (chosen; to be measured).
STEP_S, CALL_S = 6e-6, 10e-6


@dataclasses.dataclass(frozen=True)
class Rank:
    """One of R ranks of a node. dtype: that of operands and results; float32 is multiplied as
    tf32."""

    card: DeviceCard
    cores: int
    ranks: int
    dtype: str

    @functools.cached_property
    def model(self) -> CostModel:
        """What is asked for the times of products, passes over memory and transfers."""
        return in_waves(self.cores)

    @property
    def itemsize(self) -> float:
        """Bytes of an element of the operands."""
        return ITEMSIZE[self.dtype]

    def product(self, m: float, k: int, n: int, batch: int = 1) -> float:
        """Returns seconds of a product."""
        dtype = "tfloat32" if self.dtype == "float32" else self.dtype
        op = Op("input", Matmul(m, k, n, batch), dtypes=(dtype,))
        return self.model.op_time(op, self.card)[0]

    def touch(self, arrays: float, rows: float, width: float, dtype: str) -> float:
        """Returns seconds of a pass over memory that reads or writes so many arrays."""
        op = Op("transfer", Rowwise("add", rows, width, arrays - 1), dtypes=(dtype,))
        return self.model.op_time(op, self.card)[0]

    def travel(self, rows: float, width: int, itemsize: float) -> float:
        """Returns seconds in which rows cross the link, without what a call costs."""
        link = Link(self.card.link_bytes_per_s, 0.0)
        return self.model.transfer_time(rows * width * itemsize, link)

    def ring_s(self, work: float, hop: float, add: float = 0.0) -> float:
        """Returns seconds of a ring: the work of R pieces, each while the next one is sent.

        work: seconds of one piece's product. hop: seconds in which a piece travels to the next
        rank. add: seconds of what must follow in each step, such as adding sums.
        """
        return (self.ranks - 1) * (max(hop, work) + add + STEP_S) + work


def gather_matmul(rank: Rank, rows: int, width: int, parts: tuple[int, ...]) -> tuple[float, float]:
    """Returns seconds of (plain XLA, the ring) for products of gathered rows.

    The products that compute the gradients of the weights (dw) are left out of both.
    Args: rows: those of all ranks together. parts: columns of each product that shares the gather.
    """
    chunk = rows / rank.ranks
    plain, ring = _gathered(rank, rows, width, parts)
    scattered, as_float32 = (
        rank.travel(rows - chunk, width, size) + CALL_S for size in (rank.itemsize, 4)
    )
    dw = sum(rank.product(width, rows, part) for part in parts)  # dx is scattered beside it
    return plain + max(scattered - dw, 0), ring + max(as_float32 - dw, 0)


def matmul_scatter(
    rank: Rank, rows: int, width: int, parts: tuple[int, ...]
) -> tuple[float, float]:
    """Returns seconds of (plain XLA, the ring) for products whose sums are scattered, without dw.

    parts: rows of each weight. The backward pass gathers dy, as `gather_matmul` gathers x.
    """
    chunk = rows / rank.ranks
    plain, ring = _gathered(rank, rows, width, parts)
    out = sum(rank.product(rows, part, width) for part in parts)
    piece = sum(rank.product(chunk, part, width) for part in parts)
    # Float32 sums travel in a ring, and each is read, added and written.
    add = rank.touch(3, chunk, width, "float32")
    plain += out + rank.travel(rows - chunk, width, rank.itemsize) + CALL_S
    return plain, ring + rank.ring_s(piece, rank.travel(chunk, width, 4), add)


def _gathered(rank: Rank, rows: int, width: int, parts: tuple[int, ...]) -> tuple[float, float]:
    """A gather before products from `width`: forward of x, or backward of dy."""
    chunk = rows / rank.ranks
    plain = rank.travel(rows - chunk, width, rank.itemsize) + CALL_S
    plain += sum(rank.product(rows, width, part) for part in parts)
    piece = sum(rank.product(chunk, width, part) for part in parts)
    return plain, rank.ring_s(piece, rank.travel(chunk, width, rank.itemsize))


@dataclasses.dataclass(frozen=True)
class ExpertHalf:
    """One half of an expert layer on one rank: up to the first products, or from the second ones.

    The load of the experts is assumed to be balanced. tokens: the tokens of a rank, each with `top`
    experts and `width` elements. experts: the experts of a rank. rows: the rows that the tokens of
    one source rank have at this rank's experts. hidden: columns of each first product, or the
    contracted dimension of the second. reached: the number of ranks that plain XLA sends a token
    to.
    """

    tokens: int
    top: int
    width: int
    experts: int
    hidden: tuple[int, ...]
    rows: int
    reached: int


def expert_dispatch(rank: Rank, half: ExpertHalf) -> tuple[float, float]:
    """Returns seconds of (plain XLA, the ring) for sending tokens and the first products.

    This is the forward pass, and of the backward pass what differs between the two: the sums of the
    tokens' gradients, which are sent while the gradients of the weights are computed.
    """
    plain, ring = _to_experts(rank, half)
    dw = _into(rank, half, rank.ranks)
    plain_sums = _sent(rank, half, half.reached, rank.itemsize)
    ring_sums = _sent(rank, half, rank.ranks - 1, 4)
    return plain + max(plain_sums - dw, 0.0), ring + max(ring_sums - dw, 0.0)


def expert_combine(rank: Rank, half: ExpertHalf) -> tuple[float, float]:
    """Returns seconds of (plain XLA, the ring) for the second products and sending their results.

    The results are sent back to the ranks of their tokens. The backward pass is included, in which
    the gradient of the combined results is sent to the experts.
    """
    plain, ring = _to_experts(rank, half)
    there = _sent(rank, half, half.reached, rank.itemsize) + CALL_S
    out = _out_of(rank, half, rank.ranks)
    back = _expert_ring_s(rank, half, _out_of(rank, half, 1), half.tokens * half.top, 4)
    return out + there + plain, back + ring


def _to_experts(rank: Rank, half: ExpertHalf) -> tuple[float, float]:
    sent = _sent(rank, half, half.reached, rank.itemsize)
    plain = sent + CALL_S + _into(rank, half, rank.ranks)
    return plain, _expert_ring_s(rank, half, _into(rank, half, 1), half.rows, rank.itemsize)


def _expert_ring_s(
    rank: Rank, half: ExpertHalf, work: float, written: int, itemsize: float
) -> float:
    # A source's rows are put among the others', or taken from there: all that it may have.
    each = work + rank.touch(1, half.rows + written, sum(half.hidden), rank.dtype)
    return rank.ring_s(each, _sent(rank, half, 1, itemsize))


def _sent(rank: Rank, half: ExpertHalf, copies: int, itemsize: float) -> float:
    return rank.travel(copies * half.tokens, half.width, itemsize)


def _into(rank: Rank, half: ExpertHalf, sources: int) -> float:
    """The first products, of the rows of so many sources."""
    rows = -(-half.rows * sources // half.experts)
    return sum(rank.product(rows, half.width, F, half.experts) for F in half.hidden)


def _out_of(rank: Rank, half: ExpertHalf, sources: int) -> float:
    """The second products, of the rows of so many sources."""
    rows = -(-half.rows * sources // half.experts)
    return sum(rank.product(rows, F, half.width, half.experts) for F in half.hidden)
