"""Packed attention by cuDNN: segments are given by their offsets, not by a mask or a bias.

cuDNN takes a ragged batch: each slot has the offset of its first token and its length, and causal
order counts from there. Its work is that of the segments' own pairs, and no (S, S) array exists. A
dense mask would become a bias that cuDNN reads for all pairs, without causal order.

JAX 0.11.2 has these arguments in a private module only. What is called here are its primitives,
not its function: that one asks the cuDNN library and the GPU at trace time, and so could not be
lowered on a machine without them. `reasons` asks where there is a GPU.

Run on one H200: losses of a model that trains with it (scripts/gpu_check.py losses), and times.
Proved on a CPU: the lowered custom call, its mask, operands and shapes; and everything around the
call, with the call replaced by one of the same arguments' meaning
(tests/pallas_kernels/attention/test_library.py). On other platforms `reference` runs in its place.

Legend: B rows, T query tokens and S key tokens of a row, H query heads, G key-value heads, K head
width, N slots.
Not here: softcap, ALiBi, windows without causal order, a gradient of the log-sum-exp.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from pallas_kernels import arguments, dispatch
from pallas_kernels.attention import guard, reference
from pallas_kernels.attention.names import SAVED, named
from pallas_kernels.attention.ranges import FARTHEST, Rows, Window, packed_rows, segment_rows

Array = jax.Array
__all__ = [
    "SAVED",
    "packed_attention",
    "reasons",
    "room",
    "stats_bytes",
    "varlen_attention",
    "workspace_bytes",
]
CUDNN = 90600  # the first whose packed offsets JAX 0.11.2 tests
WIDEST, WIDEST_BEFORE = 256, 128  # head width on Hopper, and not (check_is_flash_attention)
ABSENT = 1e30  # log-sum-exp of positions that hold no query: their weights are exp(-1e30) = 0
# Tokens of a row for which it has one slot where nobody says how many segments rows have, and the
# least slots of such a row (chosen, not measured). Ordinary documents have a mean of a few hundred
# tokens, and one batch in which they are shorter takes the slow path in every layer; an unused slot
# costs memory (`workspace_bytes`) and blocks that find no work.
SLOT, LEAST_SLOTS = 64, 8
STATS_BYTES = 2**31  # that cuDNN's log-sum-exps of all slots may take (chosen, not measured)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The ragged batch, in tokens of the flattened (B, T) and (B, S).

    starts and lengths: int32 (N,), over queries and over keys; unused slots have the length 0.
    slot, place: int32 (B, T), each live query's slot and its position there. fits: bool scalar,
    whether every segment has a slot; None: always.
    """

    q_starts: Array
    q_lengths: Array
    k_starts: Array
    k_lengths: Array
    slot: Array
    place: Array
    fits: Array | None


@dataclasses.dataclass(frozen=True)
class Static:
    """What is static of a call. left: keys before a query's own that it sees; None: all."""

    scale: float
    causal: bool
    left: int | None


def reasons(
    q: Any,
    k: Any,
    causal: bool,
    window: Window | None,
    softcap: Any = None,
    alibi: Any = None,
    packed: bool = True,
) -> list[str]:
    """Returns why cuDNN cannot take a call; empty when it can.

    Args: q, k: (..., tokens, heads, K). packed: whether rows hold segments, which needs Hopper.
    """
    missing, widest = [], WIDEST_BEFORE if dispatch.device_reasons() else WIDEST
    if q.dtype.name not in ("bfloat16", "float16"):
        missing.append(f"needs bfloat16 or float16, found {q.dtype}")
    if q.shape[-1] % 8 or q.shape[-1] > widest:
        missing.append(f"needs a head width of 8 to {widest} in steps of 8, found {q.shape[-1]}")
    if softcap is not None or alibi is not None:
        missing.append("has no softcap and no ALiBi slopes")
    if _limits(window) != (None, None) and not (causal and _limits(window)[1] in (None, 0)):
        missing.append("has windows in causal order only, (left, 0)")
    if any(x.size >= 2**31 for x in (q, k)):
        missing.append("counts offsets in int32: q and k must have fewer than 2**31 elements")
    if packed and jax.default_backend() == "gpu":
        missing += _library_reasons()
    return missing


def stats_bytes(q: Any, slots: int) -> int:
    """Returns the bytes of cuDNN's log-sum-exps: float32 (slots, H, T) of q (..., T, H, K)."""
    return slots * q.shape[-3] * q.shape[-2] * 4


def workspace_bytes(q_BSHK: Any, k_BMGK: Any, segments: int) -> int:
    """Returns the bytes that cuDNN's backward pass takes beside its operands, while it runs.

    XLA multiplies the batch by the slots, and cudnn-frontend sizes the sums for that padded batch:
    dQ in float32, a float32 number a query and head, and for grouped heads dK and dV of all query
    heads. (openxla/xla cuda_dnn.cc, FixDimsForRaggedOffset; cudnn-frontend,
    node/scaled_dot_product_flash_attention.h. With 64 slots in each of 8 rows of 4,096 tokens they
    are 32.25 GiB; the step that was measured on an H200 needs 32.4 GiB more than without.)
    """
    B, S, H, K = q_BSHK.shape
    M, G = k_BMGK.shape[1:3]
    padded = B * segments * H
    grouped = 2 * padded * M * K * k_BMGK.dtype.itemsize if G < H else 0
    return padded * S * (K + 1) * 4 + grouped


def room(q_BSHK: Any, segments: int | None = None) -> int:
    """Returns how many `segments` a row `packed_attention` should have room for.

    Args: segments: documents of a row, on average over the batch, that whoever packs the rows
      expects at most; None: unknown, then one for every SLOT tokens and at least LEAST_SLOTS, so
      that ordinary documents fit. In any case no more than STATS_BYTES allow, for every slot of the
      batch has a row of log-sum-exps as long as S.
    """
    B, S = q_BSHK.shape[:2]
    most = STATS_BYTES // max(stats_bytes(q_BSHK, B), 1)
    usual = max(S // SLOT, LEAST_SLOTS)
    return max(min(segments or usual, usual, most), 2)  # cuDNN's packed form begins at two


def varlen_attention(
    q_THK: Array,
    k_SGK: Array,
    v_SGK: Array,
    *,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
) -> Array:
    """`api.varlen_attention` by cuDNN: the same segments, dead tokens and values not finite.

    Raises: NotImplementedError with all `reasons`; causal with other key segments is one, for
      cuDNN aligns the order at the segments' starts.
    """
    op = "varlen_attention by cuDNN"
    cu_q = jnp.asarray(arguments.integers(op, "cu_seqlens_q", cu_seqlens_q, ndim=1))
    cu_k = cu_q
    more = []
    if cu_seqlens_k is not None:
        cu_k = jnp.asarray(arguments.integers(op, "cu_seqlens_k", cu_seqlens_k, ndim=1))
        if causal and cu_seqlens_k is not cu_seqlens_q:
            more = ["has causal order of equal query and key segments only"]
    static = _static(op, q_THK, k_SGK, causal, window, scale, more)
    rows = packed_rows(cu_q, cu_k, q_THK.shape[0], causal, window)
    slots = _slots_of_sums(cu_q, cu_k, rows)
    q, k, v, rows = jax.tree.map(lambda x: x[None], (q_THK, k_SGK, v_SGK, rows))
    return _differentiable(op, q, k, v, rows, slots, static)[0]


def packed_attention(
    q_BSHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    *,
    segment_ids: Array | None,
    segments: int = 2,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
) -> Array:
    """`api.packed_attention` by cuDNN, with room for `segments` segments a row.

    Args: segment_ids: None: every row is one segment, and no offsets are needed. segments: static.
      There are B x segments slots, which the rows share. A batch with more segments is as right
      and much slower: `reference` computes it. A slot costs an (H, S) float32 array while the call
      runs and launches blocks that find no work: `room` is a choice that usually holds all. What
      follows from the ids is named SAVED: a scan of layers that share them, under a policy that
      keeps the name, works it out once for all layers and both passes, and stacks none of it.
    Raises: NotImplementedError with all `reasons`.
    """
    op = "packed_attention by cuDNN"
    packed = segment_ids is not None
    static = _static(op, q_BSHK, k_BSGK, causal, window, scale, packed=packed)
    if segment_ids is None:
        ids_BS, slots = jnp.zeros(q_BSHK.shape[:2], jnp.int32), None
    else:
        ids_BS = jnp.asarray(arguments.integers(op, "segment_ids", segment_ids, ndim=2))
        segments = max(arguments.integer(op, "segments", segments, 1), 2)
        slots = _slots_of_ids(ids_BS, segments)
    rows = jax.vmap(lambda ids_S: segment_rows(ids_S, causal, window))(ids_BS)
    rows, slots = jax.tree.map(lambda x: named(x)[0], (rows, slots))
    return _differentiable(op, q_BSHK, k_BSGK, v_BSGK, rows, slots, static)


def _static(
    op: str,
    q: Array,
    k: Array,
    causal: bool,
    window: Window | None,
    scale: float | None,
    more: list[str] | None = None,
    packed: bool = True,
) -> Static:
    missing = reasons(q, k, causal, window, packed=packed) + (more or [])
    if missing:
        raise NotImplementedError(f"{op}: {'; '.join(missing)}")
    scale = q.shape[-1] ** -0.5 if scale is None else arguments.positive(op, "scale", scale, "None")
    return Static(scale, causal, _limits(window)[0])


def _limits(window: Window | None) -> tuple[int | None, int | None]:
    left, right = (w if w is None or w < FARTHEST else None for w in window or (None, None))
    return left, right


def _library_reasons() -> list[str]:
    from jax._src.lib import cuda_versions

    missing = list(dispatch.device_reasons())
    version = cuda_versions.cudnn_get_version() if cuda_versions else 0
    if version < CUDNN:
        missing.append(f"needs cuDNN {CUDNN} or newer, found {version}")
    return missing


# ---- slots


def _slots_of_ids(ids_BS: Array, segments: int) -> Slots:
    """Returns the slots of rows whose runs of equal ids are segments; ids below 0 are dead."""
    B, S = ids_BS.shape
    N = B * segments
    live_BS = ids_BS >= 0
    # The first token of a row begins a segment, whatever the row before ends with.
    changes_BS = jnp.concatenate([live_BS[:, :1], ids_BS[:, 1:] != ids_BS[:, :-1]], 1)
    begins_T = (changes_BS & live_BS).reshape(-1)
    # Dead tokens count as of the segment before them. Comparing with all slots is one fused pass.
    segment_T = begins_T.cumsum(dtype=jnp.int32) - 1
    slot_1N = jnp.arange(N, dtype=jnp.int32)[None]
    starts_N = (segment_T[:, None] < slot_1N).sum(0, dtype=jnp.int32)
    held_TN = (segment_T[:, None] == slot_1N) & live_BS.reshape(-1, 1)
    lengths_N = held_TN.sum(0, dtype=jnp.int32)
    slot_T = jnp.clip(segment_T, 0, N - 1)
    place_BS = (jnp.arange(B * S, dtype=jnp.int32) - starts_N[slot_T]).reshape(B, S)
    slot_BS, place_BS = slot_T.reshape(B, S), jnp.clip(place_BS, 0, S - 1)
    fits = begins_T.sum(dtype=jnp.int32) <= N
    return Slots(starts_N, lengths_N, starts_N, lengths_N, slot_BS, place_BS, fits)


def _slots_of_sums(cu_q: Array, cu_k: Array, rows: Rows) -> Slots:
    """Returns the slots of one row, by prefix sums (segments + 1,); slots may be empty."""
    short = max(3 - cu_q.shape[0], 0)  # cuDNN's packed form begins at two slots
    cu_q, cu_k = (jnp.pad(x, (0, short), mode="edge") for x in (cu_q, cu_k))
    t_T = jnp.arange(rows.lo.shape[0], dtype=jnp.int32)
    slot_T = jnp.clip((t_T[:, None] >= cu_q[None, 1:]).sum(1, dtype=jnp.int32), 0, len(cu_q) - 2)
    used_N = (jnp.diff(cu_q) > 0) & (jnp.diff(cu_k) > 0)
    lengths = (jnp.where(used_N, jnp.diff(x), 0) for x in (cu_q, cu_k))
    q_lengths, k_lengths = lengths
    place_T = jnp.clip(t_T - cu_q[slot_T], 0, len(t_T) - 1)
    return Slots(cu_q[:-1], q_lengths, cu_k[:-1], k_lengths, slot_T[None], place_T[None], None)


# ---- the derivative


def _differentiable(
    op: str, q: Array, k: Array, v: Array, rows: Rows, slots: Slots | None, static: Static
) -> Array:
    if not q.size * k.size:
        return jnp.zeros_like(q)
    with arguments.reverse_only(op):
        return _attend(*dispatch.alike((q, k, v, rows, slots)), static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q: Array, k: Array, v: Array, rows: Rows, slots: Slots | None, static: Static) -> Array:
    return _forward(q, k, v, rows, slots, static)[0]


def _forward(q, k, v, rows: Rows, slots: Slots | None, static: Static) -> tuple:
    """Gives finite values to cuDNN, then sets rows to NaN that see a value that was not finite."""
    live_BT = rows.lo < rows.hi
    bad_BSG = ~(jnp.isfinite(k) & jnp.isfinite(v)).all(-1)
    # A query is bad if a bad key lies in its interval: counts of bad keys before both ends differ.
    before_BSG = jnp.pad(bad_BSG.cumsum(1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    take = functools.partial(jnp.take_along_axis, before_BSG, axis=1)
    bad_BTH = _over_heads(take(rows.hi[..., None]) > take(rows.lo[..., None]), q)
    bad_BTH = bad_BTH | ~jnp.isfinite(q).all(-1)
    qkv = tuple(map(guard.finite, (q, k, v)))
    out, lse_BTH = _either(_cudnn_forward, _plain_forward, qkv, rows, slots, static)
    out = jnp.where(bad_BTH[..., None], jnp.full((), jnp.nan, out.dtype), out)
    out = jnp.where(live_BT[..., None, None], out, jnp.zeros((), out.dtype))
    out, lse_BTH = named(out, lse_BTH)
    return out, (q, k, v, rows, slots, out, lse_BTH)


def _backward(static: Static, saved: tuple, dout: Array) -> tuple:
    """Bad rows add 0 to every product; their dq, and dk and dv of the keys they see, become NaN."""
    q, k, v, rows, slots, out, lse_BTH = saved
    live_BT1 = (rows.lo < rows.hi)[..., None]
    fine_BTH = (jnp.isfinite(out) & jnp.isfinite(dout)).all(-1)
    kept_BTH1 = (fine_BTH & live_BT1)[..., None]
    out, dout = (jnp.where(kept_BTH1, x, jnp.zeros((), x.dtype)) for x in (out, dout))
    lse_BTH = jnp.where(kept_BTH1[..., 0], lse_BTH, ABSENT)
    qkv, results = tuple(map(guard.finite, (q, k, v))), (out, lse_BTH, dout)
    grads = _either(_cudnn_backward, _plain_backward, qkv, results, rows, slots, static)
    # cuDNN writes the rows of its segments only; what lies in the others is not defined.
    B, T, H, _ = q.shape
    S, G = k.shape[1:3]
    bad_BTG = (~fine_BTH & live_BT1).reshape(B, T, G, H // G).any(-1)
    seen_BS1, bad_BSG = _seen_by(rows, live_BT1, S), _seen_by(rows, bad_BTG, S)
    states = (live_BT1, ~fine_BTH), (seen_BS1, bad_BSG), (seen_BS1, bad_BSG)
    marked = [_settle(x, *state) for x, state in zip(grads, states, strict=True)]
    return *marked, None, None


_attend.defvjp(_forward, _backward)


def _settle(x: Array, live: Array, bad: Array) -> Array:
    x = jnp.where(bad[..., None], jnp.full((), jnp.nan, x.dtype), x)
    return jnp.where(live[..., None], x, jnp.zeros((), x.dtype))


def _over_heads(x_BTG: Array, q: Array) -> Array:
    return jnp.repeat(x_BTG, q.shape[2] // x_BTG.shape[2], axis=2)


def _seen_by(rows: Rows, marked_BTG: Array, S: int) -> Array:
    """Whether any marked query sees each key: each adds 1 where its interval begins."""
    B, _, G = marked_BTG.shape
    row_B1 = jnp.arange(B, dtype=jnp.int32)[:, None]
    marked_BTG = marked_BTG.astype(jnp.int32)
    steps_BSG = jnp.zeros((B, S + 1, G), jnp.int32).at[row_B1, rows.lo].add(marked_BTG)
    steps_BSG = steps_BSG.at[row_B1, rows.hi].add(-marked_BTG)
    return steps_BSG.cumsum(1)[:, :S] > 0


# ---- the call


def _either(cudnn: Callable, plain: Callable, *args: Any) -> Any:
    """cuDNN where the program is lowered for CUDA and all segments have slots, else `reference`."""
    *arrays, slots, static = args
    plain = functools.partial(plain, static=static)

    def fitting(*arrays_and_slots: Any) -> Any:
        slots = arrays_and_slots[-1]
        call = functools.partial(cudnn, static=static)
        if slots is None or slots.fits is None:
            return call(*arrays_and_slots)
        return jax.lax.cond(slots.fits, call, plain, *arrays_and_slots)

    return jax.lax.platform_dependent(*arrays, slots, cuda=fitting, default=plain)


def _cudnn_forward(qkv, rows: Rows, slots: Slots | None, *, static: Static):
    if slots is None:
        out, lse_BHT = call_forward(qkv, None, static)
        return out, lse_BHT.transpose(0, 2, 1)
    out, stats_NHT = call_forward(qkv, _operands(qkv[0], qkv[1], slots), static)
    # One number a query and head is kept; cuDNN's own array has a row of them for each slot.
    return out, stats_NHT[slots.slot, :, slots.place]


def _cudnn_backward(qkv, results, rows: Rows, slots: Slots | None, *, static: Static):
    out, lse_BTH, dout = results
    if slots is None:
        return call_backward(qkv, (lse_BTH.transpose(0, 2, 1), out, dout), None, static)
    B, T, H = lse_BTH.shape
    place_1T = jnp.arange(T, dtype=jnp.int32)[None]
    token_NT = jnp.minimum(slots.q_starts[:, None] + place_1T, B * T - 1)
    stats_NTH = lse_BTH.reshape(B * T, H)[token_NT]
    held_NT1 = (place_1T < slots.q_lengths[:, None])[..., None]
    stats_NHT = jnp.where(held_NT1, stats_NTH, ABSENT).transpose(0, 2, 1)
    return call_backward(qkv, (stats_NHT, out, dout), _operands(qkv[0], qkv[1], slots), static)


def _operands(q: Array, k: Array, slots: Slots) -> tuple[Array, ...]:
    """Returns lengths (B, N / B) and offsets in elements (B, N / B + 1), over queries and keys."""
    B, N = q.shape[0], slots.q_starts.shape[0]
    lengths = (x.reshape(B, N // B) for x in (slots.q_lengths, slots.k_lengths))

    def offsets(starts_N: Array, x: Array) -> Array:
        tokens, heads, width = x.shape[0] * x.shape[1], *x.shape[2:]
        ends_B = jnp.full((B,), tokens, jnp.int32)
        return (jnp.concatenate([starts_N, ends_B]) * (heads * width)).reshape(B, N // B + 1)

    return *lengths, offsets(slots.q_starts, q), offsets(slots.k_starts, k)


def call_forward(qkv, sizes: tuple[Array, ...] | None, static: Static) -> tuple[Array, ...]:
    """Returns (out, log-sum-exp (N, H, T) float32, natural) of JAX's primitive for cuDNN.

    sizes: from `_operands`; None: every row is one segment.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    unused = jnp.zeros(0, qkv[0].dtype)
    operands = (*qkv, unused, *(sizes or (unused,) * 4), unused, unused)
    kinds = {"is_training": True} | _parameters(cudnn, static, sizes is not None)
    return _bind(cudnn._dot_product_attention_fwd_p, operands, kinds)


def call_backward(qkv, results, sizes: tuple[Array, ...] | None, static: Static):
    """Returns (dq, dk, dv) of JAX's primitive for cuDNN. results: (log-sum-exp, out, dout)."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    unused = jnp.zeros(0, qkv[0].dtype)
    operands = (*qkv, unused, *(sizes or (unused,) * 4), unused, unused, *results)
    kinds = _parameters(cudnn, static, sizes is not None)
    return _bind(cudnn._dot_product_attention_bwd_p, operands, kinds)


def _bind(primitive: Any, operands: tuple[Array, ...], kinds: dict[str, Any]) -> tuple[Array, ...]:
    """Under vmap one after the other: the primitives have no rule for a batch (JAX 0.11.2)."""

    @sequential_vmap
    def call(*operands: Array) -> tuple[Array, ...]:
        return tuple(primitive.bind(*operands, **kinds))

    return call(*dispatch.alike(operands))


def _parameters(cudnn: Any, static: Static, packed: bool) -> dict[str, Any]:
    masks = cudnn.MaskType
    if packed:
        mask = masks.PADDING_CAUSAL if static.causal else masks.PADDING
    else:
        mask = masks.CAUSAL if static.causal else masks.NO_MASK
    return {
        "scale": static.scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": mask,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": None if static.left is None else static.left + 1,
    }


def _plain_forward(qkv, rows: Rows, slots: Slots | None, *, static: Static):
    spec = reference.Spec(static.scale)
    one = functools.partial(reference.forward, slopes_H=None, spec=spec)
    out, lse_BHT = jax.vmap(lambda *x: one(*x))(*qkv, rows)
    return out, lse_BHT.transpose(0, 2, 1)


def _plain_backward(qkv, results, rows: Rows, slots: Slots | None, *, static: Static):
    spec = reference.Spec(static.scale)
    out, lse_BTH, dout = results
    delta_BTH = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    lse_BHT, delta_BHT = (x.transpose(0, 2, 1) for x in (lse_BTH, delta_BTH))

    def one(q, k, v, rows, lse, delta, dout):
        return reference.backward(q, k, v, rows, None, lse, delta, dout, spec=spec)

    q, k, v = qkv
    return jax.vmap(one)(q, k, v, rows, lse_BHT, delta_BHT, dout)
