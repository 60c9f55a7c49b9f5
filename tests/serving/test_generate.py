"""Cached decoding against the whole forward pass, on one device and on a mesh."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.models import decoder
from megajax.parallel import collective_matmul, overlap, sharding, tensor
from megajax.serving.generate import Generator, check_request
from megajax.serving.sampling import SamplingConfig, sample
from megajax.systems.prune_export import stored, to_tiles
from megajax.systems.pruning import prune
from megajax.training.masking import chosen, keep, pick
from pallas_kernels.collective import api
from tests.tiny import DEEPSEEK, MODEL, MQA, RICH

GREEDY = SamplingConfig(temperature=0.0)
PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5]]
ROW = 16  # tokens of the oracle's rows


def sharp(cfg, seed=0):
    """Parameters large enough that the likeliest token is clear."""
    params = jax.jit(decoder.parts(cfg).init)(jax.random.key(seed))
    return jax.tree.map(lambda x: 4 * x, params)


def one_by_one(cfg, params, prompt, new):
    """The oracle: run the whole row again for every token. What comes later is masked."""
    logits = _logits(cfg)
    tokens = list(prompt)
    for _ in range(new):
        row = np.zeros((1, ROW), np.int32)
        row[0, : len(tokens)] = tokens
        batch = {"tokens": row, "positions": np.arange(ROW, dtype=np.int32)[None]}
        tokens.append(int(np.argmax(np.asarray(logits(params, batch))[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@functools.cache
def _logits(cfg):
    """One program for all rows of a model."""
    return jax.jit(decoder.parts(cfg).logits)


def placed(params, cfg, lo):
    with jax.set_mesh(lo.mesh):
        axes = decoder.parts(cfg, lo, tensor.ops(lo)).axes
    from megajax.models.parts import map_words

    return map_words(lambda w, x: jax.device_put(x, lo.named(lo.stored(*w))), axes, params)


@pytest.mark.parametrize(
    ("cfg", "mesh"),
    [
        pytest.param(MODEL, {"data": 1}, marks=pytest.mark.slow),
        pytest.param(MODEL, {"tensor": 4}, marks=pytest.mark.slow),
        pytest.param(RICH, {"data": 1}, marks=pytest.mark.slow),
        (MQA, {"tensor": 4}),
        pytest.param(DEEPSEEK, {"expert": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids=["plain", "plain on a mesh", "rich", "one key-value head", "experts on a mesh"],
)
def test_greedy_is_the_argmax_of_the_whole_pass(cfg, mesh):
    params = sharp(cfg)
    spec = MeshSpec(**mesh)
    lo = sharding.layout(spec.build(), model=cfg)
    out = Generator(cfg, lo.mesh, sampling=GREEDY)(placed(params, cfg, lo), PROMPTS, 6)
    want = [one_by_one(cfg, params, p, 6) for p in PROMPTS]
    assert out == want
    assert len({tuple(w) for w in want}) > 1


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 2, "tensor": 4}, {"data": 1}])
def test_packed_tiles_give_the_same_tokens(mesh):
    axes, random = decoder.parts(MQA).axes, np.random.default_rng(0)
    names, params = chosen(axes), sharp(MQA)
    part = pick(params, names)
    scores = jax.tree.map(lambda w: random.gamma(0.3, size=w.shape), part)
    masks = prune(part, scores, 0.5, tile=8, chunk=4, axes=pick(axes, names))
    params = keep(masks, params)
    lo = sharding.layout(MeshSpec(**mesh).build(), model=MQA)
    tiles = to_tiles(params, None, axes, layout=lo, tile=8, chunk=4)
    assert 0.4 < stored(tiles) < 1
    out = Generator(MQA, lo.mesh, sampling=GREEDY)(tiles, PROMPTS, 3)
    assert out == [one_by_one(MQA, params, p, 3) for p in PROMPTS]


@pytest.mark.parametrize("cfg", [MQA, pytest.param(MODEL, marks=pytest.mark.slow)])
def test_sums_in_the_products_kernel_give_the_same_tokens(cfg, monkeypatch):
    """Around the kernel, which is for GPUs: each product of a step that ends on tensor ranks."""
    calls = []

    def kernel(x, w, bias, residual, *, axis, acc):
        calls.append(x.shape[1])
        options = {"bias": bias, "residual": residual, "acc_dtype": acc}
        return api.matmul_all_reduce(x, w, axis=axis, implementation="xla", **options)

    def best(op, shape, *_):
        return ("fused", "measured") if op == api.REDUCE else ("xla", "")

    stand_in = types.SimpleNamespace(
        fused_reduce=kernel, ranks_of=api.ranks_of, check_each=api.check_each
    )
    monkeypatch.setattr(collective_matmul, "kernels", stand_in)
    monkeypatch.setattr(overlap, "best", best)
    monkeypatch.setattr(overlap, "fused_reasons", lambda *_: ())
    params, lo = sharp(cfg), sharding.layout(MeshSpec(data=2, tensor=4).build(), model=cfg)
    out = Generator(cfg, lo.mesh, sampling=GREEDY)(placed(params, cfg, lo), PROMPTS, 3)
    assert out == [one_by_one(cfg, params, p, 3) for p in PROMPTS]
    assert set(calls) == {5, 1}  # the prompts' positions, then one at a time


def test_the_end_token_ends_a_row():
    params = sharp(MODEL)
    lo = sharding.layout(MeshSpec(data=1).build())
    generator = Generator(MODEL, lo.mesh, sampling=GREEDY)
    free = generator(placed(params, MODEL, lo), PROMPTS, 6)
    end = free[0][2]
    ended = generator(placed(params, MODEL, lo), PROMPTS, 6, end=end)
    for a, b in zip(free, ended, strict=True):
        assert b == (a[: a.index(end)] if end in a else a)


def test_impossible_requests_are_refused():
    generator = Generator(RICH, MeshSpec(data=1).build())
    with pytest.raises(UserError, match="at least one token"):
        generator({}, [[]], 3)
    with pytest.raises(UserError, match="take 40 positions; the model has 32"):
        generator({}, [[1] * 20], 20)


def draw(logits, **settings):
    """4,096 draws from one row of logits, as frequencies."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (4096, len(logits)))
    ids = np.asarray(sample(rows, jax.random.key(0), SamplingConfig(**settings)))
    return np.bincount(ids, minlength=len(logits)) / 4096


LOGITS = np.log([0.5, 0.3, 0.15, 0.05])


def test_sampling_follows_the_distribution():
    np.testing.assert_allclose(draw(LOGITS, temperature=1.0), np.exp(LOGITS), atol=0.03)
    hot = np.exp(LOGITS / 2) / np.exp(LOGITS / 2).sum()
    np.testing.assert_allclose(draw(LOGITS, temperature=2.0), hot, atol=0.03)


def test_greedy_top_k_and_top_p():
    for cold in (0.0, 1e-37, 1e-46):  # the last is 0 in float32, and logits over both not finite
        assert draw(-100 * LOGITS, temperature=cold)[3] == 1.0
    np.testing.assert_allclose(
        draw(LOGITS, temperature=1.0, top_k=2), [0.625, 0.375, 0, 0], atol=0.03
    )
    # 0.5 alone reaches 0.5; with 0.6 the second is needed, the third is not.
    assert draw(LOGITS, temperature=1.0, top_p=0.5)[0] == 1.0
    np.testing.assert_allclose(
        draw(LOGITS, temperature=1.0, top_p=0.6), [0.625, 0.375, 0, 0], atol=0.03
    )


def test_settings_out_of_range_are_refused():
    for settings in ({"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(UserError):
            SamplingConfig(**settings)


def test_a_sliding_window_decodes_as_it_trains():
    cfg = dataclasses.replace(MODEL, window=3)
    params = sharp(cfg)
    lo = sharding.layout(MeshSpec(data=1).build())
    out = Generator(cfg, lo.mesh, sampling=GREEDY)(placed(params, cfg, lo), [[3, 1, 4, 1, 5]], 8)
    assert out[0] == one_by_one(cfg, params, [3, 1, 4, 1, 5], 8)


@pytest.mark.parametrize(
    ("prompts", "new", "words"),
    [
        ([[1], [3, 64]], 2, r"prompts\[1\] has the token id 64; the vocabulary has 0 to 63"),
        ([[-1]], 2, "has the token id -1"),
        ([[1.5]], 2, r"prompts\[0\] must be a list of token ids"),
        ("abc", 2, "must be a list of token ids"),
        ([1, 2], 2, "must be a list of token ids"),
        ([[1, [2, 3]]], 2, "each prompt must be a list of token ids"),
        ([[1]], -3, "new_tokens=-3 must be a whole number of at least 0"),
        ([[1]], 2.5, r"new_tokens=2.5 must be .* \(--new_tokens\)"),
    ],
)
def test_what_is_no_request_is_refused(prompts, new, words):
    with pytest.raises(UserError, match=words):
        check_request(prompts, new, 64)
    check_request([[0, 63], np.array([5])], 0, 64)
