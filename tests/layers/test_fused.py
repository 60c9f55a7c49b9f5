"""Fused seams against float64 NumPy, and that dropout keeps its place."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from megajax.layers import fused, ops
from megajax.layers.mlp import Mlp, MlpConfig
from megajax.layers.norm import Norm

D = 16


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("dropped", [False, True])
def test_settle_normalises_the_sum(kind, dropped, seed):
    random = np.random.default_rng(seed)
    y, residual = random.normal(2, 3, (2, 2, 5, D)).astype(np.float32)
    bias, scale, shift = random.normal(1, 2, (3, D)).astype(np.float32)
    norm = Norm(kind, D, 1e-5, None)
    norm.scale[...] = jnp.asarray(scale)
    if kind == "layer":
        norm.shift[...] = jnp.asarray(shift)
    drop = (lambda x: x * 0.5) if dropped else None
    arrays = (jnp.asarray(x) for x in (y, residual, bias))
    outputs = jax.jit(lambda *x: fused.settle(norm, *x, drop))(*arrays)

    y, residual, bias, scale, shift = (
        x.astype(np.float64) for x in (y, residual, bias, scale, shift)
    )
    h = residual + (y + bias) * (0.5 if dropped else 1)
    if kind == "layer":
        h = h - h.mean(-1, keepdims=True)
    want = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(outputs, want + (shift if kind == "layer" else 0), atol=2e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("bias", [True, False])
def test_expand_is_product_bias_and_activation(activation, bias, seed):
    random = np.random.default_rng(seed)
    mlp = Mlp(MlpConfig(D, 24, activation, bias, 0.02), None, rngs=nnx.Rngs(0))
    for weight in mlp.inputs:
        weight[...] = jnp.asarray(random.normal(0, 0.5, (D, 24)), jnp.float32)
    shift = random.normal(0, 1, 24).astype(np.float32) if bias else np.zeros(24, np.float32)
    if bias:
        mlp.up_bias[...] = jnp.asarray(shift)
    x = random.normal(0, 1, (2, 5, D)).astype(np.float32)
    hidden = fused.expand(mlp, jnp.asarray(x), ops.up, ops.matmul)

    *gate, up = (x.astype(np.float64) @ np.asarray(w[...], np.float64) for w in mlp.inputs)
    up = up + shift
    if activation == "swiglu":
        want = gate[0] / (1 + np.exp(-gate[0])) * up
    elif activation == "gelu":
        want = up * (1 + np.vectorize(math.erf)(up / math.sqrt(2))) / 2
    else:
        want = up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))) / 2
    np.testing.assert_allclose(hidden, want, atol=2e-5)
