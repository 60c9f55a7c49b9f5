"""Runs that train adapters alone: state, meshes, bases in few bits, checkpoints' names."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.manager import CheckpointManager
from megajax.core.errors import UserError
from megajax.core.packed import LowRank
from megajax.core.tree import count, named_leaves, nbytes
from megajax.models import lora
from megajax.training import resume
from megajax.training.step import make_train_step
from megajax.training.task import TrainState
from tests.tiny import MODEL, host_batch, on, run_config, step_of
from tests.tolerances import LOSSES

RANK = 4
MODES = {
    "data 4": dict(mesh__data=4),
    "tensor 2": dict(mesh__data=2, mesh__tensor=2),
    "pipe 2": dict(mesh__pipe=2, mesh__data=2, pipeline__microbatches=2),
    "interleaved": dict(
        mesh__pipe=2,
        mesh__data=2,
        pipeline__microbatches=2,
        pipeline__schedule="interleaved",
        pipeline__chunks=2,
        model__layers=4,
    ),
    "shared heads": dict(mesh__tensor=4, mesh__data=2, model__kv_heads=2),
    "copied weights": dict(mesh__data=4, shard__zero="optimizer"),
    "two micro-batches": dict(mesh__data=4, train__accumulate=2, shard__zero="optimizer"),
    "a ring": dict(mesh__data=2, mesh__tensor=2, overlap="ring"),
}


def config_of(**changes):
    return run_config(lora__rank=RANK, train__seed=3, **changes)


def steps(cfg, number=5):
    """(the train step, losses, the state after them)."""
    step = step_of(cfg)
    state, losses = step.init(0), []
    for _ in range(number):
        state, metrics = step.step(state, on(step, host_batch(0)))
        losses.append(float(metrics["loss"]))
    return step, losses, state


def test_only_adapters_have_gradients_and_moments():
    step, losses, state = steps(config_of(mesh__data=1), 2)
    adapters = lora.adapters(jax.device_get(state.params))
    sizes = sum(w.a.size + w.b.size for w in adapters.values())
    assert len(adapters) == 7 and sizes == count(step.parts.trained(state.params))
    assert nbytes(state.opt) == 2 * 4 * sizes + 8  # two moments, two counts
    assert all(n.endswith((".a", ".b")) for n in step.leaf_names) and len(step.leaf_names) == 14
    first = jax.device_get(step.init(0).params)
    for (name, x), y in zip(named_leaves(first), jax.tree.leaves(state.params), strict=True):
        is_same = np.array_equal(x, np.asarray(y))
        assert is_same == (not name.endswith((".a", ".b"))), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, base",
    [(mode, "none") for mode in MODES] + [(mode, "int8") for mode in list(MODES)[:3]],
)
def test_losses_are_those_of_one_device(mode, base):
    changes = MODES[mode]
    model = {k: v for k, v in changes.items() if k.startswith("model")}
    _, expected, _ = steps(config_of(mesh__data=1, lora__base=base, **model))
    step, losses, state = steps(config_of(lora__base=base, **changes))
    # A tensor rank packs its own slice, whose groups of inputs are others.
    bound = 1e-4 if base == "int8" and step.layout.mesh.shape["tensor"] > 1 else LOSSES
    np.testing.assert_allclose(losses, expected, bound)
    assert losses[-1] < losses[0]
    devices = step.layout.mesh.size
    adapters = nbytes(step.parts.trained(state.params))
    held = sum(s.data.nbytes for x in jax.tree.leaves(state.opt) for s in x.addressable_shards)
    assert held <= devices * (2 * adapters + 8)


@pytest.mark.slow
def test_a_full_rank_adapter_trains_as_the_matrix_does():
    """With A the unit matrix and only B learning by SGD, W + B is W after the same SGD."""
    sgd = dict(optim__name="sgd", optim__beta1=0.0, optim__weight_decay=0.0, optim__clip=0.0)
    lean = dict(mesh__data=1, optim__warmup=0, optim__lr=0.5, model__tied=False, **sgd)
    others = "tokens,head,norm,blocks.attention,blocks.*_norm,blocks.mlp.down"
    dense = step_of(run_config(train__freeze=others, **lean))
    width = MODEL.width
    cfg = run_config(
        lora__rank=width,
        lora__alpha=float(width),
        lora__modules=("gate", "up"),
        train__freeze="blocks.mlp.*.a",
        **lean,
    )
    adapted = step_of(cfg)
    state = dense.init(0)

    def full(w, weight):
        if not lora.is_low_rank(w):
            return weight
        unit = jnp.broadcast_to(jnp.eye(width), w.a.shape)
        return dataclasses.replace(w, base=weight, a=jax.device_put(unit, w.a.sharding))

    fresh = adapted.init(0)
    params = jax.tree.map(full, fresh.params, state.params, is_leaf=lora.is_low_rank)
    other = TrainState(jax.tree.map(jnp.copy, params), fresh.opt, fresh.step)
    for i in range(4):
        state, metrics = dense.step(state, on(dense, host_batch(i)))
        other, theirs = adapted.step(other, on(adapted, host_batch(i)))
        np.testing.assert_allclose(float(theirs["loss"]), float(metrics["loss"]), 1e-5)
        np.testing.assert_allclose(float(theirs["grad_norm"]), float(metrics["grad_norm"]), 1e-4)
    for name in ("gate", "up"):
        ours, weight = (lora.merge(s.params)["blocks"]["mlp"][name] for s in (other, state))
        np.testing.assert_allclose(ours, weight, atol=1e-5)


@pytest.mark.slow
def test_given_weights_become_the_base():
    cfg = config_of(mesh__pipe=2, mesh__data=2, pipeline__microbatches=2, lora__base="int4")
    step, dense = step_of(cfg), step_of(run_config(mesh__data=1))
    loaded = jax.device_get(dense.init(7).params)
    placed = jax.device_put(
        loaded, jax.tree.map(lambda x: step.layout.named(step.layout.stored()), loaded)
    )
    fresh = step.init(0).params
    params = step.adopt(placed, fresh)
    assert jax.tree.structure(params) == jax.tree.structure(step.abstract_state.params)
    up = jax.device_get(lora.merge(params)["blocks"]["mlp"]["up"])
    assert 0 < np.abs(up - loaded["blocks"]["mlp"]["up"]).max() < 0.02
    assert isinstance(params["blocks"]["mlp"]["up"], LowRank)


def test_imported_weights_become_the_base(tmp_path):
    """Of a run whose step 0 has the weights of a folder, and no adapters yet."""
    dense, manager = step_of(run_config(mesh__data=1)), CheckpointManager(tmp_path)
    params = jax.device_get(dense.init(7).params)
    manager.save(0, {"params": params}, data_state={"imported": "a folder", "rows": 0}).result()
    cfg = config_of(mesh__data=1)
    step = step_of(cfg)
    start = resume.begin(cfg, step, manager, {})
    assert start.how == "weights imported from a folder" and start.rows == 0
    made = lora.strip(start.state.params)
    for x, y in zip(jax.tree.leaves(made), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(x, y)
    assert jax.tree.structure(start.state) == jax.tree.structure(step.abstract_state)


def test_pruning_under_adapters_is_refused():
    cfg = config_of(prune__sparsity=0.5, mesh__data=1)
    with pytest.raises(UserError, match="prune.sparsity=0.5: with --lora.rank=4"):
        make_train_step(cfg, cfg.mesh.build())
