"""Variances of products against random rounding in NumPy, to the numbers that each type has."""

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megajax import quant
from megajax.core.errors import UserError
from megajax.systems.qsync import indicator, statistics, variance

PRECISIONS = ("int8", "fp8", "float16", "bfloat16")
GRADIENTS = {"int8": "bfloat16", "fp8": "e5m2", "float16": "float16", "bfloat16": "bfloat16"}
OPERANDS = {"int8": "int8", "fp8": "e4m3", "float16": "float16", "bfloat16": "bfloat16"}


def numbers(kind, a):
    """Returns all numbers, ascending, that an element of `a` may be rounded to."""
    amax = float(np.max(np.abs(a)))
    if kind == "int8":
        return np.arange(-127, 128) * (amax / 127)
    if kind in ("e4m3", "e5m2"):
        dtype = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]
        codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
        scale = amax / {"e4m3": 448, "e5m2": 57344}[kind]
    elif kind == "float16":
        codes = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
        scale = 2.0 ** (math.floor(math.log2(amax)) - 14)
    else:
        words = np.arange(2**16, dtype=np.uint32)
        words = words[words & 0x7F80 != 0x7F80] << 16
        codes, scale = words.view(np.float32).astype(np.float64), 1.0
    return np.unique(codes[np.isfinite(codes)]) * scale


def neighbours(kind, a):
    """Returns (lower, upper, probability of the upper one) of every element."""
    a = np.asarray(a, np.float64)
    if not a.any():
        return a, a, a
    grid = numbers(kind, a)
    upper = np.clip(np.searchsorted(grid, a), 1, len(grid) - 1)
    low, high = grid[upper - 1], grid[upper]
    return low, high, np.clip((a - low) / (high - low), 0, 1)


def rounded(rng, kind, a, times):
    low, high, chance = neighbours(kind, a)
    return np.where(rng.random((times, *a.shape)) < chance, high, low)


def sampled(rng, precision, x, w, gy, times):
    """Returns the summed variances (forward, backward) of so many random roundings."""
    kinds = OPERANDS[precision], OPERANDS[precision], GRADIENTS[precision]
    x, w, gy = (a.reshape(-1, a.shape[-1]).astype(np.float64) for a in (x, w, gy))
    xs, ws, gs = (rounded(rng, k, a, times) for k, a in zip(kinds, (x, w, gy), strict=True))
    squares = [
        np.square(xs @ ws - x @ w),
        np.square(gs @ ws.transpose(0, 2, 1) - gy @ w.T),
        np.square(xs.transpose(0, 2, 1) @ gs - x.T @ gy),
    ]
    forward, dx, dw = (s.sum((1, 2)).mean() for s in squares)
    return forward, dx + dw


def operands(kind, rng):
    x, w = rng.standard_normal((2, 8, 12)), rng.standard_normal((12, 14)) / 4
    gy = rng.standard_normal((2, 8, 14)) / 100
    if kind == "outliers":
        x[..., 3] *= 30
        w[5] *= 10
        gy[1, 4:] *= 10
    if kind == "zeros":
        x[:, ::2], w[:, 3], gy[1] = 0, 0, 0
    if kind == "wide":
        x, gy = x * 2.0 ** rng.integers(-5, 1, x.shape), gy * 2.0 ** rng.integers(-5, 1, gy.shape)
    return tuple(a.astype(np.float32) for a in (x, w, gy))


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros", "wide"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_variance_is_that_of_random_rounding(precision, kind):
    """The standard deviation of 2,500 samples is 0.3 % of the variance, and up to 1 % where it is
    the squares of few elements."""
    rng = np.random.default_rng([PRECISIONS.index(precision), len(kind)])
    x, w, gy = operands(kind, rng)
    got = variance(statistics(x, w, gy), precision)
    assert got == pytest.approx(sampled(rng, precision, x, w, gy, 2500), rel=0.02, abs=0)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [0.3, 3e-3, 3.1e-5, 5.3e-9, 1e-12, 1e-40])
def test_the_variance_of_one_element_beside_a_large_one(precision, size):
    """Down to what is subnormal in a type, at the scale that the large element sets. The weights 0
    and 1 are exact and leave the error of the small element alone."""
    x = np.float32([[1.3, size]])
    low, high, chance = ((a[0, 1] if np.ndim(a) else a) for a in neighbours(OPERANDS[precision], x))
    expected = chance * (1 - chance) * (high - low) ** 2
    got = variance(statistics(x, np.float32([[0], [1]])), precision).forward
    assert got == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_product_against_all_of_its_outcomes(precision):
    """The two numbers that x may become, by those that w may."""
    x, w = np.float32([[0.71, 1.9]]), np.float32([[0.313], [-0.77]])
    choices = []
    for a in (x, w):
        low, high, chance = (part.ravel() for part in neighbours(OPERANDS[precision], a))
        choices += [[(h, c), (b, 1 - c)] for b, h, c in zip(low, high, chance, strict=True)]
    mean = square = 0.0
    for (x0, p0), (x1, p1), (w0, q0), (w1, q1) in itertools.product(*choices):
        mean += p0 * p1 * q0 * q1 * (x0 * w0 + x1 * w1)
        square += p0 * p1 * q0 * q1 * (x0 * w0 + x1 * w1 - float(x[0] @ w[:, 0])) ** 2
    got = variance(statistics(x, w), precision)
    assert mean == pytest.approx(float(x[0] @ w[:, 0]), rel=1e-6, abs=0)
    assert got.forward == pytest.approx(square, rel=1e-6, abs=0) and got.backward == 0


def test_int8_has_the_variance_of_the_products_of_quant():
    rng = np.random.default_rng(0)
    x, w, _ = operands("normal", rng)
    keys = jax.random.split(jax.random.key(0), 300)
    y = jax.vmap(lambda key: quant.matmul(jnp.array(x), jnp.array(w), precision="int8", key=key))
    error = np.asarray(y(keys), np.float64) - x.astype(np.float64) @ w
    assert variance(statistics(x, w), "int8").forward == pytest.approx(
        np.square(error).sum((1, 2, 3)).mean(), rel=0.03, abs=0
    )


EXACT = {
    "int8": (np.float32([[127, -3], [90, 1]]), np.float32([[-127, 64, 0], [5, 4, 3]])),
    "fp8": (np.float32([[448, -0.375], [1.125, 2.0**-9]]), np.float32([[448], [-0.0625]])),
    "float16": (np.float32([[1.5, 2.0**-27], [3, -1025 / 1024]]), np.float32([[2047], [-7]])),
    "bfloat16": (np.float32([[255, 2.0**-60], [-1.5, 0]]), np.float32([[0.5], [2.0**40]])),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_needs_no_rounding_has_no_variance(precision):
    x, w = EXACT[precision]
    gy = np.ones((2, w.shape[1]), np.float32)
    assert variance(statistics(x, w, gy), precision) == (0, 0)
    one = np.float32([[0.3]])
    alone = variance(statistics(one, one, one), precision)  # one number is its scale's largest
    assert (
        (alone == (0, 0)) if precision == "fp8" else (alone.forward == 0) == (precision == "int8")
    )
    zero = np.zeros((2, 3), np.float32)
    noise = np.random.default_rng(0).standard_normal((3, 2)).astype(np.float32)
    assert variance(statistics(zero, noise), precision) == (0, 0)
    assert variance(statistics(noise, zero, np.zeros((3, 3))), precision) == (0, 0)
    assert variance(statistics(np.zeros((0, 3)), noise, np.zeros((0, 2))), precision) == (0, 0)


def test_float32_and_a_missing_gradient_add_nothing():
    x, w, gy = operands("normal", np.random.default_rng(0))
    with_gradient, without = statistics(x, w, gy), statistics(x, w)
    assert variance(with_gradient, "float32") == (0, 0)
    for form in ("paper", "exact"):
        assert indicator(with_gradient, "float32", form=form) == 0
        for precision in PRECISIONS:
            assert getattr(without, form)[precision].backward == 0
            assert 0 < indicator(without, precision, form=form)
            assert indicator(without, precision, form=form) < indicator(
                with_gradient, precision, form=form
            )


def test_no_scale_is_below_what_products_have():
    """Whose scale is 1 then. 3e-38 is rounded to 1 with this chance, and to 0 otherwise."""
    x, one = np.float32([[3e-38]]), np.float32([[1]])
    assert variance(statistics(x, one), "int8").forward == pytest.approx(float(x[0, 0]), abs=0)


def test_types_of_arrays_are_read_as_their_numbers():
    x, w, gy = operands("normal", np.random.default_rng(0))
    half = jnp.array(x, jnp.bfloat16)
    assert statistics(half, jnp.array(w), jnp.array(gy)) == statistics(
        np.asarray(half.astype(jnp.float32)), w, gy
    )


def test_batches_add_up_to_the_whole():
    """Where they have the same largest magnitudes, and so the same scales."""
    rng = np.random.default_rng(0)
    x, w, gy = operands("normal", rng)
    x[:, 0, 0], gy[:, 0, 0] = 9, 1
    merged = statistics(x[0], w, gy[0]) + statistics(x[1], w, gy[1])
    for precision in PRECISIONS:
        assert variance(merged, precision) == pytest.approx(
            variance(statistics(x, w, gy), precision), rel=1e-9, abs=0
        )
        for form in ("paper", "exact"):
            apart = [indicator(statistics(x[b], w, gy[b]), precision, form=form) for b in (0, 1)]
            assert indicator(merged, precision, form=form) == pytest.approx(
                sum(apart), rel=1e-12, abs=0
            )


BITS = {"float16": (10, 10), "bfloat16": (7, 7), "fp8": (3, 2), "int8": (None, 7)}


def published(x, w, gy, precision):
    """The authors' program (their file indicator.py), with the bits of our types for its k."""

    def size(numbers):
        return math.sqrt(sum(v * v for v in numbers.ravel().tolist()))

    def exponent(value):
        return min(abs(math.frexp(value)[1]), 5)

    x, w, gy = (a.reshape(-1, a.shape[-1]).astype(np.float64) for a in (x, w, gy))
    weight_gradient = x.T @ gy
    sv, sw = abs(x).max() / 127, abs(w).max() / 127
    dv, dw, dvv = x.size, w.size, x.shape[0] * w.shape[1]
    norm_v, norm_w, norm_g = size(x), size(w), size(weight_gradient)
    ev, ew = exponent(math.sqrt(norm_v / dv)), exponent(math.sqrt(norm_w / dw))
    eg = exponent(abs(weight_gradient).max())
    k, kg = BITS[precision]
    if precision == "int8":
        forward = 1 / 6 * (norm_w * sv**2 * dv + norm_v * sw**2 * dw)
        return forward + 1 / 6 * (norm_g * sv**2 * dv + norm_v * 2 ** (2 * ev) * 4.0**-kg * dvv)
    forward = 1 / 6 * 2 ** (-2 * k) * (norm_w * dv * ev + norm_v * dw * ew)
    return forward + 1 / 6 * (norm_g * dv * ev * 4.0**-k + norm_v * dvv * eg * 4.0**-kg)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("factor", [1, 300, 1e-3])
def test_the_published_form(precision, factor):
    x, w, gy = operands("outliers", np.random.default_rng(7))
    x, gy = x * np.float32(factor), gy * np.float32(factor)
    got = indicator(statistics(x, w, gy), precision)
    assert got == pytest.approx(published(x, w, gy, precision), rel=1e-6, abs=0)
    assert got == indicator(statistics(x, w, gy), precision, form="paper")


def test_what_does_not_fit_is_refused():
    x, w = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    stats = statistics(x, w)
    for words, call in {
        "precision='int9'.*Did you mean int8": lambda: variance(stats, "int9"),
        "precision='fp9'.*Did you mean fp8": lambda: indicator(stats, "fp9"),
        "form='exakt'.*Did you mean exact": lambda: indicator(stats, "int8", form="exakt"),
        r"x must have .*\(2, 3\) and \(4, 3\)": lambda: statistics(x, w.T),
        r"x must have .*\(\)": lambda: statistics(np.float32(1), w),
        r"gy must have the shape of y, \(2, 4\), got \(4, 2\)": lambda: statistics(
            x, w, np.ones((4, 2))
        ),
        "w holds inf or NaN": lambda: statistics(x, w * np.float32(np.nan)),
    }.items():
        with pytest.raises(UserError, match=words):
            call()
