"""The default attention: XLA's, cuDNN's fused kernel, or ours over packed tokens.

Legend: B rows, S query positions, M memory positions, H query heads, G key-value heads, R = H / G
query heads that share one, K head width.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

import pallas_kernels
from megajax.core.errors import UserError
from megajax.layers.losses import NEGATIVE
from megajax.layers.mask import Context, reach, visible
from pallas_kernels import arguments, dispatch
from pallas_kernels.attention import guard
from pallas_kernels.attention.names import named

Array = jax.Array
Implementation = Literal["xla", "cudnn", "varlen", "hopper"]


def attend(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context | None = None,
    window: int | None = None,
    implementation: Implementation = "xla",
    segments: int | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v over the visible keys, softmax in float32.

    Args: memory: the keys' positions and segments; None: the query's own. implementation: 'xla'
      keeps the (S, M) logits in memory; 'cudnn' is fused, for 16-bit types on NVIDIA GPUs;
      'varlen' does the work of each segment's own tokens only, and dead tokens get 0; it runs what
      was measured best on this kind of GPU. 'hopper' is 'varlen' by our Hopper kernel in any case.
      segments: for 'cudnn', of a row, on average over the batch; None: one for 64 tokens
      (library.room). More are as right, and slower.
    Returns: out_BSHK in q's dtype. What the backward pass needs of it is named 'attended' for the
      remat policies. Every query must see a key; itself, where M holds it. Inf or NaN in a key or
      value makes NaN the queries that see it, and no others; so it is with gradients, except that
      'cudnn' with a memory of its own leaves those rows out of them.
    Raises: NotImplementedError for 'varlen' and 'hopper' with a memory of their own, and for
      'hopper' where its kernel cannot run; UserError for a window that
      is not a positive integer; TypeError for forward mode (jax.jvp). Second derivatives of 'xla'
      go through jax.grad, and jax.jvp of jax.grad.
    """
    window = reach(window)
    memory = query if memory is None else memory
    ours = functools.partial(_varlen, kernel="hopper")
    cudnn = functools.partial(_cudnn, segments=segments)
    kernels = {"xla": _xla, "cudnn": cudnn, "varlen": _varlen, "hopper": ours}
    if implementation not in kernels:
        raise UserError(f"attention implementation={implementation!r}; there are {[*kernels]}")
    with arguments.reverse_only(f"attention {implementation!r}"):
        return kernels[implementation](q_BSHK, k_BMGK, v_BMGK, query, memory, window)


def _xla(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
) -> jax.Array:
    B, S, H, K = q_BSHK.shape
    G = k_BMGK.shape[2]
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    arrays = dispatch.alike((q_BSGRK, k_BMGK, v_BMGK, visible(query, memory, window)))
    (out_BSHK,) = named(jnp.moveaxis(_masked(*arrays), 1, 2).reshape(B, S, H, K))
    return out_BSHK


# A rule of its own, for autodiff's would multiply the zeros of hidden pairs by what other segments
# hold (pallas_kernels/attention/guard.py says how that stays out).
@jax.custom_vjp
def _masked(q_BSGRK: Array, k_BMGK: Array, v_BMGK: Array, mask_B1SM: Array) -> Array:
    """Returns out_BGSRK; Inf and NaN of a key reach the queries that see it, and no others."""
    return _masked_forward(q_BSGRK, k_BMGK, v_BMGK, mask_B1SM)[0]


def _masked_forward(q_BSGRK: Array, k_BMGK: Array, v_BMGK: Array, mask_B1SM: Array) -> tuple:
    q_BSGRK, (k_BMGK, v_BMGK) = guard.mark(q_BSGRK), guard.keys(k_BMGK, v_BMGK)
    logits_BGSRM = _logits(q_BSGRK, k_BMGK)
    logits_BGSRM = jnp.where(mask_B1SM[:, :, :, None], logits_BGSRM, NEGATIVE)
    weights_BGSRM = jax.nn.softmax(logits_BGSRM, -1)
    out_BGSRK = _mix(weights_BGSRM.astype(v_BMGK.dtype), v_BMGK)
    # A key that is not finite makes all weights of a row NaN. Asked of the weights, not of the
    # output: remat would multiply by the values a second time for it.
    fine_BGSR1 = jnp.isfinite(weights_BGSRM[..., :1])
    return out_BGSRK, (q_BSGRK, k_BMGK, v_BMGK, mask_B1SM, weights_BGSRM, fine_BGSR1)


def _masked_backward(saved: tuple, dout_BGSRK: Array) -> tuple:
    q_BSGRK, k_BMGK, v_BMGK, mask_B1SM, weights_BGSRM, fine_BGSR1 = saved
    seen_B1S1M = mask_B1SM[:, :, :, None]
    fine_BGSR1 = fine_BGSR1 & jnp.isfinite(dout_BGSRK).all(-1, keepdims=True)
    dout_BGSRK = jnp.where(fine_BGSR1, dout_BGSRK, jnp.zeros((), dout_BGSRK.dtype))
    weights_BGSRM = jnp.where(fine_BGSR1, weights_BGSRM, jnp.nan)  # of bad rows, where they see
    weights_BGSRM = jnp.where(seen_B1S1M, weights_BGSRM, 0.0)
    mix = jax.vjp(_mix, weights_BGSRM.astype(v_BMGK.dtype), v_BMGK)[1]
    dweights_BGSRM, dv_BMGK = mix(dout_BGSRK)
    dweights_BGSRM = jnp.where(seen_B1S1M, dweights_BGSRM.astype(jnp.float32), 0.0)
    mean_BGSR1 = (weights_BGSRM * dweights_BGSRM).sum(-1, keepdims=True)
    dlogits_BGSRM = jnp.where(seen_B1S1M, weights_BGSRM * (dweights_BGSRM - mean_BGSR1), 0.0)
    logits = jax.vjp(_logits, guard.finite(q_BSGRK), guard.finite(k_BMGK))[1]
    return *logits(dlogits_BGSRM), dv_BMGK, None


_masked.defvjp(_masked_forward, _masked_backward)


# dot_general, not einsum: that one drops the sharding of a batch of one row.
def _logits(q_BSGRK: Array, k_BMGK: Array) -> Array:
    dims = (((4,), (3,)), ((0, 2), (0, 2)))
    logits = jax.lax.dot_general(q_BSGRK, k_BMGK, dims, preferred_element_type=jnp.float32)
    return logits * q_BSGRK.shape[-1] ** -0.5


def _mix(weights_BGSRM: Array, v_BMGK: Array) -> Array:
    return jax.lax.dot_general(weights_BGSRM, v_BMGK, (((4,), (1,)), ((0, 1), (0, 2))))


def _cudnn(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
    segments: int | None = None,
) -> jax.Array:
    """cuDNN's fused kernel: packed rows by the offsets of their segments (runs of equal ids).

    What cuDNN does not take so (packed rows on GPUs other than Hopper) gets a mask. A batch with
    more segments than slots (`library.room`) takes the plain path in every layer, which is slower.
    """
    from pallas_kernels.attention import library

    sides = None if window is None else (window - 1, 0 if query.causal else window - 1)
    packed = query.segments_BS is not None
    found = library.reasons(q_BSHK, k_BMGK, query.causal, sides, packed=packed)
    if memory is not query or found:
        return _cudnn_masked(q_BSHK, k_BMGK, v_BMGK, query, memory, window)
    return library.packed_attention(
        q_BSHK,
        k_BMGK,
        v_BMGK,
        segment_ids=query.segments_BS,
        segments=library.room(q_BSHK, segments),
        causal=query.causal,
        window=sides,
    )


def _cudnn_masked(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
) -> jax.Array:
    """cuDNN's kernel with a bias of ours, for keys that are no row's own tokens.

    A bias does not stop NaN: finite values go in, and the rows that see another are marked after.
    Those rows then have no part in the gradients, where the other implementations give NaN.
    """
    mask_B1SM = visible(query, memory, window)
    k_BMGK, v_BMGK = guard.keys(k_BMGK, v_BMGK)
    fused = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    out_BSHK = fused(*map(guard.finite, (q_BSHK, k_BMGK, v_BMGK)), mask=mask_B1SM)
    bad_BG1M = jnp.isnan(k_BMGK[..., 0]).transpose(0, 2, 1)[:, :, None]
    bad_BSG = (bad_BG1M & mask_B1SM).any(-1).transpose(0, 2, 1)
    bad_BSH = jnp.repeat(bad_BSG, q_BSHK.shape[2] // k_BMGK.shape[2], axis=2)
    bad_BSH |= ~jnp.isfinite(q_BSHK).all(-1)
    out_BSHK = _with_finite_gradient(out_BSHK)
    nan = jnp.full((), jnp.nan, out_BSHK.dtype)
    (out_BSHK,) = named(jnp.where(bad_BSH[..., None], nan, out_BSHK))
    return out_BSHK


@jax.custom_vjp
def _with_finite_gradient(x: Array) -> Array:
    """The array itself; backward, what is not finite counts 0."""
    return x


_with_finite_gradient.defvjp(lambda x: (x, None), lambda _, dx: (guard.finite(dx),))


def _varlen(
    q_BSHK: jax.Array,
    k_BMGK: jax.Array,
    v_BMGK: jax.Array,
    query: Context,
    memory: Context,
    window: int | None,
    kernel: dispatch.Implementation | None = None,
) -> jax.Array:
    """kernel: None is what pallas_kernels.dispatch chooses for this device; segments are runs of
    equal ids."""
    if memory is not query:
        raise NotImplementedError(
            f"attention '{kernel or 'varlen'}' is among a row's own tokens; use 'xla' "
            "with a cache or cut rows"
        )
    ids_BS = query.segments_BS
    out_BSHK = pallas_kernels.packed_attention(
        q_BSHK,
        k_BMGK,
        v_BMGK,
        segment_ids=jnp.zeros_like(query.positions_BS) if ids_BS is None else ids_BS,
        causal=query.causal,
        window=None if window is None else (window - 1, window - 1),
        implementation=kernel,
    )
    assert not isinstance(out_BSHK, tuple)  # it is where the log-sum-exp is asked for
    return out_BSHK
