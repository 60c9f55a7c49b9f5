"""What a product takes as its weight: an array, or what core/packed.py describes in its place."""

import functools
from collections.abc import Sequence

import jax
from flax import nnx

from megajax.core.layout import Words
from megajax.core.packed import PackedWeight, map_runs
from megajax.core.tree import Tree, is_words

Array = jax.Array
Weight = Array | PackedWeight


def any_packed(weights: Sequence[Weight]) -> bool:
    """Tells whether a product of these has to take more than arrays."""
    return any(isinstance(w, PackedWeight) for w in weights)


def words_of(w: nnx.Param) -> Words:
    """Returns the words of a parameter's array, or of the first dimensions of a packed one's."""
    axes, value = w.get_metadata("axes"), w.get_value()
    return value.words(axes) if isinstance(value, PackedWeight) else axes


def name_of(w: nnx.Param) -> str | None:
    """Returns the dotted name of a parameter in its model, which models.parts.split noted; of a
    stacked one that of the stack. None: the module is no part of a model's parts."""
    return w.get_metadata("path", None)


def packed_axes(axes: Tree, params: Tree) -> Tree:
    """Returns the words of a tree of parameters of which some may be packed.

    A PartitionSpec made of a packed leaf's words says how all its arrays lie.
    axes: of the dense model (ModelParts.axes).
    """

    def words_of_leaves(words: Tree, leaves: Tree) -> Tree:
        return jax.tree.map(
            lambda own, w: w.words(own) if isinstance(w, PackedWeight) else own,
            words,
            leaves,
            is_leaf=is_words,
        )

    def of(words: Tree, leaves: Tree) -> Tree:
        return map_runs(functools.partial(words_of_leaves, words), leaves)

    return (
        {n: of(axes[n], x) for n, x in params.items()} if type(params) is dict else of(axes, params)
    )
