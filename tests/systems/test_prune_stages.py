"""Stages on the real train step: tensor parallelism, checkpoints, one compiled program."""

import chex
import jax
import numpy as np
import pytest

from megajax.checkpoint.manager import CheckpointManager
from megajax.core.tree import named_leaves
from megajax.systems.pruning import Pruner, sparsity_of, starved
from megajax.training.masking import PruneConfig, pick
from megajax.training.step import make_train_step
from megajax.training.task import TrainState
from tests.tiny import host_batch, on, run_config

PRUNE = {
    "prune__sparsity": 0.75,
    "prune__stages": 2,
    "prune__steps": 3,
    "prune__tile": 16,
    "train__steps": 200,
}


def build(**changes):
    cfg = run_config(**(PRUNE | changes))
    step = make_train_step(cfg, cfg.mesh.build())
    seen = []
    pruner = Pruner(
        cfg.prune,
        step.parts.axes,
        step.layout.mesh,
        step.storage.natural,
        step.storage.arranged,
        lambda finished, row: seen.append((finished, row)),
    )
    return step, pruner, seen


def advance(step, pruner, state, first, last, losses=None):
    """Steps first..last, with what is due before each."""
    for number in range(first, last + 1):
        state = pruner(state, number - 1)
        state, metrics = step.step(
            state, on(step, host_batch(number, step.abstract_batch["tokens"].shape[0]))
        )
        if losses is not None:
            losses.append(float(metrics["loss"]))
    return state


def assert_pruned(state, sparsity=0.75):
    masks = jax.tree.map(np.asarray, state.opt.masks)
    assert sparsity_of(masks) == pytest.approx(sparsity, abs=0.005)
    weights = pick(state.params, [n for n, _ in named_leaves(masks)])
    alive = []
    for w, m in zip(jax.tree.leaves(weights), jax.tree.leaves(masks), strict=True):
        assert (np.asarray(w)[~m] == 0).all()
        alive.append(np.asarray(w)[m] != 0)
    assert np.concatenate(alive).mean() > 0.999


@pytest.fixture(scope="module")
def tensor():
    return build(mesh__tensor=4, mesh__data=1, train__global_batch=4)


def test_pruned_weights_stay_pruned_under_tensor_parallel_4(tensor):
    """AdamW with momentum and weight decay; masks lie as the weights do; one program."""
    step, pruner, seen = tensor
    up, mask = (
        t["blocks"]["mlp"]["up"]
        for t in (step.abstract_state.params, step.abstract_state.opt.masks)
    )
    assert mask.dtype == bool and mask.sharding == up.sharding
    assert up.sharding.shard_shape(up.shape) != up.shape
    state = advance(step, pruner, step.init(0), 1, 6)
    compiled = step.step.__wrapped__._cache_size()
    state = advance(step, pruner, state, 7, 26)
    assert step.step.__wrapped__._cache_size() == compiled == 1
    assert_pruned(state)
    assert [f for f, _ in seen] == [3, 6]
    assert seen[0][1]["sparsity"] == pytest.approx(0.5, abs=0.005)
    row = seen[1][1]
    for leaf, x in named_leaves(jax.tree.map(np.asarray, state.opt.masks)):
        for i, layer in enumerate(x):
            assert row[f"kept.{leaf}.{i}"] == pytest.approx(layer.mean())
    assert len(row) == 1 + sum(len(x) for x in jax.tree.leaves(state.opt.masks))


@pytest.mark.slow
def test_one_device_and_tensor_parallel_4_agree(tensor):
    ours, theirs = [], []
    step, pruner, _ = tensor
    cut = advance(step, pruner, step.init(0), 1, 10, ours)
    step, pruner, _ = build(mesh__data=1, train__global_batch=4)
    single = advance(step, pruner, step.init(0), 1, 10, theirs)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    pairs = zip(jax.tree.leaves(cut.opt.masks), jax.tree.leaves(single.opt.masks), strict=True)
    same = np.concatenate([(np.asarray(a) == np.asarray(b)).ravel() for a, b in pairs])
    assert same.mean() > 0.99  # sums in another order may swap neighbours in the ranking


def test_a_run_goes_on_bit_for_bit_from_any_checkpoint(tensor, tmp_path):
    """Saved between stages, and right where one is due: what is saved is the state before it."""
    step, pruner, _ = tensor
    unbroken = advance(step, pruner, step.init(0), 1, 8)
    for saved in (3, 5):
        state = advance(step, pruner, step.init(0), 1, saved)
        manager = CheckpointManager(tmp_path / str(saved))
        manager.save(saved, vars(state), data_state={}).result()
        restored = manager.restore(saved, like=vars(step.abstract_state))
        resumed = advance(step, pruner, TrainState(**restored), saved + 1, 8)
        chex.assert_trees_all_equal(unbroken, resumed)


def test_pruned_gradients_enter_no_norm(tensor):
    """leaf_norms are those of the kept elements: NumPy on the first moment, momentum from 0."""
    step, pruner, _ = tensor
    state = advance(step, pruner, step.init(0), 1, 6)
    state = pruner(state, 6)
    zero = jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), state.opt.inner
    )
    state = TrainState(state.params, state.opt._replace(inner=zero), state.step)
    state, metrics = step.step(state, on(step, host_batch(50, 4)))
    norm = float(metrics["grad_norm"])
    mu = dict(named_leaves(state.opt.inner[0].mu))
    scale = min(1.0, 1.0 / norm)  # optim.clip
    norms = dict(zip(step.leaf_names, np.asarray(metrics["leaf_norms"]), strict=True))
    for n, mask in named_leaves(state.opt.masks):
        moment = np.asarray(mu[n])
        assert (moment[~np.asarray(mask)] == 0).all()
        assert np.linalg.norm(moment) / 0.1 / scale == pytest.approx(norms[n], rel=1e-4)


@pytest.mark.slow
def test_interleaved_pipeline_stages_prune_the_same(tensor):
    """Masks and sums move with their layers; ranked in the model's order."""
    few = {"mesh__data": 1, "model__layers": 4, "train__global_batch": 4}
    step, pruner, _ = build(
        mesh__pipe=2, pipeline__schedule="interleaved", pipeline__chunks=2, **few
    )
    cut = advance(step, pruner, step.init(0), 1, 8)
    assert_pruned(cut)
    masks = step.storage.natural(cut).opt.masks
    step, pruner, _ = build(**few)
    single = advance(step, pruner, step.init(0), 1, 8)
    pairs = zip(jax.tree.leaves(masks), jax.tree.leaves(single.opt.masks), strict=True)
    same = np.concatenate([(np.asarray(a) == np.asarray(b)).ravel() for a, b in pairs])
    assert same.mean() > 0.99


@pytest.mark.slow
def test_magnitude_needs_no_sums():
    changes = {"prune__pattern": "vw", "prune__score": "magnitude", "optim__name": "lamb"}
    step, pruner, _ = build(mesh__data=1, **changes)
    state = advance(step, pruner, step.init(0), 1, 8)
    assert state.opt.scores is None
    assert_pruned(state)


def test_without_pruning_nothing_is_added():
    cfg = run_config()
    step = make_train_step(cfg, cfg.mesh.build())
    assert not any("mask" in n or "score" in n for n, _ in named_leaves(step.abstract_state))


def test_a_matrix_that_keeps_too_little_is_named():
    fractions = {"blocks.mlp.up.0": 0.3, "blocks.mlp.down.0": 0.0, "blocks.mlp.down.1": 0.04}
    text = starved(fractions, PruneConfig(unit_score="paper"))
    assert text.startswith(
        "pruning leaves nothing of 1 of 3 matrices: blocks.mlp.down.0 keeps 0.0%. "
        "--prune.remain=0.05 keeps more of each matrix's best; --prune.unit_score=rms"
    )
    text = starved(fractions, PruneConfig(remain=0.05))
    assert "less than prune.remain=0.05 of 2 of 3 matrices: blocks.mlp.down.0 keeps 0.0%, " in text
    assert text.endswith(
        "blocks.mlp.down.1 keeps 4.0%. --prune.remain=0.1 keeps more of each matrix's best."
    )
    assert starved({"blocks.mlp.up.0": 0.3}, PruneConfig(remain=0.05)) == ""
