"""Attention against float64 NumPy, and what may see what, by exact zeros."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.layers.attention import Context, attend, visible
from megajax.models import decoder
from pallas_kernels.attention import library
from tests.tiny import MODEL

B, S, H, G, K = 2, 12, 4, 2, 8


def oracle(q, k, v, mask):
    """softmax(q k^T / sqrt K) v in float64, heads shared by plain repetition."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = (np.repeat(a, H // G, axis=2) for a in (k, v))
    logits = np.einsum("bshk,bmhk->bhsm", q, k) / np.sqrt(K)
    logits = np.where(mask, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("bhsm,bmhk->bshk", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize(
    ("window", "packed", "causal", "implementation"),
    [
        *((w, p, True, "xla") for p in (False, True) for w in (None, 1, 4)),
        (None, False, False, "xla"),
        (3, True, False, "xla"),
        (4, True, True, "varlen"),
        (3, True, False, "varlen"),
    ],
)
def test_attend_against_numpy(window, packed, causal, implementation, seed):
    random = np.random.default_rng(seed)
    q = random.normal(size=(B, S, H, K)).astype(np.float32)
    k, v = (random.normal(size=(B, S, G, K)).astype(np.float32) for _ in range(2))
    segments = np.zeros((B, S), np.int32)
    positions = np.broadcast_to(np.arange(S), (B, S)).copy()
    if packed:
        segments[:, 5:] = 1
        positions[:, 5:] -= 5
    i, j = np.arange(S)[:, None], np.arange(S)[None]
    mask = (j > i - (window or S)) & (segments[0][:, None] == segments[0][None])
    mask &= j <= i if causal else j < i + (window or S)
    context = Context(jnp.asarray(positions, jnp.int32), jnp.asarray(segments), causal=causal)
    run = jax.jit(lambda *qkv: attend(*qkv, context, None, window, implementation))
    np.testing.assert_allclose(run(q, k, v), oracle(q, k, v, mask), atol=2e-6)


def poisoned(implementation, window):
    """Jitted (q, k, v, dout) -> (out, dq, dk, dv) of rows of two segments, 5 and 7 tokens."""
    segments = jnp.repeat(jnp.arange(2, dtype=jnp.int32), np.array([5, 7]))[None]
    positions = jnp.concatenate([jnp.arange(5), jnp.arange(7)]).astype(jnp.int32)[None]
    context = Context(positions, segments)

    def run(q, k, v, dout):
        word, *masked = implementation.split()
        memory = dataclasses.replace(context) if masked else None
        call = lambda *qkv: attend(*qkv, context, memory, window, word)  # noqa: E731
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(dout)

    seen = np.asarray(visible(context, context, window))[0, 0]
    return jax.jit(run), seen


@pytest.mark.parametrize("implementation", ["xla", "varlen", "cudnn", "cudnn masked"])
def test_what_is_not_finite_stays_with_those_who_see_it(implementation, seed, monkeypatch):
    """Other segments, heads and hidden keys are the same to the bit, forward and backward.

    'cudnn masked': with a memory of its own, whose rows leave the gradients finite.
    """
    plain = jax.nn.dot_product_attention  # in cuDNN's place
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda *x, implementation, **kw: plain(*x, **kw)
    )
    monkeypatch.setattr(library, "reasons", lambda *_, **__: [])  # float32 shows every bit
    run, seen = poisoned(implementation, 4)
    random = np.random.default_rng(seed)
    arrays = [random.normal(size=(1, S, n, K)).astype(np.float32) for n in (H, G, G, H)]
    clean = run(*arrays)
    for which, name in enumerate(("q", "k", "v", "dout")):
        for value, at in ((np.inf, 6), (-np.inf, 5), (np.nan, 2)):
            dirty = [x.copy() for x in arrays]
            dirty[which][0, at, 1, 3] = value
            rows_SH = np.zeros((S, H), bool)
            heads = slice(2, 4) if name in "kv" else slice(1, 2)
            sees = seen[:, at] if name in "kv" else np.arange(S) == at
            rows_SH[:, heads] = sees[:, None]
            keys_SG = (seen.T @ rows_SH.reshape(S, G, 2).any(2)) > 0
            not_finite = (rows_SH & (name != "dout"), rows_SH, keys_SG, keys_SG)
            parts = zip(("out", "dq", "dk", "dv"), run(*dirty), clean, not_finite, strict=True)
            for part, x, y, bad in parts:
                x, y, about = np.asarray(x)[0], np.asarray(y)[0], (name, value, part)
                np.testing.assert_array_equal(x[~bad], y[~bad], err_msg=str(about))
                if part == "out" or implementation != "cudnn masked":
                    assert np.isnan(x[bad]).all(), about
                else:
                    assert np.isfinite(x).all(), about


def test_varlen_has_no_memory():
    x = jnp.zeros((1, 2, 1, 8))
    query, memory = (Context(jnp.zeros((1, 2), jnp.int32)) for _ in range(2))
    with pytest.raises(NotImplementedError, match="use 'xla' with a cache"):
        attend(x, x, x, query, memory, implementation="varlen")


def test_a_window_is_one_number():
    x, context = jnp.zeros((1, 2, 1, 8)), Context(jnp.zeros((1, 2), jnp.int32))
    for window in ((4, 0), 0, -1, 2.0, "3", True):
        message = re.escape(f"window={window!r} must be one integer of at least 1")
        with pytest.raises(ValueError, match=message):
            attend(x, x, x, context, window=window)
        with pytest.raises(ValueError, match=message):
            visible(context, context, window)


@pytest.mark.parametrize("window", [2**30, 2**31 - 1, 2**40])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_beyond_every_position_hides_nothing(window, causal):
    context = Context(jnp.arange(S, dtype=jnp.int32)[None], causal=causal)
    got, want = (visible(context, context, w) for w in (window, None))
    np.testing.assert_array_equal(got, want)


def test_what_attend_cannot_do_is_said():
    x, context = jnp.ones((1, 4, 1, 8)), Context(jnp.arange(4, dtype=jnp.int32)[None])
    with pytest.raises(ValueError, match=r"implementation='flash'; there are \['xla'"):
        attend(x, x, x, context, implementation="flash")
    with pytest.raises(TypeError, match="attention 'xla' has gradients .* no forward mode"):
        jax.jvp(lambda x: attend(x, x, x, context), (x,), (x,))


def test_visible_counts_the_query_itself():
    context = Context(jnp.arange(6, dtype=jnp.int32)[None])
    seen = np.asarray(visible(context, context, 3))[0, 0]
    assert seen.sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    assert seen[5].tolist() == [False, False, False, True, True, True]


def influence(cfg, batch, tokens_from, layers=None):
    """d(hidden at the last position) / d(embedded token i): the largest entry for each i."""
    parts = decoder.parts(cfg)
    params = parts.init(jax.random.key(0))
    context = parts.context(batch, None)

    def last(x):
        for layer in range(cfg.layers):
            weights = jax.tree.map(lambda w: w[layer], params["blocks"])  # noqa: B023
            x, _, _ = parts.block(weights, x, context)
        return x[0, tokens_from]

    x = parts.embed(params, batch, context)
    return np.abs(np.asarray(jax.jacrev(last)(x)))[:, 0].max((0, 2))


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize("window", [1, 3])
def test_receptive_field_of_the_window_is_exact(block, window):
    """After L layers a token sees L (w - 1) + 1 positions, and exactly nothing beyond."""
    cfg = dataclasses.replace(MODEL, block=block, window=window, layers=3)
    tokens = jnp.arange(S, dtype=jnp.int32)[None]
    seen = influence(cfg, {"tokens": tokens, "positions": tokens}, S - 1)
    reach = cfg.layers * (window - 1) + 1
    assert (seen[: S - reach] == 0.0).all()
    assert (seen[S - reach :] > 0).all()


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_packed_segments_do_not_leak(block):
    cfg = dataclasses.replace(MODEL, block=block)
    tokens = jnp.arange(S, dtype=jnp.int32)[None]
    segments = (tokens >= 5).astype(jnp.int32)
    batch = {"tokens": tokens, "positions": tokens - 5 * segments, "segments": segments}
    seen = influence(cfg, batch, S - 1)
    assert (seen[:5] == 0.0).all() and (seen[5:] > 0).all()
    causal = influence(cfg, batch, 3)
    assert (causal[4:] == 0.0).all() and (causal[:4] > 0).all()


def test_a_packed_segment_equals_the_text_alone():
    parts = decoder.parts(MODEL)
    params = parts.init(jax.random.key(1))
    tokens = jnp.arange(S, dtype=jnp.int32)[None] % 7
    segments = (jnp.arange(S)[None] >= 5).astype(jnp.int32)
    positions = jnp.arange(S, dtype=jnp.int32)[None] - 5 * segments
    packed = parts.logits(params, {"tokens": tokens, "positions": positions, "segments": segments})
    alone = parts.logits(params, {"tokens": tokens[:, 5:], "positions": positions[:, 5:]})
    np.testing.assert_allclose(packed[:, 5:], alone, atol=1e-6)


def test_packed_rows_before_hopper_have_a_mask(monkeypatch):
    """cuDNN takes offsets on Hopper only; what it cannot take is asked with the words of why."""
    masks = []

    def fake(q, k, v, mask, implementation):
        masks.append(mask.shape)
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", fake)
    monkeypatch.setattr(library, "_library_reasons", lambda: ["needs Hopper"])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    x = jnp.ones((1, 4, 1, 8), jnp.bfloat16)
    positions = jnp.arange(4, dtype=jnp.int32)[None]
    attend(x, x, x, Context(positions, jnp.zeros((1, 4), jnp.int32)), implementation="cudnn")
    assert masks == [(1, 1, 4, 4)]
    monkeypatch.setattr(library, "packed_attention", lambda *_, **kinds: kinds["segment_ids"])
    assert attend(x, x, x, Context(positions), implementation="cudnn") is None


def test_attention_has_slots_for_as_many_documents_as_are_said():
    """Of eight rows of 4,096 tokens: one for 64 tokens of a row, or as many as its packer says."""
    q, k = (jax.ShapeDtypeStruct((8, 4096, n, 64), jnp.bfloat16) for n in (32, 8))
    ids = jax.ShapeDtypeStruct((8, 4096), jnp.int32)

    def loss(segments, q, k, v, ids):
        context = Context(jnp.zeros_like(ids), ids)
        out = attend(q, k, v, context, implementation="cudnn", segments=segments)
        return out.astype(jnp.float32).sum()

    for segments, slots in ((None, 512), (4, 32)):
        grad = jax.jit(jax.grad(functools.partial(loss, segments), (0, 1, 2)))
        text = grad.trace(q, k, k, ids).lower(lowering_platforms=("cuda",)).as_text()
        sums = re.findall(r"tensor<(\d+)x32x4096xf32>", text)  # log-sum-exps: a row for each slot
        assert max(map(int, sums)) == slots


@pytest.mark.parametrize("implementation", ["xla", "varlen"])
def test_log_sum_exp_and_its_gradient(implementation, seed):
    """Of grouped heads with a window and two segments, against the formula in float64."""
    random = np.random.default_rng(seed)
    q, k, v = (random.standard_normal((2, 9, heads, 8)) for heads in (4, 2, 2))
    segments = np.array([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2], np.int32)
    places = np.concatenate([np.r_[:4, :5], np.r_[:7, :2]]).reshape(2, 9).astype(np.int32)
    query = Context(jnp.asarray(places), jnp.asarray(segments))
    same = segments[:, :, None] == segments[:, None]
    back = places[:, :, None] - places[:, None]
    seen = (same & (back >= 0) & (back < 3))[:, None]

    def formula(q, k, v, xp):
        k, v = (xp.repeat(x, 2, 2) for x in (k, v))
        logits = xp.where(seen, xp.einsum("bshk,bmhk->bhsm", q, k) / 8**0.5, -1e30)
        high = logits.max(-1, keepdims=True)
        weights = xp.exp(logits - high)
        total = weights.sum(-1, keepdims=True)
        y = xp.einsum("bhsm,bmhk->bshk", weights / total, v)
        return y, xp.moveaxis((xp.log(total) + high)[..., 0], 1, 2)

    def ours(q, k, v):
        return attend(q, k, v, query, None, 3, implementation, return_lse=True)

    def mixed(function):  # both results with all their elements in it
        def value(*x):
            weighed = [
                (jnp.cos(y) * np.arange(y.size, dtype="f").reshape(y.shape)) for y in function(*x)
            ]
            return sum(y.sum() for y in weighed)

        return value

    arrays = [jnp.asarray(x, "float32") for x in (q, k, v)]
    for got, want in zip(ours(*arrays), formula(q, k, v, np), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    got = jax.grad(mixed(ours), (0, 1, 2))(*arrays)
    want = jax.grad(mixed(lambda *x: formula(*x, jnp)), (0, 1, 2))(*arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max())
