"""Plans a vision encoder's work in the bubbles of a decoder's pipeline. Times are SIMULATED.

Source: Optimus (arXiv 2408.03505, section 4). `plan` proposes the encoder's cuts, deals the
microbatches to its pipelines and schedules its kernels (scheduler.py). `simulate` returns the
timeline of a plan. `rivals` are the schedules that the paper compares with.

Everything is one replica of the decoder. A GPU has two resources: its SMs and the link of its
tensor ranks. All tensor ranks of a stage do the same at the same time, so a stage stands for all of
them; where the encoder has fewer tensor ranks, a stage is cut into parts.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from megajax.core.errors import UserError
from megajax.core.hardware import Cluster
from megajax.cost.base import CostModel, Remat
from megajax.cost.roofline import Roofline
from megajax.models.vit import VitConfig
from megajax.models.vlm import VlmConfig
from megajax.schedule.ir import Span, Task, Timeline, Work
from megajax.systems.optimus.problem import (
    Degrees,
    Job,
    check,
    chosen,
    encoder_cuts,
    filled,
    state_bytes,
)
from megajax.systems.optimus.scheduler import (
    Backbone,
    Chain,
    EncoderCut,
    Method,
    Placement,
    backbone_of,
)

TRIES = 12  # compositions that are scheduled for each of the best cuts (chosen)
REFINED = 3  # cuts whose composition is searched (chosen)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule of a step. Seconds are SIMULATED.

    method: 'optimus'; or what it is compared with (`rivals`): 'decoder' (alone), 'megatron' (the
    encoder is extra work of the first stage), 'uniform' (all layers are split over the virtual
    stages by their number), 'balanced' (they are split so that the slowest virtual stage is as fast
    as can be). encoder: its cut; None: it has none of its own. parts: the microbatches of each of
    the encoder's pipelines. decoder_s: a step of the decoder alone. coarse_s: a step before kernels
    move into the decoder's gaps. coarse_share, fine_share: of the encoder's time that lies in a
    step of the decoder alone, before and after they move. memory_bytes: of a GPU, without the
    encoder's activations and the optimizer. extra_bytes: of them for copies of the encoder.
    executable: whether the executor of this library can run the schedule; reason: why not.
    """

    method: Method
    job: Job
    encoder: Degrees | None
    parts: tuple[int, ...]
    step_s: float
    decoder_s: float
    coarse_s: float
    coarse_share: float
    fine_share: float
    memory_bytes: float
    extra_bytes: float
    executable: bool
    reason: str


def plan(
    model: VlmConfig,
    cluster: Cluster,
    strategy: Degrees | None = None,
    *,
    batch: int | None = None,
    microbatch: int = 1,
    seq_len: int | None = None,
    patches: int | None = None,
    towers: Sequence[VitConfig] | None = None,
    remat: Remat = "none",
    frozen: bool = False,
    cost: CostModel = Roofline(),
    tower_cost: CostModel | None = None,
    exchanges: bool = True,
) -> list[Plan]:
    """Returns the cuts of the encoder that fit a GPU's memory, each with its best schedule, the
    fastest first.

    Args: strategy: the decoder's cut; None: tensor parallelism as wide as a host, the fewest stages
      that fit, all layers interleaved. batch: rows of a step; None: two microbatches for each stage
      and replica. seq_len: tokens of a row; None: 2048, or the most that the decoder has positions
      for. patches: of a row; None: half of the row's tokens show images. towers: encoders, whose
      features all enter the decoder; None: the model's. remat: of both networks. frozen: the towers
      are not trained. cost: of the kernels' times. tower_cost: of the towers'; None: `cost`.
      exchanges: whether the encoder's data parallelism takes time, which the paper leaves out.
    Raises: UserError where nothing fits, or the sizes do not divide each other.
    """
    seq_len = min(2048, model.max_positions) if seq_len is None else seq_len
    job = Job(
        model,
        cluster,
        strategy or Degrees(1, 1, 1),
        (model.tower,) if towers is None else tuple(towers),
        batch or 0,
        microbatch,
        seq_len,
        model.tower.merged * (seq_len // 2) if patches is None else patches,
        remat,
        frozen,
        cost,
        tower_cost or cost,
        exchanges,
    )
    job = chosen(job) if strategy is None else filled(job, strategy)
    check(job)
    cuts, dropped = encoder_cuts(job)
    if not cuts:
        raise UserError(dropped)
    backbone = backbone_of(job, "decoder")
    first = [(e, *e.search(1)) for e in (EncoderCut(job, backbone, cut) for cut in cuts)]
    first.sort(key=lambda one: one[2].step_s(backbone))
    refined = [(e, *e.search(TRIES)) for e, _, _ in first[:REFINED]] + first[REFINED:]
    plans = [_described(*one) for one in refined]
    return sorted(plans, key=lambda one: (one.step_s, one.memory_bytes))


def rivals(job: Job) -> list[Plan]:
    """Returns the decoder alone and the schedules that the paper compares with: see `Plan.method`.

    The head is on the last stage in all of them, as in Megatron-LM; the library's executor cuts it
    over all stages.
    """
    alone = state_bytes(job, job.decoder)[0]
    plans = []
    for method in ("decoder", "megatron", "uniform", "balanced"):
        step = backbone_of(job, method).step_s
        counts = (job.microbatches,)
        plans.append(
            Plan(method, job, None, counts, step, step, step, 0, 0, alone, 0, False, "a rival")
        )
    return plans


def simulate(plan: Plan) -> Timeline:
    """Returns the timeline of a plan, kernel by kernel, from second 0 on.

    Resources are the SMs of each stage, 'stage 3', or of each of its parts, 'stage 3 part 1', where
    the encoder has fewer tensor ranks. Collectives are spans of kind COMM: of tensor parallelism on
    'tensor link 3', of data parallelism on 'network 3'.
    """
    job = plan.job
    backbone = backbone_of(job, "decoder" if plan.method == "optimus" else plan.method)
    if plan.encoder is None:
        return _Drawing(backbone, 1, backbone.gather).timeline(backbone.step_s)
    encoder = EncoderCut(job, backbone, plan.encoder)
    placed = encoder.schedule(plan.parts)
    drawing = _Drawing(backbone, encoder.parts, placed.front_s)
    drawing.encode(encoder, placed)
    return drawing.timeline(placed.step_s(backbone), encoder.gather_s, encoder.scatter_s)


class _Drawing:
    """The spans of a timeline. parts: of a stage. shift: seconds before the decoder starts."""

    def __init__(self, backbone: Backbone, parts: int, shift: float):
        self.backbone, self.parts, self.shift = backbone, parts, shift
        self.spans: list[Span] = []
        self.features: dict[int, str] = {}  # the encoder's last kernel of each microbatch

    def resource(self, device: int, kind: str) -> str:
        stage, part = divmod(device, self.parts)
        place = f"{stage} part {part}" if self.parts > 1 else str(stage)
        return f"tensor link {place}" if kind == "COMM" else f"stage {place}"

    def chain(
        self,
        name: str,
        kernels: Chain,
        starts: Iterable[float],
        device: int,
        numbers: tuple[int, int, int],
        deps: tuple[str, ...],
    ) -> tuple[str, ...]:
        """Adds kernels that follow each other. Returns what the next one depends on."""
        for i, (kernel, start) in enumerate(zip(kernels, starts, strict=True)):
            label, begin = f"{name} kernel {i}", start + self.shift
            resource = self.resource(device, kernel.kind)
            task = Task(label, resource, deps, kernel.seconds, kernel.kind, *numbers)
            self.spans.append(Span(task, begin, begin + kernel.seconds))
            deps = (label,)
        return deps

    def encode(self, encoder: EncoderCut, placed: Placement) -> None:
        """Adds the encoder's work."""
        stages = encoder.stages
        for kind, items in (("EF", placed.forward), ("EB", placed.backward)):
            for one in items:
                microbatch, devices, deps = one.microbatch, encoder.devices[one.pipeline], ()
                rows = encoder.starts(one, kind)
                if kind == "EB":
                    deps = self.last("B", 0, 0, microbatch, devices[0] % self.parts)
                order = range(len(stages))[:: 1 if kind == "EF" else -1]
                for stage in order:
                    chain = stages[stage].forward if kind == "EF" else stages[stage].backward
                    device = devices[stage]
                    name = f"{kind} stage {device // self.parts} microbatch {microbatch}"
                    numbers = microbatch, device // self.parts, stage
                    deps = self.chain(name, chain, rows[stage], device, numbers, deps)
                if kind == "EF" and deps:
                    self.features[microbatch] = deps[0]

    def last(self, kind: str, stage: int, chunk: int, microbatch: int, part: int) -> tuple[str]:
        """Returns the last kernel of the decoder's work."""
        kernels = self.backbone.passes[kind, chunk * self.backbone.table.stages + stage]
        return (f"{self.name(kind, stage, chunk, microbatch, part)} kernel {len(kernels) - 1}",)

    def name(self, kind: str, stage: int, chunk: int, microbatch: int, part: int) -> str:
        place = f"{stage} part {part}" if self.parts > 1 else str(stage)
        return f"{kind} stage {place} chunk {chunk} microbatch {microbatch}"

    def timeline(self, step_s: float, gather_s: float = 0, scatter_s: float = 0) -> Timeline:
        """Adds the decoder's work and the exchanges of data parallelism, the encoder's too."""
        backbone, table = self.backbone, self.backbone.table
        for span, part in itertools.product(backbone.spans, range(self.parts)):
            task = span.task
            numbers = task.microbatch, task.stage, task.chunk
            needs = table.needs(Work(task.kind, task.stage, task.chunk, task.microbatch))
            deps = [d for n in needs for d in self.last(n.kind, *n[1:], part)]
            if (task.kind, task.stage, task.chunk) == ("F", 0, 0):
                deps += [d for d in [self.features.get(task.microbatch)] if d]
            kernels = backbone.passes[task.kind, backbone.group(task)]
            starts = itertools.accumulate((k.seconds for k in kernels[:-1]), initial=span.start)
            name = self.name(task.kind, task.stage, task.chunk, task.microbatch, part)
            device = task.stage * self.parts + part
            self.chain(name, kernels, starts, device, numbers, tuple(deps))
        end = self.shift + backbone.end
        for stage in range(table.stages):
            for name, start, seconds in (
                ("encoder's all-gather", 0.0, gather_s),
                ("all-gather", self.shift - backbone.gather, backbone.gather),
                ("reduce-scatter", end, backbone.scatter),
                ("encoder's reduce-scatter", step_s - scatter_s, scatter_s),
            ):
                if seconds:
                    task = Task(
                        f"{name} {stage}", f"network {stage}", (), seconds, "COMM", -1, stage
                    )
                    self.spans.append(Span(task, start, start + seconds))
        devices = range(table.stages * self.parts)
        return Timeline(tuple(self.spans), tuple(self.resource(d, "") for d in devices))


def _described(encoder: EncoderCut, parts: list[int], placed: Placement) -> Plan:
    job, backbone, cut = encoder.job, encoder.backbone, encoder.cut
    coarse, reasons = encoder.schedule(parts, fine=False), []
    if cut.pipe > 1:
        reasons.append(f"the encoder has {cut.pipe} stages, and the executor needs 1")
    if cut.tensor != job.decoder.tensor:
        reasons.append("the encoder's tensor ranks are not the decoder's")
    return Plan(
        "optimus",
        job,
        cut,
        tuple(parts),
        placed.step_s(backbone),
        backbone.step_s,
        coarse.step_s(backbone),
        coarse.share,
        placed.share,
        *state_bytes(job, cut),
        not reasons,
        "; ".join(reasons) or "the executor's ticks are coarser than these kernels",
    )
