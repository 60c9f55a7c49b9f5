"""Attention of one rank's rows and heads: which kernel, and what it is given.

For code inside a shard_map over the whole mesh: parallel/tensor.py puts one around `attention_of`,
parallel/local.py runs in one. Where the sequence is cut, parallel/context.py brings queries and
keys together.

Legend: B rows, S query positions, M memory positions, H query heads, G key-value heads, K head
width.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.layout import Layout
from megajax.layers import attend as attend_
from megajax.layers.mask import Context
from megajax.parallel import context as context_
from megajax.parallel.context import ContextSpec
from pallas_kernels import tuned
from pallas_kernels.attention import tiling

Array = jax.Array


def attention_of(
    layout: Layout, kernel: attend_.Implementation, spec: ContextSpec
) -> Callable[..., Array]:
    """Returns the attention of one device's arrays. spec: how they meet those of other devices."""
    cut = layout.live(layout.rules.act.get("seq", ()))

    def attend(
        q: Array, k: Array, v: Array, query: Context, memory: Context | None, window: int | None
    ) -> Array:
        if cut:
            return context_.attend(spec.kind, cut[0], q, k, v, query, window, kernel)
        return attend_.attend(q, k, v, query, memory, window, kernel)

    return attend


def packed_shape(
    q_BSHK: Array, k_BMGK: Array, query: Context, memory: Context | None
) -> tuple[int, int, int] | None:
    """What `choose_attention` is told of rows that hold segments; None for others."""
    if memory is not None or query.segments_BS is None:
        return None
    _, S, H, K = q_BSHK.shape
    return K, H // k_BMGK.shape[2], S


def choose_attention(
    layout: Layout,
    wanted: str,
    dtype: Any,
    context: ContextSpec = ContextSpec(),
    packed: tuple[int, int, int] | None = None,
) -> tuple[attend_.Implementation, str]:
    """Returns (the attention kernel, why).

    'auto' takes cuDNN for 16-bit types on GPUs, which computes all pairs of a packed row under a
    mask, until a table of tuned tiles (scripts/tune.py, which also compares results) says that ours
    was right and fast on this kind of GPU: packed rows then take 'varlen'.

    Args: wanted: 'auto' or a kernel's name. packed: (head width, query heads of a key-value head,
      tokens of a row) where rows hold segments; None: one sequence each, or a cache.
    """
    cut = layout.live(layout.rules.act.get("seq", ()))
    if context.kind == "ring" and cut:
        return "xla", "a ring joins its blocks itself"
    if wanted != "auto":
        return wanted, "asked for"  # type: ignore[return-value]
    if layout.mesh.devices.flat[0].platform == "cpu":
        return "xla", "auto: cuDNN needs a GPU"
    if jnp.dtype(dtype).itemsize != 2:
        return "xla", "auto: cuDNN needs a 16-bit type"
    if packed is not None and not (cut and context.kind == "gather"):
        width, group, tokens = packed
        row = tuned.find(tiling.FORWARD, tiling.key(dtype, width, group, tokens, None))
        if row is not None and row["key"]["width"] == width and row["fastest"] == "hopper":
            if row["median_us"] <= row["rivals"].get("cudnn", math.inf):
                return "varlen", "auto: packed rows, measured on this kind of GPU"
            return "cudnn", "auto: measured to be faster on this kind of GPU"
    return "cudnn", "auto: fused, 16-bit type on a GPU"
