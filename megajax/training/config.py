"""The configuration of a training run: what experiments put together and flags change.

Legend: a step is one optimizer step; a row is one packed sequence of seq_len tokens.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from megajax.core import check
from megajax.core.config import Checked, Needs, above, equal, group, option, other_than
from megajax.core.errors import UserError
from megajax.core.layout import Layout
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree
from megajax.cost.base import Phase, Workload
from megajax.data.config import DataConfig
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.lora import LoraConfig
from megajax.models.parts import Remat
from megajax.monitor import faults
from megajax.monitor.minder_config import MinderConfig
from megajax.parallel import wire as wire_
from megajax.parallel.context import ContextSpec
from megajax.parallel.overlap import Overlap, refuse_mesh
from megajax.parallel.pipeline import PipelineConfig
from megajax.parallel.sharding import ShardSpec, Zero, rules
from megajax.parallel.wire import COPIES, Wire, WireSpec
from megajax.quant.precisions import RANK
from megajax.training import shares
from megajax.training.masking import PruneConfig, chosen, mask_optimizer
from megajax.training.optim import OptimConfig, Optimizer, make_optimizer
from megajax.training.task import Task, mean_loss, token_rows


@dataclass(frozen=True)
class TrainConfig(Checked, section="train"):
    """One optimizer step and how many of them."""

    steps: int = option(100, "optimizer steps of the whole run", at_least=1)
    global_batch: int = option(
        32, "rows of a step, on all devices together", "sequences", at_least=1
    )
    seq_len: int = option(128, "length of a row", "tokens", at_least=1)
    seed: int = option(
        0, "random seed of parameters, data order and dropout", at_least=0, at_most=2**32 - 1
    )
    accumulate: int = option(1, "micro-batches of a step, one after the other", at_least=1)
    dtype: Literal["float32", "bfloat16"] = option(
        "float32", "data type of computation; the master weights are float32"
    )
    precision: Literal["none", "float32", "bfloat16", "float16", "fp8", "int8"] = option(
        "none",
        "operands of the layers' matrix products, forward and backward, scaled by their largest "
        "magnitudes (quant/products.py); none: of train.dtype, unscaled",
    )
    remat: Literal["none", "full", "outputs", "dots", "auto"] = option(
        "outputs",
        "activations of a block that are stored for the backward pass; none: all; full: only the "
        "block's input; outputs: also the outputs of attention and of sublayers; dots: also the "
        "results of all matrix products; auto: dots where the estimated memory fits the GPU, else "
        "outputs",
    )
    loss_chunks: int = option(
        1,
        "number of pieces of the sequence, of which one at a time has its logits in memory; 0: the "
        "fewest that fit the GPU",
        at_least=0,
    )
    z_loss: float = option(0.0, "weight of log(Z)^2 in the objective", at_least=0)
    attention: Literal["auto", "xla", "cudnn", "varlen", "hopper"] = option(
        "auto",
        "attention kernel; varlen: computes only inside each document, with the kernel that was "
        "measured fastest on this kind of GPU; hopper: like varlen, always with our Hopper kernel",
    )
    segments: int = option(
        0,
        "documents a row, averaged over the rows of a device, for which cuDNN's attention reserves "
        "space; 0: counted in the data; a larger number is slower with the same results",
        at_least=0,
    )

    freeze: str | None = option(
        None,
        "parameters that are not trained: names of parameters or parts of the model, or shell "
        "patterns of them, separated by commas; none: all are trained",
    )
    frozen_dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        "data type in which parameters that are not trained rest",
        needs=other_than("freeze", None),
    )

    @property
    def keeps(self) -> Remat:
        """What the backward pass stores. `training.shape.resolved` replaced `auto` before."""
        assert self.remat != "auto"
        return self.remat


@dataclass(frozen=True)
class HeldOutConfig(Checked, section="eval"):
    """What is measured beside training."""

    every: int = option(
        500, "evaluate every so many steps and at the end; 0: only at the end", at_least=0
    )
    batches: int = option(
        8,
        "batches of train.global_batch held-out rows that an evaluation reads; 0: no evaluation",
        at_least=0,
    )


@dataclass(frozen=True)
class EvalConfig(HeldOutConfig, section="eval"):
    """What is measured beside training, and what is sampled."""

    sample_tokens: int = option(
        200, "tokens to sample after an evaluation; 0: no sample", at_least=0
    )
    prompt: str = option("def ", "text that the sample continues", needs=above(0, "sample_tokens"))
    temperature: float = option(
        0.8, "temperature of the sample; 0: greedy", needs=above(0, "sample_tokens"), at_least=0
    )


@dataclass(frozen=True)
class CheckpointConfig(Checked, section="checkpoint"):
    """When the run is saved. The last step and a signal always save."""

    every: int = option(500, "save every so many steps; 0: only at the end", at_least=0)
    keep: int = option(3, "number of checkpoints that are kept; 0: all", at_least=0)
    memory_every_steps: int = option(
        0,
        "interval of copying the state into shared memory, which outlives a killed process; 0: "
        "never",
        "steps",
        at_least=0,
    )
    verify_saves: bool = option(True, "read each checkpoint back before older ones are removed")
    key_file: str | None = option(
        None,
        "file of keys; the first signs checkpoints, and only signed ones are restored; none: no "
        "signatures",
    )
    dir: str | None = option(
        None, "folder of the checkpoints, also s3://... or gs://...; none: inside run_dir"
    )


@dataclass(frozen=True)
class LogConfig(Checked, section="log"):
    """Reports of progress, beside metrics.jsonl."""

    every: int = option(10, "steps between lines when the output is not a terminal", at_least=0)
    tensorboard: bool = option(True, "write TensorBoard events")
    wandb: str | None = option(None, "Weights & Biases project; none: not reported there")
    gc_every: int = option(
        500,
        "interval of garbage collection, which runs in the same step on all hosts",
        "steps",
        at_least=0,
    )


@dataclass(frozen=True)
class ProfileConfig(Checked, section="profile"):
    """The steps that jax.profiler records."""

    steps: str | None = option(None, "steps that are recorded, e.g. 20..25; none: no steps")

    @property
    def span(self) -> tuple[int, int] | None:
        """The first and last step to record."""
        if self.steps is None:
            return None
        first, _, last = self.steps.partition("..")
        return int(first), int(last or first)

    def __post_init__(self):
        """Refuses what is not a..b."""
        super().__post_init__()
        try:
            span = self.span
        except ValueError:
            span = (1, 0)
        if span is not None and not 1 <= span[0] <= span[1]:
            raise UserError(
                f"profile.steps={self.steps} must be a..b with 1 <= a <= b (--profile.steps=20..25)"
            )


@runtime_checkable
class ModelShape(Protocol):
    """The facts about a model that a run uses for its checks and its mesh.

    `--train.loss_chunks=0` and plans also need `workload(rows, seq_len, dtype, phase)`, which
    returns a megajax.cost.Workload.
    """

    @property
    def sizes(self) -> Mapping[str, tuple[int, str]]:
        """{word: (size of that dimension, the field that sets it)} of what a mesh can cut."""
        ...

    @property
    def layers(self) -> int:
        """Layers of the stack that a pipeline cuts, 0 without one."""
        ...

    @property
    def max_positions(self) -> int:
        """Tokens of a row at most, 0 if its rows are no sequences."""
        ...

    @property
    def dropout(self) -> float:
        """Rate of dropout, 0.0 without any."""
        ...


@dataclass(frozen=True)
class NoShape:
    """The shape of a model that a mesh does not cut: a plain network, whose rows are no sequences
    and that has no stack."""

    @property
    def sizes(self) -> Mapping[str, tuple[int, str]]:
        """Returns no dimensions."""
        return {}

    layers = 0
    max_positions = 0
    dropout = 0.0


@dataclass(frozen=True)
class JobConfig(Checked):
    """How a model is trained, whatever it is: what all training runs share."""

    model: ModelShape = NoShape()
    mesh: MeshSpec = group(MeshSpec, resets=True)
    shard: ShardSpec = group(ShardSpec)
    pipeline: PipelineConfig = group(PipelineConfig, needs=above(1, "mesh.pipe"))
    context: ContextSpec = group(ContextSpec, needs=above(1, "mesh.context"))
    train: TrainConfig = group(TrainConfig)
    optim: OptimConfig = group(OptimConfig)
    prune: PruneConfig = group(PruneConfig, needs=above(0, "prune.sparsity"))
    lora: LoraConfig = group(LoraConfig)
    data: DataConfig = group(DataConfig)
    eval: HeldOutConfig = group(HeldOutConfig)
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    log: LogConfig = group(LogConfig)
    profile: ProfileConfig = group(ProfileConfig)
    overlap: Overlap = option(
        "auto",
        "how communication over the axes tensor and expert overlaps with matrix products; xla: it "
        "does not",
        needs=above(1, "mesh.tensor", "mesh.expert", harmless=("auto", "xla")),
    )
    wire: Wire = option(
        "none",
        "codec of what data-parallel ranks send to each other (docs/parallelism.md); none: no "
        "codec",
    )
    exchange: WireSpec = group(WireSpec, flag="wire", needs=other_than("wire", "none"))
    detector: Literal["none", "minder"] = option(
        "none",
        "minder: finds the machine that all others wait for, that is slow, or whose metrics differ",
    )
    minder: MinderConfig = group(MinderConfig, needs=equal("detector", "minder"))
    prometheus: str | None = option(
        None, "address of a server with metrics of the hosts", needs=equal("detector", "minder")
    )
    emulate: int | None = option(
        None, "CPU devices to emulate in this process; none: real ones", at_least=1
    )
    emulate_without_gpu: int = option(
        1, "value of --emulate where no GPU is found", needs=equal("emulate", None), at_least=1
    )
    run_dir: str | None = option(None, "folder of the run; none: runs/<experiment>/<preset>-...")
    init_from: str | None = option(
        None, "Hugging Face folder, or ORG/NAME at huggingface.co, whose weights start the run"
    )
    told_code: int = option(
        0, "exit code of a run that SIGTERM made save and stop", at_least=0, at_most=255
    )
    fault: str | None = option(
        None, "faults to cause on purpose, e.g. kill@120:rank1 (monitor/faults.py)"
    )
    precisions: str | None = option(
        None,
        "file with the precision of each matrix product on each kind of device, for a job on "
        "unlike GPUs (docs/unlike_gpus.md); sets --shard.zero=optimizer; none: all compute alike",
    )
    kind: str | None = option(
        None,
        "kind of this process's devices, a name in --precisions or --shares; A,B: equal parts of "
        "the job's processes, or of the devices of a single process; none: the name of the GPU's "
        "card",
        needs=Needs(
            ("precisions", "shares"),
            "to be set",
            lambda *values: any(x is not None for x in values),
        ),
    )
    shares: str | None = option(
        None,
        "rows that a device of each kind takes of a step, relative to the others, e.g. "
        "strong:3,weak:1 (docs/unlike_gpus.md); sets --shard.zero=optimizer; none: all take as "
        "many",
    )
    play: str | None = option(
        None,
        "rates of a device that this process plays by waiting at each product, by precision in "
        "GFLOP/s: float32:20,int8:80; none: as fast as it can",
        needs=other_than("precisions", None),
    )
    cache_dir: str = option(
        "~/.cache/megajax", "folder for tokenised corpora, tokenizers and compiled programs"
    )

    @property
    def zero(self) -> Zero:
        """How far parameters, gradients and optimizer state are cut, with `auto` resolved."""
        if self.shard.zero == "auto":
            return "optimizer" if self.wire in COPIES or self.is_unlike else "full"
        return self.shard.zero

    @property
    def is_unlike(self) -> bool:
        """Whether the processes of a job may compile unlike programs."""
        return self.precisions is not None or self.shares is not None

    def check(self, sizes: Mapping[str, int]) -> None:
        """Refuses what cannot run on a mesh of these {axis: size}, before anything compiles.

        Raises: UserError with the value, the rule, the nearest legal value and the flag.
        """
        faults.parse(self.fault)
        refuse_mesh(self.overlap, sizes)
        check.check(self, sizes, rules(self.zero))
        wire_.check(self, sizes)
        self._check_precision()
        self._check_adapters()
        self._check_unlike(sizes)
        self.pipeline.check(self, sizes)
        self.prune.check(self.train.steps)
        self.minder.check(self.prometheus)

    def _check_precision(self) -> None:
        """Refuses products that would be wider than their operands."""
        train = self.train
        if train.precision != "none" and RANK[train.precision] > RANK[train.dtype]:
            raise UserError(
                f"train.precision={train.precision} is wider than train.dtype={train.dtype}, in "
                f"which the operands come; nearest: {train.dtype} (--train.precision)"
            )
        if train.precision != "none" and self.precisions is not None:
            raise UserError(
                f"train.precision={train.precision}: --precisions gives every product its "
                "precision; leave one of them out (--train.precision, --precisions)"
            )

    def _check_adapters(self) -> None:
        """Refuses what would change weights under adapters that were trained for them."""
        if self.lora.rank and self.prune.sparsity:
            raise UserError(
                f"prune.sparsity={self.prune.sparsity}: with --lora.rank={self.lora.rank} the "
                "matrices rest, and nothing of them is pruned; nearest: 0 (--prune.sparsity, "
                "--lora.rank)"
            )

    def _check_unlike(self, sizes: Mapping[str, int]) -> None:
        """Refuses unlike devices where their programs would have unlike collectives."""
        if not self.is_unlike:
            return
        if self.shares is not None:
            shares.parse(self.shares)
        flag = "--shares" if self.precisions is None else "--precisions"
        if self.zero != "optimizer":
            raise UserError(
                f"shard.zero={self.shard.zero}: the weights of unlike devices must travel in one "
                f"type, with --shard.zero=optimizer, which {flag} sets (--shard.zero)"
            )
        if sizes["pipe"] > 1:
            raise UserError(
                f"mesh.pipe={sizes['pipe']}: {flag} needs all layers on every device; "
                "nearest: 1 (--mesh.pipe)"
            )

    def task(self) -> Task:
        """Returns what is trained, for `make_train_step`; a kind of runs says it here."""
        raise NotImplementedError("give make_train_step a task, or define it in a subclass")

    @property
    def row_size(self) -> int:
        """What decides the work of a row, as `workload` of the model takes it."""
        return self.train.seq_len

    def workload(self, rows: int, phase: Phase = "train") -> Workload:
        """Returns the forward pass of rows of this run, by the model's `workload`."""
        model: Any = self.model
        return model.workload(rows, self.row_size, self.train.dtype, phase)

    def given_model(self) -> Any:
        """Returns the configuration of the model of `init_from`; None: its file has none."""
        from megajax.foreign import hf

        assert self.init_from is not None
        return hf.load_config(self.init_from)

    def given_params(self, layout: Layout, fresh: Tree) -> Tree:
        """Returns the weights of `init_from`, layers in the model's order. fresh: new ones."""
        from megajax.foreign import hf  # the weights' own format; unused otherwise

        assert self.init_from is not None
        model: Any = self.model
        return hf.load_params(self.init_from, model, layout)

    def optimizer(self, axes: Tree, layout: Layout) -> Optimizer:
        """Returns the optimizer of parameters with these words, with masks if the run prunes."""
        inner = make_optimizer(self.optim, self.train.steps, axes, layout)
        if not self.prune.sparsity:
            return inner
        names = chosen(axes, self.prune.weights)
        return mask_optimizer(inner, names, self.prune.score == "taylor")


@dataclass(frozen=True)
class Config(JobConfig):
    """A whole pretraining run."""

    model: DecoderConfig = group(DecoderConfig)
    eval: EvalConfig = group(EvalConfig)

    def check(self, sizes: Mapping[str, int]) -> None:
        """Checks what JobConfig checks, and that rows may be packed. Raises: UserError."""
        self.model.moe.check_packed()
        super().check(sizes)

    def task(self) -> Task:
        """Returns the decoder with the next token as its target."""
        train = self.train
        parts = functools.partial(
            decoder.parts,
            self.model.at(train.seq_len),
            dtype=train.dtype,
            loss_chunks=max(train.loss_chunks, 1),
        )
        return Task(parts, token_rows(train.seq_len), mean_loss(train.z_loss))
