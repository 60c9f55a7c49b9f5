"""Every conversion there and back, bit for bit, and against element numbers laid out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint.layouts import FusedQkv, PaddedVocab, Staged, Unstacked, convert
from megajax.core.errors import UserError
from megajax.core.tree import named_leaves
from megajax.models import decoder
from tests.tiny import MODEL

L, D, H, G, K, V = 5, 6, 4, 2, 3, 11


def state():
    """Parameters and two moments, as a training state holds them."""

    def tree(first):
        shapes = {
            "blocks.attention.query": (L, D, H, K),
            "blocks.attention.key": (L, D, G, K),
            "blocks.attention.value": (L, D, G, K),
            "blocks.attention_norm.scale": (L, D),
            "tokens": (V, D),
            "head": (D, V),
            "norm.scale": (D,),
        }
        return {
            n: np.asarray(first + 1 + np.arange(np.prod(s), dtype=np.float32).reshape(s))
            for n, s in shapes.items()
        }

    trees = {"params": tree(0), "opt.mu": tree(1000), "opt.nu": tree(2000)}
    leaves_by_name = {f"{p}.{n}": x for p, leaves in trees.items() for n, x in leaves.items()}
    return leaves_by_name | {"opt.count": np.array(7), "step": np.array(7)}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        x, y = np.asarray(a[name]), np.asarray(b[name])
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes(), name


CONVERSIONS = [
    Unstacked(),
    Staged(L, 5),
    Staged(L, 2),
    Staged(L, 1),
    Staged(L, 2, 2),
    Staged(L, 3, 2),
    FusedQkv(),
    PaddedVocab(V, 8),
]


@pytest.mark.parametrize("conversion", CONVERSIONS, ids=str)
def test_there_and_back_changes_no_bit(conversion):
    ours = state()
    there = conversion.there(ours)
    assert there.keys() != ours.keys() or any(there[n].shape != ours[n].shape for n in ours)
    assert_same(conversion.back(there), ours)


def test_all_of_them_after_each_other():
    ours = state()
    chain = [PaddedVocab(V, 8), FusedQkv(), Staged(L, 2, 2)]
    there = convert(ours, chain)
    assert there["params.blocks.attention.qkv"].shape == (2, 4, D, G, 4, K)
    assert there["opt.mu.tokens"].shape == (16, D) and there["step"] == 7
    assert_same(convert(there, back=chain), ours)
    other = [Unstacked()]  # from one foreign layout to another
    assert_same(convert(convert(there, other, chain), back=other), ours)


def test_layers_by_number():
    there = Unstacked().there(state())
    query = state()["opt.nu.blocks.attention.query"]
    np.testing.assert_array_equal(there["opt.nu.blocks.3.attention.query"], query[3])
    assert "params.blocks.attention.query" not in there and "params.norm.scale" in there


@pytest.mark.parametrize(
    ("layers", "stages", "chunks"), [(8, 2, 1), (8, 2, 2), (12, 2, 3), (7, 2, 2)]
)
def test_stages_hold_the_layers_that_megatron_gives_them(layers, stages, chunks):
    """Chunk c of stage s: the layers of group c stages + s, counted out one by one."""
    per = -(-layers // (stages * chunks))
    x = np.arange(1, layers + 1, dtype=np.float32).reshape(layers, 1)
    there = Staged(layers, stages, chunks).there({"blocks.x": x})["blocks.x"][..., 0]
    for s in range(stages):
        held = [(c * stages + s) * per + i for c in range(chunks) for i in range(per)]
        assert there[s].tolist() == [n + 1 if n < layers else 0 for n in held]


def test_the_order_is_that_of_the_pipeline():
    from megajax.parallel.pipeline import layer_order

    for layers, stages, chunks in ((8, 2, 1), (8, 2, 2), (24, 4, 3)):
        ours = Staged(layers, stages, chunks).order.ravel()
        np.testing.assert_array_equal(ours, layer_order(layers, stages, chunks))


def test_fused_heads_lie_by_group():
    ours = state()
    fused = FusedQkv().there(ours)["params.blocks.attention.qkv"]
    q, k, v = (ours[f"params.blocks.attention.{n}"] for n in ("query", "key", "value"))
    for g in range(G):
        for r in range(H // G):
            np.testing.assert_array_equal(fused[..., g, r, :], q[..., g * (H // G) + r, :])
        np.testing.assert_array_equal(fused[..., g, -2, :], k[..., g, :])
        np.testing.assert_array_equal(fused[..., g, -1, :], v[..., g, :])


def test_another_padding_of_the_vocabulary():
    ours = state()
    eight, four = PaddedVocab(V, 8).there(ours), PaddedVocab(V, 4).there(ours)
    assert_same(PaddedVocab(V, 4).there(eight), four)
    assert four["params.head"].shape == (D, 12) and not four["params.tokens"][V:].any()


def test_a_models_own_parameters():
    """Of the decoder, with the names it really has."""
    abstract = named_leaves(decoder.parts(MODEL).abstract)
    ours = {n: np.random.default_rng(0).standard_normal(x.shape, np.float32) for n, x in abstract}
    layers = MODEL.layers
    for chain in ([Unstacked()], [FusedQkv(), Staged(layers, 2)], [Staged(layers, 2, 2)]):
        there = convert(ours, chain)
        assert there.keys() != ours.keys() or there["blocks.attention.out"].ndim == 5
        assert_same(convert(there, back=chain), ours)


@pytest.mark.parametrize(
    ("conversion", "leaves", "words"),
    [
        (Unstacked(), {"blocks.0.x": 1, "blocks.2.x": 1}, r"blocks.x lacks layers \[1\]"),
        (Unstacked(), {"blocks.0.x": 1, "blocks.1.x": 2}, "has layers of shapes"),
        (Staged(4, 2), {"blocks.x": 5}, r"\(stages, layers\)"),
        (FusedQkv(), {"a.qkv": 2}, "is not .* heads"),
        (PaddedVocab(3, 4), {"tokens": 2}, "tokens has 2 rows for 3 words; nearest: 4"),
        (PaddedVocab(3, 4), {"tokens": 4}, "tokens: what pads it from 3 to 4 is not zero"),
    ],
)
def test_what_does_not_fit_is_refused(conversion, leaves, words):
    with pytest.raises(UserError, match=words):
        conversion.back({n: np.ones((size, 2)) for n, size in leaves.items()})


def test_missing_parts_of_a_fusion_are_named():
    with pytest.raises(UserError, match="a.query cannot be fused: a.key, a.value is not there"):
        FusedQkv().there({"a.query": np.ones((2, 2, 2))})
    with pytest.raises(UserError, match="do not fuse"):
        FusedQkv().there(
            {n: np.ones((2, s, 2)) for n, s in (("query", 3), ("key", 2), ("value", 2))}
        )
    with pytest.raises(UserError, match="blocks.0.x is one layer already"):
        Unstacked().there({"blocks.0.x": np.ones((3, 1))})
    with pytest.raises(UserError, match="has 3 layers, not 4"):
        Staged(4, 2).there({"blocks.x": np.ones((3, 1))})


def test_jax_arrays_stay_on_their_devices():
    ours = {n: x for n, x in state().items() if n.startswith("params.blocks.attention.")}
    chain = [FusedQkv(), Staged(L, 2, 2)]
    there = convert({n: jnp.asarray(x) for n, x in ours.items()}, chain)
    assert all(isinstance(x, jax.Array) for x in there.values())
    assert_same(there, convert(ours, chain))
    assert_same(convert(there, back=chain), ours)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Staged(4, 99999999999), "stages=99999999999 must be at most .*; nearest: 4"),
        (lambda: Staged(4, 0), "stages=0 must be a whole number from 1 on"),
        (lambda: PaddedVocab(100, 0), "multiple=0 must be a whole number from 1 on"),
    ],
)
def test_numbers_that_make_no_layout_are_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()
