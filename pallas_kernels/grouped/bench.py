"""Grouped products on a GPU: correctness, and every case beside its rivals.

Correct: the error against float32 is at most twice that of the plain 16-bit program, plus 1e-3.
Rivals: JAX's own kernels (jax.experimental.pallas.ops.gpu, few groups only), XLA's ragged_dot where
its copies of the rows fit, one dense product of the same FLOPs, which no grouped one can beat, and
torch._grouped_mm. What a rival cannot do is a row that says why.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import bench, rivals, tuned
from pallas_kernels.bench import Side
from pallas_kernels.dispatch import Implementation
from pallas_kernels.grouped import api, hopper, hopper_weights, library, reference, tiling
from pallas_kernels.grouped.cases import CASES as CASES
from pallas_kernels.grouped.cases import Case
from pallas_kernels.grouped.configs import KINDS, kernel

TINY_CASES = (Case("tiny", 64, 3, 64, 64),)
CHECKED = (
    Case("4096 rows, 8 groups", 4096, 8, 512, 768),
    Case("1000 rows, 64 groups", 1000, 64, 320, 192),
    Case("4100 rows, one hot", 4100, 16, 256, 512, hot=0.9),
    Case("512 groups", 2048, 512, 128, 256),
    Case("3 rows", 3, 2, 72, 40),
)
DEAD = 5  # rows past the sum, in checks
COPIES = 16e9  # bytes of ragged_dot's copies of the rows that a GPU has room for (chosen)
UNROLLED = 64  # groups for which JAX's kernels unroll their search (chosen: 256 take minutes)
THEIRS = {
    "block_m": 128,
    "block_n": 128,
    "block_k": 64,
    "max_concurrent_steps": 4,
    "grid_block_n": 4,
}


def arguments(case: Case) -> list[jax.ShapeDtypeStruct]:
    """lhs and rhs; the sizes are the case's."""
    shapes = ((case.M, case.K), (case.G, case.K, case.N))
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]


def sizes(case: Case) -> jax.Array:
    """The case's, as an array whose values the compiler does not see."""
    return jax.lax.optimization_barrier(jnp.asarray(case.sizes))


def product(case: Case, implementation: Implementation) -> Callable[..., jax.Array]:
    """grouped_matmul of the arguments."""

    def run(lhs, rhs):
        return pallas_kernels.grouped_matmul(lhs, rhs, sizes(case), implementation=implementation)

    return run


def theirs(case: Case) -> Callable[..., jax.Array]:
    """JAX's kernels, with the gradients that they can compute.

    Raises: NotImplementedError for more groups than compile in reasonable time.
    """
    if case.G > UNROLLED:
        raise NotImplementedError(f"{case.G} groups: compiling takes minutes (at most {UNROLLED})")
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    def dot(lhs, rhs, transpose):
        return ragged_dot_mgpu.ragged_dot(
            lhs, rhs, group_sizes=sizes(case), transpose_rhs=transpose, **THEIRS
        )

    @jax.custom_vjp
    def run(lhs, rhs):
        return dot(lhs, rhs, False)

    def backward(saved, dy):
        lhs, rhs = saved
        drhs = transposed_ragged_dot_mgpu.transposed_ragged_dot(
            lhs, dy, group_sizes=sizes(case), **THEIRS
        )
        return dot(dy, rhs, True), drhs

    run.defvjp(lambda lhs, rhs: (dot(lhs, rhs, False), (lhs, rhs)), backward)
    return run


def ragged(case: Case) -> Callable[..., jax.Array]:
    """XLA's ragged_dot. Raises: NotImplementedError where a GPU has no room for its copies."""
    nbytes = 2 * case.M * case.G * max(case.K, case.N)
    if nbytes >= COPIES:
        raise NotImplementedError(f"it would copy the rows for each group: {nbytes / 1e9:.0f} GB")
    return lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, sizes(case))


def sides(case: Case, implementation: Implementation) -> dict[str, Callable[[], Side]]:
    """Returns our kernel and its rivals, each built when it is called."""
    like = arguments(case)
    square = [like[0], jax.ShapeDtypeStruct((case.K, case.N), "bfloat16")]
    return {
        "ours": lambda: (product(case, implementation), like),
        "dense": lambda: (jnp.matmul, square),
        "ragged_dot_mgpu": lambda: (theirs(case), like),
        "ragged_dot": lambda: (ragged(case), like),
    }


def torch_sides(case: Case) -> dict[str, Callable[[], rivals.Rival]]:
    """PyTorch's grouped product, compared with ours in plain JAX."""
    function, twin = rivals.grouped(case.sizes), product(case, "reference")
    return {"torch grouped": lambda: rivals.Rival(function, twin, arguments(case))}


def errors(case: Case, implementation: Implementation) -> dict[str, float]:
    """Returns error over bound of the result and of the gradients; at most 1 is right.

    The last rows belong to nobody and are NaN.
    """
    random = np.random.default_rng(0)
    live = slice(0, case.M)
    lhs, rhs, dy = (
        random.normal(size=s) / case.K**0.25
        for s in ((case.M + DEAD, case.K), (case.G, case.K, case.N), (case.M + DEAD, case.N))
    )
    poisoned = [np.concatenate([x[live], np.full_like(x[:DEAD], np.nan)]) for x in (lhs, dy)]

    @functools.partial(bench.rounding, static_argnums=0)
    def all_of(implementation: Implementation, lhs, rhs, dy):
        def run(lhs, rhs):
            return pallas_kernels.grouped_matmul(
                lhs, rhs, sizes(case), implementation=implementation
            )

        y, pull = jax.vjp(run, lhs, rhs)
        return y, *pull(dy)

    def results(implementation: Implementation, dtype: str) -> list[np.ndarray]:
        operands = (
            jnp.asarray(x, jnp.bfloat16).astype(dtype) for x in (poisoned[0], rhs, poisoned[1])
        )
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            return [np.asarray(x, np.float64) for x in all_of(implementation, *operands)]

    result, rough, want = (
        results(implementation, "bfloat16"),
        results("reference", "bfloat16"),
        results("reference", "float32"),
    )
    return {
        name: float(np.abs(f - w).max() / (2 * np.abs(r - w).max() + 1e-3))
        for name, f, r, w in zip(("y", "dlhs", "drhs"), result, rough, want, strict=True)
    }


def checks(rehearsal: bool) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """Returns (name, a function that returns error over bound) for each check."""
    cases: tuple[Any, ...] = TINY_CASES if rehearsal else CHECKED
    implementation = "interpret" if rehearsal else "hopper"
    return [
        (f"grouped {case.name}", functools.partial(errors, case, implementation)) for case in cases
    ]


# ---- tunings
#
# What tune.py times of the grouped product: y, the gradient of the rows and of the weights.


def tunings() -> tuple[tuned.Tuning, ...]:
    """Returns those of each named shape: y, the rows' gradient and the weights'."""
    return tuple(tuning(case, kind) for case in CASES for kind in KINDS)


def tuning(case: Case, kind: str) -> tuned.Tuning:
    """One product of a case, on rows that fall as the case says."""
    M, G, K, N = case.M, case.G, case.K, case.N
    if kind == "transposed":
        K, N = N, K
    shape = {"forward": (G, K, N), "transposed": (G, N, K), "weights": (M, N)}[kind]

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        left, right = jax.random.split(key)
        a = jax.random.normal(left, (M, K), jnp.bfloat16)
        return a, jax.random.normal(right, shape, jnp.bfloat16), jnp.asarray(case.sizes)

    make = hopper_weights.heuristic if kind == "weights" else hopper.heuristic
    first = make(M, N, K, G)
    wider = (dataclasses.replace(first, snake=snake) for snake in (4, 16))
    tiles = tuple(dict.fromkeys((first, *tiling.candidates(), *wider)))
    plain = (
        reference.weights
        if kind == "weights"
        else functools.partial(reference.product, transpose=kind == "transposed")
    )
    best = (
        library.weights
        if kind == "weights"
        else functools.partial(library.product, transpose=kind == "transposed")
    )
    function, others = functools.partial(kernel, kind), {"library": (best, inputs)}
    key = api.key(jnp.bfloat16, kind, G, M, N, K)
    return tuned.Tuning(api.OP, key, tiles, function, inputs, plain, others)
