"""Names of scopes that tell readers of a compiled program how much a kernel computes and moves.

The text of a program only shows the operands and results of a Mosaic GPU kernel, neither the number
of its products nor the pages that it reads. So a kernel is launched in a scope whose name has these
numbers, and which becomes part of the call's op_name. megajax/cost/program_body.py reads it.
"""

import dataclasses
import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of one launch.

    name: the kernel's. flops: floating-point operations; at most, where they depend on values
    (segments, groups, sequences). product: (batch, m, n, k) of its (largest) product, of attention
    (heads, queries, keys, head width). read: bytes, where operands are not read once each.
    """

    name: str
    flops: float = 0.0
    product: tuple[int, int, int, int] = (0, 0, 0, 0)
    read: float | None = None

    def scope(self, operands: Iterable[Any], made: Iterable[Any]) -> AbstractContextManager:
        """Returns the scope to launch in. operands: None is left out. made: the results.

        `jax.vmap` launches one kernel for all rows without telling the scope: who reads it compares
        the call's operands with the bytes after `given` in the name.
        """
        all_given, written = nbytes(operands), nbytes(made)
        read = all_given if self.read is None else round(self.read)
        batch, m, n, k = self.product
        return jax.named_scope(
            f"kernel_{self.name}.flops_{round(self.flops)}.read_{read}.written_{written}"
            f".given_{all_given}.product_{batch}_{m}_{n}_{k}"
        )


def product(name: str, m: int, n: int, k: int, batch: int = 1) -> Work:
    """Returns the work of y (m, n) = x (m, k) w (k, n): 2 m n k operations of each batch."""
    return Work(name, 2.0 * batch * m * n * k, (batch, m, n, k))


def attention(name: str, pairs: int, heads: int, shape: tuple[int, int, int], times: int) -> Work:
    """Returns the work of `times` products over pairs of a query and a key of each head.

    shape: queries, keys, head width. Forward 2 products; the gradient of the queries 3, those of
    keys and values 4, all in one kernel 5 (FlashAttention-2, section 3.1: two are made again).
    """
    return Work(name, 2.0 * times * pairs * heads * shape[2], (heads, *shape))


def most_pairs(
    queries: int,
    keys: int,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    longest: int | None = None,
) -> int:
    """Returns the pairs of a query and a key of packed segments, at most.

    Segments are as long as they can be: `longest`, where the caller says so, else all. Causal order
    and windows are those of segments whose queries and keys lie at the same positions.
    """
    if not queries * keys:
        return 0
    each = max(min(longest or keys, keys), 1)
    left, right = window or (None, None)
    right = 0 if causal else right

    def pairs(n: int) -> int:
        # Key j of query i: i - left <= j <= i + right.
        def beyond(most: int | None) -> int:  # pairs that lie farther on one side
            short = 0 if most is None else max(n - 1 - most, 0)
            return short * (short + 1) // 2

        return n * n - beyond(left) - beyond(right)

    if queries == keys:
        full, remainder = divmod(keys, each)
        return full * pairs(each) + pairs(remainder)
    width = each if left is None or right is None else min(left + right + 1, each)
    return queries * min(width, keys)


def nbytes(arrays: Iterable[Any]) -> int:
    """Returns the bytes of arrays, abstract ones and references; None has none."""
    return sum(
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
        for x in jax.tree.leaves(list(arrays), is_leaf=lambda x: hasattr(x, "shape"))
    )
