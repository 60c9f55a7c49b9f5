"""Several adapters in one engine: each token multiplies those of its request.

The adapters of all requests are one low-rank weight beside each matrix, whose inner dimension holds
the ranks of one adapter after the other. A token's products with the others' ranks become 0 between
the two factors (core.packed.LowRank, rows), so a batch with any mixture of adapters is two more
products a matrix and the base is multiplied once. Their size grows with the number of adapters:
meant for tens of them, of ranks that together are far below the model's width.

Legend: N adapters, R rank of one, T tokens.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError, did_you_mean
from megajax.core.packed import LowRank, PackedWeight
from megajax.core.tree import Tree, is_words, named_leaves
from megajax.models import lora

Array = jax.Array


class Adapters:
    """The adapters of an engine, by name. Number 0 is the base, the first adapter is number 1."""

    def __init__(self, adapters: Mapping[str, Tree | str | Path], params: Tree, axes: Tree):
        """adapters: parameters that have them, or PEFT folders. params: the base, whose values are
        not read. axes: of the dense model.

        Raises: UserError for parameters or a folder without adapters, or of another model.
        """
        self.names = tuple(adapters)
        self._leaves: list[dict[str, LowRank]] = []
        for name, source in adapters.items():
            if isinstance(source, str | Path):
                from megajax.foreign import peft  # only engines that are told folders read them

                source = peft.load(source, lora.strip(params), axes)
            leaves = lora.adapters(source)
            if not leaves:
                raise UserError(f"adapters[{name!r}]: these parameters have no adapters")
            self._leaves.append(leaves)
        self._axes = dict(named_leaves(axes, is_words))
        self._rank = max(
            (w.a.shape[-1] for leaves in self._leaves for w in leaves.values()), default=0
        )
        self._check(params)

    def _check(self, params: Tree) -> None:
        """Refuses adapters of another model. Raises: UserError."""
        dense = dict(named_leaves(params, _is_leaf))
        for name, leaves in zip(self.names, self._leaves, strict=True):
            for leaf, w in leaves.items():
                if leaf not in dense or leaf not in self._axes:
                    raise UserError(f"adapters[{name!r}]: the model has no {leaf}")
                shape = lora.dense_shape(dense[leaf], self._axes[leaf])
                inner = (*w.a.shape[:-1], *w.b.shape[2:])
                if inner != tuple(shape):
                    raise UserError(
                        f"adapters[{name!r}]: {leaf} is of a matrix {list(inner)}; that of the "
                        f"model is {list(shape)}"
                    )

    def number(self, name: str | None) -> int:
        """Returns the number of an adapter; None: the base. Raises: UserError for another name."""
        if name is None:
            return 0
        if name not in self.names:
            raise UserError(
                f"adapter={name!r:.80} is none of the engine's: {', '.join(self.names) or 'none'}."
                f"{did_you_mean(str(name), self.names)}"
            )
        return 1 + self.names.index(name)

    def over(self, params: Tree) -> Tree:
        """Returns the base with all adapters beside its matrices; without any the same tree."""
        if not self.names:
            return params
        names = {leaf for leaves in self._leaves for leaf in leaves}

        def leaf(path: tuple, base: Any) -> Any:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return self._stacked(name, base) if name in names else base

        return jax.tree_util.tree_map_with_path(leaf, lora.strip(params), is_leaf=_is_leaf)

    def _stacked(self, name: str, base: Any) -> LowRank:
        ones = [leaves.get(name) for leaves in self._leaves]
        like = next(w for w in ones if w is not None)
        a, b = [], []
        for w in ones:
            w = dataclasses.replace(like, a=0 * like.a, b=0 * like.b) if w is None else w
            more = self._rank - w.a.shape[-1]
            a.append(jnp.pad(w.a, [(0, 0)] * (w.a.ndim - 1) + [(0, more)]))
            scaled = w.b.astype(jnp.float32) * w.scale
            b.append(jnp.pad(scaled, [(0, 0), (0, more)] + [(0, 0)] * (w.b.ndim - 2)))
        return LowRank(base, jnp.concatenate(a, -1), jnp.concatenate(b, 1), 1.0)


def choose(weights: Tree, adapter_T: Array | None, count: int) -> Tree:
    """Returns a layer's weights, whose low-rank sums let each token's adapter through.

    adapter_T: int32, number of each token's adapter, 0: none; None: the weights are of one adapter
    for all. count: N.
    """
    if adapter_T is None:
        return weights

    def leaf(w: Any) -> Any:
        if not lora.is_low_rank(w):
            return w
        ranks = w.a.shape[-1]
        owner_R = 1 + jnp.arange(ranks, dtype=jnp.int32) // (ranks // count)
        return dataclasses.replace(w, rows=(adapter_T[:, None] == owner_R[None])[None])

    return jax.tree.map(leaf, weights, is_leaf=lora.is_low_rank)


def _is_leaf(x: Any) -> bool:
    return lora.is_low_rank(x) or isinstance(x, PackedWeight)
