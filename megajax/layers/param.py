"""A parameter at its birth, and as a product takes it.

At its birth a parameter has a shape, logical words and initial values, already where it will live.
`axes` is our own metadata (flax reads only `out_sharding`), so a module builds with or without a
mesh. Random numbers are partitionable threefry: a leaf has the same values on every mesh, and each
device makes only its own piece. A product takes an array as its weight, or one of the types of
core/packed.py.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.layout import Layout, Words
from megajax.core.packed import LowRank, PackedWeight, map_runs
from megajax.core.tree import Tree, is_words

Array = jax.Array
Weight = Array | PackedWeight | LowRank


def broadcast(vector: nnx.Param | jax.Array, x: jax.Array, dtype: Any) -> jax.Array:
    """Returns a bias or scale in `dtype` with leading dims of size 1, ready to meet x."""
    value = vector[...].astype(dtype)
    return jnp.expand_dims(value, tuple(range(x.ndim - value.ndim)))


def normal(
    rngs: nnx.Rngs, layout: Layout | None, shape: tuple[int, ...], axes: Words, std: float
) -> nnx.Param:
    """Returns a float32 parameter drawn from N(0, std^2)."""
    spec = layout.stored(*axes) if layout else None
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, out_sharding=spec), axes=axes)


def constant(layout: Layout | None, shape: tuple[int, ...], axes: Words, value: float) -> nnx.Param:
    """Returns a float32 parameter that starts at one value (norm scales, biases)."""
    spec = layout.stored(*axes) if layout else None
    return nnx.Param(jnp.full(shape, value, jnp.float32, out_sharding=spec), axes=axes)


def any_packed(weights: Sequence[Weight]) -> bool:
    """Tells whether a product of these has to take more than arrays."""
    return any(isinstance(w, PackedWeight | LowRank) for w in weights)


def words_of(w: nnx.Param) -> Any:
    """Returns the words of a parameter's array, or of the first dimensions of a packed one's; of a
    LowRank a LowRank of them."""
    return _words(w.get_metadata("axes"), w.get_value())


def _words(axes: Words, value: Weight) -> Any:
    return value.words(axes) if isinstance(value, PackedWeight | LowRank) else axes


def of_each(function: Callable[..., Any], w: nnx.Param, *args: Any) -> Weight:
    """Returns function(w, *args), or the LowRank of function(each of its parameters, *args)."""
    value = w.get_value()
    if not isinstance(value, LowRank):
        return function(w, *args)
    words = value.words(w.get_metadata("axes"))
    words = dataclasses.replace(words, base=w.get_metadata("axes"))  # a packed base makes its own
    parts = {n: nnx.Param(getattr(value, n), axes=getattr(words, n)) for n in ("base", "a", "b")}
    return dataclasses.replace(value, **{n: function(x, *args) for n, x in parts.items()})


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
            _words,
            words,
            leaves,
            is_leaf=is_words,
        )

    def of(words: Tree, leaves: Tree) -> Tree:
        return map_runs(functools.partial(words_of_leaves, words), leaves)

    return (
        {n: of(axes[n], x) for n, x in params.items()} if type(params) is dict else of(axes, params)
    )
