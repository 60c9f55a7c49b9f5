"""Describes one step of a workload on a mesh, as a `StepShape`. This module does not import jax.

A step is an optimizer step, or a forward pass of generation. A `StepShape` has everything that the
memory, the communication and the time of a step depend on. Plans, searches and tests make it from a
`Workload` (cost/base.py) and the sizes of the mesh axes.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from megajax.core.axes import BATCH_AXES
from megajax.core.errors import UserError
from megajax.cost.base import ITEMSIZE, Op, Part, Remat, Workload, recomputed
from megajax.cost.kernels import Attention, Embedding, Experts, Matmul, Rowwise
from megajax.schedule.build import Schedule
from megajax.schedule.ir import Idle

# ---- pipeline
#
# How often the program of a pipeline-parallel step computes each kind of work, in closed form.
#
# The kinds are F (forward), B (backward) and, if the schedule splits it off, W (gradients of the
# weights). The program runs a schedule table tick by tick on all stages at once. If any stage has
# work of a kind in a tick, all stages compute that kind, and the results of stages that have none
# are masked, or these stages skip the kind and wait. In each tick of these schedules, one stage has
# work of all kinds that occur in it. So both modes take the same time, which is the number of
# ticks, also for stages that are idle in them.
# The formulas are those of the tables that schedule/build.py makes; a test compares them with the
# tables themselves and with their lockstep times.
#
# Legend: S stages, M micro-batches, v chunks of layers a stage.


Stash = Literal["input", "residuals"]


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A pipeline's schedule. One stage: no pipeline.

    stash: what is kept from F to B. 'input': the input of a chunk, so that B runs F again;
    'residuals': what rematerialisation keeps of its layers. hides: whether the weights and
    gradients of a chunk are sent while other chunks are computed. idle: what a stage does in a slot
    without work: it computes ('mask') or waits ('skip').
    """

    stages: int = 1
    microbatches: int = 1
    chunks: int = 1
    schedule: Schedule = "interleaved"
    stash: Stash = "input"
    hides: bool = False
    idle: Idle = "mask"

    @property
    def is_split(self) -> bool:
        """Whether W, the weights' gradient, stands apart from B."""
        return self.schedule == "zero_bubble" and self.stages > 1

    @property
    def work(self) -> int:
        """Ops of each kind that a stage has in a step."""
        return self.chunks * self.microbatches

    @property
    def ticks(self) -> dict[str, int]:
        """Ticks of a step in which any stage computes each kind, F, B and (split) W.

        A stage has `work` of each; the others are the bubble, (S - 1) / (v M) of the work
        (Megatron-LM, arXiv 2104.04473 section 2.2.2). All stages compute W at once: no bubble.
        """
        ticks = dict.fromkeys("FB", self.work + self.stages - 1)
        return ticks | ({"W": self.work} if self.is_split else {})

    @property
    def live_inputs(self) -> int:
        """Chunk inputs that the fullest stage keeps at one time."""
        if self.schedule == "gpipe":
            return self.work
        return min((self.chunks + 1) * self.stages - 1, self.work)


# ---- step


# {part: the dimensions of its product that tensor parallelism shards}; for kernels that are no
# product see `_tensor_dims`.
_CUT = {"input": ("n",), "head": ("n",), "output": ("k",), "router": ("m",)}


def passes(
    part: Part,
    remat: Remat,
    pipeline: Pipeline,
    keeps_attention: bool = True,
    rings: bool = False,
) -> dict[str, float]:
    """Returns {kind of pass: its cost, as a multiple of the part's forward pass}.

    The kinds are F (forward) and B (backward), which costs two forward passes besides what
    rematerialisation computes again. A zero-bubble pipeline splits off W, the gradients of the
    weights. The program then computes the gradients of activations in B and again in W: of a
    product with weights that is one forward pass, of another part two
    (parallel/pipeline.py:Tick.pull).
    """
    again = recomputed(remat, part, keeps_attention, rings)
    if pipeline.stages > 1 and pipeline.stash == "input":
        again += 1.0
    if not pipeline.is_split:
        return {"F": 1.0, "B": again + 2.0}
    chain = 1.0 if part in ("input", "output", "router", "experts") else 2.0
    return {"F": 1.0, "B": again + chain, "W": again + 2.0}


class Payload(Protocol):
    """A codec of what is sent (megajax/quant/codecs.py). format: that of its groups, if it has
    any."""

    @property
    def format(self) -> Any: ...  # noqa: D102

    def wire_bytes(self, n: int) -> int: ...  # noqa: D102


@dataclasses.dataclass(frozen=True)
class Coding:
    """The codecs with which data parallelism sends weights and gradients.

    weights: the codec of gathered weights. inside, between: the codecs of gradients inside a node
    and between nodes. block: elements of a block of the transform that is applied to gradients
    before they are quantized; 1: no transform. difference: whether weights are sent as their
    difference to the copy that each rank has. error_bits: bits for each element of gradients in
    which the sender keeps the error of quantizing them.
    """

    weights: Payload
    inside: Payload
    between: Payload
    block: int = 1
    difference: bool = False
    error_bits: float = 0.0


# Arrays of a parameter's size and float32 that an optimizer (OptimConfig.name) keeps beside it, by
# which memory and the time of an update are estimated.
MOMENTS = {"adamw": 2, "lamb": 2, "muon": 1, "sgd": 1}


@dataclasses.dataclass(frozen=True)
class StepShape:
    """One step on a mesh, which trains, or generates if the workload says so.

    load: the forward pass of the global batch, on all devices together. sizes: {mesh axis: size}.
    zero_axes: axes over which ZeRO shards a weight along its width. accumulate: micro-batches one
    after the other, without a pipeline. fused_attention: no (queries x keys) array exists, as with
    our kernel and with cuDNN's offsets of segments. If cuDNN takes packed rows by a mask (GPUs
    other than Hopper, layers/attention.py), the mask and its 16-bit bias (rows, queries, keys),
    which every head reads in both passes, are not counted: memory and time are too low there.
    local_gradients: every device holds its sums of gradients unsharded until the end of the step.
    context: how context parallelism brings queries to the keys of other devices. resident: every
    device holds all weights of its stage in use (ZeRO-1/2); weights and gradients are sent once a
    step. coding: the codecs with which they are sent; None: in the data type in which they are
    computed, and gradients of a resident step in float32. averages: a running mean of the weights
    is held too.
    Raises: UserError for a pipeline or a sharded sequence in generation, which has neither.
    """

    load: Workload
    sizes: Mapping[str, int]
    zero_axes: tuple[str, ...]
    accumulate: int = 1
    remat: Remat = "outputs"
    loss_chunks: int = 1
    optimizer: str = "adamw"
    averages: bool = False
    fused_attention: bool = False
    local_gradients: bool = False
    pipeline: Pipeline = Pipeline()
    context: Literal["ring", "ulysses", "gather"] = "ring"
    resident: bool = False
    coding: Coding | None = None

    def __post_init__(self):
        """Refuses what generation cannot do, and an optimizer without a row in MOMENTS."""
        if self.optimizer not in MOMENTS:
            raise AssertionError(
                f"no number of moments is known of the optimizer {self.optimizer!r}; add it to "
                "megajax/cost/step.py:MOMENTS"
            )
        for axis in ("pipe", "context"):
            if not self.trains and self.ways(axis) > 1:
                raise UserError(
                    f"mesh.{axis}={self.ways(axis)} must be 1 for {self.load.phase}: generation "
                    f"cuts neither layers nor sequences (--mesh.{axis})"
                )

    @functools.cached_property
    def trunk(self) -> "StepShape":
        """The step without its towers."""
        bare = dataclasses.replace(self.load, towers=())
        return dataclasses.replace(self, load=bare) if self.load.towers else self

    @functools.cached_property
    def towers(self) -> tuple["StepShape", ...]:
        """A step of each tower alone. A pipeline runs it on every stage, with its weights
        resident."""
        sizes = {axis: 1 if axis == "pipe" else size for axis, size in self.sizes.items()}
        return tuple(
            dataclasses.replace(
                self,
                load=tower,
                sizes=sizes,
                accumulate=self.micro_steps,
                loss_chunks=1,
                local_gradients=False,
                pipeline=Pipeline(),
                resident=self.resident or self.pipeline.stages > 1,
            )
            for tower in self.load.towers
        )

    @property
    def trains(self) -> bool:
        """Whether a backward pass and an update follow."""
        return self.load.phase == "train"

    @property
    def exchanges(self) -> bool:
        """Whether weights and gradients are sent as cost/traffic.py describes."""
        return self.resident or self.coding is not None

    @property
    def streams(self) -> bool:
        """Whether a resident step sends each layer's gradients when they are made, not all sums at
        the end (training/gradients.py)."""
        return self.resident and self.accumulate == 1 and self.pipeline.stages == 1

    @property
    def itemsize(self) -> float:
        """Bytes of the compute data type."""
        return ITEMSIZE[self.load.dtype]

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
    def pieces(self) -> int:
        """Pieces of the global batch: micro-batches of all devices that cut it by rows."""
        return self.ways(*BATCH_AXES) * self.micro_steps

    @functools.cached_property
    def rows(self) -> float:
        """Rows of one micro-batch on one device."""
        return self.load.rows / self.pieces

    @functools.cached_property
    def tokens(self) -> float:
        """Tokens of one micro-batch that a device's block works on."""
        return self.rows * self.load.seq_len / self.ways("context")

    @property
    def layers(self) -> float:
        """Layers of one device's stage."""
        return self.load.layers / self.pipeline.stages

    @property
    def stored_layers(self) -> float:
        """Layers of one device's stage that have parameters of their own."""
        return self.load.stored_layers / self.pipeline.stages

    @property
    def kv_copies(self) -> int:
        """Tensor ranks that hold each key-value head (parallel/sharding.py)."""
        attention = self.load.attention
        return max(self.ways("tensor") // max(round(attention.kv_heads), 1), 1) if attention else 1

    @functools.cached_property
    def used(self) -> Workload:
        """The work of all tensor ranks together: each computes the key-value head that it uses."""
        return _used(self.load, self.kv_copies, self.fused_attention)

    @property
    def unshared_params(self) -> float:
        """The layers' dense parameters as tensor ranks store them, counted on all ranks: where a
        key-value head has copies, every rank stores all of these heads."""
        shared = self.ways("tensor") - 1 if self.kv_copies > 1 else 0
        return self.load.dense_params + shared * self.load.kv_params

    def executions(self, forward: float, backward: float) -> float:
        """Returns how often one device executes something in a step, for all of its layers.

        Args: forward, backward: how often one layer executes it in a forward and in a backward
        pass, the latter with what rematerialisation computes again. A pipeline adds a forward pass
        if it keeps only the inputs of chunks, and a backward pass for W. Its idle ticks count,
        because the program computes in them, or waits for the stage that does.
        """
        if not self.trains:
            return self.layers * self.accumulate * forward
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
        if self.load.attention is None:
            return False
        return not (self.fused_attention or self.rings)

    @property
    def rings(self) -> bool:
        """Whether attention is a ring, whose queries meet the keys of one device at a time."""
        return self.context == "ring" and self.ways("context") > 1

    @functools.cached_property
    def forward(self) -> Workload:
        """One device's share of a step's forward pass, with the shapes that the device executes.

        Layers are cut over pipe and tensor, tokens over the batch axes and context; copies of a
        key-value head are computed on every rank that has one. The head is counted once a step and
        spread over the stages.
        """
        ways = (self.pieces, self.ways("context"), self.ways("tensor"), self.ways("expert"))
        return _forward(self.used, ways, self.pipeline.stages, self.micro_steps)

    @functools.cached_property
    def counts(self) -> dict[str, tuple[float, float]]:
        """{part: (cost of a step, cost of its pipeline's idle ticks)}, in forward passes of a part.

        An idle tick costs its time, whether a device computes in it or waits. The head is not
        computed in idle ticks. Lookups in an embedding have no cost.
        """
        if not self.trains:
            return {op.part: (1.0, 0.0) for op in self.forward.ops if op.part != "embedding"}
        pipeline = self.pipeline
        idle = {kind: ticks / pipeline.work - 1 for kind, ticks in pipeline.ticks.items()}
        counts: dict[str, tuple[float, float]] = {"head": (3.0 + (self.loss_chunks > 1), 0.0)}
        counts["frozen"] = (1.0, idle["F"])
        for part in {op.part for op in self.forward.ops} - {"head", "embedding", "frozen"}:
            cost = passes(part, self.remat, pipeline, self.keeps_attention, self.rings)
            counts[part] = sum(cost.values()), sum(idle[k] * n for k, n in cost.items())
        return counts

    @property
    def workload(self) -> Workload:
        """What one device does in a step, the optimizer and a pipeline's idle ticks left out."""
        return self.forward.times({part: done for part, (done, _) in self.counts.items()})

    @property
    def masked(self) -> Workload:
        """What one device computes in the idle ticks of its pipeline; nothing if it skips them."""
        if self.pipeline.idle == "skip":
            return self.forward.times({})
        return self.forward.times({part: idle for part, (_, idle) in self.counts.items()})


@functools.cache
def _used(load: Workload, copies: int, fused: bool) -> Workload:
    return load.with_kv_copies(copies).with_attention(fused)


@functools.cache
def _forward(
    load: Workload, ways: tuple[int, int, int, int], stages: int, micro_steps: int
) -> Workload:
    """ways: pieces of the batch, then the sizes of context, tensor and expert."""
    pieces, context, tensor, expert = ways

    def share(op: Op) -> Op:
        kernel = op.kernel
        part = op.cut(pieces, *kernel.TOKENS)
        part = part.cut(context, "queries" if op.part == "attention" else kernel.TOKENS[0])
        if dims := _tensor_dims(op):
            part = part.cut(tensor, *dims)
        if op.part == "head":
            part = part.cut(stages, *_tensor_dims(op))
        if isinstance(kernel, Experts) and isinstance(part.kernel, Experts):
            # A device has some of the experts, which meet as many rows of more tokens.
            local = dataclasses.replace(part.kernel, experts=kernel.experts / expert)
            part = dataclasses.replace(part, kernel=local, uncut=part.uncut or kernel)
        runs = 1 if op.part in ("head", "embedding") else stages
        return dataclasses.replace(part, count=op.count * micro_steps / runs)

    # Every stage runs the towers, as part of `embed`.
    ops = [share(op) for op in load.ops]
    for tower in load.towers:
        for one in map(share, tower.all_ops):
            again = 1 if one.part in ("head", "embedding") else stages
            part = "frozen" if one.frozen and one.part != "embedding" else one.part
            ops.append(dataclasses.replace(one, count=one.count * again, part=part))
    return dataclasses.replace(load, ops=tuple(ops), towers=())


def _tensor_dims(op: Op) -> tuple[str, ...]:
    """The dimensions that tensor parallelism cuts, all by the same number."""
    kernel = op.kernel
    if isinstance(kernel, Matmul):
        return _CUT[op.part]
    if isinstance(kernel, Rowwise):
        return ("width",) if op.part == "activation" else ("rows",)
    if isinstance(kernel, Embedding):
        return ("rows",)
    if op.part == "experts":
        return ("hidden",)
    # Convolutions and what belongs to them are computed on every tensor rank.
    return ("heads", "kv_heads") if isinstance(kernel, Attention) else ()
