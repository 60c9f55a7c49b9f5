"""Attention over packed tokens, differentiable, with the kernel that fits the device.

Sources: ByteTransformer (arXiv 2210.03052) section 3.3, FlashAttention-3 (arXiv 2407.08608),
grouped queries (arXiv 2305.13245), soft capping (arXiv 2408.00118 section 2), ALiBi
(arXiv 2108.12409).

Legend: T packed query tokens, S packed key tokens, B segments (for `packed_attention`: rows of a
batch), H query heads, G key-value heads, K head width.
Not here: dropout on the weights, paged keys, second derivatives.
"""

import dataclasses
import functools
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import arguments, dispatch
from pallas_kernels.attention import (
    guard,
    hopper_backward,
    hopper_forward,
    library,
    reference,
    tiling,
)
from pallas_kernels.attention.names import named
from pallas_kernels.attention.ranges import Rows, Window, packed_rows, segment_rows
from pallas_kernels.attention.reference import Spec
from pallas_kernels.work import most_pairs

Array = jax.Array
DTYPES = ("bfloat16", "float16", "float32")
WIDTHS = (64, 96, 128, 256)  # that the Hopper kernels take


def varlen_attention(
    q_THK: Array,
    k_SGK: Array,
    v_SGK: Array,
    *,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    max_seqlen: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | Sequence[float] | None = None,
    deterministic: bool = True,
    implementation: dispatch.Implementation | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """softmax(scale q k^T) v inside each of B segments of a packed axis.

    Tokens at or past cu_seqlens[-1] are dead: output 0, gradients 0, lse -inf, whatever they hold,
    NaN too. Queries that see no key (an empty key segment; causal with more queries than keys) get
    the same. Other segments never change a result, to the bit. Inf or NaN in a live token of k or v
    makes out and lse of the queries that see it NaN, in its heads; in q those of its own row (with
    a softcap, infinite logits are the cap). Such a row, and one whose cotangent is not finite,
    makes its dq NaN, and dk and dv of the keys that it sees; all else is as without it.

    Args:
      q_THK: bf16|f16|f32. k_SGK, v_SGK: the same type, H a multiple of G.
      cu_seqlens_q: (B+1,) int32 or a list, the segments' starts and the last one's end, from 0,
        never decreasing, at most T. The capacity B is static; fewer segments repeat the last value.
      cu_seqlens_k: the same over the keys; None: the queries' own.
      max_seqlen: the longest segment, a static hint for the tile size; never changes the result.
      causal: no key after the query's own position, aligned at the segments' ends.
      window: (left, right), keys from p - left to p + right; None on a side: no limit there.
      scale: the logits' factor, above 0; None: K ** -0.5.
      softcap: c > 0, logits become c tanh(logits / c).
      alibi_slopes: (H,) float, -slope x distance is added to the logits. Constants: no gradient.
      deterministic: False lets the backward pass add dq in any order, in one kernel instead of two,
        where there is one (hopper, K up to 128): faster, not the same from run to run.
      implementation: see `dispatch`. 'hopper' takes bf16 and f16, K of 64, 96, 128, 256; capacities
        that are multiples of 128 spare it a copy. Under a mesh it runs inside a shard_map only.
      return_lse: also return the log of the softmax's denominators.
    Returns: out_THK in q's type, or (out_THK, lse_HT float32, natural log); both differentiable.
    Raises: ValueError for shapes, types and concrete cu_seqlens that break the above;
      NotImplementedError with all reasons where the implementation asked for cannot run.
    """
    op = "varlen_attention"
    static = _check(op, q_THK, k_SGK, v_SGK, scale, softcap, window)
    cu_q = _prefix_sums(op, "cu_seqlens_q", cu_seqlens_q, q_THK.shape[0])
    cu_k = cu_q
    if cu_seqlens_k is not None:
        cu_k = _prefix_sums(op, "cu_seqlens_k", cu_seqlens_k, k_SGK.shape[0])
        if cu_k.shape != cu_q.shape:
            raise ValueError(
                f"{op}: cu_seqlens_q {cu_q.shape} and cu_seqlens_k {cu_k.shape} must be equally "
                "long"
            )
    elif q_THK.shape[0] != k_SGK.shape[0]:
        raise ValueError(
            f"{op}: {q_THK.shape[0]} query and {k_SGK.shape[0]} key tokens need cu_seqlens_k= too"
        )
    chosen = _choose(op, q_THK, k_SGK, implementation, max_seqlen, deterministic)
    slopes = _slopes(op, alibi_slopes, q_THK.shape[1])
    same_segments = cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q
    sides = _sides(causal, window)
    plain = softcap is None and slopes is None and not return_lse
    if (same_segments or not causal) and _takes_cudnn(
        q_THK, k_SGK, cu_q.shape[0] - 1, chosen, causal, sides, plain
    ):
        return library.varlen_attention(
            q_THK,
            k_SGK,
            v_SGK,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=None if same_segments else cu_k,
            causal=causal,
            window=sides,
            scale=scale,
        )
    rows = packed_rows(cu_q, cu_k, q_THK.shape[0], causal, window)
    pairs = most_pairs(q_THK.shape[0], k_SGK.shape[0], causal, window, max_seqlen)
    static = dataclasses.replace(static, pairs=pairs)
    # XLA fuses these into what made q, k and v; their gradients make dead tokens' zero.
    q_THK = _erase(q_THK, cu_q[-1])
    k_SGK, v_SGK = _erase(k_SGK, cu_k[-1]), _erase(v_SGK, cu_k[-1])
    inputs = dispatch.alike((q_THK, k_SGK, v_SGK, rows, slopes))
    with arguments.reverse_only(op):
        out_THK, lse_HT = _attend(*inputs, (static, *chosen))
    return (out_THK, lse_HT) if return_lse else out_THK


def packed_attention(
    q_BSHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    *,
    segment_ids: Array,
    max_seqlen: int | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | Sequence[float] | None = None,
    deterministic: bool = True,
    implementation: dispatch.Implementation | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """`varlen_attention` of rows that hold several segments each.

    Args: segment_ids: int32 (B, S); a run of equal ids is a segment, ids below 0 are padding, dead
      as there. q_BSHK, k_BSGK, v_BSGK: one token axis. The rest as in `varlen_attention`.
    Returns: out_BSHK, or (out_BSHK, lse_BHS).
    """
    op = "packed_attention"
    arguments.check_arrays(op, q=q_BSHK, k=k_BSGK, v=v_BSGK)
    ids_BS = jnp.asarray(arguments.integers(op, "segment_ids", segment_ids, ndim=2))
    if q_BSHK.ndim != 4 or k_BSGK.ndim != 4 or ids_BS.shape != q_BSHK.shape[:2]:
        raise ValueError(
            f"{op}: q {q_BSHK.shape}, k {k_BSGK.shape} must be (B, S, heads, K) and segment_ids "
            f"{ids_BS.shape} (B, S)"
        )
    if not q_BSHK.shape[:2] == k_BSGK.shape[:2] == v_BSGK.shape[:2]:
        raise ValueError(
            f"{op}: q {q_BSHK.shape}, k {k_BSGK.shape}, v {v_BSGK.shape} must agree in (B, S)"
        )
    q, k, v = (jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in (q_BSHK, k_BSGK, v_BSGK))
    static = _check(op, q, k, v, scale, softcap, window)
    chosen = _choose(op, q, k, implementation, max_seqlen, deterministic)
    pairs = most_pairs(q.shape[0], k.shape[0], causal, window, max_seqlen)
    static = dataclasses.replace(static, pairs=pairs)
    slopes = _slopes(op, alibi_slopes, q_BSHK.shape[2])
    sides, slots = _sides(causal, window), library.room(q_BSHK)
    plain = softcap is None and slopes is None and not return_lse
    if _takes_cudnn(q_BSHK, k_BSGK, len(q_BSHK) * slots, chosen, causal, sides, plain):
        return library.packed_attention(
            q_BSHK,
            k_BSGK,
            v_BSGK,
            segment_ids=ids_BS,
            segments=slots,
            causal=causal,
            window=sides,
            scale=scale,
        )

    def row(q_SHK: Array, k_SGK: Array, v_SGK: Array, ids_S: Array) -> tuple[Array, Array]:
        rows = segment_rows(ids_S, causal, window)
        live_S11 = (ids_S >= 0)[:, None, None]
        clean = (jnp.where(live_S11, x, jnp.zeros((), x.dtype)) for x in (q_SHK, k_SGK, v_SGK))
        return _attend(*dispatch.alike((*clean, rows, slopes)), (static, *chosen))

    with arguments.reverse_only(op):
        out_BSHK, lse_BHS = jax.vmap(row)(q_BSHK, k_BSGK, v_BSGK, ids_BS)
    return (out_BSHK, lse_BHS) if return_lse else out_BSHK


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q_THK, k_SGK, v_SGK, rows: Rows, slopes, spec) -> tuple[Array, Array]:
    return _forward(q_THK, k_SGK, v_SGK, rows, slopes, spec)[0]


def _forward(q_THK, k_SGK, v_SGK, rows: Rows, slopes, spec):
    if not q_THK.shape[0] * k_SGK.shape[0]:  # nobody sees anything
        return _nothing(q_THK), (q_THK, k_SGK, v_SGK, rows, slopes, *_nothing(q_THK))
    static, choice, _, tile, _ = spec
    k_SGK, v_SGK = guard.keys(k_SGK, v_SGK)
    out_THK, lse_HT = dispatch.run(
        choice,
        functools.partial(hopper_forward.forward, spec=static, tile=tile),
        functools.partial(reference.forward, spec=static),
        q_THK,
        k_SGK,
        v_SGK,
        rows,
        slopes,
        op="varlen_attention",
    )
    out_THK, lse_HT = named(out_THK, lse_HT)
    return (out_THK, lse_HT), (q_THK, k_SGK, v_SGK, rows, slopes, out_THK, lse_HT)


def _backward(spec, saved, cotangents):
    q_THK, k_SGK, v_SGK, rows, slopes, out_THK, lse_HT = saved
    dout_THK, dlse_HT = cotangents
    zeros = jax.tree.map(_no_gradient, (rows, slopes))
    if not q_THK.shape[0] * k_SGK.shape[0]:
        return *map(_zero, (q_THK, k_SGK, v_SGK)), *zeros
    live_T = rows.lo < rows.hi
    dout_THK = jnp.where(live_T[:, None, None], dout_THK, jnp.zeros((), dout_THK.dtype))
    delta_HT = (out_THK.astype(jnp.float32) * dout_THK.astype(jnp.float32)).sum(-1).T
    sums_TH = lse_HT.T, (delta_HT - dlse_HT).T
    q_THK, dout_THK, *sums_TH = guard.queries(q_THK, dout_THK, *sums_TH)
    lse_HT, delta_HT = (x.T for x in sums_TH)
    k_SGK = guard.finite(k_SGK)
    static, _, choice, _, tile = spec
    grads = dispatch.run(
        choice,
        functools.partial(hopper_backward.backward, spec=static, tile=tile),
        functools.partial(reference.backward, spec=static),
        q_THK,
        k_SGK,
        v_SGK,
        rows,
        slopes,
        lse_HT,
        delta_HT,
        dout_THK,
        op="varlen_attention",
    )
    return (*grads, *zeros)


_attend.defvjp(_forward, _backward)


def _nothing(q_THK: Array) -> tuple[Array, Array]:
    """Returns (out, lse) of dead rows."""
    out_THK = _zero(q_THK)
    return out_THK, out_THK[..., 0].T.astype(jnp.float32) - jnp.inf


def _zero(x: Array) -> Array:
    """Zeros that vary over the mesh axes over which x does."""
    return jnp.where(jnp.zeros(x.shape, bool), x, jnp.zeros((), x.dtype))


def _no_gradient(x: Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.integer):
        return np.zeros(x.shape, jax.dtypes.float0)
    return jnp.zeros_like(x)


def _erase(x_TxK: Array, end: Array) -> Array:
    live_T11 = (jnp.arange(x_TxK.shape[0], dtype=jnp.int32) < end)[:, None, None]
    return jnp.where(live_T11, x_TxK, jnp.zeros((), x_TxK.dtype))


def _choose(
    op: str,
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    implementation: str | None,
    max_seqlen: int | None,
    deterministic: bool,
) -> tuple[str, str, hopper_forward.Tile, hopper_backward.Tile]:
    """Returns (how each pass runs, the kernels' tiles), measured ones where a table has them."""
    (T, H, K), G = q.shape, k.shape[1]
    if max_seqlen is not None:
        max_seqlen = arguments.integer(op, "max_seqlen", max_seqlen, 0)
    reasons = []
    if q.dtype.name not in ("bfloat16", "float16"):
        reasons.append(f"needs bfloat16 or float16, found {q.dtype}")
    if K not in WIDTHS:
        reasons.append(f"needs a head width of {WIDTHS}, found {K}: pad it with zeros, set scale=")
    rows, tile, tile_back = tiling.choose(q.dtype, K, H // G, T, max_seqlen, deterministic)
    forward, backward = (dispatch.choose(op, implementation, reasons, [row]) for row in rows)
    return forward, backward, tile, tile_back


def _takes_cudnn(
    q: Array, k: Array, slots: int, chosen: tuple, causal: bool, window: Window | None, plain: bool
) -> bool:
    """Whether cuDNN runs both passes: it can, and our kernel was not measured to win both.

    slots: segments that it is given room for, of all rows. plain: no soft cap, no slopes, no lse.
    """
    if "library" not in chosen[:2] or not plain or dispatch.device_reasons():
        return False
    small = library.stats_bytes(q, slots) <= library.STATS_BYTES
    return small and not library.reasons(q, k, causal, window)


def _sides(causal: bool, window: Window | None) -> Window | None:
    """The same window as cuDNN takes it: in causal order there is nothing on the right."""
    return (window[0], 0) if causal and window is not None else window


def _slopes(op: str, slopes: Array | Sequence[float] | None, heads: int) -> Array | None:
    if slopes is None:
        return None
    if isinstance(slopes, Sequence):
        arguments.check_numbers(op, "alibi_slopes", slopes)
        slopes = jnp.asarray(np.asarray(slopes), jnp.float32)
    arguments.check_arrays(op, alibi_slopes=slopes)
    slopes_H = jax.lax.stop_gradient(jnp.asarray(slopes, jnp.float32))
    if slopes_H.shape != (heads,):
        raise ValueError(
            f"{op}: alibi_slopes {slopes_H.shape} must be one per query head, ({heads},)"
        )
    return slopes_H


def _prefix_sums(op: str, name: str, sums: Any, tokens: int) -> Array:
    """Checks the shape and type always, and the values where they are known."""
    cu = arguments.integers(op, name, sums, ndim=1)
    if not cu.shape[0]:
        raise ValueError(f"{op}: {name} must be (segments + 1,), at least [0], got {cu.shape}")
    values = arguments.concrete(cu)
    if values is not None:
        steps = np.diff(values)
        if values[0] != 0 or (steps < 0).any() or values[-1] > tokens:
            at = int(np.argmax(steps < 0)) if (steps < 0).any() else None
            falls = "" if at is None else f", and after place {at} {steps[at]:+d}"
            raise ValueError(
                f"{op}: {name} must start at 0, never decrease and end at {tokens} tokens at most; "
                f"got first {values[0]}, last {values[-1]}{falls}"
            )
    return jnp.asarray(cu)


def _check(
    op: str,
    q: Array | jax.ShapeDtypeStruct,
    k: Array | jax.ShapeDtypeStruct,
    v: Array | jax.ShapeDtypeStruct,
    scale: float | None,
    softcap: float | None,
    window: Window | None,
) -> Spec:
    """Returns what is static of the logits."""
    arguments.check_arrays(op, q=q, k=k, v=v)
    if q.ndim != 3 or k.ndim != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{op}: q {q.shape}, k {k.shape}, v {v.shape} must be (T, H, K), (S, G, K), (S, G, K)"
        )
    if q.dtype.name not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"{op}: q {q.dtype}, k {k.dtype}, v {v.dtype} must have one type of {', '.join(DTYPES)}"
        )
    check_heads(op, q.shape[1], k.shape[1], q.shape[2])
    check_window(op, window)
    return make_spec(op, q.shape[2], scale, softcap)


def make_spec(op: str, width: int, scale: float | None, softcap: float | None) -> Spec:
    """Returns what is static of the logits. width: the head width.

    Raises: ValueError for numbers that are not above 0.
    """
    if softcap is not None:
        softcap = arguments.positive(op, "softcap", softcap, "None for no cap")
    if scale is None:
        return Spec(width**-0.5, softcap)
    return Spec(arguments.positive(op, "scale", scale, "None for K ** -0.5"), softcap)


def check_heads(op: str, heads: int, kv_heads: int, width: int) -> None:
    """Raises: ValueError without heads or width, or where groups of heads would be unequal."""
    if not heads * kv_heads * width:
        raise ValueError(
            f"{op}: q (.., {heads}, {width}) and k (.., {kv_heads}, {width}) must have heads and a "
            "head width"
        )
    if heads % kv_heads:
        near = [g for g in range(1, heads + 1) if heads % g == 0]
        raise ValueError(
            f"{op}: {heads} query heads must be a multiple of {kv_heads} key-value heads; G of "
            f"{near}"
        )


def check_window(op: str, window: Any) -> None:
    """Raises: ValueError unless `window` is None or a pair of limits."""
    if window is None:
        return
    pair = isinstance(window, Sequence) and len(window) == 2
    if not pair or not all(w is None or (isinstance(w, Integral) and int(w) >= 0) for w in window):
        example = (
            f"({window}, 0)" if isinstance(window, Integral) and int(window) >= 0 else "(4, 0)"
        )
        raise ValueError(
            f"{op}: window={window!r} must be (left, right), keys before and after a query's own, "
            f"each an integer of 0 or more, or None for no limit, as in window={example}"
        )
