"""Weights that stay 0: masks in the optimizer's state, around any optimizer.

The masks are arrays of the state: traced, so that a new mask runs the same compiled step; cut over
devices as the weights are; saved and restored with the rest. What is pruned is exactly 0 after
every step, whatever momentum and weight decay say, and its gradient enters no norm and no moment.
Beside them lie the sums that first-order Taylor pruning ranks by (Tile-Wise sparsity, arXiv
2008.13006, section 5). Which weights go, and the host's part of a stage: systems/pruning.py.
Without pruning (`--prune.sparsity=0`) nothing of this is in the step or in the state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from megajax.core.config import Checked, equal, option
from megajax.core.errors import UserError
from megajax.core.tree import Tree, is_words, name, named_leaves, nest, owner
from megajax.models.parts import is_stacked
from megajax.training.optim import Optimizer, is_hidden_matrix

Pattern = Literal["tw2d", "tw1d", "ew", "vw", "bw", "tew"]
UnitScore = Literal["rms", "paper"]
Weights = Literal["all", "attention", "mlp"]


@dataclass(frozen=True)
class PruneConfig(Checked, section="prune"):
    """Pruning in stages, with training between them."""

    sparsity: float = option(
        0.0,
        "fraction of the chosen weights that the last stage reaches; 0: no pruning",
        at_least=0,
        below=1,
    )
    pattern: Pattern = option("tw2d", "tile-wise (tw2d, tw1d, tew) or a rival (ew, vw, bw)")
    stages: int = option(
        4, "number of prunings, each of the same fraction of what is left", at_least=1
    )
    steps: int = option(
        20,
        "training before each pruning, which ranks weights by the gradients of these steps",
        "steps",
        at_least=1,
    )
    start: int = option(0, "training before the first stage", "steps", at_least=0)
    tile: int = option(128, "number of columns of a tile", "columns", at_least=1)
    chunk: int = option(
        1, "number of rows that are pruned together; kernels take 8 to 64", "rows", at_least=1
    )
    score: Literal["taylor", "magnitude"] = option(
        "taylor",
        "score of a weight w; taylor: (w dL/dw)^2, summed over the steps of a stage; magnitude: "
        "|w|",
    )
    unit_score: UnitScore = option(
        "rms",
        "score of a unit of n weights that are pruned together; rms: the L2 norm of their scores "
        "divided by sqrt(n); paper: divided by n",
    )
    weights: Weights = option("all", "matrices of the blocks that are pruned")
    apriori: float = option(
        0.0,
        "fraction of the units that always stays, and that always goes: those of which a trial of "
        "element-wise pruning keeps most, and least",
        at_least=0,
        below=0.5,
    )
    remain: float = option(
        0.0,
        "fraction of the units of each matrix, its best ones, that is pruned last",
        at_least=0,
        below=1,
    )
    delta: float = option(
        0.05,
        "tew: fraction of the weights that is restored as single elements",
        needs=equal("pattern", "tew"),
        at_least=0,
        below=1,
    )

    @property
    def last(self) -> int:
        """The number of finished steps after which the last stage prunes."""
        return self.start + self.stages * self.steps

    def due(self, finished: int) -> float | None:
        """Returns the sparsity to prune to after so many finished steps; None: no stage begins.

        0 when the first stage begins: nothing is pruned, but the sums start anew.
        """
        stage, remainder = divmod(finished - self.start, self.steps)
        if not self.sparsity or remainder or not 0 <= stage <= self.stages:
            return None
        if stage == self.stages:
            return self.sparsity
        return 1 - (1 - self.sparsity) ** (stage / self.stages)

    def check(self, steps: int) -> None:
        """Refuses stages that a run of so many steps does not reach.

        Raises: UserError.
        """
        if self.sparsity and self.last >= steps:
            room = (steps - 1 - self.start) // self.stages
            near = f"nearest: prune.steps={room}, or " if room > 0 else ""
            raise UserError(
                f"prune.start={self.start} + prune.stages {self.stages} x prune.steps {self.steps} "
                f"= {self.last} must be below train.steps={steps}; {near}train.steps="
                f"{self.last + 1} (--prune.start, --prune.stages, --prune.steps, --train.steps)"
            )


class Masked(NamedTuple):
    """masks: bool, True where a weight stays, a tree of the chosen leaves only. scores: float32,
    the sums to rank by, as masks; None: ranked by magnitude. inner: the optimizer's own state."""

    masks: Tree
    scores: Tree | None
    inner: Any


def chosen(axes: Tree, weights: Weights = "all") -> tuple[str, ...]:
    """Returns the names of the matrices of all stacks of layers that pruning may touch; no router.

    By their words: a matrix of an attention layer has heads, one of a feed-forward layer `mlp`.
    """
    kinds = {"attention": {"heads", "kv_heads"}, "mlp": {"mlp"}}
    return tuple(
        n
        for n, words in named_leaves(axes, is_words)
        if is_stacked(words)
        and is_hidden_matrix(words)
        and "router" not in words
        and (weights == "all" or kinds[weights] & set(words))
    )


def pick(tree: Tree, names: Sequence[str]) -> Tree:
    """Returns the nested dict of these leaves of a tree of arrays or words."""
    leaves = dict(named_leaves(tree, is_words))
    return nest({n: leaves[n] for n in names})


def mask_optimizer(
    inner: Optimizer | optax.GradientTransformation, names: Sequence[str], scored: bool = True
) -> Optimizer:
    """Wraps an optimizer so that pruned weights are exactly 0 after `optax.apply_updates`.

    names: the leaves that have masks; these begin with everything kept. scored: with sums of
    (w dL/dw)^2, which `observe` adds to.
    """
    inner = inner if isinstance(inner, Optimizer) else Optimizer(*inner)

    def init(params: Tree) -> Any:
        part = pick(params, names)
        masks = jax.tree.map(lambda w: jnp.ones_like(w, bool), part)
        sums = jax.tree.map(lambda w: jnp.zeros_like(w, jnp.float32), part) if scored else None
        return Masked(masks, sums, inner.init(params))

    def update(updates: Tree, state: Any, params: Tree | None = None, **_: Any) -> Any:
        if params is None:
            raise ValueError("masks need the parameters: update(grads, state, params)")
        updates, inner_state = inner.update(keep(state.masks, updates), state.inner, params)
        updates = _where(state.masks, lambda m, u, w: jnp.where(m, u, -w), updates, params)
        return updates, state._replace(inner=inner_state)

    def look(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Masked]:
        grads, state = observe(state, grads, params)
        grads, inner_state = inner.observe(grads, state.inner, params)
        return grads, state._replace(inner=inner_state)

    def mean(state: Masked, params: Tree) -> Tree:
        return keep(state.masks, inner.mean(state.inner, params))

    return dataclasses.replace(inner, init=init, update=update, observe=look, mean=mean)


def keep(masks: Tree, tree: Tree) -> Tree:
    """Returns a tree like the parameters with 0 where the masks prune."""
    return _where(masks, lambda m, x: jnp.where(m, x, jnp.zeros_like(x)), tree)


def observe(state: Masked, grads: Tree, params: Tree) -> tuple[Tree, Masked]:
    """Call it on a step's gradients before anything else reads them, clipping above all.

    Returns: (the gradients without those of pruned weights, the state with (w dL/dw)^2 added).
    """
    grads = keep(state.masks, grads)
    if state.scores is not None:
        new = dict(
            named_leaves(jax.tree.map(lambda g, w: (g * w).astype(jnp.float32), grads, params))
        )
        sums = {n: s + new[n] ** 2 for n, s in named_leaves(state.scores)}
        state = state._replace(scores=nest(sums))
    return grads, state


def clear(state: Masked, params: Tree) -> tuple[Masked, Tree]:
    """Call it after new masks were put in: what they prune is 0, weights and moments.

    A moment is a leaf of the inner state that is named and shaped like a parameter.
    Returns: (the state, whose sums start anew; the parameters).
    """
    by_name = dict(named_leaves(state.masks))

    def moment(path: tuple, x: jax.Array) -> jax.Array:
        mask = by_name.get(owner(path, by_name) or "")
        return x if mask is None or mask.shape != x.shape else jnp.where(mask, x, jnp.zeros_like(x))

    inner = jax.tree_util.tree_map_with_path(moment, state.inner)
    scores = None if state.scores is None else jax.tree.map(jnp.zeros_like, state.scores)
    return Masked(state.masks, scores, inner), keep(state.masks, params)


def _where(masks: Tree, function: Callable, tree: Tree, *others: Tree) -> Tree:
    """Maps function(mask, leaf, *leaves) over the leaves that have a mask; others stay."""
    by_name = dict(named_leaves(masks))

    def leaf(path: tuple, x: jax.Array, *more: jax.Array) -> jax.Array:
        mask = by_name.get(name(path))
        return x if mask is None else function(mask, x, *more)

    return jax.tree_util.tree_map_with_path(leaf, tree, *others)
