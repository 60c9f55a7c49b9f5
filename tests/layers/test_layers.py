"""Norms, rotary positions, losses and dropout against NumPy in float64."""

import math
import re
import typing
from typing import get_args

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.mesh import MeshSpec
from megajax.layers import mlp
from megajax.layers.attention import RopeConfig, frequencies, rotary, rotate
from megajax.layers.losses import cross_entropy, mask_padding
from megajax.layers.mlp import drop
from megajax.layers.norm import Norm
from megajax.layers.ops import matmul
from megajax.models.encoder_config import EncoderConfig
from megajax.parallel import expert_matmul
from pallas_kernels.hopper import activations


def test_a_float32_product_of_16_bit_arrays_has_16_bit_products_backward(seed):
    """Rounding the gradient once adds no more than rounding the results does (float64 oracle)."""
    random = np.random.default_rng(seed)
    x, w, dz = (random.normal(size=s) for s in ((2, 48, 64), (64, 96), (2, 48, 96)))
    x, w = (jnp.asarray(a, jnp.bfloat16) for a in (x, w))
    dz = jnp.asarray(dz, jnp.float32)
    wide = lambda x, w: matmul(x, w, out_dtype=jnp.float32)  # noqa: E731
    out, pull = jax.vjp(wide, x, w)
    assert out.dtype == jnp.float32
    exact = [np.asarray(a, np.float64) for a in (x, w, dz)]
    dx, dw = exact[2] @ exact[1].T, np.einsum("bsd,bsv->dv", exact[0], exact[2])
    for got, want in zip(pull(dz), (dx, dw), strict=True):
        assert got.dtype == jnp.bfloat16
        rounded = np.asarray(jnp.asarray(want, jnp.bfloat16), np.float64)
        error, least = (np.linalg.norm(np.float64(a) - want) for a in (got, rounded))
        assert error <= 2 * least
    text = jax.jit(lambda x, w, dz: jax.vjp(wide, x, w)[1](dz)).lower(x, w, dz).as_text()
    assert "dot_general" in text and not re.search(r"dot_general .*: \(.*f32.*\) ->", text)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms(kind, dtype, seed):
    x = np.random.default_rng(seed).normal(2.0, 3.0, (4, 5, 64))
    norm = Norm(kind, 64, 1e-5, None)
    out = np.asarray(norm(jnp.asarray(x, dtype)), np.float64)
    x = np.asarray(jnp.asarray(x, dtype), np.float64)
    centred = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out, expected, atol=2e-6 if dtype == "float32" else 2e-2)


def test_rotation_by_complex_numbers(seed):
    """Pair (i, i + K/2) turns like a complex number."""
    x = np.random.default_rng(seed).normal(size=(1, 6, 2, 8))
    positions = np.array([[0, 1, 2, 5, 100, 4000]], np.int32)
    tables = rotary(jnp.asarray(positions), RopeConfig(), 8)
    out = np.asarray(rotate(jnp.asarray(x, jnp.float32), tables))
    freq = 10000.0 ** (-np.arange(4) / 4)
    z = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * positions[..., None] * freq)[:, :, None]
    np.testing.assert_allclose(out, np.concatenate([z.real, z.imag], -1), atol=2e-3)


def test_llama3_scaling_by_the_release():
    """The reference code of Llama 3.1, wavelength by wavelength."""
    cfg = RopeConfig(theta=500000.0, factor=8.0, original_positions=8192)
    got = frequencies(cfg, 128)
    for freq, ours in zip(500000.0 ** (-np.arange(0, 128, 2) / 128), got, strict=True):
        wavelength = 2 * np.pi / freq
        if wavelength < 8192 / 4:
            expected = freq
        elif wavelength > 8192 / 1:
            expected = freq / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * freq / 8 + smooth * freq
        assert ours == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_cross_entropy(chunks, seed):
    random = np.random.default_rng(seed)
    B, S, D, V = 3, 8, 5, 11
    hidden, w = random.normal(size=(B, S, D)), random.normal(size=(D, V))
    targets = random.integers(-1, V, (B, S)).astype(np.int32)

    def logits(h):
        return matmul(h, jnp.asarray(w, jnp.float32))

    sums = cross_entropy(jnp.asarray(hidden, jnp.float32), jnp.asarray(targets), logits, chunks)
    z = hidden @ w
    log_z = np.log(np.exp(z).sum(-1))
    picked = np.take_along_axis(z, np.maximum(targets, 0)[..., None], -1)[..., 0]
    valid = targets >= 0
    assert float(sums.cross_entropy) == pytest.approx(((log_z - picked) * valid).sum(), rel=1e-5)
    assert float(sums.z_squared) == pytest.approx((log_z**2 * valid).sum(), rel=1e-5)
    assert int(sums.count) == valid.sum() and sums.classes_3C is None
    counted = cross_entropy(
        jnp.asarray(hidden, jnp.float32), jnp.asarray(targets), logits, chunks, classes=V
    )
    best = z.argmax(-1)
    pairs = [(t, p) for t, p in zip(targets[valid], best[valid], strict=True)]
    expected = [
        [
            sum(t == c for t, _ in pairs),
            sum(p == c for _, p in pairs),
            sum(t == p == c for t, p in pairs),
        ]
        for c in range(V)
    ]
    np.testing.assert_array_equal(counted.classes_3C, np.transpose(expected))


def test_chunks_do_not_change_the_gradient(seed):
    random = np.random.default_rng(seed)
    hidden = jnp.asarray(random.normal(size=(2, 8, 5)), jnp.float32)
    w = jnp.asarray(random.normal(size=(5, 11)), jnp.float32)
    targets = jnp.asarray(random.integers(0, 11, (2, 8)), jnp.int32)

    def loss(h, w, chunks):
        return cross_entropy(h, targets, lambda x: matmul(x, w), chunks).cross_entropy

    for argument in (0, 1):
        one, four = (jax.grad(loss, argument)(hidden, w, n) for n in (1, 4))
        np.testing.assert_allclose(one, four, atol=1e-5)


def test_a_row_that_does_not_count_reaches_no_gradient(seed):
    """NaN and Inf where nothing is predicted: sums and gradients keep their bits."""
    random = np.random.default_rng(seed)
    clean = random.normal(size=(2, 8, 5)).astype(np.float32)
    w = jnp.asarray(random.normal(size=(5, 11)), jnp.float32)
    targets = random.integers(0, 11, (2, 8)).astype(np.int32)
    targets[0, 3], targets[1, 6], clean[0, 3], clean[1, 6] = -1, -100, 0, 0
    dirty = clean.copy()
    dirty[0, 3], dirty[1, 6, 2] = np.nan, np.inf

    @jax.jit
    def grads(h, w):
        def loss(h, w):
            sums = cross_entropy(h, jnp.asarray(targets), lambda x: matmul(x, w), 2)
            return sums.cross_entropy + 1e-2 * sums.z_squared

        return jax.value_and_grad(loss, (0, 1))(h, w)

    want, got = (grads(jnp.asarray(x), w) for x in (clean, dirty))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(want))
    chex.assert_trees_all_equal(got, want)


def test_padding_of_the_vocabulary_has_probability_zero():
    masked = mask_padding(jnp.ones((1, 1, 8)), 5)
    assert jax.nn.softmax(masked)[0, 0].tolist() == [pytest.approx(0.2)] * 5 + [0.0] * 3


def test_dropout_keeps_the_mean_and_is_equal_on_every_mesh():
    from megajax.parallel.sharding import layout

    x = jnp.ones((8, 64, 32))
    key = jax.random.key(3)
    plain = np.asarray(drop(x, 0.25, key))
    assert set(np.unique(plain).tolist()) == {0.0, np.float32(1 / 0.75)}
    assert plain.mean() == pytest.approx(1.0, abs=0.02)
    mesh = MeshSpec(tensor=2).build()
    lo = layout(mesh)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, lo.named(lo.act("batch", "seq", None, residual=True)))
        cut = jax.jit(lambda x: drop(x, 0.25, key))(placed)
    assert cut.sharding.spec == lo.act("batch", "seq", None, residual=True)
    np.testing.assert_array_equal(np.asarray(cut), plain)


def test_every_word_of_an_activation_has_code_and_its_formula():
    """The decoder's, the encoder's and the kernels' words, against Python's math."""
    z, up = np.linspace(-4, 4, 17), np.linspace(1, 2, 17)
    tanh = np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))
    expected = {
        "gelu": 0.5 * z * (1 + np.array([math.erf(x / math.sqrt(2)) for x in z])),
        "gelu_tanh": 0.5 * z * (1 + tanh),
        "silu": z / (1 + np.exp(-z)),
        "quick_gelu": z / (1 + np.exp(-1.702 * z)),
        "swiglu": z / (1 + np.exp(-z)) * up,
        "geglu_tanh": 0.5 * z * (1 + tanh) * up,
        "swiglu_clamped": z / (1 + np.exp(-1.702 * z)) * (up + 1),
    }
    assert set(get_args(mlp.Activation)) == mlp.ACTIVATIONS.keys()
    for kind, nonlinearity in mlp.ACTIVATIONS.items():
        products = (z, up) if nonlinearity.is_gated else (z,)
        arrays = tuple(jnp.asarray(x, jnp.float32) for x in products)
        np.testing.assert_allclose(mlp.activate(kind, arrays), expected[kind], atol=2e-6)
    words = get_args(typing.get_type_hints(EncoderConfig)["activation"])
    assert words and not any(mlp.ACTIVATIONS[w].is_gated for w in words)
    assert {None, *get_args(activations.Activation)} == set(activations.ACTIVATIONS)
    for kind in get_args(activations.Activation):
        hidden = activations.activate(kind, jnp.asarray(z, jnp.float32))
        np.testing.assert_allclose(hidden, expected[kind], atol=2e-6)
    assert set(expert_matmul.ACTIVATIONS) == {*activations.ACTIVATIONS, "swiglu"}
