"""What is planned: networks, cluster, cuts, and the kernels of a microbatch (Optimus, section 4.1).

A network is cut over pipeline, tensor and data parallelism; the encoder has a cut of its own on the
decoder's GPUs. A microbatch's pass through a network is a row of kernels on one GPU, whose seconds
a `CostModel` says. Collectives of tensor parallelism are kernels, too.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megajax.core.errors import UserError, divisors, nearest_divisors, nearest_multiples
from megajax.core.hardware import Cluster
from megajax.cost import memory
from megajax.cost.base import CostModel, Op, Remat, Workload, recomputed
from megajax.cost.kernels import Collective, Matmul
from megajax.cost.step import Pipeline, StepShape
from megajax.models.vit import VitConfig
from megajax.models.vlm import VlmConfig

# Bytes of a parameter: a bfloat16 weight and a float32 gradient (section 4.1, k = 6); the optimizer
# is cut over data parallelism and not counted.
STATE_BYTES = 6
GATHERED_BYTES, SCATTERED_BYTES = 2, 4  # of a parameter that data parallelism sends


@dataclasses.dataclass(frozen=True)
class Degrees:
    """How a network is cut: devices of each axis. chunks: groups of layers on a stage."""

    pipe: int
    tensor: int
    data: int
    chunks: int = 1

    @property
    def devices(self) -> int:
        """All devices."""
        return self.pipe * self.tensor * self.data


@dataclasses.dataclass(frozen=True)
class Job:
    """What is trained, and on what.

    decoder: the decoder's cut. towers: the encoders, which run one after the other. batch: rows of
    a step. microbatch: rows of a microbatch. patches: of a row's images. frozen: whether the towers
    have no backward pass (their projectors have one). exchanges: whether the towers' data
    parallelism takes time.
    """

    model: VlmConfig
    cluster: Cluster
    decoder: Degrees
    towers: tuple[VitConfig, ...]
    batch: int
    microbatch: int
    seq_len: int
    patches: int
    remat: Remat
    frozen: bool
    cost: CostModel
    tower_cost: CostModel
    exchanges: bool

    @property
    def microbatches(self) -> int:
        """Microbatches of a replica of the decoder."""
        return self.batch // (self.decoder.data * self.microbatch)

    @property
    def decoder_load(self) -> Workload:
        """The decoder's forward pass of a step."""
        return self.model.decoder.workload(self.batch, self.seq_len)

    @property
    def tower_loads(self) -> tuple[Workload, ...]:
        """The towers' forward passes of a step, with their projectors."""
        models = (dataclasses.replace(self.model, tower=tower) for tower in self.towers)
        loads = (m.workload(self.batch, self.seq_len, patches=self.patches) for m in models)
        return tuple(load.towers[0] for load in loads)

    def exchange(self, params: float, cut: Degrees) -> tuple[float, float]:
        """Returns the seconds in which data parallelism gathers a GPU's weights, and in which it
        scatters their gradients."""
        inside = min(cut.data, max(self.cluster.gpus_per_host // cut.tensor, 1))
        hosts = -(-cut.data // inside)
        sent = ("all-gather", GATHERED_BYTES), ("reduce-scatter", SCATTERED_BYTES)
        gather, scatter = (
            self.seconds(Collective(kind, size * params, inside, hosts)) for kind, size in sent
        )
        return gather, scatter

    def seconds(self, kernel: Collective) -> float:
        """Returns the seconds of a collective."""
        return self.cost.op_time(Op("transfer", kernel), self.cluster.card)[0]

    def hop(self, load: Workload) -> float:
        """Returns the seconds in which a microbatch's residual stream goes to another stage."""
        step = self.step(load, self.decoder.tensor)
        return self.cost.transfer_time(memory.residual(step), self.cluster.between)

    def step(self, load: Workload, tensor: int) -> StepShape:
        """Returns a network's step without a pipeline, microbatch by microbatch."""
        sizes = {"data": self.decoder.data, "tensor": tensor}
        step = StepShape(load, sizes, (), self.microbatches, self.remat, fused_attention=True)
        return step


# ---- kernels


class Kernel(NamedTuple):
    """A piece of work that is never cut. kind: 'F', 'B', 'EF', 'EB', or 'COMM': a collective of
    tensor parallelism, which is on the link and not on the SMs."""

    seconds: float
    kind: str


class Passes(NamedTuple):
    """Kernels in the order in which they run, of one microbatch on one GPU."""

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()

    @property
    def seconds(self) -> float:
        """The time of both."""
        return sum(kernel.seconds for kernel in (*self.forward, *self.backward))

    @staticmethod
    def join(parts: Iterable["Passes"]) -> "Passes":
        """Returns the passes through several pieces of a network one after the other."""
        pieces = list(parts)
        forward = tuple(kernel for piece in pieces for kernel in piece.forward)
        backward = tuple(kernel for piece in pieces[::-1] for kernel in piece.backward)
        return Passes(forward, backward)


class Network(NamedTuple):
    """The passes through what comes before the blocks, through one block, and through the rest."""

    enter: Passes
    layer: Passes
    leave: Passes
    layers: int

    def pieces(self, sizes: Sequence[int]) -> list[Passes]:
        """Returns the passes through parts with so many blocks."""
        blocks = [Passes.join([self.layer] * size) for size in sizes]
        blocks[0] = Passes.join([self.enter, blocks[0]])
        blocks[-1] = Passes.join([blocks[-1], self.leave])
        return blocks


def network(job: Job, load: Workload, tensor: int, kinds: tuple[str, str]) -> Network:
    """Returns the kernels of a network that so many tensor ranks share. kinds: of both passes.

    An all-gather stands before each product that reads the residual stream, a reduce-scatter after
    each that writes to it. In the backward pass each product is two, one for each gradient, and the
    input of those that read the stream is gathered again (2205.05198, section 4.2.2), which makes
    10 collectives of a block and microbatch: the 0.585 s of about 300 us in Optimus' table 1.
    """
    step = job.step(load, tensor)
    layers, itemsize = round(load.layers), step.itemsize
    before: list[Op] = []
    block: list[Op] = []
    after: list[Op] = []
    for op in step.forward.ops:
        times = op.count / step.micro_steps
        if op.part == "head":
            after.append(op)
        elif op.part != "embedding" and times >= layers:
            block.append(op)
        else:
            (after if block else before).extend([op] * max(round(times), 1))
    norms = [op for op in block if op.part == "norm"]

    def made(ops: Iterable[Op]) -> Passes:
        parts: list[tuple[float, str, str]] = []  # seconds, part, kind
        for op in ops:
            seconds = job.cost.op_time(op, job.cluster.card)[0]
            kernel = op.kernel
            reads = op.part in ("input", "head") and isinstance(kernel, Matmul)
            if reads and tensor > 1:
                gather = Collective("all-gather", itemsize * kernel.m * kernel.k, tensor, 1)
                parts.append((job.seconds(gather), op.part, "COMM"))
            if seconds:
                parts.append((seconds, op.part, ""))
            if op.part == "output" and isinstance(kernel, Matmul) and tensor > 1:
                scatter = Collective("reduce-scatter", itemsize * kernel.m * kernel.n, tensor, 1)
                parts.append((job.seconds(scatter), op.part, "COMM"))
        forward = tuple(Kernel(seconds, kind or kinds[0]) for seconds, _, kind in parts)
        backward = []
        for seconds, part, kind in parts:
            again = recomputed(job.remat, part, False)
            backward += [Kernel(seconds * again, kind or kinds[1])] if again else []
        for i, (seconds, part, kind) in reversed([*enumerate(parts)]):
            if kind:
                backward.append(Kernel(seconds, kind))
            elif part in ("input", "output", "head", "router", "experts"):
                gathered = parts[i - 1 : i] if part in ("input", "head") else []
                backward += [Kernel(again, name) for again, _, name in gathered if name]
                backward += [Kernel(seconds, kinds[1])] * 2
            else:
                backward.append(Kernel(2 * seconds, kinds[1]))
        return Passes(forward, tuple(backward))

    ordered: list[Op] = []
    for op in block:
        if op.part == "input":
            ordered += norms[:1]
        ordered += [op] if op.part != "norm" else []
    return Network(made(before), made(ordered), made(after), layers)


def encoder_networks(job: Job, tensor: int) -> list[Network]:
    """Returns the kernels of the towers, without the backward passes of frozen ones."""
    costed = dataclasses.replace(job, cost=job.tower_cost)
    towers = [network(costed, load, tensor, ("EF", "EB")) for load in job.tower_loads]
    if not job.frozen:
        return towers
    return [
        tower._replace(
            enter=tower.enter._replace(backward=()), layer=tower.layer._replace(backward=())
        )
        for tower in towers
    ]


def even(layers: int, parts: int) -> list[int]:
    """Returns how many layers each part has, as equal as can be everywhere in the row."""
    edges = [part * layers // parts for part in range(parts + 1)]
    return [b - a for a, b in itertools.pairwise(edges)]


# ---- cuts


def filled(job: Job, cut: Degrees) -> Job:
    """Returns the job with a cut of the decoder, and a batch if it has none."""
    rows = job.batch or cut.data * 2 * cut.pipe * job.microbatch
    return dataclasses.replace(job, decoder=cut, batch=rows)


def chosen(job: Job) -> Job:
    """Returns the job with a cut of the decoder by the rules of Megatron-LM (2104.04473, 5.4)."""
    model, cluster = job.model, job.cluster
    heads = model.heads, model.kv_heads
    tensor = max(t for t in divisors(cluster.gpus_per_host) if not any(n % t for n in heads))
    jobs = [
        filled(job, Degrees(pipe, tensor, cluster.devices // (tensor * pipe)))
        for pipe in divisors(cluster.devices // tensor)
        if pipe <= model.layers
    ]
    legal = [one for one in jobs if one.batch % (one.decoder.data * one.microbatch) == 0]
    fits = [one for one in legal if encoder_cuts(one)[0]]
    job = fits[0] if fits else (legal or jobs)[-1]
    pipe = job.decoder.pipe
    if pipe == 1 or job.microbatches % pipe:
        return job
    cut = dataclasses.replace(job.decoder, chunks=max(model.layers // pipe, 1))
    return dataclasses.replace(job, decoder=cut)


def check(job: Job) -> None:
    """Refuses a cut of the decoder that does not fit the cluster, the model or the batch.

    Raises: UserError.
    """
    cut, cluster = job.decoder, job.cluster
    if cut.devices != cluster.devices:
        raise UserError(
            f"strategy has {cut.pipe} x {cut.tensor} x {cut.data} = {cut.devices} devices, and "
            f"{cluster.name} has {cluster.devices}; they must be equal"
        )
    if cluster.gpus_per_host % cut.tensor:
        raise UserError(
            f"strategy.tensor={cut.tensor} must divide the {cluster.gpus_per_host} GPUs of a host; "
            f"{nearest_divisors(cluster.gpus_per_host, cut.tensor)}"
        )
    if cut.pipe * cut.chunks > job.model.layers:
        raise UserError(
            f"strategy.pipe={cut.pipe} x strategy.chunks={cut.chunks} must be at most the "
            f"decoder's {job.model.layers} layers"
        )
    rows = cut.data * job.microbatch
    if job.batch % rows:
        raise UserError(
            f"batch={job.batch} must be a multiple of {cut.data} replicas x {job.microbatch} rows "
            f"of a microbatch; {nearest_multiples(job.batch, rows)}"
        )


def state_bytes(job: Job, encoder: Degrees) -> tuple[float, float]:
    """Returns the bytes of a GPU, and those of them that the encoder's extra copies need.

    k (DP_e Phi_e + DP_l Phi_l) / n and what the decoder keeps of its microbatches (section 4.1).
    """
    cut, n = job.decoder, job.cluster.devices
    towers = sum(load.params for load in job.tower_loads)
    load = job.decoder_load
    state = STATE_BYTES * (encoder.data * towers + cut.data * load.params) / n
    extra = STATE_BYTES * (encoder.data - cut.data) * towers / n
    sizes = {"pipe": cut.pipe, "data": cut.data, "tensor": cut.tensor}
    schedule = "interleaved" if cut.chunks > 1 else "1f1b"
    pipeline = Pipeline(cut.pipe, job.microbatches, cut.chunks, schedule, "residuals")
    accumulate = 1 if cut.pipe > 1 else job.microbatches
    step = StepShape(
        load, sizes, (), accumulate, job.remat, fused_attention=True, pipeline=pipeline
    )
    return state + memory.terms(step)["stash"], extra


def encoder_cuts(job: Job) -> tuple[list[Degrees], str]:
    """Returns the cuts of the encoder that fit, and why none does.

    Its stages and tensor ranks divide the decoder's, and each of its pipelines gets a microbatch.
    """
    cut, n, cuts = job.decoder, job.cluster.devices, []
    card, needs = job.cluster.card, []
    for pipe, tensor in itertools.product(divisors(cut.pipe), divisors(cut.tensor)):
        encoder = Degrees(pipe, tensor, n // (pipe * tensor))
        if any(tower.heads % tensor or tower.layers < pipe for tower in job.towers):
            continue
        needed = state_bytes(job, encoder)[0]
        if encoder.data // cut.data > job.microbatches:
            continue
        if needed > card.memory_bytes:
            needs.append((needed, pipe, tensor))
        else:
            cuts.append(encoder)
    if cuts:
        return cuts, ""
    if not needs:
        return [], (
            f"no cut of the encoder goes with strategy.pipe={cut.pipe}, strategy.tensor="
            f"{cut.tensor} and {job.microbatches} microbatches: its {job.towers[0].heads} heads "
            f"and {job.towers[0].layers} layers must hold them, and each of its pipelines needs a "
            f"microbatch; use fewer tensor ranks or a larger batch={job.batch}"
        )
    needed, pipe, tensor = min(needs)
    return [], (
        f"the encoder does not fit {card.name}: with {pipe} stages x {tensor} tensor ranks, the "
        f"most that strategy.pipe={cut.pipe} and strategy.tensor={cut.tensor} allow, a GPU needs "
        f"{memory.size(needed)} for both networks and the decoder's activations, and has "
        f"{memory.size(card.memory_bytes)}; use more stages or a smaller microbatch than "
        f"{job.microbatch}"
    )
