"""The packed encoder against the padded one with the same weights, and both against NumPy."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from megajax.core import tree
from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.layers.ops import Ops
from megajax.models import encoder
from megajax.models.encoder_config import PRESETS, EncoderConfig
from megajax.models.parts import map_words
from megajax.parallel import sharding, tensor
from pallas_kernels import bucket

B, S, BAD = 4, 24, 9
TINY = EncoderConfig(
    layers=2, width=32, heads=4, mlp=64, vocab=61, vocab_multiple=16, max_positions=S
)
LENGTHS = {0.1: (3, 1, 0, 5), 0.6: (23, 9, 17, 8), 1.0: (24, 24, 24, 24)}


def weights_of(parts):
    """Returns weights far from their usual start: biases and shifts count."""
    random = np.random.default_rng(0)
    leaves = {
        name: (name.endswith("scale") + 0.2 * random.standard_normal(x.shape)).astype(np.float32)
        for name, x in tree.named_leaves(parts.abstract)
    }
    return tree.nest(leaves)


def batch_of(lengths, seed):
    """Returns the batch, with token type BAD wherever it pads."""
    random = np.random.default_rng(seed)
    pads = np.arange(S) >= np.asarray(lengths)[:, None]
    targets = np.where(random.random((B, S)) < 0.3, random.integers(0, 61, (B, S)), -1)
    batch = {
        "tokens": random.integers(0, 61, (B, S)),
        "types": np.where(pads, BAD, random.integers(0, 2, (B, S))),
        "targets": np.where(pads, 7, targets),
    }
    return {k: v.astype(np.int32) for k, v in batch.items()}, np.asarray(lengths)


# Not eager: each of its operations would be compiled by itself.
pack_batch = jax.jit(encoder.pack_batch, static_argnums=2)


def poison(params, table, row):
    """Embeddings with this row are NaN."""
    changed = params[table].copy()
    changed[row] = np.nan
    return params | {table: changed}


@pytest.fixture(scope="module")
def models():
    """(packed parts, padded parts on XLA's attention, weights, jitted packed logits)."""
    packed = encoder.parts(TINY)
    run = jax.jit(functools.partial(encoder.logits, packed), static_argnames="capacity")
    return packed, encoder.parts(TINY, ops=Ops()), weights_of(packed), run


def test_packed_is_padded(models, seed):
    """Values of every valid token, at three fillings, the packed one with NaN in the padding."""
    _, padded_parts, params, packed = models
    padded = jax.jit(functools.partial(encoder.logits, padded_parts))
    for lengths in LENGTHS.values():
        batch, lengths_B = batch_of(lengths, seed)
        want = np.asarray(padded(params, batch, lengths_B))
        outputs = packed(poison(params, "types", BAD), batch, lengths_B, capacity=96)
        np.testing.assert_allclose(outputs, want, atol=1e-5)
    assert want[..., :61].std((0, 1)).mean() > 0.3  # tokens differ
    assert packed._cache_size() == 1  # one compile for all lengths of a capacity


def oracle(params, cfg, tokens, types):
    """BERT as its paper writes it, in float64, one sequence without padding."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)

    def norm(x, w):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg.norm_eps) * w["scale"] + w["shift"]

    def gelu(x):
        return x * (1 + erf(x / np.sqrt(2))) / 2

    n = len(tokens)
    x = norm(p["tokens"][tokens] + p["positions"][:n] + p["types"][types], p["embed_norm"])
    for i in range(cfg.layers):
        w = jax.tree.map(lambda a: a[i], p["blocks"])  # noqa: B023
        a = w["attention"]
        q, k, v = (
            np.einsum("sd,dhk->hsk", x, a[m]) + a[f"{m}_bias"][:, None]
            for m in ("query", "key", "value")
        )
        z = np.einsum("hsk,hmk->hsm", q, k) / np.sqrt(cfg.head_width)
        z = np.exp(z - z.max(-1, keepdims=True))
        y = np.einsum("hsm,hmk->hsk", z / z.sum(-1, keepdims=True), v)
        x = norm(x + np.einsum("hsk,hkd->sd", y, a["out"]) + a["out_bias"], w["attention_norm"])
        m = w["mlp"]
        hidden = gelu(x @ m["up"] + m["up_bias"])
        x = norm(x + hidden @ m["down"] + m["down_bias"], w["mlp_norm"])
    x = norm(gelu(x @ p["dense"] + p["dense_bias"]), p["head_norm"])
    return x @ p["tokens"].T + p["head_bias"]


def test_formulas(models, seed):
    _, _, params, packed = models
    batch, lengths_B = batch_of(LENGTHS[0.6], seed)
    outputs = np.asarray(packed(params, batch, lengths_B, capacity=96))
    for b, n in enumerate(LENGTHS[0.6]):
        want = oracle(params, TINY, batch["tokens"][b, :n], batch["types"][b, :n])
        np.testing.assert_allclose(outputs[b, :n, :61], want[:, :61], atol=2e-4)
        assert (outputs[b, n:] == 0).all()
    assert (outputs[0, : LENGTHS[0.6][0], 61:] < -1e29).all()  # what pads the vocabulary


def loss(params, rows, parts, key=None):
    """The masked-token loss, mean over the predicted tokens."""
    sums = parts.loss(params, rows, key)
    return sums.cross_entropy / sums.count.astype(jnp.float32)


def test_gradients(models, seed):
    """Packed = padded for every weight, with NaN in the padding; the dead tail changes no bit."""
    packed_parts, padded_parts, params, _ = models
    batch, lengths_B = batch_of(LENGTHS[0.6], seed)
    row, info = pack_batch(batch, lengths_B, 70)
    grad = jax.jit(jax.value_and_grad(functools.partial(loss, parts=packed_parts)))
    value, grads = grad(poison(params, "types", BAD), row)
    padded = jax.jit(jax.value_and_grad(functools.partial(loss, parts=padded_parts)))
    want, want_grads = padded(params, encoder.pad_batch(batch, lengths_B))
    assert abs(float(value) - float(want)) < 1e-5 and float(want) > 1
    for (name, x), y in zip(tree.named_leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, err_msg=name)
        assert np.abs(y).max() > 0 or name.endswith("key_bias"), name

    count, last = int(info.cu_seqlens[-1]), S - 1  # a position that no token of `row` has
    assert count == sum(LENGTHS[0.6]) and (np.asarray(row["targets"])[0, count:] == -1).all()
    tail = {"tokens": 5, "positions": last, "types": BAD}
    dirty = row | {k: row[k].at[:, count:].set(v) for k, v in tail.items()}
    spoilt = grad(poison(poison(params, "types", BAD), "positions", last), dirty)
    chex.assert_trees_all_equal(spoilt, (value, grads))


def test_a_class_is_the_first_tokens_target():
    batch, lengths_B = batch_of((3, 0, 5, 1), 0)
    batch["targets"] = np.array([2, 1, 0, 1], np.int32)
    row, info = pack_batch(batch, lengths_B, 12)
    want = np.full(12, -1)
    want[[0, 3, 8]] = [2, 0, 1]  # the second row is empty
    np.testing.assert_array_equal(row["targets"][0], want)
    padded = encoder.pad_batch(batch, lengths_B)
    np.testing.assert_array_equal(padded["targets"][:, 0], [2, -1, 0, 1])
    assert (np.asarray(padded["targets"])[:, 1:] == -1).all()


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 3])
def test_classes_packed_are_padded(repeats, seed):
    """Also with ALBERT's narrow tables and shared blocks, an offset and no types."""
    cfg = dataclasses.replace(
        TINY,
        layers=2,
        repeats=repeats,
        embed_width=16,
        position_offset=2,
        max_positions=S + 2,
        types=0,
        head="classify",
        labels=3,
    )
    parts = encoder.parts(cfg)
    params, (batch, lengths_B) = weights_of(parts), batch_of(LENGTHS[0.6], seed)
    run = jax.jit(functools.partial(encoder.classify, parts), static_argnums=3)
    packed, padded = (np.asarray(run(params, batch, lengths_B, c)) for c in (64, None))
    assert packed.shape == (B, 3) and packed.std() > 0.1
    np.testing.assert_allclose(packed, padded, atol=1e-5)


@pytest.mark.slow
def test_a_mesh_changes_nothing(models, seed):
    """Two packed rows over data x tensor, loss and gradients as on one device."""
    parts, _, params, _ = models
    batch, lengths_B = batch_of(LENGTHS[0.6], seed)
    halves = [
        pack_batch({k: v[i : i + 2] for k, v in batch.items()}, lengths_B[i : i + 2], 40)[0]
        for i in (0, 2)
    ]
    rows = {k: np.concatenate([np.asarray(h[k]) for h in halves]) for k in halves[0]}
    want, want_grads = jax.jit(jax.value_and_grad(functools.partial(loss, parts=parts)))(
        params, rows
    )
    layout = sharding.layout(MeshSpec(data=2, tensor=2).build(jax.devices()[:4]))
    with jax.set_mesh(layout.mesh):
        cut = encoder.parts(TINY, layout, tensor.ops(layout, "varlen"))

        def place(words, x):
            return jax.device_put(x, layout.named(layout.stored(*words)))

        spec = layout.named(layout.act("batch", "seq"))
        value, grads = jax.jit(jax.value_and_grad(functools.partial(loss, parts=cut)))(
            map_words(place, cut.axes, params), jax.device_put(rows, spec)
        )
    np.testing.assert_allclose(value, want, rtol=1e-5)
    for (name, x), y in zip(tree.named_leaves(grads), jax.tree.leaves(want_grads), strict=True):
        np.testing.assert_allclose(np.asarray(x), y, atol=2e-5, err_msg=name)


def test_a_mesh_that_cannot_cut_the_encoder_is_refused():
    layout = sharding.layout(MeshSpec(data=1, tensor=8).build())
    with pytest.raises(UserError, match=f"model.heads={TINY.heads} must be divisible by mesh"):
        encoder.parts(TINY, layout, tensor.ops(layout))


@pytest.mark.slow
def test_dropout_differs_by_key(models, seed):
    cfg = dataclasses.replace(TINY, layers=1, repeats=2, dropout=0.5)
    parts = encoder.parts(cfg)
    batch, lengths_B = batch_of(LENGTHS[0.6], seed)
    row, _ = pack_batch(batch, lengths_B, 64)
    run = jax.jit(functools.partial(loss, parts=parts))
    keys = (None, jax.random.key(1), jax.random.key(2))
    assert len({float(run(weights_of(parts), row, key=key)) for key in keys}) == 3


# Parameters of transformers' models for masked tokens, of the published config.json.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("bert_base", 109514298),
        ("bert_large", 335174458),
        ("roberta_base", 124697433),
        ("roberta_large", 355412057),
        ("distilbert_base", 66985530),
        ("albert_base", 11221680),
    ],
)
def test_presets_have_the_published_size(name, count):
    cfg = dataclasses.replace(PRESETS[name](), vocab_multiple=1)
    assert tree.count(encoder.parts(cfg).abstract) == count


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heads": 3}, "model.heads=3 must divide model.width=128; nearest: 2, 4"),
        ({"dropout": 1.0}, "--model.dropout"),
        ({"types": -1}, "model.types=-1 must be at least 0"),
        ({"position_offset": 512}, "from 0 to model.max_positions - 1 = 511"),
    ],
)
def test_impossible_shapes_are_refused(changes, words):
    with pytest.raises(UserError) as error:
        dataclasses.replace(EncoderConfig(), **changes)
    assert words in str(error.value)


def test_a_batch_that_does_not_fit_says_what_would():
    batch, lengths_B = batch_of(LENGTHS[1.0], 0)
    with pytest.raises(ValueError, match="at least 96"):
        encoder.pack_batch(batch, jnp.asarray(lengths_B), bucket(40, multiple=8))
