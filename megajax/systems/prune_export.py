"""Converts a pruned model for use: its matrices as packed tiles, or dense with exact zeros.

`to_tiles` turns the pruned leaves of a parameter tree into layers.sparse.SparseKernel, and the same
ModelParts functions, on any mesh that it packed for, run on pallas_kernels.TileSparse.
Dense: the trained parameters have exact zeros already, so `foreign/hf.py` (scripts/hf.py export)
writes them for any other library as they are.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.core.errors import UserError
from megajax.core.layout import Layout, Words
from megajax.core.packed import cut_word
from megajax.core.tree import Tree, is_words, name, named_leaves
from megajax.layers.sparse import SparseKernel
from megajax.systems.pruning import matrix_shape
from megajax.training.masking import chosen
from megajax.training.optim import STACK_WORDS
from pallas_kernels import TileSparse

ELEMENT = 16  # (chosen) weights of a tile that cost as much as one single element


def to_tiles(
    params: Tree,
    masks: Tree | None,
    axes: Tree,
    *,
    layout: Layout | None = None,
    tile: int = 128,
    chunk: int = 64,
    single: bool = False,
) -> Tree:
    """Returns the parameters with a SparseKernel for each leaf that has a mask.

    Tensor parallelism cuts a matrix into slices, of which each is packed by itself; all slices and
    layers of a leaf share one capacity, so that they are one stack.

    Args: params: on this process's devices. masks: bool, of some leaves
      (training.masking.Masked.masks); None: what is not 0, of the blocks' matrices that have zeros
      (a model read from elsewhere). axes: words of all leaves. layout: of the mesh that runs the
      model; None: one device. tile, chunk: of the packing; those of the pruning store best.
      single: single elements outside the tiles (TEW) go into the residual, not into tiles.
    Returns: arrays on one device. On a mesh a leaf lies as its words in layers.param.packed_axes
      say.
    Raises: UserError for experts, whose products are grouped.
    """
    leaves, words = dict(named_leaves(params)), dict(named_leaves(axes, is_words))
    if masks is None:
        stays = {n: np.asarray(leaves[n]) != 0 for n in chosen(axes)}
        masks = {n: m for n, m in stays.items() if not m.all()}
    pruned = dict(named_leaves(masks))
    for n in pruned:
        if "expert" in words[n]:
            raise UserError(
                f"{n}: experts are multiplied by grouped products, which take no tile-wise sparse "
                "weights; prune a dense model, or the attention alone (--prune.weights=attention)"
            )

    def leaf(path: tuple, w: jax.Array) -> jax.Array | SparseKernel:
        n = name(path)
        if n not in pruned:
            return w
        weights, mask = (_slices(x, words[n], layout) for x in (w, pruned[n]))
        layers = sum(word in STACK_WORDS for word in words[n])
        stack, one = weights.shape[: layers + 1], weights.shape[layers + 1 :]
        shape = (-1, *matrix_shape(one, words[n][layers:])[1:])
        packed = _pack(weights.reshape(shape), mask.reshape(shape), tile, chunk, single)
        together = jax.tree.map(lambda *x: jnp.stack(x).reshape(*stack, *x[0].shape), *packed)
        return SparseKernel(one, together)

    assert pruned.keys() <= leaves.keys()
    return jax.tree_util.tree_map_with_path(leaf, params)


def stored(params: Tree) -> float:
    """Returns the entries that packed tiles hold, over those of the matrices that they stand for.

    Empty slots count: all layers and slices of a leaf have as many as the fullest one.
    """
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, SparseKernel))
    kernels = [x for x in leaves if isinstance(x, SparseKernel)]
    if not kernels:
        return 1.0
    held = sum(k.weight.values.size for k in kernels)
    matrices = ((math.prod(k.weight.values.shape[:-3]), k.size) for k in kernels)
    return held / sum(count * size for count, size in matrices)


def _slices(x: Any, words: Words, layout: Layout | None) -> np.ndarray:
    """Returns a leaf's slices for the tensor ranks, on a new dimension after its stack.

    A key-value head that several ranks share is one slice.
    """
    word = cut_word(words)
    pieces = 1
    if layout is not None:
        pieces = layout.ways(layout.rules.act[word]) // layout.copies(word)
    stack = sum(w in STACK_WORDS for w in words)
    return np.stack(np.split(np.asarray(x), pieces, words.index(word)), stack)


def split(mask: np.ndarray, tile: int, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (the elements in tiles, the others) of a mask (K, N) of TEW, as two masks.

    A block of gathered columns is a tile's where the mask keeps more than half of it; which columns
    are gathered at all is tried from the densest on, and the cheapest result taken.
    """
    K, N = mask.shape
    best, least = np.zeros_like(mask), np.inf
    for threshold in np.unique(np.quantile(mask.mean(0), np.linspace(0, 1, 33))):
        columns = np.flatnonzero(mask.mean(0) >= threshold)
        wide = np.zeros((-(-K // chunk) * chunk, -(-columns.size // tile) * tile), bool)
        wide[:K, : columns.size] = mask[:, columns]
        blocks = wide.reshape(wide.shape[0] // chunk, chunk, -1, tile)
        inside = np.zeros_like(blocks)
        inside[:K, : columns.size] = True
        dense = blocks.sum((1, 3)) * 2 > chunk * tile
        tiles = np.zeros_like(mask)
        spread = dense.repeat(chunk, 0)[:K].repeat(tile, 1)[:, : columns.size]
        tiles[:, columns] = mask[:, columns] & spread
        cost = dense.sum() * chunk * tile + ELEMENT * (mask & ~tiles).sum()
        if cost < least:
            best, least = tiles, cost
    return best, mask & ~best


def _pack(
    weights: np.ndarray, masks: np.ndarray, tile: int, chunk: int, single: bool
) -> list[TileSparse]:
    """Packs the matrices of one leaf with one capacity."""
    parts = [split(m, tile, chunk) if single else (m, np.zeros_like(m)) for m in masks]

    def pack(capacity=None) -> list[TileSparse]:
        return [
            TileSparse.from_dense(
                jnp.asarray(w), m, tile=tile, chunk=chunk, residual_mask_KN=r, capacity=capacity
            )
            for w, (m, r) in zip(weights, parts, strict=True)
        ]

    capacities = [w.capacity for w in pack()]
    gathered = any(c.gathered for c in capacities)
    if gathered and not all(c.gathered for c in capacities):
        # Room for everything (and the empty slots that fill up tiles of small chunks) tells what
        # those need that would not gather by themselves.
        K, N = masks.shape[1:]
        tiles = -(-N // tile)
        roomy = capacities[0]._replace(
            tiles=tiles, slots=tiles * (-(-K // chunk) + 7), residual=masks[0].size, gathered=True
        )
        capacities = [
            c._replace(slots=int(w.pattern.tile_starts[-1]), tiles=tiles)
            for c, w in zip(capacities, pack(roomy), strict=True)
        ]
    most = capacities[0]._replace(
        **{f: max(getattr(c, f) for c in capacities) for f in ("tiles", "slots", "residual")},
        gathered=gathered,
    )
    return pack(most)
