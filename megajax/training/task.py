"""Task: what is trained, as a model family describes it to `make_train_step`.

A task holds the parts of a model, the members of a batch and the objective. How it is trained
(mesh, optimizer, precision, schedule of a pipeline) is the run's configuration. The decoder's
pretraining is `Config.task`; a model that the library does not know brings a task of its own
(docs/training.md).

Legend: S positions.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from megajax.core.layout import Layout, Words
from megajax.layers.losses import LossSums
from megajax.layers.ops import Ops
from megajax.models.parts import ModelParts

Objective = Callable[[LossSums, jax.Array, int], jax.Array]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One member of a batch. shape, words: of a row's dimensions, without the rows themselves."""

    shape: tuple[int, ...] = ()
    words: Words = ()
    dtype: Any = "int32"


@dataclasses.dataclass(frozen=True)
class Task:
    """What is trained.

    parts(layout, ops): the model. Called with the layout of the mesh and the Ops that put
    communication around a block; for the stages of a pipeline with None and the Ops of code inside
    a shard_map. batch: {name: Leaf}; `targets` is among them, and one below 0 counts nothing.
    objective(sums, total, pieces): what is differentiated, of the LossSums of one of `pieces`
    micro-batches and of the number of targets in the whole step; linear in the sums.
    """

    parts: Callable[[Layout | None, Ops], ModelParts]
    batch: Mapping[str, Leaf]
    objective: Objective


def token_rows(seq_len: int, *more: str) -> dict[str, Leaf]:
    """Returns the batch of a model that reads packed rows of tokens. more: further members (S,)."""
    names = ("tokens", "targets", "segments", "positions", *more)
    return {name: Leaf((seq_len,), ("seq",)) for name in names}


def mean_loss(z_loss: float = 0.0) -> Objective:
    """Returns the objective of a predictor: the mean over all predicted tokens of the step, so a
    micro-batch with fewer of them weighs less; plus the mean over micro-batches, all of one size,
    of the routers' penalties, which count every token. z_loss: weight of log(Z)^2."""

    def objective(sums: LossSums, total: jax.Array, pieces: int) -> jax.Array:
        value = (sums.cross_entropy + z_loss * sums.z_squared) / total
        return value if sums.moe is None else value + sums.moe.penalty.sum() / pieces

    return objective
