"""Fused seams against float64 NumPy, and that dropout keeps its place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers import fused
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
