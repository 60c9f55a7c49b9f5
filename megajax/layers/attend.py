"""The default attention: XLA's, or cuDNN's fused kernel.

Legend: B rows, S query positions, M memory positions, H query heads, G key-value heads, R = H / G
query heads that share one, K head width.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax.layers.losses import NEGATIVE
from megajax.layers.mask import Context, visible

Implementation = Literal["xla", "cudnn"]


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
      keeps the (S, M) logits in memory; 'cudnn' is fused, for 16-bit types on NVIDIA GPUs.
    Returns: out_BSHK in q's dtype, named 'attended' for the remat policies. Every query must see a
      key; itself, where M holds it.
    """
    memory = query if memory is None else memory
    kernel = _cudnn if implementation == "cudnn" else _xla
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
    if query.segments_BS is None and q_BSHK.shape[1] == k_BMGK.shape[1]:
        return fused(is_causal=True, local_window_size=None if window is None else (window - 1, 0))
    return fused(mask=visible(query, memory, window))
