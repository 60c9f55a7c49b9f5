"""norm(x + bias + residual) against float64 formulas and finite differences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import fused_layer_norm, norm_unpack, pack, unpack
from pallas_kernels.norm import api, hopper
from pallas_kernels.norm.reference import Spec
from tests import tables

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
    operands = {k: v for k, v in arrays(seed).items() if k in ("x", "scale", *parts)}
    random = np.random.default_rng(seed + 1)
    weights = [random.standard_normal(SHAPE) for _ in range(2)]

    @jax.jit
    def run(operands):
        def loss(operands):
            others = {k: v for k, v in operands.items() if k != "x"}
            y, h = fused_layer_norm(operands["x"], kind=kind, eps=1e-3, **others)
            dy, dh = (jnp.asarray(w, jnp.float32) for w in weights)
            return (y * dy + h * dh).sum(), (y, h)

        return jax.grad(loss, has_aux=True)(operands)

    grads, values = run({k: jnp.asarray(v, jnp.float32) for k, v in operands.items()})
    for got, want in zip(values, oracle(kind, 1e-3, **operands), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)

    def loss(operands):
        return sum(
            (a * w).sum() for a, w in zip(oracle(kind, 1e-3, **operands), weights, strict=True)
        )

    for name, value in operands.items():
        direction = random.standard_normal(value.shape)
        ends = (loss(operands | {name: value + s * 1e-5 * direction}) for s in (1, -1))
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
    operands = {k: jnp.asarray(v, jnp.float32) for k, v in arrays(seed).items()}
    x, scale = operands["x"][:4], operands["scale"]

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


def test_unpacked_is_the_norm_unpacked(seed):
    """Values, and gradients with NaN in the dead tail, against the two functions apart."""
    operands = {k: jnp.asarray(v, jnp.float32) for k, v in arrays(seed).items()}
    x, residual = (operands.pop(k).reshape(15, D) for k in ("x", "residual"))
    lengths, dead = jnp.asarray([3, 0, 8]), (np.arange(15) >= 11)[:, None]
    dirty = jnp.where(dead, jnp.nan, x)
    info = pack(jnp.zeros((3, 8)), lengths, 15)[1]
    weight = jnp.asarray(np.random.default_rng(seed).standard_normal((3, 8, D)), jnp.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def run(function, x):
        def loss(x, residual, operands):
            y = function(x, residual, operands)
            return (y * weight).sum(), y

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, residual, operands)

    def fused(x, residual, operands):
        return norm_unpack(x, info, residual=residual, **operands)

    def apart(x, residual, operands):
        return unpack(fused_layer_norm(x, residual=residual, **operands)[0], info)

    results, expected = run(fused, dirty), run(apart, x)
    for got, want in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert not np.asarray(results[0][1])[1].any() and not np.asarray(results[1][0])[11:].any()
    with pytest.raises(ValueError, match="capacity = 15"):
        norm_unpack(x[:4], info, scale=operands["scale"])


def test_the_default_is_what_was_measured(monkeypatch, tmp_path):
    x = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    spec = Spec(True, 1e-5, False, False, False)
    problem = hopper.forward_problem(x, None, None, x, None, spec)

    def chosen(implementation, *rows):
        tables.write(monkeypatch, tmp_path, *rows)
        with tables.on(tables.H100):
            return api._choose("norm", implementation, problem, spec, added=False)

    assert chosen(None)[0] == "library"
    tile = {"rows": 8, "stages": 2, "blocks": 4, "resident": True}
    best = tables.row("norm", api.key(problem, spec, False), tile=tile)
    assert chosen(None, best) == ("measured", hopper.Tile(**tile))
    assert chosen(None, best | {"fastest": "reference"})[0] == "library"
    assert chosen("hopper", best | {"fastest": "reference"})[0] == "hopper"


def test_a_measured_tile_is_made_to_fit():
    x = jax.ShapeDtypeStruct((12, 512), jnp.bfloat16)
    problem = hopper.backward_problem(x, x, x, Spec(True, 1e-5, True, True, True))
    assert hopper.fit(problem, hopper.Tile(8, 2, 100)) == hopper.Tile(4, 2, 3)
    wide = dataclasses.replace(problem, width=4096)
    assert hopper.fit(wide, hopper.Tile(8, 2, 2)).rows == 2  # registers
    large = dataclasses.replace(problem, width=16384)
    assert hopper.fit(large, hopper.Tile(8, 4, 100)) == hopper.heuristic(large)
    for width in (512, 768, 1000, 4096, 12288):
        wide = dataclasses.replace(problem, rows=4096, width=width)
        assert not hopper.misfits(wide, hopper.heuristic(wide))


MISFITS = {
    "multiple of 8": jnp.zeros((2, 12), jnp.bfloat16),
    "no rows": jnp.zeros((0, 16), jnp.bfloat16),
    "16384 at most": jnp.zeros((1, 32768), jnp.bfloat16),
    "bytes of shared memory": jnp.zeros((1, 16384), jnp.float32),
}


@pytest.mark.parametrize("reason", MISFITS)
def test_what_the_kernel_cannot_take_is_said(reason):
    x = MISFITS[reason]
    scale = jnp.ones(x.shape[1])
    with pytest.raises(NotImplementedError, match=reason):
        fused_layer_norm(x, residual=x, scale=scale, offset=scale, implementation="interpret")


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


def test_float64_is_computed_in_float64():
    """A difference that float32 does not have decides the result."""
    with jax.enable_x64(True):
        x = jnp.array([[1.0, 1.0 + 1e-9, 1.0]], jnp.float64)
        one = jnp.ones(3, jnp.float64)

        @jax.jit
        def run(x, dy):
            y, pull = jax.vjp(lambda x: fused_layer_norm(x, scale=one, eps=1e-30)[0], x)
            return y, *pull(dy)

        y, dx = run(x, jnp.array([[1.0, 0.0, 0.0]]))
        want = oracle("layer", 1e-30, np.asarray(x), np.asarray(one))[0]
        np.testing.assert_allclose(y, want, rtol=1e-6)
        # By hand: the derivatives of a unit vector with one entry far from two equal ones.
        np.testing.assert_allclose(dx * 1e-9, [[1.06066, 0, -1.06066]], atol=1e-4)
