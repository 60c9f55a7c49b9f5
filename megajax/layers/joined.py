"""Packed weights of one input, side by side: one product in the place of two or three.

A decoding step of a small model is a few microseconds for each product, of which about three are
the launch and the first loads. Query, key and value of a layer read the same input, and so do gate
and up; as one weight they are launched once.

Legend: D model width.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Self

import jax

from megajax.core.packed import PackedWeight
from megajax.core.tree import Tree
from megajax.layers import attention, mlp
from megajax.layers.param import Weight

Array = jax.Array
INPUTS = (("attention", attention.INPUTS), ("mlp", mlp.INPUTS))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Joined(PackedWeight):
    """A member of a group of packed weights that multiply the same input and are stored as one.

    The group's first member has the stored weight, whose columns are those of all members in their
    order; the other members have no arrays. `shape` is that of the member by itself, by which
    `split` cuts its columns out of the product.

    weight: (D, columns of all members) in the first member; None in the others.
    """

    weight: PackedWeight | None = None

    def astype(self, dtype: Any) -> Self:
        """See PackedWeight."""
        return self._with(lambda weight: weight.astype(dtype))

    def piece(self) -> Self:
        """See PackedWeight."""
        return self._with(PackedWeight.piece)

    def _with(self, function: Any) -> Self:
        if self.weight is None:
            return self
        return dataclasses.replace(self, weight=function(self.weight))

    def matmul(self, x: Array, contract: int = 1, **_: Any) -> Array:
        """Raises: TypeError: only all of them together can be multiplied (`merged`)."""
        raise TypeError("a joined weight is multiplied with those that it was joined with")


def merged(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """Returns the weights to multiply by: one for each group of joined weights, and the others as
    they are, in order. weights: of one input, with all members of a group."""
    joined = (w.weight if isinstance(w, Joined) else w for w in weights)
    return tuple(w for w in joined if w is not None)


def split(ys: Iterable[Array], weights: Sequence[Weight]) -> tuple[Array, ...]:
    """Returns each weight's product, from those of `merged(weights)`, (..., columns)."""
    products, remaining, y, at = [], iter(ys), None, 0
    for w in weights:
        if not isinstance(w, Joined):
            products.append(next(remaining))
            continue
        if w.weight is not None:
            y, at = next(remaining), 0
        assert y is not None
        stop = at + w.size // w.shape[0]
        products.append(y[..., at:stop].reshape(*y.shape[:-1], *w.shape[1:]))
        at = stop
    return tuple(products)


def join_inputs(layers: Tree) -> Tree:
    """Returns layers, or a stack of them, in which packed weights of the same input are joined, if
    their type can be (PackedWeight.join). Their arrays are copied."""
    joined = dict(layers)
    for part, names in INPUTS:
        there = [name for name in names if name in joined.get(part, {})]
        weights = [joined[part][name] for name in there]
        if len(weights) < 2 or not all(isinstance(w, PackedWeight) for w in weights):
            continue
        weight = weights[0].join(weights[1:])
        if weight is not None:
            each = (weight, *[None] * (len(weights) - 1))
            pairs = zip(there, weights, each, strict=True)
            joined[part] = joined[part] | {n: Joined(w.shape, one) for n, w, one in pairs}
    return joined
