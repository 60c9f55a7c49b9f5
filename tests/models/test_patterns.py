"""Layers of several kinds in one stack: windows, rotary bases and layers without positions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.models import decoder
from megajax.models.decoder_config import DecoderConfig
from megajax.models.parts import cycles_of
from megajax.models.vlm import VlmConfig
from megajax.training.step import make_train_step
from tests.plain_loop import SMALL, check_greedy
from tests.tiny import MODEL, host_batch, on, run_config

ROPE = dataclasses.replace(MODEL.rope, local_theta=100.0)
MIXED = dataclasses.replace(MODEL, layers=4, pattern="wwfn", window=5, kv_heads=2, rope=ROPE)


def layer_by_layer(cfg, params, batch):
    """The loss with each layer a model of its own, which has one kind of layers."""
    full = decoder.parts(cfg)
    x = full.embed(params, batch, full.context(batch, None))
    for i in range(cfg.layers):
        one = cfg.part(i, i + 1)
        like = dataclasses.replace(one, rope=dataclasses.replace(cfg.rope, local_theta=None))
        if one.pattern == "w":
            theta = cfg.rope.local_theta or cfg.rope.theta
            plain = dataclasses.replace(cfg.rope, theta=theta, local_theta=None)
            like = dataclasses.replace(one, pattern=None, rope=plain)
        elif one.pattern == "n":
            like = dataclasses.replace(one, pattern=None, position="none")
        parts = decoder.parts(like)
        weights = jax.tree.map(lambda w: w[i], params["blocks"])  # noqa: B023
        x, _, _ = parts.block(weights, x, parts.context(batch, None))
    return full.head_loss(params, x, batch).cross_entropy


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("layers", "pattern"),
    [(3, "wf"), pytest.param(5, "wwfn", marks=SLOW), pytest.param(7, "ffwwwww", marks=SLOW)],
)
def test_a_loop_of_patterns_is_the_layers_one_by_one(layers, pattern):
    cfg = dataclasses.replace(MIXED, layers=layers, pattern=pattern)
    parts = decoder.parts(cfg)
    params = jax.tree.map(lambda a: 3 * a, parts.init(jax.random.key(0)))
    batch = {k: jnp.asarray(v) for k, v in host_batch(0, rows=2).items()}
    looped = jax.value_and_grad(lambda p: parts.loss(p, batch, None, "outputs").cross_entropy)
    single = jax.value_and_grad(lambda p: layer_by_layer(cfg, p, batch))
    (loss, grads), (expected, slow_grads) = jax.jit(looped)(params), jax.jit(single)(params)
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(slow_grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    for other in ("f", "n")[: layers - 3]:  # each letter counts
        alike = decoder.parts(dataclasses.replace(cfg, pattern=other, window=None))
        assert abs(float(alike.loss(params, batch).cross_entropy) - float(loss)) > 0.1


def test_kinds_repeat_or_run():
    assert cycles_of((1, 1, 0) * 2 + (1,)) == [(0, (1, 1, 0))]
    assert cycles_of((0, 0, 1, 1, 1)) == [(0, (0,)), (2, (1,))]
    assert cycles_of(tuple(range(9)) * 2)[:2] == [(0, (0,)), (1, (1,))]  # too long a cycle


def losses(devices, model=MIXED, steps=2, **changes):
    cfg = dataclasses.replace(run_config(**changes), model=model)
    step = make_train_step(cfg, cfg.mesh.build(jax.devices()[:devices]))
    state, seen = step.init(0), []
    for i in range(steps):
        state, metrics = step.step(state, on(step, host_batch(i)))
        seen.append(float(metrics["loss"]))
    return seen


MESHES = [
    (4, {"mesh__data": 2, "mesh__tensor": 2}),
    (2, {"mesh__pipe": 2}),
    (2, {"mesh__pipe": 2, "pipeline__stash": "residuals", "train__remat": "outputs"}),
    (
        2,
        {"mesh__pipe": 2, "pipeline__schedule": "interleaved", "pipeline__chunks": 2}
        | {"pipeline__microbatches": 2},
    ),
    (2, {"mesh__data": 2, "shard__zero": "full"}),
    (2, {"mesh__data": 2, "shard__zero": "optimizer"}),
    (2, {"mesh__context": 2, "context__kind": "ring"}),
    (4, {"mesh__context": 2, "mesh__pipe": 2, "context__kind": "gather"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "changes"), MESHES)
def test_training_on_meshes_has_the_losses_of_one_device(devices, changes):
    np.testing.assert_allclose(losses(devices, **changes), losses(1), atol=1e-5)


@pytest.mark.slow
def test_greedy_tokens_of_pages_with_windows():
    cfg = dataclasses.replace(MIXED, layers=5, pattern="wf")
    check_greedy(cfg, 4, 20, 32, **SMALL, pages=40, page_size=4)


@pytest.mark.slow
def test_greedy_tokens_on_a_mesh():
    check_greedy(MIXED, 8, 12, 32, {"data": 2, "tensor": 2}, **SMALL, pages=40, page_size=4)


def test_estimates_count_each_window():
    cfg = dataclasses.replace(MIXED, layers=6, pattern="wwf", window=8)
    kernels = {
        op.kernel.window: op.count for op in cfg.workload(2, 64).ops if op.part == "attention"
    }
    assert kernels == {8: 4, None: 2}
    narrow, full = (
        dataclasses.replace(cfg, pattern=p, window=w) for p, w in (("w", 8), ("f", None))
    )
    for phase in ("train", "decode"):
        mixed, low, high = (c.workload(2, 64, phase=phase).flops for c in (cfg, narrow, full))
        assert mixed == pytest.approx((2 * low + high) / 3)
    assert cfg.workload(2, 64).params == full.workload(2, 64).params
    copies = (
        cfg.workload(2, 64).with_kv_copies(2).params - full.workload(2, 64).with_kv_copies(2).params
    )
    assert copies == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pattern": "wx", "window": 3}, "model.pattern='wx' must be one to 16384 of the letters"),
        ({"pattern": ""}, "wwwwwf, or none"),
        ({"pattern": "f" * 20_000}, "one to 16384"),
        ({"pattern": "wf"}, "set both, or none of the two (--model.pattern, --model.window)"),
        ({"pattern": "fn", "window": 4}, "layers of the letter w have the window"),
        ({"pattern": "fn", "position": "learned"}, "use f and w, or --model.position=rope"),
    ],
)
def test_impossible_patterns_are_refused(changes, words):
    with pytest.raises(UserError) as error:
        DecoderConfig(**changes)
    assert words in str(error.value)


def test_patterns_are_refused_where_layers_must_be_alike():
    with pytest.raises(UserError, match="decoder are alike"):
        VlmConfig(decoder=MIXED)
    changes = {"mesh__pipe": 2, "mesh__context": 2, "context__kind": "ring"}
    with pytest.raises(UserError, match="context.kind=gather or ulysses"):
        losses(4, **changes)


def test_a_part_of_the_layers_has_their_kinds():
    assert MIXED.part(2, 4).letters == "fn" and MIXED.part(2, 4).window is None
    assert MIXED.part(1, 3).letters == "wf" and MIXED.part(1, 3).window == 5
