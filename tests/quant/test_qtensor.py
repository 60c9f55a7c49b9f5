"""QTensor against NumPy: codes, scales, zero points, packing; as a pytree and in a checkpoint."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megajax.checkpoint import CheckpointManager
from megajax.core.errors import UserError
from megajax.quant import Format, dequantize, quantize
from pallas_kernels.quantize import reference
from tests import quant_oracle as oracle

compiled = jax.jit(quantize, static_argnums=1)
restored = jax.jit(dequantize, static_argnums=1)


def lines(x, axis):
    """Returns (lines, N) of an array, and what makes the array of such lines again."""
    if axis is None:
        return x.reshape(1, -1), lambda y: y.reshape(x.shape)
    moved = np.moveaxis(x, axis, -1)
    flat = moved.reshape(-1, moved.shape[-1])
    return flat, lambda y: np.moveaxis(y.reshape(moved.shape), -1, axis)


@pytest.mark.parametrize(
    "bits, axis, group",
    [
        *((3, axis, group) for axis, group in ((None, None), (0, None), (1, 3), (-1, 16))),
        *((bits, None, 128) for bits in (2, 3, 4, 8, "e4m3", "e5m2")),
        *((bits, 1, 3) for bits in (4, "e5m2")),
    ],
)
def test_symmetric_is_numpys(bits, axis, group, seed):
    x = np.random.default_rng(seed).standard_t(3, (5, 7, 33)).astype(np.float32)
    q = compiled(x, Format(bits, group, axis))
    x_LN, back = lines(x, axis)
    size = group or x_LN.shape[1]
    quantized = [oracle.quantize(x_N, bits, size) for x_N in x_LN]
    expected = np.stack([oracle.dequantize(*f, size) for f in quantized])
    np.testing.assert_array_equal(restored(q), back(expected))
    values_LP = lines(np.asarray(q.values), axis)[0]
    np.testing.assert_array_equal(values_LP, [oracle.pack(f[0], bits) for f in quantized])
    np.testing.assert_array_equal(lines(np.asarray(q.scales), axis)[0], [f[1] for f in quantized])
    assert (q.shape, q.dtype, q.zeros, q.ndim, q.size) == (x.shape, np.float32, None, 3, x.size)
    assert q.nbytes == q.values.size + 4 * q.scales.size


@pytest.mark.parametrize(
    "bits, dtype",
    [
        (2, "float32"),
        (3, "bfloat16"),
        (4, "float32"),
        (4, "float16"),
        (8, "float32"),
        (8, "float16"),
    ],
)
def test_zero_points(bits, dtype, seed):
    """In float64: zero is the group's least number, s its range / Q, each code the nearest."""
    random = np.random.default_rng(seed)
    x = (random.standard_normal((40, 3)) + [0, 5, -70]).astype(np.float32)
    x[:16, 0], x[16:20, 0] = -2.5, 3.0
    q = compiled(x, Format(bits, 16, 0, symmetric=False, scale_dtype=dtype))
    largest, eps = 2**bits - 1, {"float32": 2e-7, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    y, scales, zeros = (np.asarray(v, np.float64) for v in (restored(q), q.scales, q.zeros))
    code = np.asarray(reference.unpack(q.values.T, 40, bits, signed=False)).T
    assert q.scales.dtype == q.zeros.dtype == dtype and code.min() == 0 and code.max() == largest
    for g in range(3):  # the last has 8
        at = slice(16 * g, 16 * g + 16)
        lo, hi = x[at].min(0).astype(np.float64), x[at].max(0)
        assert (zeros[g] <= lo).all() and (lo - zeros[g] <= eps * np.abs(lo)).all()
        s = (hi - zeros[g]) / largest
        constant = (g == 0) * np.array([1, 0, 0], bool)
        s = np.where(constant, 1, s)
        assert (scales[g] >= s * (1 - 2e-7)).all() and (scales[g] <= s * (1 + eps)).all()
        near = np.abs((x[at] - zeros[g]) / scales[g] - code[at])
        assert near.max() <= 0.5 * (1 + 1e-4)
        np.testing.assert_allclose(y[at], zeros[g] + code[at] * scales[g], rtol=3e-7, atol=1e-6)
    if dtype == "float32":
        assert (y[:16, 0] == -2.5).all()


@pytest.mark.parametrize("bits, dtype", [(4, "bfloat16"), (8, "float16"), ("e4m3", "bfloat16")])
def test_scales_of_16_bits_are_rounded_up(dtype, bits, seed):
    x = np.random.default_rng(seed).standard_normal(4096).astype(np.float32)
    x *= np.repeat(np.float32(10.0) ** np.arange(-5, 3), 512)
    q = compiled(x, Format(bits, 128, scale_dtype=dtype))
    kind = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    s = oracle.quantize(x, bits, 128)[1]
    near = s.astype(kind)
    above = np.nextafter(near, kind(np.inf))
    np.testing.assert_array_equal(q.scales, np.where(near.astype(np.float32) < s, above, near))
    step = oracle.largest(bits) / 14 if bits == "e4m3" else 1  # of neighbours at the largest code
    error = np.abs(np.asarray(restored(q)) - x).reshape(-1, 128).max(1)
    assert (error <= np.asarray(q.scales).astype(np.float32) * step * 0.5001).all()


def test_what_16_bits_cannot_scale_shows():
    x = np.array([1e6, 1, -1e6], np.float32)
    assert np.isfinite(restored(compiled(x, Format(8, 128, scale_dtype="float16")))).all()
    for symmetric in (True, False):
        fmt = Format(4, 128, symmetric=symmetric, scale_dtype="float16")
        assert np.isnan(restored(compiled(x, fmt))).all()
    most = np.full(3, np.finfo(np.float32).max)
    y = restored(compiled(most, Format(4, scale_dtype="bfloat16")))
    np.testing.assert_allclose(y, most, rtol=2**-7)


@pytest.mark.parametrize("bits", [2, 8])
def test_zero_points_of_hard_groups(bits):
    big, nan, inf = 3.4e38, np.nan, np.inf
    x = np.array([[big, -big, big / 2], [nan, 1, 2], [inf, 1, 2], [-inf, 1, 2], [1e-39, 2e-39, 0],
                  [0, 0, 0], [big, big, big]], np.float32)  # fmt: skip
    y = np.asarray(restored(compiled(x, Format(bits, None, -1, symmetric=False))))
    step = 2 * big / (2**bits - 1)
    assert np.abs(y[0] / step - x[0] / step).max() <= 0.5001
    assert np.isnan(y[1:4]).all() and not y[4:6].any() and (y[6] == x[6]).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_code_survives_packing(bits):
    signed = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).astype(np.int8)
    many = np.random.default_rng(0).permutation(np.tile(signed, 5))
    codes = np.concatenate([signed, many, signed[:1]])
    for unpacked, kind in ((codes, {}), (codes.view(np.uint8) & (2**bits - 1), {"signed": False})):
        packed = reference.pack(jnp.asarray(unpacked), bits)
        np.testing.assert_array_equal(packed, oracle.pack(unpacked, bits))
        np.testing.assert_array_equal(
            reference.unpack(packed, len(unpacked), bits, **kind), unpacked
        )
    if bits == 4:
        pairs = jax.lax.bitcast_convert_type(packed, jnp.uint4).reshape(-1)
        np.testing.assert_array_equal(pairs.astype(jnp.uint8)[: len(unpacked)], unpacked)


@pytest.mark.parametrize("bits", ["e4m3", "e5m2"])
def test_every_code_of_8_bit_floats_is_kept(bits):
    """With the largest number among them, so that the scale is 1; both ways of rounding."""
    every = np.arange(256, dtype=np.uint8).view(oracle.FLOATS[bits])
    x = every[np.isfinite(every.astype(np.float32))].astype(np.float32)
    np.testing.assert_array_equal(restored(compiled(x, Format(bits, None))), x)
    fmt = Format(bits, None, rounding="stochastic")
    np.testing.assert_array_equal(restored(compiled(x, fmt, key=jax.random.key(0))), x)


@pytest.mark.parametrize(
    "bits, symmetric", [(4, True), (8, True), ("e4m3", True), ("e5m2", True), (4, False)]
)
def test_stochastic_rounding_is_unbiased_with_its_variance(bits, symmetric, seed):
    """The code is one of the two beside y, up with the probability of the fraction."""
    x = np.random.default_rng(seed).uniform(-1, 1, 2**18).astype(np.float32)
    fmt = Format(bits, None, symmetric=symmetric, rounding="stochastic")
    q = compiled(x, fmt, key=jax.random.key(seed))
    y, s = np.asarray(restored(q), np.float64), float(q.scales[0])
    step = s
    if isinstance(bits, str):  # of the type, at x
        mantissa, least = reference.FLOATS[bits]
        step = s * 2.0 ** (np.maximum(np.floor(np.log2(np.abs(x / s))), least) - mantissa)
    zero = 0.0 if q.zeros is None else float(q.zeros[0])
    fraction = (x - zero) / step - np.floor((x - zero) / step)
    error = (y - x) / step
    variance = (fraction * (1 - fraction)).mean()
    assert np.abs(error).max() < 1 + 1e-4
    assert abs(error.mean()) < 5 * (variance / x.size) ** 0.5
    assert abs((error**2).mean() / variance - 1) < 0.02
    up = error > -fraction + 0.5  # the code above y
    for low in (0.0, 0.25, 0.5, 0.75):
        some = (fraction > low) & (fraction < low + 0.25)
        assert abs(up[some].mean() - fraction[some].mean()) < 4 / some.sum() ** 0.5


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_types(dtype, seed):
    x = np.random.default_rng(seed).standard_normal(33).astype(jnp.dtype(dtype))
    q = compiled(x, Format(4, 16, -1))
    expected = oracle.quantize(x.astype(np.float32), 4, 16)
    np.testing.assert_array_equal(q.scales, expected[1])
    y, wide = restored(q), restored(q, "float32")
    assert q.dtype == y.dtype == dtype and wide.dtype == "float32"
    np.testing.assert_array_equal(wide, oracle.dequantize(*expected, 16))
    np.testing.assert_array_equal(y, np.asarray(wide).astype(y.dtype))


def test_keys_and_cuts(seed):
    """The same key and shape give the same bits: eager, compiled, mapped, and cut over a mesh."""
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((64, 16)), jnp.float32)
    fmt, key = Format(4, 32, 0, rounding="stochastic"), jax.random.key(0)
    q, other = compiled(x, fmt, key=key), compiled(x, fmt, key=jax.random.key(1))
    mesh = jax.make_mesh((8,), ("d",))
    cut = jax.NamedSharding(mesh, jax.P(None, "d"))
    with jax.set_mesh(mesh):
        split = compiled(jax.device_put(x, cut), fmt, key=key)
        assert split.values.sharding.spec == split.scales.sharding.spec == jax.P(None, "d")
        decoded = jax.jit(dequantize)(split)
    for quantized in (quantize(x, fmt, key=key), split):
        jax.tree.map(np.testing.assert_array_equal, quantized, q)
    np.testing.assert_array_equal(decoded, restored(q))
    assert (other.values != q.values).any()
    keys = jax.random.split(key, 3)
    mapped = jax.jit(jax.vmap(lambda k: quantize(x, fmt, key=k)))(keys)
    assert mapped.shape == x.shape and mapped.values.shape == (3, *q.values.shape)
    third = jax.tree.map(lambda v: v[2], mapped)
    decoded = jax.jit(jax.vmap(dequantize))(mapped)
    np.testing.assert_array_equal(decoded[2], restored(third))
    np.testing.assert_array_equal(third.values, compiled(x, fmt, key=keys[2]).values)


def test_checkpoints_keep_it(tmp_path, seed):
    x = np.random.default_rng(seed).standard_normal((6, 40)).astype(np.float32)
    formats = [Format(3, 16, -1, symmetric=False, scale_dtype="bfloat16"), Format("e4m3")]
    state = {"w": [compiled(x, fmt) for fmt in formats]}
    manager = CheckpointManager(tmp_path / "run")
    manager.save(1, state).result()
    loaded = manager.restore(1, like=jax.tree.map(jnp.zeros_like, state))
    manager.close()
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, loaded, state)
    np.testing.assert_array_equal(restored(loaded["w"][0]), restored(state["w"][0]))


def test_empty_and_single():
    for fmt in (Format(4), Format(8, None, symmetric=False)):
        assert restored(compiled(np.zeros((0, 3)), fmt)).shape == (0, 3)
        assert restored(compiled(np.float32(2.5), fmt)) == 2.5


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: quantize(x, 4), "Format"),
        (lambda x: quantize(x, Format(4, axis=2)), "-2 to 1"),
        (lambda x: quantize(x[0, 0], Format(4, axis=0)), "axis=None"),
        (lambda x: quantize(x.astype(np.int32), Format(4)), "x.astype"),
        (lambda x: quantize([1.0], Format(4)), "jnp.asarray"),
        (lambda x: quantize(x, Format(4, rounding="stochastic")), "needs a random key"),
        (lambda x: dequantize(x), "must be a QTensor"),
    ],
)
def test_bad_calls_are_explained(call, message):
    with pytest.raises(UserError, match=message):
        call(np.ones((2, 3), np.float32))


def test_a_stack_is_refused_and_decoded_one_by_one():
    """Its first dimension is the layers', not the one that the codes lie along."""
    x = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(np.float32)
    for fmt in (Format(4, 4, 0), Format(8, 4, -1), Format(4, 4)):
        each = [quantize(w, fmt) for w in x]
        stack = jax.tree.map(lambda *w: jnp.stack(w), *each)
        with pytest.raises(UserError, match=r"stands for the shape \(8, 4\), .* take one"):
            dequantize(stack)
        expected = np.stack([dequantize(q) for q in each])
        np.testing.assert_array_equal(jax.vmap(dequantize)(stack), expected)
