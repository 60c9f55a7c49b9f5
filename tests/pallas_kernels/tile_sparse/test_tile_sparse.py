"""Tile-sparse products and their gradients, by the reference, against float64 with the mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import TileSparse, tile_sparse_matmul, values_of, with_values
from pallas_kernels.tile_sparse import format as format_
from tests.gemm_oracle import relative
from tests.tile_sparse_oracle import arrays, oracle, tilewise

# M, K, N, tile, chunk, (share of chunks, of columns, of entries inside)
CASES = {
    "every weight": (20, 64, 48, 16, 16, (1.0,)),
    "tw 1d": (20, 64, 48, 16, 16, (0.4,)),
    "tw 2d": (20, 64, 48, 16, 16, (0.5, 0.5)),
    "inside chunks": (9, 64, 48, 16, 16, (0.5, 0.6, 0.7)),
    "nothing divides": (7, 37, 29, 8, 12, (0.6, 0.7, 0.9)),
    "the paper's rows": (5, 40, 33, 8, 1, (0.3, 0.6)),
    "8 rows": (5, 40, 33, 8, 8, (0.3, 0.6)),
    "one kept chunk": (6, 64, 32, 16, 16, None),
    "an empty matrix": (6, 20, 20, 8, 8, (0.0,)),
    "one row of x": (1, 3, 5, 8, 64, (1.0, 0.8)),
    "no rows of x": (0, 16, 16, 8, 8, (0.5,)),
    "a tile wider than the weight": (4, 16, 6, 128, 64, (1.0, 0.5, 0.5)),
}


def mask_of(name):
    M, K, N, tile, chunk, shares = CASES[name]
    if shares is None:
        mask = np.zeros((K, N), bool)
        mask[16:32, 16:32] = True
        return mask
    return tilewise(7, K, N, tile, chunk, *shares)


@functools.partial(jax.jit, static_argnames=("activation", "implementation"))
def gradients(x, weight, bias, dy, activation=None, implementation="reference"):
    """(y, {x, w, bias: gradients}); that of the weight dense."""

    def call(x, values, bias):
        return tile_sparse_matmul(
            x,
            weight.replace(values=values),
            bias=bias,
            activation=activation,
            implementation=implementation,
        )

    y, pull = jax.vjp(call, x, weight.values, bias)
    dx, dvalues, dbias = pull(dy)
    dweight = weight.replace(values=dvalues)
    return y, {"x": dx, "w": dweight, "dense": dweight.to_dense(), "bias": dbias}


def compare(results, want, tolerance=1e-4):
    (y, grads), (want_y, want_grads) = results, want
    np.testing.assert_allclose(y, want_y, rtol=tolerance, atol=tolerance)
    for name, value in want_grads.items():
        got = grads["dense" if name == "w" else name]
        if got is not None:
            np.testing.assert_allclose(got, value, rtol=tolerance, atol=tolerance, err_msg=name)


QUICK = ("nothing divides", "the paper's rows")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_float32_equals_float64(name, seed):
    """What is pruned is NaN; activation and bias change from case to case."""
    M, K, N, tile, chunk, _ = CASES[name]
    place = list(CASES).index(name)
    activation = (None, "gelu", "gelu_tanh", "silu")[place % 4]
    mask = mask_of(name)
    x, w, bias, dy = arrays(seed, M, K, N)
    bias = bias if place % 3 else None
    want = oracle(activation, dy, x, w, mask, bias)
    x, w, dy = (jnp.asarray(a, jnp.float32) for a in (x, np.where(mask, w, np.nan), dy))
    bias = None if bias is None else jnp.asarray(bias, jnp.float32)
    weight = TileSparse.from_dense(w, mask, tile=tile, chunk=chunk)
    results = gradients(x, weight, bias, dy, activation)
    compare(results, want)
    np.testing.assert_array_equal(jax.jit(TileSparse.to_dense)(weight), np.where(mask, w, 0))
    # Also what is pruned inside slots, and past the last one, has no gradient.
    assert np.count_nonzero(results[1]["w"].values) <= mask.sum()
    assert weight.density == pytest.approx(mask.mean())
    assert mask.mean() <= weight.stored or weight.stored * K * N >= mask.sum()


def test_the_residual_is_added(seed):
    """TEW: single elements in kept and in pruned columns, under bias and activation."""
    M, K, N = 9, 40, 33
    mask = tilewise(3, K, N, 8, 8, 0.3, 0.6)
    single = (np.random.default_rng(1).random((K, N)) < 0.1) & ~mask
    x, w, bias, dy = arrays(seed, M, K, N)
    want = oracle("silu", dy, x, w, mask | single, bias)
    x, w, bias, dy = (
        jnp.asarray(a, jnp.float32) for a in (x, np.where(mask | single, w, np.nan), bias, dy)
    )
    weight = TileSparse.from_dense(w, mask, tile=8, chunk=8, residual_mask_KN=single)
    results = gradients(x, weight, bias, dy, "silu")
    compare(results, want)
    np.testing.assert_array_equal(
        jax.jit(TileSparse.to_dense)(weight), np.where(mask | single, w, 0)
    )
    assert np.count_nonzero(results[1]["w"].values) == (mask | single).sum()
    assert weight.density == pytest.approx((mask | single).mean())
    with pytest.raises(ValueError, match="kept by the mask and by the residual"):
        TileSparse.from_dense(w, mask, residual_mask_KN=mask)


def test_bfloat16_is_summed_in_float32(seed):
    """At most twice the error of rounding the exact result."""
    M, K, N = 40, 512, 32
    mask = tilewise(2, K, N, 16, 64, 0.8)
    rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), float) for a in arrays(seed, M, K, N)]
    x, w, _, dy = (jnp.asarray(a, jnp.bfloat16) for a in rounded)
    weight = TileSparse.from_dense(w, mask, tile=16)
    y, grads = gradients(x, weight, None, dy)
    want_y, want = oracle(None, rounded[3], *rounded[:2], mask)
    pairs = (y, want_y), (grads["x"], want["x"]), (grads["dense"], want["w"])
    for got, value in pairs:
        assert got.dtype == jnp.bfloat16
        once = np.asarray(jnp.asarray(value, jnp.bfloat16), float)
        assert relative(got, value) <= 2 * relative(once, value)


def test_a_mask_of_the_same_capacity_does_not_compile_again(seed):
    M, K, N = 4, 64, 64
    x, w, _, _ = (jnp.asarray(a, jnp.float32) for a in arrays(seed, M, K, N))
    run = jax.jit(tile_sparse_matmul)
    first = TileSparse.from_dense(w, tilewise(0, K, N, 16, 16, 0.7, 0.8), tile=16, chunk=16)
    masks = [tilewise(i, K, N, 16, 16, 0.3, 0.4) for i in range(2)]
    for mask in (None, *masks):
        weight = first
        if mask is not None:
            weight = TileSparse.from_dense(w, mask, tile=16, chunk=16, capacity=first.capacity)
            assert weight.capacity == first.capacity
            np.testing.assert_allclose(run(x, weight), x @ jnp.where(mask, w, 0), atol=1e-5)
        run(x, weight)
    assert run._cache_size() == 1
    with pytest.raises(ValueError, match="more than Capacity"):
        every = np.ones((K, N), bool)
        few = first.capacity._replace(tiles=4, slots=12)
        TileSparse.from_dense(w, every, tile=16, chunk=16, capacity=few)
    with pytest.raises(ValueError, match="needs 4 tiles"):
        TileSparse.from_dense(w, every, tile=16, capacity=first.capacity._replace(tiles=2))


def test_folded_columns_are_in_place_and_the_network_is_the_same(seed):
    """Two products; afterwards no column of the first is gathered."""
    K, N = 32, 48
    mask = tilewise(0, K, N, 16, 16, 0.9, 0.4)
    x, w, bias, _ = arrays(seed, 5, K, N)
    last = arrays(seed + 1, 5, N, 16)[1]

    def network(mask, w, bias, last):
        return oracle("gelu", np.zeros((5, N)), x, w, mask, bias)[0] @ last

    def gathered(mask, w):
        weight = TileSparse.from_dense(jnp.asarray(w, jnp.float32), mask, tile=16, chunk=16)
        return weight.capacity.gathered

    folded, (w2, bias2), (last2,) = format_.fold(mask, (w, bias), (last,))
    np.testing.assert_allclose(network(folded, w2, bias2, last2), network(mask, w, bias, last))
    assert gathered(mask, w) and not gathered(folded, w2)


def test_values_are_the_only_differentiable_leaf(seed):
    x, w, _, _ = (jnp.asarray(a, jnp.float32) for a in arrays(seed, 4, 16, 16))
    weight = TileSparse.from_dense(w, tilewise(0, 16, 16, 8, 8, 0.5), tile=8, chunk=8)
    floating = [leaf for leaf in jax.tree.leaves(weight) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    assert len(floating) == 1 and floating[0] is weight.values
    with pytest.raises(ValueError, match="must have the shape"):
        weight.replace(values=weight.values[:-1])


def test_a_tree_is_trained_by_its_values(seed):
    """A step of plain gradient descent, with and without a residual, against dense weights."""
    K, N = 40, 24
    x, w, bias, dy = (jnp.asarray(a, jnp.float32) for a in arrays(seed, 6, K, N))
    mask = tilewise(3, K, N, 8, 8, 0.3, 0.6)
    single = (np.random.default_rng(1).random((K, N)) < 0.1) & ~mask
    options = {"tile": 8, "chunk": 8}
    params = {
        "sparse": [
            TileSparse.from_dense(w, mask, **options),
            TileSparse.from_dense(w, mask, **options, residual_mask_KN=single),
        ],
        "bias": bias,
    }

    def loss(params):
        y = sum(tile_sparse_matmul(x, weight) for weight in params["sparse"]) + params["bias"][None]
        return (y * dy).sum()

    @jax.jit
    def step(params):
        values = values_of(params)
        grads = jax.grad(lambda values: loss(with_values(params, values)))(values)
        return with_values(params, jax.tree.map(lambda v, g: v - 0.1 * g, values, grads))

    trained = step(params)
    want = np.asarray(w, float) - 0.1 * np.asarray(x, float).T @ np.asarray(dy, float)
    for weight, live in zip(trained["sparse"], (mask, mask | single), strict=True):
        np.testing.assert_allclose(weight.to_dense(), np.where(live, want, 0), atol=1e-5)
    np.testing.assert_allclose(trained["bias"], bias - 0.1 * dy.sum(0), atol=1e-5)
    with pytest.raises(ValueError, match="must have the shape"):
        with_values(params["sparse"], [jnp.zeros(3)] * 2)


X, W, MASK = jnp.zeros((4, 16)), jnp.zeros((16, 8)), np.ones((16, 8), bool)
BAD = {
    r"x .* and weight .* must be": dict(x_MK=X[:, :5]),
    "one type": dict(x_MK=X.astype("bfloat16")),
    "activation='relu'": dict(activation="relu"),
    r"bias .*\(8,\)": dict(bias=X[0]),
    "implementation='cuda'": dict(implementation="cuda"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    named = {"x_MK": X, "weight": TileSparse.from_dense(W, MASK)} | BAD[message]
    with pytest.raises(ValueError, match=message):
        tile_sparse_matmul(**named)


@pytest.mark.parametrize(
    "message, named",
    {
        "mask bool": dict(mask_KN=MASK[:3]),
        "mask float64": dict(mask_KN=MASK.astype(float)),
        "must be floating": dict(w_KN=W.astype(int)),
        "tile=0": dict(tile=0),
    }.items(),
)
def test_a_bad_mask_is_refused(message, named):
    with pytest.raises(ValueError, match=message):
        TileSparse.from_dense(**({"w_KN": W, "mask_KN": MASK} | named))
