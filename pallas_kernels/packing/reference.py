"""Packing and unpacking in plain JAX: two gathers, each the other's transpose.

Token t of the packed axis is token t - cu[b] of sequence b, where b is how many sequences end at or
before t: ByteTransformer (arXiv 2210.03052) section 3.2, its prefix sum over the lengths. XLA fuses
the index arithmetic and the select into the gather, so a pass reads and writes each token once.

Legend: B sequences, S padded length, T packed tokens, x any further dims.
"""

import jax
import jax.numpy as jnp


def prefix_sums(lengths_B: jax.Array) -> jax.Array:
    """Returns int32 (B+1,): where each sequence starts, and where the last one ends."""
    ends_B = jnp.cumsum(lengths_B.astype(jnp.int32), dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends_B])


def segment_ids(cu_seqlens: jax.Array, capacity: int) -> jax.Array:
    """Returns int32 (T,): the sequence that each token belongs to, -1 in the dead tail."""
    t_T = jnp.arange(capacity, dtype=jnp.int32)
    ids_T = (t_T[:, None] >= cu_seqlens[None, 1:]).sum(1, dtype=jnp.int32)
    return jnp.where(t_T < cu_seqlens[-1], ids_T, -1)


def positions(cu_seqlens: jax.Array, capacity: int) -> jax.Array:
    """Returns int32 (T,): each token's place in its sequence, 0 in the dead tail."""
    ids_T = segment_ids(cu_seqlens, capacity)
    t_T = jnp.arange(capacity, dtype=jnp.int32)
    return jnp.where(ids_T >= 0, t_T - cu_seqlens[jnp.maximum(ids_T, 0)], 0)


def pack(x_BSx: jax.Array, cu_seqlens: jax.Array, capacity: int) -> jax.Array:
    """Returns x_Tx; the dead tail is 0."""
    ids_T = segment_ids(cu_seqlens, capacity)
    flat_T = ids_T * x_BSx.shape[1] + positions(cu_seqlens, capacity)
    B, S, *features = x_BSx.shape
    if not B * S:  # nothing to gather from
        return jnp.zeros((capacity, *features), x_BSx.dtype)
    flat = x_BSx.reshape(B * S, *features)
    return _select(ids_T >= 0, flat[jnp.maximum(flat_T, 0)])


def unpack(x_Tx: jax.Array, cu_seqlens: jax.Array, length: int) -> jax.Array:
    """Returns x_BSx of S = length; what pads a sequence is 0."""
    s_1S = jnp.arange(length, dtype=jnp.int32)[None]
    t_BS = cu_seqlens[:-1, None] + s_1S
    live_BS = t_BS < cu_seqlens[1:, None]
    return _select(live_BS, x_Tx[jnp.where(live_BS, t_BS, 0)])


def _select(live: jax.Array, x: jax.Array) -> jax.Array:
    """x where live, else 0; a select, not a product, so that NaN does not spread."""
    live = live.reshape(live.shape + (1,) * (x.ndim - live.ndim))
    return jnp.where(live, x, jnp.zeros((), x.dtype))
