"""Attention on a GPU: the correctness matrix, and every case beside its rivals.

Correct: the error against float32 attention is at most twice that of plain bf16 attention, plus
1e-3 (gradients: 2e-3). Rivals work on the same tokens: cuDNN on rows padded to the longest, cuDNN
on packed tokens (private to jax), tokamax on packed tokens (by its kernel's own mask; where it is
installed), our plain JAX reference, and PyTorch's FlashAttention and cuDNN on rows of one length
and its FlashAttention on packed tokens. What a rival cannot do is a row that says why.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import rivals, varlen_attention
from pallas_kernels.attention import hopper_backward, hopper_forward, reference, tiling
from pallas_kernels.attention.cases import CASES as CASES
from pallas_kernels.attention.cases import Case
from pallas_kernels.attention.ranges import packed_rows
from pallas_kernels.attention.reference import Spec
from pallas_kernels.bench import Side
from pallas_kernels.dispatch import Implementation
from pallas_kernels.tuned import Tuning


@dataclass(frozen=True)
class Check:
    """One program of the correctness matrix; it runs on all of LENGTHS."""

    heads: tuple[int, int]
    width: int
    causal: bool
    window: tuple[int, int] | None
    dtype: str


# Segments at unaligned starts, of length 0 and 1, one long, many dead tokens; and the capacity.
LENGTHS = (((1, 0, 300, 57, 700), (1024, 0, 0, 0, 0), (64, 128, 0, 0, 5)), 1152)
TINY_LENGTHS = (((40, 0, 70),), 128)
TINY = Check((2, 1), 64, True, None, "bfloat16")


def matrix() -> list[Check]:
    """Returns each width once, then all others in random order, so that any prefix is a sample."""
    options = itertools.product(
        ((4, 4), (8, 2), (4, 1)),
        (128, 64, 256, 96),
        (True, False),
        (None, (100, 0), (37, 64)),
        ("bfloat16", "float16"),
    )
    every = [Check(*each) for each in options]
    first = [Check((8, 2), width, True, None, "bfloat16") for width in (128, 64, 256, 96)]
    order = np.random.default_rng(0).permutation(len(every))
    return first + [every[i] for i in order if every[i] not in first]


def arrays(check: Check, T: int, tokens: int) -> list[jax.Array]:
    """q, k, v, dout; random normal, NaN in the dead rows."""
    H, G = check.heads
    keys = jax.random.split(jax.random.key(tokens), 4)
    shapes = ((T, n, check.width) for n in (H, G, G, H))
    dead = (jnp.arange(T) >= tokens)[:, None, None]
    drawn = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return [jnp.where(dead, jnp.nan, x).astype(check.dtype) for x in drawn]


def plain(q, k, v, cu, causal, window):
    """Computes attention as one writes it without a kernel: all pairs, a mask, a softmax."""
    T, R = q.shape[0], q.shape[1] // k.shape[1]
    t = jnp.arange(T)
    segment = jnp.searchsorted(cu, t, side="right")
    live = t < cu[-1]
    q, k, v = (jnp.where(live[:, None, None], x, 0) for x in (q, k, v))
    seen = (segment[:, None] == segment[None]) & live[:, None] & live[None]
    left, right = window or (T, T)
    away = t[None] - t[:, None]
    seen &= (away >= -left) & (away <= (0 if causal else right))
    k, v = (jnp.repeat(x, R, 1) for x in (k, v))
    logits = jnp.einsum("thk,shk->hts", q, k) * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    weights = jax.nn.softmax(jnp.where(seen[None], logits, -1e30), -1)
    return jnp.einsum("hts,shk->thk", jnp.where(seen[None], weights, 0).astype(v.dtype), v)


def errors(check: Check, implementation: Implementation, lengths: Any) -> dict[str, float]:
    """Returns error over bound of the output and of the gradients; at most 1 is right."""
    masks = {"causal": check.causal, "window": check.window}

    def attend_once(q, k, v, cu):
        return varlen_attention(q, k, v, cu_seqlens_q=cu, implementation=implementation, **masks)

    def all_of(attend):
        def run(q, k, v, dout, cu):
            out, pull = jax.vjp(lambda *x: attend(*x, cu), q, k, v)
            return out, *pull(jnp.where(jnp.isnan(dout), 0, dout).astype(out.dtype))

        return jax.jit(run)

    kernel, naive = all_of(attend_once), all_of(functools.partial(plain, **masks))
    worst = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    for each in lengths[0]:
        cu = jnp.asarray(np.concatenate([[0], np.cumsum(each)]), jnp.int32)
        inputs = arrays(check, lengths[1], sum(each))
        with jax.default_matmul_precision("highest"):
            exact = naive(*(x.astype(jnp.float32) for x in inputs), cu)
        sides = zip(worst, kernel(*inputs, cu), naive(*inputs, cu), exact, strict=True)
        for name, *values in sides:
            result, rough, want = (np.asarray(x, np.float64) for x in values)
            bound = 2 * np.abs(rough - want).max() + (1e-3 if name == "out" else 2e-3)
            worst[name] = max(worst[name], float(np.abs(result - want).max() / bound))
    return worst


TINY_CASE = Case("tiny", (60, 68), (1, 1), 64, True)
TINY_CASES = (TINY_CASE,)


def checks(rehearsal: bool) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """Returns (name, a function that returns error over bound) for each program of the matrix."""
    lengths = TINY_LENGTHS if rehearsal else LENGTHS
    implementation = "interpret" if rehearsal else "hopper"
    return [
        (f"attention {check}", functools.partial(errors, check, implementation, lengths))
        for check in ([TINY] if rehearsal else matrix())
    ]


def sides(case: Case, implementation: Implementation) -> dict[str, Callable[[], Side]]:
    """Returns the programs to time on a case, ours and its rivals, each built when it is called."""
    return {
        "ours": lambda: ours(case, implementation),
        "cudnn padded": lambda: cudnn_padded(case),
        "cudnn packed": lambda: cudnn_packed(case),
        "tokamax packed": lambda: tokamax_packed(case),
        "reference": lambda: ours(case, "reference"),
    }


def torch_sides(case: Case) -> dict[str, Callable[[], rivals.Rival]]:
    """Returns PyTorch's attention of a case, each built when it is called."""
    return {
        "torch flash padded": lambda: torch_padded(case, "FLASH_ATTENTION"),
        "torch cudnn padded": lambda: torch_padded(case, "CUDNN_ATTENTION"),
        "torch flash packed": lambda: torch_packed(case),
    }


def torch_padded(case: Case, backend: str) -> rivals.Rival:
    """Returns scaled_dot_product_attention of rows of one length.

    Raises: NotImplementedError for segments of several lengths.
    """
    B, S = len(case.lengths), max(case.lengths)
    if min(case.lengths) != S:
        raise NotImplementedError("segments of several lengths: see 'torch flash packed'")
    attend, _ = ours(case, "reference")

    def twin(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def tall(x: jax.Array) -> jax.Array:
            rows = x.reshape(B * S, *x.shape[2:])
            return jnp.pad(rows, ((0, -B * S % 128), (0, 0), (0, 0)))

        return attend(*map(tall, (q, k, v)))[: B * S].reshape(q.shape)

    return rivals.Rival(rivals.sdpa(backend, case.causal), twin, arguments(case, B, S))


def torch_packed(case: Case) -> rivals.Rival:
    """FlashAttention of packed tokens; its prefix sums are made beforehand, as ours are."""
    function = rivals.varlen(case.lengths, case.causal)
    return rivals.Rival(function, *ours(case, "reference"))


def arguments(case: Case, *rows: int) -> list[jax.ShapeDtypeStruct]:
    """q, k, v of these leading dimensions."""
    H, G = case.heads
    return [jax.ShapeDtypeStruct((*rows, n, case.width), jnp.bfloat16) for n in (H, G, G)]


def packed(case: Case) -> tuple[jax.Array, list[jax.ShapeDtypeStruct]]:
    """Prefix sums, and q, k, v on whole tiles of the packed axis."""
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(case.lengths)]), jnp.int32)
    return cu, arguments(case, -(-case.tokens // 128) * 128)


def ours(case: Case, implementation: Implementation) -> Side:
    """Packed attention of this library."""
    cu, like = packed(case)
    attend = functools.partial(
        varlen_attention,
        cu_seqlens_q=cu,
        causal=case.causal,
        implementation=implementation,
        max_seqlen=max(case.lengths),
    )
    return attend, like


def cudnn_padded(case: Case) -> Side:
    """cuDNN's attention of the same segments, padded to rows of the longest."""
    B, S = len(case.lengths), max(case.lengths)
    lengths = None if min(case.lengths) == S else jnp.asarray(case.lengths, jnp.int32)

    def attend(q, k, v):
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=case.causal,
            implementation="cudnn",
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
        )

    return attend, arguments(case, B, S)


def cudnn_packed(case: Case) -> Side:
    """cuDNN's attention of one packed row; jax has it, but not in public."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    cu, like = packed(case)
    lengths = jnp.diff(cu)[None]
    starts = jnp.concatenate([cu[:-1], jnp.full(1, -1, jnp.int32)])[None]
    mask = cudnn.MaskType.PADDING_CAUSAL if case.causal else cudnn.MaskType.PADDING

    def attend(q, k, v):
        return cudnn.dot_product_attention(
            q[None],
            k[None],
            v[None],
            q_seqlen=lengths,
            kv_seqlen=lengths,
            q_offsets=starts,
            kv_offsets=starts,
            scale=case.width**-0.5,
            mask_type=mask,
        )[0]

    if len(case.lengths) < 2:
        raise NotImplementedError("one segment is not packed: see 'cudnn padded'")
    return attend, like


def tokamax_packed(case: Case) -> Side:
    """Tokamax's Mosaic GPU attention of one packed row, by the key range of each query."""
    from tokamax._src.ops.attention import (  # pyrefly: ignore[missing-import]
        api,
        base,
    )

    cu, like = packed(case)
    rows = packed_rows(cu, cu, like[0].shape[0], case.causal, None)

    def attend(q, k, v):
        mask = base.Mask(k_start=rows.lo[None, None], k_end=rows.hi[None, None])
        return api.IMPLEMENTATIONS["mosaic_gpu"](q[None], k[None], v[None], mask=mask)[0]

    return attend, like


# ---- tunings
#
# What tune.py times of attention: each case forward, and backward with and without fixed order.


def tunings(cases: Sequence[Case] = CASES, dtype: Any = jnp.bfloat16) -> Iterator[Tuning]:
    """Yields the tunings of all cases.

    Cases that differ in causal order only have one key; the first stands for both.
    """
    seen = set()
    for case in cases:
        (H, G), longest = case.heads, max(case.lengths)
        key = tiling.key(dtype, case.width, H // G, case.tokens, longest)
        if tuple(key.values()) in seen:
            continue
        seen.add(tuple(key.values()))
        inputs = functools.partial(_inputs, case, dtype)
        tiles = tiling.forward_tiles(dtype, case.width, H // G, longest)
        run = functools.partial(_run, hopper_forward.forward, case)
        spec = Spec(case.width**-0.5)
        plain = functools.partial(reference.forward, spec=spec)
        first = lambda rng, f=inputs: f(rng)[:5]  # noqa: E731
        cudnn = {
            "cudnn": (functools.partial(_cudnn, case), functools.partial(_padded, case, dtype))
        }
        yield Tuning(tiling.FORWARD, key, tiles, run, first, plain, cudnn)
        run = functools.partial(_run, hopper_backward.backward, case)
        for fixed in (True, False):
            tiles = tiling.backward_tiles(dtype, case.width, longest, fixed)
            plain = functools.partial(reference.backward, spec=spec)
            about = key | {"deterministic": fixed}
            yield Tuning(tiling.BACKWARD, about, tiles, run, inputs, plain)


def _run(kernel: Callable[..., Any], case: Case, tile: Any, interpret: bool) -> Callable[..., Any]:
    return functools.partial(kernel, spec=Spec(case.width**-0.5), tile=tile, interpret=interpret)


def _cudnn(case: Case, q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array) -> jax.Array:
    """cuDNN's attention of the same segments, padded to rows of the longest."""
    lengths = jnp.asarray(case.lengths, jnp.int32)
    return jax.nn.dot_product_attention(
        q_BSHK,
        k_BSGK,
        v_BSGK,
        is_causal=case.causal,
        implementation="cudnn",
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
    )


def _padded(case: Case, dtype: Any, rng: jax.Array) -> tuple[jax.Array, ...]:
    (H, G), rows = case.heads, (len(case.lengths), max(case.lengths))
    keys = jax.random.split(rng, 3)
    return tuple(
        jax.random.normal(key, (*rows, heads, case.width), dtype)
        for key, heads in zip(keys, (H, G, G), strict=True)
    )


def _inputs(case: Case, dtype: Any, rng: jax.Array) -> tuple[Any, ...]:
    """Returns the inputs of the backward kernel; the first five are the forward's."""
    T, (H, G), K = case.tokens, case.heads, case.width
    q, k, v, dout = (
        jax.random.normal(one, (T, heads, K), dtype)
        for one, heads in zip(jax.random.split(rng, 4), (H, G, G, H), strict=True)
    )
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(case.lengths)]), jnp.int32)
    rows = packed_rows(cu, cu, T, case.causal, None)
    # Logits are normal too: a row's sum of n exponentials is about n sqrt(e).
    lse_T = jnp.log((rows.hi - rows.lo).astype(jnp.float32)) + 0.5
    lse_HT = jnp.broadcast_to(lse_T, (H, T))
    return q, k, v, rows, None, lse_HT, jnp.zeros((H, T)), dout
