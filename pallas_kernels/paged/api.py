"""Attention of a serving step over paged keys and values, with the kernel that fits the device.

Sources: PagedAttention (arXiv 2309.06180), the reduction over keys of FlashAttention
(arXiv 2205.14135), grouped queries (arXiv 2305.13245), soft capping (arXiv 2408.00118 section 2),
attention sinks as logits (gpt-oss, arXiv 2508.10925 section 2.2).

Legend: T query tokens, B segments, M pages of a table's row, P pages, N tokens of a page, H query
heads, G key-value heads, K head width.
Not here: gradients, writing keys into pages.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import arguments, dispatch
from pallas_kernels.attention.api import check_heads, check_window, make_spec
from pallas_kernels.attention.ranges import Window
from pallas_kernels.attention.reference import Spec
from pallas_kernels.paged import passes, reference
from pallas_kernels.paged.reference import BLOCK, Pages
from pallas_kernels.paged.tile import choose, misfits, shape_of

Array = jax.Array
DTYPES = ("bfloat16", "float16", "float32")
SMALL = ("int8", "float8_e4m3fn")  # pages with scales


def paged_attention(
    q_THK: Array,
    k_PNGK: Array,
    v_PNGK: Array,
    table_BM: Array,
    start_B: Array,
    count_B: Array,
    context_B: Array,
    *,
    k_scale_PNG: Array | None = None,
    v_scale_PNG: Array | None = None,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks_H: Array | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Array:
    """softmax(scale q k^T) v for B sequences whose keys lie in pages, in causal order.

    Segment b of q holds the sequence's last count_B[b] tokens: one where it decodes, a piece of its
    prompt where it prefills. Its row i has position context_B[b] - count_B[b] + i and sees the keys
    at positions up to its own. The key at position p is row p % N of page table_BM[b, p // N].
    Rows outside every segment give 0, whatever they hold. What no row of a segment sees never
    reaches its result, be it NaN: pages of nobody, the rest of a last page, other sequences. Inf or
    NaN in a key or value that a sequence sees may make all its rows of this step NaN.

    Plain JAX sums in one fixed order: a token's result has the same bits whatever the size and
    order of the pages, the rest of the batch and the pieces of its prompt, in all programs that
    have the same T, heads and types on the same kind of device.

    Args:
      q_THK: bf16|f16|f32; this step's queries, segments in order.
      k_PNGK, v_PNGK: bf16|f16|f32, or int8|float8_e4m3fn with scales; H a multiple of G, and N a
        divisor of 128. This step's keys and values are in them already.
      table_BM: int32 page ids. Places behind a sequence's last page may hold any id below P.
      start_B, count_B, context_B: int32: the segment's first row in q, its rows (0: none), and the
        sequence's keys in all, this step's included: count_B <= context_B <= M N.
      k_scale_PNG, v_scale_PNG: float32, k = k_scale times the stored number; with 8 bits only.
      scale: the logits' factor, above 0; None: K ** -0.5.
      window: (left, right), keys from p - left on; the right side adds nothing to causal order.
      softcap: c > 0, logits become c tanh(logits / c).
      sinks_H: a logit for each head that takes part in the softmax's sum with no value; neither
        scaled nor capped.
      implementation: see `dispatch`. The Hopper kernel takes bf16 and f16, head widths 64, 96,
        128 and 256, pages of 8 tokens and more of q's type or of 8 bits, and up to 128 query heads
        of a key-value head. It rounds weights to q's type before it multiplies them with values,
        and where it cuts a sequence's keys depends on all contexts: its last bits may too.
    Returns: out_THK in q's type. It has no gradients.
    Raises: ValueError for shapes, types and concrete numbers that break the above;
      NotImplementedError with all reasons where the implementation asked for cannot run.
    """
    op = "paged_attention"
    scales = (k_scale_PNG, v_scale_PNG)
    spec = _check(op, q_THK, k_PNGK, v_PNGK, scales, scale, softcap, window)
    table = _numbers(op, q_THK, k_PNGK, table_BM, start_B, count_B, context_B)
    sinks = None if sinks_H is None else _sinks(op, sinks_H, q_THK.shape[1])
    pages = Pages(k_PNGK, v_PNGK, *scales, *table)
    reasons = misfits(shape_of(q_THK, pages))
    row, tile = choose(q_THK, pages)
    choice = dispatch.choose(op, implementation, reasons, [row])
    if not q_THK.shape[0] * table[0].size:
        return jnp.zeros(q_THK.shape, q_THK.dtype)
    return dispatch.run(
        choice,
        functools.partial(passes.forward, spec=spec, window=window, tile=tile),
        functools.partial(reference.forward, spec=spec, window=window),
        *dispatch.alike((q_THK, pages, sinks)),
        op=op,
    )


def _check(
    op: str,
    q: Array,
    k: Array,
    v: Array,
    scales: tuple[Array | None, Array | None],
    scale: float | None,
    softcap: float | None,
    window: Window | None,
) -> Spec:
    """Returns what is static of the logits."""
    arguments.check_arrays(op, q_THK=q, k_PNGK=k, v_PNGK=v)
    if q.ndim != 3 or k.ndim != 4 or k.shape != v.shape or q.shape[2] != k.shape[3]:
        raise ValueError(
            f"{op}: q {q.shape}, k {k.shape}, v {v.shape} must be (T, H, K), (P, N, G, K), "
            "(P, N, G, K)"
        )
    check_heads(op, q.shape[1], k.shape[2], q.shape[2])
    if not k.shape[0] or not k.shape[1] or BLOCK % k.shape[1]:
        sizes = [n for n in range(1, BLOCK + 1) if BLOCK % n == 0]
        raise ValueError(
            f"{op}: k {k.shape} must have pages, of a size that divides {BLOCK}; sizes: {sizes}"
        )
    if q.dtype.name not in DTYPES or k.dtype.name not in DTYPES + SMALL or v.dtype != k.dtype:
        raise ValueError(
            f"{op}: q {q.dtype} must be one of {', '.join(DTYPES)}, and k {k.dtype} and v "
            f"{v.dtype} one type of these or of {', '.join(SMALL)}"
        )
    small = k.dtype.name in SMALL
    arguments.check_arrays(op, k_scale_PNG=scales[0], v_scale_PNG=scales[1])
    for name, x in zip(("k_scale_PNG", "v_scale_PNG"), scales, strict=True):
        if (x is None) == small or (x is not None and not _is_float32(x, k.shape[:3])):
            actual = "None" if x is None else f"{x.dtype}{x.shape}"
            rule = f"float32{k.shape[:3]}" if small else "None"
            raise ValueError(f"{op}: {name} must be {rule} with pages of {k.dtype}, got {actual}")
    check_window(op, window)
    return make_spec(op, q.shape[2], scale, softcap)


def _is_float32(x: Array, shape: tuple[int, ...]) -> bool:
    return x.shape == shape and x.dtype == jnp.float32


def _numbers(op: str, q: Array, k: Array, table: Any, *of_segments: Any) -> tuple[Array, ...]:
    """Checks shapes and types always, and the values where they are known."""
    names = ("start_B", "count_B", "context_B")
    table = arguments.integers(op, "table_BM", table, ndim=2)
    segments = [
        arguments.integers(op, n, x, ndim=1) for n, x in zip(names, of_segments, strict=True)
    ]
    for name, x in zip(names, segments, strict=True):
        if x.shape != table.shape[:1]:
            raise ValueError(
                f"{op}: {name} {x.shape} must be one per row of table_BM {table.shape}"
            )
    start, count, context = (arguments.concrete(x) for x in segments)
    (T, P), room = (q.shape[0], k.shape[0]), table.shape[1] * k.shape[1]
    known = start is not None and count is not None and context is not None
    if known and (bad := _first_bad(T, room, start, count, context)) is not None:
        raise ValueError(
            f"{op}: segment {bad} has start {start[bad]}, count {count[bad]}, context "
            f"{context[bad]}; it must lie in the {T} rows of q behind the segments before it, and "
            f"count <= context <= {room}, the positions of its {table.shape[1]} pages"
        )
    ids = arguments.concrete(table)
    if ids is not None and ids.size and not 0 <= ids.min() <= ids.max() < P:
        raise ValueError(
            f"{op}: table_BM holds {ids.min()} to {ids.max()}; there are pages 0 to {P - 1}"
        )
    return tuple(jnp.asarray(x) for x in (table, *segments))


def _first_bad(
    tokens: int, room: int, start: np.ndarray, count: np.ndarray, context: np.ndarray
) -> int | None:
    """Returns the first segment that breaks the rules of `paged_attention`, None if none does."""
    end = 0
    for b in np.flatnonzero(count):
        if not (end <= start[b] and 0 < count[b] <= context[b] <= room):
            return int(b)
        end = start[b] + count[b]
        if end > tokens:
            return int(b)
    return None


def _sinks(op: str, sinks: Any, heads: int) -> Array:
    arguments.check_arrays(op, sinks_H=sinks)
    if sinks.shape != (heads,) or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"{op}: sinks_H {sinks.dtype}{sinks.shape} must be a float per query head, ({heads},)"
        )
    return jnp.asarray(sinks, jnp.float32)
