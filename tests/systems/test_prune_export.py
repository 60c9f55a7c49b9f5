"""A pruned model on packed tiles gives the logits of the masked dense one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.core.mesh import MeshSpec
from megajax.core.tree import named_leaves, nest
from megajax.foreign import hf
from megajax.layers.sparse import SparseKernel
from megajax.models import decoder, encoder
from megajax.models.encoder_config import EncoderConfig
from megajax.parallel.sharding import layout
from megajax.systems.prune_export import split, to_tiles
from megajax.systems.pruning import prune
from megajax.training.masking import chosen, keep, pick
from tests.tiny import MODEL, MOE, RICH, host_batch

TILE = {"tile": 16, "chunk": 4}
ENCODER = EncoderConfig(layers=2, width=32, heads=4, mlp=64, vocab=61, max_positions=32)


def pruned(parts, pattern, weights="all"):
    params = parts.init(jax.random.key(0))
    names = chosen(parts.axes, weights)
    axes, part = pick(parts.axes, names), pick(params, names)
    masks = prune(part, None, 0.6, pattern=pattern, axes=axes, **TILE)
    return keep(masks, params), masks


def packed_leaves(params):
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, SparseKernel))
    return [x for x in leaves if isinstance(x, SparseKernel)]


@pytest.mark.parametrize(
    ("cfg", "pattern", "weights"),
    [(MODEL, "tw2d", "all"), pytest.param(RICH, "tew", "mlp", marks=pytest.mark.slow)],
)
def test_a_decoder_gives_the_same_logits(cfg, pattern, weights):
    batch = {k: jnp.asarray(v) for k, v in host_batch(0, rows=2).items()}
    dense = decoder.parts(cfg)
    params, masks = pruned(dense, pattern, weights)
    tiles = to_tiles(params, masks, dense.axes, single=pattern == "tew", **TILE)
    assert len(packed_leaves(tiles)) == len(jax.tree.leaves(masks))
    dense_logits, logits = (jax.jit(dense.logits)(p, batch) for p in (params, tiles))
    np.testing.assert_allclose(np.asarray(logits), np.asarray(dense_logits), atol=2e-5)
    assert float(jnp.abs(dense_logits).max()) > 0.05
    for kernel in packed_leaves(tiles):
        assert (kernel.weight.capacity.residual > 0) == (pattern == "tew")


@pytest.mark.slow
def test_an_encoder_gives_the_same_logits():
    """Bias and GELU in the product's epilogue."""
    batch = {"tokens": jnp.asarray(host_batch(0, rows=2)["tokens"])}
    lengths = jnp.array([16, 9], jnp.int32)
    dense = encoder.parts(ENCODER)
    params, masks = pruned(dense, "tw1d", "mlp")
    tiles = to_tiles(params, masks, dense.axes, **TILE)
    run = jax.jit(lambda p: encoder.logits(dense, p, batch, lengths, 32))
    dense_logits, logits = run(params), run(tiles)
    np.testing.assert_allclose(np.asarray(logits), np.asarray(dense_logits), atol=2e-5)


def test_layers_of_other_densities_share_one_capacity():
    """One layer loses whole columns, the other single chunks everywhere."""
    random = np.random.default_rng(0)
    mask = np.ones((2, 32, 64), bool)
    mask[0, :, 10:50] = False
    mask[1] = np.kron(random.random((8, 4)) < 0.5, np.ones((4, 16))).astype(bool)
    w = jnp.asarray(random.normal(size=mask.shape), jnp.float32)
    tree, masks = nest({"blocks.mlp.up": w}), nest({"blocks.mlp.up": mask})
    axes = nest({"blocks.mlp.up": ("layers", "embed", "mlp")})
    (kernel,) = packed_leaves(to_tiles(tree, masks, axes, **TILE))
    for layer in range(2):
        one = jax.tree.map(lambda x, i=layer: x[i, 0], kernel.weight)
        np.testing.assert_array_equal(np.asarray(one.to_dense()), np.where(mask, w, 0)[layer])
    zeros = nest({"blocks.mlp.up": jnp.where(mask, w, 0.0)})
    (again,) = packed_leaves(to_tiles(zeros, None, axes, **TILE))  # its zeros say it all
    chex.assert_trees_all_equal(again, kernel)


def test_single_elements_are_told_from_tiles(seed):
    random = np.random.default_rng(seed)
    scores = random.gamma(0.3, size=(128, 128))
    tiles = prune(scores, scores, 0.75, tile=16, chunk=4)
    both = prune(scores, scores, 0.7, tile=16, chunk=4, pattern="tew", delta=0.05)
    assert (both >= tiles).all()
    in_tiles, besides = split(both, 16, 4)
    assert not (in_tiles & besides).any() and ((in_tiles | besides) == both).all()
    assert (in_tiles == tiles).mean() > 0.98 and besides.mean() < 0.06


def test_the_dense_export_has_exact_zeros(tmp_path):
    parts = decoder.parts(MODEL)
    lay = layout(MeshSpec(data=1).build())
    params, masks = pruned(parts, "tw2d")
    hf.save(params, MODEL, tmp_path, "float32")
    back = dict(named_leaves(hf.load_params(tmp_path, MODEL, lay)))
    for n, mask in named_leaves(masks):
        np.testing.assert_array_equal(np.asarray(back[n]) != 0, mask)


def test_experts_are_refused():
    parts = decoder.parts(MOE)
    params, masks = pruned(parts, "ew", "mlp")
    with pytest.raises(UserError, match="blocks.moe.down: experts are multiplied by grouped"):
        to_tiles(params, masks, parts.axes)
