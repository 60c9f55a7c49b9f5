"""Fused seams against float64 NumPy, and that dropout keeps its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from megajax.layers import fused, ops
from megajax.layers.mlp import Mlp, MlpConfig, activate
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
    found = jax.jit(lambda *x: fused.settle(norm, *x, drop))(*arrays)

    y, residual, bias, scale, shift = (
        x.astype(np.float64) for x in (y, residual, bias, scale, shift)
    )
    h = residual + (y + bias) * (0.5 if dropped else 1)
    if kind == "layer":
        h = h - h.mean(-1, keepdims=True)
    want = h / np.sqrt((h**2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(found, want + (shift if kind == "layer" else 0), atol=2e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu"])
def test_expand_gives_its_gemm_bias_and_activation(activation, seed, monkeypatch):
    """With a GEMM that does as it is told; a gated layer does not use it."""
    seen = []

    def gemm(x, w, *, bias, activation, implementation):
        seen.append(activation)
        return activate(activation, (x @ w + bias[None, None],))

    monkeypatch.setattr(pallas_kernels, "fused_gemm", gemm, raising=False)
    mlp = Mlp(MlpConfig(D, 24, activation, True, 0.02), None, rngs=nnx.Rngs(0))
    random = np.random.default_rng(seed)
    mlp.up_bias[...] = jnp.asarray(random.normal(size=24), jnp.float32)
    x = jnp.asarray(random.normal(size=(2, 5, D)), jnp.float32)
    want = ops.expand(mlp, x, ops.up, ops.matmul)
    np.testing.assert_allclose(fused.expand(mlp, x, ops.up, ops.matmul), want, atol=1e-6)
    assert fused.has_gemm() and seen == ([] if activation == "swiglu" else [activation])
