"""Data dependences that keep collectives in one order on emulated CPU devices.

XLA's CPU backend runs a program's operations as soon as their operands are there. Collectives start
in the order of the schedule, but a loop or a branch counts as started when its first operation
does: a collective that comes after it in the schedule, and needs nothing of it, may overtake the
collectives in it, on one device and not on another. These then wait for each other, or take what
was meant for another collective. Barriers do not help, because the CPU compiler removes them
before it makes the schedule (jaxlib 0.11.2, xla/runtime/execution_graph.h: edges of the kind
kScheduling). A GPU starts collectives from one stream in the order of the schedule: there nothing
is added, and overlap is not lost.

For code inside a shard_map over the whole mesh.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from megajax.core.tree import Tree

Array = jax.Array


@dataclass(frozen=True)
class Order:
    """How the collectives of one program are ordered. emulated: its devices are CPU devices."""

    emulated: bool

    def after(self, tree: Tree, done: Tree) -> Tree:
        """Returns the tree, on emulated devices once the first element of each array in done is
        there; elsewhere as it is."""
        return hold(tree, never(done)) if self.emulated else tree

    def together(self, tree: Tree) -> Tree:
        """Returns the tree behind an optimization barrier, which emulated devices keep too."""
        tree = lax.optimization_barrier(tree)
        return self.after(tree, tree)


def order_of(mesh: Mesh) -> Order:
    """Returns the order of programs on a mesh."""
    return Order(mesh.size > 1 and mesh.devices.flat[0].platform == "cpu")


def never(done: Tree) -> Array:
    """Returns False (), which takes the first element of each floating array to compute."""
    found = jnp.bool_(False)
    for x in jax.tree.leaves(done):
        if x.size and jnp.issubdtype(x.dtype, jnp.floating):
            first = x.reshape(-1)[0].astype(jnp.float32)
            found |= jnp.isnan(first) & jnp.isinf(first)
    return found


def hold(tree: Tree, nothing: Array) -> Tree:
    """Returns the tree, whose arrays then depend on `nothing`, which is False; not its keys."""

    def one(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return jnp.where(nothing, jnp.zeros_like(x), x)

    return jax.tree.map(one, tree)
