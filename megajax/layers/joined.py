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
    """One of several weights of the same input. whole: all of them as one weight (D, all columns),
    with the first; None with the others, which have no arrays."""

    whole: PackedWeight | None = None

    def astype(self, dtype: Any) -> Self:
        """See PackedWeight."""
        return self._with(lambda whole: whole.astype(dtype))

    def piece(self) -> Self:
        """See PackedWeight."""
        return self._with(PackedWeight.piece)

    def _with(self, function: Any) -> Self:
        if self.whole is None:
            return self
        return dataclasses.replace(self, whole=function(self.whole))

    def matmul(self, x: Array, contract: int = 1, **_: Any) -> Array:
        """Raises: TypeError: only all of them together can be multiplied (`merged`)."""
        raise TypeError("a joined weight is multiplied with those that it was joined with")


def merged(weights: Sequence[Weight]) -> tuple[Weight, ...]:
    """Returns the weights, those that are joined as one. All of them are there, in their order."""
    found = (w.whole if isinstance(w, Joined) else w for w in weights)
    return tuple(w for w in found if w is not None)


def split(ys: Iterable[Array], weights: Sequence[Weight]) -> tuple[Array, ...]:
    """Returns each weight's product, from those of `merged(weights)`, (..., columns)."""
    found, rest, y, at = [], iter(ys), None, 0
    for w in weights:
        if not isinstance(w, Joined):
            found.append(next(rest))
            continue
        if w.whole is not None:
            y, at = next(rest), 0
        assert y is not None
        stop = at + w.size // w.shape[0]
        found.append(y[..., at:stop].reshape(*y.shape[:-1], *w.shape[1:]))
        at = stop
    return tuple(found)


def join_inputs(layers: Tree) -> Tree:
    """Returns layers, or a stack of them, in which packed weights of the same input are joined, if
    their type can be (PackedWeight.join). Their arrays are copied."""
    found = dict(layers)
    for part, names in INPUTS:
        there = [name for name in names if name in found.get(part, {})]
        weights = [found[part][name] for name in there]
        if len(weights) < 2 or not all(isinstance(w, PackedWeight) for w in weights):
            continue
        whole = weights[0].join(weights[1:])
        if whole is not None:
            each = (whole, *[None] * (len(weights) - 1))
            pairs = zip(there, weights, each, strict=True)
            found[part] = found[part] | {n: Joined(w.shape, one) for n, w, one in pairs}
    return found
