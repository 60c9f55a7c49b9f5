"""What cost models answer, and what they are asked about: operations, a workload, a whole step.

A `Workload` is one forward pass as a list of operations. A `StepShape` is everything about a
training step that its memory, traffic and time depend on, without jax: plans, searches and tests
build it from sizes alone. Backends of `CostModel`: cost/roofline.py; others (profiled, learned)
answer the same three questions.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol

from megajax.core.axes import BATCH_AXES
from megajax.core.hardware import DeviceCard, Link
from megajax.cost.flops import RECOMPUTED, DecoderWork, Remat
from megajax.cost.pipeline import Pipeline

ITEMSIZE = {
    "float32": 4, "tfloat32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1,
}  # fmt: skip
Part = Literal[
    "norm", "input", "attention", "activation", "output", "router", "experts", "head", "update"
]


@dataclasses.dataclass(frozen=True)
class Op:
    """One kind of operation, executed `count` times.

    part: what it is in a block, for recomputation. elements: array elements that move to or from
    memory in one execution.
    """

    part: Part
    flops: float
    elements: float
    count: float = 1

    def cut(self, ways: int) -> "Op":
        """Returns one device's share."""
        return dataclasses.replace(self, flops=self.flops / ways, elements=self.elements / ways)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A forward pass."""

    ops: tuple[Op, ...]

    def cut(self, ways: int) -> "Workload":
        """Returns one device's share of every operation."""
        return Workload(tuple(op.cut(ways) for op in self.ops))

    def times(self, counts: Mapping[str, float]) -> "Workload":
        """Returns every operation so often more as its part says; other parts not at all."""
        return Workload(
            tuple(
                dataclasses.replace(op, count=op.count * counts[op.part])
                for op in self.ops
                if counts.get(op.part)
            )
        )

    @property
    def flops(self) -> float:
        """All floating-point operations."""
        return sum(op.flops * op.count for op in self.ops)


def decoder_workload(
    work: DecoderWork, batch: int, seq_len: int, keys: float | None = None
) -> Workload:
    """Returns a decoder's forward pass over `batch` rows.

    keys: keys per query that the attention kernel multiplies; None: all of the window.
    """
    tokens, D, L = batch * seq_len, work.width, work.layers
    keys = min(work.window or seq_len, seq_len) if keys is None else keys
    norms = 1 if work.parallel else 2
    attended = 2 * work.attention_width + 2 * work.kv_width  # q and the result, k and v
    routed = work.routed
    pairs = routed.pairs(seq_len) if routed else 0.0
    active = work.hidden + (pairs * routed.hidden if routed else 0.0)

    def matmul(part: Any, inner: int, outer: int, count: int) -> Op:
        moved = tokens * (inner + outer) + inner * outer
        return Op(part, 2 * tokens * inner * outer, moved, count)

    experts: tuple[Op, ...] = ()
    if routed:
        one = work.expert_params // L
        moved = tokens * pairs * (2 * D + (2 + work.gated) * routed.hidden) + routed.experts * one
        experts = (
            matmul("router", D, routed.experts, L),
            Op("experts", 2 * tokens * pairs * one, moved, L),
        )
    return Workload(
        (
            Op("norm", 0, 2 * tokens * D, norms * L),
            matmul("input", D, work.input_width, L),
            Op("attention", 4 * tokens * work.attention_width * keys, tokens * attended, L),
            Op("activation", 0, tokens * (2 + work.gated) * active, L),
            matmul("output", work.output_width, D, L),
            *experts,
            matmul("head", D, work.vocab, 1),
        )
    )


def passes(part: Part, remat: Remat, pipeline: Pipeline) -> dict[str, float]:
    """Returns {kind: what an op of that kind costs, in forward passes of a part}.

    A backward pass is two. Where it is split, B and W both go through the chain of gradients, of
    products with weights the half that W does not add (parallel/tick.py:Tick.pull).
    """
    again = RECOMPUTED[remat].get(part, 0.0)
    if pipeline.stages > 1 and pipeline.stash == "input":
        again += 1.0
    if not pipeline.is_split:
        return {"F": 1.0, "B": again + 2.0}
    chain = 1.0 if part in ("input", "output", "router", "experts") else 2.0
    return {"F": 1.0, "B": again + chain, "W": again + 2.0}


@dataclasses.dataclass(frozen=True)
class StepShape:
    """One optimizer step on a mesh.

    sizes: {mesh axis: size}. zero_axes: axes that cut a weight along its width. itemsize: bytes of
    the compute dtype. accumulate: micro-batches one after the other, without a pipeline.
    fused_attention: no (queries x keys) array exists. local_gradients: sums of gradients rest whole
    on every device until the end of the step. context: how queries meet keys of other devices.
    """

    work: DecoderWork
    global_batch: int
    seq_len: int
    sizes: Mapping[str, int]
    zero_axes: tuple[str, ...]
    accumulate: int = 1
    remat: Remat = "outputs"
    loss_chunks: int = 1
    itemsize: int = 2
    optimizer: str = "adamw"
    fused_attention: bool = False
    local_gradients: bool = False
    pipeline: Pipeline = Pipeline()
    context: Literal["ring", "ulysses", "gather"] = "ring"

    def ways(self, *axes: str) -> int:
        """Returns into how many pieces these mesh axes cut together."""
        ways = 1
        for axis in axes:
            ways *= self.sizes.get(axis, 1)
        return ways

    @property
    def expert_zero_axes(self) -> tuple[str, ...]:
        """The axes that cut a routed expert along its width: it rests on `expert`."""
        return tuple(a for a in self.zero_axes if a != "expert")

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def micro_steps(self) -> int:
        """Forward passes of a step: micro-batches one after the other, in a pipeline or not."""
        return self.accumulate * self.pipeline.microbatches

    @functools.cached_property
    def rows(self) -> float:
        """Rows of one micro-batch on one device."""
        return self.global_batch / (self.ways(*BATCH_AXES) * self.micro_steps)

    @functools.cached_property
    def tokens(self) -> float:
        """Tokens of one micro-batch that a device's block works on."""
        return self.rows * self.seq_len / self.ways("context")

    @property
    def layers(self) -> float:
        """Layers of one device's stage."""
        return self.work.layers / self.pipeline.stages

    @property
    def keys(self) -> float:
        """Keys per query that the attention kernel multiplies: all of them unless it is fused."""
        reach = min(self.work.window or self.seq_len, self.seq_len)
        return reach if self.fused_attention else self.seq_len

    @property
    def kv_copies(self) -> int:
        """Tensor ranks that hold each key-value head (parallel/sharding.py)."""
        return max(self.ways("tensor") // max(self.work.kv_heads, 1), 1)

    @functools.cached_property
    def used(self) -> DecoderWork:
        """The work of all tensor ranks together: each computes the key-value head that it uses."""
        work, more = self.work, self.kv_copies - 1
        params = work.matmul_params + more * work.kv_params
        return dataclasses.replace(
            work, kv_width=work.kv_width * self.kv_copies, matmul_params=params
        )

    @property
    def unshared_params(self) -> float:
        """The layers' dense parameters as tensor ranks store them, counted on all ranks: where a
        key-value head has copies, every rank stores all of these heads."""
        shared = self.ways("tensor") - 1 if self.kv_copies > 1 else 0
        return self.work.dense_params + shared * self.work.kv_params

    def executions(self, forward: float, backward: float) -> float:
        """Executions a step, on one device, of what a layer's passes do so often.

        backward: with what is made again there; a pipeline's chunk inputs add a forward pass, W a
        second chain, and idle ticks count, because the program computes in them.
        """
        pipeline = self.pipeline
        if pipeline.stages == 1:
            return self.layers * self.accumulate * (forward + backward)
        if pipeline.stash == "input":
            backward += forward
        ticks = pipeline.ticks
        runs = forward * ticks["F"] + backward * (ticks["B"] + ticks.get("W", 0))
        return self.layers / pipeline.chunks * runs

    @property
    def keeps_attention(self) -> bool:
        """Whether an array of queries x keys exists: a ring and a fused kernel work in blocks."""
        return not (self.fused_attention or (self.context == "ring" and self.ways("context") > 1))

    @functools.cached_property
    def forward(self) -> Workload:
        """One device's share of a step's forward pass.

        Layers are cut over pipe and tensor, tokens over the batch axes and context; copies of a
        key-value head are computed on every rank that has one. The head is counted once a step and
        spread over the stages.
        """
        return _forward(self.used, self.global_batch, self.seq_len, self.keys, self.devices)

    @functools.cached_property
    def counts(self) -> dict[str, tuple[float, float]]:
        """{part: forward passes that a step costs, and those that its pipeline's idle ticks cost}.

        The head is in no idle tick.
        """
        pipeline = self.pipeline
        idle = {kind: ticks / pipeline.work - 1 for kind, ticks in pipeline.ticks.items()}
        found: dict[str, tuple[float, float]] = {"head": (3.0 + (self.loss_chunks > 1), 0.0)}
        for op in self.forward.ops:
            if op.part != "head":
                cost = passes(op.part, self.remat, pipeline)
                found[op.part] = sum(cost.values()), sum(idle[k] * n for k, n in cost.items())
        return found

    @property
    def workload(self) -> Workload:
        """What one device does in a step, the optimizer and a pipeline's idle ticks left out."""
        return self.forward.times({part: done for part, (done, _) in self.counts.items()})

    @property
    def masked(self) -> Workload:
        """What one device computes in the idle ticks of its pipeline."""
        return self.forward.times({part: idle for part, (_, idle) in self.counts.items()})


@functools.cache
def _forward(work: DecoderWork, batch: int, seq_len: int, keys: float, devices: int) -> Workload:
    return decoder_workload(work, batch, seq_len, keys).cut(devices)


class CostModel(Protocol):
    """The three questions. Times are seconds."""

    def op_time(self, op: Op, device: DeviceCard, dtype: str) -> tuple[float, float]:
        """Returns (seconds of one execution, their standard deviation)."""
        ...

    def transfer_time(self, nbytes: float, link: Link) -> float:
        """Returns seconds from one device to another."""
        ...

    def memory(self, trees: Mapping[str, Iterable[Any]]) -> dict[str, int]:
        """Returns bytes a device by name; leaves have shape, dtype and sharding."""
        ...
