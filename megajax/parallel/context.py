"""Context parallelism: one row's tokens lie on several devices, and attention still sees all.

Three ways for a query to meet the keys of other devices, all called inside parallel.tensor.attend's
shard_map on local arrays:
  ring: keys and values travel round by hops; each hop adds its part of an online softmax in
    float32. Nothing is ever larger than a device's own tokens. Ring Attention (arXiv 2310.01889).
  ulysses: two all-to-alls trade tokens for heads, so that any kernel sees whole rows of a few heads
    (DeepSpeed Ulysses, arXiv 2309.14509 section 3.1).
  gather: keys and values are gathered whole; one collective, cheapest for short rows with few
    key-value heads, and Llama 3's choice (arXiv 2407.21783 section 3.3.2).
Masking is by position and segment, so tokens of a row may lie in any order. The zigzag order gives
every device a cheap and a dear piece of a causal row (Llama 3, the same section).

Legend: B rows, S own tokens of a device, M keys, H query heads, G key-value heads, R = H / G, K
head width, N blocks of the own tokens, T query rows of a block (its tokens times R).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.core.config import Checked, option, other_than
from megajax.core.layout import Layout
from megajax.layers import attention
from megajax.layers.attention import Context, visible
from megajax.layers.losses import NEGATIVE
from pallas_kernels import arguments, dispatch, tuned
from pallas_kernels.attention import guard

Array = jax.Array
BLOCK = 1024  # (chosen) tokens whose logits exist at one time: 4 MiB a head in float32


@dataclasses.dataclass(frozen=True)
class ContextSpec(Checked, section="context"):
    """How queries meet keys of other devices, where mesh.context > 1."""

    kind: Literal["ring", "ulysses", "gather"] = option(
        "ring",
        "how queries meet the keys of other ranks; ring: keys and values travel around a ring; "
        "ulysses: each rank exchanges its tokens for heads; gather: each rank gathers all keys "
        "and values",
    )
    order: Literal["zigzag", "plain"] = option(
        "zigzag",
        "order of a row's tokens over ranks; zigzag: equal causal work (ulysses: in any order)",
        needs=other_than("kind", "ulysses"),
    )

    def order_of(self, seq_len: int, ways: int) -> np.ndarray | None:
        """Returns order_S: place i of a row holds token order_S[i]; None: as they come.

        ways: size of the context axis. Zigzag cuts a row into 2 x ways pieces, and device r holds
        pieces r and 2 x ways - 1 - r.
        """
        if ways == 1 or self.kind == "ulysses" or self.order == "plain":
            return None
        pieces = np.arange(seq_len).reshape(2 * ways, -1)
        pairs = [(r, 2 * ways - 1 - r) for r in range(ways)]
        return pieces[np.array(pairs).ravel()].ravel()


def attend(
    kind: str,
    axis: str,
    q_BSHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    query: Context,
    window: int | None,
    kernel: attention.Implementation,
    return_lse: bool = False,
) -> Any:
    """Attention of this device's tokens to those of all devices of a mesh axis.

    Args: kind: as ContextSpec's. query: of the own tokens. kernel: of ulysses and gather.
    Returns: out_BSHK in q's dtype, or (out_BSHK, lse_BSH).
    """
    if kind == "ring":
        return ring(axis, q_BSHK, k_BSGK, v_BSGK, query, window, return_lse)
    everyone = jax.tree.map(lambda x: lax.all_gather(x, axis, axis=1, tiled=True), query)
    if kind == "ulysses":
        return ulysses(axis, q_BSHK, k_BSGK, v_BSGK, everyone, window, kernel, return_lse)
    k, v = (lax.all_gather(x, axis, axis=1, tiled=True) for x in (k_BSGK, v_BSGK))
    return attention.attend(q_BSHK, k, v, query, everyone, window, kernel, return_lse=return_lse)


def ulysses(
    axis: str,
    q_BSHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    everyone: Context,
    window: int | None,
    kernel: attention.Implementation,
    return_lse: bool = False,
) -> Any:
    """Whole rows of H / ways heads. Key-value heads are repeated where there are too few.

    everyone: positions and segments of whole rows. H must divide by the axis (core.check).
    """
    ways, G = lax.axis_size(axis), k_BSGK.shape[2]
    copies = ways // math.gcd(ways, G)
    swap = functools.partial(lax.all_to_all, axis_name=axis, tiled=True)
    k, v = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (k_BSGK, v_BSGK))
    q, k, v = (swap(x, split_axis=2, concat_axis=1) for x in (q_BSHK, k, v))
    out = attention.attend(q, k, v, everyone, everyone, window, kernel, return_lse=return_lse)
    return jax.tree.map(lambda x: swap(x, split_axis=1, concat_axis=2), out)


# ---- ring


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The static arguments of ring attention. ways: devices of the ring."""

    axis: str
    ways: int
    window: int | None
    return_lse: bool = False

    def rotate(self, tree: Any) -> Any:
        """Sends to the next device what came from the one before."""
        steps = [(i, (i + 1) % self.ways) for i in range(self.ways)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis, steps), tree)


def ring(
    axis: str,
    q_BSHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    query: Context,
    window: int | None,
    return_lse: bool = False,
) -> Any:
    """Ring attention, exact, with a backward pass that keeps q, k, v, out and log-sum-exp only.

    A hop works in blocks of the own tokens and skips a pair of blocks that sees nothing, so causal
    order, segments and windows save work in any order of the tokens. Every query must see a key.
    """
    B, S, H, K = q_BSHK.shape
    G = k_BSGK.shape[2]
    R, N = H // G, S // _block(S)
    q = q_BSHK.reshape(B, N, S // N, G, R, K).transpose(1, 0, 3, 2, 4, 5)
    q_NBGTK = q.reshape(N, B, G, S // N * R, K)
    k, v = (x.reshape(B, N, S // N, G, K).transpose(1, 0, 3, 2, 4) for x in (k_BSGK, v_BSGK))

    def cut(x_BS: Array) -> Array:
        return x_BS.reshape(B, N, S // N).transpose(1, 0, 2)

    memory = jax.tree.map(cut, dataclasses.replace(query, rotary=None, dropout=None))
    rows = jax.tree.map(lambda x_NBS: jnp.repeat(x_NBS, R, axis=2), memory)
    spec = _Ring(axis, lax.axis_size(axis), window, return_lse)
    with arguments.reverse_only("ring attention"):
        out = _attend(spec, *dispatch.alike((q_NBGTK, (k, v), rows, memory)))

    def joined(x: Array) -> Array:
        x = x.reshape(N, B, G, S // N, R, -1)
        return x.transpose(1, 0, 3, 2, 4, 5).reshape(B, S, H, -1)

    return (joined(out[0]), joined(out[1])[..., 0]) if return_lse else joined(out)


def _block(tokens: int) -> int:
    """Returns the largest equal block up to BLOCK, and at most half: a piece of the zigzag."""
    largest = max(min(BLOCK, tokens // 2), 1)
    return next(b for b in range(largest, 0, -1) if tokens % b == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    ring: _Ring, q_NBGTK: Array, kv: tuple[Array, Array], rows: Context, columns: Context
) -> Any:
    """out_NBGTK, or (out_NBGTK, lse_NBGT). kv: (k_NBGMK, v_NBGMK). rows, columns: places of queries
    and keys."""
    return _forward(ring, q_NBGTK, kv, rows, columns)[0]


def _forward(
    ring: _Ring, q_NBGTK: Array, kv: tuple[Array, Array], rows: Context, columns: Context
) -> tuple[Any, tuple]:
    # Inf and NaN of a key reach the queries that see it, and no others (guard.py).
    q_NBGTK, kv = guard.mark(q_NBGTK), guard.keys(*kv)
    residuals = (q_NBGTK, kv, rows, columns)
    # All layers share the places, so jax would make the masks of all hops and blocks once, before
    # the loop over layers, and keep them. Tied to the queries they are made where they are used.
    q_NBGTK, rows, columns = lax.optimization_barrier((q_NBGTK, rows, columns))

    def absorb(sums: tuple, keys: tuple) -> tuple:
        """Adds the keys of one hop to the running (max_NBGT, sum_NBGT, out_NBGTK)."""

        def for_rows(_: None, piece: tuple) -> tuple[None, tuple]:
            q_BGTK, places, sums = piece

            def for_columns(sums: tuple, block: tuple) -> tuple[tuple, None]:
                (k_BGMK, v_BGMK), there = block
                mask_B1TM = visible(places, there, ring.window)
                add = functools.partial(_add_block, q_BGTK, k_BGMK, v_BGMK, mask_B1TM)
                return lax.cond(mask_B1TM.any(), add, _same, *sums), None

            return None, lax.scan(for_columns, sums, keys)[0]

        return lax.scan(for_rows, None, (q_NBGTK, rows, sums))[1]

    def hop(carry: tuple, _: None) -> tuple[tuple, None]:
        keys, sums = carry
        following = ring.rotate(keys)  # before the work, so that it travels meanwhile
        return (following, absorb(sums, keys)), None

    none = _zeros(q_NBGTK, q_NBGTK.shape[:-1])
    start = (none + NEGATIVE, none, _zeros(q_NBGTK, q_NBGTK.shape))
    (keys, sums), _ = lax.scan(hop, ((kv, columns), start), length=ring.ways - 1)
    high, total, out = absorb(sums, keys)
    # Names for the remat policies: with both kept, the backward pass runs no hop of this again.
    out = checkpoint_name((out / total[..., None]).astype(q_NBGTK.dtype), "attended")
    log_sum = checkpoint_name(high + jnp.log(total), "attended")
    return (out, log_sum) if ring.return_lse else out, (*residuals, out, log_sum)


def _add_block(
    q_BGTK: Array,
    k_BGMK: Array,
    v_BGMK: Array,
    mask_B1TM: Array,
    high_BGT: Array,
    sum_BGT: Array,
    out_BGTK: Array,
) -> tuple[Array, Array, Array]:
    """One block of keys joins the softmax of one block of queries.

    A query that has seen no key yet adds masked logits with weight 1; its first real key fades them
    to exactly nothing.
    """
    logits_BGTM = _logits(q_BGTK, k_BGMK, mask_B1TM)
    higher_BGT = jnp.maximum(high_BGT, logits_BGTM.max(-1))
    p_BGTM = jnp.exp(logits_BGTM - higher_BGT[..., None])
    fade_BGT = jnp.exp(high_BGT - higher_BGT)
    added_BGTK = _dot(p_BGTM.astype(v_BGMK.dtype), v_BGMK, 3, 2)
    return (
        higher_BGT,
        sum_BGT * fade_BGT + p_BGTM.sum(-1),
        out_BGTK * fade_BGT[..., None] + added_BGTK,
    )


def _backward(ring: _Ring, saved: tuple, cotangents: Any) -> tuple:
    """The gradients of keys and values travel one hop behind them, and come home last."""
    q_NBGTK, kv, rows, columns, out_NBGTK, log_sum_NBGT = saved
    dout_NBGTK, dlse_NBGT = cotangents if ring.return_lse else (cotangents, None)
    products = dout_NBGTK.astype(jnp.float32) * out_NBGTK.astype(jnp.float32)
    delta_NBGT = products.sum(-1)
    if dlse_NBGT is not None:
        delta_NBGT -= dlse_NBGT
    queries = guard.queries(q_NBGTK, dout_NBGTK, log_sum_NBGT, delta_NBGT)
    kv = (guard.finite(kv[0]), kv[1])

    def give(dq: Array, keys: tuple) -> tuple[Array, tuple]:
        """Returns (dq_NBGTK with this hop's part, (dk, dv)_NBGMK of the hop's keys), float32."""

        def for_columns(dq: Array, block: tuple) -> tuple[Array, tuple]:
            (k_BGMK, v_BGMK), there = block

            def for_rows(dkv: tuple, piece: tuple) -> tuple[tuple, Array]:
                query, places, dq_BGTK = piece
                mask_B1TM = visible(places, there, ring.window)
                add = functools.partial(_add_gradients, query, k_BGMK, v_BGMK, mask_B1TM)
                dk, dv, dq_BGTK = lax.cond(mask_B1TM.any(), add, _same, *dkv, dq_BGTK)
                return (dk, dv), dq_BGTK

            none = _zeros(k_BGMK, k_BGMK.shape)
            dkv, dq = lax.scan(for_rows, (none, none), (queries, rows, dq))
            return dq, dkv

        return lax.scan(for_columns, dq, keys)

    def hop(carry: tuple, _: None) -> tuple[tuple, None]:
        keys, dkv, dq = carry
        following, dkv = ring.rotate((keys, dkv))
        dq, more = give(dq, keys)
        return (following, jax.tree.map(jnp.add, dkv, more), dq), None

    keys = (kv, columns)
    following = ring.rotate(keys) if ring.ways > 1 else keys
    dq, dkv = give(_zeros(q_NBGTK, q_NBGTK.shape), keys)
    if ring.ways > 2:
        (following, dkv, dq), _ = lax.scan(hop, (following, dkv, dq), length=ring.ways - 2)
    if ring.ways > 1:
        dkv = ring.rotate(dkv)
        dq, more = give(dq, following)
        dkv = ring.rotate(jax.tree.map(jnp.add, dkv, more))
    cast = jax.tree.map(lambda d, x: d.astype(x.dtype), dkv, kv)
    return dq.astype(q_NBGTK.dtype), cast, None, None


def _add_gradients(
    query: tuple[Array, Array, Array, Array],
    k_BGMK: Array,
    v_BGMK: Array,
    mask_B1TM: Array,
    dk_BGMK: Array,
    dv_BGMK: Array,
    dq_BGTK: Array,
) -> tuple[Array, Array, Array]:
    """One pair of blocks. query: (q, dout, log of the softmax's sum, sum of dout times out)."""
    q_BGTK, dout_BGTK, log_sum_BGT, delta_BGT = query
    p_BGTM = jnp.exp(_logits(q_BGTK, k_BGMK, mask_B1TM) - log_sum_BGT[..., None])
    p_BGTM = jnp.where(mask_B1TM, p_BGTM, 0.0)  # a bad row's sum is NaN
    dp_BGTM = _dot(dout_BGTK, v_BGMK, 3, 3)
    dz_BGTM = p_BGTM * (dp_BGTM - delta_BGT[..., None]) * q_BGTK.shape[-1] ** -0.5
    dz_BGTM = jnp.where(mask_B1TM, dz_BGTM, 0.0).astype(q_BGTK.dtype)
    return (
        dk_BGMK + _dot(dz_BGTM, q_BGTK, 2, 2),
        dv_BGMK + _dot(p_BGTM.astype(dout_BGTK.dtype), dout_BGTK, 2, 2),
        dq_BGTK + _dot(dz_BGTM, k_BGMK, 3, 2),
    )


_attend.defvjp(_forward, _backward)


def _logits(q_BGTK: Array, k_BGMK: Array, mask_B1TM: Array) -> Array:
    logits_BGTM = _dot(q_BGTK, k_BGMK, 3, 3) * q_BGTK.shape[-1] ** -0.5
    return jnp.where(mask_B1TM, logits_BGTM, NEGATIVE)


def _dot(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    """Contracts one dim of each behind the batch dims B and G; float32."""
    dims = (((a_dim,), (b_dim,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, preferred_element_type=jnp.float32)


def _same(*state: Array) -> tuple[Array, ...]:
    """Returns its arguments: no query of this pair of blocks sees a key."""
    return state


def _zeros(like: Array, shape: tuple[int, ...]) -> Array:
    """Returns float32 zeros that vary over the mesh axes over which `like` does."""
    axes = tuple(jax.typeof(like).mat.varying)
    return lax.pcast(jnp.zeros(shape, jnp.float32), axes, to="varying")


# ---- attention
#
# Attention of one rank's rows and heads: which kernel, and what it is given.
#
# For code inside a shard_map over the whole mesh (parallel/tensor.py). Where the sequence is cut,
# `attend` brings queries and keys together.
#
# Legend: B rows, S query positions, M memory positions, H query heads, G key-value heads, K head
# width.


# The widest head that cuDNN takes on each GPU with a bias (JAX 0.11.2, check_is_flash_attention; an
# A100 no wider), in steps of 8, and rows of an even number of tokens in training.
MASKED_WIDTH = 128


def attention_of(
    layout: Layout,
    kernel: attention.Implementation,
    spec: ContextSpec,
    segments: int | None = None,
    return_lse: bool = False,
) -> Callable[..., Any]:
    """Returns the attention of one device's arrays. spec: how they meet those of other devices.
    segments, return_lse: as in layers.attention.attend; segments is unused where the sequence is
    cut."""
    cut = layout.live(layout.rules.act.get("seq", ()))

    def attend_local(
        q: Array, k: Array, v: Array, query: Context, memory: Context | None, window: int | None
    ) -> Any:
        if cut:
            return attend(spec.kind, cut[0], q, k, v, query, window, kernel, return_lse)
        return attention.attend(q, k, v, query, memory, window, kernel, segments, return_lse)

    return attend_local


def packed_shape(
    q_BSHK: Array, k_BMGK: Array, query: Context, memory: Context | None
) -> tuple[int, int, int] | None:
    """Returns the `packed` of `choose_attention`: (head width, query heads of a key-value head,
    tokens of a row) if rows hold segments, otherwise None."""
    if memory is not None or query.segments_BS is None:
        return None
    _, S, H, K = q_BSHK.shape
    return K, H // k_BMGK.shape[2], S


def choose_attention(
    layout: Layout,
    asked: str,
    dtype: Any,
    context: ContextSpec = ContextSpec(),
    packed: tuple[int, int, int] | None = None,
    return_lse: bool = False,
) -> tuple[attention.Implementation, str]:
    """Returns (the attention kernel, why).

    'auto' takes cuDNN for 16-bit types on GPUs. Packed rows take our kernel, 'varlen', where a
    table (pallas_kernels/tuned.py) says of both passes that it was right and faster than cuDNN on
    this kind of GPU. cuDNN takes the offsets of packed rows' segments on Hopper GPUs, and a mask of
    them on others (layers/attention.py), where XLA would keep the logits of every head.

    Args: asked: 'auto' or a kernel's name. packed: (head width, query heads of a key-value head,
      tokens of a row) where rows hold segments; None: one sequence each, or a cache. return_lse:
      whether the log-sum-exp is asked for, which cuDNN does not give.
    """
    cut = layout.live(layout.rules.act.get("seq", ()))
    if context.kind == "ring" and cut:
        return "xla", "a ring joins its blocks itself"
    if asked != "auto":
        return asked, "asked for"  # type: ignore[return-value]
    device = layout.mesh.devices.flat[0]
    if device.platform == "cpu":
        return "xla", "auto: cuDNN needs a GPU"
    if jnp.dtype(dtype).itemsize != 2:
        return "xla", "auto: cuDNN needs a 16-bit type"
    if return_lse:
        if cut and context.kind == "gather":
            return "xla", "auto: attention sinks need the log-sum-exp of queries with other keys"
        return "varlen", "auto: attention sinks need the log-sum-exp, which cuDNN does not give"
    fused = "auto: fused, 16-bit type on a GPU"
    if packed is None:
        return "cudnn", fused
    width, group, tokens = packed
    if not dispatch.is_hopper(device.device_kind):
        if width % 8 or width > MASKED_WIDTH or tokens % 2:
            return "xla", f"auto: cuDNN's mask needs even rows and widths to {MASKED_WIDTH} by 8"
        return "cudnn", f"{fused}; packed rows by a mask, as it is no Hopper"
    if not (cut and context.kind == "gather"):
        from pallas_kernels.attention import tiling

        about = tiling.key(dtype, width, group, tokens, None)
        passes = (tiling.FORWARD, about), (tiling.BACKWARD, about | {"deterministic": True})
        rows = [tuned.find(op, key, kind=device.device_kind) for op, key in passes]
        if not any(map(tuned.against, rows)):
            return "varlen", "auto: packed rows, measured on this kind of GPU"
    return "cudnn", fused
