"""The kernels part of gpu_check.py: correctness matrix first, then times beside cuDNN's.

Correct: the error against float32 attention is at most twice that of plain bf16 attention, plus
1e-3 (gradients: 2e-3). Times: device time of forward and of forward with backward, on useful FLOPs,
beside cuDNN's attention of the same tokens padded to rows. A rehearsal runs the same lines on a CPU
through the interpreter, on tiny shapes; its times mean nothing.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench, varlen_attention
from pallas_kernels.attention.cases import CASES, Case

Add = Callable[[dict[str, Any]], None]


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
TINY_LENGTHS = (((40, 0, 70), (1, 127, 0)), 128)
TINY = Check((2, 1), 64, True, None, "bfloat16")
TINY_CASE = Case("tiny", (60, 68), (1, 1), 64, True)


def matrix() -> list[Check]:
    """Each width once, then the rest in an order where any beginning is a sample."""
    options = itertools.product(
        ((4, 4), (8, 2), (4, 1)), (128, 64, 256, 96), (True, False), (None, (100, 0), (37, 64)),
        ("bfloat16", "float16"),
    )  # fmt: skip
    rest = [Check(*each) for each in options]
    first = [Check((8, 2), width, True, None, "bfloat16") for width in (128, 64, 256, 96)]
    order = np.random.default_rng(0).permutation(len(rest))
    return first + [rest[i] for i in order if rest[i] not in first]


def arrays(check: Check, T: int, tokens: int) -> list[jax.Array]:
    """q, k, v, dout; random normal, NaN in the dead rows."""
    H, G = check.heads
    keys = jax.random.split(jax.random.key(tokens), 4)
    shapes = ((T, n, check.width) for n in (H, G, G, H))
    dead = (jnp.arange(T) >= tokens)[:, None, None]
    found = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return [jnp.where(dead, jnp.nan, x).astype(check.dtype) for x in found]


def plain(q, k, v, cu, causal, window):
    """What one writes without a kernel: all pairs, a mask, a softmax."""
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


def errors(check: Check, implementation: str, lengths: Any) -> dict[str, float]:
    """Returns error over bound of the output and of the gradients; at most 1 is right."""
    masks = {"causal": check.causal, "window": check.window}

    def ours(q, k, v, cu):
        return varlen_attention(q, k, v, cu_seqlens_q=cu, implementation=implementation, **masks)

    def all_of(attend):
        def run(q, k, v, dout, cu):
            out, pull = jax.vjp(lambda *x: attend(*x, cu), q, k, v)
            return out, *pull(jnp.where(jnp.isnan(dout), 0, dout).astype(out.dtype))

        return jax.jit(run)

    kernel, naive = all_of(ours), all_of(functools.partial(plain, **masks))
    worst = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    for each in lengths[0]:
        cu = jnp.asarray(np.concatenate([[0], np.cumsum(each)]), jnp.int32)
        inputs = arrays(check, lengths[1], sum(each))
        with jax.default_matmul_precision("highest"):
            wanted = naive(*(x.astype(jnp.float32) for x in inputs), cu)
        sides = zip(worst, kernel(*inputs, cu), naive(*inputs, cu), wanted, strict=True)
        for name, *values in sides:
            found, rough, want = (np.asarray(x, np.float64) for x in values)
            bound = 2 * np.abs(rough - want).max() + (1e-3 if name == "out" else 2e-3)
            worst[name] = max(worst[name], float(np.abs(found - want).max() / bound))
    return worst


def rival(case: Case):
    """cuDNN's attention of the same segments, padded to rows of the longest."""
    B, S = len(case.lengths), max(case.lengths)
    lengths = None if min(case.lengths) == S else jnp.asarray(case.lengths, jnp.int32)
    H, G = case.heads

    def attend(q, k, v):
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=case.causal, implementation="cudnn",
            query_seq_lengths=lengths, key_value_seq_lengths=lengths,
        )  # fmt: skip

    shapes = [(B, S, n, case.width) for n in (H, G, G, H)]
    return attend, shapes


def mine(case: Case, implementation: str):
    """Ours, on the packed axis without padding save to whole tiles."""
    H, G = case.heads
    T = -(-case.tokens // 128) * 128
    cu = jnp.asarray(np.concatenate([[0], np.cumsum(case.lengths)]), jnp.int32)
    attend = functools.partial(
        varlen_attention, cu_seqlens_q=cu, causal=case.causal, implementation=implementation,
        max_seqlen=max(case.lengths),
    )  # fmt: skip
    return attend, [(T, n, case.width) for n in (H, G, G, H)]


def times(case: Case, attend, shapes, clock: bench.Clock, runs: int) -> Iterator[dict[str, Any]]:
    """Rows of forward, and of forward with backward."""
    keys = jax.random.split(jax.random.key(0), 3)
    inputs = [
        tuple(
            jax.random.normal(jax.random.fold_in(key, i), shape, jnp.bfloat16)
            for i, shape in enumerate(shapes)
        )
        for key in keys
    ]

    def both(q, k, v, dout):
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(dout)

    for name, function, sets, flops, floor in (
        ("forward", attend, [x[:3] for x in inputs], case.flops(), case.floor_s()),
        ("forward+backward", both, inputs, case.flops() + case.flops(True),
         case.floor_s() + case.floor_s(True)),
    ):  # fmt: skip
        timing = bench.measure(jax.jit(function), sets, runs, min(10, runs), clock)
        yield {
            "direction": name, **asdict(timing), "tflops": flops / timing.median_s / 1e12,
            "of_floor": floor / timing.median_s,
        }  # fmt: skip


def check_matrix(add: Add, deadline: float, rehearsal: bool) -> None:
    """Adds a row for each program of the matrix, until the deadline."""
    implementation = "interpret" if rehearsal else "hopper"
    for check in [TINY] if rehearsal else matrix():
        if time.perf_counter() > deadline:
            add({"check": "matrix", "note": "cut off: the rest of the time is for the benchmarks"})
            break
        row: dict[str, Any] = {"check": str(check)}
        try:
            found = errors(check, implementation, TINY_LENGTHS if rehearsal else LENGTHS)
            row |= found | {"passed": max(found.values()) <= 1}
        except Exception as error:  # one failure must not lose the others
            row |= {"passed": False, "note": f"{type(error).__name__}: {str(error)[:300]}"}
        add(row)


def time_cases(add: Add, about: dict[str, Any], deadline: float, rehearsal: bool) -> None:
    """Adds the peaks of this machine to `about`, and the times of every case, ours and cuDNN's."""
    implementation = "interpret" if rehearsal else "hopper"
    clock = bench.wall_clock if rehearsal else bench.device_clock
    about |= bench.peaks(256 if rehearsal else 8192, clock)
    for case in [TINY_CASE] if rehearsal else CASES:
        sides = {"ours": mine(case, implementation), "cudnn padded": rival(case)}
        for name, (attend, shapes) in sides.items():
            side = {"case": case.name, "implementation": name}
            if time.perf_counter() > deadline:
                add(side | {"note": "not run: out of time"})
                continue
            try:
                for row in times(case, attend, shapes, clock, 1 if rehearsal else 50):
                    add(side | row)
            except Exception as error:
                add(side | {"note": f"{type(error).__name__}: {str(error)[:300]}"})


def check_kernels(add: Add, about: dict[str, Any], deadline: float, rehearsal: bool) -> None:
    """Adds the rows; at least half of the time is for the benchmarks."""
    began = time.perf_counter()
    check_matrix(add, began + (deadline - began) / 2, rehearsal)
    time_cases(add, about, deadline, rehearsal)
