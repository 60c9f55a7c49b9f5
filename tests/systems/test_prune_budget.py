"""A sparsity for each matrix under one budget, against trying every combination."""

import itertools

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS
from megajax.cost.sparse import Gemm, SparseCost
from megajax.systems.pruning import prune, prune_budgeted, sparsity_of

GRID = (0.0, 0.5, 0.75, 0.9)
SHAPES = {"a": (2, 32, 48), "b": (48, 32)}


def draw(seed):
    """Matrices whose importance differs a hundredfold."""
    random = np.random.default_rng(seed)
    sizes = {"a": np.array([1.0, 0.01]).reshape(2, 1, 1), "b": 0.1}
    return {n: random.gamma(0.5, size=s) * sizes[n] for n, s in SHAPES.items()}


def test_the_best_of_all_combinations(seed):
    scores = draw(seed)
    options = {"pattern": "tw1d", "tile": 8}
    masks, assignment = prune_budgeted(scores, scores, 0.4, sparsities=GRID, **options)
    matrices = [scores["a"][0], scores["a"][1], scores["b"]]
    tried = [[prune(m, m, s, **options) for s in GRID] for m in matrices]
    room, best = 0.4 * sum(m.size for m in matrices), -1.0
    for choice in itertools.product(range(4), repeat=3):
        picked = [t[c] for t, c in zip(tried, choice, strict=True)]
        if sum(k.sum() for k in picked) <= room:
            best = max(best, sum(m[k].sum() for m, k in zip(matrices, picked, strict=True)))
    assert assignment.value == pytest.approx(best)
    assert masks["a"].shape == (2, 32, 48) and sparsity_of(masks) >= 0.6
    assert sum(scores[n][masks[n]].sum() for n in scores) == pytest.approx(best)
    assert masks["a"][0].mean() > masks["a"][1].mean()  # the important one keeps more


def test_the_cost_of_a_matrix_may_be_its_time(seed):
    """A product that is bound by its activations is not worth pruning."""
    scores = {
        "large": np.random.default_rng(seed).gamma(0.5, size=(512, 512)),
        "thin": np.random.default_rng(seed).gamma(0.5, size=(512, 64)),
    }
    machine = SparseCost(CARDS["H200"], tile=64, chunk=1, share=1.0)

    def seconds(K, N, density):
        return machine.sparse_time(Gemm("", 65536, 64 * K, 64 * N if N == 512 else N), density)

    masks, assignment = prune_budgeted(scores, scores, 0.5, cost=seconds, tile=64)
    assert sparsity_of(masks["large"]) > 0.4 and sparsity_of(masks["thin"]) == 0.0
    assert (
        assignment.costs["cost"]
        <= 0.5 * (seconds(512, 512, 1.0) + seconds(512, 64, 1.0)) * 1.000001
    )


def test_impossible_budgets_are_refused():
    scores = draw(0)
    with pytest.raises(UserError, match="the cheapest options take"):
        prune_budgeted(scores, None, 0.05, sparsities=GRID, tile=8)
    with pytest.raises(UserError, match=r"budget=1.5 must be in \(0, 1\]"):
        prune_budgeted(scores, None, 1.5)
