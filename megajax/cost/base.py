"""The interface between planners and cost models: operations, workloads and `CostModel`.

An `Op` (operation) is a kernel with its shapes and data types, its place in a model and the number
of its executions. A `Workload` is the list of operations of one forward pass: in training, in a
prefill, or in decoding one token for each row. A `StepShape` (cost/step.py) is a workload that is
distributed over a mesh. A `CostModel` answers three questions: the time of an operation, the time
of a transfer and the memory of arrays. Its implementations are a roofline (cost/roofline.py), a
table of measured times (cost/table.py) and a learned predictor (systems/cdmpp/backend.py).
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

from megajax.core.hardware import DeviceCard, Link
from megajax.cost.kernels import Attention, Embedding, Experts, Kernel, Matmul, Rowwise

ITEMSIZE = {
    "float32": 4,
    "tfloat32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8": 1,
    "int8": 1,
    "int4": 0.5,
    # Weights with a 16-bit scale for each group of 128.
    "int8/128": 1.015625,
    "int4/128": 0.515625,
    "int3/128": 0.390625,
}
Part = Literal[
    "embedding", "norm", "input", "attention", "activation", "output", "router", "experts", "head",
    "convolution", "pooling", "update", "transfer", "frozen",
]  # fmt: skip
Phase = Literal["train", "prefill", "decode"]


@dataclasses.dataclass(frozen=True)
class Op:
    """A kernel at a place in a model, executed `count` times.

    part: the place in the model. It decides whether rematerialisation computes the operation again
    in the backward pass, and along which dimensions a mesh shards it. An 'input' product reads the
    residual stream of a block, which several of its weights share; an 'output' product writes to
    that stream. weights: the number of different sets of parameters among the executions; None:
    each execution has its own; 0: the parameters belong to another operation. dtypes: of each
    operand and of the result; one name stands for all of them. uncut: the kernel before it was
    sharded by `cut`, whose parameters all devices have together; None: it is not sharded. frozen:
    neither its parameters nor those before it are trained, so that it has no backward pass.
    """

    part: Part
    kernel: Kernel
    count: float = 1
    weights: float | None = None
    dtypes: tuple[str, ...] = ("bfloat16",)
    uncut: Kernel | None = None
    frozen: bool = False

    @property
    def key(self) -> tuple[str, tuple, tuple[str, ...]]:
        """(kernel, shape, data types): what a table of measured times is indexed by."""
        return self.kernel.name, self.kernel.shape, self._dtypes

    @property
    def dtype(self) -> str:
        """The data type of the arithmetic: the widest of the operands."""
        return max(self._dtypes[:-1] or self.dtypes, key=ITEMSIZE.__getitem__)

    @property
    def flops(self) -> float:
        """Floating-point operations of one execution on one device."""
        return self.kernel.flops

    @property
    def nbytes(self) -> float:
        """Bytes that one execution moves to or from memory on one device.

        Operands that a mesh does not cut, such as the weight of a product over cut rows, are read
        by every device.
        """
        return sum(n * ITEMSIZE[d] for n, d in zip(self.kernel.sizes, self._dtypes, strict=True))

    @property
    def params(self) -> float:
        """Parameters that the executions of this operation have together, on all devices."""
        sets = self.count if self.weights is None else self.weights
        return (self.uncut or self.kernel).params * sets

    @property
    def _dtypes(self) -> tuple[str, ...]:
        return self.dtypes * len(self.kernel.sizes) if len(self.dtypes) == 1 else self.dtypes

    def cast(self, dtype: str) -> "Op":
        """Returns the operation with all operands and the result in one data type."""
        return dataclasses.replace(self, dtypes=(dtype,))

    def cut(self, ways: float, *dims: str) -> "Op":
        """Returns one device's share of the operation if `ways` devices divide these dimensions."""
        if ways == 1:
            return self
        cut = {dim: getattr(self.kernel, dim) / ways for dim in dims}
        kernel = dataclasses.replace(self.kernel, **cut)
        return dataclasses.replace(self, kernel=kernel, uncut=self.uncut or self.kernel)


@dataclasses.dataclass(frozen=True)
class Workload:
    """One forward pass over a batch, as a list of operations that the model describes.

    rows: sequences (or images). seq_len: tokens of one that go through the blocks; of a decoded
    step, and of images without tokens, 1. layers: blocks that a token goes through; a network
    without a stack is one block. width: that of the residual stream. towers: the forward passes of
    further stacks, with rows and tokens of their own (a vision encoder before a decoder).
    """

    ops: tuple[Op, ...]
    rows: float
    seq_len: float
    layers: float
    width: float
    phase: Phase = "train"
    towers: tuple["Workload", ...] = ()

    @property
    def all_ops(self) -> tuple[Op, ...]:
        """The operations of the towers, then those of the blocks."""
        return tuple(op for tower in self.towers for op in tower.all_ops) + self.ops

    def times(self, counts: Mapping[str, float]) -> "Workload":
        """Returns the workload with the count of each operation multiplied by counts[op.part].

        Operations whose part is missing or has the count 0 are left out.
        """
        return dataclasses.replace(
            self,
            ops=tuple(
                dataclasses.replace(op, count=op.count * counts[op.part])
                for op in self.ops
                if counts.get(op.part)
            ),
        )

    def cast(self, dtype: str) -> "Workload":
        """Returns the workload with all operations in one data type."""
        towers = tuple(tower.cast(dtype) for tower in self.towers)
        return dataclasses.replace(
            self, ops=tuple(op.cast(dtype) for op in self.ops), towers=towers
        )

    def with_attention(self, fused: bool) -> "Workload":
        """Returns the workload with fused attention kernels, or with plain ones."""
        ops = tuple(
            dataclasses.replace(op, kernel=dataclasses.replace(op.kernel, fused=fused))
            if isinstance(op.kernel, Attention)
            else op
            for op in self.ops
        )
        return dataclasses.replace(self, ops=ops)

    def with_kv_copies(self, copies: int) -> "Workload":
        """Returns the workload if `copies` tensor-parallel ranks compute each key-value head.

        This is so if there are more ranks than key-value heads. The product that computes keys
        and values is the last 'input' before an attention.
        """
        if copies == 1:
            return self
        ops = list(self.ops)
        for i, op in enumerate(self.ops):
            if not isinstance(kernel := op.kernel, Attention):
                continue
            more = 2 * (copies - 1) * kernel.kv_heads * kernel.head_width
            ops[i] = dataclasses.replace(
                op, kernel=dataclasses.replace(kernel, kv_heads=kernel.kv_heads * copies)
            )
            if isinstance(self.ops[i - 1].kernel, Attention):  # of other layers, same product
                continue
            before = max(j for j in range(i) if ops[j].part == "input")
            product: Any = ops[before].kernel
            ops[before] = dataclasses.replace(
                ops[before], kernel=dataclasses.replace(product, n=product.n + more)
            )
        return dataclasses.replace(self, ops=tuple(ops))

    @property
    def flops(self) -> float:
        """Floating-point operations, of one device if the operations are cut."""
        return sum(op.flops * op.count for op in self.all_ops)

    @property
    def tokens(self) -> float:
        """Tokens that go through the blocks."""
        return self.rows * self.seq_len

    @functools.cached_property
    def dtype(self) -> str:
        """The data type of the residual stream."""
        blocks = (op for op in self.ops if op.part in ("input", "norm"))
        return next(blocks, self.ops[0]).dtypes[-1]

    def params_of(self, *parts: Part) -> float:
        """Returns the parameters of these parts."""
        return sum(op.params for op in self.all_ops if op.part in parts)

    @functools.cached_property
    def dense_params(self) -> float:
        """Parameters of the blocks that every token multiplies, routers and kernels of convolutions
        included."""
        return self.params_of("input", "output", "router", "convolution")

    @functools.cached_property
    def routed_params(self) -> float:
        """Parameters of all routed experts."""
        return self.params_of("experts")

    @functools.cached_property
    def table_params(self) -> float:
        """Parameters of embeddings and head."""
        return self.params_of("embedding", "head")

    @functools.cached_property
    def used_table_params(self) -> float:
        """Parameters that embeddings and head multiply or look up, a shared table counted twice."""
        return sum(op.kernel.params for op in self.ops if op.part in ("embedding", "head"))

    @property
    def params(self) -> float:
        """All parameters but norms and biases, of all experts."""
        return self.dense_params + self.routed_params + self.table_params

    @functools.cached_property
    def stored_layers(self) -> float:
        """Blocks with parameters of their own."""
        first = next((op for op in self.ops if op.part == "input"), None)
        return self.layers if first is None or first.weights is None else first.weights

    @functools.cached_property
    def attention(self) -> Attention | None:
        """The attention of a block, if it has one."""
        attentions = (op.kernel for op in self.ops if isinstance(op.kernel, Attention))
        return next(attentions, None)

    @functools.cached_property
    def routed(self) -> Experts | None:
        """The routed experts of a block, if it has any."""
        return next((op.kernel for op in self.ops if isinstance(op.kernel, Experts)), None)

    @functools.cached_property
    def input_width(self) -> float:
        """Columns of all matrices that read a block's residual stream."""
        return self._per_layer("input", "n")

    @functools.cached_property
    def output_width(self) -> float:
        """Rows of all matrices that write to a block's residual stream."""
        return self._per_layer("output", "k")

    @functools.cached_property
    def attention_width(self) -> float:
        """Query heads x head width."""
        attention = self.attention
        return attention.heads * attention.head_width if attention else 0.0

    @functools.cached_property
    def kv_width(self) -> float:
        """Key-value heads x head width."""
        attention = self.attention
        return attention.kv_heads * attention.head_width if attention else 0.0

    @property
    def kv_params(self) -> float:
        """Parameters that make keys and values."""
        return 2 * self.stored_layers * self.width * self.kv_width

    @functools.cached_property
    def gathers(self) -> float:
        """Gathers of the residual stream into a block, its routed experts' left out."""
        return sum(op.count for op in self.ops if op.part == "input") / self.layers

    @functools.cached_property
    def sublayers(self) -> float:
        """Sums on the residual stream in a block: each has a norm."""
        return sum(op.count for op in self.ops if op.part == "norm") / self.layers

    @functools.cached_property
    def scores(self) -> float:
        """Elements of the head's widest result: logits, classes."""
        heads = (op.kernel for op in self.ops if op.part == "head")
        return max((k.m * k.n for k in heads if isinstance(k, Matmul)), default=0.0)

    @functools.cached_property
    def head_params(self) -> float:
        """Parameters of the head's largest matrix, even if an embedding shares them."""
        return max((op.kernel.params for op in self.ops if op.part == "head"), default=0.0)

    @functools.cached_property
    def cache(self) -> float:
        """Elements of keys and values that the attentions read."""
        attentions = (op for op in self.ops if isinstance(op.kernel, Attention))
        return sum(2 * op.kernel.sizes[1] * op.count for op in attentions)

    def _per_layer(self, part: Part, dim: str) -> float:
        products = (op for op in self.ops if op.part == part and isinstance(op.kernel, Matmul))
        return sum(getattr(op.kernel, dim) * op.count for op in products) / self.layers


class CostModel(Protocol):
    """What every cost model can say. Times are in seconds."""

    def op_time(self, op: Op, device: DeviceCard, dtype: str | None = None) -> tuple[float, float]:
        """Returns (seconds of one execution, their standard deviation).

        dtype: a data type that replaces those of all operands and of the result; None: the
        operation keeps its own.
        """
        ...

    def transfer_time(self, nbytes: float, link: Link) -> float:
        """Returns seconds from one device to another."""
        ...

    def memory(self, trees: Mapping[str, Iterable[Any]]) -> dict[str, int]:
        """Returns bytes a device by name; leaves have shape, dtype and sharding."""
        ...


# ---- flops
#
# Model FLOPs of a workload, and MFU, in the two conventions that papers use.
#
# Forward and backward cost 6 FLOPs a parameter and token (2 forward, 4 backward); attention adds 12
# L H K s_eff, where s_eff is how many keys a query is credited with. 'megatron': all s keys, as if
# attention were not causal (Megatron-LM, PaLM; MegaScale's tables follow it). 'causal': the keys a
# query really sees, so a sliding window counts with its own size. Recomputation is never credited.
# Source: MegaScale tables 2 and 3 reproduce to 0.1 % (tests/cost/test_flops.py).


Convention = Literal["megatron", "causal"]
Remat = Literal["none", "full", "outputs", "dots"]

# Rematerialisation: how much of each part's forward work the backward pass computes again, by what
# is kept (models/parts.py). Attention without a fused kernel whose result is kept computes only its
# weights again, which is one of its two products. A fused kernel whose log-sum-exp is kept, too,
# computes nothing again. A ring (parallel/context.py) keeps its log-sum-exp, too, but its backward
# pass always computes the weights of each block of keys again. Experts are computed again in full,
# because the gradient of a token's routing weights needs their results.
_AGAIN = {"norm": 1.0, "attention": 0.5, "activation": 1.0, "experts": 1.0}
RECOMPUTED = {
    "none": {},
    "dots": _AGAIN,
    "outputs": _AGAIN | {"input": 1.0, "router": 1.0},
    "full": _AGAIN | {"attention": 1.0, "input": 1.0, "output": 1.0, "router": 1.0},
}


def recomputed(remat: Remat, part: str, keeps_attention: bool, rings: bool = False) -> float:
    """Returns how often the backward pass computes the forward values of a part again.

    keeps_attention: whether attention's weights exist as an array; False: its kernel is fused, or a
    ring works on blocks of keys (`rings`).
    """
    again = RECOMPUTED[remat].get(part, 0.0)
    if part == "attention" and not keeps_attention and remat != "full":
        again = 0.0
    return again + (0.5 if part == "attention" and rings else 0.0)


def keys_per_query(seq_len: int, window: int | None, convention: Convention) -> float:
    """Returns the mean number of keys a query is credited with."""
    reach = seq_len if window is None else min(window, seq_len)
    if convention == "megatron":
        return reach
    # Query i (from 0) sees min(i + 1, reach) keys.
    return (reach * (reach + 1) / 2 + (seq_len - reach) * reach) / seq_len


def model_flops_per_token(load: Workload, convention: Convention) -> float:
    """Returns FLOPs of one token's forward pass, in which only the experts that it uses count. The
    FLOPs of towers are divided among the tokens of the blocks."""
    return sum(op.count * _credited(op, convention) for op in load.all_ops) / load.tokens


def block_flops_per_token(load: Workload) -> float:
    """Returns FLOPs of one token's forward pass through all blocks, as the kernels execute it but
    for experts' empty slots."""
    ops = (op for op in load.ops if op.part not in ("embedding", "head"))
    return sum(op.count * _used(op).flops for op in ops) / load.tokens


def train_flops_per_token(load: Workload, convention: Convention) -> float:
    """Returns FLOPs of one token's forward pass, and of its backward pass through what trains."""
    frozen = sum(op.count * _credited(op, convention) for op in load.all_ops if op.frozen)
    return 3 * model_flops_per_token(load, convention) - 2 * frozen / load.tokens


def _credited(op: Op, convention: Convention) -> float:
    kernel = op.kernel
    if not isinstance(kernel, Attention):
        return _used(op).flops
    if kernel.causal and kernel.queries == kernel.keys:
        keys = keys_per_query(int(kernel.keys), kernel.window, convention)
    else:  # all keys, or those of a cache: each query sees as many
        keys = min(kernel.window or kernel.keys, kernel.keys)
    return dataclasses.replace(kernel, keys=keys, window=None).flops


def _used(op: Op) -> Kernel:
    """The kernel without the slots of experts that no token fills."""
    kernel = op.kernel
    if isinstance(kernel, Experts):
        return dataclasses.replace(kernel, pairs=kernel.top_k)
    return kernel


def mfu(tokens_per_s: float, flops_per_token: float, devices: int, peak_flops: float) -> float:
    """Returns model FLOPs utilisation: model FLOP/s over the devices' dense peak, 0..1."""
    return tokens_per_s * flops_per_token / (devices * peak_flops)


# ---- transformer
#
# The operations of transformer blocks, of which decoders, encoders and vision models are made.
#
# A model gives a `Stack` of its sizes, and adds what comes before the blocks and after them:
# models/decoder_config.py, models/encoder_config.py; docs/planning.md has a vision transformer.
#
# Legend: T tokens of the batch, D model width.


@dataclasses.dataclass(frozen=True)
class Routed:
    """Routed experts of every layer (layers/moe.py).

    experts: the number of experts in a layer. top_k: how many of them a token uses. hidden: the
    inner width of an expert. capacity: the slots of an expert, as a multiple of what a balanced
    load needs, counted for each row; None: dropless.
    """

    experts: int
    top_k: int
    hidden: int
    capacity: float | None = None

    def slots(self, seq_len: int) -> int | None:
        """Slots of an expert for one row (layers/moe.py:MoeConfig.slots); None: dropless."""
        if self.capacity is None:
            return None
        return min(math.ceil(self.capacity * seq_len * self.top_k / self.experts), seq_len)

    def pairs(self, seq_len: int) -> float:
        """Expert rows that are computed for each token: with capacity all slots, filled or not."""
        slots = self.slots(seq_len)
        return self.top_k if slots is None else self.experts * slots / seq_len


@dataclasses.dataclass(frozen=True)
class Latent:
    """The sizes of latent attention (layers/latent.py): ranks of the latents, of which queries may
    have none, numbers of the rotary key, and the width of a head's values."""

    rank: int
    query_rank: int | None
    rotary: int
    value: int


@dataclasses.dataclass(frozen=True)
class Stack:
    """The sizes of a stack of equal transformer blocks.

    hidden: feed-forward width; with a mixture of experts, that of the shared experts (0: none).
    gated: whether the feed-forward layer has two input matrices. parallel: whether attention and
    feed-forward layer read the same input, with one gather and one scatter of the residual stream.
    window: the largest number of keys that a query attends to; None: all. windows: (window, share
    of the layers) where layers differ in it; empty: all have `window`. repeats: how often each
    block is applied. routed: the routed experts; None: there are none. latent: of a serial block
    whose attention is latent; None: it is not.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    gated: bool = False
    parallel: bool = False
    causal: bool = True
    window: int | None = None
    repeats: int = 1
    routed: Routed | None = None
    latent: Latent | None = None
    windows: tuple[tuple[int | None, float], ...] = ()

    def ops(self, rows: int, queries: int, keys: int, dtype: str = "bfloat16") -> tuple[Op, ...]:
        """Returns the blocks' operations in their order.

        Args: queries: tokens of a row. keys: that they attend to, themselves included.
        """
        T, D, L = rows * queries, self.width, self.layers * self.repeats
        asked, stored = self.heads * self.head_width, self.kv_heads * self.head_width
        into, hidden = (1 + self.gated) * self.hidden, self.hidden

        def op(part, kernel) -> Op:
            weights = self.layers if self.repeats > 1 else None
            return Op(part, kernel, L, weights, (dtype,))

        def norm(times: int) -> Op:
            return dataclasses.replace(op("norm", Rowwise("norm", T, D)), count=times * L)

        def attention(window: int | None, share: float) -> Op:
            seen = min(window or keys, keys) if queries == 1 else keys  # of a cache
            sizes = self.heads, self.kv_heads, self.head_width
            if self.latent and queries == 1:  # all heads attend to the cached latents
                sizes = self.heads, 1, self.latent.rank + self.latent.rotary
            kernel = Attention(rows, queries, seen, *sizes, self.causal, window)
            return dataclasses.replace(op("attention", kernel), count=share * L)

        attend = [attention(*one) for one in self.windows or ((self.window, 1),)]
        activate = op("activation", Rowwise("activation", T, hidden, 1 + self.gated))
        if self.parallel:
            return (
                norm(1),
                op("input", Matmul(T, D, asked + 2 * stored + into)),
                *attend,
                activate,
                op("output", Matmul(T, asked + hidden, D)),
                *self._experts(T, queries, op),
            )
        dense = (
            (
                op("input", Matmul(T, D, into)),
                activate,
                op("output", Matmul(T, hidden, D)),
            )
            if hidden
            else ()
        )
        inputs = [op("input", Matmul(T, D, asked + 2 * stored))]
        if latent := self.latent:
            down = latent.rank + latent.rotary + (latent.query_rank or asked)
            made = self.heads * (self.head_width - latent.rotary + latent.value)
            inputs = [op("input", Matmul(T, D, down)), op("input", Matmul(T, latent.rank, made))]
            if latent.query_rank is not None:
                inputs.append(op("input", Matmul(T, latent.query_rank, asked)))
            asked = self.heads * latent.value
        return (
            norm(2),
            *inputs,
            *attend,
            op("output", Matmul(T, asked, D)),
            *dense,
            *self._experts(T, queries, op),
        )

    def _experts(self, T: int, queries: int, op) -> tuple[Op, ...]:
        if (routed := self.routed) is None:
            return ()
        pairs, gated = routed.pairs(queries), self.gated
        kernel = Experts(
            T,
            routed.experts,
            routed.top_k,
            self.width,
            routed.hidden,
            gated,
            pairs,
            routed.capacity is None,
        )
        return (
            op("router", Matmul(T, self.width, routed.experts)),
            op("activation", Rowwise("activation", T * pairs, routed.hidden, 1 + gated)),
            op("experts", kernel),
        )


def lookup(tokens: int, table: int, width: int, dtype: str = "bfloat16") -> Op:
    """Returns the lookup of these tokens in an embedding table."""
    return Op("embedding", Embedding(tokens, table, width), dtypes=(dtype,))
