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
from megajax.models.parts import Batch, ModelParts

Objective = Callable[[LossSums, jax.Array], jax.Array]
Metrics = Callable[[LossSums, jax.Array], Mapping[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One member of a batch. shape, words: of a row's dimensions, without the rows themselves."""

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
    """Returns how many targets of a batch count: those that are not below 0."""
    return (batch["targets"] >= 0).sum()


def train_all(name: str, words: Words) -> bool:
    """Says of every parameter that it is trained."""
    return True


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained.

    parts(layout, ops): the model. Called with the layout of the mesh and the Ops that put
    communication around a block; for the stages of a pipeline with None and the Ops of code inside
    a shard_map. batch: {name: Leaf}.
    objective(sums, total): what is differentiated, of the LossSums of one micro-batch and of the
    count of the whole step; linear in the sums, so that micro-batches of any sizes add up. The
    step adds the routers' penalty itself: the mean over micro-batches of what their blocks give.
    metrics(sums, total): {name: scalar} that a step and an evaluation report, of the sums of the
    whole step; without `loss` among them the objective is reported as the loss.
    count(batch): how many predictions of a batch count, int32; the step's total, at least 1.
    unit: what throughput counts ('tokens', 'images'). row_units: how many of them a row has; None:
    as many as its `tokens` have places, or 1 without tokens.
    more_batches: further shapes in which a batch may come (images on other canvases), with the
    members of `batch`.
    trains(name, words): whether the parameter of this dotted name is trained. One that is not has
    no gradient, no optimizer state and no part in the gradient norm.
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

    @property
    def units_per_row(self) -> int:
        """Returns how many units a row of the batch has."""
        if self.row_units is not None:
            return self.row_units
        return self.batch["tokens"].shape[0] if "tokens" in self.batch else 1


def token_rows(seq_len: int, *more: str) -> dict[str, Leaf]:
    """Returns the batch of a model that reads packed rows of tokens. more: further members (S,)."""
    names = ("tokens", "targets", "segments", "positions", *more)
    return {name: Leaf((seq_len,), ("seq",)) for name in names}


def mean_loss(z_loss: float = 0.0) -> Objective:
    """Returns the objective of a predictor: the mean over all predicted tokens of the step, so a
    micro-batch with fewer of them weighs less. z_loss: weight of log(Z)^2."""

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

    copies: what weights that travel as differences were in use at the last step, in the type of
    compute, whole over the axes that share a gradient; None: the run keeps none. errors: what
    codecs with feedback dropped of gradients so far, each device's own: the first dimension of all
    leaves counts the devices of the mesh (parallel/pipeline.py, first_errors); None: no feedback.
    """

    params: Tree
    opt: Tree
    step: jax.Array
    copies: Tree = None
    errors: Tree = None
