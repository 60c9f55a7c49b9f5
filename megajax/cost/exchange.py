"""What data parallelism sends: weights gathered from shards, gradients summed into shards.

Two kinds of training steps are described here. With ZeRO-1/2 (`StepShape.resident`), each rank
holds all weights in use and a shard ("piece") of the float32 masters; weights and gradients are
exchanged once a step. With ZeRO-3 and a codec that quantizes what is sent (`StepShape.coding`),
each rank holds shards only; for every micro-batch it fetches each layer twice, the second time for
the backward pass, and sends its gradients.

Sizes are those of parallel/exchange.py and parallel/zero.py. What is sent at once is a bucket: the
matrices of one layer, the routed experts of one layer, or one table (embedding or head). A rank's
piece of a bucket is padded as `gradient_length` and `weight_length` say. In an all-to-all each rank
sends one row to every rank, and the bytes include the row that it keeps. Routers are small, may not
be rounded and are sent in float32. Norms and biases are left out. Tables are counted without the
padding of the vocabulary.

Sources: SDP4Bit (arXiv 2410.15526) section 3, ZeRO++ (arXiv 2306.10209) section 3.

Legend: N elements of a bucket on one device, W ranks that share its gradient, C = N / W of a piece.
"""

import dataclasses
import math
from collections.abc import Iterator

from megajax.core.axes import ZERO_AXES
from megajax.cost.base import Op
from megajax.cost.kernels import Rowwise
from megajax.cost.memory import MASTER
from megajax.cost.step import Payload, StepShape

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
    """The messages of a level over the same axes. nbytes, elements: of a step on one device."""

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
    found = [
        Bucket("layer", _whole(load.dense_params - routers - shared, per * tensor), layers, dense),
        # Key-value heads that tensor ranks share rest whole on each of them, and travel apart.
        Bucket("key-value heads", _whole(shared, per), layers, dense),
        Bucket("router", _whole(routers, per), layers, dense, exact=True),
        Bucket(
            "experts",
            _whole(load.routed_params, per * step.ways("expert") * tensor),
            layers,
            routed,
        ),
    ]
    for op in load.ops:
        if op.part in TABLES:
            cut = step.ways("pipe", "tensor")
            found.append(Bucket(op.part, _whole(op.params, cut), 1.0, dense))
    return [b for b in found if b.elements and b.axes]


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
        piece, row = _piece(step, bucket)
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
    found: dict[tuple, Row] = {}
    for m in messages(step):
        key, times = (m.level, m.kind, m.axes), m.count
        old = found.get(key, Row(*key, 0.0, 0.0))
        found[key] = Row(*key, old.nbytes + times * m.nbytes, old.elements + times * m.elements)
    return list(found.values())


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


def _whole(elements: float, cut: float) -> int:
    return math.ceil(elements / cut)


def _levels(step: StepShape, bucket: Bucket) -> tuple[tuple[str, ...], int, int]:
    """Returns (the axes inside a node, nodes, ranks inside one)."""
    inside = tuple(a for a in bucket.axes if a != BETWEEN)
    nodes = step.ways(BETWEEN) if BETWEEN in bucket.axes else 1
    return inside, nodes, step.ways(*inside)


def _piece(step: StepShape, bucket: Bucket) -> tuple[int, int]:
    """Returns C, and C as gradients travel."""
    _, nodes, ranks = _levels(step, bucket)
    piece = math.ceil(bucket.elements / (nodes * ranks))
    coding = step.coding
    if coding is None:
        return piece, piece
    return piece, gradient_length(piece, coding.block, coding.inside, coding.between)
