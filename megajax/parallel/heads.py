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
from collections.abc import Callable

import jax
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from megajax.core.layout import Layout, Words
from megajax.core.packed import PackedWeight
from megajax.core.tree import Tree

TENSOR = "tensor"


def rest(layout: Layout, words: Words, x: jax.Array) -> PartitionSpec:
    """Returns how a parameter rests, with the axes over which its own type says that its gradient
    is a partial sum (parallel/exchange.py)."""
    return layout.stored(*words).update(reduced=jax.typeof(x).sharding.spec.reduced)


def share(layout: Layout, words: Words, tree: Tree) -> Tree:
    """Cuts `Layout.stored` to `Layout.shared`; each rank cuts its part out of its own memory.

    tree: an array, or arrays that all begin with dimensions of these words.
    """
    if all(layout.copies(word) == 1 for word in words):
        return tree
    spec = rest(layout, words, jax.tree.leaves(tree)[0])
    if spec.reduced:
        return jax.tree.map(functools.partial(_share_partial, layout, words, spec), tree)
    return jax.shard_map(
        functools.partial(share_inside, layout, words),
        mesh=layout.mesh,
        in_specs=spec,
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


def _share_partial(layout: Layout, words: Words, spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """`share` of an array whose gradient is a partial sum by its type, `spec`. jax 0.11.2 does not
    put such a gradient into a slice, so the transposition is written out."""
    cut = functools.partial(share_inside, layout, words)
    whole = PartitionSpec(*spec.partitions, unreduced=spec.reduced)
    shared = layout.shared(*words)
    own = layout.named(layout.stored(*words)).shard_shape(x.shape)

    def add(dy: jax.Array) -> jax.Array:
        dx = jax.linear_transpose(cut, jax.ShapeDtypeStruct(own, dy.dtype))(dy)[0]
        return lax.psum(dx, TENSOR)

    def everywhere(local: Callable, given: PartitionSpec, wanted: PartitionSpec) -> Callable:
        # The checker refuses partial sums inside.
        return jax.shard_map(
            local, mesh=layout.mesh, in_specs=(given,), out_specs=wanted, check_vma=False
        )

    @jax.custom_vjp
    def through(x: jax.Array) -> jax.Array:
        return everywhere(cut, spec, shared.update(reduced=spec.reduced))(x)

    def backward(_: None, dy: jax.Array) -> tuple[jax.Array]:
        return (everywhere(add, shared.update(unreduced=spec.reduced), whole)(dy),)

    through.defvjp(lambda x: (through(x), None), backward)
    return through(x)


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
