"""How much a trained model loses when it is pruned, pattern by pattern, stage by stage.

Two models that a CPU can train: an encoder that says from which package of Python's standard
library a passage comes (data/passages.py), and the nano GPT on the text that pretraining reads.
One chain: a trained model; then for each sparsity rank by (w dL/dw)^2 of the steps before, prune,
fine-tune, measure (Tile-Wise sparsity, arXiv 2008.13006, section 5). The chain `dense` prunes
nothing and is fine-tuned as long: what a pattern loses, it loses against this. The steps are those
of every training run (training/step.py), the masks those of --prune.* (systems/prune_stages.py).

Units. The paper's matrices are 768 wide, these 128. The paper's units (tile 128, chunks of 8, 32
and 64 rows, blocks of 32 x 32) divided by 4 are one and a half times as large here as a part of a
matrix: harder on every pattern alike. A row cannot be cut, so chunk 1 stays 1, and a block that is
divided in both directions has 2 times the elements of TW-1's unit, in the paper 8 times: BW-64 (16
x 16 here) has 8 times. BW-128 (32 x 32 here) is the paper's block, not divided. VW's vectors of 16
are no unit: they only say how evenly elements go.

Legend: B rows, S positions.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megajax.core.layout import Layout
from megajax.core.mesh import MeshSpec
from megajax.core.tree import Tree, named_leaves
from megajax.data.config import DataConfig
from megajax.data.corpus import open_corpora
from megajax.data.pack import PackedRows
from megajax.data.passages import open_passages
from megajax.layers.ops import Ops
from megajax.models import decoder, encoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.models.parts import Batch, ModelParts
from megajax.systems.prune_stages import Pruner
from megajax.systems.pruning import Pattern, densities, sparsity_of
from megajax.training.config import JobConfig, TrainConfig
from megajax.training.masking import PruneConfig, UnitScore, chosen, mask_optimizer, pick
from megajax.training.optim import OptimConfig, Optimizer, make_optimizer, make_schedule
from megajax.training.step import TrainStep, make_train_step
from megajax.training.task import Leaf, Task, TrainState, mean_loss

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
    def here(self) -> tuple[int, int]:
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
    """A model to prune and text to train it on. batch(seed, step): a function of these alone.

    parts: of `model`, on one device. held_out: batches that are never trained on.
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
    """Steps of the dense model and of each stage; a rate that ends at a tenth of the first."""

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
    """The encoder with a head of eight classes. tokens: of a passage, the first one included.

    tokenizer: as DataConfig's. held_out: passages. model: its vocabulary and labels are the data's.
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
    """The decoder on the bytes of Python's standard library. held_out: rows of `tokens` tokens."""
    (corpus,), _ = open_corpora(DataConfig(), cache_dir, vocab=model.vocab)
    train = functools.cache(lambda seed: PackedRows(corpus.train, tokens, seed))
    assert corpus.held_out is not None
    kept = PackedRows(corpus.held_out, tokens, 0)

    def stacked(rows: PackedRows, first: int) -> HostBatch:
        found = [rows[first + i] for i in range(batch)]
        return {key: np.stack([row[key] for row in found]) for key in found[0]}

    return Subject(
        "text",
        model,
        decoder.parts(model),
        lambda seed, step: stacked(train(seed), step * batch),
        [stacked(kept, first) for first in range(0, held_out, batch)],
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
        """Returns the compiled step of a seed, which decides dropout."""
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
        """Returns a trained model, its sums of the last steps, as many as a stage has."""
        steps, tune = self.training.steps, min(self.training.tune, self.training.steps)
        state = self.train(self.start(seed), seed, steps - tune)
        state, _ = self._pruner(METHODS["EW"]).prune(state, 0.0)
        return self.train(state, seed, tune)

    def train(self, state: TrainState, seed: int, steps: int) -> TrainState:
        """Returns the state so many steps later."""
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
        tile, chunk = method.here
        cfg = PruneConfig(
            pattern=method.pattern, tile=tile, chunk=chunk, apriori=method.apriori,
            unit_score=self.unit_score,
        )  # fmt: skip
        return Pruner(cfg, self.subject.parts.axes, self.step_of(0).layout.mesh)

    def measure(self, params: Tree) -> dict[str, float]:
        """Returns loss (nats a prediction) and accuracy on the held-out batches."""
        found = [self._measure(params, batch) for batch in self.subject.held_out]
        loss, right, count = np.sum(jax.device_get(found), 0)
        return {"loss": float(loss / count), "accuracy": float(right / count)}

    def _sums(self, params: Tree, batch: Batch) -> jax.Array:
        targets_BS = batch["targets"]
        logits_BSV = self.subject.parts.logits(params, batch)
        log_BSV = jax.nn.log_softmax(logits_BSV)
        counts_BS = targets_BS >= 0
        at_BS1 = jnp.where(counts_BS, targets_BS, 0)[..., None]
        loss_BS = -jnp.take_along_axis(log_BSV, at_BS1, -1)[..., 0]
        right_BS = logits_BSV.argmax(-1) == targets_BS
        found = (x.astype(jnp.float32) for x in (loss_BS, right_BS, counts_BS))
        return jnp.stack([jnp.where(counts_BS, x, 0.0).sum() for x in found])


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
            kept = densities(masks, trainer.axes).values()
            row |= {"sparsity": sparsity_of(masks)}
            row |= {"kept_least": min(kept), "kept_most": max(kept)}
        state = trainer.train(state, seed, trainer.training.tune)
        yield state, row | trainer.measure(state.params)


def save(path: Path, state: TrainState) -> None:
    """Writes a state, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    leaves: dict[str, Any] = {n: np.asarray(x) for n, x in named_leaves(state)}
    with open(part, "wb") as file:
        np.savez(file, **leaves)
    part.replace(path)


def load(path: Path, like: TrainState) -> TrainState:
    """Returns a saved state. like: of the same shapes."""
    with np.load(path) as found:
        leaves = [jnp.asarray(found[n]) for n, _ in named_leaves(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)
