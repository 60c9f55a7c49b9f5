"""Parameters that are not trained: no gradient, no optimizer state, and the same bits for ever."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.tree import named_leaves
from megajax.quant import Format, quantize
from megajax.training.step import make_train_step
from tests.tiny import MODEL, host_batch, on, run_config
from tests.tolerances import GRADIENTS, LOSSES

FROZEN = "tokens,blocks.attention,blocks.*_norm"
LEAN = dict(optim__clip=0.0, optim__warmup=0)


def is_frozen(name):
    return name.startswith(("tokens", "blocks.attention.")) or "_norm." in name


def make(freeze=FROZEN, **changes):
    cfg = run_config(train__freeze=freeze, **LEAN, **changes)
    return make_train_step(cfg, cfg.mesh.build())


@functools.cache
def whole_gradients():
    """Of all parameters, on one device, which the frozen run must agree with."""
    step = make(None, mesh__data=1)
    gradients = step.gradients(step.init(0), on(step, host_batch(0)))
    return dict(named_leaves(jax.device_get(gradients.grads)))


@functools.cache
def control():
    """Losses and last parameters of two steps on one device."""
    return run(make(mesh__data=1))


def run(step):
    state, losses = step.init(0), []
    for i in range(2):
        state, metrics = step.step(state, on(step, host_batch(i)))
        losses.append(float(metrics["loss"]))
    params = jax.device_get(step.storage.natural(state.params))
    return losses, {n: np.asarray(x) for n, x in named_leaves(params)}, metrics


MODES = {
    "one device": dict(mesh__data=1),
    "fully sharded, two micro-batches": dict(mesh__data=4, mesh__tensor=2, train__accumulate=2),
    "streamed": dict(mesh__data=4, shard__zero="optimizer"),
    "accumulated": dict(mesh__data=4, shard__zero="optimizer", train__accumulate=2),
    "pipeline": dict(mesh__pipe=2, mesh__data=2, pipeline__microbatches=2),
    "pipeline, scattered in each tick": dict(
        mesh__pipe=2,
        mesh__data=2,
        pipeline__microbatches=2,
        pipeline__gradients="sharded",
    ),
}


@pytest.mark.parametrize("mode", MODES)
def test_what_is_frozen_has_no_gradient_and_keeps_its_bits(mode):
    step = make(**MODES[mode])
    first = dict(named_leaves(jax.device_get(step.storage.natural(step.init(0).params))))
    grads = jax.device_get(step.gradients(step.init(0), on(step, host_batch(0))).grads)
    gradients = dict(named_leaves(step.storage.natural(grads)))
    assert {*first} - {*gradients} == {n for n in first if is_frozen(n)} and len(gradients) >= 3
    assert step.leaf_names == tuple(n for n in first if not is_frozen(n))
    moments = [n for n, _ in named_leaves(step.abstract_state.opt)]
    assert not any(".tokens" in n or ".attention." in n for n in moments)
    for name, gradient in gradients.items():
        want = whole_gradients()[name]
        distance = np.linalg.norm(gradient - want) / np.linalg.norm(want)
        assert distance < GRADIENTS, name
    losses, last, metrics = run(step)
    np.testing.assert_allclose(losses, control()[0], atol=LOSSES)
    for name, x in last.items():
        if is_frozen(name):
            np.testing.assert_array_equal(x, first[name], err_msg=name)
        else:
            assert (x != first[name]).any(), name
            np.testing.assert_allclose(x, control()[1][name], atol=1e-3, err_msg=name)
    assert metrics["leaf_norms"].shape == (len(gradients),)


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["full", "optimizer"])
@pytest.mark.parametrize("wire", ["sdp4bit", "loco"])
@pytest.mark.parametrize("more", [{}, {"train__accumulate": 2}, {"mesh__pipe": 2}], ids=str)
def test_a_codec_leaves_what_is_frozen_alone(zero, wire, more):
    if wire == "loco" and zero == "full":
        pytest.skip("loco keeps copies")
    step = make(**{"mesh__data": 4, **more}, wire=wire, shard__zero=zero)
    first = dict(named_leaves(jax.device_get(step.storage.natural(step.init(0).params))))
    losses, last, _ = run(step)
    assert abs(losses[1] - control()[0][1]) < 0.1 and losses[1] < losses[0]
    assert {n for n, x in last.items() if (x == first[n]).all()} == {*filter(is_frozen, first)}


def test_what_is_frozen_rests_in_16_bits():
    step = make(mesh__data=4, train__frozen_dtype="bfloat16")
    state = step.init(0)
    for name, x in named_leaves(state.params):
        assert x.dtype == (jnp.bfloat16 if is_frozen(name) else jnp.float32), name
    losses, _, _ = run(step)
    np.testing.assert_allclose(losses, control()[0], atol=0.02)


def test_what_is_frozen_is_an_array():
    step = make("blocks", mesh__data=4)
    shape = step.abstract_state.params["blocks"]["mlp"]["up"].shape
    codes = jax.eval_shape(lambda: quantize(jnp.zeros(shape), Format(8, axis=-1)))
    params = step.abstract_state.params
    mlp = params["blocks"]["mlp"] | {"up": codes}
    params = params | {"blocks": params["blocks"] | {"mlp": mlp}}
    state = dataclasses.replace(step.abstract_state, params=params)
    with pytest.raises(UserError, match="blocks.mlp.up is a QTensor, .*--train.frozen_dtype"):
        step.step.lower(state, step.abstract_batch)


def test_a_task_says_what_is_trained():
    cfg = run_config(mesh__data=1)
    task = dataclasses.replace(cfg.task(), trains=lambda name, words: "vocab" in words)
    step = make_train_step(cfg, cfg.mesh.build(), task)
    assert step.leaf_names == ("tokens",) and MODEL.tied


def test_a_pattern_that_names_nothing_and_one_that_names_all_are_refused():
    with pytest.raises(UserError, match="train.freeze=token: .*nearest: tokens .--train.freeze"):
        make("token", mesh__data=1)
    with pytest.raises(UserError, match="no parameter is left to train"):
        make("*", mesh__data=1)
