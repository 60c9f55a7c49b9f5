"""Router and experts on one device against a loop over tokens."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.core import config
from megajax.core.errors import UserError
from megajax.layers.moe import MoeConfig, balance
from megajax.models import decoder
from megajax.training.scores import logprobs
from tests.moe_oracle import BIASED, build, differences, gradients, loop, tokens
from tests.tiny import MODEL, run_config

PLAIN = MoeConfig(experts=8, top_k=2)
CASES = {f"top {k}": dataclasses.replace(PLAIN, top_k=k) for k in range(1, 9)} | {
    "deepseek": MoeConfig(
        experts=8, top_k=3, score="sigmoid", scale=2.5, groups=4, top_groups=2, bias_rate=0.1
    ),
    "not normalised": MoeConfig(experts=6, top_k=3, normalise=False),
    "capacity": MoeConfig(experts=8, top_k=2, mode="capacity", capacity_factor=0.7),
    "one slot": MoeConfig(experts=4, top_k=3, mode="capacity", capacity_factor=0.1),
}


def run(params, x, graph):
    return jax.jit(lambda params, x: nnx.merge(graph, params)(x))(params, x)


SELDOM = ["top 3", "top 4", "top 6", "top 7"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SELDOM else n for n in CASES],
)
def test_a_loop_over_tokens(name, seed):
    cfg = CASES[name]
    graph, params = build(cfg)
    x = tokens(seed)
    if cfg.bias_rate:
        params["bias"] = jnp.asarray(np.linspace(-0.4, 0.4, cfg.experts), "float32")
    y, sums = run(params, x, graph)
    want, dropped, load = loop(params, x, cfg)
    assert np.abs(want).max() > 0.5
    np.testing.assert_allclose(y, want, atol=1e-5)
    assert int(sums.dropped) == dropped and (dropped > 0) == (cfg.mode == "capacity")
    np.testing.assert_array_equal(sums.load_E, load)


@pytest.mark.parametrize("name", ["top 2", pytest.param("capacity", marks=pytest.mark.slow)])
def test_biases_of_router_and_experts(name, seed):
    """Against the loop, and the gradients of the biases against finite differences."""
    cfg, x = CASES[name], tokens(seed)
    graph, params = build(cfg, mlp=BIASED)
    y, sums = run(params, x, graph)
    want, dropped, _ = loop(params, x, cfg)
    assert np.abs(np.asarray(x) @ np.asarray(params["gate"])[0]).max() > 7
    np.testing.assert_allclose(y, want, atol=1e-5 * np.abs(want).max())
    assert int(sums.dropped) == dropped
    grads = gradients(params, x, graph)
    zero = jax.tree.map(np.zeros_like, grads)
    for leaf in ("router_bias", "gate_bias", "up_bias", "down_bias"):
        slope = float((grads[0][leaf].astype(np.float64) ** 2).sum())
        direction = (zero[0] | {leaf: grads[0][leaf]}, zero[1])
        slope_of = differences(params, x, cfg, direction, 1e-6 / slope**0.5)
        assert slope_of == pytest.approx(slope, rel=1e-3), leaf


@pytest.mark.parametrize("name", ["top 2", "deepseek", "capacity"])
def test_gradients_are_finite_differences(name, seed):
    """Along each leaf's own gradient: of router, experts and tokens."""
    cfg = CASES[name]
    graph, params = build(cfg)
    x = tokens(seed)
    grads = gradients(params, x, graph)
    zero = jax.tree.map(np.zeros_like, grads)
    for leaf in ("router", "gate", "up", "down"):
        direction = (zero[0] | {leaf: grads[0][leaf]}, zero[1])
        slope = float((grads[0][leaf].astype(np.float64) ** 2).sum())
        slope_of = differences(params, x, cfg, direction, 1e-5 / slope**0.5)
        assert slope_of == pytest.approx(slope, rel=1e-4), leaf
    slope = float((grads[1].astype(np.float64) ** 2).sum())
    slope_of = differences(params, x, cfg, (zero[0], grads[1]), 1e-5 / slope**0.5)
    assert slope_of == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("mode", ["dropless", pytest.param("capacity", marks=pytest.mark.slow)])
def test_a_token_that_is_not_finite_reaches_no_other_token(mode, seed):
    """Answers and gradients of the others are the same to the bit."""
    graph, params = build(dataclasses.replace(PLAIN, mode=mode, capacity_factor=4.0))
    x = np.asarray(tokens(seed))
    dirty = x.copy()
    dirty[0, 2, 3] = np.inf

    @jax.jit
    def both(x, dy):
        y, pull = jax.vjp(lambda x: nnx.merge(graph, params)(x)[0], x)
        return y, *pull(dy)

    clean = both(x, x[::-1])
    others = np.ones(x.shape[:2], bool)
    others[0, 2] = False
    for got, want in zip(both(dirty, x[::-1]), clean, strict=True):
        np.testing.assert_array_equal(got[others], want[others])
        assert np.isnan(got[0, 2]).all()


def test_all_tokens_to_one_expert_and_experts_without_tokens():
    cfg = MoeConfig(experts=8, top_k=1, normalise=False, bias_rate=0.1)
    graph, params = build(cfg)
    params["bias"] = params["bias"].at[5].set(10.0)
    x = tokens(1)
    y, sums = run(params, x, graph)
    np.testing.assert_array_equal(sums.load_E, np.where(np.arange(8) == 5, 32, 0))
    np.testing.assert_allclose(y, loop(params, x, cfg)[0], atol=1e-5)


def test_a_later_token_cannot_push_out_an_earlier_one():
    """What training drops depends on what came before only, as in generation."""
    cfg = CASES["capacity"]
    graph, params = build(cfg)
    x = tokens(2)
    changed = x.copy()
    changed[:, 2:] = tokens(3)[:, 2:]
    first, second = (np.asarray(run(params, a, graph)[0]) for a in (x, changed))
    np.testing.assert_array_equal(first[:, :2], second[:, :2])


def test_auxiliary_losses():
    """Switch equation 4 over top_k choices, and ST-MoE equation 5."""
    cfg = MoeConfig(experts=8, top_k=2, aux_loss=0.5, z_loss=0.25)
    graph, params = build(cfg)
    x = tokens(4)
    _, sums = run(params, x, graph)
    logits = x.reshape(-1, 16).astype(np.float64) @ np.asarray(params["router"], np.float64)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    fraction = loop(params, x, cfg)[2] / (2 * len(p))
    aux, z = 8 * (fraction * p.mean(0)).sum(), (np.log(np.exp(logits).sum(-1)) ** 2).mean()
    assert float(sums.aux) == pytest.approx(aux, rel=1e-5)
    assert float(sums.z) == pytest.approx(z, rel=1e-5)
    assert float(sums.penalty) == pytest.approx(0.5 * aux + 0.25 * z, rel=1e-5)


def test_the_bias_follows_the_load():
    load = jnp.array([[4, 0, 2, 2], [1, 1, 1, 5]])
    new = balance(jnp.zeros((2, 4)), load, 0.25)
    np.testing.assert_array_equal(new, [[-0.25, 0.25, 0, 0], [0.25, 0.25, 0.25, -0.25]])


def test_packed_documents_do_not_share_slots_unless_told():
    """What the first document says would decide which tokens of the second one are dropped."""
    moe = MoeConfig(experts=4, top_k=2, width=8, mode="capacity")
    rows = {"tokens": jnp.zeros((1, 8), jnp.int32), "positions": jnp.arange(8)[None] % 4}
    packed = rows | {"segments": jnp.arange(8)[None] // 4}

    def logits(moe, batch):
        parts = decoder.parts(dataclasses.replace(MODEL, moe=moe))
        return jax.eval_shape(parts.logits, parts.abstract, batch)

    with pytest.raises(UserError, match="moe.share_slots=true .--moe.mode, --moe.share_slots"):
        logits(moe, packed)
    cfg = config.override(run_config(), {"model.moe.experts": 4, "model.moe.mode": "capacity"})
    with pytest.raises(UserError, match="one decides which tokens of another are dropped"):
        cfg.check(cfg.mesh.sizes(8))
    config.override(cfg, {"model.moe.share_slots": True}).check(cfg.mesh.sizes(8))
    for fine in ({"share_slots": True}, {"mode": "dropless"}):
        logits(dataclasses.replace(moe, **fine), packed)
    logits(moe, rows)  # one document a row


@pytest.mark.slow
def test_the_scores_of_a_row_do_not_depend_on_its_padding():
    """As in the engine, no token is dropped: 17 tokens are padded to 32, 16 are not."""
    moe = MoeConfig(experts=4, top_k=2, width=8, mode="capacity", capacity_factor=0.3)
    cfg = dataclasses.replace(MODEL, layers=1, moe=moe)
    params = decoder.parts(cfg).init(jax.random.key(0))
    row = [int(i) for i in np.random.default_rng(0).integers(0, 61, 17)]
    long, short = logprobs(cfg, params, [row, row[:16]])
    np.testing.assert_allclose(long[1:16], short[1:], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k": 9}, ["moe.top_k=9", "at most 8", "--moe.top_k"]),
        ({"groups": 3}, ["moe.groups=3", "nearest: 2, 4", "--moe.groups"]),
        ({"groups": 4, "top_k": 3}, ["moe.top_k=3", "at most 2", "--moe.top_groups"]),
        ({"groups": 2, "top_groups": 3}, ["moe.top_groups=3", "at most moe.groups=2"]),
        ({"capacity_factor": 0.0}, ["moe.capacity_factor=0.0", "above 0"]),
        ({"width": 0}, ["moe.width=0", "at least 1"]),
        ({"aux_loss": -1.0}, ["moe.aux_loss=-1.0", "at least 0"]),
    ],
)
def test_impossible_routers_are_refused(changes, words):
    with pytest.raises(UserError) as error:
        dataclasses.replace(PLAIN, **changes)
    for word in words:
        assert word in str(error.value)
