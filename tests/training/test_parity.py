"""torchtitan's rule: one device is the control, every mesh must give its losses."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.core.tree import named_leaves
from megajax.training.step import make_train_step
from tests.tiny import DEEPSEEK, MODEL, MOE, MQA, RICH, host_batch, on, run_config
from tests.tolerances import LONG_LOSSES, LOSSES, PARAMETERS

STEPS = 20
CAPACITY = dataclasses.replace(
    MOE, moe=dataclasses.replace(MOE.moe, mode="capacity", capacity_factor=1.0, share_slots=True)
)
MESHES = {
    "data 8": {},
    "tensor 4": {"mesh__data": 1, "mesh__tensor": 4},
    "data 2, tensor 4": {"mesh__tensor": 4},
    "node 2, data 2, tensor 2": {"mesh__node": 2, "mesh__tensor": 2, "shard__zero": "hybrid"},
}


def train(model, steps=STEPS, **changes):
    cfg = run_config(train__steps=steps, **changes)
    cfg = type(cfg)(**(vars(cfg) | {"model": model}))
    train_step = make_train_step(cfg, cfg.mesh.build())
    state, losses = train_step.init(0), []
    for i in range(steps):
        state, metrics = train_step.step(state, on(train_step, host_batch(i)))
        losses.append(metrics["loss"])
    return np.array([float(x) for x in losses]), jax.tree.map(np.asarray, state.params)


@pytest.fixture(scope="module")
def control():
    """One device, no accumulation, by (model, optimizer)."""
    rows = {}

    def get(model, optimizer):
        key = (model, optimizer)
        if key not in rows:
            rows[key] = train(model, mesh__data=1, optim__name=optimizer)
        return rows[key]

    return get


def compare(ours, control):
    losses, params = ours
    assert control[0][-1] < control[0][0] - 0.02  # something was learnt
    np.testing.assert_allclose(losses, control[0], atol=LONG_LOSSES)
    for (name, a), b in zip(named_leaves(params), jax.tree.leaves(control[1]), strict=True):
        norm = np.linalg.norm(b)
        assert np.linalg.norm(a - b) <= PARAMETERS * norm, f"{name}: {np.linalg.norm(a - b) / norm}"


@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [
        ("data 8", 1),
        ("data 2, tensor 4", 2),
        ("node 2, data 2, tensor 2", 1),
        # What these do, the ones above do together: one axis at a time, for when one fails.
        *(
            pytest.param(mesh, accumulate, marks=pytest.mark.slow)
            for mesh, accumulate in (
                ("data 8", 2),
                ("tensor 4", 1),
                ("tensor 4", 2),
                ("data 2, tensor 4", 1),
                ("node 2, data 2, tensor 2", 2),
            )
        ),
    ],
)
def test_every_mesh_learns_the_same(mesh, accumulate, control):
    ours = train(MODEL, **MESHES[mesh], train__accumulate=accumulate)
    compare(ours, control(MODEL, "adamw"))


def test_rings_learn_the_same(control):
    """Three steps of the 20: what tensor parallelism sends goes round in rings."""
    cfg = run_config(mesh__tensor=4, overlap="ring")
    train_step = make_train_step(cfg, cfg.mesh.build())
    state, losses = train_step.init(0), []
    for i in range(3):
        state, metrics = train_step.step(state, on(train_step, host_batch(i)))
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, control(MODEL, "adamw")[0][:3], atol=LOSSES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (MOE, {"mesh__data": 1, "mesh__expert": 8}),
        (DEEPSEEK, {"mesh__node": 2, "mesh__expert": 2, "mesh__context": 2}),
        (DEEPSEEK, {"mesh__expert": 2, "mesh__tensor": 2, "shard__zero": "hybrid"}),
        (MOE, {"mesh__pipe": 2, "mesh__expert": 2, "mesh__tensor": 2}),
        (MOE, {"mesh__tensor": 2, "shard__zero": "optimizer"}),
    ],
)
def test_rings_of_experts_learn_what_plain_exchanges_do(model, changes):
    ours, plain = (train(model, steps=4, overlap=how, **changes)[0] for how in ("ring", "xla"))
    np.testing.assert_allclose(ours, plain, atol=LOSSES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh__context": 2, "mesh__tensor": 2, "model__block": "parallel", "model__bias": "all"},
        {"mesh__tensor": 2, "model__kv_heads": 2, "shard__zero": "hybrid", "train__remat": "full"},
        {"mesh__pipe": 2, "mesh__tensor": 4, "pipeline__schedule": "zero_bubble"},
    ],
)
def test_rings_learn_what_plain_collectives_do(changes):
    ours, plain = (train(MODEL, steps=4, overlap=how, **changes)[0] for how in ("ring", "xla"))
    np.testing.assert_allclose(ours, plain, atol=LOSSES)


@pytest.mark.parametrize(
    ("kv_heads", "changes"),
    [
        # By default test_other_shardings has such a model.
        *(
            pytest.param(kv_heads, changes, marks=pytest.mark.slow)
            for kv_heads, changes in (
                (2, {"mesh__tensor": 4, "overlap": "ring"}),
                (1, {"mesh__data": 1, "mesh__tensor": 4}),
                (2, {"mesh__node": 2, "mesh__tensor": 4, "shard__zero": "hybrid"}),
                (1, {"mesh__tensor": 4, "shard__zero": "none", "train__accumulate": 2}),
                (2, {"mesh__context": 2, "mesh__tensor": 4}),
                (1, {"mesh__context": 2, "mesh__tensor": 2, "context__kind": "ulysses"}),
                (2, {"mesh__context": 2, "mesh__tensor": 4, "context__kind": "gather"}),
                (1, {"mesh__tensor": 4, "train__attention": "varlen"}),
                (2, {"mesh__pipe": 2, "mesh__tensor": 4}),
                (
                    1,
                    {
                        "mesh__pipe": 2,
                        "mesh__tensor": 4,
                        "overlap": "ring",
                        "pipeline__schedule": "zero_bubble",
                        "pipeline__gradients": "sharded",
                    },
                ),
            )
        ),
    ],
)
def test_ranks_that_share_a_key_value_head_learn_the_same(kv_heads, changes):
    """Fewer key-value heads than tensor ranks. A bias of keys moves no softmax: left out."""
    model = dataclasses.replace(MODEL, kv_heads=kv_heads, qk_norm=True)
    want, params = train(model, steps=4, mesh__data=1)
    losses, ours = train(model, steps=4, **changes)
    np.testing.assert_allclose(losses, want, atol=1e-4)
    for name in ("key", "value", "query"):
        a, b = (p["blocks"]["attention"][name] for p in (ours, params))
        assert a.shape == b.shape and np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b), name


@pytest.mark.slow  # the mesh of data 2, tensor 4 accumulates too
def test_accumulation_alone(control):
    compare(train(MODEL, mesh__data=1, train__accumulate=4), control(MODEL, "adamw"))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"mesh__node": 2, "mesh__tensor": 2, "shard__zero": "hybrid", "model": MQA},
            marks=pytest.mark.slow,
        ),
        pytest.param({"mesh__node": 2, "mesh__tensor": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"mesh__context": 2, "mesh__tensor": 2, "context__kind": "ring", "model": MQA},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mesh__node": 2, "mesh__tensor": 2, "shard__zero": "none"}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"mesh__context": 2, "mesh__tensor": 2, "context__kind": "ulysses"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mesh__context": 2, "mesh__expert": 2, "mesh__tensor": 2, "train__loss_chunks": 2},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mesh__context": 4, "mesh__tensor": 2, "context__kind": "gather"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"mesh__context": 4, "mesh__data": 2, "context__order": "plain"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "hybrid",
        "nodes",
        "ring",
        "replicated",
        "ulysses",
        "context and expert",
        "gather",
        "plain order",
    ],
)
def test_other_shardings(changes, control):
    settings = {"model": RICH} | changes
    compare(train(**settings), control(settings["model"], "adamw"))


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (DEEPSEEK, {"mesh__expert": 2, "mesh__tensor": 2}),
        pytest.param(MOE, {"mesh__data": 1, "mesh__expert": 8}, marks=pytest.mark.slow),
        pytest.param(
            MOE, {"mesh__node": 2, "mesh__expert": 2, "mesh__context": 2}, marks=pytest.mark.slow
        ),
        pytest.param(DEEPSEEK, {"mesh__data": 1, "mesh__expert": 8}, marks=pytest.mark.slow),
        pytest.param(
            CAPACITY,
            {"mesh__expert": 2, "mesh__context": 2, "mesh__tensor": 2, "shard__zero": "hybrid"},
            marks=pytest.mark.slow,
        ),
        pytest.param(MOE, {"mesh__expert": 4, "optim__name": "lamb"}, marks=pytest.mark.slow),
        pytest.param(MOE, {"mesh__expert": 4, "optim__name": "muon"}, marks=pytest.mark.slow),
    ],
    ids=["deepseek 2 2 2", "8", "2 2 2", "deepseek 8", "capacity", "lamb", "muon"],
)
def test_experts(model, changes, control):
    compare(train(model, **changes), control(model, changes.get("optim__name", "adamw")))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_other_optimizers(optimizer, control):
    ours = train(RICH, mesh__node=2, mesh__tensor=2, optim__name=optimizer, optim__lr=0.02)
    want = train(RICH, mesh__data=1, optim__name=optimizer, optim__lr=0.02)
    compare(ours, want)


def test_bfloat16_follows_float32():
    exact, _ = train(MODEL, 50, mesh__data=1)
    short, _ = train(MODEL, 50, mesh__data=1, train__dtype="bfloat16")
    assert exact[-1] < 0.9 * exact[0]
    np.testing.assert_allclose(short[-10:].mean(), exact[-10:].mean(), rtol=0.02)
