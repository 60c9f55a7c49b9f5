"""Multi-head attention as three steps that a block composes: project up, attend, project down.

The block, not this module, calls Ops.up and Ops.down, because a parallel block shares one gather
and one scatter between attention and MLP (MegaScale section 3.1). Here: the parameters, what
happens to q, k, v between the two projections, and the cache of decoding.

Legend: B rows, S query positions, M memory positions, D model width, H query heads, G key-value
heads, K head width.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.layout import Layout
from megajax.layers import param
from megajax.layers.mask import Context
from megajax.layers.norm import Norm
from megajax.layers.ops import Ops
from megajax.layers.rope import rotate


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
        return self.query, self.key, self.value

    def __call__(
        self,
        qkv: tuple[jax.Array, ...],
        context: Context,
        cache: "Cache | None" = None,
    ) -> "tuple[jax.Array, Cache | None]":
        """From projected q_BSHK, k_BSGK, v_BSGK to the attended values, ready for `out`.

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
        memory = None
        if cache is not None:
            cache = cache.write(k, v, context.positions_BS)
            k, v, memory = cache.k_BMGK, cache.v_BMGK, cache.context()
        return self.ops.attend(q, k, v, context, memory, self.cfg.window), cache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, by absolute position. Unwritten places lie in the future."""

    k_BMGK: jax.Array
    v_BMGK: jax.Array

    def write(self, k_BSGK: jax.Array, v_BSGK: jax.Array, positions_BS: jax.Array) -> "Cache":
        """Puts S new tokens at their positions, which differ by row."""
        S, M = k_BSGK.shape[1], self.k_BMGK.shape[1]
        if S == 1:  # decoding: a select keeps the cut over rows and heads, a scatter would not
            here_BM11 = (jnp.arange(M)[None] == positions_BS)[:, :, None, None]
            return Cache(
                jnp.where(here_BM11, k_BSGK, self.k_BMGK),
                jnp.where(here_BM11, v_BSGK, self.v_BMGK),
            )
        pad = ((0, 0), (0, M - S), (0, 0), (0, 0))  # prefill: positions are 0..S-1
        return Cache(jnp.pad(k_BSGK, pad), jnp.pad(v_BSGK, pad))

    def context(self) -> Context:
        """Returns the positions of the memory, 0..M-1 in every row."""
        B, M = self.k_BMGK.shape[:2]
        return Context(positions_BS=jnp.broadcast_to(jnp.arange(M, dtype=jnp.int32), (B, M)))
