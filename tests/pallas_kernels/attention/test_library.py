"""Packed attention by cuDNN: the lowered call, and all that is around it.

cuDNN runs on GPUs only. Here its call is replaced by one that reads the same operands (offsets in
elements, lengths) and leaves NaN wherever cuDNN defines nothing.
"""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import library
from tests.stablehlo import executions

H, G, K = 4, 2, 8


def pairs_of(q, k, operands, static):
    """Returns (who sees whom (T, S), each slot's queries (N, T) and keys (N, S)), flattened."""
    if operands is None:  # every row is one segment
        operands = [jnp.full((x.shape[0], 1), x.shape[1]) for x in (q, k)] + [
            jnp.arange(x.shape[0] + 1) * (x.size // x.shape[0]) for x in (q, k)
        ]
    q_lengths, k_lengths, q_offsets, k_offsets = (x.reshape(-1) for x in operands)
    N, sides = len(q_lengths), []
    for x, lengths, offsets in ((q, q_lengths, q_offsets), (k, k_lengths, k_offsets)):
        starts_N1 = (offsets[:N] // (x.shape[2] * x.shape[3]))[:, None]  # offsets are in elements
        places = jnp.arange(x.shape[0] * x.shape[1])[None] - starts_N1
        sides.append((places, (places >= 0) & (places < lengths[:, None])))
    (t, queries), (s, keys) = sides
    t, s = t[:, :, None], s[:, None]  # positions count from the slot's start
    seen = queries[:, :, None] & keys[:, None]
    seen &= (s <= t) if static.causal else True
    seen &= (s >= t - static.left) if static.left is not None else True
    return seen.any(0), queries, keys


def flattened(*arrays):
    """Returns float32 arrays (tokens, H, K), those of fewer heads repeated."""
    wide = (x.astype(jnp.float32).reshape(-1, *x.shape[2:]) for x in arrays)
    return [jnp.repeat(x, H // x.shape[1], 1) for x in wide]


def fake_forward(qkv, operands, static):
    """`library.call_forward` in plain JAX."""
    q, k, v = qkv
    seen, queries, _ = pairs_of(q, k, operands, static)
    q_, k_, v_ = flattened(q, k, v)
    logits = jnp.where(seen, jnp.einsum("thk,shk->hts", q_, k_) * static.scale, -jnp.inf)
    lse = jax.nn.logsumexp(logits, -1)
    out = jnp.einsum("hts,shk->thk", jnp.exp(logits - lse[..., None]), v_)
    out = jnp.where(queries.any(0)[:, None, None], out, jnp.nan)
    first = jnp.argmax(queries, 1)[:, None] + jnp.arange(q.shape[1])[None]
    first = jnp.minimum(first, queries.shape[1] - 1)
    held = jnp.take_along_axis(queries, first, 1)[:, None]
    stats = jnp.where(held, lse[:, first].transpose(1, 0, 2), jnp.nan)
    return out.reshape(q.shape).astype(q.dtype), stats


def fake_backward(qkv, results, operands, static):
    """`library.call_backward` in plain JAX: from the saved log-sum-exp and output, as cuDNN."""
    (q, k, v), (stats, out, dout) = qkv, results
    seen, queries, keys = pairs_of(q, k, operands, static)
    q_, k_, v_, out_, dout_ = flattened(q, k, v, out, dout)
    slot = jnp.argmax(queries, 0)
    place = jnp.arange(len(slot)) - jnp.argmax(queries, 1)[slot]
    lse = stats[slot, :, jnp.clip(place, 0, q.shape[1] - 1)].T[..., None]
    logits = jnp.einsum("thk,shk->hts", q_, k_) * static.scale
    weights = jnp.where(seen, jnp.exp(logits - lse), 0)
    dweights = jnp.einsum("thk,shk->hts", dout_, v_) - (out_ * dout_).sum(-1).T[..., None]
    dlogits = weights * dweights * static.scale
    dq = jnp.einsum("hts,shk->thk", dlogits, k_)
    dk, dv = (
        jnp.einsum("hts,thk->shk", a, b).reshape(-1, G, H // G, K).sum(2)
        for a, b in ((dlogits, q_), (weights, dout_))
    )
    sides = (dq, queries, q), (dk, keys, k), (dv, keys, v)
    return tuple(
        jnp.where(held.any(0)[:, None, None], x, jnp.nan).reshape(y.shape).astype(y.dtype)
        for x, held, y in sides
    )


@pytest.fixture
def cudnn(monkeypatch):
    """The branch that CUDA takes, with the replaced call."""
    monkeypatch.setattr(library, "call_forward", fake_forward)
    monkeypatch.setattr(library, "call_backward", fake_backward)
    take = lambda *args, cuda, default: cuda(*args)  # noqa: E731
    monkeypatch.setattr(jax.lax, "platform_dependent", take)


def draw(seed, *rows, keys=None):
    """Returns q, k, v, dout in float16."""
    random = np.random.default_rng(seed)
    keys = keys or rows
    shapes = (*rows, H, K), (*keys, G, K), (*keys, G, K), (*rows, H, K)
    return [random.normal(size=s).astype(np.float16) for s in shapes]


def run(attend):
    """Returns arrays -> (out, dq, dk, dv), compiled."""

    def both(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    compiled = jax.jit(both)
    return lambda arrays: compiled(*arrays)


def seen_in(ids, causal=False, window=None, others=None):
    """Who sees whom by the definition, of all rows together: (tokens, tokens)."""
    left, right = window or (None, None)
    others = ids if others is None else others
    row_t, row_s = (np.repeat(np.arange(len(x)), x.shape[1])[:, None] for x in (ids, others))
    t, s = (np.tile(np.arange(x.shape[1]), len(x))[:, None] for x in (ids, others))
    seen = (row_t == row_s.T) & (ids.reshape(-1, 1) == others.reshape(1, -1))
    seen &= ids.reshape(-1, 1) >= 0
    seen &= (s.T <= t) if causal else True
    seen &= (s.T >= t - left) if left is not None else True
    return seen & (s.T <= t + right) if right is not None else seen


OUTPUTS = ("out", "dq", "dk", "dv")


def same(got, arrays, seen, scale=K**-0.5, about=""):
    """Compares with float64 loops over heads; what is not finite reaches those who see it."""
    q, k, v, dout = (x.astype(np.float64).reshape(-1, *x.shape[-2:]) for x in arrays)
    expected = [np.zeros(x.shape) for x in (q, q, k, k)]
    bad_keys = ~(np.isfinite(k) & np.isfinite(v)).all(-1)
    live = seen.any(1)
    for h in range(H):
        g = h // (H // G)
        bad = (seen & bad_keys[:, g]).any(1) | (live & ~np.isfinite(q[:, h]).all(-1))
        worse = bad | (live & ~np.isfinite(dout[:, h]).all(-1))
        parts = (q[:, h], k[:, g], v[:, g], dout[:, h])
        q_, k_, v_, dout_ = (np.where(np.isfinite(x), x, 0) for x in parts)
        logits = np.where(seen, q_ @ k_.T * scale, -np.inf)
        weights = np.exp(logits - np.where(live, logits.max(1, initial=-1e9), 0)[:, None])
        weights /= np.where(live, weights.sum(1), 1)[:, None]
        expected[0][:, h] = np.where(bad[:, None], np.nan, weights @ v_)
        dweights = dout_ @ v_.T
        dlogits = weights * (dweights - (weights * dweights).sum(1)[:, None]) * scale
        expected[1][:, h] = np.where(worse[:, None], np.nan, dlogits @ k_)
        hit = (seen & worse[:, None]).any(0)[:, None]
        expected[2][:, g] += np.where(hit, np.nan, np.where(worse[:, None], 0, dlogits).T @ q_)
        expected[3][:, g] += np.where(hit, np.nan, np.where(worse[:, None], 0, weights).T @ dout_)
    # A token that sees nothing, or that nobody sees, gives exact zeros. A gradient that is zero by
    # cancellation (one key: softmax is constant) is not meant: its rounding depends on the machine.
    uses = (live, live, seen.any(0), seen.any(0))
    for name, x, y, used in zip(OUTPUTS, got, expected, uses, strict=True):
        x, words = np.asarray(x, np.float32).reshape(y.shape), f"{about} {name}"
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y), err_msg=words)
        np.testing.assert_allclose(x, y, rtol=5e-3, atol=5e-3, err_msg=words)
        assert not x[~used].any(), words


IDS = np.array(
    [
        [0, 0, 0, 1, 1, 7, 7, 7, 7, -1, -1, -1],  # a dead tail
        [-1, -1, 2, 2, -1, 3, 3, 3, 3, 3, 3, 3],  # dead before and between, none at the end
        [3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3],  # begins with the id that ends the row before
        [-1] * 12,
    ],
    np.int32,
)
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (2, None)}}


def packed(ids, segments=3, **kinds):
    return run(lambda *x: library.packed_attention(*x, segment_ids=ids, segments=segments, **kinds))


@pytest.mark.parametrize("mask", MASKS)
def test_packed_rows(cudnn, mask, seed):
    arrays, kinds = draw(seed, *IDS.shape), MASKS[mask]
    same(packed(IDS, scale=0.5, **kinds)(arrays), arrays, seen_in(IDS, **kinds), 0.5)


def test_other_platforms_run_the_reference(seed):
    arrays, kinds = draw(seed, *IDS.shape), MASKS["window"]
    same(packed(IDS, **kinds)(arrays), arrays, seen_in(IDS, **kinds))


def test_rows_of_one_segment_need_no_offsets(cudnn, seed):
    arrays, kinds = draw(seed, 2, 12), {"causal": True, "window": (5, 0)}
    ids = np.zeros((2, 12), np.int32)
    same(packed(None, **kinds)(arrays), arrays, seen_in(ids, **kinds))


@pytest.mark.parametrize("cu", [[0, 5, 5, 9, 14, 14], [0, 11]], ids=["empty among", "one alone"])
def test_prefix_sums(cudnn, cu, seed):
    arrays, cu = draw(seed, 16), np.array(cu, np.int32)
    ids = (np.arange(16)[:, None] >= cu).sum(1)[None]
    ids = np.where(np.arange(16) < cu[-1], ids, -1)
    got = run(lambda *x: library.varlen_attention(*x, cu_seqlens_q=cu, causal=True))(arrays)
    same(got, arrays, seen_in(ids, True))


def test_other_keys_than_queries(cudnn, seed):
    """Segments without keys give 0, keys without queries no gradient."""
    cu_q, cu_k = np.array([0, 3, 8, 8, 9], np.int32), np.array([0, 4, 4, 9, 12], np.int32)
    arrays, sums = draw(seed, 10, keys=(14,)), {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    ids = np.array([[0] * 3 + [1] * 5 + [3] + [-1]])
    others = np.array([[0] * 4 + [2] * 5 + [3] * 3 + [-2] * 2])
    got = run(lambda *x: library.varlen_attention(*x, **sums))(arrays)
    same(got, arrays, seen_in(ids, others=others))
    with pytest.raises(NotImplementedError, match="equal query and key segments only"):
        library.varlen_attention(*arrays[:3], **sums, causal=True)


def test_what_is_not_finite_reaches_those_who_see_it(cudnn, seed):
    """In live tokens; in dead ones it reaches nobody."""
    compiled = packed(IDS, causal=True)
    for which in range(4):
        for (row, token), value in (((0, 4), np.nan), ((1, 6), np.inf), ((0, 10), np.nan)):
            arrays = draw(seed, *IDS.shape)
            arrays[which][row, token, 1, 3] = value
            same(compiled(arrays), arrays, seen_in(IDS, True), about=f"{which, row, token, value}")


def test_more_segments_than_slots_are_right(cudnn, seed, monkeypatch):
    """Six slots for seven segments: the reference runs, and cuDNN's answer is not taken."""
    nothing = lambda qkv, *_: (qkv[0] * jnp.nan, jnp.zeros((6, H, 12)))  # noqa: E731
    monkeypatch.setattr(library, "call_forward", nothing)
    monkeypatch.setattr(library, "call_backward", lambda qkv, *_: qkv)
    ids = np.repeat(np.array([[0, 1, 2, 3], [4, 5, 6, 6]], np.int32), 3, 1)
    arrays = draw(seed, *ids.shape)
    same(packed(ids, 3)(arrays), arrays, seen_in(ids))


def lowered(packed=True, **kinds):
    """The StableHLO, for CUDA, of the output and gradients of packed rows of 512 tokens."""
    shapes = [jax.ShapeDtypeStruct((2, 512, n, 64), jnp.bfloat16) for n in (8, 2, 2)]
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def loss(q, k, v, ids):
        ids = ids if packed else None
        out = library.packed_attention(q, k, v, segment_ids=ids, segments=3, **kinds)
        return out.astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*shapes, ids)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_lowered_for_a_gpu_without_one():
    """Both passes are one cuDNN call; its mask is causal, and nothing is (S, S)."""
    text = lowered(causal=True, window=(31, 0))
    calls = dict(re.findall(r'custom_call @(__cudnn\$\w+)\(.*?backend_config = "(.*?)", op', text))
    assert sorted(calls) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert text.count("__cudnn$") == 2 and "512x512" not in text
    for name, config in calls.items():
        fmha = json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]
        assert fmha["mask_type"] == "PADDING_CAUSAL" and fmha["sliding_window_length"] == 32
        assert fmha["max_seg_per_batch"] == 3 and fmha["fmha_scale"] == 0.125, name
        assert fmha["intermediate_tensor_shape"]["dimensions"] == ["2", "8", "512", "512"]
    types = re.findall(r"__cudnn\$fmhaSoftmax\(.*: \((.*?)\) -> \((.*?)\)\n", text)
    heads = "tensor<2x512x8x64xbf16>", *["tensor<2x512x2x64xbf16>"] * 2
    sizes = *["tensor<2x3xi32>"] * 2, *["tensor<2x4xi32>"] * 2
    assert types[0][0].split(", ") == [*heads, *sizes]
    assert "tensor<6x8x512xf32>" in types[0][1]  # cuDNN's own log-sum-exp, a row of it for a slot
    assert '"PADDING"' in lowered().replace("\\22", '"')
    assert '"CAUSAL"' in lowered(packed=False, causal=True).replace("\\22", '"')


def test_the_output_and_its_log_sum_exp_are_saved_by_name():
    """One forward call under a policy that keeps the names; two under one that keeps nothing."""
    shapes = [jax.ShapeDtypeStruct((1, 256, n, 64), jnp.bfloat16) for n in (2, 2, 2)]
    counts = {}
    for name, policy in (
        ("named", jax.checkpoint_policies.save_only_these_names(library.SAVED)),
        ("nothing", jax.checkpoint_policies.nothing_saveable),
    ):

        def loss(q, k, v, policy=policy):
            def attend(q, k, v):
                ids = jnp.zeros((1, 256), jnp.int32)
                return library.packed_attention(jnp.sin(q), k, v, segment_ids=ids, segments=2)

            return jax.checkpoint(attend, policy=policy)(q, k, v).astype(jnp.float32).sum()

        text = (
            jax.jit(jax.value_and_grad(loss))
            .trace(*shapes)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
        counts[name] = executions(text, "@__cudnn$fmhaSoftmax(")
    assert counts == {"named": 1, "nothing": 2}


def test_what_cudnn_cannot_take_is_said():
    shape = lambda dtype, width: jax.ShapeDtypeStruct((16, 2, width), dtype)  # noqa: E731
    fine = shape(jnp.bfloat16, 64)
    assert library.reasons(fine, fine, True, (4, 0)) == []
    for q, kinds, word in (
        (shape(jnp.float32, 64), {}, "bfloat16 or float16"),
        (shape(jnp.bfloat16, 60), {}, "steps of 8"),
        (shape(jnp.bfloat16, 264), {}, "8 to 256"),
        (fine, {"window": (4, 4), "causal": True}, "causal order only"),
        (fine, {"window": (4, 0), "causal": False}, "causal order only"),
        (fine, {"softcap": 30.0}, "softcap"),
        (jax.ShapeDtypeStruct((2**20, 32, 64), jnp.bfloat16), {}, "int32"),
    ):
        reasons = library.reasons(q, q, **({"causal": True, "window": None} | kinds))
        assert len(reasons) == 1 and word in reasons[0], reasons


def test_head_widths_before_hopper(monkeypatch):
    wide = jax.ShapeDtypeStruct((16, 2, 256), jnp.bfloat16)
    asked = functools.partial(library.reasons, wide, wide, True, None, packed=False)
    assert asked() == []
    monkeypatch.setattr(library.dispatch, "device_reasons", lambda: ("found an A100",))
    assert asked() == ["needs a head width of 8 to 128 in steps of 8, found 256"]


def test_room_for_segments():
    """Documents of 200 tokens fit, short rows have some, and the log-sum-exps stay within 2 GiB."""
    room = lambda *shape: library.room(jax.ShapeDtypeStruct((*shape, 64), jnp.bfloat16))  # noqa: E731
    assert room(8, 4096, 32) == 64 > 4096 // 200 + 1
    assert room(2, 128, 4) == 8 and room(0, 128, 4) == 8
    assert room(8, 32768, 32) == 64 < 32768 // 64  # 8 x 64 x 32 x 32768 float32 are 2 GiB
    assert room(64, 131072, 128) == 2  # cuDNN's least
    rows = jax.ShapeDtypeStruct((8, 4096, 32, 64), jnp.bfloat16)
    assert library.room(rows, 4) == 4 and library.room(rows, 1) == 2
    assert library.room(rows, 900) == 64  # not more than where nobody says


def test_fewer_slots_need_less_memory():
    """The 1.2B decoder's layer with 8 rows: what an H200 was measured to need beside the rest."""
    q, k = (jax.ShapeDtypeStruct((8, 4096, n, 64), jnp.bfloat16) for n in (32, 8))
    padded = 8 * 64 * 4096  # tokens of all slots
    hand = padded * 32 * 64 * 4 + padded * 32 * 4 + 2 * (padded * 32 * 64 * 2)
    assert library.workspace_bytes(q, k, 64) == hand == 32.25 * 2**30
    assert library.workspace_bytes(q, k, 4) == hand / 16 < 2.1 * 2**30
    assert library.workspace_bytes(q, q, 64) == hand - 16 * 2**30  # heads that are not grouped


def test_under_vmap(seed):
    """Output and gradients are those of a loop, and CUDA runs one call after the other."""
    ids = np.stack([IDS, IDS[::-1]])
    drawn = draw(seed, *IDS.shape), draw(seed + 1, *IDS.shape)
    arrays = [np.stack(pair) for pair in zip(*drawn, strict=True)]

    def both(q, k, v, dout, ids):
        attend = functools.partial(library.packed_attention, segment_ids=ids, causal=True)
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    one, mapped = jax.jit(both), jax.jit(jax.vmap(both))
    got = mapped(*arrays, ids)
    for n in range(2):
        for x, y in zip(got, one(*(x[n] for x in arrays), ids[n]), strict=True):
            np.testing.assert_allclose(x[n], y, rtol=2e-3, atol=2e-3)
    text = mapped.trace(*arrays, ids).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
