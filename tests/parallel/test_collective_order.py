"""No collective of a program on emulated devices overtakes those of a loop or a branch."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.core.mesh import make_mesh
from megajax.parallel.exchange import Order, hold, never, order_of
from megajax.training.step import make_train_step
from megajax.training.vision import nano
from tests.overtaking import overtaken, overtaking
from tests.tiny import MODEL, MOE, run_config, step_of

PIPE = dict(mesh__pipe=2, mesh__node=2, mesh__tensor=2, mesh__data=1)
RING = dict(mesh__pipe=2, mesh__context=2, mesh__tensor=2, mesh__data=1, overlap="ring")
COPIES = dict(mesh__node=2, mesh__data=2, mesh__tensor=2, wire="loco")
DEEP = dataclasses.replace(MODEL, layers=8)


def looped(order):
    """Returns the text of two loops of sums, over data and over tensor."""
    mesh = make_mesh(jax.devices(), {"data": 4, "tensor": 2})

    def sums(axis, x, ws):
        return lax.scan(lambda x, w: (lax.psum(x * w, axis), None), x, ws)[0]

    def local(x, y):
        first = sums("data", x, y)
        return first, sums("tensor", order.after(x, first), y)

    call = jax.shard_map(local, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    return jax.jit(call).lower(jnp.ones((64, 64)), jnp.ones((3, 64, 64))).compile().as_text()


def test_a_collective_that_needs_nothing_of_a_loop_is_found_and_held():
    overtakers = overtaking(looped(Order(False)))
    assert [x.split(".")[0] for pair in overtakers for x in pair] == ["%while", "%while"]
    assert not overtaking(looped(order_of(make_mesh(jax.devices(), {"data": 8}))))
    assert not order_of(make_mesh(jax.devices()[:1], {"data": 1})).emulated


@pytest.mark.parametrize("value", [0.0, -1.5, np.inf, -np.inf, np.nan])
def test_what_is_held_is_what_was_given(value):
    key = jax.random.key(3)
    tree = {"x": jnp.array([value, 1.0]), "n": jnp.arange(3), "key": key, "none": None}
    held = jax.jit(lambda tree: hold(tree, never(tree)))(tree)
    for name in ("x", "n"):
        np.testing.assert_array_equal(held[name], tree[name])
    assert held["none"] is None and np.asarray(jax.random.key_data(held["key"])).tolist() == [0, 3]
    assert not never(tree) and not never({})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        pytest.param(MODEL, PIPE | dict(wire="loco", optim__name="lamb"), id="loco"),
        pytest.param(MODEL, PIPE | dict(wire="loco", exchange__start_step=2), id="start_step"),
        pytest.param(MODEL, PIPE, id="no wire"),
        pytest.param(MODEL, PIPE | dict(pipeline__schedule="zero_bubble"), id="zero_bubble"),
        pytest.param(MODEL, PIPE | dict(pipeline__gradients="sharded"), id="sharded"),
        pytest.param(
            DEEP,
            PIPE
            | dict(
                wire="loco",
                pipeline__schedule="interleaved",
                pipeline__chunks=2,
                pipeline__stash="residuals",
            ),
            id="interleaved",
        ),
        pytest.param(MOE, PIPE | dict(mesh__node=1, mesh__expert=2, wire="sdp4bit"), id="experts"),
        pytest.param(MODEL, RING, id="context"),
        pytest.param(MODEL, COPIES, id="gathered"),
        pytest.param(MODEL, COPIES | dict(exchange__start_step=2), id="gathered, start_step"),
    ],
)
def test_steps_have_their_collectives_in_order(model, changes):
    step = step_of(dataclasses.replace(run_config(**changes), model=model))
    lowered = step.step.lower(step.abstract_state, step.abstract_batch)
    assert overtaking(lowered.compile().as_text()) == []


@pytest.mark.slow
def test_the_loop_of_a_tower_waits_for_the_count_of_predictions():
    """It did not, and all-reduce and all-gather met in different orders on different devices."""
    base = nano()
    decoder = dataclasses.replace(base.model.decoder, width=32, mlp=32)
    tower = dataclasses.replace(base.model.tower, width=32, mlp=32)
    model = dataclasses.replace(base.model, decoder=decoder, tower=tower)
    optim = dataclasses.replace(base.optim, name="sgd")
    cfg = dataclasses.replace(base, model=model, optim=optim)
    step = make_train_step(cfg, cfg.mesh.build())
    lowered = step.step.lower(step.abstract_state, step.abstract_batch)
    assert overtaken(lowered.compile().as_text(), "all-reduce") == []


@pytest.mark.slow
@pytest.mark.process
def test_a_pipeline_with_loco_and_lamb_ends(tmp_path):
    """Larger than what XLA runs operation by operation: it stopped in the first step."""
    flags = [
        "--wire=loco",
        "--optim.name=lamb",
        "--mesh.pipe=2",
        "--mesh.node=2",
        "--mesh.tensor=2",
        "--train.steps=2",
        "--eval.every=0",
        "--emulate=8",
        f"--run_dir={tmp_path}",
    ]
    options = "--xla_cpu_collective_call_terminate_timeout_seconds=100"
    env = os.environ | {"XLA_FLAGS": options}
    command = [sys.executable, "experiments/pretrain.py", *flags]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, (run.stdout + run.stderr)[-3000:]
