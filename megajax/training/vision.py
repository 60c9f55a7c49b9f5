"""Training and judging vision-language models: configuration, what a run reads, its measure.

A run reads samples of images and texts (data/vision.py), packed into rows, and trains models/vlm.py
by the library's one train step. The tower runs in `embed`, while all pipeline stages wait
(--encoder.schedule=inline), or in the idle slots of the decoder's pipeline (bubbles), as Optimus
(arXiv 2408.03505) has it.

The measure is exact match: the fraction of held-out samples whose whole answer greedy decoding
gives. Greedy decoding gives an answer exactly if each of its tokens, its end included, is the most
likely one after the true tokens before it, so one forward pass decides. Beside it stand the same
samples with grey in the place of their images, and what the most frequent answer to each question
would get.

Legend: B rows of a batch, S tokens of a row, V vocabulary.
"""

import dataclasses
import fnmatch
import functools
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from PIL import Image, ImageDraw, ImageFont

from megajax.core import config
from megajax.core.axes import BATCH_AXES
from megajax.core.config import Checked, equal, group, option
from megajax.core.errors import UserError, divisors, nearest_multiples
from megajax.core.files import model_folder, write_whole
from megajax.core.layout import Layout
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree, count, nbytes_per_device
from megajax.cost.base import Phase, Workload
from megajax.data.images import row_of
from megajax.data.loader import host_rows, place
from megajax.data.pack import IGNORED
from megajax.data.tokenizer import (
    Tokenizer,
    check_vocabulary,
    need_tokenizer,
    open_tokenizer,
    tokenizer_file,
)
from megajax.data.vision import (
    Sample,
    VisionDataConfig,
    VisionRows,
    evaluated,
    fixed_rows,
    open_vision,
    prepared,
)
from megajax.layers.attention import Context, attend
from megajax.layers.ops import Ops
from megajax.models import vlm
from megajax.models.parts import Batch
from megajax.models.vlm import PRESETS as MODELS
from megajax.models.vlm import VlmConfig
from megajax.monitor.console import Console, quantity
from megajax.monitor.records import Recorder, rows_by_step
from megajax.parallel.context import ContextSpec, choose_attention, packed_shape
from megajax.parallel.pipeline import PipelineConfig
from megajax.schedule import encoder
from megajax.schedule.ir import Table, Timeline
from megajax.schedule.simulator import lockstep
from megajax.schedule.trace import gantt
from megajax.training import precision
from megajax.training.config import (
    CheckpointConfig,
    HeldOutConfig,
    JobConfig,
    LogConfig,
    TrainConfig,
)
from megajax.training.evaluate import evaluated_rows
from megajax.training.optim import OptimConfig
from megajax.training.report import HELD_OUT, OURS, save_plot
from megajax.training.run_dir import RunDir
from megajax.training.step import TrainStep
from megajax.training.task import Leaf, Task, TrainState, mean_loss, token_rows

# ---- configuration


@dataclass(frozen=True)
class EncoderScheduleConfig(Checked, section="encoder"):
    """When and where the vision tower runs."""

    schedule: Literal["inline", "bubbles"] = option(
        "inline",
        "inline: before the first block of the decoder; bubbles: while pipeline stages would wait",
    )
    tensor: Literal["cut", "whole"] = option(
        "cut",
        "cut: the tower's matrices are cut over tensor ranks, as the decoder's are; whole: every "
        "rank has all of them and sees some of the rows, so the tower needs no communication",
        needs=equal("schedule", "bubbles"),
    )
    segments: int | None = option(
        None,
        "equal pieces of the tower, each of which fills one slot of a stage; none: as many as make "
        "a piece about as long as a stage's chunk of the decoder",
        at_least=1,
        needs=equal("schedule", "bubbles"),
    )


@dataclass(frozen=True)
class VisionEvalConfig(HeldOutConfig, section="eval"):
    """What is measured beside training, and what is drawn."""

    batches: int = option(
        4,
        "batches of train.global_batch held-out samples that an evaluation reads; 0: no evaluation",
        at_least=0,
    )
    samples: int = option(
        12, "held-out images that are drawn with their answers after an evaluation", at_least=0
    )
    sample_tokens: int = option(32, "tokens of a drawn answer at most", at_least=1)


@dataclass(frozen=True)
class VisionConfig(JobConfig):
    """A whole run of a vision-language model."""

    model: VlmConfig = group(VlmConfig)
    data: VisionDataConfig = group(VisionDataConfig)  # type: ignore
    eval: VisionEvalConfig = group(VisionEvalConfig)
    encoder: EncoderScheduleConfig = group(EncoderScheduleConfig)
    context: ClassVar[ContextSpec] = ContextSpec()  # type: ignore

    def task(self) -> Task:
        """Returns the model with the next token of each answer as its target."""
        train, model, patches = self.train, self.model, self.data.patches
        parts = functools.partial(
            vlm.parts,
            model,
            dtype=train.dtype,
            loss_chunks=max(train.loss_chunks, 1),
            remat=train.keeps,
            pieces=vlm.Pieces(self.segments, self.in_bubbles and self.encoder.tensor == "whole"),
        )
        batch = token_rows(train.seq_len, "places") | {
            "rotary": Leaf((train.seq_len, 3), ("seq", None)),
            "patches": Leaf((patches, model.tower.patch_values), (None, None), "uint8"),
            "patch_places": Leaf((patches, 2), (None, None)),
            "images": Leaf((patches,), (None,)),
        }
        return Task(parts, batch, mean_loss(train.z_loss))

    @property
    def in_bubbles(self) -> bool:
        """Whether the tower runs in the pipeline's idle slots."""
        return self.encoder.schedule == "bubbles"

    @property
    def segments(self) -> int:
        """The tower's pieces that a schedule places; 0: it runs inline."""
        if not self.in_bubbles:
            return 0
        if self.encoder.segments is not None:
            return self.encoder.segments
        return min(
            divisors(self.model.tower.layers), key=lambda n: abs(self.tower_chunks() / n - 1)
        )

    def tower_chunks(self) -> float:
        """Returns the FLOPs of the tower, over those of a stage's chunk of the decoder."""
        load, groups = self.workload(1), (self.mesh.pipe or 1) * self.pipeline.chunks
        tower = sum(tower.flops for tower in load.towers)
        return tower / (load.flops - tower) * groups

    def workload(self, rows: int, phase: Phase = "train") -> Workload:
        """Returns the forward pass of rows of this run, with as many patches as they have room
        for."""
        train, patches = self.train, self.data.patches
        frozen = self.frozen if phase == "train" else ()
        return self.model.workload(rows, train.seq_len, train.dtype, phase, patches, frozen)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Those of 'tower' and 'projector' that --train.freeze names whole."""
        patterns = [pattern.strip() for pattern in (self.train.freeze or "").split(",")]
        return tuple(
            name
            for name in ("tower", "projector")
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        )

    def check(self, sizes: Mapping[str, int]) -> None:
        """Checks what JobConfig checks, and what images cannot do. Raises: UserError."""
        vlm.check_context(sizes["context"])
        vlm.check_patches(self.model, self.data.patches, sizes["tensor"])
        self.model.moe.check_packed()
        super().check(sizes)
        if self.in_bubbles:
            self._check_bubbles(sizes)

    def _check_bubbles(self, sizes: Mapping[str, int]) -> None:
        if sizes["pipe"] == 1:
            raise UserError(
                "encoder.schedule=bubbles: mesh.pipe=1 has no pipeline stages that could wait; use "
                "--mesh.pipe=2 or more, or --encoder.schedule=inline"
            )
        if self.pipeline.idle == "mask":
            raise UserError(
                "encoder.schedule=bubbles: with pipeline.idle=mask a stage that waits computes on "
                "zeros, and nothing fits in; use --pipeline.idle=skip"
            )
        rows, tensor = self.train.global_batch, sizes["tensor"]
        ways = self.pipeline.pieces(sizes["pipe"]) * math.prod(sizes[a] for a in BATCH_AXES)
        if self.encoder.tensor == "whole" and rows % (ways * tensor):
            raise UserError(
                f"encoder.tensor=whole: the {tensor} tensor ranks share out the "
                f"{rows // ways} rows that a device has of a microbatch; train.global_batch={rows} "
                f"must be divisible by {ways * tensor}; {nearest_multiples(rows, ways * tensor)} "
                "(--train.global_batch, --encoder.tensor=cut)"
            )


def nano() -> VisionConfig:
    """Four blocks behind a tower of two learn to read drawings, minutes of two CPU cores.

    Counting is learned last and suddenly: of seed 2 between steps 200 and 300, and not at all in
    300 steps with --optim.schedule=wsd --optim.decay=0.5. Four of the eight devices divide the four
    blocks, so that Muon orthogonalises one block on each of them (node 2 x data 4). An image is
    read as one frame.
    """
    model = MODELS["nano"]()
    decoder = dataclasses.replace(model.decoder, mlp=128)
    tower = dataclasses.replace(model.tower, temporal=1)
    return VisionConfig(
        model=dataclasses.replace(model, decoder=decoder, tower=tower),
        train=TrainConfig(steps=400, global_batch=16, seq_len=128, remat="none"),
        data=VisionDataConfig(patches=144),
        optim=OptimConfig(name="muon", lr=2e-2, warmup=15, schedule="cosine", final=0.02),
        eval=VisionEvalConfig(every=200, batches=16),
        checkpoint=CheckpointConfig(every=200),
        log=LogConfig(every=20),
        mesh=MeshSpec(node=2),
        pipeline=PipelineConfig(idle="skip"),
        emulate_without_gpu=8,
    )


def tiny() -> VisionConfig:
    """A few steps of `nano` that show that everything runs."""
    base = nano()
    return dataclasses.replace(
        base,
        train=dataclasses.replace(base.train, steps=6, global_batch=16, seq_len=64),
        data=VisionDataConfig(patches=96),
        eval=VisionEvalConfig(every=3, batches=4, samples=4, sample_tokens=6),
        checkpoint=CheckpointConfig(every=3),
        log=LogConfig(every=1),
    )


def qwen2_vl_2b() -> VisionConfig:
    """Qwen2-VL 2B from its published weights or from none, on a GPU.

    The rate is that of full fine-tuning (presets.recipe); rows of 4,096 tokens hold images of up to
    1,280 merged patches (max_pixels of the model).
    """
    return VisionConfig(
        model=MODELS["qwen2_vl_2b"](),
        train=TrainConfig(
            steps=1000, global_batch=16, seq_len=4096, dtype="bfloat16", loss_chunks=8
        ),
        optim=OptimConfig(lr=1e-5, warmup=50, schedule="cosine", final=0.1, weight_decay=0.1),
        data=VisionDataConfig(patches=8192),
        eval=VisionEvalConfig(every=200),
        checkpoint=CheckpointConfig(every=200),
    )


PRESETS = {"nano": nano, "tiny": tiny, "qwen2_vl_2b": qwen2_vl_2b}

# The flags that --help describes; the others it names.
FIRST = (
    "preset",
    "config",
    "run_dir",
    "init_from",
    "data.source",
    "data.patches",
    "data.tokenizer",
    "encoder.schedule",
    "encoder.tensor",
    "train.freeze",
    "train.steps",
    "train.global_batch",
    "train.seq_len",
    "optim.lr",
)


SIZES = ("patch", "merge", "min_pixels", "max_pixels")  # of the tower: they decide what rows hold


def take_model(
    base: VisionConfig, typed: Mapping[str, Any], read: Mapping[str, Any]
) -> VisionConfig:
    """Returns `base` with the model and the tokenizer of the folder of init_from, if there is one.

    Without --preset or --config the other settings are those of qwen2_vl_2b.
    Args: typed: {dotted name: value} of the flags; read: of the file. Both go over the folder's.
    """
    folder = typed.get("init_from", base.init_from)
    over = typed if "init_from" in typed else {**read, **typed}
    if (
        folder is None
        or {f"model.decoder.{n}" for n in ("layers", "width", "vocab")} <= over.keys()
    ):
        return base
    from megajax.foreign import hf

    model: Any = hf.load_config(folder)
    if not isinstance(model, VlmConfig):
        raise UserError(
            f"{folder} holds no vision-language model; experiments/pretrain.py trains decoders, "
            "experiments/finetune.py encoders (--init_from)"
        )
    base = base if config.start_given() else qwen2_vl_2b()
    base = dataclasses.replace(base, model=model)
    changes = {k: v for k, v in over.items() if k.startswith("model.")}
    if "data.tokenizer" not in {**read, **typed}:
        changes["data.tokenizer"] = str(need_tokenizer(folder, "init_from", "--data.tokenizer"))
    elif "data.tokenizer" not in over and (
        file := tokenizer_file(model_folder(folder, "init_from"))
    ):
        changes["data.tokenizer"] = str(file)
    return config.override(base, changes)


# ---- what a run reads


class Samples:
    """The samples of a run (systems/job.py: Reading)."""

    labels: tuple[str, ...] = ()

    def __init__(self, cfg: VisionConfig, console: Console, run_dir: RunDir):
        """Opens them, and says what they hold. Raises: UserError."""
        self._cfg, data, train = cfg, cfg.data, cfg.train
        self.tokenizer: Tokenizer = open_tokenizer(data.tokenizer)
        check_vocabulary(self.tokenizer, cfg.model.vocab)
        opened = open_vision(data, train.seq_len, train.seed, cfg.model, self.tokenizer)
        for problem, number in opened.problems.counts.items():
            console.say(
                f"{data.source}: {number:,} x {problem}; first: {opened.problems.first[problem]}"
            )
        console.say(f"{data.source}: {opened.facts} ({self.tokenizer.name})")
        self.rows = VisionRows(opened.train, data, train.seq_len, train.seed, cfg.model)
        if self.rows.fill is not None:
            tokens, patches = self.rows.fill
            console.say(
                f"{self.rows.rows_per_epoch:,} rows an epoch, {tokens:.0%} of their tokens and "
                f"{patches:.0%} of their patches used"
            )
        if data.blank:
            console.say("every image is shown grey (--data.blank)")
        self._held_out = opened.held_out
        self.identity: dict[str, Any] = {
            "samples": opened.fingerprint,
            "tokenizer": self.tokenizer.identity,
            "seq_len": train.seq_len,
            "patches": data.patches,
            "image_token": cfg.model.image_token,
            **{f"tower.{n}": getattr(cfg.model.tower, n) for n in SIZES},
            "blank": data.blank,
            "seed": train.seed,
        }

    def measure(
        self, train_step: TrainStep, recorder: Recorder, console: Console, run_dir: RunDir
    ) -> "ExactMatch":
        """Returns the evaluations of a run."""
        samples = evaluated(self._held_out, evaluated_rows(self._cfg), self._cfg.data.faulty)
        if self._cfg.in_bubbles and jax.process_index() == 0:
            draw_schedule(self._cfg, run_dir, console)
        args = train_step, samples, self.tokenizer, recorder, console, run_dir
        return ExactMatch(self._cfg, *args)


def show(console: Console, cfg: VisionConfig, train_step: TrainStep, mesh: Mesh) -> None:
    """Says how large the model is, and what a row holds."""
    params, parts = train_step.abstract_state.params, train_step.parts
    tower = count({k: params[k] for k in ("tower", "projector")})
    some = ""
    if parts.trains is not None:
        some = f" ({quantity(count(parts.trained(params)))} of them trained)"
    console.say(
        f"{quantity(count(params))} parameters{some}, {quantity(tower)} of them of the tower and "
        f"the projector; {nbytes_per_device(train_step.abstract_state) / 2**30:.3f} GiB of state a "
        f"device; rows of {cfg.train.seq_len} tokens and {cfg.data.patches} patches"
    )
    if line := precision.explain(cfg, parts):
        console.say(f"precision: {line}")


def schedules(cfg: VisionConfig) -> dict[str, tuple[Table, Timeline]]:
    """Returns the tables of a step in which all microbatches have images, inline and in bubbles,
    with their times in forward passes of a stage's chunk, by FLOPs."""
    stages, segments, size = cfg.mesh.pipe or 1, cfg.segments, cfg.tower_chunks()
    decoder, backward = cfg.pipeline.table(stages), 0 if "tower" in cfg.frozen else 1
    work = [(segments, backward * segments)] * decoder.microbatches
    tables = {"inline": decoder, "bubbles": encoder.place(decoder, work)}
    # A chunk's backward pass costs two forward passes, one more where it runs F again, and where a
    # W is split off one of the two is its own. EB runs EF again.
    again = 1 if cfg.pipeline.stash == "input" else 0
    gradients = 1 + again if decoder.is_split else 2 + again
    seconds = {"F": 1, "B": gradients, "W": 2 + again, "EF": size / segments}
    seconds["EB"] = 3 * seconds["EF"]

    def inline(task: Any) -> float:
        first = task.stage == task.chunk == 0
        more = {"F": size, "B": 2 * backward * size}.get(task.kind, 0)
        return seconds[task.kind] + (more if first else 0)

    times = {"inline": inline, "bubbles": lambda task: seconds[task.kind]}
    return {name: (t, lockstep(t, times[name], cfg.pipeline.idle)) for name, t in tables.items()}


def draw_schedule(cfg: VisionConfig, run_dir: RunDir, console: Console) -> None:
    """Says what the schedule of the tower saves; draws it (schedule.svg) and writes it for Perfetto
    (schedule.json)."""
    made = schedules(cfg)
    for name, (table, timeline) in made.items():
        console.say(
            f"encoder.schedule={name}: {table.ticks} ticks, idle {timeline.bubble_fraction:.0%}, "
            f"{timeline.makespan:.1f} forward passes of a chunk (by FLOPs)"
        )
    timelines = {name: timeline for name, (_, timeline) in made.items()}
    try:
        gantt(timelines, run_dir.path / "schedule.svg", "forward passes of a stage's chunk")
        timelines["bubbles"].to_perfetto(run_dir.path / "schedule.json")
    except OSError as error:
        console.say(f"cannot draw the schedule in {run_dir.path}: {error.strerror}")


# ---- measure


PLACES = 2**14  # (chosen) tokens and patches of a device's rows at a time
LOGITS = 2**27  # (chosen) logits of a device at a time: 0.5 GiB
DOCUMENT = 16  # (chosen: the patches of the smallest image) tokens of a segment for which is room


class Predictor:
    """The most likely tokens of rows by a model, on the devices of a mesh: one program.

    Attention is that of the train step, which need not keep a row's patches times its patches. A
    device has few rows at a time, and the logits of a part of them.
    """

    def __init__(self, cfg: VisionConfig, layout: Layout):
        """layout: of the parameters."""
        self._mesh, model = layout.mesh, cfg.model
        spec = layout.act("batch")
        ways = layout.ways(BATCH_AXES)
        seq_len, places = cfg.train.seq_len, cfg.train.seq_len + cfg.data.patches
        rows = min(max(1, -(-cfg.train.global_batch // ways)), max(1, PLACES // places))
        self._rows = ways * rows
        size = max(1, min(seq_len, LOGITS // (rows * model.padded_vocab)))
        self._abstract = {
            name: jax.ShapeDtypeStruct(
                (self._rows, *leaf.shape), leaf.dtype, sharding=layout.named(spec)
            )
            for name, leaf in cfg.task().batch.items()
        }
        dtype = jnp.dtype(cfg.train.dtype)
        attention = functools.partial(_attend, layout, cfg)
        ops = dataclasses.replace(Ops(), attend=attention)
        parts = vlm.parts(model, ops=ops, dtype=cfg.train.dtype)

        def scored(params: Tree, x_BSD: jax.Array, targets_BS: jax.Array) -> tuple[jax.Array, ...]:
            logits_BSV = parts.head(params, x_BSD)[..., : model.vocab]
            top_BS = logits_BSV.argmax(-1).astype(jnp.int32)
            at_BS1 = jnp.maximum(targets_BS, 0)[..., None]
            true_BS = jnp.take_along_axis(logits_BSV, at_BS1, -1)[..., 0]
            nats_BS = jax.nn.logsumexp(logits_BSV, -1) - true_BS
            return top_BS, jnp.where(targets_BS >= 0, nats_BS, 0.0)

        def local(params: Tree, batch: Batch) -> tuple[jax.Array, ...]:
            x_BSD, _ = parts.hidden(params, batch, None, "none")
            pieces = [
                scored(params, x_BSD[:, at : at + size], batch["targets"][:, at : at + size])
                for at in range(0, seq_len, size)
            ]
            return tuple(jnp.concatenate(arrays, 1) for arrays in zip(*pieces, strict=True))

        def run(params: Tree, batch: Batch) -> tuple[jax.Array, ...]:
            used = jax.tree.map(
                lambda x: jax.sharding.reshard(x.astype(dtype) if x.ndim > 1 else x, P()), params
            )
            outputs = jax.shard_map(
                local,
                mesh=self._mesh,
                in_specs=(P(), dict.fromkeys(batch, spec)),
                out_specs=spec,
                check_vma=False,
            )(used, dict(batch))
            return jax.tree.map(lambda x: jax.sharding.reshard(x, P()), outputs)

        self._run = jax.jit(run)

    def __call__(
        self, params: Tree, rows: Sequence[Mapping[str, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns (the most likely next token of each, cross-entropy in nats of its target, 0 for
        none), both (rows, S)."""
        tops, nats = [], []
        like = self._abstract["tokens"]
        indices = host_rows(like)
        for first in range(0, len(rows), self._rows):
            part = [rows[min(first + i, len(rows) - 1)] for i in indices.tolist()]
            batch = {name: np.stack([row[name] for row in part]) for name in part[0]}
            with jax.set_mesh(self._mesh):
                top, nat = self._run(params, place(batch, self._abstract, indices))
            size = min(self._rows, len(rows) - first)
            tops.append(np.asarray(top)[:size])
            nats.append(np.asarray(nat)[:size])
        return np.concatenate(tops), np.concatenate(nats)


def _attend(
    layout: Layout,
    cfg: VisionConfig,
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context | None = None,
    window: int | None = None,
) -> jax.Array:
    """Attention of a device's rows by the kernel that the train step takes."""
    packed = packed_shape(q_BSHK, k_BMGK, query, memory)
    asked = cfg.train.attention
    kernel, _ = choose_attention(layout, asked, q_BSHK.dtype, cfg.context, packed)
    segments = max(cfg.train.segments, -(-q_BSHK.shape[1] // DOCUMENT), 2)
    return attend(q_BSHK, k_BMGK, v_BMGK, query, memory, window, kernel, segments)


class ExactMatch:
    """A hook of the training loop: exact match of the answers to held-out samples."""

    last_sample: str | None = None

    def __init__(
        self,
        cfg: VisionConfig,
        train_step: TrainStep,
        samples: Sequence[Sample],
        tokenizer: Tokenizer,
        recorder: Recorder,
        console: Console,
        run_dir: RunDir,
    ):
        """samples: the same ones in each evaluation."""
        self._cfg, self._step, self._samples = cfg, train_step, samples
        self._tokenizer, self._recorder = tokenizer, recorder
        self._console, self._run_dir = console, run_dir
        self.scores: dict[str, float] = {}
        if not samples:
            return
        self._predictor = Predictor(cfg, train_step.layout)
        rows = functools.partial(fixed_rows, samples, cfg.data, cfg.train.seq_len, cfg.model)
        self._rows = {blank: rows(blank) for blank in ({cfg.data.blank, True})}
        self._kinds = sorted({sample.kind for sample in samples})
        self._frequent = most_frequent(samples)

    def due(self, finished: int, last: bool) -> bool:
        """Every so many steps, and after the last one."""
        every = self._cfg.eval.every
        return bool(self._samples) and (last or (every > 0 and finished % every == 0))

    def start(self, state: TrainState, finished: int) -> TrainState:
        """Nothing is measured before the first step."""
        return state

    def __call__(self, state: TrainState, finished: int) -> TrainState:
        """Evaluates, records, and draws some answers."""
        params = self._step.storage.natural(self._step.weights(state))
        right: dict[bool, np.ndarray] = {}
        row: dict[str, Any] = {}
        for blank, rows in self._rows.items():
            tops, nats = self._predictor(params, [r for r, _ in rows])
            right[blank] = exact(tops, rows, len(self._samples))
            if blank == self._cfg.data.blank:
                scored = sum(int((r["targets"] >= 0).sum()) for r, _ in rows)
                row |= {"eval_loss": float(nats.sum(dtype=np.float64) / scored)}
                row |= {"eval_tokens": scored}
        shown = right[self._cfg.data.blank]
        row |= {
            "eval_exact": float(shown.mean()),
            "eval_exact_blank": float(right[True].mean()),
            "eval_most_frequent": float(np.mean(self._frequent)),
            "eval_images": len(self._samples),
        }
        names = np.array([sample.kind for sample in self._samples])
        for kind in self._kinds if len(self._kinds) > 1 else ():
            row[f"eval_exact/{kind}"] = float(shown[names == kind].mean())
        self.scores = {k: row[k] for k in ("eval_exact", "eval_exact_blank", "eval_most_frequent")}
        self._recorder.emit(finished, row)
        self._console.say(f"step {finished}: {told(row)}")
        if self._cfg.eval.samples:
            self._draw(params, finished)
        if jax.process_index() == 0:
            draw_exact(self._run_dir, self._console)
        return state

    def _draw(self, params: Tree, step: int) -> None:
        samples = self._samples[: self._cfg.eval.samples]
        answers = greedy(self._predictor, params, samples, self._cfg, self._tokenizer)
        lines = [
            f"{s.question} {answer} ({'right' if answer == s.answer else s.answer})"
            for s, answer in zip(samples, answers, strict=True)
        ]
        self.last_sample = "\n".join(line.replace("\n", " ")[:200] for line in lines)
        if jax.process_index():
            return
        file = self._run_dir.samples / f"{step:08d}.png"
        try:
            file.parent.mkdir(exist_ok=True)
            write_whole(file, page(samples, answers))
        except OSError as error:
            self._console.say(f"cannot write {file}: {error.strerror}")


def most_frequent(samples: Sequence[Sample]) -> list[bool]:
    """Returns for each sample whether its answer is the most frequent one to its question; of a
    source of one kind, of all questions together."""
    kinds = {sample.kind for sample in samples}
    keys = [sample.question if len(kinds) > 1 else "" for sample in samples]
    counts: dict[str, Counter[str]] = {}
    for key, sample in zip(keys, samples, strict=True):
        counts.setdefault(key, Counter())[sample.answer] += 1
    best = {key: counter.most_common(1)[0][0] for key, counter in counts.items()}
    return [s.answer == best[key] for key, s in zip(keys, samples, strict=True)]


def exact(
    tops: np.ndarray, rows: Sequence[tuple[Mapping[str, np.ndarray], list[int]]], count: int
) -> np.ndarray:
    """Returns for each sample, bool, whether all its targets are the most likely tokens.

    tops: (rows, S). rows: with the numbers of the samples that are their segments 1, 2, ...
    """
    right = np.zeros(count, bool)
    for top_S, (row, numbers) in zip(tops, rows, strict=True):
        is_right_S = (top_S == row["targets"]) | (row["targets"] == IGNORED)
        for segment, number in enumerate(numbers, 1):
            right[number] = is_right_S[row["segments"] == segment].all()
    return right


def told(row: Mapping[str, Any]) -> str:
    """Returns one line on an evaluation."""
    kinds = [f"{k.partition('/')[2]} {x:.1%}" for k, x in row.items() if "exact/" in k]
    by_kind = f" ({', '.join(kinds)})" if kinds else ""
    return (
        f"exact match {row['eval_exact']:.1%} of {row['eval_images']} held-out samples{by_kind}; "
        f"without their images {row['eval_exact_blank']:.1%}; the most frequent answers would get "
        f"{row['eval_most_frequent']:.1%}"
    )


def greedy(
    predictor: Predictor,
    params: Tree,
    samples: Sequence[Sample],
    cfg: VisionConfig,
    tokenizer: Tokenizer,
) -> list[str]:
    """Returns the model's last answers to samples by greedy decoding.

    All tokens of an answer are replaced by the most likely ones at once, until none changes: after
    n passes at least the first n are those of greedy decoding.
    """
    pieces, begins = [], []
    tower, S, most = cfg.model.tower, cfg.train.seq_len, cfg.eval.sample_tokens
    for sample in samples:
        made = prepared(sample, cfg.model, cfg.data.blank)
        is_target = made.targets >= 0
        # The answer is the last run of targets; the token before each is what predicts it.
        last = int(np.flatnonzero(is_target)[-1])
        first = last
        while first > 0 and is_target[first - 1]:
            first -= 1
        room = min(most, S - first - 1)
        pieces.append(made)
        begins.append((first, room))
    rows = []
    for made, (first, room) in zip(pieces, begins, strict=True):
        size = first + 1 + room
        cut = {name: getattr(made, name)[: first + 1] for name in ("tokens", "targets", "places")}
        # Behind an image text goes on after its largest position in any axis (vlm.positions).
        begin = made.rotary[: first + 1].max() + 1
        following = np.repeat(begin + np.arange(room, dtype=np.int32)[:, None], 3, 1)
        longer = dataclasses.replace(
            made,
            tokens=np.append(cut["tokens"], np.zeros(room, np.int32)),
            targets=np.full(size, IGNORED, np.int32),
            places=np.append(cut["places"], np.full(room, -1, np.int32)),
            rotary=np.concatenate([made.rotary[: first + 1], following]).astype(np.int32),
        )
        rows.append(row_of([longer], S, cfg.data.patches, tower))
    answers: list[list[int]] = [[] for _ in samples]
    for _ in range(most):
        tops, _ = predictor(params, rows)
        new = []
        for number, (first, room) in enumerate(begins):
            ids = tops[number, first : first + room]
            rows[number]["tokens"][first + 1 : first + 1 + room] = ids
            stops = [i for i, token in enumerate(ids.tolist()) if token in tokenizer.ends]
            new.append(ids[: stops[0] if stops else room].tolist())
        if new == answers:
            break
        answers = new
    return [tokenizer.decode(ids) for ids in answers]


# ---- pictures

TILE, TEXT = (300, 210), 13  # (chosen) pixels of a picture with its answer, and of a letter
RIGHT, WRONG = "#1a7f37", "#cf222e"


def page(samples: Sequence[Sample], answers: Sequence[str]) -> bytes:
    """Returns a PNG with the first image of each sample, the question and the answer, in green
    where it is right; else in red, with the true one."""
    columns = min(4, len(samples)) or 1
    lines = -(-len(samples) // columns)
    sheet = Image.new("RGB", (columns * TILE[0], lines * TILE[1]), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(TEXT)
    for i, (sample, answer) in enumerate(zip(samples, answers, strict=True)):
        left, top = i % columns * TILE[0], i // columns * TILE[1]
        if sample.images:
            picture = Image.fromarray(sample.images[0])
            room = TILE[0] - 12, TILE[1] - 5 * TEXT - 12
            scale = min(room[0] / picture.width, room[1] / picture.height)
            size = [max(1, round(side * scale)) for side in picture.size]
            sheet.paste(picture.resize((size[0], size[1]), 0), (left + 6, top + 6))
        is_right = answer == sample.answer
        texts = [(sample.question, "black"), (answer, RIGHT if is_right else WRONG)]
        texts += [] if is_right else [(f"true: {sample.answer}", "black")]
        for number, (text, color) in enumerate(texts):
            shown = " ".join(text.split())[:40].encode("latin-1", "replace").decode("latin-1")
            place_ = left + 6, top + TILE[1] - (4 - number) * (TEXT + 2)
            pen.text(place_, shown, fill=color, font=font)
    file = io.BytesIO()
    sheet.save(file, "PNG")
    return file.getvalue()


def draw_exact(run_dir: RunDir, console: Console) -> None:
    """Draws exact.png of a run's metrics.jsonl: exact match over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = rows_by_step(run_dir.metrics, "eval_exact")
    steps = sorted(rows)
    if not steps:
        return
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    last = rows[steps[-1]]
    names = {
        "eval_exact": ("with images", OURS, "o-"),
        "eval_exact_blank": ("without images", HELD_OUT, "o-"),
        "eval_most_frequent": ("most frequent answers", "black", "s--"),
    }
    for name, (text, color, style) in names.items():
        values = [float(rows[s].get(name, 0.0)) for s in steps]
        axes.plot(steps, values, style, color=color, lw=1.4, ms=4, label=text)
    axes.set(xlabel="optimizer step", ylabel="exact match", ylim=(0, 1))
    axes.set_title(
        f"exact match {last['eval_exact']:.1%} of {last['eval_images']} held-out samples "
        f"(step {steps[-1]})",
        fontsize=11,
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save_plot(figure, run_dir.path / "exact.png", console)
