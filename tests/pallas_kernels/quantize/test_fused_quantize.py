"""The fused operations of SDP4Bit in plain JAX, against float64 NumPy written from the rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuned
from pallas_kernels.quantize import api, bench, cases, configs, counter, hopper
from pallas_kernels.quantize import bench as tunings

KEY = jax.random.key(3)


def sylvester():
    matrix = np.ones((1, 1))
    while len(matrix) < 32:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(32)


def unpacked(payload, n, bits, group):
    """Returns float64 (codes, scales) of rows of payloads, byte by byte."""
    payload = np.asarray(payload)
    size = n * bits // 8
    codes = payload[:, :size].astype(np.int64)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(payload), n)
    codes = np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
    scales = np.ascontiguousarray(payload[:, size:]).view("<f4").astype(np.float64)
    assert scales.shape == (len(payload), n // group)
    return codes, scales


def check(payload, exact, bits, group, worst=0.5):
    """A payload holds `exact` to `worst` of a step, with scales that are the groups' own."""
    rows, n = exact.shape
    codes, scales = unpacked(payload, n, bits, group)
    q = 2 ** (bits - 1) - 1
    want = np.abs(exact).reshape(rows, -1, group).max(-1) / q
    np.testing.assert_allclose(scales, want, rtol=1e-5)
    assert np.abs(codes).max() <= q
    apart = codes * np.repeat(scales, group, 1) - exact
    assert (np.abs(apart) <= (worst + 1e-3) * np.repeat(scales, group, 1)).all()
    return apart / np.repeat(scales, group, 1)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("random", [False, True])
def test_a_gradient_goes_to_its_ranks_in_their_order(random, seed):
    rows, nodes, chunk = 2, 3, 512
    x = normal(seed, rows * nodes * chunk).astype(np.float32)
    run = jax.jit(functools.partial(api.hadamard_quantize, rows=rows, nodes=nodes))
    payload = run(x, key=KEY if random else None)
    exact = (x.astype(np.float64).reshape(-1, 32) @ sylvester()).reshape(nodes, rows, chunk)
    for j in range(rows):
        row = np.concatenate([exact[i, j] for i in range(nodes)])
        apart = check(payload[j : j + 1], row[None], 8, 128, 1.0 if random else 0.5)
        assert not random or abs(apart.mean()) < 4 * np.sqrt(1 / 6 / apart.size)


def test_payloads_are_summed_and_sent_on(seed):
    senders, rows, n = 3, 2, 1024
    x = normal(seed, senders, n).astype(np.float32)

    @jax.jit
    def run(x):
        line = x.reshape(-1)  # a row for each sender
        sent = api.hadamard_quantize(line, rows=senders, hadamard=False)
        back = [api.reduce_hadamard(sent, n, bits=8, hadamard=h) for h in (True, False)]
        return sent, api.reduce_requantize(sent, n, rows=rows), *back

    sent, payload, back, plain = run(x)
    codes, scales = unpacked(sent, n, 8, 128)
    exact = (codes * np.repeat(scales, 128, 1)).sum(0)
    check(payload, exact.reshape(rows, -1), 4, 128)
    want = (exact.reshape(-1, 32) @ sylvester()).reshape(-1)
    np.testing.assert_allclose(back, want, atol=1e-5)
    np.testing.assert_allclose(plain, exact, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_follows_by_differences(dtype, seed):
    """The copy of n ranks' shards, each with its own group at the end, comes within half a step."""
    ranks, n, group = 2, 96, 64
    main = normal(seed, ranks, n).astype(np.float32)
    copy = jnp.asarray(main + 0.01 * normal(seed + 1, ranks, n), dtype)

    @jax.jit
    def run(main, copy):
        out = functools.partial(api.subtract_quantize, group=group)
        payload = jnp.stack([out(main[r], copy[r]) for r in range(ranks)])
        return api.dequantize_add(payload, copy.reshape(-1), group=group)

    new = run(main, copy)
    assert new.dtype == copy.dtype
    exact = main.astype(np.float64) - np.asarray(copy, np.float64)
    short = np.pad(exact, ((0, 0), (0, 32))).reshape(ranks, 2, group)
    steps = np.repeat(np.abs(short).max(-1) / 7, group, 1)[:, :n]
    rounding = 2.0**-8 * 4 if dtype == "bfloat16" else 1e-6
    apart = np.abs(np.asarray(new, np.float64).reshape(ranks, n) - main)
    assert (apart <= 0.5 * steps + rounding).all()
    assert apart.mean() < 0.7 * np.abs(exact).mean() or dtype == "bfloat16"


def test_groups_that_cannot_be_coded():
    x = np.zeros(256, np.float32)
    x[130], x[131] = np.inf, 1.0
    run = jax.jit(functools.partial(api.subtract_quantize, bits=8, group=128))
    payload = run(x, np.zeros(256, np.float32))
    codes, scales = unpacked(payload[None], 256, 8, 128)
    assert scales[0, 0] == 1 and np.isnan(scales[0, 1]) and not codes.any()


def test_counters_are_threefry_of_13_rounds():
    """Known answers of Random123 (kat_vectors, threefry2x32, 13 rounds)."""

    @jax.jit
    def run(key):
        zeros = [jnp.zeros(1, dtype) for dtype in (jnp.uint32, jnp.int32)]
        both = [counter.words(zero[0], zero[0], zero) for zero in zeros]
        return both, counter.noise(key, (4, 4096))

    both, noise = run(KEY)
    for words in both:
        assert [int(x[0]) % 2**32 for x in words] == [0x9D1C5EC6, 0x8BD50731]
    noise = np.asarray(noise, np.float64).reshape(-1)
    assert ((noise > 0) & (noise < 1)).all() and (noise * 2**17 % 2 == 1).all()
    counts, _ = np.histogram(noise, 64, (0, 1))
    assert ((counts - 256) ** 2 / 256).sum() < 110  # 63 degrees of freedom: 1 in 4,000
    for lag in (1, 2, 3, 4, 5):
        assert abs(np.corrcoef(noise[lag:], noise[:-lag])[0, 1]) < 4 / np.sqrt(noise.size)
    again = np.asarray(run(jax.random.key(4))[1]).reshape(-1)
    assert (again != noise).mean() > 0.999
    with pytest.raises(ValueError, match="4294967296 at most"):
        jax.eval_shape(lambda: counter.noise(KEY, (2**17, 2**16)))


X = jnp.ones(8192)
SENT = jnp.zeros((2, 8192 + 256), jnp.uint8)
WRONG = [
    (lambda: api.hadamard_quantize(X[None], rows=1), "x_N float32.*one line"),
    (lambda: api.hadamard_quantize(X.astype(int), rows=1), "float32 or bfloat16"),
    (lambda: api.hadamard_quantize(X, rows=3), "multiple of 96 .*nearest: 8160, 8256"),
    (lambda: api.hadamard_quantize(X, rows=1, bits=5), "bits=5 must be one of"),
    (lambda: api.hadamard_quantize(X, rows=1, group=0), "group=0 must be at least 1"),
    (lambda: api.hadamard_quantize(X, rows=1, key=7), "key must be one jax.random.key"),
    (lambda: api.reduce_hadamard(SENT, 8192), r"uint8 \(2, 4352\)"),
    (lambda: api.reduce_requantize(SENT.astype(int), 8192, rows=2), "must be uint8"),
    (lambda: api.reduce_requantize(SENT[:0], 8192, rows=2), "give at least 1"),
    (lambda: api.reduce_requantize(SENT, 8192, rows=3), "nearest: 8190, 8193"),
    (lambda: api.subtract_quantize(X, X[:-1]), "as long as main_N"),
    (lambda: api.subtract_quantize(X.astype(jnp.bfloat16), X), "main_N bfloat16"),
    (lambda: api.dequantize_add(SENT, X[:-1]), "copy_N has 8191"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        call()


KERNELS = [
    (lambda **o: api.hadamard_quantize(X[:4096], rows=1, group=64, **o), "groups of 128, 256"),
    (lambda **o: api.hadamard_quantize(X[:4096], rows=2, **o), "multiple of 4096 elements"),
    (lambda **o: api.hadamard_quantize(X, rows=1, bits=2, **o), "codes of 2 bits"),
    (lambda **o: api.reduce_requantize(SENT, 8192, rows=1, new_bits=8, **o), "codes of 8 bits"),
    (lambda **o: api.reduce_requantize(jnp.tile(SENT, (9, 1)), 8192, rows=1, **o), "at most 16"),
    (lambda **o: api.subtract_quantize(X[:2048], X[:2048], **o), "multiple of 8192 elements"),
    (lambda **o: api.subtract_quantize(X[:-1], X[:-1], **o), "whole groups of 2048"),
]


@pytest.mark.parametrize(("call", "message"), KERNELS)
def test_what_kernels_refuse_goes_to_plain_jax(call, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda: call(implementation="interpret"))
    assert jax.eval_shape(call).dtype == jnp.uint8


def test_floors():
    case = cases.Case("x", "hadamard_quantize", 2**20, 2, bits=8)
    assert case.bytes() == 2**20 * (4 + 1 + 4 / 128)
    case = cases.Case("x", "reduce_requantize", 2**20, 8, pieces=4, bits=8)
    assert case.bytes() == 2**20 * (8 * (1 + 4 / 128) + 0.5 + 4 / 128)
    case = cases.Case("x", "dequantize_add", 2**20, 4, group=2048, wide=False)
    assert case.bytes() == 2**20 * (0.5 + 4 / 2048 + 4)
    assert all(case.bytes() >= 64e6 for case in cases.CASES)
    assert all(case.floor_s() == case.bytes() / 4.8e12 for case in cases.CASES)
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)


def test_what_is_tuned_is_what_a_call_asks_for(monkeypatch):
    """The case's problem, key and arguments are those of the public function."""
    asked = []
    monkeypatch.setattr(tuned, "find", lambda op, key: asked.append((op, key)))
    every = list(tunings.tunings())
    assert len(every) == len(cases.CASES)
    for case, tuning in zip(cases.CASES, every, strict=True):
        jax.eval_shape(bench.call(case, None), *bench.numbers(case))
        assert asked.pop() == (tuning.op, tuning.key) and not asked
        problem, _, args = configs.kernel(case)
        tiles = tuning.candidates
        assert tiles[0] == hopper.heuristic(problem) and len(tiles) == len(set(tiles))
        assert not [reason for tile in tiles for reason in hopper.misfits(problem, tile)]
        like = jax.eval_shape(tuning.inputs, jax.random.key(0))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), like) == jax.tree.map(
            lambda x: (x.shape, x.dtype), args
        )
