"""Named shapes of Flux (arXiv 2406.06858, section 5), for tests and benchmarks, over 8 ranks.

The feed-forward layers of GPT-3 175B and Llama-2 70B, from the models' configurations.
"""

import dataclasses
from typing import Literal

RANKS = 8


@dataclasses.dataclass(frozen=True)
class Product:
    """all_gather(x) @ w or reduce_scatter(x @ w), as one of R ranks does it.

    m: rows of all ranks. n, k: columns and depth of the rank's own product: n_local and k for a
    gather, n and k_local for a scatter. wire_bytes: the size of an element that crosses ranks: 2
    for a gather of 16-bit values, 4 for partial sums in float32.
    """

    kind: Literal["gather", "scatter"]
    m: int
    n: int
    k: int
    ranks: int = 8
    wire_bytes: int = 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one row that travels."""
        return self.wire_bytes * (self.k if self.kind == "gather" else self.n)

    @property
    def shard(self) -> int:
        """Rows of a full rank."""
        return -(-self.m // self.ranks)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A feed-forward layer: (m, width) x inputs matrices (width, hidden), then (hidden, width)."""

    width: int
    hidden: int
    inputs: int

    def up(self, m: int) -> Product:
        """Returns the all-gather + product, its matrices side by side after one gather."""
        return Product("gather", m, self.inputs * self.hidden // RANKS, self.width, RANKS)

    def down(self, m: int, wire_bytes: int) -> Product:
        """Returns the product + reduce-scatter; wire_bytes: the size of a partial sum."""
        return Product("scatter", m, self.width, self.hidden // RANKS, RANKS, wire_bytes)


DENSE = {"gpt3_175b": Dense(12288, 49152, 1), "llama_70b": Dense(8192, 28672, 2)}
