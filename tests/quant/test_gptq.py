"""GPTQ, AWQ and indicators against NumPy in float64, and against what rounding to nearest loses."""

import math

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.quant import Format, QTensor, Statistics, awq, dequantize, gptq, quantize, sensitivity

SHAPES = ((96, 40, 32), (130, 17, 48), (64, 24, None))  # K, N, group


def problem(K: int, N: int, seed: int, tokens: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Returns (w_KN, x_TK): inputs that go together, of unlike sizes."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((tokens, K)) @ (
        0.6 * rng.standard_normal((K, K)) / K**0.5 + np.eye(K)
    )
    x_TK = mixed * np.exp(0.8 * rng.standard_normal(K))
    return rng.standard_normal((K, N)).astype(np.float32), x_TK.astype(np.float32)


def plain_gptq(w_KN, x_TK, bits, group, symmetric, damp=0.01, order=None, clip=False):
    """The paper's algorithm, row by row on all rows that are left; inverses by NumPy."""
    w, x = w_KN.astype(np.float64), x_TK.astype(np.float64)
    K, N = w.shape
    group = group or K
    h = x.T @ x
    order = np.arange(K) if order is None else order
    h_inverse = np.linalg.inv((h + damp * np.diag(h).mean() * np.eye(K))[np.ix_(order, order)])
    w = w[order]

    low_code = -(2 ** (bits - 1) - 1) if symmetric else 0
    high_code = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1

    def nearest(rows, s, z):
        return z + np.clip(np.rint((rows - z) / s), low_code, high_code) * s

    def scales(rows, first):
        if symmetric:
            s, z = np.abs(rows).max(0) / high_code, np.zeros(N)
        else:
            s, z = (rows.max(0) - rows.min(0)) / high_code, rows.min(0)
        if not clip:
            return s, z
        power = np.diag(h)[first : first + group, None]
        shares = 1 - np.arange(10) / 20
        lost = [(power * (rows - nearest(rows, a * s, a * z)) ** 2).sum(0) for a in shares]
        best = shares[np.argmin(lost, 0)]
        return best * s, best * z

    fixed = [scales(w_KN[g : g + group], g) for g in range(0, K, group)]
    out = np.zeros((K, N))
    for k in range(K):
        if np.array_equal(order, np.arange(K)):
            if k % group == 0:
                s, z = scales(w[k : k + group], k)
        else:
            s, z = fixed[order[k] // group]
        rounded = nearest(w[k], s, z)
        error = (w[k] - rounded) / h_inverse[k, k]
        w[k + 1 :] -= np.outer(h_inverse[k + 1 :, k], error)
        # Eliminating row k from the inverse leaves that of the rows that remain.
        h_inverse = h_inverse - np.outer(h_inverse[:, k], h_inverse[k]) / h_inverse[k, k]
        out[order[k]] = rounded
    return out


def error(x_TK, w_KN, q: QTensor) -> float:
    """Returns the squared error of the product, in float64."""
    change = np.asarray(dequantize(q), np.float64) - w_KN
    return float(((x_TK.astype(np.float64) @ change) ** 2).sum())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("K, N, group", SHAPES)
def test_gptq_is_the_papers(K, N, group, symmetric):
    bits = 4 if symmetric else 3
    w_KN, x_TK = problem(K, N, 0)
    fmt = Format(bits, group, 0, symmetric=symmetric)
    expected = plain_gptq(w_KN, x_TK, bits, group, symmetric)
    decoded = np.asarray(dequantize(gptq(w_KN, x_TK, fmt)))
    # A tie that falls the other way in float32 moves the rows behind it in its column alone.
    same = np.isclose(decoded, expected, rtol=1e-3, atol=1e-3).all(0)
    assert same.mean() > 0.9
    assert error(x_TK, w_KN, gptq(w_KN, x_TK, fmt)) < 0.85 * error(x_TK, w_KN, quantize(w_KN, fmt))


@pytest.mark.parametrize("order", ["given", "activations"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_with_smaller_scales(symmetric, order):
    w_KN, x_TK = problem(130, 17, 4)
    fmt, options = Format(3, 48, 0, symmetric=symmetric), {"order": order, "clip": True}
    rows = np.argsort(-(x_TK.astype(np.float64) ** 2).sum(0), kind="stable")
    expected = plain_gptq(
        w_KN, x_TK, 3, 48, symmetric, order=rows if order == "activations" else None, clip=True
    )
    q = gptq(w_KN, x_TK, fmt, **options)
    same = np.isclose(np.asarray(dequantize(q)), expected, rtol=1e-3, atol=1e-3).all(0)
    assert same.mean() > 0.8
    assert error(x_TK, w_KN, q) < 0.9 * error(x_TK, w_KN, gptq(w_KN, x_TK, fmt, order=order))


def test_gptq_in_the_order_of_activations():
    w_KN, x_TK = problem(96, 24, 1)
    order = np.argsort(-(x_TK.astype(np.float64) ** 2).sum(0), kind="stable")
    expected = plain_gptq(w_KN, x_TK, 3, 32, True, order=order)
    q = gptq(w_KN, x_TK, Format(3, 32, 0), order="activations")
    same = np.isclose(np.asarray(dequantize(q)), expected, rtol=1e-3, atol=1e-3).all(0)
    assert same.mean() > 0.9


def test_rows_that_do_not_go_together_are_rounded_to_nearest():
    w_KN, _ = problem(64, 8, 2)
    x_TK = np.diag(np.arange(1.0, 65)).astype(np.float32)
    fmt = Format(4, 32, 0, scale_dtype="float16")
    for actual, expected in zip(
        jax.tree.leaves(gptq(w_KN, x_TK, fmt)), jax.tree.leaves(quantize(w_KN, fmt)), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def test_inputs_that_never_come_and_singular_ones():
    w_KN, x_TK = problem(64, 8, 3, tokens=20)  # of rank 20
    x_TK[:, 5] = 0
    q = gptq(w_KN, x_TK, Format(4, 32, 0))
    assert np.isfinite(np.asarray(dequantize(q))).all()
    assert error(x_TK, w_KN, q) < 0.5 * error(x_TK, w_KN, quantize(w_KN, Format(4, 32, 0)))


@pytest.mark.parametrize("bits, symmetric", [(3, True), (4, False)])
def test_awq_loses_less_than_rounding(bits, symmetric):
    w_KN, x_TK = problem(96, 40, 4)
    fmt = Format(bits, 32, 0, symmetric=symmetric)
    losses = []
    for clip in (False, True):
        q, scale_K = awq(w_KN, x_TK, fmt, clip=clip)
        used = np.asarray(dequantize(q), np.float64) / np.asarray(scale_K, np.float64)[:, None]
        losses.append((((x_TK.astype(np.float64)) @ (used - w_KN)) ** 2).sum())
    plain = error(x_TK, w_KN, quantize(w_KN, fmt))
    assert losses[0] < 0.9 * plain and losses[1] < losses[0]
    # The exponent is the best of the grid, found by NumPy.
    mean_K = np.abs(x_TK.astype(np.float64)).mean(0)
    tried = []
    for exponent in np.arange(20) / 20:
        s = mean_K**exponent
        s = (s / np.sqrt(s.max() * s.min())).astype(np.float32)
        scaled = np.asarray(dequantize(quantize(w_KN * s[:, None], fmt)), np.float64) / s[:, None]
        tried.append(((x_TK.astype(np.float64) @ (scaled - w_KN)) ** 2).sum())
    assert losses[0] == pytest.approx(min(tried), rel=1e-3)


def test_statistics_add_up_and_indicators_are_their_formulas():
    w_KN, x_TK = problem(70, 12, 5)
    together, parts = Statistics.of(x_TK), Statistics.of(x_TK[:150]) + Statistics.of(x_TK[150:])
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(together.variance_K, x_TK.var(0), rtol=1e-3)
    fmt, x = Format(4, 32, 0), x_TK.astype(np.float64)
    exact = variance = 0.0
    for start in range(0, 70, 32):
        rows = w_KN[start : start + 32].astype(np.float64)
        square = (x[:, start : start + 32] ** 2).sum()
        exact += ((np.abs(rows).max(0) / 7) ** 2).sum() / 12 * square
        spread = (rows.max(0) - rows.min(0)) / 7
        variance += (spread**2).sum() * x[:, start : start + 32].var(0).sum() / 32
    assert sensitivity(w_KN, together, fmt, "exact") == pytest.approx(exact, rel=1e-3)
    assert sensitivity(w_KN, together, fmt, "variance") == pytest.approx(variance, rel=1e-3)
    real = error(x_TK, w_KN, quantize(w_KN, fmt))
    assert sensitivity(w_KN, together, fmt, "hessian") == pytest.approx(real, rel=1e-3)
    assert sensitivity(w_KN, together, None) == 0
    draws = {
        sensitivity(w_KN, together, Format(b, 32, 0), "random", name=n)
        for b in (3, 4)
        for n in "ab"
    }
    assert len(draws) == 4


@pytest.mark.parametrize("symmetric, value", [(True, 0.0), (False, 0.0), (False, 0.7)])
def test_groups_without_error_have_no_expected_error(symmetric, value):
    """Of a pruned matrix: a group of zeros has the scale 1, as if its codes were 1 apart."""
    w_KN, x_TK = problem(70, 12, 6)
    fmt = Format(4, 32, 0, symmetric=symmetric)
    flat_KN = w_KN.copy()
    flat_KN[32:64, :5] = value
    flat_KN[64:, 7] = value  # the short group
    for indicator in ("exact", "hessian"):
        expected = 0.0
        for n in range(12):
            for start in (0, 32, 64):
                span = slice(start, start + 32)
                if not (flat_KN[span, n] == value).all():
                    part = w_KN[span, n : n + 1]
                    expected += sensitivity(part, x_TK[:, span], fmt, indicator)
        indicated = sensitivity(flat_KN, x_TK, fmt, indicator)
        if indicator == "exact":
            assert indicated == pytest.approx(expected, rel=1e-4)
        else:
            assert indicated == pytest.approx(
                error(x_TK, flat_KN, quantize(flat_KN, fmt)), rel=1e-3
            )
    assert sensitivity(np.full((64, 3), value, np.float32), x_TK[:, :64], fmt) == 0


def test_awq_takes_no_scales_that_their_type_cannot_hold():
    """Some exponents scale a group beyond float16, which decodes it as NaN."""
    w_KN, x_TK = problem(64, 8, 7)
    x_TK[:, 0] *= 300
    w_KN[0] *= 1e5
    fmt = Format(4, 32, 0, scale_dtype="float16")
    assert np.isfinite(np.asarray(dequantize(quantize(w_KN, fmt)))).all()
    q, scale_K = awq(w_KN, x_TK, fmt)
    used = np.asarray(dequantize(q), np.float64) / np.asarray(scale_K, np.float64)[:, None]
    assert np.isfinite(used).all()
    lost = ((x_TK.astype(np.float64) @ (used - w_KN)) ** 2).sum()
    assert lost <= 1.001 * error(x_TK, w_KN, quantize(w_KN, fmt))


def test_numpys_float64_is_jaxs_float32():
    """Else `dequantize` would warn of a type that JAX does not have."""
    w_KN = np.linspace(-1, 1, 32).reshape(16, 2)
    for q in (gptq(w_KN, w_KN.T, Format(4, 8, 0)), awq(w_KN, w_KN.T, Format(4, 8, 0))[0]):
        assert q.dtype == np.float32 and dequantize(q).dtype == np.float32


@pytest.mark.parametrize(
    "change, words",
    [
        ({"fmt": Format("e4m3", 32, 0)}, "bits must be an integer"),
        ({"fmt": Format(4, 32, 1)}, "axis=1 of the format must be 0"),
        ({"x": np.ones((3, 7), np.float32)}, "16 rows, and the calibration is of 7"),
        ({"x": np.ones((0, 16), np.float32)}, "no token"),
        ({"x": np.full((3, 16), np.nan, np.float32)}, "not all finite"),
        ({"x": np.full((3, 16), 1e25, np.float32)}, "sums of their products, are not all finite"),
        ({"w": np.ones((2, 2, 2), np.float32)}, "must be a matrix"),
        ({"w": np.ones((0, 2), np.float32), "x": np.ones((3, 0))}, "one input and one output at"),
        ({"w": np.ones((16, 0), np.float32)}, "one input and one output at least"),
        ({"w": np.full((16, 2), np.inf, np.float32)}, "not finite everywhere"),
    ],
)
def test_bad_input(change, words):
    arguments = {"w": np.ones((16, 2), np.float32), "x": np.ones((3, 16), np.float32)}
    arguments |= {"fmt": Format(4, 8, 0)} | change
    for method in (gptq, awq):
        with pytest.raises(UserError, match=words):
            method(arguments["w"], arguments["x"], arguments["fmt"])


def test_settings_of_another_type():
    w_KN, x_TK = np.ones((16, 2), np.float32), np.ones((3, 16), np.float32)
    for damp in ("a", None, math.nan, 0):
        with pytest.raises(UserError, match=f"damp={damp!r} must be above 0"):
            gptq(w_KN, x_TK, Format(4, 8, 0), damp=damp)
    for grid in ("a", None, 1.5, 0):
        with pytest.raises(UserError, match=f"grid={grid!r} must be a whole number"):
            awq(w_KN, x_TK, Format(4, 8, 0), grid=grid)
