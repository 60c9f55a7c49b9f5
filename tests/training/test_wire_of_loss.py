"""A network that computes its own loss, with what data parallelism sends in a codec."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.core import config
from megajax.core.mesh import MeshSpec
from megajax.layers import LossSums, param
from megajax.models import of_loss
from megajax.training import JobConfig, Leaf, OptimConfig, Task, TrainConfig, make_train_step

ROWS, WIDTH, CLASSES, STEPS = 16, 64, 4, 4
NEAR = 0.03  # nats between losses with codecs and without, after a few steps (measured: 0.023)


class Network(nnx.Module):
    """Its parameters are made without a layout, as those of a module of Flax are."""

    def __init__(self, rngs):
        self.up = param.normal(rngs, None, (WIDTH, 2 * WIDTH), ("embed", None), 0.1)
        self.bias = param.constant(None, (2 * WIDTH,), (None,), 0.0)
        self.down = param.normal(rngs, None, (2 * WIDTH, CLASSES), (None, None), 0.1)

    def loss(self, batch, key):
        hidden = jax.nn.gelu(batch["x"] @ self.up[...] + self.bias[...][None])
        logprobs = jax.nn.log_softmax(hidden @ self.down[...])
        hit = jax.nn.one_hot(batch["targets"], CLASSES)
        return LossSums({"cross_entropy": -(logprobs * hit).sum()}, jnp.int32(len(hit)))


@dataclasses.dataclass(frozen=True)
class Shape:
    sizes = {}
    layers = max_positions = 0
    dropout = 0.0


def task():
    batch = {"x": Leaf((WIDTH,), (None,), "float32"), "targets": Leaf()}
    parts = lambda layout, ops: of_loss(lambda key: Network(nnx.Rngs(key)))  # noqa: E731
    return Task(parts, batch, lambda sums, total: sums.cross_entropy / total, unit="rows")


def losses(wire, accumulate=1, mesh=MeshSpec(node=2, data=4)):
    """Returns (the losses of a few steps, the last metrics, the step, its last state)."""
    train = TrainConfig(steps=STEPS, global_batch=ROWS * accumulate, accumulate=accumulate)
    cfg = JobConfig(model=Shape(), mesh=mesh, train=train, optim=OptimConfig(lr=1e-2, warmup=0))
    cfg = config.override(cfg, {"wire": wire})
    step = make_train_step(cfg, cfg.mesh.build(), task())
    state, values, random = step.init(0), [], np.random.default_rng(0)
    for _ in range(STEPS):
        x = random.normal(size=(accumulate * ROWS, WIDTH)).astype(np.float32)
        targets = (x[:, 0] > 0) + 2 * (x[:, 1] > 0)
        batch = {"x": x, "targets": targets.astype(np.int32)}
        placed = {
            k: jax.device_put(batch[k].reshape(like.shape), like.sharding)
            for k, like in step.abstract_batch.items()
        }
        state, metrics = step.step(state, placed)
        values.append(float(metrics["loss"]))
    return np.array(values), metrics, step, state


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("wire", ["sdp4bit", "loco"])
def test_losses_stay_near_those_without_a_codec(wire, accumulate):
    plain, _, _, _ = losses("none", accumulate)
    coded, metrics, step, state = losses(wire, accumulate)
    assert [b.leaves for b in step.exchange.buckets] and plain[-1] < plain[0]
    np.testing.assert_allclose(coded, plain, atol=NEAR)
    assert 0 < float(metrics["wire_drift_relative"]) < 0.01
    assert all(bool(x) for x in jax.tree.leaves(step.agree(state)))
