"""The decoder against its formulas, written once more in float64 NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core import tree
from megajax.core.errors import UserError
from megajax.models import decoder
from megajax.models.decoder_config import PRESETS, DecoderConfig
from megajax.models.parts import map_words
from tests.tiny import LATENT, MODEL, RICH, host_batch

GQA = dataclasses.replace(MODEL, kv_heads=2, position="none", tied=False)


def rms(x, scale, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def attention(h, w, cfg):
    q, k, v = (np.einsum("bsd,dhk->bshk", h, w[n]) for n in ("query", "key", "value"))
    k, v = (np.repeat(a, cfg.heads // cfg.kv_heads, 2) for a in (k, v))
    logits = np.einsum("bshk,bmhk->bhsm", q, k) / np.sqrt(cfg.head_width)
    S = h.shape[1]
    logits = np.where(np.tril(np.ones((S, S))) > 0, logits, -np.inf)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    y = np.einsum("bhsm,bmhk->bshk", p / p.sum(-1, keepdims=True), v)
    return np.einsum("bshk,hkd->bsd", y, w["out"])


def mlp(h, w):
    gate = h @ w["gate"]
    return (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]


def oracle(params, tokens, cfg):
    """MegaScale section 3.1: serial and parallel block as the paper writes them."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    x = p["tokens"][tokens]
    for i in range(cfg.layers):
        w = jax.tree.map(lambda a: a[i], p["blocks"])  # noqa: B023
        n1 = w["attention_norm"]["scale"]
        if cfg.block == "parallel":
            h = rms(x, n1)
            x = x + mlp(h, w["mlp"]) + attention(h, w["attention"], cfg)
        else:
            x = x + attention(rms(x, n1), w["attention"], cfg)
            x = x + mlp(rms(x, w["mlp_norm"]["scale"]), w["mlp"])
    return rms(x, p["norm"]["scale"]) @ p["head"]


@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_block_formulas(block):
    cfg = dataclasses.replace(GQA, block=block)
    parts = decoder.parts(cfg)
    params = jax.tree.map(lambda a: 3 * a, parts.init(jax.random.key(0)))  # far from the identity
    tokens = np.random.default_rng(0).integers(0, 61, (2, 9)).astype(np.int32)
    positions = np.broadcast_to(np.arange(9, dtype=np.int32), (2, 9))
    batch = {"tokens": jnp.asarray(tokens), "positions": jnp.asarray(positions)}
    logits = np.asarray(parts.logits(params, batch))
    np.testing.assert_allclose(logits[..., :61], oracle(params, tokens, cfg)[..., :61], atol=2e-4)
    assert (logits[..., 61:] < -1e29).all()  # the padding of the vocabulary


def test_the_blocks_differ():
    params = decoder.parts(GQA).init(jax.random.key(0))
    tokens = np.arange(9, dtype=np.int32)[None]
    parallel = dataclasses.replace(GQA, block="parallel")
    assert np.abs(oracle(params, tokens, GQA) - oracle(params, tokens, parallel)).max() > 1e-3


@pytest.mark.parametrize("remat", ["full", "outputs", "dots"])
@pytest.mark.parametrize("cfg", [MODEL, RICH], ids=["plain", "rich"])
def test_remat_changes_no_gradient(remat, cfg):
    parts = decoder.parts(cfg, loss_chunks=2)
    params = parts.init(jax.random.key(0))
    batch = {k: jnp.asarray(v) for k, v in host_batch(0, rows=2).items()}

    def loss(params, remat):
        return parts.loss(params, batch, None, remat).cross_entropy

    plain, saved = (jax.grad(loss)(params, r) for r in ("none", remat))
    for (name, a), b in zip(tree.named_leaves(plain), jax.tree.leaves(saved), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)


def test_words_name_every_dimension():
    parts = decoder.parts(RICH)
    map_words(
        lambda words, leaf: pytest.fail(f"{words}") if len(words) != leaf.ndim else None,
        parts.axes,
        parts.abstract,
    )
    named = dict(
        zip(
            [n for n, _ in tree.named_leaves(parts.abstract)],
            jax.tree.leaves(parts.axes, is_leaf=tree.is_words),
            strict=True,
        )
    )
    assert named["blocks.attention.query"] == ("layers", "embed", "heads", None)
    assert named["tokens"] == ("vocab", "embed")


# Parameters of the published models: what their papers and model cards say.
@pytest.mark.parametrize(
    ("name", "millions"),
    [("gpt2", 124.4), ("gpt2_medium", 354.8), ("gpt2_large", 774.0), ("gpt2_xl", 1557.6),
     ("llama3_1b", 1235.8), ("llama3_8b", 8030.3), ("llama3_70b", 70553.7),
     ("qwen2_0p5b", 494.0), ("qwen2_7b", 7615.6), ("qwen3_0p6b", 596.0), ("qwen3_8b", 8190.7),
     ("moonlight_16b_a3b", 15960.1), ("deepseek_v3", 671026.4),
     ("gpt_oss_20b", 20914.8), ("gpt_oss_120b", 116829.2),
     ("gemma3_270m", 268.1), ("gemma3_1b", 999.9), ("gemma3_4b", 3880.3), ("olmo2_1b", 1484.9),
     ("olmo2_7b", 7298.6), ("smollm3_3b", 3075.1), ("phi4_14b", 14659.5), ("phi4_mini", 3836.0)],
)  # fmt: skip
def test_presets_have_the_published_size(name, millions):
    cfg = dataclasses.replace(PRESETS[name](), vocab_multiple=1)
    assert tree.count(decoder.parts(cfg).abstract) / 1e6 == pytest.approx(millions, abs=0.06)


def test_megascale_sizes():
    for name, billions in (("megascale_175b", 175), ("megascale_530b", 530)):
        parts = decoder.parts(PRESETS[name]())
        assert tree.count(parts.abstract) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_heads": 3}, "model.kv_heads=3 must divide model.heads=4; nearest: 2, 4"),
        ({"head_width": 7}, "must be even for rotary"),
        ({"window": 0}, "model.window=0 must be at least 1"),
        ({"dropout": 1.0}, "--model.dropout"),
        ({"layers": 0}, "--model.layers"),
        (
            {"latent": LATENT.latent, "head_width": 4},
            "model.latent.rotary=4 must be even and below",
        ),
        ({"latent": LATENT.latent, "head_width": 6}, "model.latent.value=8 must be at most"),
        ({"latent": LATENT.latent, "bias": "qkv", "head_width": 32}, "model.bias=qkv: use none"),
        ({"latent": LATENT.latent, "kv_heads": 2}, "use 4 (--model.kv_heads)"),
        ({"latent": LATENT.latent, "block": "parallel"}, "use serial (--model.block)"),
        ({"moe": LATENT.moe, "bias": "all"}, "shared experts have no biases"),
        ({"moe": LATENT.moe, "pattern": "wf", "window": 3}, "layers are of one kind"),
    ],
)
def test_impossible_shapes_are_refused(changes, words):
    with pytest.raises(UserError) as error:
        dataclasses.replace(DecoderConfig(), **changes)
    assert words in str(error.value)


def test_dropout_needs_a_key_and_changes_with_it():
    cfg = dataclasses.replace(MODEL, dropout=0.5)
    parts = decoder.parts(cfg)
    params = parts.init(jax.random.key(0))
    batch = {k: jnp.asarray(v) for k, v in host_batch(0, rows=2).items()}
    off, on, other = (
        float(parts.loss(params, batch, key).cross_entropy)
        for key in (None, jax.random.key(1), jax.random.key(2))
    )
    assert len({off, on, other}) == 3
