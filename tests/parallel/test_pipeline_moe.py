"""Mixtures of experts in a pipeline against one device that cuts its step into the same pieces."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.mesh import MeshSpec
from megajax.parallel import pipeline, sharding
from megajax.parallel.exchange import whole_local
from tests.parallel.test_pipeline import distance, make, poisoned
from tests.tiny import DEEPSEEK, MOE, host_batch, on
from tests.tolerances import GRADIENTS, LONG_LOSSES, PARAMETERS

__all__ = ["poisoned"]  # the fixture, shared

# Little to compile: this one runs with every suite.
PLAIN = dataclasses.replace(MOE, activation="gelu", position="none")
DEEP = dataclasses.replace(MOE, layers=4)
# Fixed slots that do not suffice, groups, shared experts and a bias that moves at every step.
SLOTS = dataclasses.replace(
    DEEPSEEK,
    moe=dataclasses.replace(DEEPSEEK.moe, mode="capacity", capacity_factor=0.8, share_slots=True),
)
MODELS = {"plain": PLAIN, "mixtral": MOE, "deep": DEEP, "slots": SLOTS}
METRICS = ("loss", "moe_aux", "moe_z", "moe_dropped", "moe_max_load")
EXPERT_TENSOR = dict(mesh__pipe=2, mesh__data=1, mesh__expert=2, mesh__tensor=2)
FEW = EXPERT_TENSOR | dict(pipeline__microbatches=2)
INTERLEAVED = dict(
    mesh__pipe=2, mesh__data=2, mesh__expert=2, pipeline__schedule="interleaved", pipeline__chunks=2
)


def train(model, steps, **changes):
    """Returns (metrics of each step, first gradients, last parameters), layers in their order."""
    train_step = make(model, **changes)
    state, losses, gradients = train_step.init(0), [], None
    for i in range(steps):
        state, metrics = train_step.step(state, on(train_step, host_batch(i)))
        losses.append([float(metrics[k]) for k in METRICS])
        if i == 0:  # the first moment is (1 - beta1) times the first gradient
            first = train_step.storage.natural(state.opt[0].mu)
            gradients = jax.tree.map(lambda m: np.asarray(m) / 0.1, first)
    params = jax.tree.map(np.asarray, train_step.storage.natural(state.params))
    return np.array(losses), gradients, params


@functools.cache
def control(name, steps, pieces):
    """One device."""
    return train(MODELS[name], steps, mesh__data=1, train__accumulate=pieces)


def compare(ours, want):
    np.testing.assert_allclose(ours[0], want[0], atol=LONG_LOSSES)
    assert distance(ours[1], want[1]) < GRADIENTS
    assert distance(ours[2], want[2]) < PARAMETERS


def seldom(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name, pieces, changes",
    [
        ("plain", 2, FEW),
        seldom("mixtral", 4, EXPERT_TENSOR | dict(pipeline__stash="residuals")),
        seldom("mixtral", 4, EXPERT_TENSOR | dict(pipeline__schedule="zero_bubble")),
        seldom(
            "mixtral", 4,
            EXPERT_TENSOR | dict(
                pipeline__schedule="zero_bubble", pipeline__stash="residuals", train__remat="dots",
            ),
        ),
        seldom("deep", 4, INTERLEAVED),
        seldom(
            "deep", 4,
            dict(
                mesh__pipe=2, mesh__data=1, mesh__expert=2, mesh__context=2,
                pipeline__schedule="gpipe", pipeline__gradients="sharded", train__remat="none",
            ),
        ),
        seldom("slots", 4, EXPERT_TENSOR),
        seldom(
            "slots", 2,
            dict(
                mesh__pipe=2, mesh__data=1, mesh__expert=4, pipeline__microbatches=2,
                pipeline__stash="residuals",
            ),
        ),
        seldom(
            "slots", 4,
            dict(mesh__pipe=2, mesh__data=1, mesh__context=2, mesh__tensor=2, shard__zero="none"),
        ),
    ],
)  # fmt: skip
def test_a_pipeline_of_experts_learns_the_same(name, pieces, changes, poisoned):
    steps = 3 if name == "plain" else 8
    ours, want = train(MODELS[name], steps, **changes), control(name, steps, pieces)
    compare(ours, want)
    dropped = METRICS.index("moe_dropped")
    assert (want[0][:, dropped] > 0).all() == (name == "slots")
    if name == "slots":
        bias = want[2]["blocks"]["moe"]["bias"]
        assert np.abs(bias).max() > 0
        np.testing.assert_array_equal(ours[2]["blocks"]["moe"]["bias"], bias)


@pytest.mark.slow
def test_what_idle_slots_compute_does_not_spread(monkeypatch):
    """NaN is what every idle slot reads."""

    def poisoned(buffer, place):
        value = jax.lax.dynamic_index_in_dim(buffer, jnp.maximum(place, 0), keepdims=False)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        return jnp.where(place < 0, jnp.full_like(value, jnp.nan), value)

    monkeypatch.setattr(pipeline, "_take", poisoned)
    compare(train(PLAIN, 3, **FEW), control("plain", 3, 2))


@pytest.mark.slow
def test_evaluation_counts_each_layers_load():
    loads, losses = [], []
    for changes in (INTERLEAVED, dict(mesh__data=1, train__accumulate=1)):
        train_step = make(DEEP, **changes)
        host, like = host_batch(99), train_step.abstract_eval_batch
        batch = {k: jax.device_put(host[k].reshape(x.shape), x.sharding) for k, x in like.items()}
        params = train_step.init(0).params
        sums = train_step.evaluate(params, batch)
        losses.append(float(sums.cross_entropy))
        loads.append(np.asarray(sums.moe.load_E))
    np.testing.assert_array_equal(loads[0], loads[1][[0, 2, 1, 3]])  # stage after stage
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_routers_are_not_rounded():
    layout = sharding.layout(MeshSpec(data=1).build(jax.devices()[:1]))
    weight, dtype = jnp.ones((2, 4, 8)), jnp.dtype("bfloat16")
    gather = functools.partial(whole_local, layout)
    assert gather(("layers", "embed", "router"), weight, dtype).dtype == jnp.float32
    assert gather(("layers", "embed", "mlp"), weight, dtype).dtype == jnp.bfloat16
