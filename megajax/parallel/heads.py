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

TENSOR = "tensor"


def share(layout: Layout, words: Words, x: jax.Array) -> jax.Array:
    """From a stored array to `Layout.shared`; each rank cuts its entry out of its own memory."""
    if all(layout.copies(word) == 1 for word in words):
        return x
    return jax.shard_map(
        functools.partial(share_inside, layout, words),
        mesh=layout.mesh,
        in_specs=layout.stored(*words),
        out_specs=layout.shared(*words),
    )(x)


def share_inside(layout: Layout, words: Words, x: jax.Array) -> jax.Array:
    """`share` on local arrays, inside a shard_map over the whole mesh."""
    for dim, word in enumerate(words):
        if (copies := layout.copies(word)) > 1:
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(TENSOR) // copies, 1, dim)
    return x


def vector(layout: Layout, w: nnx.Param) -> jax.Array:
    """Returns a bias as what it is added to has it."""
    return share(layout, w.get_metadata("axes"), w[...])


def width(layout: Layout, w: nnx.Param) -> int:
    """Returns the entries of a weight that all tensor ranks use together."""
    return w[...].size * math.prod(layout.copies(word) for word in w.get_metadata("axes"))
