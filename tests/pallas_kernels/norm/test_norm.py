"""norm(x + bias + residual) against float64 formulas and finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import fused_layer_norm

SHAPE, D = (5, 3, 24), 24


def arrays(seed):
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal(SHAPE) + 3,
        "residual": random.standard_normal(SHAPE),
        "bias": random.standard_normal(D),
        "scale": random.standard_normal(D),
        "offset": random.standard_normal(D),
    }


def oracle(kind, eps, x, scale, residual=0.0, bias=0.0, offset=0.0):
    h = x + bias + residual
    centre = h.mean(-1, keepdims=True) if kind == "layer" else 0.0
    n = (h - centre) / np.sqrt(((h - centre) ** 2).mean(-1, keepdims=True) + eps)
    return n * scale + offset, h


@pytest.mark.parametrize("parts", [("residual", "bias", "offset"), ()], ids=str)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_values_and_gradients(kind, parts, seed):
    given = {k: v for k, v in arrays(seed).items() if k in ("x", "scale", *parts)}
    random = np.random.default_rng(seed + 1)
    weights = [random.standard_normal(SHAPE) for _ in range(2)]

    @jax.jit
    def run(given):
        def loss(given):
            rest = {k: v for k, v in given.items() if k != "x"}
            y, h = fused_layer_norm(given["x"], kind=kind, eps=1e-3, **rest)
            dy, dh = (jnp.asarray(w, jnp.float32) for w in weights)
            return (y * dy + h * dh).sum(), (y, h)

        return jax.grad(loss, has_aux=True)(given)

    grads, values = run({k: jnp.asarray(v, jnp.float32) for k, v in given.items()})
    for got, want in zip(values, oracle(kind, 1e-3, **given), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)

    def loss(given):
        return sum((a * w).sum() for a, w in zip(oracle(kind, 1e-3, **given), weights, strict=True))

    for name, value in given.items():
        direction = random.standard_normal(value.shape)
        ends = (loss(given | {name: value + s * 1e-5 * direction}) for s in (1, -1))
        want = (next(ends) - next(ends)) / 2e-5
        np.testing.assert_allclose((grads[name] * direction).sum(), want, rtol=2e-4, err_msg=name)


def test_16_bit_keeps_float32_statistics(seed):
    """A large common offset, which 16-bit statistics would not survive."""
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((4, 256)) + 40, jnp.bfloat16)
    y, h = fused_layer_norm(x, scale=jnp.ones(256, jnp.float32))
    assert y.dtype == h.dtype == jnp.bfloat16
    want, _ = oracle("layer", 1e-5, np.asarray(x, np.float64), 1.0)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, atol=0.02)


@pytest.mark.slow
def test_shard_map_and_scan_sum_the_shared_gradients(seed):
    given = {k: jnp.asarray(v, jnp.float32) for k, v in arrays(seed).items()}
    x, scale = given["x"][:4], given["scale"]

    def grad(x, scale):
        def loss(x, scale):
            def layer(h, _):
                return fused_layer_norm(h, residual=h, scale=scale)[0], None

            return (jax.lax.scan(layer, x, length=2)[0] ** 3).sum()

        return jax.grad(loss, (0, 1))(x, scale)

    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    specs = (P("x"), P())
    cut = jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=specs, out_specs=specs))
    for got, want in zip(cut(x, scale), jax.jit(grad)(x, scale), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


BAD = {
    "residual": dict(residual=jnp.zeros((3, D))),
    "bias": dict(bias=jnp.zeros(3)),
    "kind": dict(kind="batch"),
    "eps": dict(eps=0.0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    with pytest.raises(ValueError, match=name):
        fused_layer_norm(jnp.zeros((2, D)), **({"scale": jnp.ones(D)} | BAD[name]))
    with pytest.raises(NotImplementedError, match="no Hopper kernel"):
        fused_layer_norm(jnp.zeros((2, D)), scale=jnp.ones(D), implementation="hopper")
