"""Which weights to prune: importance ranked over all layers at once, in the shape of a pattern.

The patterns of Tile-Wise sparsity (arXiv 2008.13006), for weights (K, N) of y = x w:
  tw1d  vectors of `chunk` rows x `tile` neighbouring columns
  tw2d  whole columns first, then such vectors of the columns that stay, regrouped left to right in
        tiles of exactly `tile` (the last may be short); both dimensions at rate 1 - sqrt(1 - s)
  tew   tw2d at s + delta; then the best single elements come back, up to s
and its rivals: ew single elements, vw the same number (or one more) of every 1 x 16, bw 32 x 32.
Units of all layers are pruned from the least important up to the wanted number of elements. The
importance of a unit of n elements is the L2 norm of their scores over sqrt(n) (`rms`), or over n
(`paper`, the rule of Tile-Wise's authors). The norm of n scores that are equally important grows as
sqrt(n), so only the first compares units of different n: by the second a column of 512 rows ranks
behind one of 128, and tw2d may empty a matrix of many rows. The rules differ wherever units do:
whole columns of tw2d and tew, and units at ragged edges of tw1d, tw2d, tew and bw; ew and vw rank
single elements.

A leaf is one matrix or a stack of them, each with units of its own: leading dims are the stack,
the last two (K, N). With the words of its dims (`axes`, as ModelParts has them) layers and experts
are the stack, the model's width is one side and all other dims together the other: query (L,D,H,K)
counts as L matrices (D, H K), out (L,H,K,D) as L matrices (H K, D).

Ranks on the host, in NumPy: the scores of all ranked weights must fit into its memory.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from megajax.core.errors import UserError, did_you_mean
from megajax.core.layout import Words
from megajax.core.tree import Tree, is_words, name, named_leaves
from megajax.search.assign import Assignment, assign
from megajax.training.masking import Masked, Pattern, PruneConfig, UnitScore, clear, pick
from megajax.training.optim import STACK_WORDS

VECTOR = 16  # elements of a row that vw prunes alike (Tile-Wise's rival, its section 6)
BLOCK = 32  # side of a block of bw (ditto)
GOLDEN = (5**0.5 - 1) / 2  # its multiples spread evenly: equal scores are pruned everywhere


@dataclass(frozen=True)
class _Matrix:
    """One weight to rank.

    scores: (K, N). alive: which elements are not pruned yet. columns: those that are cut into
    tiles. hint: the mask of element-wise pruning; None: it is not used.
    """

    scores: np.ndarray
    alive: np.ndarray
    columns: np.ndarray
    hint: np.ndarray | None = None


@dataclass(frozen=True)
class _Tuning:
    """How units rank. apriori: fraction of all units that is decided by the hint at either end.
    remain: fraction of the units of each matrix that stays."""

    score: UnitScore
    apriori: float = 0.0
    remain: float = 0.0


ELEMENTS = _Tuning("rms")  # of units of one element, for which both rules are the same


@dataclass(frozen=True)
class _Units:
    """The units of all matrices: pieces that are pruned together. All members are arrays (units,).

    score: importance. alive, size: number of its elements that are not pruned yet, and of all.
    first: a key that sorts before the score: units with -1 are pruned first, those with 1 last.
    tie: decides between equals.
    """

    score: np.ndarray
    alive: np.ndarray
    size: np.ndarray
    first: np.ndarray
    tie: np.ndarray

    def cut(self, weight: np.ndarray, goal: float) -> np.ndarray:
        """Returns bool (units,): the least important ones, of `wanted` total weight as nearly as
        whole units allow; never all."""
        order = np.lexsort((self.tie, self.score, self.first))
        total = np.cumsum(weight[order])
        last = int(np.searchsorted(total, goal))
        below = total[last - 1] if last else 0.0
        if last < order.size and abs(total[last] - goal) < abs(goal - below):
            last += 1
        chosen = np.zeros(order.size, bool)
        chosen[order[: min(last, order.size - 1)]] = True
        return chosen


def prune(
    params: Tree,
    scores: Tree | None,
    sparsity: float,
    *,
    pattern: Pattern = "tw2d",
    tile: int = 128,
    chunk: int = 1,
    axes: Tree | None = None,
    former: Tree | None = None,
    apriori: float = 0.0,
    remain: float = 0.0,
    delta: float = 0.05,
    unit_score: UnitScore = "rms",
) -> Tree:
    """Returns masks, True where a weight stays: NumPy bool arrays in the tree and shapes of params.

    The achieved sparsity, a fraction of all elements of the tree, is within half a unit of the
    goal. With `rms`, equal scores are pruned evenly over all matrices, whatever their shapes.

    Args: params: trees of arrays (..., K, N), or of any rank with `axes`, the tree of their words.
      scores: as params, finite and not negative, e.g. (w dL/dw)^2 summed over steps; None: |w|.
      sparsity: goal, a fraction in [0, 1). tile: columns of a tile of tw1d, tw2d, tew.
      chunk: rows of a unit of these; 1: the paper's. former: masks of an earlier stage: what these
      prune stays pruned. In tw2d the tiles are then regrouped, so that kept vectors may have
      elements that are pruned: the packed tiles' density is a little above the masks'.
      apriori: this fraction of the units, those of which the element-wise result at the same
      sparsity keeps most, stay, and as many of which it keeps least go (the paper's apriori
      tuning). remain: this fraction of the units of each matrix, its best ones, stay before any
      other's: global ranking may empty a matrix. delta: of tew. unit_score: `rms` or `paper`, see
      the top of this file.
    Raises: UserError for values out of range, trees that do not match, scores that are not finite.
    Source: Tile-Wise sparsity, arXiv 2008.13006, sections 4 and 5.
    """
    _check(sparsity, pattern, tile, chunk, {"apriori": apriori, "remain": remain, "delta": delta})
    if unit_score not in get_args(UnitScore):
        raise UserError(
            f"unit_score={unit_score} must be one of {', '.join(get_args(UnitScore))} "
            "(--prune.unit_score)"
        )
    shapes, matrices = _matrices(params, scores, axes, former)
    tuning = _Tuning(unit_score, 0.0 if pattern == "ew" else apriori, remain)
    if tuning.apriori:
        hints = _cut_blocks(matrices, sparsity, (1, 1), ELEMENTS)
        matrices = [replace(m, hint=h) for m, h in zip(matrices, hints, strict=True)]
    if not matrices or sparsity == 0:
        masks = [m.alive for m in matrices]
    elif pattern == "tw2d":
        masks = _prune_2d(matrices, sparsity, (chunk, tile), tuning)
    elif pattern == "tew":
        beyond = min(sparsity + delta, (1 + sparsity) / 2)
        masks = _prune_2d(matrices, beyond, (chunk, tile), tuning)
        masks = _restore(matrices, masks, sparsity)
    elif pattern == "vw":
        masks = _prune_vectors(matrices, sparsity)
    else:
        block = {"ew": (1, 1), "bw": (BLOCK, BLOCK), "tw1d": (chunk, tile)}[pattern]
        masks = _cut_blocks(matrices, sparsity, block, tuning)
    return _masks(params, shapes, masks)


def sparsity_of(masks: Tree) -> float:
    """Returns the fraction of pruned elements of a tree of masks."""
    leaves = jax.tree.leaves(masks)
    return 1 - sum(int(np.sum(m)) for m in leaves) / sum(m.size for m in leaves)


def densities(masks: Tree, axes: Tree | None = None) -> dict[str, float]:
    """Returns {matrix: fraction of its elements that stay}; of a stack: name.0, name.1, ...

    axes: as of `prune`.
    """
    fractions = {}
    words = dict(named_leaves(axes, is_words)) if axes is not None else {}
    for leaf, mask in named_leaves(masks):
        mask = np.asarray(mask)
        count = matrix_shape(mask.shape, words.get(leaf))[0]
        stacked = count > 1 or mask.ndim > 2
        for i, fraction in enumerate(mask.reshape(count, -1).mean(1)):
            fractions[f"{leaf}.{i}" if stacked else leaf] = float(fraction)
    return fractions


def matrix_shape(shape: tuple[int, ...], words: Words | None = None) -> tuple[int, int, int]:
    """Returns (matrices, K, N) of a leaf; a reshape to it makes no element move.

    Raises: UserError for a leaf that is no matrix.
    """
    stack = len(shape) - 2 if words is None else sum(w in STACK_WORDS for w in words)
    inner = shape[stack:]
    if stack < 0 or len(inner) < 2 or (words is not None and words[-1] == words[stack] == "embed"):
        raise UserError(f"a leaf of shape {shape} ({words}) is no matrix and cannot be pruned")
    rows = 1 if words is None or words[stack] == "embed" else len(inner) - 1
    sides = (int(np.prod(part)) for part in (shape[:stack], inner[:rows], inner[rows:]))
    return tuple(sides)  # type: ignore[return-value]


# ---- patterns: each returns the masks (K, N) of the matrices


def _prune_2d(
    matrices: list[_Matrix], sparsity: float, block: tuple[int, int], tuning: _Tuning
) -> list[np.ndarray]:
    units = _units(matrices, (None, 1), tuning)
    gone = units.cut(units.size, (1 - (1 - sparsity) ** 0.5) * units.size.sum())
    ends = np.cumsum([m.columns.size for m in matrices])[:-1]
    left = []
    for matrix, pruned in zip(matrices, np.split(gone, ends), strict=True):
        left.append(replace(matrix, alive=matrix.alive & ~pruned, columns=np.flatnonzero(~pruned)))
    return _cut_blocks(left, sparsity, block, tuning)


def _cut_blocks(
    matrices: list[_Matrix], sparsity: float, block: tuple[int, int], tuning: _Tuning
) -> list[np.ndarray]:
    """Prunes blocks of rows x columns until `sparsity` of all elements are gone."""
    gone = _gone(_units(matrices, block, tuning), matrices, sparsity)
    masks, start = [], 0
    for matrix in matrices:
        rows, columns = matrix.alive.shape[0], matrix.columns.size
        grid = -(-rows // block[0]), -(-columns // block[1])
        pruned = gone[start : start + grid[0] * grid[1]].reshape(grid)
        pruned = pruned.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]
        mask = matrix.alive.copy()
        mask[:, matrix.columns] &= ~pruned
        masks.append(mask)
        start += grid[0] * grid[1]
    return masks


def _prune_vectors(matrices: list[_Matrix], sparsity: float) -> list[np.ndarray]:
    """Prunes element j of each vector, in the order of importance, before any element j + 1."""
    places = []
    for matrix in matrices:
        K, N = matrix.scores.shape
        padded = np.full((K, -(-N // VECTOR) * VECTOR), np.inf)
        padded[:, :N] = np.where(matrix.alive, matrix.scores, -1.0)
        rank = padded.reshape(K, -1, VECTOR).argsort(-1, kind="stable").argsort(-1)
        length = np.minimum(N - np.arange(0, N, VECTOR), VECTOR)  # the last one of a row is short
        places.append((rank / length[:, None]).reshape(K, -1)[:, :N].ravel())
    units = replace(_units(matrices, (1, 1), ELEMENTS), first=np.concatenate(places))
    return _split(matrices, _gone(units, matrices, sparsity))


def _restore(matrices: list[_Matrix], masks: list[np.ndarray], sparsity: float) -> list[np.ndarray]:
    """Restores the best pruned elements until the sparsity is `sparsity`, but none that an earlier
    stage pruned."""
    away = [replace(m, alive=m.alive & ~mask) for m, mask in zip(matrices, masks, strict=True)]
    room = (1 - sparsity) * sum(m.size for m in masks) - sum(m.sum() for m in masks)
    if room < 0.5:
        return masks
    units = _units(away, (1, 1), ELEMENTS)
    back = _split(away, units.cut(units.alive, units.alive.sum() - room))
    return [mask | b for mask, b in zip(masks, back, strict=True)]


def _gone(units: _Units, matrices: list[_Matrix], sparsity: float) -> np.ndarray:
    """Returns the units whose loss takes all matrices from what is pruned already to sparsity."""
    total = sum(m.alive.size for m in matrices)
    return units.cut(units.alive, sparsity * total - (total - units.alive.sum()))


def _split(matrices: list[_Matrix], gone: np.ndarray) -> list[np.ndarray]:
    """Returns the masks of pruned elements listed one by one."""
    ends = np.cumsum([m.alive.size for m in matrices])[:-1]
    pieces = np.split(gone, ends)
    return [m.alive & ~g.reshape(m.alive.shape) for m, g in zip(matrices, pieces, strict=True)]


# ---- units


def _units(matrices: list[_Matrix], block: tuple[int | None, int], tuning: _Tuning) -> _Units:
    """Cuts the columns of each matrix into blocks of (rows or None: all) x columns."""
    parts = []
    for matrix in matrices:
        shape = block[0] or matrix.scores.shape[0], block[1]
        alive = matrix.alive[:, matrix.columns]
        scores = np.where(alive, matrix.scores[:, matrix.columns], 0.0).astype(np.float64)
        size = _sums(np.ones(alive.shape), shape)
        norm = np.sqrt(_sums(scores**2, shape))
        score = norm / size if tuning.score == "paper" else _rounded(norm / np.sqrt(size))
        density = np.zeros_like(size)
        if matrix.hint is not None:
            density = _sums(matrix.hint[:, matrix.columns], shape) / size
        tie = (np.arange(size.size) + 0.5) * GOLDEN % 1
        safe = np.zeros(size.size, bool)
        safe[np.lexsort((tie, score))[size.size - math.ceil(tuning.remain * size.size) :]] = True
        parts.append((score, _sums(alive, shape), size, density, tie, safe))
    score, alive, size, density, tie, safe = (np.concatenate(x) for x in zip(*parts, strict=True))
    first, ends = np.zeros(score.size), int(tuning.apriori * score.size)
    if ends:
        order = np.lexsort((tie, score, density))
        first[order[:ends]], first[order[-ends:]] = -1, 1
    first[safe] = 1
    first[alive == 0] = -2  # gone already
    return _Units(score, alive, size, first, tie)


def _rounded(x: np.ndarray) -> np.ndarray:
    """Drops the last digits, which depend on how many numbers were summed, so that units of equal
    importance have equal scores."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(mantissa.round(12), exponent)


def _sums(x: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Returns the sums over blocks of x (rows, columns), flat; blocks at the end may be short."""
    x = x.astype(np.float64)
    for axis, step in enumerate(block):
        if step > 1 and x.size:
            x = np.add.reduceat(x, np.arange(0, x.shape[axis], step), axis=axis)
    return x.ravel()


# ---- trees and matrices


def _matrices(
    params: Tree, scores: Tree | None, axes: Tree | None, former: Tree | None
) -> tuple[list[tuple[int, int, int]], list[_Matrix]]:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    words = [None] * len(leaves)
    if axes is not None:
        words = jax.tree.leaves(axes, is_leaf=is_words)
    columns = [words, _like(treedef, scores, "scores"), _like(treedef, former, "former masks")]
    shapes, matrices = [], []
    for (path, leaf), word, score, mask in zip(leaves, *columns, strict=True):
        leaf = np.asarray(leaf)
        shape = matrix_shape(leaf.shape, word)
        score = np.abs(leaf) if score is None else np.asarray(score)
        mask = np.ones(leaf.shape, bool) if mask is None else np.asarray(mask, bool)
        for what, x in (("score", score), ("former mask", mask)):
            if x.shape != leaf.shape:
                raise UserError(f"{name(path)}: {what} of shape {x.shape} for {leaf.shape}")
        if not (np.isfinite(score).all() and (score >= 0).all()):
            raise UserError(f"{name(path)}: scores must be finite and at least 0 (--prune.score)")
        shapes.append(shape)
        for s, m in zip(score.reshape(shape), mask.reshape(shape), strict=True):
            matrices.append(_Matrix(s, m, np.arange(s.shape[1])))
    return shapes, matrices


def _like(treedef: Any, tree: Tree | None, what: str) -> list:
    if tree is None:
        return [None] * treedef.num_leaves
    leaves, structure = jax.tree.flatten(tree)
    if structure != treedef:
        raise UserError(f"{what} are a tree {structure}, the parameters {treedef}")
    return leaves


def _masks(params: Tree, shapes: list[tuple[int, int, int]], matrices: list[np.ndarray]) -> Tree:
    leaves, treedef = jax.tree.flatten(params)
    masks, start = [], 0
    for leaf, (count, *_) in zip(leaves, shapes, strict=True):
        masks.append(np.stack(matrices[start : start + count]).reshape(leaf.shape))
        start += count
    return jax.tree.unflatten(treedef, masks)


def _check(
    sparsity: float, pattern: str, tile: int, chunk: int, fractions: dict[str, float]
) -> None:
    if pattern not in get_args(Pattern):
        hint = did_you_mean(pattern, get_args(Pattern))
        raise UserError(
            f"pattern={pattern} must be one of {', '.join(get_args(Pattern))}.{hint} "
            "(--prune.pattern)"
        )
    for what, value in ({"sparsity": sparsity} | fractions).items():
        high = 0.5 if what == "apriori" else 1
        if not 0 <= value < high:
            raise UserError(f"{what}={value} must be in [0, {high}) (--prune.{what})")
    for what, value in (("tile", tile), ("chunk", chunk)):
        if value < 1:
            raise UserError(f"{what}={value} must be at least 1; nearest: 1 (--prune.{what})")


# ---- one budget for all matrices
#
# Global ranking compares units of all layers by one score. Here each matrix is pruned on its own at
# every sparsity of a list, and `search.assign` picks one for each: the most importance that remains
# for the time (or the weights) that all matrices may take together. Unlike a ranking, this uses the
# cost of a matrix of each shape on the device.


SPARSITIES = (0.0, 0.25, 0.5, 0.625, 0.75, 0.875, 0.95)  # (chosen: closer where the gain is)


def prune_budgeted(
    params: Tree,
    scores: Tree | None,
    budget: float,
    *,
    axes: Tree | None = None,
    sparsities: Sequence[float] = SPARSITIES,
    cost: Callable[[int, int, float], float] | None = None,
    method: Literal["exact", "greedy"] = "exact",
    **options: Any,
) -> tuple[Tree, Assignment]:
    """Returns (masks, the choice: an index into `sparsities` for each matrix, in the tree's order;
    its value is the importance kept, its cost that of all matrices).

    Args: params, scores, axes: as `prune` takes them. budget: fraction of what the dense matrices
      cost, in (0, 1]. cost(K, N, density) of a matrix, e.g. cost.sparse.SparseCost's time; None:
      the weights that stay. options: of `prune`: pattern, tile, chunk, apriori, delta.
    Raises: UserError for a budget that the sparsest choice does not keep.
    """
    if not 0 < budget <= 1:
        raise UserError(f"budget={budget} must be in (0, 1], a fraction of the dense cost")
    cost = cost or (lambda K, N, density: K * N * density)
    leaves, treedef = jax.tree.flatten(params)
    words = [None] * len(leaves) if axes is None else jax.tree.leaves(axes, is_leaf=is_words)
    ranks = [None] * len(leaves) if scores is None else treedef.flatten_up_to(scores)
    values, costs, masks, dense = [], [], [], 0.0
    for leaf, score, word in zip(leaves, ranks, words, strict=True):
        leaf = np.asarray(leaf)
        shape = matrix_shape(leaf.shape, word)
        score = np.abs(leaf) if score is None else np.asarray(score)
        for w, s in zip(leaf.reshape(shape), score.reshape(shape), strict=True):
            tried = [prune(w, s, sparsity, **options) for sparsity in sparsities]
            masks.append(tried)
            values.append([float(s[m].sum(dtype=np.float64)) for m in tried])
            costs.append([cost(*shape[1:], float(m.mean())) for m in tried])
            dense += cost(*shape[1:], 1.0)
    assignment = assign(
        values, {"cost": costs}, {"cost": budget * dense}, maximise=True, method=method
    )
    picked = iter(tried[c] for tried, c in zip(masks, assignment.choice, strict=True))
    stacks = []
    for leaf, word in zip(leaves, words, strict=True):
        count = matrix_shape(leaf.shape, word)[0]
        stacks.append(np.stack([next(picked) for _ in range(count)]).reshape(leaf.shape))
    return jax.tree.unflatten(treedef, stacks), assignment


# ---- stages of a training
#
# Pruning in stages, between two steps of any training whose optimizer is masked.
#
# A stage: train, while the optimizer's state sums (w dL/dw)^2; rank on the host; put the masks in;
# go on (Tile-Wise sparsity, arXiv 2008.13006, section 5). `Pruner` knows no model: parameters are a
# tree, `axes` the words of its leaves, the optimizer one of training.masking.mask_optimizer. It is
# a hook of the training loop (training/loop.py) of decoders and encoders, and prunes in the study
# of patterns (experiments/reports/tilewise.py).


@dataclasses.dataclass(frozen=True)
class Pruner:
    """A hook of the training loop: call it with (state, finished steps) where `due` says so.

    axes: words of all parameters, as ModelParts.axes. mesh: of the state; None: no mesh.
    natural, arranged: as TrainStep has them. report(finished, {"sparsity": ..., "kept.MATRIX":
    the fraction of each matrix that stays}): called at each stage. init_exchange: as TrainStep has
    it; it makes a state's copies of the weights anew, so that pruned weights are 0 in them too.
    None: states have no copies.
    """

    cfg: PruneConfig
    axes: Tree
    mesh: Mesh | None = None
    natural: Callable[[Any], Any] = lambda tree: tree
    arranged: Callable[[Any], Any] = lambda tree: tree
    report: Callable[[int, Mapping[str, float]], None] = lambda finished, row: None
    init_exchange: Callable[[Tree], tuple[Tree, Tree]] | None = None

    def due(self, finished: int, last: bool = False) -> bool:
        """Tells whether a stage begins or ends after so many finished steps. last: whether these
        are all steps of the run, so that no stage can follow."""
        return not last and self.cfg.due(finished) is not None

    def start(self, state: Any, finished: int) -> Any:
        """Does what is due before a run's first step: a checkpoint holds the state before it."""
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
        masks, ranked = opt.masks, None
        if goal > 0:
            cfg = self.cfg
            names = tuple(n for n, _ in named_leaves(opt.masks))
            axes = pick(self.axes, names)
            tree = {"w": pick(state.params, names), "former": opt.masks, "scores": opt.scores}
            host = jax.tree.map(_fetch, self.natural(tree))
            ranked = prune(
                host["w"],
                host["scores"],
                goal,
                pattern=cfg.pattern,
                tile=cfg.tile,
                chunk=cfg.chunk,
                axes=axes,
                former=host["former"],
                apriori=cfg.apriori,
                remain=cfg.remain,
                delta=cfg.delta,
                unit_score=cfg.unit_score,
            )
            masks = self.arranged(jax.tree.map(_place, ranked, opt.masks))
        with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            opt, params = _clear(opt._replace(masks=masks), state.params)
        state = dataclasses.replace(state, params=params, opt=opt)
        if self.init_exchange is not None and getattr(state, "copies", None) is not None:
            state = dataclasses.replace(state, copies=self.init_exchange(params)[0])
        return state, ranked

    def _tell(self, finished: int, masks: Tree) -> None:
        names = tuple(n for n, _ in named_leaves(masks))
        fractions = densities(masks, pick(self.axes, names))
        self.report(
            finished,
            {"sparsity": sparsity_of(masks)} | {f"kept.{n}": x for n, x in fractions.items()},
        )
        if jax.process_index() == 0 and (text := starved(fractions, self.cfg)):
            logging.warning("after step %d: %s", finished, text)


def starved(fractions: Mapping[str, float], cfg: PruneConfig) -> str:
    """Returns a warning about the matrices of which nothing, or less than prune.remain, stays.

    fractions: {matrix: share of its weights that stays, 0..1}. Returns: '' if there is none.
    """
    low = {n: x for n, x in fractions.items() if x == 0 or x < cfg.remain}
    if not low:
        return ""
    shown = [f"{n} keeps {x:.1%}" for n, x in sorted(low.items(), key=lambda item: item[1])[:8]]
    more = f" and {len(low) - len(shown)} more" if len(low) > len(shown) else ""
    advice = f"--prune.remain={min(cfg.remain + 0.05, 0.95):g} keeps more of each matrix's best"
    if cfg.unit_score == "paper":
        advice += "; --prune.unit_score=rms does not rank matrices of many rows behind others"
    least = f"less than prune.remain={cfg.remain:g}" if cfg.remain else "nothing"
    return (
        f"pruning leaves {least} of {len(low)} of {len(fractions)} matrices: "
        f"{', '.join(shown)}{more}. {advice}."
    )


_clear = jax.jit(clear, donate_argnums=(0, 1))


def _fetch(x: jax.Array) -> np.ndarray:
    """Returns the complete array on the host of every process."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _place(mask: np.ndarray, like: jax.Array) -> jax.Array:
    return jax.make_array_from_callback(mask.shape, like.sharding, lambda index: mask[index])
