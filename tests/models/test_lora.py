"""Adapters: what they leave alone, what they add, and what a model refuses."""

import dataclasses

import jax
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.packed import LowRank
from megajax.core.tree import named_leaves
from megajax.models import decoder, lora
from megajax.models.lora import LoraConfig
from tests.tiny import MODEL, MOE, RICH, host_batch


def started(model, **changes):
    """(dense parameters, adapted ones with B = 0, a function that returns logits of either)."""
    parts = decoder.parts(model)
    params = parts.init(jax.random.key(0))
    cfg = LoraConfig(**{"rank": 3, **changes})
    adapted, _ = lora.adapt(params, parts.axes, cfg, jax.random.key(1))
    batch, logits = host_batch(0, rows=1), jax.jit(parts.logits)
    return params, adapted, lambda p: np.asarray(logits(p, batch))


def disturbed(params, seed=0):
    """The same adapters with a random B."""
    random = np.random.default_rng(seed)

    def drawn(w):
        b = random.normal(0, 0.2, w.b.shape).astype(np.float32)
        return dataclasses.replace(w, b=jax.numpy.asarray(b)) if lora.is_low_rank(w) else w

    return jax.tree.map(
        lambda w: drawn(w) if lora.is_low_rank(w) else w, params, is_leaf=lora.is_low_rank
    )


@pytest.mark.parametrize(
    "model", [MODEL, pytest.param(RICH, marks=pytest.mark.slow)], ids=["serial", "parallel"]
)
def test_a_new_adapter_leaves_the_bits_alone(model):
    params, adapted, logits_of = started(model)
    before, after = map(logits_of, (params, adapted))
    assert before.tobytes() == after.tobytes()
    changed = disturbed(adapted)
    logits = logits_of(changed)
    assert np.abs(logits - before).max() > 0.1
    for off in (lora.strip(changed), lora.mute(changed)):
        assert logits_of(off).tobytes() == before.tobytes()
    merged = lora.merge(changed)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    np.testing.assert_allclose(logits_of(merged), logits, atol=1e-5)


def test_the_sum_is_that_of_the_paper():
    """W + alpha / rank A B in float64, of an input's and of an output's weight."""
    _, adapted, _ = started(MODEL, alpha=6.0)
    changed = disturbed(adapted)
    merged = lora.merge(changed)["blocks"]["attention"]
    for name, width in (("query", 1), ("out", 2)):
        w = jax.tree.map(lambda x: np.asarray(x, np.float64), changed["blocks"]["attention"][name])
        pairs = [np.tensordot(a, b, 1) for a, b in zip(w.a, w.b, strict=True)]
        np.testing.assert_allclose(merged[name], w.base + 2.0 * np.stack(pairs), atol=1e-6)
        assert w.a.shape == (*w.base.shape[: 1 + width], 3)
    a = np.asarray(adapted["blocks"]["mlp"]["down"].a)
    bound = MODEL.mlp**-0.5
    assert 0.95 * bound < np.abs(a).max() <= bound and abs(a.mean()) < 0.1 * bound


def test_modules_have_the_names_of_peft_and_ours():
    parts = decoder.parts(MODEL)

    def leaves(*modules):
        return [n.split(".")[-1] for n in lora.leaves_of(parts.axes, LoraConfig(4, 16.0, modules))]

    assert sorted(leaves("attention")) == ["key", "out", "query", "value"]
    assert sorted(leaves("mlp", "q")) == ["down", "gate", "query", "up"]
    assert leaves("v_proj", "v") == ["value"]
    assert LoraConfig(4, modules="q, v").modules == ("q", "v")
    dense = lora.adapt({}, {}, LoraConfig(), jax.random.key(0))
    assert dense == ({}, {})


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: LoraConfig(4, modules=("qq",)), "'qq' is no module"),
        (lambda: LoraConfig(4, modules=()), "is no module"),
        (lambda: LoraConfig(-1), "lora.rank=-1 must be at least 0"),
        (lambda: LoraConfig(4, 0.0), "lora.alpha=0.0 must be above 0"),
        (lambda: LoraConfig(4, modules=(3,)), "tuple of strings"),
        (
            lambda: lora.leaves_of(decoder.parts(RICH).axes, LoraConfig(4, modules="gate")),
            "no gate",
        ),
        (lambda: lora.leaves_of(decoder.parts(MOE).axes, LoraConfig(4)), "is of experts"),
    ],
)
def test_what_is_no_module_is_refused_by_name(make, words):
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.slow
def test_a_base_in_few_bits_is_near_and_merges_into_what_it_computes():
    params, adapted, logits_of = started(MODEL, base="int8")
    kernel = adapted["blocks"]["mlp"]["up"].base
    assert kernel.weight.values.dtype == np.uint8 and adapted["tokens"].dtype == "bfloat16"
    changed = disturbed(adapted)
    logits = logits_of(changed)
    np.testing.assert_allclose(logits_of(lora.merge(changed)), logits, atol=1e-5)
    exact = lora.with_base(changed, params)
    assert 0 < np.abs(logits_of(exact) - logits).max() < 0.05
    assert {n for n, _ in named_leaves(changed, lora.is_low_rank)} == {
        n for n, _ in named_leaves(params)
    }
    assert isinstance(changed["blocks"]["mlp"]["up"], LowRank)


def test_a_base_in_few_bits_is_widened_to_the_dense_model():
    """Matrices without an adapter too, and norms, which rest in bfloat16."""
    parts = decoder.parts(MODEL)
    params, adapted, _ = started(MODEL, base="int4", modules=("q",))
    made = lora.unpacked(adapted, parts)
    assert jax.tree.structure(made) == jax.tree.structure(parts.abstract)
    for x, like in zip(jax.tree.leaves(made), jax.tree.leaves(parts.abstract), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
    for x, exact in zip(jax.tree.leaves(made), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, exact, atol=0.2 * np.abs(exact).max())  # (bound) of 4 bits


def test_a_base_in_bfloat16_is_not_rounded_again():
    _, adapted, _ = started(MODEL, base="bfloat16", modules=("q",))
    changed = disturbed(adapted)
    made = lora.unpacked(changed, decoder.parts(MODEL))["blocks"]["attention"]["query"]
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), changed["blocks"]["attention"]["query"])
    pairs = np.stack([np.tensordot(a, b, 1) for a, b in zip(w.a, w.b, strict=True)])
    np.testing.assert_allclose(made, w.base + 16 / 3 * pairs, atol=1e-6)


def test_full_rank_is_full_training():
    """With A the identity and plain descent on B, W + A B takes the steps of descent on W."""
    model = dataclasses.replace(
        MODEL, layers=1, width=32, heads=2, kv_heads=2, head_width=16, mlp=32
    )
    parts, batch = decoder.parts(model), host_batch(0, rows=2)
    params = parts.init(jax.random.key(0))
    cfg = LoraConfig(rank=32, alpha=32.0)
    adapted, _ = lora.adapt(params, parts.axes, cfg, jax.random.key(1))
    names = lora.leaves_of(parts.axes, cfg)

    def with_identity(w):
        eye = np.eye(32, dtype=np.float32).reshape(w.a.shape[1:])
        return dataclasses.replace(w, a=jax.numpy.asarray(np.stack([eye])))

    adapted = jax.tree.map(
        lambda w: with_identity(w) if lora.is_low_rank(w) else w, adapted, is_leaf=lora.is_low_rank
    )

    def loss(tree):
        logits = parts.logits(tree, batch)[..., : model.vocab]
        scores = jax.nn.log_softmax(logits)
        targets = jax.numpy.maximum(batch["targets"], 0)[..., None]
        return -jax.numpy.take_along_axis(scores, targets, -1).mean()

    def curve(tree, learns):
        step = jax.jit(jax.value_and_grad(loss))
        losses = []
        for _ in range(6):
            value, grads = step(tree)
            losses.append(float(value))
            flat, shape = jax.tree_util.tree_flatten_with_path(tree)
            moved = [
                x - 0.5 * g if learns(jax.tree_util.keystr(path, simple=True, separator=".")) else x
                for (path, x), g in zip(flat, jax.tree.leaves(grads), strict=True)
            ]
            tree = jax.tree.unflatten(shape, moved)
        return losses

    dense = curve(params, lambda name: name in names)
    low = curve(adapted, lambda name: name.endswith(".b"))
    assert dense[-1] < dense[0] - 0.1
    np.testing.assert_allclose(low, dense, rtol=1e-4)
