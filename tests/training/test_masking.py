"""Masks in the optimizer's state against NumPy, and what stays exactly 0."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from megajax.core.errors import UserError
from megajax.core.tree import named_leaves, nest
from megajax.models import decoder
from megajax.training.masking import (
    PruneConfig,
    chosen,
    clear,
    keep,
    mask_optimizer,
    observe,
    pick,
)
from megajax.training.optim import OptimConfig, make_optimizer
from tests.tiny import MODEL, MOE

SHAPES = {
    "blocks.attention.query": (2, 8, 2, 4),
    "blocks.attention.out": (2, 2, 4, 8),
    "blocks.mlp.up": (2, 8, 12),
    "norm.scale": (8,),
}
WORDS = {
    "blocks.attention.query": ("layers", "embed", "heads", None),
    "blocks.attention.out": ("layers", "heads", None, "embed"),
    "blocks.mlp.up": ("layers", "embed", "mlp"),
    "norm.scale": (None,),
}
AXES = nest(WORDS)
NAMES = chosen(AXES)


def draw(seed, kind=np.float32):
    random = np.random.default_rng(seed)
    return nest({n: jnp.asarray(random.normal(size=s), kind) for n, s in SHAPES.items()})


def random_masks(seed, part):
    random = np.random.default_rng(seed)
    leaves = named_leaves(pick(part, NAMES))
    return nest({n: jnp.asarray(random.random(x.shape) < 0.4) for n, x in leaves})


@pytest.mark.parametrize("name", ["adamw", "lamb", "muon"])
def test_pruned_weights_are_0_after_100_steps(name, seed):
    """With momentum and weight decay, masks put in when the moments were full."""
    cfg = OptimConfig(name=name, lr=0.1, weight_decay=0.3, warmup=0)
    optimizer = mask_optimizer(make_optimizer(cfg, 200, AXES), NAMES)
    params = draw(seed)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, grads):
        grads, state = observe(state, grads, params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(3):
        params, state = step(params, state, draw(seed + i))
    masks = random_masks(seed, params)
    state, params = clear(state._replace(masks=masks), params)
    grads = [draw(seed + i) for i in range(5)]
    for i in range(100):
        params, state = step(params, state, grads[i % 5])
    assert step._cache_size() == 1  # new masks, the same program
    for n, m in named_leaves(masks):
        w = np.asarray(dict(named_leaves(params))[n])
        assert (w[~np.asarray(m)] == 0).all() and (w[np.asarray(m)] != 0).all()
        moments = [x for leaf, x in named_leaves(state.inner) if leaf.endswith(n)]
        assert len(moments) >= 1
        assert all((np.asarray(x)[~np.asarray(m)] == 0).all() for x in moments)


def test_what_is_kept_learns_as_without_what_is_pruned(seed):
    """Oracle: AdamW in float64 on the kept elements alone."""
    cfg = OptimConfig(lr=0.1, weight_decay=0.3, warmup=0, schedule="constant")
    optimizer = mask_optimizer(make_optimizer(cfg, 10, AXES), NAMES)
    params = draw(seed)
    masks = random_masks(seed, params)
    state, params = clear(optimizer.init(params)._replace(masks=masks), params)
    name = "blocks.mlp.up"
    mask = np.asarray(pick(masks, [name])["blocks"]["mlp"]["up"])
    w = np.asarray(params["blocks"]["mlp"]["up"], np.float64)[mask]
    m = v = np.zeros_like(w)
    for i in range(1, 6):
        grads = draw(seed + i)
        g = np.asarray(grads["blocks"]["mlp"]["up"], np.float64)[mask]
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        direction = m / (1 - 0.9**i) / (np.sqrt(v / (1 - 0.95**i)) + 1e-8)
        w = w - 0.1 * (direction + 0.3 * w)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(np.asarray(params["blocks"]["mlp"]["up"])[mask], w, rtol=2e-4)


def test_scores_are_sums_of_squared_products(seed):
    optimizer = mask_optimizer(make_optimizer(OptimConfig(), 10, AXES), NAMES)
    params = draw(seed)
    state = optimizer.init(params)
    expected = np.zeros(SHAPES["blocks.attention.out"])
    for i in range(3):
        grads = draw(seed + i)
        _, state = observe(state, grads, params)
        g, w = (np.asarray(t["blocks"]["attention"]["out"], np.float64) for t in (grads, params))
        expected += (g * w) ** 2
    score = state.scores["blocks"]["attention"]["out"]
    np.testing.assert_allclose(np.asarray(score), expected, rtol=1e-5)
    assert "norm" not in state.scores
    cleared, _ = clear(state, params)
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(cleared.scores))
    assert mask_optimizer(optax.sgd(1.0), NAMES, scored=False).init(params).scores is None


def test_not_a_number_under_a_mask_does_not_spread(seed):
    """A pruned weight whose gradient overflows."""
    params = draw(seed)
    masks = random_masks(seed, params)
    bad = jax.tree.map(lambda m: jnp.where(m, 1.0, jnp.nan), masks)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(keep(masks, bad)))


def test_chosen_are_the_matrices_of_the_blocks():
    axes = decoder.parts(MODEL).axes
    mlp = ("blocks.mlp.down", "blocks.mlp.gate", "blocks.mlp.up")
    attention = tuple(f"blocks.attention.{n}" for n in ("key", "out", "query", "value"))
    assert chosen(axes, "mlp") == mlp and chosen(axes, "attention") == attention
    assert chosen(axes) == attention + mlp
    experts = chosen(decoder.parts(MOE).axes, "mlp")
    assert experts == ("blocks.moe.down", "blocks.moe.gate", "blocks.moe.up")


def test_stages_are_due_in_order():
    cfg = PruneConfig(sparsity=0.75, stages=2, steps=5, start=10)
    due = {n: goal for n in range(40) if (goal := cfg.due(n)) is not None}
    assert due == {10: 0.0, 15: 0.5, 20: 0.75}
    assert PruneConfig().due(0) is None
    cfg.check(21)
    with pytest.raises(UserError, match="prune.start=10 .* = 20 must be below train.steps=20; nea"):
        cfg.check(20)


def test_bad_values_are_refused():
    for values, message in (
        ({"sparsity": 1.0}, r"prune.sparsity=1.0 must be in \[0, 1\); the default is 0.0"),
        ({"sparsity": -0.5}, "nearest: 0 .--prune.sparsity"),
        ({"stages": 0}, "prune.stages=0 must be at least 1"),
        ({"chunk": 0}, "prune.chunk=0"),
    ):
        with pytest.raises(UserError, match=message):
            PruneConfig(**values)
