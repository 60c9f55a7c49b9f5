"""Task: what is trained, as a model family describes it to `make_train_step`.

A task holds the parts of a model, the members of a batch, the objective, what a step reports and
what it counts. How the model is trained (mesh, optimizer, precision, schedule of a pipeline) is the
run's configuration. The decoder's pretraining is `Config.task`; a model that the library does not
know brings a task of its own (docs/training.md).

Legend: S positions.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from megajax.core.layout import Layout, Words
from megajax.core.tree import Tree
from megajax.layers.losses import LossSums
from megajax.layers.ops import Ops
from megajax.models import lora, plain
from megajax.models.lora import LoraConfig
from megajax.models.parts import Batch, ModelParts

Objective = Callable[[LossSums, jax.Array], jax.Array]
Metrics = Callable[[LossSums, jax.Array], Mapping[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One member of a batch. shape, words: the size and the word of each dimension of one row."""

    shape: tuple[int, ...] = ()
    words: Words = ()
    dtype: Any = "int32"


def mean_metrics(sums: LossSums, total: jax.Array) -> dict[str, jax.Array]:
    """Returns each scalar term of the sums over the total, under the term's name; the terms
    `cross_entropy` and `right` are reported as `loss` and `accuracy`."""
    names = {"cross_entropy": "loss", "right": "accuracy"}
    return {
        names.get(n, n): x.astype(total.dtype) / total for n, x in sums.terms.items() if x.ndim == 0
    }


def count_targets(batch: Batch) -> jax.Array:
    """Returns the number of targets of a batch that are not negative."""
    return (batch["targets"] >= 0).sum()


def count_in_loss(batch: Batch) -> jax.Array:
    """Says that the loss counts the predictions (LossSums.count), so that they are not known before
    it. A step then calls the objective with the total 1 and divides the gradients."""
    raise AssertionError("the count is that of the loss")


def train_all(name: str, words: Words) -> bool:
    """Says of every parameter that it is trained."""
    return True


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its batch, and what a step computes of them.

    parts(layout, ops): returns the model. It is called with the layout of the mesh and the Ops that
      put communication around a block; for the stages of a pipeline, with None and the Ops of code
      inside a shard_map.
    batch: {name of a member: Leaf}. The default of `count` reads the member `targets`.
    objective(sums, total): the scalar that is differentiated. sums: LossSums of one micro-batch.
      total: the count of the whole step. The objective must be linear in the sums, so that
      micro-batches of different sizes add up. The step adds the routers' penalty, the mean over
      micro-batches.
    metrics(sums, total): {name: scalar}, reported by a step and by an evaluation. sums: of all
      micro-batches. If `loss` is not among the names, the objective is reported as the loss.
    count(batch): int32, the number of predictions of a batch. The step's total is their sum, or 1
      if that is 0. By default, the targets that are not negative are counted. `count_in_loss`: the
      loss counts, and the objective is a sum divided by the total.
    unit: what throughput counts ('tokens', 'images'). row_units: the units of a row; None: the
      length of the member `tokens`, or 1 if there is no such member.
    more_batches: further shapes in which a batch may come (images on other canvases), with the
      members of `batch`.
    trains(name, words): tells whether the parameter of this dotted name is trained. A parameter
      that is not trained has no gradient, no optimizer state and no part in the gradient norm.
    bare, adapters: of what `with_adapters` returned, the task without them, and what they are.
    """

    parts: Callable[[Layout | None, Ops], ModelParts]
    batch: Mapping[str, Leaf]
    objective: Objective
    metrics: Metrics = mean_metrics
    count: Callable[[Batch], jax.Array] = count_targets
    unit: str = "tokens"
    row_units: int | None = None
    more_batches: Sequence[Mapping[str, Leaf]] = ()
    trains: Callable[[str, Words], bool] = train_all
    bare: "Task | None" = None
    adapters: LoraConfig = LoraConfig()

    def with_adapters(self, cfg: LoraConfig) -> "Task":
        """Returns the task of training adapters alone; of a rank of 0 itself. Raises, when its
        parts are made: UserError for modules that the model does not have."""
        if not cfg.rank:
            return self

        def parts(layout: Layout | None, ops: Ops) -> ModelParts:
            return lora.adapt_parts(self.parts(layout, ops), cfg, layout)

        def trains(name: str, words: Words) -> bool:
            return lora.learns(name, words) and self.trains(name, words)

        return dataclasses.replace(self, parts=parts, trains=trains, bare=self, adapters=cfg)

    @property
    def units_per_row(self) -> int:
        """Returns how many units a row of the batch has."""
        if self.row_units is not None:
            return self.row_units
        return self.batch["tokens"].shape[0] if "tokens" in self.batch else 1


def plain_task(
    build: plain.Build, loss: plain.Loss, batch: Mapping[str, Leaf], unit: str = "rows"
) -> Task:
    """Returns the task of a plain Flax NNX module, which needs no words and no Ops.

    It trains data-parallel with any --shard.zero; other axes of the mesh are refused.

    Args: build(rngs): returns the module. loss(module, batch): returns ({'loss': float, ...}, int):
      sums over the rows of the batch, and how many rows or predictions they are over. What is
      minimised is `loss` divided by the count of the whole step; each sum is reported divided by
      it. A loss sees the rows of one device, and the module in the mode of training or evaluation.
      batch: the members of a batch, each with the shape and type of one row. unit: what the count
      counts.
    Raises: UserError for a module whose variables cannot be trained.
    """
    network = plain.PlainNetwork(build, loss)
    network.parts()  # refuses now what cannot be trained
    return Task(
        network.parts,
        batch,
        objective=lambda sums, total: sums.loss / total,
        metrics=lambda sums, total: {
            n: x.astype(total.dtype) / total
            for n, x in sums.terms.items()
            if not n.startswith(plain.VARIABLE)
        },
        count=count_in_loss,
        unit=unit,
        trains=network.trains,
    )


def token_rows(seq_len: int, *more: str) -> dict[str, Leaf]:
    """Returns the batch of a model that reads packed rows of tokens. more: further members (S,)."""
    names = ("tokens", "targets", "segments", "positions", *more)
    return {name: Leaf((seq_len,), ("seq",)) for name in names}


def mean_loss(z_loss: float = 0.0) -> Objective:
    """Returns the objective of a predictor of tokens: the mean cross-entropy over all predicted
    tokens of the step. A micro-batch with fewer predictions weighs less. z_loss: weight of
    log(Z)^2."""

    def objective(sums: LossSums, total: jax.Array) -> jax.Array:
        return (sums.cross_entropy + z_loss * sums.z_squared) / total

    return objective


# ---- state
#
# What a training step reads and writes.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """float32 master parameters, optimizer state, and the number of finished steps (int32).

    copies: the weights in use at the last step, for weights that travel as differences from them,
    in the type of compute and gathered over the axes that share a gradient; None: the run keeps no
    copies. errors: the quantization errors of codecs with feedback; every device has its own, so
    the first dimension of all leaves counts the devices of the mesh (parallel/pipeline.py,
    first_errors); None: no feedback.
    """

    params: Tree
    opt: Tree
    step: jax.Array
    copies: Tree = None
    errors: Tree = None
