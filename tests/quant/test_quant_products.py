"""Products of operands in few bits against float64: values, gradients, what is saved, refusals.

The bounds. Let A be an operand, a^ what its codes stand for and d >= |a^ - a|, element by element.
With s = amax / Q of the numbers that share a scale, half a step of the codes is

    int8        s / 2
    e4m3        max(2^-4 |a|, 2^-10 s)     3 explicit bits; steps of 2^-9 below 2^-6
    e5m2        max(2^-3 |a|, 2^-17 s)     2 explicit bits; steps of 2^-16 below 2^-14
    float16     max(2^-11 |a|, 2^-25 p)    p: the power of two that brings amax into [2^14, 2^15)
    bfloat16    2^-8 |a|
    float32     0

and float32 arithmetic (1 / s, times a, times s, s itself) adds at most 2^-22 |a|. Then

    |y^ - y| <= |x| d_w + d_x |w| + d_x d_w + (K + 6) 2^-24 (|x| + d_x) (|w| + d_w)

where the last term is of K additions in float32 in any order, the scales, and the result's own
rounding, which a type of 16 bits adds to. For gradients the same holds of dy and the operand. With
a scale a row, dy is multiplied by the other operand's scales t before it is rounded: d_dy is then
that of dy t, divided by t.

Expected errors. If a rounding error is uniform, its variance is u^2 / 12 for codes u apart, and the
squared error of the product is in the mean x^2 v_w + v_x w^2 + v_x v_w.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from megajax.core.errors import UserError
from megajax.quant import matmul

B, S, K, N = 4, 16, 96, 48
FORWARD = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}
FORWARD |= {"fp8": "e4m3", "int8": "int8"}
BACKWARD = FORWARD | {"fp8": "e5m2", "int8": "bfloat16"}
PRECISIONS = tuple(FORWARD)
Q = {"int8": 127, "e4m3": 448, "e5m2": 57344}
BITS = {"bfloat16": 7, "float16": 10, "e4m3": 3, "e5m2": 2}  # explicit ones of the mantissa
LEAST = {"bfloat16": -126, "float16": -14, "e4m3": -6, "e5m2": -14}  # exponent of a normal number
EPS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}


compiled = jax.jit(matmul, static_argnames=("precision", "scaling"))


@functools.partial(jax.jit, static_argnums=(3, 4))
def both(x, w, dy, precision, scaling="tensor", key=None):
    """Returns (y, dx, dw)."""
    product = functools.partial(matmul, precision=precision, scaling=scaling, key=key)
    y, pull = jax.vjp(product, x, w)
    return y, *pull(dy)


def scale_of(a, codes, axis):
    amax = np.abs(a).max(axis, keepdims=True)
    if codes in Q:
        return np.where(amax == 0, 1, amax / Q[codes])
    if codes == "float16":
        return np.where(amax == 0, 1, 2.0 ** (np.frexp(amax)[1] - 15))
    return np.ones_like(amax)


def step_of(a, codes, axis):
    """The distance of neighbouring codes at each number, times the scale."""
    scale = scale_of(a, codes, axis)
    if codes == "int8":
        return np.broadcast_to(scale, a.shape)
    if codes == "float32":
        return np.zeros(a.shape)
    exponent = np.frexp(np.where(a == 0, 1e-30, a / scale))[1] - 1
    return 2.0 ** (np.maximum(exponent, LEAST[codes]) - BITS[codes]) * scale


def error_of(a, codes, axis):
    """d: a step is at most 2^-bits |a|, or the one below normal numbers; half of it."""
    return step_of(a, codes, axis) / 2 * (1 + 1e-6) + 2.0**-22 * np.abs(a)


def bound_of(a, da, b, db, dtype="float32"):
    a, b = np.abs(a), np.abs(b)
    d = a @ db + da @ b + da @ db + (a.shape[1] + 6) * 2.0**-24 * ((a + da) @ (b + db))
    return d + (EPS[dtype] * (a @ b + d) if dtype != "float32" else 0) + 2.0**-126


def bounds(x, w, dy, precision, scaling, dtype="float32"):
    """Returns (exact, bound) of y, dx and dw, float64, of matrices."""
    rows, to, back = scaling == "rows", FORWARD[precision], BACKWARD[precision]
    axis = (1, 0) if rows else (None, None)
    ex, ew = error_of(x, to, axis[0]), error_of(w, to, axis[1])
    sx, sw = (scale_of(a, to, i) if rows else 1 for a, i in zip((x, w), axis, strict=True))
    over, down = (error_of(dy * s, back, i) / s for s, i in ((sw, axis[0]), (sx, axis[1])))
    return (
        (x @ w, bound_of(x, ex, w, ew, dtype)),
        (dy @ w.T, bound_of(dy, over, w.T, ew.T, dtype)),
        (x.T @ dy, bound_of(x.T, ex.T, dy, down)),
    )


def hard(name, seed):
    """Returns float32 x_BSK, w_KN, dy_BSN."""
    random = np.random.default_rng(seed)
    x, w, dy = (random.standard_normal(s) for s in ((B, S, K), (K, N), (B, S, N)))
    if name == "outliers":
        x[1, 2, 3], w[5, 7], dy[3, 2, 1] = 1e6, -3e4, 2e5
    elif name == "zero rows":
        x[2], w[:, 4], dy[1, 5] = 0, 0, 0
        w[8] = 0
    elif name == "zero":
        x *= 0
    elif name == "tiny cotangents":
        dy *= 2.0**-20
        dy[0] *= 2.0**-20
    elif name == "far below float16's":
        dy *= 2.0**-100
    elif name == "ranges":  # of rows and columns
        x *= 10.0 ** random.integers(-15, 15, (B, S, 1))
        w *= 10.0 ** random.integers(-15, 15, (1, N))
        dy *= 10.0 ** random.integers(-3, 3, (B, S, 1))
    return tuple(a.astype(np.float32) for a in (x, w, dy))


CASES = (
    "plain",
    "outliers",
    "zero rows",
    "zero",
    "tiny cotangents",
    "far below float16's",
    "ranges",
)


@pytest.mark.parametrize(
    "precision, scaling",
    [*((p, "tensor") for p in PRECISIONS), *((p, "rows") for p in ("float16", "fp8", "int8"))],
)
def test_within_the_bounds(precision, scaling, seed):
    """And not far within: errors of K terms cancel, to about 1 / sqrt(K) of the bound."""
    for case in CASES:
        x, w, dy = hard(case, seed)
        results = both(x, w, dy, precision, scaling)
        flat = [np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, w, dy)]
        for of, a, (exact, bound) in zip(
            ("y", "dx", "dw"), results, bounds(*flat, precision, scaling), strict=True
        ):
            share = np.abs(np.asarray(a).reshape(exact.shape) - exact) / bound
            assert share.max() <= 1, (case, of, share.max())
            if case == "plain" and precision != "float32":
                assert share.max() >= 0.12, (of, share.max())


def test_each_precision_has_its_error(seed):
    """The measured squared error is the expected one, and no two precisions are near."""
    x, w, dy = hard("plain", seed)
    X, W, G = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, w, dy))
    errors = {}
    for precision in PRECISIONS:
        to, back = FORWARD[precision], BACKWARD[precision]
        results = [np.asarray(a).reshape(-1, a.shape[-1]) for a in both(x, w, dy, precision)]
        v = [step_of(a, c, None) ** 2 / 12 for a, c in ((X, to), (W, to), (G, back))]
        terms = ((X, W, v[0], v[1]), (G, W.T, v[2], v[1].T), (X.T, G, v[0].T, v[2]))
        ratios = []
        for a, (i, j, p, r) in zip(results, terms, strict=True):
            expected = (i**2 @ r + p @ j**2 + p @ r).sum()
            error = ((a - i @ j) ** 2).sum()
            if precision != "float32":
                assert 0.85 < error / expected < 1.15, (precision, error / expected)
            ratios.append(np.sqrt(error / ((i @ j) ** 2).sum()))
        errors[precision] = ratios
    order = ("float32", "float16", "bfloat16", "int8", "fp8")
    for lower, higher in zip(order, order[1:], strict=False):
        for a, b in zip(errors[lower], errors[higher], strict=True):
            assert b > 2 * a, (lower, higher, errors)


def test_nearest_and_ties_to_even():
    x = np.array([[127, 0.5, 1.5, 2.5, -0.5, -3.5, 0.49, -0.51]], np.float32)
    y = compiled(x, np.eye(8, dtype=np.float32), precision="int8")
    np.testing.assert_allclose(y, [[127, 0, 2, 2, 0, -4, 0, -1]], rtol=1e-6)
    x = np.array([[448, 17, 19, -21, 2.0**-10, 3 * 2.0**-10, 400, 0]], np.float32)
    y = compiled(x, np.eye(8, dtype=np.float32), precision="fp8")
    np.testing.assert_allclose(y, [[448, 16, 20, -20, 0, 2.0**-8, 384, 0]], rtol=1e-6)


def test_random_rounding_is_unbiased_and_independent(seed):
    """w = x^T: if both were rounded by the same numbers, sum v_x would be added to the product."""
    draws, K = 10_000, 12
    x = np.random.default_rng(seed).standard_normal((1, K)).astype(np.float32)
    dy = np.float32([[0.75]])
    keys = jax.random.split(jax.random.key(seed), draws)
    y, dx, dw = jax.vmap(lambda key: both(x, x.T, dy, "int8", "tensor", key))(keys)
    X = x.astype(np.float64)
    s = scale_of(X, "int8", 1)
    part = X / s - np.floor(X / s)
    v = part * (1 - part) * s**2
    expected = 2 * (X**2 @ v.T) + v @ v.T
    y, dx, dw = (np.asarray(a, np.float64) for a in (y, dx, dw))
    z = (y.mean(0) - X @ X.T) / np.sqrt(expected / draws)
    assert np.abs(z).max() < 4, z
    assert 0.94 < y.var() / expected[0, 0] < 1.06
    for a in (dx, np.swapaxes(dw, 1, 2)):
        error = a.mean(0) - 0.75 * X
        assert (np.abs(error) <= 4.5 * 0.75 * np.sqrt(v / draws) + 1e-6).all()
    once = compiled(x, x.T, precision="int8", key=keys[0])
    np.testing.assert_allclose(once, y[0], rtol=1e-6)
    assert len(np.unique(y)) > 100


@pytest.mark.parametrize(
    "precision, dtype",
    [("int8", "int8"), ("fp8", "float8_e4m3fn"), ("float16", "float16"), ("bfloat16", "bfloat16")],
)
@pytest.mark.parametrize("scaling", ["tensor", "rows"])
def test_what_is_saved_has_its_bits(precision, dtype, scaling):
    x, w = jnp.zeros((B, S, K), jnp.bfloat16), jnp.zeros((K, N))
    product = functools.partial(matmul, precision=precision, scaling=scaling)
    pull = jax.eval_shape(lambda x, w: jax.vjp(product, x, w)[1], x, w)
    saved = jax.tree.leaves(pull)
    codes = [a for a in saved if a.size > B * S]
    assert sorted((a.shape, a.dtype.name) for a in codes) == [((B * S, K), dtype), ((K, N), dtype)]
    assert sum(a.size for a in saved) - sum(a.size for a in codes) <= (
        2 if scaling == "tensor" or precision == "bfloat16" else B * S + N
    )


def test_types_and_leading_dimensions(seed):
    x, w, dy = (jnp.asarray(a) for a in hard("plain", seed))
    for lead, precision in (((), "fp8"), ((0,), "int8"), ((2, 1, 3), "float16")):
        arrays = (
            jax.ShapeDtypeStruct((*lead, K), jnp.bfloat16),
            jax.ShapeDtypeStruct((K, N), jnp.float32),
            jax.ShapeDtypeStruct((*lead, N), jnp.bfloat16),
        )
        y, dx, dw = jax.eval_shape(functools.partial(both, precision=precision), *arrays)
        assert (y.shape, y.dtype) == ((*lead, N), jnp.bfloat16)
        assert (dx.shape, dx.dtype, dw.dtype) == ((*lead, K), jnp.bfloat16, jnp.float32)
    y, *_ = both(x, w, dy, "int8", "rows")
    each = jax.jit(jax.vmap(lambda x: matmul(x, w, precision="int8", scaling="rows")))(x[:, 3])
    np.testing.assert_allclose(each, y[:, 3], rtol=1e-6)  # a row's scale is its own
    half = [a.astype(jnp.bfloat16) for a in (x, w, dy)]
    flat = [np.asarray(a).astype(np.float64).reshape(-1, a.shape[-1]) for a in half]
    y, dx, _ = both(*half, "int8")
    expected = bounds(*flat, "int8", "tensor", "bfloat16")[:2]
    for a, (exact, bound) in zip((y, dx), expected, strict=True):
        assert (np.abs(np.asarray(a, np.float64).reshape(exact.shape) - exact) <= bound).all()


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_what_is_not_finite_shows(precision):
    x, w = np.ones((3, 4), np.float32), np.ones((4, 2), np.float32)
    for bad in (np.inf, np.nan):
        x[1, 2] = bad
        assert np.isnan(compiled(x, w, precision=precision)).all()
    y = np.asarray(compiled(x, w, precision=precision, scaling="rows"))
    np.testing.assert_allclose(y[::2], 4, rtol=1e-6)
    assert np.isnan(y[1]).all()


def test_each_device_of_a_shard_map_has_its_scales(seed):
    """Rows of x are on two devices, w on both: its gradient is a sum, which only autodiff adds."""
    x, w, dy = hard("plain", seed)
    x[2:] *= 50
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2,), ("data",), axis_types=(auto,), devices=jax.devices()[:2])
    product = functools.partial(both, precision="int8")
    cut = P("data")
    local = jax.shard_map(product, mesh=mesh, in_specs=(cut, P(), cut), out_specs=(cut, cut, P()))
    y, dx, dw = jax.jit(local)(x, w, dy)
    parts = [product(x[i : i + 2], w, dy[i : i + 2]) for i in (0, 2)]
    np.testing.assert_allclose(y, np.concatenate([p[0] for p in parts]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.concatenate([p[1] for p in parts]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, parts[0][2] + parts[1][2], rtol=1e-5, atol=1e-4)
    forward = jax.shard_map(
        functools.partial(matmul, precision="fp8"), mesh=mesh, in_specs=(cut, P()), out_specs=cut
    )
    text = jax.jit(forward).lower(x, w).as_text()
    assert "all_reduce" not in text and "all_gather" not in text


@pytest.mark.parametrize(
    "change, words",
    [
        ({"precision": "int4"}, "precision='int4'.*'float32'.*'fp8', 'int8'. Did you mean int8"),
        ({"precision": None}, "precision=None must be one of"),
        ({"scaling": "row"}, "scaling='row' must be one of 'tensor', 'rows'. Did you mean rows"),
        ({"x": np.ones((2, 5), np.float32)}, r"\(\.\.\., K\) and w \(K, N\), got \(2, 5\) and"),
        ({"w": np.ones((4, 2, 2), np.float32)}, r"got \(3, 4\) and \(4, 2, 2\)"),
        ({"x": np.float32(1)}, r"got \(\) and"),
        ({"x": np.ones((3, 4), np.int8)}, "x must be of a floating type, got int8"),
        ({"w": [[1.0]]}, "w must be a jax or NumPy array, got list"),
    ],
)
def test_refuses(change, words):
    args = {"x": np.ones((3, 4), np.float32), "w": np.ones((4, 2), np.float32)}
    args |= {"precision": "int8", "scaling": "tensor"} | change
    with pytest.raises(UserError, match=words):
        matmul(args.pop("x"), args.pop("w"), **args)


def test_int32_sums_have_a_limit():
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 133_145), (133_145, 1))]
    with pytest.raises(UserError, match="at most 133144 products in int32, got K=133145"):
        jax.eval_shape(functools.partial(matmul, precision="int8"), *shapes)
