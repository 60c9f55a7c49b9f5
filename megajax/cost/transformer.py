"""The operations of transformer blocks, of which decoders, encoders and vision models are made.

A model gives a `Stack` of its sizes, and adds what comes before the blocks and after them:
models/decoder_config.py, models/encoder_config.py; docs/planning.md has a vision transformer.

Legend: T tokens of the batch, D model width.
"""

import dataclasses
import math

from megajax.cost.base import Op
from megajax.cost.kernels import Attention, Embedding, Experts, Matmul, Rowwise


@dataclasses.dataclass(frozen=True)
class Routed:
    """Routed experts of every layer (layers/moe.py).

    experts: of a layer. top_k: that a token uses. hidden: width of one. capacity: slots of an
    expert over a balanced load, given out row by row; None: dropless.
    """

    experts: int
    top_k: int
    hidden: int
    capacity: float | None = None

    def slots(self, seq_len: int) -> int | None:
        """Slots of an expert for one row (layers/moe.py:MoeConfig.slots); None: dropless."""
        if self.capacity is None:
            return None
        return min(math.ceil(self.capacity * seq_len * self.top_k / self.experts), seq_len)

    def pairs(self, seq_len: int) -> float:
        """Expert rows that are computed for each token: with capacity all slots, filled or not."""
        slots = self.slots(seq_len)
        return self.top_k if slots is None else self.experts * slots / seq_len


@dataclasses.dataclass(frozen=True)
class Stack:
    """The sizes of a stack of equal transformer blocks.

    hidden: feed-forward width; with a mixture of experts, that of the shared experts (0: none).
    gated: whether the feed-forward layer has two input matrices. parallel: whether attention and
    feed-forward layer read the same input, with one gather and one scatter of the residual stream.
    window: the largest number of keys that a query attends to; None: all. repeats: how often each
    block is applied. routed: the routed experts; None: there are none.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    hidden: int
    gated: bool = False
    parallel: bool = False
    causal: bool = True
    window: int | None = None
    repeats: int = 1
    routed: Routed | None = None

    def ops(self, rows: int, queries: int, keys: int, dtype: str = "bfloat16") -> tuple[Op, ...]:
        """Returns the blocks' operations in their order.

        Args: queries: tokens of a row. keys: that they attend to, themselves included.
        """
        T, D, L = rows * queries, self.width, self.layers * self.repeats
        asked, stored = self.heads * self.head_width, self.kv_heads * self.head_width
        into, hidden = (1 + self.gated) * self.hidden, self.hidden

        def op(part, kernel) -> Op:
            weights = self.layers if self.repeats > 1 else None
            return Op(part, kernel, L, weights, (dtype,))

        def norm(times: int) -> Op:
            return dataclasses.replace(op("norm", Rowwise("norm", T, D)), count=times * L)

        attention = Attention(
            rows, queries, keys, self.heads, self.kv_heads, self.head_width, self.causal,
            self.window,
        )  # fmt: skip
        attend = op("attention", attention)
        activate = op("activation", Rowwise("activation", T, hidden, 1 + self.gated))
        if self.parallel:
            return (
                norm(1), op("input", Matmul(T, D, asked + 2 * stored + into)), attend, activate,
                op("output", Matmul(T, asked + hidden, D)), *self._experts(T, queries, op),
            )  # fmt: skip
        dense = (
            op("input", Matmul(T, D, into)), activate, op("output", Matmul(T, hidden, D)),
        ) if hidden else ()  # fmt: skip
        return (
            norm(2), op("input", Matmul(T, D, asked + 2 * stored)), attend,
            op("output", Matmul(T, asked, D)), *dense, *self._experts(T, queries, op),
        )  # fmt: skip

    def _experts(self, T: int, queries: int, op) -> tuple[Op, ...]:
        if (routed := self.routed) is None:
            return ()
        pairs, gated = routed.pairs(queries), self.gated
        kernel = Experts(
            T, routed.experts, routed.top_k, self.width, routed.hidden, gated, pairs,
            routed.capacity is None,
        )  # fmt: skip
        return (
            op("router", Matmul(T, self.width, routed.experts)),
            op("activation", Rowwise("activation", T * pairs, routed.hidden, 1 + gated)),
            op("experts", kernel),
        )


def lookup(tokens: int, table: int, width: int, dtype: str = "bfloat16") -> Op:
    """Returns the lookup of these tokens in an embedding table."""
    return Op("embedding", Embedding(tokens, table, width), dtypes=(dtype,))
