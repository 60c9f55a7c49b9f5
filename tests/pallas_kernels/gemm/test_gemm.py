"""activation(x w + bias) + residual and its gradients, by the reference, against float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, reshard
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import fused_gemm
from pallas_kernels.gemm import api, reference
from pallas_kernels.hopper import activations
from tests import tables
from tests.gemm_oracle import ACTIVATIONS, arrays, oracle, relative


def gradients(operands, dy, dtype, **named):
    """(y, gradients by name) of fused_gemm on arrays rounded to a type."""
    rounded = {name: jnp.asarray(value, dtype) for name, value in operands.items()}

    @jax.jit
    def run(rounded):
        def call(rounded):
            others = dict(rounded)
            return fused_gemm(others.pop("x"), others.pop("w"), **others, **named)

        y, pull = jax.vjp(call, rounded)
        return y, pull(jnp.asarray(dy, y.dtype))[0]

    return run(rounded)


@pytest.mark.parametrize("parts", [("bias", "residual"), ("bias",), ()], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_float32_equals_float64(activation, parts, seed):
    """Rows in two leading dimensions; large negative and positive z too."""
    operands, dy = arrays(seed, (3, 5), 24, 16, parts)
    operands["w"][:, 0] *= 40
    y, grads = gradients(operands, dy, jnp.float32, activation=activation)
    want, exact = oracle(activation, dy, **operands)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
    assert grads.keys() == exact.keys()
    for name, value in exact.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-4, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_bfloat16_is_no_worse_than_plain_jax(activation, seed):
    """At most twice the error of the same formula in bf16, and 1e-3."""
    operands, dy = arrays(seed, (40,), 96, 32, ("bias", "residual"))
    rounded = {
        name: np.asarray(jnp.asarray(v, jnp.bfloat16), float) for name, v in operands.items()
    }
    dy = np.asarray(jnp.asarray(dy, jnp.bfloat16), float)
    plain = {
        None: lambda z: z,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
        "silu": jax.nn.silu,
    }[activation]

    def formula(a):
        return plain(a["x"] @ a["w"] + a["bias"][None]) + a["residual"]

    y, grads = gradients(rounded, dy, jnp.bfloat16, activation=activation)
    theirs, pull = jax.vjp(
        jax.jit(formula), {n: jnp.asarray(v, jnp.bfloat16) for n, v in rounded.items()}
    )
    (their_grads,) = pull(jnp.asarray(dy, jnp.bfloat16))
    want, exact = oracle(activation, dy, **rounded)
    assert relative(y, want) <= 2 * relative(theirs, want) + 1e-3
    for name, value in exact.items():
        ours, other = relative(grads[name], value), relative(their_grads[name], value)
        assert ours <= 2 * other + 1e-3, (name, ours, other)


def test_types_of_results(seed):
    """Abstract: XLA cannot round to float16 for a CPU without F16C (jaxlib 0.11.2)."""
    operands, dy = arrays(seed, (4,), 8, 8, ("bias",))
    of_float16 = functools.partial(gradients, operands, dy, jnp.float16)
    y, grads = jax.eval_shape(lambda: of_float16(out_dtype="float32", activation="silu"))
    assert y.dtype == jnp.float32
    assert {g.dtype.name for g in grads.values()} == {"float16"}
    bias = jnp.asarray(operands["bias"], jnp.float32)
    x, w = (jnp.asarray(operands[name], jnp.bfloat16) for name in ("x", "w"))
    assert fused_gemm(x, w, bias=bias).dtype == jnp.bfloat16
    assert jax.grad(lambda b: fused_gemm(x, w, bias=b).astype("float32").sum())(bias).dtype == "f4"


def test_the_kernels_gelu_is_exact():
    """Its erfc is a series; the function itself is checked where it is called."""
    z = np.concatenate([np.linspace(-40, 40, 4001), [0.0]])
    want = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in z])
    np.testing.assert_allclose(activations.gelu(jnp.asarray(z, jnp.float32)), want, atol=2e-6)


def test_only_what_the_backward_pass_needs_is_kept(seed):
    """x, w, and z in x's type with an activation."""
    operands, _ = arrays(seed, (4,), 8, 16, ("bias", "residual"))
    x, w, bias, residual = (jnp.asarray(v, jnp.bfloat16) for v in operands.values())
    for activation, count in ((None, 2), ("gelu", 3)):
        call = functools.partial(fused_gemm, bias=bias, residual=residual, activation=activation)
        residuals = jax.tree.leaves(jax.vjp(call, x, w)[1])
        assert len(residuals) == count and {k.dtype for k in residuals} == {jnp.bfloat16.dtype}


@pytest.mark.slow
def test_vmap_remat_scan_and_shard_map_agree(seed):
    operands, _ = arrays(seed, (8,), 16, 16, ("bias", "residual"))
    x, w, bias, residual = (jnp.asarray(v, jnp.float32) for v in operands.values())

    def layer(h, w, bias, residual):
        return fused_gemm(h, w, bias=bias, residual=residual, activation="gelu_tanh")

    def loss(call, x, w, bias, residual):
        step = jax.checkpoint(lambda h, _: (call(h, w, bias, residual), None))
        return (jax.lax.scan(step, x, length=2)[0] ** 2).sum()

    args = (x, w, bias, residual)
    want = jax.jit(jax.grad(functools.partial(loss, layer), (0, 1, 2, 3)))(*args)
    rows = jax.vmap(layer, (0, None, None, 0))
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    specs = (P("x"), P(), P(), P("x"))
    gradient = jax.grad(functools.partial(loss, layer), (0, 1, 2, 3))
    cut = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs)
    for results in (
        jax.jit(jax.grad(functools.partial(loss, rows), (0, 1, 2, 3)))(*args),
        jax.jit(cut)(*args),
    ):
        for got, value in zip(results, want, strict=True):
            np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_reference_runs_under_an_explicit_mesh(seed):
    """Rows cut over one axis and columns over another; gradients lie as their arrays do."""
    operands, dy = arrays(seed, (4, 6), 16, 32, ("bias",))
    mesh = jax.make_mesh((2, 4), ("rows", "columns"))
    specs = {"x": P("rows", None, None), "w": P(None, "columns"), "bias": P("columns")}
    _, exact = oracle("gelu", dy, **operands)
    with jax.set_mesh(mesh):
        cut = {n: reshard(jnp.asarray(v, jnp.float32), specs[n]) for n, v in operands.items()}
        dy = reshard(jnp.asarray(dy, jnp.float32), P("rows", None, "columns"))

        @jax.jit
        def grads(cut):
            def call(cut):
                return fused_gemm(cut["x"], cut["w"], bias=cut["bias"], activation="gelu")

            return jax.vjp(call, cut)[1](dy)[0]

        results = grads(cut)
    for name, value in exact.items():
        assert jax.typeof(results[name]).sharding.spec == specs[name]
        np.testing.assert_allclose(results[name], value, rtol=1e-4, atol=2e-4, err_msg=name)


X, W = jnp.zeros((2, 16), jnp.bfloat16), jnp.zeros((16, 8), jnp.bfloat16)
BAD = {
    "w .*must be": dict(w_KN=jnp.zeros((8, 8), jnp.bfloat16)),
    "one type": dict(w_KN=jnp.zeros((16, 8), jnp.float16)),
    "out_dtype='int8'": dict(out_dtype="int8"),
    "activation='relu'": dict(activation="relu"),
    r"bias .*\(8,\)": dict(bias=jnp.zeros(16)),
    "residual .*like the result": dict(residual=jnp.zeros((2, 8))),
    "implementation='cuda'": dict(implementation="cuda"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    named = {"w_KN": W} | BAD[message]
    with pytest.raises(ValueError, match=message):
        fused_gemm(X, **named)


def test_what_cannot_run_says_why():
    with pytest.raises(NotImplementedError, match="bfloat16 or float16, found float32"):
        fused_gemm(X.astype("float32"), W.astype("float32"), implementation="hopper")
    square = jnp.ones((64, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="fused_gemm.* is for CUDA, .* for cpu"):
        fused_gemm(square, square, implementation="hopper")
    with pytest.raises(NotImplementedError, match="something to compute, found M=0"):
        fused_gemm(X[:0], W, implementation="interpret")


def test_the_default_is_the_reference_until_a_table_says_otherwise(monkeypatch, tmp_path):
    def ways(dtype="bfloat16"):
        x, w = X.astype(dtype), W.astype(dtype)
        with tables.on(tables.H100):
            static = api._static(x, w, None, None, None, dtype, None)
        return static.forward, static.backward, static.tile.stages

    assert ways()[:2] == ("library", "library")
    tile = dict(block_m=64, block_n=64, block_k=64, stages=3, warpgroups=1)
    (M, K), N = X.shape, W.shape[1]
    sizes = {"forward": (M, N, K), "dx": (M, K, N), "dw": (K, N, M)}
    forward, dx, dw = (
        tables.row(api.OP, api.key(X.dtype, kind, None, False, *sizes[kind]), tile=tile)
        for kind in sizes
    )
    slow = {"fastest": "reference"}
    tables.write(monkeypatch, tmp_path, forward, dx, dw | slow)
    assert ways() == ("measured", "library", 3)
    assert ways("float16")[:2] == ("library", "library")  # a row speaks for its own type
    tables.write(monkeypatch, tmp_path, forward | slow, dx, dw)
    assert ways() == ("library", "measured", 3)
    with monkeypatch.context() as patch:
        patch.setattr(api.tuned, "target", lambda: tables.H100)
        grad = jax.jit(jax.grad(lambda x: fused_gemm(x, W + 1).astype("float32").sum()))
        assert (grad(X) == 8).all()  # compiled for a CPU; sums of 8 ones


def test_one_compile_for_equal_shapes():
    run = jax.jit(pallas_kernels.fused_gemm)
    run(X, W)
    run(X + 1, W + 1)
    assert run._cache_size() == 1


def test_reference_keeps_z():
    y, z = reference.forward(X, W, None, None, spec=reference.Spec("silu", "float32", True))
    assert y.dtype == jnp.float32 and z.dtype == jnp.bfloat16
