"""Multi-head attention as three steps that a block composes: project up, attend, project down.

The block, not this module, calls Ops.up and Ops.down, because a parallel block shares one gather
and one scatter between attention and MLP (MegaScale section 3.1). Here: the parameters, what
happens to q, k, v between the two projections.

Legend: B rows, S positions, D model width, H query heads, G key-value heads, K head width.
"""

import dataclasses
from typing import Protocol

import jax
from flax import nnx

from megajax.core.layout import Layout
from megajax.layers import param
from megajax.layers.mask import Context
from megajax.layers.norm import Norm
from megajax.layers.ops import Ops
from megajax.layers.rope import rotate

INPUTS = "query", "key", "value"  # the weights that read the block's input


class Cache(Protocol):
    """Keys and values of tokens that one layer has seen before (serving/forward.py)."""

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, context: Context, window: int | None
    ) -> "tuple[jax.Array, Cache]":
        """Keeps k_BSGK and v_BSGK of new tokens, and attends from q_BSHK to them and those before.

        Returns: (y_BSHK, the cache with these tokens).
        """
        ...


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Shape of one attention layer. window: keys a query may see, itself included; None: all."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    norm_eps: float
    window: int | None
    out_std: float


class Attention(nnx.Module):
    """Parameters and inner part of attention."""

    def __init__(self, cfg: AttentionConfig, layout: Layout | None, ops: Ops, *, rngs: nnx.Rngs):
        """Makes query (D,H,K), key and value (D,G,K), out (H,K,D) and what the config adds."""
        D, H, G, K = cfg.width, cfg.heads, cfg.kv_heads, cfg.head_width
        self.cfg, self.ops = cfg, ops
        self.query = param.normal(rngs, layout, (D, H, K), ("embed", "heads", None), 0.02)
        self.key = param.normal(rngs, layout, (D, G, K), ("embed", "kv_heads", None), 0.02)
        self.value = param.normal(rngs, layout, (D, G, K), ("embed", "kv_heads", None), 0.02)
        self.out = param.normal(rngs, layout, (H, K, D), ("heads", None, "embed"), cfg.out_std)
        if cfg.qkv_bias:
            self.query_bias = param.constant(layout, (H, K), ("heads", None), 0.0)
            self.key_bias = param.constant(layout, (G, K), ("kv_heads", None), 0.0)
            self.value_bias = param.constant(layout, (G, K), ("kv_heads", None), 0.0)
        if cfg.out_bias:
            self.out_bias = param.constant(layout, (D,), (None,), 0.0)
        if cfg.qk_norm:
            self.query_norm = Norm("rms", K, cfg.norm_eps, layout)
            self.key_norm = Norm("rms", K, cfg.norm_eps, layout)

    @property
    def inputs(self) -> tuple[nnx.Param, ...]:
        """The weights that read the block's input."""
        return tuple(getattr(self, name) for name in INPUTS)

    def __call__(
        self,
        qkv: tuple[jax.Array, ...],
        context: Context,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Turns projected q_BSHK, k_BSGK, v_BSGK into the attended values, ready for `out`.

        cache: keys and values before these; None: attend among these tokens only.
        Returns: (y_BSHK, the cache with these tokens added).
        """
        q, k, v = qkv
        if self.cfg.qkv_bias:
            q, k, v = (
                x + param.broadcast(self.ops.vector(b), x, x.dtype)
                for x, b in ((q, self.query_bias), (k, self.key_bias), (v, self.value_bias))
            )
        if self.cfg.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        if context.rotary is not None:
            q, k = rotate(q, context.rotary), rotate(k, context.rotary)
        if cache is not None:
            return cache.attend(q, k, v, context, self.cfg.window)
        return self.ops.attend(q, k, v, context, None, self.cfg.window), None
