"""Multi-head latent attention: keys and values of all heads are products with one small latent.

A token's latent c (R numbers) and one rotary key of all heads are what a cache holds. In training
the keys and values of each head are made of c, and attention is as usual. With a cache the product
that would make a head's keys is applied to its query instead, and the one that would make its
values to its result, so that all heads attend to the same R + P numbers of a token. Both
down-projections are products where the tokens are: what is gathered over tensor ranks is the
latents, which are narrower than the residual stream. Source: DeepSeek-V2 (arXiv 2405.04434
section 2.1), DeepSeek-V3 (arXiv 2412.19437 section 2.1.1).

Legend: B rows, S positions, D model width, H heads, K width of a query head, of which the last P
are rotary and N are not, V width of a value head, W = N + V, R rank of the keys' and values'
latent, Q that of the queries.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.config import Checked, above, option
from megajax.core.layout import Layout
from megajax.layers import param
from megajax.layers.attention import Cache, Context
from megajax.layers.norm import Norm

if TYPE_CHECKING:
    from megajax.layers.ops import Ops

EPS = 1e-6  # (DeepSeek-V3's modeling code) of the latents' norms, whatever that of the blocks


@dataclasses.dataclass(frozen=True)
class LatentConfig(Checked, section="model.latent"):
    """Sizes of multi-head latent attention."""

    rank: int = option(
        0,
        "rank R of the latent of keys and values; 0: ordinary attention, which has none",
        at_least=0,
    )
    query_rank: int | None = option(
        None,
        "rank of the latent of queries; none: queries are made of the residual stream",
        needs=above(0, "rank"),
        at_least=1,
    )
    rotary: int = option(
        64,
        "numbers of a query head that are rotated, against one key of all heads",
        needs=above(0, "rank"),
        at_least=2,
    )
    value: int = option(128, "width of one head's values", needs=above(0, "rank"), at_least=1)


@dataclasses.dataclass(frozen=True)
class LatentShape:
    """Shape of one layer of latent attention. head_width: K, the rotary part included. scale:
    factor of the logits beside K ** -0.5."""

    width: int
    heads: int
    head_width: int
    latent: LatentConfig
    window: int | None
    out_std: float
    scale: float = 1.0
    out_bias: bool = False


class LatentAttention(nnx.Module):
    """Parameters and inner part of latent attention, in the place of layers.attention.Attention."""

    def __init__(self, cfg: LatentShape, layout: Layout | None, ops: "Ops", *, rngs: nnx.Rngs):
        """Makes latent (D,R+P), key_value (R,H,N+V), out (H,V,D) and query (Q,H,K) with
        query_latent (D,Q), or query (D,H,K)."""
        D, H, K, sizes = cfg.width, cfg.heads, cfg.head_width, cfg.latent
        R, P, V = sizes.rank, sizes.rotary, sizes.value
        self.cfg, self.ops = cfg, ops
        if sizes.query_rank is not None:
            into = (D, sizes.query_rank)
            self.query_latent = param.normal(rngs, layout, into, ("embed", None), 0.02)
            self.query_norm = Norm("rms", sizes.query_rank, EPS, layout)
        # The rank is cut at rest as the model's width is.
        heads = ("embed", "heads", None)
        self.query = param.normal(rngs, layout, (sizes.query_rank or D, H, K), heads, 0.02)
        self.latent = param.normal(rngs, layout, (D, R + P), ("embed", None), 0.02)
        self.latent_norm = Norm("rms", R, EPS, layout)
        self.key_value = param.normal(rngs, layout, (R, H, K - P + V), heads, 0.02)
        self.out = param.normal(rngs, layout, (H, V, D), ("heads", None, "embed"), cfg.out_std)

    def project(self, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns (q_BSHK, the latent_BSR and the rotary key_BSP as the residual stream lies), none
        of them rotated."""
        ops, dtype, R = self.ops, x_BSD.dtype, self.cfg.latent.rank
        asking = x_BSD
        if self.cfg.latent.query_rank is not None:
            asking = self.query_norm(ops.score(x_BSD, self.query_latent, dtype))
        (q_BSHK,) = ops.up(asking, (self.query,), ops.matmul)
        both = ops.score(x_BSD, self.latent, dtype)
        return q_BSHK, self.latent_norm(both[..., :R]), both[..., R:]

    def __call__(
        self,
        projected: tuple[jax.Array, ...],
        context: Context,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Turns what `project` returned into the attended values y_BSHV, ready for `out`.

        cache: the latents before these; None: attend among these tokens only.
        Returns: (y_BSHV, the cache with these tokens' latents added).
        """
        q_BSHK, latent_BSR, key_BSP = projected
        K, P, V = q_BSHK.shape[-1], self.cfg.latent.rotary, self.cfg.latent.value
        assert context.rotary is not None
        plain_BSHN, turned_BSHP = q_BSHK[..., : K - P], rotate(q_BSHK[..., K - P :], context.rotary)
        if cache is not None:
            key_BS1P = rotate(key_BSP[:, :, None], context.rotary)
            return self._cached(plain_BSHN, turned_BSHP, latent_BSR, key_BS1P, context, cache)
        ops = self.ops
        (made_BSHW,) = ops.up(latent_BSR, (self.key_value,), ops.matmul)
        (copies_BSHP,) = ops.up(key_BSP, (self._copies(P),), ops.matmul)
        key_BSHP = rotate(copies_BSHP, context.rotary)
        q = jnp.concatenate([plain_BSHN, turned_BSHP], -1) * self.cfg.scale
        k = jnp.concatenate([made_BSHW[..., : K - P], key_BSHP], -1)
        # Kernels have one width for keys and values.
        v = jnp.pad(made_BSHW[..., K - P :], [(0, 0)] * 3 + [(0, K - V)])
        y_BSHK = ops.attend(q.astype(k.dtype), k, v, context, None, self.cfg.window)
        return y_BSHK[..., :V], None

    def _copies(self, P: int) -> nnx.Param:
        """Returns the constant weight (P, H, P) whose product is a copy for each head of this rank.
        As a product it is gathered, cut and differentiated like any other; it is P / D of one."""
        heads = self.key_value.get_value().shape[1]
        eye = jnp.eye(P, dtype=jnp.float32)[:, None]
        return nnx.Param(jnp.broadcast_to(eye, (P, heads, P)), axes=(None, "heads", None))

    def _cached(
        self,
        plain_BSHN: jax.Array,
        turned_BSHP: jax.Array,
        latent_BSR: jax.Array,
        key_BS1P: jax.Array,
        context: Context,
        cache: Cache,
    ) -> tuple[jax.Array, Cache]:
        """Attention of local heads to latents."""
        N, R = plain_BSHN.shape[-1], latent_BSR.shape[-1]
        w_RHW = self.ops.whole(self.key_value, plain_BSHN.dtype)
        asked_BSHR = jnp.einsum("bshn,rhn->bshr", plain_BSHN, w_RHW[..., :N])
        q_BSHK = jnp.concatenate([asked_BSHR, turned_BSHP], -1)
        # The cache divides by the root of the width that it sees.
        factor = self.cfg.scale * (q_BSHK.shape[-1] / (N + turned_BSHP.shape[-1])) ** 0.5
        q_BSHK = (q_BSHK * factor).astype(q_BSHK.dtype)
        k_BS1K = jnp.concatenate([latent_BSR[:, :, None], key_BS1P], -1)
        y_BSHK, cache = cache.attend(q_BSHK, k_BS1K, None, context, self.cfg.window)
        return jnp.einsum("bshr,rhv->bshv", y_BSHK[..., :R], w_RHW[..., N:]), cache


def rotate(x_BSHP: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns x rotated by its positions' angles, numbers 2 i and 2 i + 1 as a pair, which come out
    as i and i + P/2. Queries and keys have the same order, so no product sees it."""
    cos, sin = (t[:, :, None].astype(x_BSHP.dtype) for t in tables)
    pairs = x_BSHP.reshape(*x_BSHP.shape[:-1], -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
