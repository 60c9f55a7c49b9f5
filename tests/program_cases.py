"""Thirty small programs with their FLOPs and bytes, counted by hand from shapes.

Dimensions differ from each other, so that a factor that is forgotten shows. Bytes are those of the
instructions that XLA's CPU compiler launches: an elementwise program is one fusion, which reads its
operands and writes its result once. A reduction also reads its initial value, 4 bytes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

M, K, N, B = 24, 40, 56, 3
F32, BF16 = jnp.float32, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Program:
    """run(*arrays of these shapes) and what it must count. loops: records run so often."""

    name: str
    run: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    flops: float
    nbytes: float
    transcendentals: float = 0
    dtype: Any = F32
    kinds: tuple[str, ...] = ()
    donated: tuple[int, ...] = ()


def conv(x, w, **options):
    return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def scanned(trips):
    def run(x, w):
        return lax.scan(lambda c, _: (c @ w, None), x, None, length=trips)[0]

    return run


def rms(x, g):
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g[None]


IMAGE, WEIGHT = (2, 9, 11, 8), (3, 3, 8, 16)
MK, KN, MN = M * K, K * N, M * N
PROGRAMS = (
    Program("product", jnp.matmul, ((M, K), (K, N)), 2 * M * K * N, 4 * (MK + KN + MN),
            kinds=("product",)),
    Program("product of a transposed weight", lambda x, w: x @ w.T, ((M, K), (N, K)),
            2 * M * K * N, 4 * (MK + KN + MN), kinds=("product",)),
    Program("vector", jnp.matmul, ((M, K), (K,)), 2 * M * K, 4 * (MK + K + M),
            kinds=("product",)),
    Program("batched product", jnp.matmul, ((B, M, K), (B, K, N)), 2 * B * M * K * N,
            4 * B * (MK + KN + MN), kinds=("batched_product",)),
    Program("scores", lambda q, k: jnp.einsum("bqhk,bshk->bhqs", q, k),
            ((B, 16, 2, 8), (B, 32, 2, 8)), 2 * B * 2 * 16 * 32 * 8,
            # Both operands are copied with heads first, then multiplied.
            4 * B * 2 * (3 * (16 * 8 + 32 * 8) + 16 * 32)),
    Program("addition", lambda x, y: x + y, ((M, N), (M, N)), MN, 3 * 4 * MN, kinds=("fusion",)),
    Program("three operations", lambda x, y: (x + y) * x - y, ((M, N), (M, N)), 3 * MN,
            3 * 4 * MN, kinds=("fusion",)),
    Program("a broadcast row", lambda x, y: x + y[None], ((M, N), (N,)), MN, 4 * (2 * MN + N)),
    Program("relu", lambda x: jnp.maximum(x, 0), ((M, N),), MN, 2 * 4 * MN),
    Program("half precision", lambda x: x + x, ((M, N),), MN, 2 * 2 * MN, dtype=BF16),
    Program("tanh", jnp.tanh, ((M, N),), 0, 2 * 4 * MN, MN),
    Program("silu", lambda x: x * lax.logistic(x), ((M, N),), 4 * MN, 2 * 4 * MN, MN),
    Program("a quotient of a root", lambda x: x / jnp.sqrt(x), ((M, N),), MN, 2 * 4 * MN, MN),
    Program("selection", lambda x: jnp.where(x > 0, x, -1.0), ((M, N),), 0, 2 * 4 * MN),
    Program("integers", lambda x: (x.astype(jnp.int32) + 1) * 3, ((M, N),), 0, 2 * 4 * MN),
    Program("conversion", lambda x: x.astype(BF16), ((M, N),), 0, 6 * MN),
    Program("transposition", jnp.transpose, ((M, N),), 0, 2 * 4 * MN, kinds=("copy",)),
    Program("a part", lambda x: x[3:8] * 2, ((M, N),), 5 * N, 2 * 4 * 5 * N),
    Program("a part that is found", lambda x, i: lax.dynamic_slice(x, (i[0].astype(jnp.int32), 0),
            (5, N)) * 2, ((M, N), (1,)), 5 * N, 2 * 4 * 5 * N + 4),
    Program("two halves", lambda x: x[:, : N // 2] * x[:, N // 2 :], ((M, N),), MN / 2,
            4 * (MN + MN / 2)),
    Program("concatenation", lambda x, y: jnp.concatenate([x, y]), ((M, N), (M, N)), 0,
            2 * 4 * 2 * MN, kinds=("copy",)),
    Program("padding", lambda x: jnp.pad(x, ((0, 2), (1, 3))), ((M, N),), 0,
            4 * (MN + (M + 2) * (N + 4)) + 4),
    Program("lookup", lambda x: x[jnp.array([1, 7, 2])], ((M, N),), 0, 2 * 4 * 3 * N + 4 * 3,
            kinds=("gather",)),
    Program("an update in place", lambda x, y: lax.dynamic_update_slice(x, y, (3, 0)),
            ((M, N), (2, N)), 0, 2 * 4 * 2 * N + 8, donated=(0,)),
    Program("sum of rows", lambda x: x.sum(-1), ((M, 16),), M * 15, 4 * (M * 16 + M) + 4,
            kinds=("reduction",)),
    Program("sum of columns", lambda x: x.sum(0), ((16, N),), 15 * N, 4 * (16 * N + N) + 4,
            kinds=("reduction",)),
    Program("largest", lambda x: x.max(-1), ((M, 16),), M * 15, 4 * (M * 16 + M) + 4),
    Program("convolution", lambda x, w: conv(x, w, window_strides=(1, 1), padding="VALID"),
            (IMAGE, WEIGHT), 2 * 2 * 7 * 9 * 16 * 8 * 9,
            4 * (2 * 9 * 11 * 8 + 9 * 8 * 16 + 2 * 7 * 9 * 16), kinds=("convolution",)),
    Program("padded convolution", lambda x, w: conv(x, w, window_strides=(1, 1), padding="SAME"),
            (IMAGE, WEIGHT), 2 * 2 * 16 * 8 * (3 * 9 - 2) * (3 * 11 - 2),
            4 * (2 * 9 * 11 * 8 + 9 * 8 * 16 + 2 * 9 * 11 * 16)),
    Program("strided convolution", lambda x, w: conv(x, w, window_strides=(2, 2), padding="VALID"),
            (IMAGE, WEIGHT), 2 * 2 * 4 * 5 * 16 * 8 * 9,
            4 * (2 * 9 * 11 * 8 + 9 * 8 * 16 + 2 * 4 * 5 * 16)),
    Program("grouped convolution", lambda x, w: conv(x, w, window_strides=(1, 1), padding="VALID",
            feature_group_count=4), (IMAGE, (3, 3, 2, 16)), 2 * 2 * 7 * 9 * 16 * 2 * 9,
            4 * (2 * 9 * 11 * 8 + 9 * 2 * 16 + 2 * 7 * 9 * 16)),
    # Before each step the carried array is copied, and so is it at the start; a counter of 4 bytes.
    Program("loop", scanned(7), ((M, K), (K, K)), 7 * 2 * M * K * K,
            8 * 2 * 4 * MK + 7 * 4 * (2 * MK + K * K) + 8 + 7 * 12),
    Program("loop of a loop", lambda x, w: lax.fori_loop(0, 5, lambda _, c: scanned(3)(c, w), x),
            ((M, K), (K, K)), 15 * 2 * M * K * K,
            16 * 2 * 4 * MK + 15 * 4 * (2 * MK + K * K) + 6 * 8 + (5 + 15) * 12),
    # x x, sums of 32, their mean, epsilon, then two products; x is read twice, the rate once more.
    Program("norm", rms, ((M, 32), (32,)), 3 * M * 32 + 31 * M + 2 * M,
            4 * (M * 32 + M) + 4 * (2 * M * 32 + M + 32), M),
)  # fmt: skip


def compiled(program: Program):
    """Returns the program as the CPU's compiler makes it."""
    arrays = [jax.ShapeDtypeStruct(shape, program.dtype) for shape in program.shapes]
    return jax.jit(program.run, donate_argnums=program.donated).lower(*arrays).compile()


# One program for the golden files: a lookup, a loop of products and norms, probabilities, an update
# in place, a convolution, a branch. On GPUs its products are kernels, and sums cross two devices.
STEP = {
    "table": (128, 64),
    "ws": (3, 64, 64),
    "ids": (32,),
    "cache": (16, 64),
    "image": (2, 8, 8, 16),
    "filters": (3, 3, 16, 32),
}


def step(table, ws, ids, cache, image, filters, *, axis: str | None = None):
    """axis: of the mesh over which the products' results are summed, whose GPUs run kernels."""
    from pallas_kernels import fused_gemm

    def layer(h, w):
        y = h @ w if axis is None else lax.psum(fused_gemm(h, w, implementation="hopper"), axis)
        return rms(h + y, jnp.ones(h.shape[1], h.dtype)), h.sum()

    h, sums = lax.scan(layer, table[ids], ws)
    p = jax.nn.softmax(h @ table.T)
    cache = lax.dynamic_update_slice(cache, h[:1], (3, 0))
    y = conv(image, filters, window_strides=(1, 1), padding="SAME")
    chosen = lax.cond(sums[0] > 0, lambda: jnp.tanh(h @ ws[0]), lambda: h)
    return p, cache, y, chosen


def golden_cpu():
    """Returns the step as the CPU's compiler makes it."""
    arrays = {n: jax.ShapeDtypeStruct(s, jnp.int32 if n == "ids" else F32) for n, s in STEP.items()}
    return jax.jit(step, donate_argnums=3).lower(*arrays.values()).compile()


def golden_h100():
    """Returns the step on two H100s that are not there."""
    from pallas_kernels import aot

    mesh = jax.make_mesh((2,), ("x",), devices=aot.devices()[:2])
    replicated = jax.NamedSharding(mesh, jax.P())
    arrays = {
        n: jax.ShapeDtypeStruct(s, jnp.int32 if n == "ids" else BF16, sharding=replicated)
        for n, s in STEP.items()
    }
    run = jax.shard_map(
        lambda *a: step(*a, axis="x"),
        mesh=mesh,
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    return aot.compile(jax.jit(run, donate_argnums=3).lower(*arrays.values()))


# Features that say how an instruction is executed (cost/program_body.py).
ACCESS = ("stride", "stride_right", "run", "span", "dilated", "custom", "parts", "jumps")


def summary(records) -> list[dict[str, Any]]:
    """Returns records as a golden file holds them."""
    return [
        {
            "kind": r.kind,
            "dtype": r.dtype,
            "executions": r.executions,
            "flops": r.flops,
            "bytes_read": r["bytes_read"],
            "bytes_written": r["bytes_written"],
            "transcendentals": r["transcendentals"],
            "leaves": len(r.tree.leaves),
            "positions": r.tree.positions.tolist(),
            "hash": r.hash,
            "name": r.name,
            "access": [r[name] for name in ACCESS],
        }
        for r in records
    ]
