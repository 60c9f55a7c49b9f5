"""Tile-wise sparsity (arXiv 2008.13006): the study, its verdicts, figures and tables.

Quality is measured on trained models; speed is estimated for the products of the paper's BERT. The
sections say how.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.reports.reporting import (
    Columns,
    Row,
    markdown_table,
    panels,
    read,
    resumed,
    rows_of,
    rows_table,
    save,
    source,
)
from megajax.core import files
from megajax.core.files import or_nan
from megajax.core.hardware import CARDS
from megajax.core.layout import Layout
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree, named_leaves
from megajax.cost.sparse import Gemm, SparseCost
from megajax.data.config import DataConfig
from megajax.data.corpus import open_corpora
from megajax.data.pack import PackedRows
from megajax.data.passages import open_passages
from megajax.layers.ops import Ops
from megajax.models import decoder, encoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.parts import Batch, ModelParts
from megajax.systems.pruning import Pattern, Pruner, densities, prune, sparsity_of
from megajax.training.config import JobConfig, TrainConfig
from megajax.training.masking import PruneConfig, UnitScore, chosen, mask_optimizer, pick
from megajax.training.optim import OptimConfig, Optimizer, make_optimizer, make_schedule
from megajax.training.step import TrainStep, make_train_step
from megajax.training.task import Leaf, Task, TrainState, mean_loss
from pallas_kernels.tile_sparse.format import TileSparse

# ---- the study
#
# How much a trained model loses when it is pruned, pattern by pattern, stage by stage.
#
# Two models that a CPU can train: an encoder that says from which package of Python's standard
# library a passage comes (data/passages.py), and the nano GPT on the text that pretraining reads.
# A chain begins with a trained model. For each sparsity it ranks the weights by (w dL/dw)^2 of the
# steps before, prunes, fine-tunes and measures (Tile-Wise sparsity, arXiv 2008.13006, section 5).
# The chain `dense` prunes nothing and is fine-tuned as long; losses of patterns are relative to it.
# Steps are those of every training run (training/step.py), masks those of --prune.*
# (systems/pruning.py).
#
# Units. The paper's matrices are 768 wide, these are 128 wide. The paper's units (tiles of 128
# columns, chunks of 8, 32 and 64 rows, blocks of 32 x 32) are divided by 4, which makes them one
# and a half times as large, relative to the matrix, for every pattern alike. A row cannot be
# divided, so chunk 1 stays 1. A block that is divided in both directions has 2 times the elements
# of TW-1's unit, where the paper's block has 8 times; BW-64 (16 x 16 here) has 8 times. BW-128 (32
# x 32 here) is the paper's block, not divided. VW's vectors of 16 are no units that are pruned
# together: they only make the pruned elements evenly distributed.
#
# Legend: B rows, S positions.


SHRINK = 4  # the paper's units over ours
CLIP = 1.0  # largest global norm of a gradient (BERT's)
SubjectName = Literal["passages", "text"]
HostBatch = Mapping[str, np.ndarray]  # as ModelParts' batches


@dataclasses.dataclass(frozen=True)
class Method:
    """A pattern with its units, as the paper sizes them.

    tile, chunk: 0 where the pattern has none; a block of BW is `chunk` rows x `tile` columns.
    apriori: fraction of the units at either end that the element-wise result decides.
    """

    name: str
    pattern: Pattern
    tile: int = 0
    chunk: int = 0
    apriori: float = 0.0

    @property
    def shrunk(self) -> tuple[int, int]:
        """(tile, chunk) on our matrices, at least 1."""
        return max(self.tile // SHRINK, 1), max(self.chunk // SHRINK, 1)


METHODS = {
    m.name: m
    for m in (
        Method("EW", "ew"),
        Method("VW", "vw"),
        Method("TEW", "tew", 128, 1),
        Method("TW-1", "tw2d", 128, 1),
        Method("TW-1a", "tw2d", 128, 1, 0.1),
        Method("TW-8", "tw2d", 128, 8),
        Method("TW-32", "tw2d", 128, 32),
        Method("TW-64", "tw2d", 128, 64),
        Method("TW1D-1", "tw1d", 128, 1),
        # Blocks are tiles as wide as chunks are long.
        Method("BW", "tw1d", 32, 32),
        Method("BW-64", "tw1d", 64, 64),
        Method("BW-128", "tw1d", 128, 128),
    )
}
DENSE = "dense"


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model to prune and text to train it on.

    parts: the parts of `model` on one device. batch: returns the batch of (seed, step), always the
    same. held_out: batches that are never trained on.
    """

    name: SubjectName
    model: EncoderConfig | DecoderConfig
    parts: ModelParts
    batch: Callable[[int, int], HostBatch]
    held_out: Sequence[HostBatch]

    @property
    def task(self) -> Task:
        """The subject as `make_train_step` takes it."""
        members = {name: Leaf(rows.shape[1:], ("seq",)) for name, rows in self.held_out[0].items()}
        return Task(lambda layout, ops: self.parts, members, mean_loss())


@dataclasses.dataclass(frozen=True)
class Training:
    """Numbers of steps and learning rates of the dense model and of each stage. The rate ends at a
    tenth of the first."""

    steps: int
    tune: int
    lr: float
    tune_lr: float

    def rate(self, step: int) -> float:
        """The learning rate of a step: one cosine, then one line for each stage."""
        if step < self.steps:
            optim = OptimConfig(lr=self.lr, schedule="cosine", warmup=min(20, self.steps // 4))
            rate: Any = make_schedule(optim, self.steps)(step)
            return float(rate)
        done = (step - self.steps) % self.tune / self.tune
        return self.tune_lr * (1 - 0.9 * done)

    def schedule(self) -> optax.Schedule:
        """Returns `rate` for code that is traced: a table, which repeats its last stage."""
        rates = [self.rate(step) for step in range(self.steps + self.tune)]

        def at(step: Any) -> jax.Array:
            again = self.steps + (step - self.steps) % self.tune
            return jnp.asarray(rates, jnp.float32)[jnp.where(step < self.steps, step, again)]

        return at


def passages(
    model: EncoderConfig,
    tokens: int,
    tokenizer: str,
    batch: int,
    held_out: int,
    cache_dir: str | Path,
) -> Subject:
    """Returns the encoder with a head of eight classes, on passages of Python's standard library.

    model: its vocabulary and number of labels are replaced by those of the data. tokens: length of
    a passage, with its first token. tokenizer: as in DataConfig. held_out: number of passages.
    """
    data = open_passages(tokens, tokenizer, cache_dir)
    cfg = dataclasses.replace(
        model, vocab=data.vocab, labels=len(data.labels), head="classify", types=0
    )

    def labelled(tokens_BS: np.ndarray, labels_B: np.ndarray) -> HostBatch:
        targets_BS = np.full_like(tokens_BS, -1)
        targets_BS[:, 0] = labels_B
        positions_BS = np.broadcast_to(np.arange(tokens, dtype=np.int32), tokens_BS.shape)
        return {"tokens": tokens_BS, "targets": targets_BS, "positions": positions_BS}

    held, labels = data.held_out(held_out)
    return Subject(
        "passages",
        cfg,
        encoder.parts(cfg, ops=Ops()),
        lambda seed, step: labelled(*data.batch(seed, step, batch)),
        [labelled(held[i : i + batch], labels[i : i + batch]) for i in range(0, held_out, batch)],
    )


def text(
    model: DecoderConfig, tokens: int, batch: int, held_out: int, cache_dir: str | Path
) -> Subject:
    """Returns the decoder on the bytes of Python's standard library. held_out: number of rows."""
    (corpus,), _ = open_corpora(DataConfig(), cache_dir, vocab=model.vocab)
    train = functools.cache(lambda seed: PackedRows(corpus.train, tokens, seed))
    assert corpus.held_out is not None
    held_out_rows = PackedRows(corpus.held_out, tokens, 0)

    def stacked(rows: PackedRows, first: int) -> HostBatch:
        batch_rows = [rows[first + i] for i in range(batch)]
        return {key: np.stack([row[key] for row in batch_rows]) for key in batch_rows[0]}

    return Subject(
        "text",
        model,
        decoder.parts(model),
        lambda seed, step: stacked(train(seed), step * batch),
        [stacked(held_out_rows, first) for first in range(0, held_out, batch)],
    )


class Trainer:
    """A subject's train step for each seed, and its masks."""

    def __init__(self, subject: Subject, training: Training, unit_score: UnitScore = "rms"):
        """unit_score: how units of a pattern rank, as of systems.pruning.prune.

        Weight decay and Adam's decays: BERT's (arXiv 1810.04805, appendix A.2) but beta2 0.98,
        for runs of a few hundred steps."""
        self.subject, self.training, self.unit_score = subject, training, unit_score
        self.names = chosen(subject.parts.axes)
        self.axes = pick(subject.parts.axes, self.names)
        self._steps: dict[int, TrainStep] = {}
        self._measure = jax.jit(self._sums)

    def step_of(self, seed: int) -> TrainStep:
        """Returns the compiled step of a seed, which determines the dropout."""
        if seed not in self._steps:
            rows, tokens = self.subject.held_out[0]["tokens"].shape
            cfg = JobConfig(
                model=self.subject.model,
                train=TrainConfig(self.training.steps, rows, tokens, seed, remat="none"),
                optim=OptimConfig(weight_decay=0.01, beta2=0.98, eps=1e-6, clip=CLIP),
            )
            mesh = MeshSpec(data=1).build(jax.devices()[:1])
            optimizer = functools.partial(self._optimizer, cfg)
            self._steps[seed] = make_train_step(cfg, mesh, self.subject.task, optimizer)
        return self._steps[seed]

    def _optimizer(self, cfg: JobConfig, axes: Tree, layout: Layout) -> Optimizer:
        optimizer = make_optimizer(cfg.optim, 1, axes, layout, self.training.schedule())
        return mask_optimizer(optimizer, self.names)

    def start(self, seed: int) -> TrainState:
        """Returns a new model."""
        return self.step_of(seed).init(seed)

    def abstract(self) -> TrainState:
        """Returns shapes and types of a state."""
        return self.step_of(0).abstract_state

    def dense(self, seed: int) -> TrainState:
        """Returns a trained model. Its sums of gradients are those of as many last steps as a stage
        has."""
        steps, tune = self.training.steps, min(self.training.tune, self.training.steps)
        state = self.train(self.start(seed), seed, steps - tune)
        state, _ = self._pruner(METHODS["EW"]).prune(state, 0.0)
        return self.train(state, seed, tune)

    def train(self, state: TrainState, seed: int, steps: int) -> TrainState:
        """Returns the state after `steps` more steps."""
        step = self.step_of(seed)
        first = int(state.step)
        for number in range(first, first + steps):
            batch: Any = self.subject.batch(seed, number)
            state, _ = step.step(state, batch)
        return state

    def prune(self, state: TrainState, method: Method, sparsity: float) -> tuple[TrainState, Tree]:
        """Returns (the state with new masks in it, the masks)."""
        return self._pruner(method).prune(state, sparsity)

    def _pruner(self, method: Method) -> Pruner:
        tile, chunk = method.shrunk
        cfg = PruneConfig(
            pattern=method.pattern,
            tile=tile,
            chunk=chunk,
            apriori=method.apriori,
            unit_score=self.unit_score,
        )
        return Pruner(cfg, self.subject.parts.axes, self.step_of(0).layout.mesh)

    def measure(self, params: Tree) -> dict[str, float]:
        """Returns loss (nats a prediction) and accuracy on the held-out batches."""
        sums = [self._measure(params, batch) for batch in self.subject.held_out]
        loss, right, count = np.sum(jax.device_get(sums), 0)
        return {"loss": float(loss / count), "accuracy": float(right / count)}

    def _sums(self, params: Tree, batch: Batch) -> jax.Array:
        targets_BS = batch["targets"]
        logits_BSV = self.subject.parts.logits(params, batch)
        log_BSV = jax.nn.log_softmax(logits_BSV)
        counts_BS = targets_BS >= 0
        at_BS1 = jnp.where(counts_BS, targets_BS, 0)[..., None]
        loss_BS = -jnp.take_along_axis(log_BSV, at_BS1, -1)[..., 0]
        right_BS = logits_BSV.argmax(-1) == targets_BS
        terms = (x.astype(jnp.float32) for x in (loss_BS, right_BS, counts_BS))
        return jnp.stack([jnp.where(counts_BS, x, 0.0).sum() for x in terms])


def chain(
    trainer: Trainer, state: TrainState, seed: int, method: Method | None, stages: Sequence[float]
) -> Iterator[tuple[TrainState, dict[str, Any]]]:
    """Prunes (method None: does not), fine-tunes and measures; each stage from the one before.

    Yields: (the state, which the next stage uses up, {goal, sparsity: achieved, kept_least,
    kept_most: the smallest and largest fraction of a matrix that stays, loss, accuracy}).
    """
    for goal in stages:
        row: dict[str, Any] = {"goal": goal, "sparsity": 0.0}
        if method is not None:
            state, masks = trainer.prune(state, method, goal)
            fractions = densities(masks, trainer.axes).values()
            row |= {"sparsity": sparsity_of(masks)}
            row |= {"kept_least": min(fractions), "kept_most": max(fractions)}
        state = trainer.train(state, seed, trainer.training.tune)
        yield state, row | trainer.measure(state.params)


def save_state(path: Path, state: TrainState) -> None:
    """Writes a state to an archive."""
    files.write_arrays(path, {name: np.asarray(leaf) for name, leaf in named_leaves(state)})


def load(path: Path, like: TrainState) -> TrainState:
    """Returns a saved state. like: a state with the same shapes."""
    arrays = files.read_arrays(path, "state of a study")
    leaves = [jnp.asarray(arrays[n]) for n, _ in named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


# ---- rows and verdicts
#
# What pruning cost and what it saves: rows, a verdict and figures of a study.
#
# Quality is measured on trained models (the study). Speed is that of products of the
# paper's BERT (arXiv 2008.13006; 12,800 tokens, matrices 768 and 3072 wide): masks come from
# trained scores, enlarged, and are packed as the kernels take them; from the packed weights FLOPs
# and bytes are exact. Floors divide them by an H200's peaks, which no kernel reaches; times are the
# cost model's ESTIMATES (cost/sparse.py) with assumed efficiencies. What only a GPU can tell is not
# here.
#
# A coarser chunk is faster and prunes worse: each speed-up stands beside the loss of its own chunk.


Key = tuple[str, int, str, str]

TOKENS = 12800  # rows of every product that the paper times: batch 100, length 128
# (K, N), how often a layer of BERT base has it, and how many times faster the paper's kernel is at
# 75 % on a V100 (README of the paper's repository, stream GEMM, beside CUTLASS).
SHAPES = {
    "attention": ((768, 768), 4, 2.14),
    "up": ((768, 3072), 1, 2.04),
    "down": ((3072, 768), 1, 2.79),
}
PAPER = 1.95  # times, BERT and others over dense tensor cores at 75 % (abstract)
CLAIM = 0.5  # TW-1 is to lose at most this part of what BW loses, at CLAIM_AT
CLAIM_AT = 0.75
TILES, BLOCKS = ("TW-1", "TW-1a", "TW1D-1"), ("BW", "BW-64", "BW-128")
KERNEL_CHUNKS = (8, 16, 32, 64)  # what tile_sparse_matmul's Hopper kernels take
CARD = CARDS["H200"]
WHAT = {"passages": "encoder, passages", "text": "nano GPT, text"}


def key(row: Mapping[str, Any]) -> Key:
    """Returns what identifies a point. stages: the sparsities that its chain has passed."""
    return row["task"], row["seed"], row["method"], row["stages"]


def former(path: Path) -> dict[Key, Row]:
    """Returns the points that a file holds, none if it does not exist. Raises: UserError."""

    def parse(result: Row) -> dict[Key, Row]:
        for row in result["rows"]:
            row["loss"] = or_nan(row["loss"])  # null: training diverged
        return {key(row): row for row in result["rows"]}

    return resumed(path, "points", "state", parse) or {}


# ---- quality


def quality(points: Sequence[Row]) -> Iterator[Row]:
    """Yields mean and standard deviation over the seeds of what each point loses.

    Against the dense model of the same seed, fine-tuned as long: lost, nats a prediction, and
    lost_accuracy, a fraction. n: seeds; with one there is no deviation (None).
    """
    dense = {(r["task"], r["seed"], r["goal"]): r for r in points if r["method"] == DENSE}
    curves = dict.fromkeys((r["task"], r["method"], r["goal"]) for r in points if r["goal"] > 0)
    for task, method, goal in curves:
        points_at, lost = [], []
        for row in points:
            base = dense.get((task, row["seed"], goal))
            if base and (row["task"], row["method"], row["goal"]) == (task, method, goal):
                points_at.append(row)
                both = row["loss"] - base["loss"], base["accuracy"] - row["accuracy"]
                lost.append(both)
        if not points_at:
            continue
        row = {"part": "quality", "task": task, "method": method, "goal": goal, "n": len(points_at)}
        columns = {name: [r[name] for r in points_at] for name in ("sparsity", "loss", "accuracy")}
        columns |= dict(zip(("lost", "lost_accuracy"), zip(*lost, strict=True), strict=True))
        for name, values in columns.items():
            row[name] = float(np.mean(values))
            row[f"{name}_std"] = float(np.std(values, ddof=1)) if len(points_at) > 1 else None
        yield row


def claims(rows: Sequence[Row]) -> Iterator[Row]:
    """Yields whether tile-wise pruning with chunk 1 loses at most half of what blocks lose at 75 %.

    There is a row for each model, each size of blocks, both methods of pruning by tiles, and for
    loss and accuracy. ratio: None where blocks lose nothing.
    """
    at = {(r["task"], r["method"]): r for r in rows if r["goal"] == CLAIM_AT}
    pairs = itertools.product(dict.fromkeys(task for task, _ in at), TILES, BLOCKS)
    for task, tiles, blocks in pairs:
        if {(task, tiles), (task, blocks)} <= at.keys():
            tw, bw = at[task, tiles], at[task, blocks]
            for name in ("lost", "lost_accuracy"):
                yield {
                    "part": "claim",
                    "task": task,
                    "what": name,
                    "tiles": tiles,
                    "blocks": blocks,
                    "tw": tw[name],
                    "bw": bw[name],
                    "tw_std": tw[f"{name}_std"],
                    "bw_std": bw[f"{name}_std"],
                    "n": tw["n"],
                    "ratio": tw[name] / bw[name] if bw[name] > 0 else None,
                    "met": bool(bw[name] > 0 and tw[name] <= CLAIM * bw[name]),
                }


# ---- speed


@dataclasses.dataclass(frozen=True)
class Work:
    """One product y = x w in 16 bits. bytes: size of operands, result and indices, each counted
    once."""

    flops: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        """Returns the work of both."""
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    @property
    def floor_s(self) -> float:
        """Seconds that no kernel can be faster than on an H200."""
        return CARDS["H200"].floor_s(self.flops, self.bytes)


def dense_work(rows: int, shape: tuple[int, int]) -> Work:
    """Returns the work of a dense product of `rows` rows."""
    K, N = shape
    return Work(2.0 * rows * K * N, 2.0 * (rows * (K + N) + K * N))


def sparse_work(rows: int, weight: TileSparse) -> Work:
    """Returns a packed weight's work: whole slots are multiplied, unread columns of x not moved."""
    K, N = weight.shape
    pattern = weight.pattern
    slots = int(pattern.tile_starts[-1])
    used = np.unique(np.asarray(pattern.chunks)[:slots])
    # Dead slots, which fill up a step of the kernel, have a chunk beyond the last.
    read = int(np.clip(K - used * pattern.chunk, 0, pattern.chunk).sum())
    entries = slots * pattern.chunk * pattern.tile
    # chunk ids and tile ids of slots; first slot and place in the order of tiles; columns.
    indices = 4.0 * (2 * slots + 2 * pattern.tile_order.size + 1 + pattern.columns.size)
    return Work(2.0 * rows * entries, 2.0 * (rows * (read + N) + entries) + indices)


def enlarge(scores: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Repeats rows and columns of scores (k, n) until they have a shape that k and n divide."""
    for axis, size in enumerate(shape):
        scores = np.repeat(scores, size // scores.shape[axis], axis)
    return scores


def speeds(
    scores: Mapping[str, np.ndarray],
    methods: Sequence[Method],
    stages: Sequence[float],
    unit_score: UnitScore = "rms",
) -> Iterator[Row]:
    """Yields the counted work of the paper's shapes, each pruned alone to each sparsity.

    scores: {name in SHAPES: a matrix whose sizes divide those of the shape}. methods: only
    tile-wise ones are counted, because no kernel multiplies the others faster than dense matrices.
    unit_score: as in `prune`.
    """
    for name, (shape, _, paper) in SHAPES.items():
        dense, enlarged = dense_work(TOKENS, shape), enlarge(scores[name], shape)
        for goal in stages:
            for method in methods:
                if method.pattern != "tw2d" or method.apriori:
                    continue
                mask = prune(
                    enlarged,
                    enlarged,
                    goal,
                    pattern=method.pattern,
                    tile=method.tile,
                    chunk=method.chunk,
                    unit_score=unit_score,
                )
                weight = TileSparse.from_dense(
                    jnp.zeros(shape, jnp.float16), mask, tile=method.tile, chunk=method.chunk
                )
                yield _speed(name, method, goal, dense, sparse_work(TOKENS, weight), weight) | {
                    "paper": paper if goal == CLAIM_AT else None
                }


def _speed(
    name: str, method: Method, goal: float, dense: Work, ours: Work, weight: TileSparse
) -> Row:
    gemm = Gemm(name, TOKENS, *weight.shape)
    cost = SparseCost(CARD, tile=method.tile, chunk=method.chunk)
    estimates = cost.dense_time(gemm), cost.sparse_time(gemm, weight.density)
    return {
        "part": "speed",
        "shape": name,
        "method": method.name,
        "goal": goal,
        "tile": method.tile,
        "chunk": method.chunk,
        "kept": weight.density,
        "multiplied": weight.stored,
        "gflop_dense": dense.flops / 1e9,
        "gflop": ours.flops / 1e9,
        "mb_dense": dense.bytes / 1e6,
        "mb": ours.bytes / 1e6,
        "flops_saved": dense.flops / ours.flops,
        "bytes_saved": dense.bytes / ours.bytes,
        "floor_us_dense": 1e6 * dense.floor_s,
        "floor_us": 1e6 * ours.floor_s,
        "speedup_floor": dense.floor_s / ours.floor_s,
        "estimate_us_dense": 1e6 * estimates[0],
        "estimate_us": 1e6 * estimates[1],
        "speedup_estimate": estimates[0] / estimates[1],
        "kernel": method.chunk in KERNEL_CHUNKS,
    }


def prices(rows: Sequence[Row], speeds: Sequence[Row]) -> Iterator[Row]:
    """Yields for each chunk and sparsity what a layer of BERT gains and what OUR models lose.

    The speed-up is of a layer's six products one after the other; the loss that of the same tile
    and chunk, divided by 4 with the matrices (chunk 1 is not).
    """
    for goal, name in dict.fromkeys((r["goal"], r["method"]) for r in speeds):
        of_method = [r for r in speeds if (r["goal"], r["method"]) == (goal, name)]
        times = {r["shape"]: SHAPES[r["shape"]][1] for r in of_method}

        def total(member: str, of_method: list = of_method, times: dict = times) -> float:
            return sum(times[r["shape"]] * r[member] for r in of_method)

        row = {
            "part": "price",
            "method": name,
            "goal": goal,
            "tile": of_method[0]["tile"],
            "chunk": of_method[0]["chunk"],
            "kernel": of_method[0]["kernel"],
            "flops_saved": total("gflop_dense") / total("gflop"),
            "bytes_saved": total("mb_dense") / total("mb"),
            "speedup_floor": total("floor_us_dense") / total("floor_us"),
            "speedup_estimate": total("estimate_us_dense") / total("estimate_us"),
        }
        for losses in rows:
            if (losses["method"], losses["goal"]) == (name, goal):
                for member in ("lost", "lost_std", "lost_accuracy", "lost_accuracy_std", "n"):
                    row[f"{losses['task']}_{member}"] = losses[member]
        yield row


# ---- figures


COLOURS = {
    "EW": "#000000",
    "VW": "#999999",
    "TEW": "#009E73",
    "TW-1": "#0072B2",
    "TW-1a": "#004466",
    "TW-8": "#56B4E9",
    "TW-32": "#CC79A7",
    "TW-64": "#E69F00",
    "TW1D-1": "#7A6FF0",
    "BW": "#D55E00",
    "BW-64": "#A63A00",
    "BW-128": "#6B2500",
}


def draw_quality(rows: Sequence[Row], claim: Sequence[Row], path: Path) -> None:
    """Draws what each pattern loses at each sparsity, a panel for each model, as SVG and PNG.

    Sparsities are at equal distances, with the patterns side by side at each of them.
    """
    tasks = list(dict.fromkeys(r["task"] for r in rows))
    shown = [name for name in METHODS if any(r["method"] == name for r in rows)]
    figure, places = panels(len(tasks), size=(5.2 * len(tasks), 4.2))
    for axes, task in zip(places, tasks, strict=True):
        goals = sorted({r["goal"] for r in rows if r["task"] == task} | {0.0})
        for i, name in enumerate(shown):
            curve = [r for r in rows if (r["task"], r["method"]) == (task, name)]
            if curve:
                aside = 0.6 * ((i + 0.5) / len(shown) - 0.5)
                at = [0.0, *(goals.index(r["goal"]) + aside for r in curve)]
                bars = [0.0, *(r["lost_std"] or 0.0 for r in curve)]
                axes.errorbar(
                    at,
                    [0.0, *(r["lost"] for r in curve)],
                    bars,
                    color=COLOURS[name],
                    label=name,
                    marker="o",
                    markersize=3,
                    capsize=1.5,
                    linewidth=0.9,
                    linestyle="--" if name.startswith("BW") else ":" if name == "TW-1a" else "-",
                )
        seeds = [r["n"] for r in rows if r["task"] == task]
        count = f"{min(seeds)} to {max(seeds)}" if min(seeds) < max(seeds) else f"{seeds[0]}"
        axes.set_title(f"{WHAT[task]}: seeds {count}", fontsize=9, loc="left")
        axes.set_xticks(range(len(goals)), [f"{100 * g:g}" for g in goals])
        axes.set(xlabel="weights pruned (%)", ylabel="held-out loss above dense (nats)")
        axes.axhline(0, color="0.6", linewidth=0.8)
    figure.legend(
        *places[0].get_legend_handles_labels(),
        fontsize=8,
        frameon=False,
        loc="outside right center",
    )
    ratios = [
        f"{r['ratio']:.2f} of that with {r['blocks']}"
        for r in claim
        if (r["what"], r["tiles"], r["task"]) == ("lost", "TW-1", tasks[-1]) and r["ratio"]
    ]
    title = f"{WHAT[tasks[-1]]}, pruned by 75 %: with TW-1 it loses {', '.join(ratios)}"
    save(figure, path, title if ratios else "What each pattern loses")


def draw_price(rows: Sequence[Row], path: Path) -> None:
    """Draws the estimated speed-up against the loss, by chunk and sparsity; the paper's is
    dashed."""
    from matplotlib.lines import Line2D

    tasks = [t for t in WHAT if any(f"{t}_lost" in r for r in rows)]
    figure, places = panels(len(tasks), size=(5.2 * len(tasks), 4.2))
    marks = dict(zip(dict.fromkeys(r["goal"] for r in rows), "osD^vP" * 4, strict=False))
    for axes, task in zip(places, tasks, strict=True):
        for r in (r for r in rows if f"{task}_lost" in r):
            axes.errorbar(
                r[f"{task}_lost"],
                r["speedup_estimate"],
                xerr=r[f"{task}_lost_std"] or 0.0,
                marker=marks[r["goal"]],
                markersize=5,
                capsize=2,
                color=COLOURS[r["method"]],
                elinewidth=0.7,
                markerfacecolor=None if r["kernel"] else "white",
            )
        axes.axhline(PAPER, color="0.4", linestyle="--", linewidth=1)
        axes.locator_params(axis="x", nbins=5)
        axes.set_title(WHAT[task], fontsize=9, loc="left")
        axes.set(xlabel="held-out loss above dense (nats)", ylabel="estimated speed-up (times)")
        axes.set_ylim(1, 1.05 * max([PAPER, *(r["speedup_estimate"] for r in rows)]))

    def point(colour: str, mark: str, text: str, face: str | None = None) -> Line2D:
        return Line2D(
            [], [], color=colour, marker=mark, linestyle="", markerfacecolor=face, label=text
        )

    names = [n for n in METHODS if any(r["method"] == n for r in rows)]
    shown = [point(COLOURS[n], "o", n) for n in names]
    shown += [point("0.4", mark, f"{100 * goal:g} % pruned") for goal, mark in marks.items()]
    shown.append(point("0.4", "o", "no kernel takes\nthis chunk", "white"))
    shown.append(Line2D([], [], color="0.4", linestyle="--", label=f"paper, 75 %,\nV100: {PAPER}"))
    figure.legend(handles=shown, fontsize=8, frameon=False, loc="outside right center")
    save(figure, path, _price_title(rows, tasks))


def _price_title(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    at = {r["method"]: r for r in rows if r["goal"] == CLAIM_AT}
    if not tasks or not {"TW-1", "TW-64"} <= at.keys():
        return "What coarse chunks cost (speed-ups are estimates)"
    parts = (
        f"{at['TW-64'][f'{t}_lost'] - at['TW-1'][f'{t}_lost']:+.2f} nats ({t})"
        for t in tasks
        if all(f"{t}_lost" in at[m] for m in ("TW-1", "TW-64"))
    )
    gain = at["TW-64"]["speedup_estimate"]
    return (
        f"Chunks of 64 rows, estimated {gain:.2f} times dense at 75 %, cost {', '.join(parts)} "
        "over chunk 1"
    )


# ---- tables of documents


COUNTED = "work counted, times estimated for an H200, losses of models trained here"


def quality_table(path: Path) -> str:
    """Returns the held-out loss above the dense model's, by pattern and sparsity."""
    result = read(path)
    every = rows_of(result, part="quality")
    rows = [r for r in every if r["method"] != DENSE]
    at = {(r["task"], r["method"], r["goal"]): r for r in rows}
    heads = [(t, g) for t in WHAT for g in sorted({r["goal"] for r in rows if r["task"] == t})]
    lines = [
        [method, *(_lost(at.get((task, method, goal))) for task, goal in heads)]
        for method in METHODS
        if any(r["method"] == method for r in rows)
    ]
    table = markdown_table(["pattern", *(f"{t}, {100 * g:.0f} %" for t, g in heads)], lines)
    lasts = {r["task"]: r for r in every if r["method"] == DENSE}
    levels = "; ".join(
        f"{WHAT[t]}: {r['loss']:.2f} nats, {100 * r['accuracy']:.0f} % right (seeds: {r['n']})"
        for t, r in lasts.items()
    )
    return "\n\n".join([table, f"Dense, tuned as long: {levels}.", _source(result)])


def _lost(row: dict | None) -> str:
    if row is None:
        return ""
    bar = "" if row["lost_std"] is None else f" ± {row['lost_std']:.3f}"
    return f"{row['lost']:+.3f}{bar} ({row['n']})"


def claims_table(path: Path) -> str:
    """Returns tile-wise pruning with chunk 1 beside blocks at 75 %."""
    columns: Columns = {
        "model": lambda r: WHAT[r["task"]],
        "tiles": lambda r: r["tiles"],
        "blocks": lambda r: r["blocks"],
        "tiles lose": lambda r: f"{r['tw']:+.3f}",
        "blocks lose": lambda r: f"{r['bw']:+.3f}",
        "ratio": lambda r: "-" if r["ratio"] is None else f"{r['ratio']:.2f}",
        "at most half": lambda r: "yes" if r["met"] else "no",
    }
    return _table(path, columns, part="claim", what="lost")


def prices_table(path: Path) -> str:
    """Returns what a layer of BERT gains beside what our models lose, by chunk."""
    tasks = {
        f"{t} loses": (lambda r, t=t: f"{r[f'{t}_lost']:+.3f}" if f"{t}_lost" in r else "")
        for t in WHAT
    }
    columns: Columns = {
        "sparsity": lambda r: f"{100 * r['goal']:.0f} %",
        "tile x chunk": lambda r: f"{r['tile']} x {r['chunk']}",
        "FLOPs, dense over ours": lambda r: f"{r['flops_saved']:.2f}",
        "bytes, dense over ours": lambda r: f"{r['bytes_saved']:.2f}",
        "times as fast (estimate)": lambda r: f"{r['speedup_estimate']:.2f}",
        "at most, by floors": lambda r: f"{r['speedup_floor']:.2f}",
        "kernel": lambda r: "Hopper" if r["kernel"] else "plain JAX only",
        **tasks,
    }
    return _table(path, columns, COUNTED, part="price")


def speeds_table(path: Path) -> str:
    """Returns the paper's products at 75 %, its V100 beside our counts. The measured column is
    empty."""

    def kilo(member: str) -> Callable[[dict], str]:
        return lambda r: f"{r[member + '_dense']:.1f} -> {r[member]:.1f}"

    columns: Columns = {
        "product": lambda r: r["shape"],
        "tile x chunk": lambda r: f"{r['tile']} x {r['chunk']}",
        "multiplied": lambda r: f"{100 * r['multiplied']:.1f} %",
        "GFLOP": kilo("gflop"),
        "MB": kilo("mb"),
        "floor, us": kilo("floor_us"),
        "us (estimate)": kilo("estimate_us"),
        "times (estimate)": lambda r: f"{r['speedup_estimate']:.2f}",
        "times, paper (V100)": lambda r: f"{r['paper']:.2f}",
        "us, measured": lambda r: "",
    }
    table_text = _table(path, columns, COUNTED, part="speed", goal=0.75)
    return f"{table_text}\n\nThe paper's average at 75 %: {PAPER} times."


def _table(path: Path, columns: Columns, layer: str = "", **members: object) -> str:
    result = read(path)
    return f"{rows_table(rows_of(result, **members), columns)}\n\n{_source(result, layer)}"


def _source(result: dict, layer: str = "") -> str:
    rule = {"paper": "units ranked by L2 / n", "rms": "units ranked by L2 / sqrt(n)"}
    return source(result, rule[result["unit_score"]], layer=layer)
