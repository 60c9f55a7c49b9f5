"""Grouped products and their gradients, by the reference, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import grouped_matmul, tuned
from pallas_kernels.grouped import library, reference
from tests import tables
from tests.gemm_oracle import relative
from tests.grouped_oracle import arrays, oracle, split

# M, K, N, sizes
CASES = {
    "uneven": (300, 24, 40, [130, 0, 1, 60, 0, 109]),
    "one hot": (200, 16, 8, [0, 0, 200, 0]),
    "all empty": (40, 8, 8, [0, 0, 0]),
    "one row": (1, 5, 3, [0, 1]),
    "one group": (257, 7, 9, [257]),
    "below the sum": (160, 8, 24, [30, 0, 99]),
    "past the rows": (50, 8, 8, [30, 40, 10]),
    "small widths": (20, 1, 1, [3, 17]),
    "64 groups": (333, 8, 16, split(0, 300, 64, 0.3)),
    "512 groups": (700, 8, 8, split(1, 650, 512, 0.5)),
}


@functools.partial(jax.jit, static_argnames=("transpose", "implementation"))
def gradients(lhs, rhs, sizes, dy, transpose=False, implementation="reference"):
    """(y, dlhs, drhs)."""

    def call(lhs, rhs):
        return grouped_matmul(
            lhs, rhs, sizes, transpose_rhs=transpose, implementation=implementation
        )

    y, pull = jax.vjp(call, lhs, rhs)
    return y, *pull(dy)


@pytest.mark.parametrize("name", CASES)
def test_float32_equals_float64(name, seed):
    """NaN past the sum, in lhs and in dy, reaches nothing; every other case is transposed."""
    M, K, N, sizes = CASES[name]
    transpose = bool(list(CASES).index(name) % 2)
    lhs, rhs, dy = arrays(seed, M, len(sizes), K, N, transpose)
    want = oracle(lhs, rhs, sizes, dy, transpose)
    end = sum(sizes)
    lhs[end:], dy[end:] = np.nan, np.nan
    operands = (jnp.asarray(x, jnp.float32) for x in (lhs, rhs))
    results = gradients(*operands, jnp.array(sizes), jnp.asarray(dy, jnp.float32), transpose)
    for got, value in zip(results, want, strict=True):
        np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-4)
    y, dlhs, drhs = (np.asarray(x) for x in results)
    assert not y[end:].any() and not dlhs[end:].any()
    assert not drhs[np.asarray(sizes) == 0].any()


@pytest.mark.parametrize("name", ["one hot", "all empty", "below the sum", "past the rows"])
@pytest.mark.parametrize("transpose", [False, True])
def test_the_library_path_equals_float64(name, transpose, seed):
    """By ragged_dot, and in a GPU's larger steps; what a GPU runs without our kernel."""
    M, K, N, sizes = CASES[name]
    lhs, rhs, dy = arrays(seed, M, len(sizes), K, N, transpose)
    y, _, drhs = oracle(lhs, rhs, sizes, dy, transpose)
    lhs[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.nan
    lhs, rhs, dy = (jnp.asarray(x, jnp.float32) for x in (lhs, rhs, dy))
    assert library.takes_ragged_dot(M, len(sizes))
    result = library.product(lhs, rhs, jnp.array(sizes), transpose=transpose)
    np.testing.assert_allclose(result, y, rtol=1e-5, atol=1e-4)
    result = library.weights(*((dy, lhs) if transpose else (lhs, dy)), jnp.array(sizes))
    np.testing.assert_allclose(result, drhs, rtol=1e-5, atol=1e-4)


def test_ragged_dot_is_for_few_rows():
    """It multiplies all rows for each group, the loop at most a step more for each."""
    assert library.takes_ragged_dot(64, 8) and library.takes_ragged_dot(10**6, 1)
    assert not library.takes_ragged_dot(1024, 8) and not library.takes_ragged_dot(16384, 8)


def test_bfloat16_is_summed_in_float32(seed):
    """At most twice the error of rounding the exact result."""
    M, K, N, sizes = 200, 512, 16, [120, 0, 80]
    rounded = [np.asarray(jnp.asarray(x, jnp.bfloat16), float) for x in arrays(seed, M, 3, K, N)]
    lhs, rhs, dy = (jnp.asarray(x, jnp.bfloat16) for x in rounded)
    results = gradients(lhs, rhs, jnp.array(sizes), dy)
    for got, want in zip(results, oracle(*rounded[:2], sizes, rounded[2]), strict=True):
        assert got.dtype == jnp.bfloat16
        once = np.asarray(jnp.asarray(want, jnp.bfloat16), float)
        assert relative(got, want) <= 2 * relative(once, want)


def test_nothing_grows_with_the_number_of_groups():
    """With 512 groups neither pass holds more than its operands, results and steps."""
    M, G, K, N = 512, 512, 64, 64
    like = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((M, K), (G, K, N))]
    sizes = jax.ShapeDtypeStruct((G,), jnp.int32)
    dy = jax.ShapeDtypeStruct((M, N), jnp.float32)
    temporary = gradients.lower(*like, sizes, dy).compile().memory_analysis().temp_size_in_bytes
    assert temporary < M * K * G * 4 / 8  # ragged_dot's copies alone are 64 MiB


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, tables.H100])
def test_vmap_remat_scan_and_shard_map_agree(kind, seed, monkeypatch):
    """The program for a GPU has XLA's path in it too, where this CPU takes the reference."""
    monkeypatch.setattr(tuned, "target", lambda: kind)
    M, K, sizes = 40, 8, jnp.array([[9, 0, 20], [40, 0, 0]])
    random = np.random.default_rng(seed)
    x, w = (jnp.asarray(random.standard_normal(s), jnp.float32) for s in ((2, M, K), (3, K, K)))

    def loss(x, w, sizes):
        step = jax.checkpoint(lambda h, _: (jnp.sin(grouped_matmul(h, w, sizes)), None))
        return (jax.lax.scan(step, x, length=2)[0] ** 2).sum()

    grads = jax.grad(loss, (0, 1))
    each = [jax.jit(grads)(x[i], w, sizes[i]) for i in range(2)]
    want = jnp.stack([g[0] for g in each]), each[0][1] + each[1][1]
    total = jax.grad(lambda x, w: jax.vmap(loss, (0, None, 0))(x, w, sizes).sum(), (0, 1))
    mesh = Mesh(np.array(jax.devices()[:2]), "d")

    def one(x, w, sizes):
        dx, dw = grads(x[0], w, sizes[0])
        return dx[None], dw

    cut = jax.shard_map(one, mesh=mesh, in_specs=(P("d"), P(), P("d")), out_specs=(P("d"), P()))
    for results in (jax.jit(total)(x, w), jax.jit(cut)(x, w, sizes)):
        for got, value in zip(results, want, strict=True):
            np.testing.assert_allclose(got, value, rtol=1e-5, atol=1e-5)


def test_one_compile_for_all_sizes():
    run = jax.jit(pallas_kernels.grouped_matmul)
    for sizes in ([3, 1], [0, 0]):
        run(jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array(sizes))
    assert run._cache_size() == 1


LHS, RHS, SIZES = jnp.zeros((4, 16)), jnp.zeros((2, 16, 8)), jnp.array([1, 2])
BAD = {
    r"\(M, K\) and \(G, N, K\)": dict(transpose_rhs=True),
    "rhs .*at least one group": dict(rhs_GKN=RHS[:0], group_sizes=SIZES[:0]),
    "one type": dict(rhs_GKN=RHS.astype("bfloat16")),
    "group_sizes .*one for each": dict(group_sizes=jnp.array([1, 2, 3])),
    "group_sizes float32": dict(group_sizes=jnp.array([1.0, 2.0])),
    "implementation='cuda'": dict(implementation="cuda"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    named = {"rhs_GKN": RHS, "group_sizes": SIZES} | BAD[message]
    with pytest.raises(ValueError, match=message):
        grouped_matmul(LHS, **named)


def test_nothing_to_compute_gives_zeros():
    assert reference.product(LHS[:, :0], RHS[:, :0], SIZES, transpose=False).shape == (4, 8)
    assert not reference.weights(LHS[:0], LHS[:0], SIZES).any()
