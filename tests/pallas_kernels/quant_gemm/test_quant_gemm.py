"""quant_matmul and pack_weight by the reference, against float64 NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, reshard
from jax.sharding import PartitionSpec as P

from megajax import quant
from pallas_kernels import pack_weight, quant_matmul
from pallas_kernels.quant_gemm import api
from tests import quant_gemm_oracle as oracle
from tests import quant_oracle, tables
from tests.gemm_oracle import activate

SLOW = pytest.mark.slow
QUICK = (4, True, "bfloat16")
ROWS = (1, 3, 16, 63, 64, 1000)
BITS, GROUPS = (2, 3, 4, 8), (32, 64, 128, 0)  # 0: one group, None
K, N = 203, 37  # divide no group, and no piece of codes


def weight(seed, bits, group, signed, sizes=(K, N)):
    """(packed, scales, zeros or None)."""
    codes = oracle.codes(seed, *sizes, bits, signed)
    scales, zeros = oracle.numbers(seed, *sizes, group or sizes[0], signed)
    return pack_weight(codes, bits=bits), scales, zeros


def close(result, want, dtype):
    """Float32 sums, whose errors go with the size of all results, and one rounding."""
    step = {"float32": 2**-20, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    error = np.abs(np.asarray(result, np.float64) - want)
    assert result.dtype == dtype and result.shape == want.shape
    assert (error <= step * np.abs(want) + 2e-6 * np.abs(want).max()).all(), error.max()


@pytest.mark.parametrize(
    ("bits", "signed", "dtype"),
    [
        pytest.param(bits, signed, dtype, marks=() if (bits, signed, dtype) == QUICK else SLOW)
        for bits in BITS
        for signed in (True, False)
        for dtype in ("float32", "bfloat16")
    ],
)
def test_every_group_and_number_of_rows(bits, signed, dtype, seed):
    """All in one program; bits of the last byte that are no code are random."""
    weights = {group: weight(seed, bits, group, signed) for group in GROUPS}
    x_MK = np.random.default_rng(seed).standard_normal((max(ROWS), K)).astype(oracle.TYPES[dtype])
    spare = 8 * weights[32][0].shape[0] - K * bits
    noise = np.zeros((8 * weights[32][0].shape[0], N), np.uint8)
    noise[K * bits :] = np.random.default_rng(seed).integers(0, 2, (spare, N))
    noise = np.packbits(noise, axis=0, bitorder="little")
    weights = {g: (np.asarray(p) | noise, s, z) for g, (p, s, z) in weights.items()}

    @jax.jit
    def all_of(x_MK, weights):
        return {
            (group, rows): quant_matmul(
                x_MK[:rows], p, scales, bits=bits, group=group or None, zeros=z
            )
            for (group, (p, scales, z)), rows in itertools.product(weights.items(), ROWS)
        }

    results = all_of(x_MK, weights)
    assert len(results) == len(GROUPS) * len(ROWS)
    for group, (packed, scales, zeros) in weights.items():
        w = oracle.dequantize(packed, scales, zeros, K, bits, group or K)
        for rows in ROWS:
            close(results[group, rows], oracle.product(x_MK[:rows], w, dtype=dtype)[0], dtype)


@pytest.mark.parametrize("bits", [3, *(pytest.param(b, marks=SLOW) for b in (2, 4, 8))])
def test_packed_bytes_are_those_of_a_qtensor(bits, seed):
    """By streams of bits too; the product is that of the dequantized array, with zeros as well."""
    w_KN = np.random.default_rng(seed).standard_normal((K, N)).astype(np.float32)
    codes = oracle.codes(seed, K, N, bits, True)
    want = np.stack([quant_oracle.pack(codes[:, n], bits) for n in range(N)], 1)
    np.testing.assert_array_equal(pack_weight(codes, bits=bits), want)
    for symmetric in (True, False):
        q = quant.quantize(w_KN, quant.Format(bits, 32, axis=0, symmetric=symmetric))
        got = oracle.unpack(q.values, K, bits, symmetric)
        repacked = pack_weight(got.astype(np.int32), bits=bits)
        np.testing.assert_array_equal(repacked, q.values)
        y = quant_matmul(
            np.eye(K, dtype=np.float32), q.values, q.scales, bits=bits, group=32, zeros=q.zeros
        )
        np.testing.assert_array_equal(y, quant.dequantize(q))


def test_a_gptq_zero_point_becomes_a_number(seed):
    """The line of the docstring: (code - z) scale is zeros + code scale with zeros = -z scale."""
    codes = oracle.codes(seed, K, N, 4, False)
    scales, _ = oracle.numbers(seed, K, N, 32, True)
    z = np.random.default_rng(seed).integers(0, 16, scales.shape)
    group_K = np.arange(K) // 32
    want = (codes - z[group_K].astype(np.float64)) * scales.astype(np.float64)[group_K]
    zeros = (-z * scales).astype(np.float32)
    y = quant_matmul(
        np.eye(K, dtype=np.float32),
        pack_weight(codes, bits=4),
        scales,
        bits=4,
        group=32,
        zeros=zeros,
    )
    np.testing.assert_allclose(y, want, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "implementation"),
    [
        ("silu", None),
        *(pytest.param(a, i, marks=SLOW) for a in (None, "gelu") for i in ("reference", None)),
    ],
    ids=str,
)
def test_gradients_are_those_of_float64(activation, implementation, seed, monkeypatch):
    """Two leading dimensions, bias; the reference as it is, and the rule that kernels have."""
    if implementation is None:
        monkeypatch.setattr(api.tuned, "target", lambda: tables.H100)
    packed, scales, zeros = weight(seed, 4, 32, False)
    random = np.random.default_rng(seed)
    x, dy = random.standard_normal((2, 3, K)), random.standard_normal((2, 3, N))
    operands = {"x": x, "scales": scales, "zeros": zeros, "bias": random.standard_normal(N)}
    operands = {name: jnp.asarray(value, jnp.float32) for name, value in operands.items()}

    @jax.jit
    def run(operands):
        def call(operands):
            return quant_matmul(
                operands["x"],
                packed,
                operands["scales"],
                bits=4,
                group=32,
                zeros=operands["zeros"],
                bias=operands["bias"],
                activation=activation,
                implementation=implementation,
            )

        y, pull = jax.vjp(call, operands)
        return y, pull(jnp.asarray(dy, y.dtype))[0]

    y, grads = run(operands)
    w = oracle.dequantize(packed, scales, zeros, K, 4, 32)
    want, z = oracle.product(operands["x"], w, operands["bias"], activation)
    np.testing.assert_allclose(y, want, atol=2e-5)
    dz = (dy * activate(activation, z)[1]).reshape(6, N)
    dw = x.reshape(6, K).T @ dz
    starts = np.arange(0, K, 32)
    expected = {
        "x": (dz @ w.T).reshape(x.shape),
        "scales": np.add.reduceat(dw * oracle.unpack(packed, K, 4, False), starts),
        "zeros": np.add.reduceat(dw, starts),
        "bias": dz.sum(0),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(grads[name], value, rtol=1e-3, atol=1e-3, err_msg=name)


def test_what_is_not_finite_stays_where_it_is(seed):
    """A NaN row of x, a NaN scale of the short last group, an infinite zero point."""
    packed, scales, zeros = weight(seed, 4, 32, False)
    x = np.random.default_rng(seed).standard_normal((5, K)).astype(np.float32)
    x[3] = np.nan
    scales[-1, 7], zeros[0, 9] = np.nan, np.inf
    y = np.asarray(quant_matmul(x, packed, scales, bits=4, group=32, zeros=zeros))
    bad = ~np.isfinite(y)
    want = np.zeros_like(bad)
    want[3], want[:, 7], want[:, 9] = True, True, True
    np.testing.assert_array_equal(bad, want)


@pytest.mark.slow
def test_empty_sizes():
    for rows, contracted, columns in ((0, 8, 4), (3, 0, 4), (3, 8, 0)):
        packed = pack_weight(np.zeros((contracted, columns), np.int8), bits=3)
        scales = jnp.ones((-(-contracted // 8), columns))
        y = quant_matmul(jnp.ones((rows, contracted)), packed, scales, bits=3, group=8)
        assert y.shape == (rows, columns) and not y.any()


X = jnp.zeros((2, 64), jnp.bfloat16)
PACKED, SCALES = jnp.zeros((32, 8), jnp.uint8), jnp.ones((2, 8))
BAD = {
    "bits=5 must be one of 2, 3, 4, 8": dict(bits=5),
    "bits=4.0 must be one of 2, 3, 4, 8": dict(bits=4.0),
    "bits=True must be": dict(bits=True),
    "group=0 must be at least 1": dict(group=0),
    "x int32": dict(x=X.astype("int32")),
    "packed int8.* must be uint8": dict(packed=PACKED.astype("int8")),
    r"packed .33, 8. must have 32 rows": dict(packed=jnp.zeros((33, 8), jnp.uint8)),
    "must have 64 rows": dict(bits=8),
    r"scales float32.2, 8. must be floating, .1, 8.: K=64 in groups of 64": dict(group=64),
    r"zeros int32.* write zeros=-z . scales": dict(zeros=jnp.zeros((2, 8), jnp.int32)),
    r"zeros float32.8, 2. must be floating, .2, 8.": dict(zeros=jnp.zeros((8, 2))),
    "bias": dict(bias=jnp.zeros(7)),
    "activation='relu'": dict(activation="relu"),
    "implementation='cuda'": dict(implementation="cuda"),
    "x must be a jax or NumPy array": dict(x=[1.0]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused(message):
    arguments = dict(x=X, packed=PACKED, scales=SCALES, bits=4, group=32) | BAD[message]
    with pytest.raises(ValueError, match=message):
        quant_matmul(
            arguments.pop("x"), arguments.pop("packed"), arguments.pop("scales"), **arguments
        )


@pytest.mark.parametrize(
    ("message", "codes", "bits"),
    [
        ("must be integers .K, N.", np.zeros((4, 4), np.float32), 4),
        ("must be integers .K, N.", np.zeros(4, np.int8), 4),
        ("4 bits are -8 to 7, or 0 to 15 .* these are -1 to 8", np.array([[-1, 8]]), 4),
        ("these are 0 to 4", np.array([[0, 4]]), 2),
        ("bits=6", np.zeros((4, 4), np.int8), 6),
    ],
)
def test_bad_codes_are_refused(message, codes, bits):
    with pytest.raises(ValueError, match=message):
        pack_weight(codes, bits=bits)


def test_all_two_s_complement_codes_are_packed():
    """-2^(b-1), which our quantizer does not use and others do."""
    for bits in BITS:
        codes = np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1))[:, None]
        packed = jax.jit(functools.partial(pack_weight, bits=bits))(codes)
        np.testing.assert_array_equal(oracle.unpack(packed, len(codes), bits, True), codes)


@pytest.mark.slow
def test_vmap_scan_and_shard_map_agree(seed, monkeypatch):
    """A stack of layers by a scan; rows mapped; columns cut over devices, by the kernels' rule."""
    monkeypatch.setattr(api.tuned, "target", lambda: tables.H100)
    size, layers = 64, 2
    parts = [weight(seed + i, 4, 32, False, (size, size)) for i in range(layers)]
    packed, scales, zeros = (jnp.stack([jnp.asarray(p[i]) for p in parts]) for i in range(3))
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((4, size)), jnp.float32)

    def layer(h, w):
        return quant_matmul(h, w[0], w[1], bits=4, group=32, zeros=w[2], activation="silu")

    def loss(call, x, scales, zeros):
        y, _ = jax.lax.scan(lambda h, w: (call(h, w), None), x, (packed, scales, zeros))
        return (y**2).sum()

    args = (x, scales, zeros)
    want = jax.jit(jax.grad(functools.partial(loss, layer), (0, 1, 2)))(*args)
    mesh = Mesh(np.array(jax.devices()[:2]), "n")
    cut = (P(), (P(None, "n"),) * 3)
    spread = jax.shard_map(layer, mesh=mesh, in_specs=cut, out_specs=P(None, "n"))
    for call in (jax.vmap(layer, (0, None)), spread):
        results = jax.jit(jax.grad(functools.partial(loss, call), (0, 1, 2)))(*args)
        for got, value in zip(results, want, strict=True):
            np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_the_reference_runs_under_an_explicit_mesh(seed):
    """Rows cut over one axis and columns over another; gradients lie as their arrays do."""
    packed, scales, zeros = weight(seed, 3, 32, False, (96, 32))
    x = np.random.default_rng(seed).standard_normal((8, 96)).astype(np.float32)
    mesh = jax.make_mesh((2, 4), ("rows", "columns"))
    with jax.set_mesh(mesh):
        x_cut = reshard(jnp.asarray(x), P("rows", None))
        cut = [reshard(jnp.asarray(v), P(None, "columns")) for v in (packed, scales, zeros)]

        @jax.jit
        def run(x, scales, zeros):
            def call(x, scales, zeros):
                return quant_matmul(x, cut[0], scales, bits=3, group=32, zeros=zeros)

            y, pull = jax.vjp(call, x, scales, zeros)
            return y, *pull(jnp.ones_like(y))

        y, dx, dscales, dzeros = run(x_cut, *cut[1:])
    w = oracle.dequantize(packed, scales, zeros, 96, 3, 32)
    np.testing.assert_allclose(y, x @ w, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, np.ones((8, 32)) @ w.T, rtol=1e-4, atol=1e-3)
    assert jax.typeof(dscales).sharding.spec == jax.typeof(dzeros).sharding.spec
    assert jax.typeof(dscales).sharding.spec == P(None, "columns")
