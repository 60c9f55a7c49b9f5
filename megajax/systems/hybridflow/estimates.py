"""Seconds and memory of an iteration's stages on a cluster: ESTIMATES for `mapping.auto_map`.

HybridFlow (arXiv 2409.19256) section 6: each model has a layout of its own for each stage, chosen
for the devices that it has. Times come from the cost model (megajax/cost), nothing is simulated.

generate: the actor's prefill and decode steps; responses have their full length. A decode step
  reads the weights and the cache, so it is bound by memory. Host work is not counted, as in
  cost/serving.py.
prepare: one forward pass over all responses on tensor x data: the reference's log-probabilities,
  the critic's values, the rewards of a reward model, and the actor's log-probabilities if asked.
train: the updates of actor and critic with the best legal mesh, 1F1B schedule, rematerialisation
  and ZeRO; of the actor also the gather that takes its weights to the layout of generation.

Memory: float32 masters and two moments of a trained model, and the 16-bit weights of a frozen one,
rest on all devices of a set, cut evenly; a stage's layout must fit beside them. Host offloading is
not considered. A number of devices is a divisor or a multiple of a host's.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from megajax.core.axes import MESH_AXES
from megajax.core.errors import UserError, did_you_mean, divisors
from megajax.core.hardware import Cluster
from megajax.cost import memory, traffic
from megajax.cost.base import ITEMSIZE, CostModel, Op, Phase, Workload
from megajax.cost.estimate import estimate
from megajax.cost.kernels import Collective, Matmul
from megajax.cost.roofline import Roofline
from megajax.cost.step import StepShape
from megajax.models.decoder_config import PRESETS, DecoderConfig
from megajax.parallel.sharding import ShardSpec, Zero
from megajax.systems import strategies
from megajax.systems.aot import RESERVE_BYTES
from megajax.systems.hybridflow import mapping
from megajax.training.config import Config, TrainConfig
from megajax.training.shape import resolved, step_shape

MODELS = ("actor", "critic", "reference", "reward")
TRAINED = ("actor", "critic")
SCORED = ("critic", "reward")  # one number a token in place of logits
HALF = ITEMSIZE["bfloat16"]
TRAINED_BYTES = memory.MASTER * (1 + memory.MOMENTS["adamw"])  # of a parameter between stages
LOGIT_CHUNKS = 16  # (chosen) pieces in which a forward pass makes logits


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The work of an iteration. prompt, response: tokens of each of the `responses`. rows:
    responses of an update. logprobs: whether the actor computes log-probabilities after the
    rollout."""

    responses: int
    prompt: int
    response: int
    rows: int
    updates: int
    logprobs: bool = False

    @property
    def length(self) -> int:
        """Tokens of a prompt and its response."""
        return self.prompt + self.response


@dataclasses.dataclass(frozen=True)
class Timed:
    """A layout of one stage. used: bytes of a device beside what rests there."""

    layout: str
    seconds: float
    used: float


@dataclasses.dataclass(frozen=True)
class Trained(Timed):
    """A layout of training, with its tensor parallelism. seconds: of one update."""

    tensor: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """The layouts of a model by stage. transition_s: seconds of the stage 'train' in which the
    actor's weights go to the layout of generation."""

    stages: Mapping[str, Timed]
    transition_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of all stages."""
        return sum(timed.seconds for timed in self.stages.values())


def parse_models(text: str) -> dict[str, str]:
    """Returns {role: name of a preset} of 'actor:NAME,critic:NAME,...', in the order of MODELS.

    The reference has the actor's size and the reward model the critic's, unless they are named;
    reference:none and reward:none leave one out, and without a critic there is no reward model
    either. Raises: UserError.
    """
    sizes: dict[str, str] = {}
    for part in text.split(","):
        role, _, size = (word.strip() for word in part.partition(":"))
        if role not in MODELS:
            near = did_you_mean(role, MODELS)
            raise UserError(
                f"models={text}: {role!r} must be one of {', '.join(MODELS)}.{near} (--models)"
            )
        if role in sizes:
            raise UserError(f"models={text}: {role} must be named once (--models)")
        if size not in PRESETS and not (size == "none" and role != "actor"):
            near = did_you_mean(size, PRESETS)
            raise UserError(
                f"models={text}: {size!r} must be one of {', '.join(PRESETS)}.{near} (--models)"
            )
        sizes[role] = size
    if "actor" not in sizes:
        raise UserError(f"models={text} has no actor; e.g. actor:llama3_8b (--models)")
    sizes.setdefault("reference", sizes["actor"])
    sizes.setdefault("reward", sizes.get("critic", "none"))
    return {m: sizes[m] for m in MODELS if sizes.get(m, "none") != "none"}


class Estimates:
    """`seconds` and `least` of `mapping.auto_map`, for decoders of any size on one cluster."""

    def __init__(
        self,
        models: Mapping[str, DecoderConfig],
        iteration: Iteration,
        cluster: Cluster,
        cost: CostModel = Roofline(),
    ):
        """Args: models: by role, of MODELS; 'actor' is one of them.

        Raises: UserError for a sequence that a model has no positions for.
        """
        for role, model in models.items():
            if iteration.length > model.max_positions:
                raise UserError(
                    f"rl.max_prompt + rl.max_tokens = {iteration.length} is beyond the "
                    f"{model.max_positions} positions of {role} (--rl.max_tokens, --models)"
                )
        self.models = dict(models)
        self.iteration = iteration
        self.cluster = cluster
        self._cost = cost
        self._room = cluster.card.memory_bytes - RESERVE_BYTES
        for name in (
            "chosen",
            "choice",
            "least",
            "ways",
            "resting",
            "trainings",
            "forward",
            "generation",
        ):
            setattr(self, name, functools.cache(getattr(self, name)))

    def best(self, among: Sequence[mapping.Sets] | None = None) -> mapping.Mapping:
        """Returns the fastest mapping on all devices of the cluster. among: as of `auto_map`.

        Raises: UserError if the models do not fit, or the cluster is too large to compare all.
        """
        try:
            return mapping.auto_map(
                tuple(self.models), self.cluster.devices, self.seconds, self.least, among
            )
        except UserError:  # too many ways
            raise
        except ValueError:
            total = self.cluster.devices * self.resting(tuple(self.models), self.cluster.devices)
            raise UserError(
                f"cluster={self.cluster.name} has no room for {', '.join(self.models)}: "
                f"{memory.size(total)} of parameters and optimizer states, and what the stages "
                f"need beside them; nearest: at least {math.ceil(total / self._room)} GPUs, or "
                "smaller models (--cluster, --models)"
            ) from None

    def stages(self, best: mapping.Mapping) -> dict[str, float]:
        """Returns the seconds of each stage of a mapping."""
        pairs = list(zip(best.sets, best.devices, strict=True))
        return {
            stage: max(sum(self.seconds(stage, m, n) for m in group) for group, n in pairs)
            for stage in mapping.STAGES
        }

    @functools.cached_property
    def counts(self) -> list[int]:
        """The numbers of devices that a set may have."""
        hosts, gpus = self.cluster.hosts, self.cluster.gpus_per_host
        return divisors(gpus)[:-1] + [gpus * n for n in range(1, hosts + 1)]

    def seconds(self, stage: str, model: str, n: int) -> float:
        """Returns a model's seconds of a stage on n devices; math.inf where it cannot run.

        The layout leaves room for the largest set of models that n devices have room for, whatever
        set the model is in, because `auto_map` asks for no set.
        """
        choice = self.chosen(model, n)
        if choice is None:
            return math.inf
        timed = choice.stages.get(stage)
        return timed.seconds if timed else 0.0

    def chosen(self, model: str, n: int) -> Choice | None:
        """Returns the layouts that `seconds` is of, None where the model cannot run."""
        if n not in self.counts:
            return None
        others = [name for name in self.models if name != model]
        companions = (
            group
            for size in range(len(others) + 1)
            for group in itertools.combinations(others, size)
            if self.least(self._ordered((model, *group))) <= n
        )
        needed = max((self.resting(group, n) for group in companions), default=None)
        return None if needed is None else self.choice(model, n, self._room - needed)

    def least(self, models: tuple[str, ...]) -> int:
        """Returns the fewest devices on which each of these models runs beside the others; one more
        than the cluster has if there are too few."""
        for n in self.counts:
            room = self._room - self.resting(models, n)
            if room > 0 and all(
                self.choice(m, n, room + self.resting((m,), n)) is not None for m in models
            ):
                return n
        return self.cluster.devices + 1

    def resting(self, models: tuple[str, ...], n: int) -> float:
        """Returns the bytes that these models have on each of n devices between stages."""
        return sum(
            (TRAINED_BYTES if m in TRAINED else HALF) * self._load(m, 1, 1).params / self.ways(m, n)
            for m in models
        )

    def ways(self, model: str, n: int) -> int:
        """Returns into how many pieces n devices cut a model at rest: n, or n over the fewest
        copies with which ZeRO's ranks divide the model's width, without a pipeline."""
        cfg = self.models[model]
        per_host = min(n, self.cluster.gpus_per_host)
        for copies in divisors(n // per_host):
            pieces = n // copies
            for tensor in self._tensors(model, n):
                if pieces % tensor == 0 and cfg.width % (pieces // tensor) == 0:
                    return pieces
        return per_host

    def choice(self, model: str, n: int, room: float) -> Choice | None:
        """Returns the fastest layouts of a model on n devices that fit `room` bytes of each, what
        rests there included; None if there are none."""
        room -= self.resting((model,), n)
        stages: dict[str, Timed] = {}
        if model != "actor" or self.iteration.logprobs:
            prepared = self.forward(model, n, room)
            if prepared is None:
                return None
            stages["prepare"] = prepared
        if model not in TRAINED:
            return Choice(stages)
        candidates = []
        for train in self.trainings(model, n):
            if train.used > room:
                continue
            updates = self.iteration.updates * train.seconds
            if model != "actor":
                trained = dataclasses.replace(train, seconds=updates)
                candidates.append(Choice(stages | {"train": trained}))
                continue
            for tensor in divisors(train.tensor):
                if generate := self.generation(n, tensor, room):
                    moved = self.transition_s(n, tensor)
                    trained = dataclasses.replace(train, seconds=updates + moved)
                    both = {"generate": generate, "train": trained}
                    candidates.append(Choice(stages | both, moved))
        return min(candidates, key=lambda c: c.seconds, default=None)

    # ---- one stage

    def trainings(self, model: str, n: int) -> list[Trained]:
        """Returns the layouts of training on n devices of which no other is both faster and
        smaller with the same tensor parallelism."""
        resting, priced = self.resting((model,), n), []
        for step in self._training_steps(model, n):
            bound = memory.bound(memory.terms(step))
            if bound <= self._room:
                hybrid = "hybrid " if step.ways("node") > 1 else ""
                zero = "ZeRO-1" if step.resident else f"{hybrid}ZeRO-3"
                layout = f"{_mesh(step.sizes)}, {zero}, {step.micro_steps} micro-batches"
                layout += f", remat {step.remat}"
                ways = step.ways("tensor")
                priced.append(Trained(layout, self._step_s(step), bound - resting, ways))
        priced.sort(key=lambda t: (t.seconds, t.used))
        least: dict[int, float] = {}
        best = []
        for one in priced:
            if one.used < least.get(one.tensor, math.inf):
                least[one.tensor] = one.used
                best.append(one)
        return best

    def _training_steps(self, model: str, n: int) -> Iterator[StepShape]:
        """Yields the updates that a run could make on n devices. Schedules are 1F1B alone, as of
        Megatron-LM, with which HybridFlow trains; there are far more of the others."""
        per_host = min(n, self.cluster.gpus_per_host)
        cluster = dataclasses.replace(self.cluster, hosts=n // per_host, gpus_per_host=per_host)
        copies = n // self.ways(model, n)
        nodes: dict[Zero, int] = {"full": 1, "optimizer": 1}
        if copies > 1:
            nodes["hybrid"] = copies
        for data, zero in itertools.product(divisors(n), nodes):
            if data % nodes[zero]:
                continue
            # A run fills an update up with empty rows where its responses do not divide.
            train = TrainConfig(
                global_batch=-(-self.iteration.rows // data) * data,
                seq_len=self.iteration.length,
                dtype="bfloat16",
                loss_chunks=0,
            )
            cfg = Config(model=self.models[model], train=train, shard=ShardSpec(zero))
            legal = strategies.legal_meshes(cfg, cluster)
            cut = {"node": nodes[zero], "data": data // nodes[zero], "context": 1, "expert": 1}
            proposals = (
                (proposal, sizes)
                for mesh, sizes in legal
                if cut.items() <= sizes.items()
                for proposal in strategies.proposals(cfg, mesh, sizes)
                if proposal.pipeline.schedule == "1f1b" and proposal.pipeline.gradients == "local"
            )
            for proposal, sizes in proposals:
                proposal = resolved(proposal, sizes, cluster.card.memory_bytes)
                step = step_shape(proposal, sizes, fused_attention=True)
                yield dataclasses.replace(step, load=_headed(step.load, model))

    def forward(self, model: str, n: int, room: float) -> Timed | None:
        """Returns the fastest forward pass over all responses on n devices that needs at most
        `room` bytes beside what rests there.

        Weights that are cut over data are gathered at once, or layer by layer for each part of the
        responses, which needs less memory.
        """
        candidates = []
        ways, responses = self.ways(model, n), self.iteration.responses
        for tensor in (t for t in self._tensors(model, n) if ways % t == 0):
            data, pieces = n // tensor, ways // tensor
            sizes = _sizes(node=n // ways, data=pieces, tensor=tensor)
            nbytes = HALF * self._load(model, 1, 1).params / tensor
            gather = Collective("all-gather", nbytes, *self._spread(model, n, tensor))
            gather_s = self._cost.op_time(Op("transfer", gather), self.cluster.card)[0]
            most = -(-responses // data)
            batches = {min(2**k, most) for k in range(most.bit_length() + 1)}
            for rows, by_layer in itertools.product(batches, {False, pieces > 1}):
                load = self._load(model, data * rows, self.iteration.length)
                axes = ("data",) if by_layer else ()
                step = StepShape(load, sizes, axes, loss_chunks=LOGIT_CHUNKS, fused_attention=True)
                terms = memory.terms(step) | {"cache": 0.0}
                if by_layer or (pieces == 1 and model not in TRAINED):
                    terms["parameters"] = 0.0  # they rest there
                used = memory.bound(terms)
                if used > room:
                    continue
                # A token's logits stay where they are made: two sums of them travel.
                sent = [t for t in traffic.transfers(step) if t.what != "logits"]
                once = estimate(step, self.cluster, sent, self._cost).step_s
                passes = -(-most // rows)
                seconds = passes * once + (0.0 if by_layer else gather_s)
                layout = f"{_mesh(sizes)}, {rows} responses at a time"
                layout += ", weights by layer" if by_layer else ""
                candidates.append(Timed(layout, seconds, used))
        return min(candidates, key=lambda t: t.seconds, default=None)

    def generation(self, n: int, tensor: int, room: float) -> Timed | None:
        """Returns the actor's rollout by n / tensor engines that hold at most `room` bytes each
        device; None if not one sequence has room. An engine decodes as many sequences at a time as
        it has pages for, all of full length, and prefills one prompt at a time."""
        work, actor = self.iteration, self.models["actor"]
        sizes = _sizes(tensor=tensor)

        def step(rows: int, tokens: int, phase: Phase) -> StepShape:
            return StepShape(
                actor.workload(rows, tokens, phase=phase), sizes, (), fused_attention=True
            )

        one, two = (
            memory.bound(memory.terms(step(rows, work.length, "decode"))) for rows in (1, 2)
        )
        if one > room:
            return None
        sequences = -(-work.responses // (n // tensor))
        batch = min(sequences, 1 + int((room - one) / (two - one)))
        rounds = -(-sequences // batch)
        batch = -(-sequences // rounds)
        prefill_s = self._step_s(step(1, work.prompt, "prefill"))
        # The time of a step is linear in the tokens of the cache: the mean step stands for all. The
        # first token is the prefill's.
        decode_s = self._step_s(step(batch, work.prompt + work.response // 2, "decode"))
        seconds = rounds * (batch * prefill_s + (work.response - 1) * decode_s)
        layout = f"{_mesh(_sizes(data=n // tensor, tensor=tensor))}, {batch} sequences at a time"
        return Timed(layout, seconds, one + (batch - 1) * (two - one))

    def transition_s(self, n: int, tensor: int) -> float:
        """Returns the seconds in which the actor's weights, cut over devices as ZeRO cuts them,
        are gathered for generation on `tensor`. A device receives M / tensor - M / ways of M bytes
        (HybridFlow table 2; HybridMesh.report's `formula`)."""
        nbytes = HALF * self._load("actor", 1, 1).params / tensor
        gather = Collective("all-gather", nbytes, *self._spread("actor", n, tensor))
        return self._cost.op_time(Op("transfer", gather), self.cluster.card)[0]

    # ---- parts

    def _step_s(self, step: StepShape) -> float:
        return estimate(step, self.cluster, traffic.transfers(step), self._cost).step_s

    def _load(self, model: str, rows: int, tokens: int) -> Workload:
        """Returns a forward pass that scores every token."""
        load = self.models[model].workload(rows, tokens)
        return _headed(dataclasses.replace(load, phase="prefill"), model)

    def _spread(self, model: str, n: int, tensor: int) -> tuple[int, int]:
        """Returns (devices of a host, hosts) that hold the parts of what a rank of tensor needs."""
        per_host = min(n, self.cluster.gpus_per_host)
        return per_host // tensor, self.ways(model, n) // per_host

    def _tensors(self, model: str, n: int) -> list[int]:
        """Returns the tensor parallelisms that a forward pass may have."""
        cfg = self.models[model]
        sizes = [cfg.sizes[word][0] for word in ("heads", "mlp", "vocab")]
        return [
            ways
            for ways in divisors(min(n, self.cluster.gpus_per_host))
            if all(size % ways == 0 for size in sizes)
            and (cfg.kv_heads % ways == 0 or ways % cfg.kv_heads == 0)
        ]

    def _ordered(self, models: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in self.models if name in models)


def _headed(load: Workload, model: str) -> Workload:
    """Returns the workload with the head of a model of this role."""
    if model not in SCORED:
        return load
    ops = [
        dataclasses.replace(op, kernel=Matmul(op.kernel.m, load.width, 1), weights=None)
        if op.part == "head" and isinstance(op.kernel, Matmul)
        else op
        for op in load.ops
    ]
    return dataclasses.replace(load, ops=tuple(ops))


def _sizes(**ways: int) -> dict[str, int]:
    return dict.fromkeys(MESH_AXES, 1) | ways


def _mesh(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {ways}" for axis, ways in sizes.items() if ways > 1) or "one device"
