"""Packed attention against a float64 loop over unpadded sequences, forward and backward."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels.attention import reference
from tests.attention_oracle import Case, attention, visible

LENGTHS = {"mixed": (1, 0, 13, 30, 5), "one": (40,), "spare": (9, 20)}
CASES = [
    Case(LENGTHS["mixed"], spare=11),
    Case(LENGTHS["mixed"], causal=True, heads=(4, 2), spare=3),
    Case(LENGTHS["one"], causal=True, window=(7, 0), heads=(4, 1)),
    Case(LENGTHS["spare"], window=(4, 6), alibi=True, spare=20),
    Case(LENGTHS["mixed"], causal=True, softcap=1.5, alibi=True, heads=(4, 2), width=24),
    Case((6, 0, 21, 3), (20, 9, 4, 0), causal=True, heads=(4, 2), spare=5),
    Case((6, 12), (30, 10), window=(5, 2), softcap=2.0),
    Case(LENGTHS["mixed"], window=(None, 2), width=8),
]


FEW = (5,)  # cross-attention; the others are slow tests
SOME = [c if i in FEW else pytest.param(c, marks=pytest.mark.slow) for i, c in enumerate(CASES)]


@functools.cache
def public(case, **options):
    """The jitted public function with its gradients: out, lse, dq, dk, dv."""

    @jax.jit
    def both(q, k, v, cu_q, cu_k, dout, dlse):
        def call(q, k, v):
            return pallas_kernels.varlen_attention(
                q,
                k,
                v,
                cu_seqlens_q=cu_q,
                cu_seqlens_k=cu_k,
                return_lse=True,
                **(case.options | options),
            )

        values, pull = jax.vjp(call, q, k, v)
        return *values, *pull((dout, dlse))

    return both


def run(case, arrays, dtype, **options):
    q, k, v, dout = (jnp.asarray(x, dtype) for x in arrays[:4])
    cu_q, cu_k = jnp.asarray(case.cu_q), jnp.asarray(case.cu_k)
    dlse = jnp.asarray(arrays[4], jnp.float32)
    results = public(case, **options)(q, k, v, cu_q, cu_k, dout, dlse)
    assert [x.dtype for x in results] == [dtype, jnp.float32, dtype, dtype, dtype]
    return [np.asarray(x, np.float64) for x in results]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks and tiles at these sizes."""
    monkeypatch.setattr(reference, "BLOCK", 16)


@pytest.mark.parametrize("case", SOME, ids=str)
def test_float32_is_the_definition(case, seed):
    arrays = case.arrays(seed)
    got = run(case, case.arrays(seed, spare_value=np.nan), jnp.float32, implementation="reference")
    for name, x, want in zip(
        "out lse dq dk dv".split(), got, attention(case, *arrays), strict=True
    ):
        np.testing.assert_allclose(x, want, atol=3e-5, rtol=1e-5, err_msg=name)


def naive(case, q, k, v):
    """What one would write in bf16 with plain jax.numpy."""
    H, G = case.heads
    k, v = (jnp.repeat(x, H // G, 1) for x in (k, v))
    logits = jnp.einsum("thk,shk->hts", q, k) * case.width**-0.5
    weights = jax.nn.softmax(jnp.where(visible(case)[None], logits, -jnp.inf), -1)
    weights = jnp.where(visible(case)[None], weights, 0.0)
    return jnp.einsum("hts,shk->thk", weights, v)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"), [(CASES[1], "bfloat16"), (CASES[0], "float16")], ids=str
)
def test_16_bit_errors_are_within_twice_the_plain_ones(case, dtype, seed):
    arrays = [np.asarray(jnp.asarray(x, dtype), np.float64) for x in case.arrays(seed)]
    arrays[4] = np.zeros_like(arrays[4])
    want_out, _, *want_grads = attention(case, *arrays)
    out, _, *grads = run(case, arrays, jnp.dtype(dtype))
    q, k, v, dout = (jnp.asarray(x, dtype) for x in arrays[:4])
    plain, pull = jax.vjp(lambda *x: naive(case, *x), q, k, v)
    bound = 2 * np.abs(np.nan_to_num(np.asarray(plain, np.float64)) - want_out).max() + 1e-3
    assert np.abs(out - want_out).max() <= bound
    for got, rough, want in zip(grads, pull(dout), want_grads, strict=True):
        bound = 2 * np.abs(np.nan_to_num(np.asarray(rough, np.float64)) - want).max() + 2e-3
        assert np.abs(got - want).max() <= bound


THREE = Case((13, 10, 17), causal=True, heads=(4, 2), spare=8)


def test_other_segments_have_no_effect(seed):
    case = THREE
    arrays = case.arrays(seed)
    changed = [x.copy() for x in arrays]
    for x in changed[:4]:
        x[13:23] *= 1e3
    keep = np.r_[0:13, 23:48]
    for x, y in zip(run(case, arrays, jnp.float32), run(case, changed, jnp.float32), strict=True):
        axis = 1 if x.ndim == 2 else 0
        np.testing.assert_array_equal(x.take(keep, axis), y.take(keep, axis))


@pytest.mark.parametrize("softcap", [None, pytest.param(2.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout", "dlse"])
def test_what_is_not_finite_stays_with_those_who_see_it(where, value, softcap, seed):
    """Everything else is the same to the bit: other segments, heads, earlier rows of the same."""
    case = THREE if softcap is None else dataclasses.replace(THREE, softcap=softcap)
    arrays, bad = case.arrays(seed), 17  # of the middle segment, whose tile holds all three
    clean = run(case, arrays, jnp.float32)
    spoiled = dict(zip("q k v dout dlse".split(), (x.copy() for x in arrays), strict=True))
    spoiled[where][(1, bad) if where == "dlse" else (bad, 1, 3)] = value
    got = run(case, list(spoiled.values()), jnp.float32)
    seen = visible(case)
    rows_HT = np.zeros((4, 48), bool)
    heads = slice(2, 4) if where in "kv" else slice(1, 2)  # query head 1, or the second group
    rows_HT[heads] = seen[:, bad] if where in "kv" else np.arange(48) == bad
    keys_GS = (rows_HT.reshape(2, 2, 48).any(1) @ seen) > 0
    forward = rows_HT if where in "qkv" else np.zeros_like(rows_HT)
    expected = (forward.T, forward, rows_HT.T, keys_GS.T, keys_GS.T)
    for name, x, y, nan in zip("out lse dq dk dv".split(), got, clean, expected, strict=True):
        saturates = softcap is not None and where == "q"  # an infinite logit is the cap
        assert np.isnan(x[nan]).all() or (saturates and name in ("out", "lse")), name
        np.testing.assert_array_equal(x[~nan], y[~nan], err_msg=name)


@pytest.mark.parametrize(
    "kind", ["batch", *(pytest.param(k, marks=pytest.mark.slow) for k in ("vmap", "scan", "heads"))]
)
def test_transformations_change_nothing(kind, seed):
    """vmap, scan with remat, and shard_map over a batch (of a vmap) and over heads."""
    case = Case((13, 10, 17), causal=True, heads=(4, 2), spare=8)
    q, k, v, dout, _ = (jnp.asarray(x, jnp.float32) for x in case.arrays(seed))
    batch = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), (q, k, v, dout))
    cus = jnp.stack([jnp.asarray(case.cu_q), jnp.array([0, 40, 41, 41], jnp.int32)])

    def value(q, k, v, dout, cu):
        out = pallas_kernels.varlen_attention(q, k, v, cu_seqlens_q=cu, causal=True)
        return (out * dout).sum(), out

    def each(x):
        return jax.grad(jax.checkpoint(value), (0, 1, 2), has_aux=True)(*x)

    grad = jax.grad(value, (0, 1, 2), has_aux=True)
    other = Case((40, 1, 0), causal=True, heads=(4, 2), spare=7)
    one_by_one = [
        attention(c, *(np.asarray(x[i], np.float64) for x in batch), np.zeros((4, 48)))
        for i, c in enumerate((case, other))
    ]
    out, _, *grads = (np.stack(x) for x in zip(*one_by_one, strict=True))
    want = (tuple(grads), out)
    mesh = Mesh(np.array(jax.devices()[:2]), "x")
    rows = jax.shard_map(jax.vmap(grad), mesh=mesh, in_specs=(P("x"),) * 5, out_specs=P("x"))
    if kind != "heads":
        changed = {"vmap": jax.vmap(grad), "scan": lambda *x: jax.lax.map(each, x), "batch": rows}
        got = jax.jit(changed[kind])(*batch, cus)
        chex.assert_trees_all_close(got, want, atol=1e-4)
        return
    heads = P(None, "x", None)
    specs = (heads,) * 4 + (P(),)
    cut = jax.shard_map(lambda *x: grad(*x)[0], mesh=mesh, in_specs=specs, out_specs=heads)
    got = jax.jit(cut)(q, k, v, dout, cus[0])
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[0], atol=1e-4), got, want[0])


def test_packed_rows_are_packed_segments(seed):
    case = Case((13, 10, 9), causal=True, heads=(4, 2))
    q, k, v, dout, _ = (jnp.asarray(x, jnp.float32) for x in case.arrays(seed))
    ids = jnp.repeat(jnp.array([4, 1, -1]), jnp.array([13, 10, 9]), total_repeat_length=32)
    garbage = jnp.where((ids < 0)[:, None, None], jnp.nan, 0.0)

    def packed(q, k, v):
        out = pallas_kernels.packed_attention(
            *(jnp.stack([x, x[::-1]]) for x in (q + garbage, k + garbage, v + garbage)),
            segment_ids=jnp.stack([ids, ids[::-1]]).astype(jnp.int32),
            causal=True,
        )
        return (out[0] * dout).sum(), out

    got, out = jax.jit(jax.grad(packed, (0, 1, 2), has_aux=True))(q, k, v)
    same = Case((13, 10), causal=True, heads=(4, 2), spare=9)
    arrays = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    alone, _, *grads = attention(same, *arrays, np.zeros((4, 32)))
    np.testing.assert_allclose(out[0], alone, atol=1e-5)
    assert np.isfinite(out[1]).all()
    for x, want in zip(got, grads, strict=True):
        np.testing.assert_allclose(x, want, atol=1e-4)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_square(monkeypatch):
    """Forward and backward at two lengths: temporary memory grows with T, not T x T."""
    monkeypatch.setattr(reference, "BLOCK", 64)

    def memory(T):
        shape = jax.ShapeDtypeStruct((T, 1, 16), jnp.float32)
        cu = jax.ShapeDtypeStruct((3,), jnp.int32)

        def loss(q, k, v, cu):
            return pallas_kernels.varlen_attention(q, k, v, cu_seqlens_q=cu, causal=True).sum()

        grad = jax.jit(jax.grad(loss, (0, 1, 2)))
        return grad.lower(shape, shape, shape, cu).compile().memory_analysis().temp_size_in_bytes

    assert memory(8192) < 3 * memory(4096)


BAD = {
    "heads": (dict(k=(8, 3, 16)), "4 query heads must be a multiple of 3"),
    "width": (dict(q=(8, 4, 8)), "must be"),
    "types": (dict(dtype="int32"), "must have one type"),
    "order": (dict(cu=[0, 5, 3, 8]), "never decrease"),
    "past": (dict(cu=[0, 5, 9]), "end at 8 tokens at most"),
    "start": (dict(cu=[1, 5, 8]), "must start at 0"),
    "softcap": (dict(softcap=0.0), "softcap=0.0"),
    "window": (dict(window=(-1, 0)), "window"),
    "slopes": (dict(alibi_slopes=[1.0]), "one per query head"),
    "word": (dict(implementation="triton"), "there are"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    changes, message = BAD[name]
    changes = {"q": (8, 4, 16), "k": (8, 2, 16), "cu": [0, 8], "dtype": "float32"} | changes
    q, k = (jnp.zeros(changes.pop(x), changes["dtype"]) for x in "qk")
    cu = jnp.asarray(changes.pop("cu"), jnp.int32)
    del changes["dtype"]
    with pytest.raises(ValueError, match=message):
        pallas_kernels.varlen_attention(q, k, k, cu_seqlens_q=cu, **changes)


def test_an_explicit_choice_never_falls_back():
    q = jnp.zeros((8, 2, 16), jnp.float32)
    cu = jnp.array([0, 8], jnp.int32)
    for choice in ("hopper", "interpret"):
        with pytest.raises(NotImplementedError, match="use implementation='reference'"):
            pallas_kernels.varlen_attention(q, q, q, cu_seqlens_q=cu, implementation=choice)
