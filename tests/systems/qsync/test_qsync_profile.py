"""The operands and gradients of a profile against jax.grad of the whole loss, and NumPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, ETHERNET
from megajax.layers.moe import MoeConfig
from megajax.layers.ops import Ops
from megajax.models.decoder_config import DecoderConfig
from megajax.models.encoder_config import EncoderConfig
from megajax.systems.qsync import model, profile
from megajax.systems.qsync.rounding import statistics
from megajax.training.config import Config, TrainConfig
from megajax.training.finetune import FinetuneConfig

S, B = 8, 3
SMALL = dict(layers=2, width=16, heads=2, vocab=32)
DECODER = SMALL | dict(kv_heads=1, head_width=8, mlp=24)
MODELS = {
    "decoder": DecoderConfig(**DECODER),
    "parallel": DecoderConfig(**DECODER, block="parallel", bias="all", activation="gelu"),
    "experts": DecoderConfig(**DECODER, moe=MoeConfig(experts=4, top_k=2, width=8, shared=1)),
    "encoder": EncoderConfig(**SMALL, mlp=24, max_positions=S),
}


def setting(name):
    """Returns (task, parameters, a batch)."""
    kind = FinetuneConfig if name == "encoder" else Config
    cfg = kind(model=MODELS[name], train=TrainConfig(global_batch=B, seq_len=S, z_loss=1e-3))
    task, rng = cfg.task(), np.random.default_rng(0)
    params = task.parts(None, Ops()).init(jax.random.key(1))
    # Norms and biases that are not 1 and 0, and weights that make the softmax uneven.
    params = jax.tree.map(lambda x: x + jnp.float32(rng.normal(size=x.shape) * 0.1), params)
    tokens = jnp.int32(rng.integers(0, 32, (2, B, S)))
    places = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    batch = {"tokens": tokens[0], "targets": tokens[1].at[0, :3].set(-1), "positions": places}
    return task, params, batch | {"segments": jnp.zeros((B, S), jnp.int32)}


@pytest.mark.parametrize(
    "name",
    ["parallel", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "parallel")],
)
def test_operands_give_the_gradients_of_the_whole_loss(name):
    task, params, batch = setting(name)
    parts = task.parts(None, Ops())

    def loss(params):
        sums = parts.loss(params, batch)
        value = task.objective(sums, jnp.float32(B * S - 3))
        return value if sums.moe is None else value + sums.moe.penalty.sum()

    expected = jax.jit(jax.grad(loss))(params)["blocks"]
    seen = []
    for node, x_MK, w_KN, gy_MN in profile.operands(task, params, batch):
        stack, layer, room, leaf = node.split(".")
        weight, gradient = (
            np.asarray(tree[room][leaf][int(layer)]).reshape(w_KN.shape)
            for tree in (params[stack], expected)
        )
        np.testing.assert_array_equal(w_KN, weight)
        assert np.abs(gradient).max() > 1e-6
        product = np.float64(x_MK).T @ np.float64(gy_MN)
        np.testing.assert_allclose(product, gradient, atol=2e-6 * np.abs(gradient).max() + 1e-9)
        seen.append(node)
    cfg = (FinetuneConfig if name == "encoder" else Config)(model=MODELS[name])
    graph = model.step_graph(model.UnlikeJob(cfg, 2, ETHERNET), CARDS["T4"], 1)
    assert sorted(seen) == sorted(model.products(graph))


def test_operands_are_what_numpy_computes_and_statistics_add_up():
    task, params, batch = setting("decoder")
    made = {node: arrays for node, *arrays in profile.operands(task, params, batch)}
    x_BSD = np.float64(params["tokens"])[np.asarray(batch["tokens"])]
    scale = np.float64(params["blocks"]["attention_norm"]["scale"][0])
    normed = scale * x_BSD / np.sqrt((x_BSD**2).mean(-1, keepdims=True) + 1e-6)
    x_MK, w_KN, gy_MN = made["blocks.0.attention.key"]
    np.testing.assert_allclose(x_MK, normed.reshape(-1, 16), rtol=1e-5, atol=1e-6)
    assert gy_MN.shape == (B * S, 8)
    twice = profile.collect(task, params, [batch, batch])["blocks.0.attention.key"]
    once = statistics(x_MK, w_KN, gy_MN)
    for precision, one in once.exact.items():
        assert twice.exact[precision] == pytest.approx((2 * one.forward, 2 * one.backward))
    # omega of layer 0 of 2: two layers above it, itself included, and one below.
    omega = profile.errors({"blocks.0.attention.key": once}, 2, "float32", gamma=0.25)
    one = once.exact["int8"]
    assert omega["blocks.0.attention.key"]["int8"] == 0.25 * 2 * one.forward + one.backward
    assert "float32" not in omega["blocks.0.attention.key"]
    paper = profile.errors({"blocks.0.attention.key": once}, 2, "bfloat16", 1.0, "paper")
    assert set(paper["blocks.0.attention.key"]) == {"int8", "fp8", "float16"}


def test_a_profile_is_read_as_written_and_damage_is_told(tmp_path):
    path, errors = tmp_path / "omega.json", {"blocks.0.mlp.up": {"int8": 0.5, "float16": 1e-6}}
    profile.save(path, errors, {"device": "cpu"})
    assert profile.load(path) == errors
    text = json.loads(path.read_text())
    damaged = ({"a": {"int9": 1}}, {"a": {"int8": -1}}, {"a": {"int8": True}}, {})
    for change in ({"format": "x"}, *({"omega": rows} for rows in damaged)):
        path.write_text(json.dumps(text | change))
        with pytest.raises(UserError, match="omega.json"):
            profile.load(path)
