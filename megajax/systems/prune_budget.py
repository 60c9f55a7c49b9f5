"""A sparsity for each matrix, chosen under one budget for all.

Global ranking compares units of all layers by one score. Here each matrix is pruned on its own at
every sparsity of a list, and `search.assign` picks one for each: the most importance kept for the
time (or the weights) that all matrices may take together. That knows what a ranking does not: what
a matrix of this shape costs on this device.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from megajax.core.errors import UserError
from megajax.core.tree import Tree, is_words
from megajax.search.assign import Assignment, assign
from megajax.systems.pruning import matrix_shape, prune

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
    found = assign(values, {"cost": costs}, {"cost": budget * dense}, maximise=True, method=method)
    picked = iter(tried[c] for tried, c in zip(masks, found.choice, strict=True))
    whole = []
    for leaf, word in zip(leaves, words, strict=True):
        count = matrix_shape(leaf.shape, word)[0]
        whole.append(np.stack([next(picked) for _ in range(count)]).reshape(leaf.shape))
    return jax.tree.unflatten(treedef, whole), found
