"""Key-value heads that are fewer than the tensor ranks: every rank stores all and uses one.

A stored parameter has the model's own shape on every mesh, so checkpoints and exports do not depend
on it. Where `Rules.copies` repeats a word, a parameter enters its products as if each entry were
there once for every rank that shares it; what follows (projection, attention, cache) then sees one
head a rank. The gradients of the copies are added where they came from: outside a shard_map by the
transposition of `share`, inside by the pipeline's sum over axes that hold copies.
Source: Megatron-LM's and vLLM's replication of key-value heads.
"""

import functools
import math

import jax
from flax import nnx
from jax import lax

from megajax.core.layout import Layout, Words
from megajax.core.tree import Tree
from megajax.layers.weight import PackedWeight

TENSOR = "tensor"


def share(layout: Layout, words: Words, tree: Tree) -> Tree:
    """From `Layout.stored` to `Layout.shared`; each rank cuts its entry out of its own memory.

    tree: an array, or arrays that all begin with dimensions of these words.
    """
    if all(layout.copies(word) == 1 for word in words):
        return tree
    return jax.shard_map(
        functools.partial(share_inside, layout, words),
        mesh=layout.mesh,
        in_specs=layout.stored(*words),
        out_specs=layout.shared(*words),
    )(tree)


def share_inside(layout: Layout, words: Words, tree: Tree) -> Tree:
    """`share` on local arrays, inside a shard_map over the whole mesh."""
    for dim, word in enumerate(words):
        if (copies := layout.copies(word)) > 1:
            own = lax.axis_index(TENSOR) // copies
            tree = jax.tree.map(
                lambda x, dim=dim, own=own: lax.dynamic_slice_in_dim(x, own, 1, dim), tree
            )
    return tree


def vector(layout: Layout, w: nnx.Param) -> jax.Array:
    """Returns a bias as what it is added to has it."""
    return share(layout, w.get_metadata("axes"), w[...])


def width(layout: Layout, w: nnx.Param) -> int:
    """Returns the elements of a weight that one tensor rank uses."""
    value = w.get_value()
    if isinstance(value, PackedWeight):
        return value.size
    copies = math.prod(layout.copies(word) for word in w.get_metadata("axes"))
    return value.size * copies // layout.ways((TENSOR,))
