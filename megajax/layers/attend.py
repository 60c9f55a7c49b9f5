"""The default attention: XLA's, cuDNN's fused kernel, or ours over packed tokens.

Legend: B rows, S query positions, M memory positions, H query heads, G key-value heads, R = H / G
query heads that share one, K head width.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import pallas_kernels
from megajax.layers.losses import NEGATIVE
from megajax.layers.mask import Context, visible

Implementation = Literal["xla", "cudnn", "varlen"]


def attend(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context | None = None,
    window: int | None = None,
    implementation: Implementation = "xla",
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v over the visible keys, softmax in float32.

    Args: memory: the keys' positions and segments; None: the query's own. implementation: 'xla'
      keeps the (S, M) logits in memory; 'cudnn' is fused, for 16-bit types on NVIDIA GPUs;
      'varlen' does the work of each segment's own tokens only, and dead tokens get 0.
    Returns: out_BSHK in q's dtype, named 'attended' for the remat policies. Every query must see a
      key; itself, where M holds it.
    Raises: NotImplementedError for 'varlen' with a memory of its own.
    """
    memory = query if memory is None else memory
    kernel = {"xla": _xla, "cudnn": _cudnn, "varlen": _varlen}[implementation]
    return checkpoint_name(kernel(q_BSHK, k_BMGK, v_BMGK, query, memory, window), "attended")


def _xla(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
) -> jax.Array:
    mask_B1SM = visible(query, memory, window)
    B, S, H, K = q_BSHK.shape
    G = k_BMGK.shape[2]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    # dot_general, not einsum: that one drops the sharding of a batch of one row.
    logits_BGSRM = jax.lax.dot_general(
        q_BSGRK, k_BMGK, (((4,), (3,)), ((0, 2), (0, 2))), preferred_element_type=jnp.float32
    )
    logits_BGSRM = jnp.where(mask_B1SM[:, :, :, None], logits_BGSRM * K**-0.5, NEGATIVE)
    weights_BGSRM = jax.nn.softmax(logits_BGSRM, -1).astype(v_BMGK.dtype)
    out_BGSRK = jax.lax.dot_general(weights_BGSRM, v_BMGK, (((4,), (1,)), ((0, 1), (0, 2))))
    return jnp.moveaxis(out_BGSRK, 1, 2).reshape(B, S, H, K)


def _cudnn(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
) -> jax.Array:
    """The fused kernel. Rows of one segment take its causal mask, packed rows a bias of ours."""
    fused = functools.partial(
        jax.nn.dot_product_attention, q_BSHK, k_BMGK, v_BMGK, implementation="cudnn"
    )
    if query.causal and query.segments_BS is None and q_BSHK.shape[1] == k_BMGK.shape[1]:
        return fused(is_causal=True, local_window_size=None if window is None else (window - 1, 0))
    return fused(mask=visible(query, memory, window))


def _varlen(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
) -> jax.Array:
    """Our kernel where it runs, its reference elsewhere; segments are runs of equal ids."""
    if memory is not query:
        raise NotImplementedError(
            "attention 'varlen' is among a row's own tokens; use 'xla' with a cache or cut rows"
        )
    ids_BS = query.segments_BS
    return pallas_kernels.packed_attention(
        q_BSHK,
        k_BMGK,
        v_BMGK,
        segment_ids=jnp.zeros_like(query.positions_BS) if ids_BS is None else ids_BS,
        causal=query.causal,
        window=None if window is None else (window - 1, window - 1),
        return_lse=True,
    )[0]
