"""Attention of one rank's rows and heads: which kernel, and what it is given.

For code inside a shard_map over the whole mesh: parallel/tensor.py puts one around `attention_of`,
parallel/local.py runs in one. Where the sequence is cut, parallel/context.py brings queries and
keys together.

Legend: B rows, S query positions, M memory positions, H query heads, G key-value heads, K head
width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.layout import Layout
from megajax.layers import attend as attend_
from megajax.layers.mask import Context
from megajax.parallel import context as context_
from megajax.parallel.context import ContextSpec
from pallas_kernels import dispatch, tuned
from pallas_kernels.attention import tiling

Array = jax.Array

# The widest head that cuDNN takes on each GPU with a bias (JAX 0.11.2, check_is_flash_attention; an
# A100 no wider), in steps of 8, and rows of an even number of tokens in training.
MASKED_WIDTH = 128


def attention_of(
    layout: Layout,
    kernel: attend_.Implementation,
    spec: ContextSpec,
    segments: int | None = None,
) -> Callable[..., Array]:
    """Returns the attention of one device's arrays. spec: how they meet those of other devices.
    segments: of a row, as in layers.attend; unused where the sequence is cut."""
    cut = layout.live(layout.rules.act.get("seq", ()))

    def attend(
        q: Array, k: Array, v: Array, query: Context, memory: Context | None, window: int | None
    ) -> Array:
        if cut:
            return context_.attend(spec.kind, cut[0], q, k, v, query, window, kernel)
        return attend_.attend(q, k, v, query, memory, window, kernel, segments)

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

    'auto' takes cuDNN for 16-bit types on GPUs. Packed rows take our kernel, 'varlen', where a
    table (pallas_kernels/tuned.py) says of both passes that it was right and faster than cuDNN on
    this kind of GPU. cuDNN takes the offsets of packed rows' segments on Hopper GPUs, and a mask of
    them on others (layers/attend.py), where XLA would keep the logits of every head.

    Args: wanted: 'auto' or a kernel's name. packed: (head width, query heads of a key-value head,
      tokens of a row) where rows hold segments; None: one sequence each, or a cache.
    """
    cut = layout.live(layout.rules.act.get("seq", ()))
    if context.kind == "ring" and cut:
        return "xla", "a ring joins its blocks itself"
    if wanted != "auto":
        return wanted, "asked for"  # type: ignore[return-value]
    device = layout.mesh.devices.flat[0]
    if device.platform == "cpu":
        return "xla", "auto: cuDNN needs a GPU"
    if jnp.dtype(dtype).itemsize != 2:
        return "xla", "auto: cuDNN needs a 16-bit type"
    fused = "auto: fused, 16-bit type on a GPU"
    if packed is None:
        return "cudnn", fused
    width, group, tokens = packed
    if not dispatch.is_hopper(device.device_kind):
        if width % 8 or width > MASKED_WIDTH or tokens % 2:
            return "xla", f"auto: cuDNN's mask needs even rows and widths to {MASKED_WIDTH} by 8"
        return "cudnn", f"{fused}; packed rows by a mask, as it is no Hopper"
    if not (cut and context.kind == "gather"):
        about = tiling.key(dtype, width, group, tokens, None)
        passes = (tiling.FORWARD, about), (tiling.BACKWARD, about | {"deterministic": True})
        rows = [tuned.find(op, key, kind=device.device_kind) for op, key in passes]
        if not any(map(tuned.against, rows)):
            return "varlen", "auto: packed rows, measured on this kind of GPU"
    return "cudnn", fused
