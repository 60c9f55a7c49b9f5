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

ITEMSIZE = {
    "float32": 4, "tfloat32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Op:
    """One kind of operation, executed `count` times.

    part: what it is in a block, for recomputation. elements: array elements that move to or from
    memory in one execution.
    """

    part: Literal["norm", "input", "attention", "activation", "output", "head", "update"]
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

    def training(self, remat: Remat, loss_chunks: int) -> "Workload":
        """Returns forward, backward (twice the forward) and what is recomputed."""
        again = RECOMPUTED[remat] | {"head": float(loss_chunks > 1)}
        return Workload(
            tuple(
                dataclasses.replace(op, count=op.count * (3 + again.get(op.part, 0.0)))
                for op in self.ops
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
    hidden = (2 + work.gated) * work.hidden

    def matmul(part: Any, inner: int, outer: int, count: int) -> Op:
        moved = tokens * (inner + outer) + inner * outer
        return Op(part, 2 * tokens * inner * outer, moved, count)

    return Workload(
        (
            Op("norm", 0, 2 * tokens * D, norms * L),
            matmul("input", D, work.input_width, L),
            Op("attention", 4 * tokens * work.attention_width * keys, tokens * attended, L),
            Op("activation", 0, tokens * hidden, L),
            matmul("output", work.output_width, D, L),
            matmul("head", D, work.vocab, 1),
        )
    )


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """How a pipeline runs: stages, micro-batches a step, and chunks of layers a stage (v)."""

    stages: int = 1
    microbatches: int = 1
    chunks: int = 1

    @property
    def bubble(self) -> float:
        """Idle time of a stage over its work, interleaved 1F1B: (S - 1) / (v M).

        Source: Megatron-LM (arXiv 2104.04473) section 2.2.2.
        """
        return (self.stages - 1) / (self.chunks * self.microbatches)


@dataclasses.dataclass(frozen=True)
class StepShape:
    """One optimizer step on a mesh.

    sizes: {mesh axis: size}. zero_axes: axes that cut a weight along its width. itemsize: bytes of
    the compute dtype. accumulate: micro-batches one after the other, without a pipeline.
    fused_attention: no (queries x keys) array exists. local_gradients: sums of gradients rest whole
    on every device until the end of the step.
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

    def ways(self, *axes: str) -> int:
        """Returns into how many pieces these mesh axes cut together."""
        return math.prod(self.sizes.get(a, 1) for a in axes)

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.sizes.values())

    @property
    def micro_steps(self) -> int:
        """Forward passes of a step: micro-batches one after the other, in a pipeline or not."""
        return self.accumulate * self.pipeline.microbatches

    @property
    def rows(self) -> float:
        """Rows of one micro-batch on one device."""
        return self.global_batch / (self.ways(*BATCH_AXES) * self.micro_steps)

    @property
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

    @functools.cached_property
    def workload(self) -> Workload:
        """What one device executes in a step, the optimizer left out.

        Layers are cut over pipe and tensor, tokens over the batch axes and context. The head is
        counted once a step and spread over the stages.
        """
        whole = decoder_workload(self.work, self.global_batch, self.seq_len, self.keys)
        return whole.training(self.remat, self.loss_chunks).cut(self.devices)


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
