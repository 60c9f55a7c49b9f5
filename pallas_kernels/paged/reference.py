"""Paged attention in plain JAX: the spec of the kernel, and what runs where it cannot.

The order of every sum is fixed: a row goes over its keys in blocks of BLOCK absolute positions,
with the online softmax of FlashAttention (arXiv 2205.14135, algorithm 1) in float32, and a block
that holds no key of a row leaves the row's sums as they are. So a token's result has the same bits
whatever the size and the order of the pages, the other rows of the batch and the pieces in which
its prompt is computed, as long as T, the heads and the types are those of the same program.

Legend: as plan.py, and M pages of a table's row, P pages, N tokens of a page, H query heads,
G key-value heads, R = H / G, K head width, C keys of a block.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention.ranges import Window
from pallas_kernels.attention.reference import LOWEST, Spec
from pallas_kernels.paged.plan import cut

BLOCK = 128  # keys of a block: sizes of pages divide it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pages:
    """The pages and tables of a step. k_PNGK, v_PNGK; with 8 bits their scales, float32 (P, N, G).

    table_BM, start_B, count_B, context_B: int32, as in `paged_attention`.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    table_BM: jax.Array
    start_B: jax.Array
    count_B: jax.Array
    context_B: jax.Array


def tile_rows(tokens: int) -> int:
    """Returns Q. It may depend on T only, for a row's bits may not depend on anything else.

    A tile reads each page once for all of its rows, and multiplies as much for one row as for Q.
    Chosen: up to 64 tokens a step mostly decodes, one row a sequence.
    """
    return 1 if tokens <= 64 else 8


def forward(
    q_THK: jax.Array,
    pages: Pages,
    sinks_H: jax.Array | None,
    *,
    spec: Spec,
    window: Window | None,
) -> jax.Array:
    """Returns out_THK in q's type."""
    (T, H, K), (_, N, G, _) = q_THK.shape, pages.k.shape
    R = H // G
    tiles = cut(T, pages.start_B, pages.count_B, pages.context_B, tile_rows(T), window)
    X, Q = tiles.row_XQ.shape
    # Q and R are one axis of the products: E = Q x R.
    q_XGEK = q_THK.astype(jnp.float32)[tiles.row_XQ].reshape(X, Q, G, R, K)
    q_XGEK = q_XGEK.swapaxes(1, 2).reshape(X, G, Q * R, K)
    lo_XE, hi_XE = (jnp.repeat(x, R, axis=1) for x in (tiles.lo_XQ, tiles.hi_XQ))
    pages_XM = jnp.pad(pages.table_BM, ((0, 0), (0, -pages.table_BM.shape[1] % (BLOCK // N))))
    pages_XM = pages_XM[tiles.segment_X]

    def step(c, carry):
        out_XGEK, maximum_XGE, total_XGE = carry
        k_XCGK, v_XCGK, scales = _block(pages, pages_XM, c)
        key_C = c * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        seen_XEC = _between(key_C[None, None], lo_XE[..., None], hi_XE[..., None])
        any_XC = seen_XEC.any(1)
        logits_XGEC = _logits(_einsum("xgek,xcgk->xgec", q_XGEK, k_XCGK), scales, spec)
        logits_XGEC = jnp.where(seen_XEC[:, None], logits_XGEC, -jnp.inf)
        new_XGE = jnp.maximum(maximum_XGE, logits_XGEC.max(-1))
        weights_XGEC = jnp.exp(logits_XGEC - new_XGE[..., None])
        shrink_XGE = jnp.exp(maximum_XGE - new_XGE)
        total = total_XGE * shrink_XGE + weights_XGEC.sum(-1)
        # What nobody sees may be NaN, in pages and in scales, and 0 x NaN is no 0.
        if scales is not None:
            v_scale_XGC = jnp.where(any_XC[:, None], scales[1].swapaxes(1, 2), 0.0)
            weights_XGEC *= v_scale_XGC[:, :, None]
        v_XCGK = jnp.where(any_XC[..., None, None], v_XCGK, 0.0)
        out = out_XGEK * shrink_XGE[..., None] + _einsum("xgec,xcgk->xgek", weights_XGEC, v_XCGK)
        here_X1E = ((lo_XE < (c + 1) * BLOCK) & (hi_XE > c * BLOCK))[:, None]
        return (
            jnp.where(here_X1E[..., None], out, out_XGEK),
            jnp.where(here_X1E, new_XGE, maximum_XGE),
            jnp.where(here_X1E, total, total_XGE),
        )

    live_XE = lo_XE < hi_XE
    first = jnp.where(live_XE, lo_XE, hi_XE.max()).min() // BLOCK
    carry = _start(q_XGEK, sinks_H, Q)
    out_XGEK, _, total_XGE = jax.lax.fori_loop(first, -(-hi_XE.max() // BLOCK), step, carry)
    out_XGEK = out_XGEK / jnp.where(live_XE[:, None], total_XGE, 1.0)[..., None]
    out_XQHK = out_XGEK.reshape(X, G, Q, R, K).swapaxes(1, 2).reshape(X, Q, H, K)
    at_T = jnp.maximum(tiles.tile_T, 0), tiles.place_T
    out_THK, live_T = out_XQHK[at_T], (tiles.tile_T >= 0) & (tiles.hi_XQ > 0)[at_T]
    return jnp.where(live_T[:, None, None], out_THK, 0.0).astype(q_THK.dtype)


def _block(pages: Pages, pages_XM: jax.Array, c: Any) -> tuple[jax.Array, jax.Array, Any]:
    """Returns block c of every tile: (k_XCGK, v_XCGK float32, their scales (X, C, G) or None)."""
    few = BLOCK // pages.k.shape[1]
    pages_Xm = jax.lax.dynamic_slice_in_dim(pages_XM, c * few, few, axis=1)

    def read(x: jax.Array) -> jax.Array:
        rows = jnp.take(x, pages_Xm, axis=0, mode="clip")
        return rows.reshape(rows.shape[0], BLOCK, *x.shape[2:]).astype(jnp.float32)

    scales = None
    if pages.k_scale is not None and pages.v_scale is not None:
        scales = read(pages.k_scale), read(pages.v_scale)
    return read(pages.k), read(pages.v), scales


def _logits(products_XGEC: jax.Array, scales: Any, spec: Spec) -> jax.Array:
    if scales is not None:
        products_XGEC *= scales[0].swapaxes(1, 2)[:, :, None]
    if spec.softcap is None:
        return products_XGEC * spec.scale
    return spec.softcap * jnp.tanh(products_XGEC * (spec.scale / spec.softcap))


def _start(q_XGEK: jax.Array, sinks_H: jax.Array | None, Q: int) -> tuple[jax.Array, ...]:
    """The sums before any key: a sink is a key with a logit of its own and no value."""
    zero_XGEK = jnp.where(False, q_XGEK, 0.0)  # varies over the mesh axes over which q does
    zero_XGE = zero_XGEK[..., 0]
    if sinks_H is None:
        return zero_XGEK, zero_XGE + LOWEST, zero_XGE
    sinks_GE = jnp.tile(sinks_H.reshape(q_XGEK.shape[1], -1), (1, Q))
    return zero_XGEK, zero_XGE + sinks_GE[None], zero_XGE + 1.0


def _between(key: jax.Array, lo: jax.Array, hi: jax.Array) -> jax.Array:
    return (lo <= key) & (key < hi)


def _einsum(names: str, left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.einsum(names, left, right, precision="highest")
