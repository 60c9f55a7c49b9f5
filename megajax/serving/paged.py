"""Keys and values in pages: what a model's layers see of the sequences that an engine serves.

A page holds `page` neighbouring tokens of one sequence in one layer. All layers' pages lie in one
array, page p of layer l in row l P + p, so that the loop over layers carries it and writes in
place. Page 0 of a layer is nobody's: tokens that pad a step write there.
Source: PagedAttention (arXiv 2309.06180).

Legend: T tokens of a step, B segments (neighbouring tokens of one sequence), M pages of the longest
sequence, P pages of a layer, L layers, G key-value heads, K head width.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from megajax.layers.mask import Context
from pallas_kernels import paged_attention

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """What one forward pass reads, all int32.

    ids_T, positions_T: of each token; those that pad are anything in range. table_BM: a segment's
    pages, in the order of its sequence. start_B, count_B: its first token and their number; 0: no
    segment. context_B: tokens of its sequence so far, these included.
    """

    ids_T: Any
    positions_T: Any
    table_BM: Any
    start_B: Any
    count_B: Any
    context_B: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """The pool: k, v (L P, page, G, K)."""

    k: Any
    v: Any


def empty(layers: int, pages: int, page: int, heads: int, width: int, dtype: str) -> Pages:
    """Returns pages of zeros. heads: of one device, or of all."""
    shape = (layers * pages, page, heads, width)
    return Pages(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def rows_of(tokens: Tokens, page: int) -> tuple[Array, Array]:
    """Returns (page of a layer, place in it) of each token, both int32 (T,); (0, 0) for padding."""
    T, M = tokens.ids_T.shape[0], tokens.table_BM.shape[1]
    index_T1 = jnp.arange(T, dtype=jnp.int32)[:, None]
    start_1B, end_1B = tokens.start_B[None], (tokens.start_B + tokens.count_B)[None]
    inside_TB = (index_T1 >= start_1B) & (index_T1 < end_1B)
    segment_T, real_T = jnp.argmax(inside_TB, 1), inside_TB.any(1)
    which_T = tokens.positions_T // page
    real_T &= which_T < M  # a position beyond the table, of a step that nobody wants
    page_T = tokens.table_BM[segment_T, jnp.minimum(which_T, M - 1)]
    return jnp.where(real_T, page_T, 0), jnp.where(real_T, tokens.positions_T % page, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """The pages as one layer sees them (layers.attention.Cache).

    layer: its index. rows: as `rows_of`, the same for all layers. implementation: of
    pallas_kernels.paged_attention.
    """

    pages: Pages
    layer: Array
    tokens: Tokens
    rows: tuple[Array, Array]
    pool: int = dataclasses.field(metadata={"static": True})  # P
    implementation: Any = dataclasses.field(default=None, metadata={"static": True})

    def attend(
        self, q: Array, k: Array, v: Array, context: Context, window: int | None
    ) -> "tuple[Array, PagedCache]":
        """Writes k and v of (1, T, G, K) and attends from q of (1, T, H, K)."""
        first, pages = self.layer * self.pool, self.pages
        at = first + self.rows[0], self.rows[1]
        written = Pages(
            pages.k.at[at].set(k[0].astype(pages.k.dtype)),
            pages.v.at[at].set(v[0].astype(pages.v.dtype)),
        )
        t = self.tokens
        y_THK = paged_attention(
            q[0], written.k, written.v, t.table_BM + first, t.start_B, t.count_B, t.context_B,
            window=None if window is None else (window - 1, 0),
            implementation=self.implementation,
        )  # fmt: skip
        return y_THK[None], dataclasses.replace(self, pages=written)


def copy(pages: Pages, pool: int, source_N: Array, target_N: Array) -> Pages:
    """Copies pages in all layers; (0, 0) copies nobody's."""
    layers = pages.k.shape[0] // pool
    first_L1 = jnp.arange(layers)[:, None] * pool

    def of(x: Array) -> Array:
        return x.at[first_L1 + target_N[None]].set(x[first_L1 + source_N[None]])

    return Pages(of(pages.k), of(pages.v))


def tokens_like(T: int, B: int, M: int) -> Tokens:
    """Returns Tokens of zeros in NumPy: no segment, ready to be filled in."""
    t, b = np.zeros(T, np.int32), np.zeros(B, np.int32)
    return Tokens(t, t.copy(), np.zeros((B, M), np.int32), b, b.copy(), b.copy())  # type: ignore
