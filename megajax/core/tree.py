"""Trees of arrays: dotted names, sizes, and maps that see the names.

A leaf is named by the dots-joined path to it ('blocks.attention.query'); checkpoints, optimizers,
error messages and name maps all use this one spelling.
"""

import math
from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def name(path: tuple) -> str:
    """Returns the dotted name of a key path of `jax.tree_util`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def named_leaves(tree: Tree, is_leaf: Callable | None = None) -> list[tuple[str, Any]]:
    """Returns [(dotted name, leaf)] in the tree's own order."""
    return [(name(p), x) for p, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)]


def is_words(x: Any) -> bool:
    """Tells the tuple of logical words of one leaf from a node of the tree."""
    return type(x) is tuple and all(w is None or isinstance(w, str) for w in x)


def owner(path: tuple, names: Container[str]) -> str | None:
    """Returns the one of these dotted names that ends the name of a leaf; None: no such name.

    A moment, a mask and a gradient end in the name of the parameter that they belong to.
    """
    parts = name(path).split(".")
    tails = (".".join(parts[i:]) for i in range(len(parts)))
    return next((tail for tail in tails if tail in names), None)


def floating(tree: Tree) -> Tree:
    """Returns a tree with None in the place of what has no gradient: integers, and JAX's own zeros
    for them (float0)."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else None, tree)


def nest(leaves: dict[str, Any]) -> dict:
    """Returns the nested dict of {dotted name: leaf}."""
    tree: dict = {}
    for dotted, leaf in leaves.items():
        *parents, last = dotted.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def count(tree: Tree) -> int:
    """Returns the number of array elements of all leaves (arrays or ShapeDtypeStructs)."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def nbytes(tree: Tree) -> int:
    """Returns the bytes of all leaves, as if each were stored once."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def nbytes_per_device(tree: Tree) -> int:
    """Returns the bytes that the fullest device holds of leaves that carry a sharding."""
    total = 0
    for x in jax.tree.leaves(tree):
        shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
        total += math.prod(shape) * x.dtype.itemsize
    return total
