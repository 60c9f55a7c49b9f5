"""Codecs against NumPy: every byte of a payload, its length, what comes back; LoCo's errors."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.quant import Feedback, codec, dequantize, hadamard
from megajax.quant.codecs import NAMES
from tests import quant_oracle as oracle

LEVELS = {
    "fp8": ("e4m3", 128),
    "int8": (8, 128),
    "int4": (4, 128),
    "zeropp.weights": (8, 2048),
    "zeropp.inside": (4, 128),
    "sdp4bit.weights": (4, 2048),
    "sdp4bit.inside": (8, 128),
    "sdp4bit.between": (4, 128),
    "loco.between": (4, 128),
}


def level(name, **options):
    name, _, place = name.partition(".")
    made = codec(name, **options)
    return getattr(made, place) if place else made


def both(coder, n):
    """encode and decode in one program."""

    def run(x_LN, key):
        payload_LP = coder.encode(x_LN, key)
        return payload_LP, coder.decode(payload_LP, n)

    return jax.jit(run)


@pytest.mark.parametrize(
    "name, n",
    [
        *(("int4", n) for n in (1, 31, 32, 33, 127, 2049)),
        *(("sdp4bit.weights", n) for n in (33, 2049)),
        *((name, n) for name in ("fp8", "int8") for n in (1, 33, 2049)),
    ],
)
def test_payloads_are_those_of_numpy(name, n):
    coder, (bits, group) = level(name, rounding="nearest"), LEVELS[name]
    x_LN = oracle.hard_lines(n, n)
    payload_LP, y_LN = both(coder, n)(x_LN, None)
    assert payload_LP.dtype == jnp.uint8 and payload_LP.shape == (len(x_LN), coder.wire_bytes(n))
    for x_N, payload_P, y_N in zip(x_LN, np.asarray(payload_LP), np.asarray(y_LN), strict=True):
        wanted_P = oracle.payload(x_N, bits, group)
        np.testing.assert_array_equal(payload_P, wanted_P)
        code_N, scale_G = oracle.quantize(x_N, bits, group)
        with np.errstate(under="ignore"):
            wanted_N = oracle.flushed(oracle.dequantize(code_N, scale_G, group))
        np.testing.assert_array_equal(y_N, wanted_N)


def test_a_large_payload():
    n, coder = 2**22, level("sdp4bit.between", rounding="nearest")
    x_N = np.random.default_rng(0).standard_normal(n).astype(np.float32)
    payload_P = np.asarray(jax.jit(coder.encode)(x_N))
    np.testing.assert_array_equal(payload_P, oracle.payload(x_N, 4, 128))
    assert payload_P.size == coder.wire_bytes(n) == n * 17 // 32  # 4.25 bits an element


def test_floats_are_sent_as_they_are(seed):
    x_LN = oracle.hard_lines(33, seed)
    x_LN[0, :3] = np.inf, -np.inf, np.nan
    payload, y = both(codec("none"), 33)(x_LN, None)
    assert np.asarray(payload).tobytes() == x_LN.tobytes() and codec("none").wire_bytes(33) == 132
    np.testing.assert_array_equal(y, x_LN)
    payload, y = both(codec("bf16"), 33)(x_LN, None)
    expected = jnp.asarray(x_LN).astype(jnp.bfloat16)
    assert np.asarray(payload).tobytes() == np.asarray(expected).tobytes()
    np.testing.assert_array_equal(y, expected.astype(jnp.float32))


@pytest.mark.parametrize("name", sorted(LEVELS))
def test_bytes_and_bits(name):
    coder, (bits, group) = level(name), LEVELS[name]
    width = 8 if bits == "e4m3" else bits
    assert (coder.format.bits, coder.format.group) == (bits, group)
    assert coder.effective_bits == width + 32 / group
    assert coder.wire_bytes(8 * group) * 8 == coder.effective_bits * 8 * group
    for n in (0, 1, 31, 129):
        assert jax.eval_shape(
            coder.encode, np.zeros(n), jax.random.key(0)
        ).size == coder.wire_bytes(n)
    assert coder.wire_bytes(1) == 1 + 4


def test_what_codecs_are():
    sdp4bit = codec("sdp4bit")
    assert [sdp4bit.weights.effective_bits, sdp4bit.inside.effective_bits] == [4.015625, 8.25]
    assert sdp4bit.between.effective_bits == 4.25 and sdp4bit.hadamard == 32
    assert [c.stochastic for c in sdp4bit.levels or ()] == [False, True, True]
    nearest = codec("sdp4bit", rounding="nearest")
    assert not any(c.stochastic for c in nearest.levels or ())
    assert codec("loco").feedback and not codec("zeropp").hadamard
    for name in NAMES:
        one = codec(name)
        assert hash(one) == hash(codec(name)) and one == codec(name)
        assert bool(one.levels) or one.weights is one.inside is one.between is one


def test_the_page_says_what_codecs_are():
    text = (pathlib.Path(__file__).parent.parent.parent / "docs" / "quantization.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    coders = [(n, (c.weights, c.inside, c.between)) for n, c in ((n, codec(n)) for n in NAMES)]
    assert [(n, *map(float, bits)) for n, *bits in rows] == [
        (n, *(c.effective_bits for c in levels)) for n, levels in coders
    ]


@pytest.mark.parametrize("name", ["int4", "bf16"])
def test_rows_keys_and_cuts(name, seed):
    """One key: the same bits for one row of many, and however rows are cut over devices."""
    n, coder = 200, codec(name, rounding="stochastic")
    x_LN = jnp.asarray(oracle.hard_lines(n, seed)[[0, 1, 2, 0, 1, 2, 0, 1]])
    key, other = jax.random.key(1), jax.random.key(2)
    encode = jax.jit(coder.encode)
    payload_LP = np.asarray(encode(x_LN, key))
    np.testing.assert_array_equal(encode(x_LN[0], key), payload_LP[0])
    assert (payload_LP[0] != payload_LP[3]).any()  # rows of one key have numbers of their own
    assert (encode(x_LN, other) != payload_LP).any()
    mesh = jax.make_mesh((8,), ("d",), (jax.sharding.AxisType.Auto,))
    cut = jax.NamedSharding(mesh, jax.P("d"))
    np.testing.assert_array_equal(encode(jax.device_put(x_LN, cut), key), payload_LP)
    keys = jax.random.split(key, 8)
    mapped_LP = np.asarray(jax.jit(jax.vmap(coder.encode))(x_LN, keys))
    np.testing.assert_array_equal(mapped_LP[5], encode(x_LN[5], keys[5]))


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_what_is_not_finite_shows(name):
    x_N = np.ones(300, np.float32)
    x_N[5], x_N[130] = np.inf, np.nan
    payload_P, y_N = both(codec(name), 300)(x_N, None)
    assert np.isnan(y_N[:256]).all()
    np.testing.assert_allclose(y_N[256:], 1, rtol=1e-6)
    np.testing.assert_array_equal(payload_P, oracle.payload(x_N, *LEVELS[name]))


def test_sums_have_the_same_bits_in_every_program(seed):
    """No compiler fuses the product of decoding with the sum that follows."""
    coder = codec("int8")
    payload_LP, y_LN = map(np.asarray, both(coder, 640)(oracle.hard_lines(640, seed)[:2], None))

    def fused(p_LP):
        y_LN = coder.decode(p_LP, 640)
        return y_LN.sum(0), hadamard(y_LN)

    # Tests run programs that are not optimised (tests/xla_options.py), and those fuse nothing.
    options = {"xla_backend_optimization_level": 3}
    total_N, smooth_LN = jax.jit(fused, compiler_options=options)(payload_LP)
    np.testing.assert_array_equal(total_N, y_LN[0] + y_LN[1])
    np.testing.assert_array_equal(smooth_LN, jax.jit(hadamard)(y_LN))


def test_bfloat16_is_unbiased_too(seed):
    """Up to the next of the two neighbours with the probability of the fraction."""
    x_N = np.random.default_rng(seed).uniform(1, 2, 2**16).astype(np.float32)
    key = jax.random.key(seed)
    _, y_N = both(codec("bf16", rounding="stochastic"), x_N.size)(x_N, key)
    fraction = np.mod(x_N.astype(np.float64), 2**-7) * 2**7
    error = (np.asarray(y_N, np.float64) - x_N) * 2**7
    variance = (fraction * (1 - fraction)).mean()
    assert np.abs(error).max() < 1 and abs((error**2).mean() / variance - 1) < 0.02
    assert abs(error.mean()) < 5 * (variance / x_N.size) ** 0.5


def test_transform_and_restore(seed):
    x_N = np.random.default_rng(seed).standard_normal(70).astype(np.float32)
    coder = codec("sdp4bit")
    sent_M = jax.jit(coder.transform)(x_N)
    np.testing.assert_allclose(sent_M, oracle.hadamard(np.pad(x_N, (0, 26)), 32), atol=1e-6)
    back_N = jax.jit(coder.restore, static_argnums=1)(sent_M, 70)
    np.testing.assert_allclose(back_N, x_N, atol=1e-6)
    assert codec("int4").transform(x_N) is x_N
    np.testing.assert_array_equal(codec("int4").restore(x_N, 60), x_N[:60])


def test_errors_come_back(seed):
    """Of a constant gradient, what is received in the mean of T steps tends to it as 1/T; without
    feedback it does not. The kept error follows LoCo's rule, and is dropped at a reset."""
    coder, feedback = codec("loco").between, Feedback(beta=0.5, reset=200)
    g_N = np.random.default_rng(seed).standard_normal(300).astype(np.float32)

    @jax.jit
    def run(error, step):
        sent = feedback.compensate(g_N, error)
        received = coder.decode(coder.encode(sent), 300)
        return feedback.update(sent, received, error, step), (sent, received)

    error, (_, received_TN) = jax.lax.scan(run, feedback.start(300), jnp.arange(199))
    received_TN = np.asarray(received_TN)
    bias, without = (np.abs(m - g_N).max() for m in (received_TN.mean(0), received_TN[0]))
    assert bias < without / 15
    value = jax.jit(lambda e: dequantize(e))
    kept_N = np.asarray(value(error))
    after, (sent_N, received_N) = run(error, 100)
    wanted_N = 0.5 * kept_N + 0.5 * (np.asarray(sent_N) - np.asarray(received_N))
    assert np.abs(value(after) - wanted_N).max() <= np.max(after.scales) * 0.501
    assert after.nbytes == 300 + 3 * 4
    assert not np.asarray(value(run(error, 199)[0])).any()
    sent_N = np.where(np.arange(300) == 7, np.nan, np.asarray(sent_N))
    poisoned = jax.jit(feedback.update)(sent_N, received_N, error, 100)
    assert np.isfinite(value(poisoned)).all() and np.any(poisoned.values)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: codec("sdp4"), "Did you mean sdp4bit"),
        (lambda: codec("int4", rounding="stochastics"), "Did you mean stochastic"),
        (lambda: codec("int4", rounding="stochastic").encode(np.ones(3, np.float32)), "needs a r"),
        (lambda: codec("sdp4bit").encode(np.ones(3, np.float32)), "use its .weights.encode"),
        (lambda: codec("loco").wire_bytes(3), "use its .weights.wire_bytes"),
        (lambda: codec("int4").encode(np.ones(3, np.int32)), "floating"),
        (lambda: codec("int4").encode([1.0]), "jnp.asarray"),
        (lambda: codec("int4").encode(np.float32(1)), "x.reshape"),
        (lambda: codec("int4").decode(np.zeros(7, np.uint8), 3), "dimension of 6, got uint8"),
        (lambda: codec("int4").wire_bytes(-1), "from 0 on"),
        (lambda: Feedback(beta=0.0), "above 0"),
        (lambda: Feedback(reset=0), "at least 1"),
    ],
)
def test_bad_calls_are_explained(call, message):
    with pytest.raises(UserError, match=message):
        call()
