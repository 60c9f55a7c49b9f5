"""Pruning in stages, between two steps of any training whose optimizer is masked.

A stage: train, while the optimizer's state sums (w dL/dw)^2; rank on the host; put the masks in;
go on (Tile-Wise sparsity, arXiv 2008.13006, section 5). It knows no model: parameters are a tree,
`axes` the words of its leaves, the optimizer one of training.masking.mask_optimizer. The same
`Pruner` is a hook of the training loop (training/loop.py) of decoders and encoders, and prunes in
the study of patterns (experiments/reports/tilewise.py).
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from megajax.core.tree import Tree, named_leaves
from megajax.systems.pruning import densities, prune, sparsity_of
from megajax.training.masking import Masked, PruneConfig, clear, pick


@dataclasses.dataclass(frozen=True)
class Pruner:
    """A hook of the training loop: call it with (state, finished steps) where `due` says so.

    axes: words of all parameters, as ModelParts.axes. mesh: of the state; None: no mesh.
    natural, arranged: as TrainStep has them. report(finished, {"sparsity": ..., "kept.MATRIX":
    the fraction of each matrix that stays}): called at each stage. beside: as TrainStep has it: a
    state's copies of the weights are made again, so that pruned weights are 0 in them too; None: of
    states without copies.
    """

    cfg: PruneConfig
    axes: Tree
    mesh: Mesh | None = None
    natural: Callable[[Any], Any] = lambda tree: tree
    arranged: Callable[[Any], Any] = lambda tree: tree
    report: Callable[[int, Mapping[str, float]], None] = lambda finished, row: None
    beside: Callable[[Tree], tuple[Tree, Tree]] | None = None

    def due(self, finished: int, last: bool = False) -> bool:
        """Tells whether a stage begins or ends after so many finished steps. last: of the run,
        which nothing follows."""
        return not last and self.cfg.due(finished) is not None

    def start(self, state: Any, finished: int) -> Any:
        """What is due before a run's first step: what a checkpoint holds is the state before it."""
        return self(state, finished)

    def __call__(self, state: Any, finished: int) -> Any:
        """Returns the state with the stage's masks, pruned weights and their moments 0, sums anew.

        state: a dataclass with `params` and `opt`, a `Masked`, both of which it uses up; where
        nothing is due it comes back as it is.
        """
        goal = self.cfg.due(finished)
        if goal is None:
            return state
        state, masks = self.prune(state, goal)
        if masks is not None:
            self._tell(finished, masks)
        return state

    def prune(self, state: Any, goal: float) -> tuple[Any, Tree | None]:
        """Returns (the state pruned to a sparsity, its new masks on the host); see `__call__`.

        goal: 0: the state keeps its masks, and its sums start anew; there are no new masks.
        """
        opt: Masked = state.opt
        masks, found = opt.masks, None
        if goal > 0:
            found = self._masks(state.params, opt, goal)
            masks = self.arranged(jax.tree.map(_place, found, opt.masks))
        with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            opt, params = _clear(opt._replace(masks=masks), state.params)
        state = dataclasses.replace(state, params=params, opt=opt)
        if self.beside is not None and getattr(state, "copies", None) is not None:
            state = dataclasses.replace(state, copies=self.beside(params)[0])
        return state, found

    def _masks(self, params: Tree, opt: Masked, goal: float) -> Tree:
        cfg = self.cfg
        names = tuple(n for n, _ in named_leaves(opt.masks))
        axes = pick(self.axes, names)
        tree = {"w": pick(params, names), "former": opt.masks, "scores": opt.scores}
        host = jax.tree.map(_fetch, self.natural(tree))
        return prune(
            host["w"], host["scores"], goal, pattern=cfg.pattern, tile=cfg.tile, chunk=cfg.chunk,
            axes=axes, former=host["former"], apriori=cfg.apriori, remain=cfg.remain,
            delta=cfg.delta, unit_score=cfg.unit_score,
        )  # fmt: skip

    def _tell(self, finished: int, masks: Tree) -> None:
        names = tuple(n for n, _ in named_leaves(masks))
        kept = densities(masks, pick(self.axes, names))
        self.report(
            finished, {"sparsity": sparsity_of(masks)} | {f"kept.{n}": x for n, x in kept.items()}
        )
        if jax.process_index() == 0 and (text := starved(kept, self.cfg)):
            logging.warning("after step %d: %s", finished, text)


def starved(kept: Mapping[str, float], cfg: PruneConfig) -> str:
    """Returns a warning about matrices of which less than prune.remain stays, or nothing; ''."""
    found = {n: x for n, x in kept.items() if x == 0 or x < cfg.remain}
    if not found:
        return ""
    shown = [f"{n} keeps {x:.1%}" for n, x in sorted(found.items(), key=lambda item: item[1])[:8]]
    more = f" and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    advice = f"--prune.remain={min(cfg.remain + 0.05, 0.95):g} keeps more of each matrix's best"
    if cfg.unit_score == "paper":
        advice += "; --prune.unit_score=rms does not rank matrices of many rows behind others"
    least = f"less than prune.remain={cfg.remain:g}" if cfg.remain else "nothing"
    return (
        f"pruning leaves {least} of {len(found)} of {len(kept)} matrices: "
        f"{', '.join(shown)}{more}. {advice}."
    )


_clear = jax.jit(clear, donate_argnums=(0, 1))


def _fetch(x: jax.Array) -> np.ndarray:
    """Returns the whole array on the host of every process."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _place(mask: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(mask.shape, like.sharding, lambda index: mask[index])
