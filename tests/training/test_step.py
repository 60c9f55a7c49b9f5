"""What one step does beside learning: token weights, z-loss, clipping, bad numbers, donation."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.models import decoder
from megajax.parallel import sharding
from megajax.training.loop import bad_leaves
from megajax.training.step import make_train_step
from tests.tiny import MODEL, host_batch, on, run_config, step_of
from tests.tolerances import LOSSES

# Plain momentum-free Adam without clipping.
LOOSE = dict(optim__clip=0.0, optim__eps=1.0, optim__warmup=0)


def one_step(batch, **changes):
    train_step = step_of(run_config(**changes))
    state, metrics = train_step.step(train_step.init(0), on(train_step, batch))
    return train_step, state, metrics


def test_loss_is_the_mean_over_predicted_tokens():
    batch = host_batch(0)
    train_step, _, metrics = one_step(batch)
    params = train_step.init(0).params
    with jax.set_mesh(train_step.layout.mesh):
        logits = np.asarray(train_step.parts.logits(params, on(train_step, batch)), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    valid = batch["targets"] >= 0
    picked = np.take_along_axis(log_p, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0]
    assert float(metrics["loss"]) == pytest.approx(-(picked * valid).sum() / valid.sum(), rel=1e-5)
    assert int(metrics["targets"]) == valid.sum()


def test_the_gradient_is_of_the_mean_loss():
    """Against finite differences along it of the loss that evaluation returns."""
    batch = host_batch(0)
    train_step, state, metrics = one_step(batch, **LOOSE)
    gradient = jax.tree.map(lambda mu: np.asarray(mu) / 0.1, state.opt[0].mu)  # mu = (1 - beta1) g
    norm = float(metrics["grad_norm"])
    params, device = train_step.init(0).params, on(train_step, batch)

    def loss(distance):
        def move(p, g):
            return jax.device_put(np.asarray(p) + np.float32(distance / norm) * g, p.sharding)

        sums = train_step.evaluate(jax.tree.map(move, params, gradient), device)
        return float(sums.cross_entropy) / int(sums.count)

    assert (loss(0.01) - loss(-0.01)) / 0.02 == pytest.approx(norm, rel=2e-3)


def test_micro_batches_weigh_by_their_tokens():
    """Half of the rows predict one token only: they must not count as much as the others."""
    batch = host_batch(0)
    batch["targets"][8:] = -1
    batch["targets"][8, 3] = 7
    _, one_batch, m1 = one_step(batch)
    _, pieces, m2 = one_step(batch, train__accumulate=2)
    assert float(m1["loss"]) == pytest.approx(float(m2["loss"]), rel=1e-6)
    assert float(m1["grad_norm"]) == pytest.approx(float(m2["grad_norm"]), rel=1e-5)


def test_z_loss_changes_the_gradient_but_not_the_loss_that_is_shown():
    batch = host_batch(0)
    _, _, plain = one_step(batch)
    _, _, with_z = one_step(batch, train__z_loss=0.5)
    assert float(plain["loss"]) == float(with_z["loss"])
    assert float(plain["grad_norm"]) != float(with_z["grad_norm"])
    assert float(plain["z_squared"]) == pytest.approx(np.log(61) ** 2, rel=0.05)


def test_clipping_bounds_the_step():
    """With plain momentum-free Adam the direction hides the norm; the recorded one is unclipped."""
    batch = host_batch(0)
    _, tight, m1 = one_step(batch, **LOOSE | dict(optim__clip=1e-3))
    _, loose, m2 = one_step(batch, **LOOSE)
    assert float(m1["grad_norm"]) == float(m2["grad_norm"]) > 0.1
    mu = [np.linalg.norm(np.asarray(x)) for x in jax.tree.leaves(tight.opt[0].mu)]
    assert np.linalg.norm(mu) == pytest.approx(1e-3 * 0.1, rel=1e-4)  # (1 - beta1) x clip


def test_leaf_norms_are_named_and_add_up():
    train_step, _, metrics = one_step(host_batch(0))
    assert len(train_step.leaf_names) == metrics["leaf_norms"].size
    total = np.sqrt((np.asarray(metrics["leaf_norms"]) ** 2).sum())
    assert total == pytest.approx(float(metrics["grad_norm"]), rel=1e-6)


def test_a_step_that_is_not_finite_keeps_the_state():
    train_step = step_of(run_config())
    state = train_step.init(0)
    leaf = state.params["blocks"]["mlp"]["up"]
    broken = np.asarray(leaf).copy()
    broken[0, 0, 0] = np.nan
    state.params["blocks"]["mlp"]["up"] = jax.device_put(broken, leaf.sharding)
    before = jax.tree.map(np.asarray, state)
    after, metrics = train_step.step(state, on(train_step, host_batch(0)))
    assert not np.isfinite(float(metrics["loss"]))
    assert int(after.step) == 0
    assert bad_leaves(after) == ["params.blocks.mlp.up"] and bad_leaves(train_step.init(0)) == []
    chex.assert_trees_all_equal(before, after)


def test_the_state_is_donated():
    train_step = step_of(run_config())
    state = train_step.init(0)
    train_step.step(state, on(train_step, host_batch(0)))
    assert state.params["tokens"].is_deleted()


def test_abstract_values_are_those_of_the_run():
    """What a plan compiles is what training runs."""
    train_step = step_of(run_config(model__dropout=0.3, mesh__tensor=4))  # compiled below too
    state = train_step.init(0)
    for like, real in zip(
        jax.tree.leaves(train_step.abstract_state), jax.tree.leaves(state), strict=True
    ):
        assert (like.shape, like.dtype) == (real.shape, real.dtype)
        assert like.sharding.is_equivalent_to(real.sharding, real.ndim)
    new, _ = train_step.step(state, on(train_step, host_batch(0)))
    for like, real in zip(
        jax.tree.leaves(train_step.abstract_state), jax.tree.leaves(new), strict=True
    ):
        assert like.sharding.is_equivalent_to(real.sharding, real.ndim)


def test_dropout_is_off_in_evaluation_and_equal_on_every_mesh():
    batch, losses = host_batch(0), []
    for mesh in ({"mesh__data": 1}, {"mesh__tensor": 4}):
        train_step, _, metrics = one_step(batch, model__dropout=0.3, **mesh)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(losses[1], abs=LOSSES)
    sums = train_step.evaluate(train_step.init(0).params, on(train_step, batch))
    assert float(sums.cross_entropy) / int(sums.count) != pytest.approx(losses[0], abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh__tensor": 8}, "model.heads=4 must be divisible by mesh.tensor 8"),
        ({"train__global_batch": 12}, "train.global_batch=12 must be divisible by mesh.data 8"),
        ({"mesh__context": 2, "train__seq_len": 18}, "2 x mesh.context = 4 for the zigzag order"),
        ({"mesh__pipe": 2, "model__layers": 3}, "model.layers=3 must be divisible by mesh.pipe 2"),
        ({"fault": "nonsense"}, "nonsense"),
    ],
)
def test_the_library_refuses_what_the_command_line_does(changes, words):
    """In the check's own words, before anything is traced."""
    cfg = run_config(**changes)
    with pytest.raises(UserError, match=words):
        make_train_step(cfg, cfg.mesh.build())


def test_a_mesh_without_our_axes_is_refused():
    mesh = jax.make_mesh((8,), ("data",))
    with pytest.raises(UserError, match="has the axes data and needs pipe, node.*MeshSpec"):
        make_train_step(run_config(), mesh)


def test_a_layout_that_does_not_know_the_model_is_refused():
    """Two key-value heads on four tensor ranks: each rank stores both, if the layout is told."""
    layout = sharding.layout(MeshSpec(tensor=4).build())
    with pytest.raises(UserError, match="model.kv_heads=2 is shared by 4 .*model=cfg"):
        decoder.parts(dataclasses.replace(MODEL, kv_heads=2), layout)


def test_gradients_are_float32_whatever_computes():
    """Weights are copied before the layers, whose gradients leave one layer after the other."""
    changes = dict(shard__zero="optimizer", train__dtype="bfloat16")
    step = step_of(run_config(mesh__data=4, **changes))
    grads = step.gradients.lower(step.abstract_state, step.abstract_batch).out_info.grads
    assert {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype("float32")}
