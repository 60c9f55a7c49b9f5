"""Tile-sparse products on a GPU: correctness, and every case beside XLA's dense product.

Correct: the error against float32 is at most twice that of the plain 16-bit program, plus 1e-3; and
where nothing is pruned the kernel takes at most 1.25 times what the dense product takes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import TileSparse, bench, tile_sparse_matmul, tuned
from pallas_kernels.bench import Side
from pallas_kernels.dispatch import Implementation
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.tile_sparse import api, cases, hopper, hopper_weights, reference
from pallas_kernels.tile_sparse.cases import CASES as CASES
from pallas_kernels.tile_sparse.cases import Case
from pallas_kernels.tile_sparse.configs import KINDS, kernel
from pallas_kernels.tile_sparse.configs import arguments as operands

TINY_CASES = (Case(64, 128, 128, 50, tile=64),)
CHECKED = (
    Case(256, 512, 384, 50),
    Case(1000, 320, 704, 70),
    Case(520, 768, 768, 75, columns=0.5),
    Case(512, 512, 512, 60, chunk=32),
    Case(520, 520, 512, 60, chunk=8),
    Case(300, 512, 1024, 75, tile=256),
    Case(130, 192, 192, 40, tile=64),
    Case(64, 256, 256, 100),
)
SLOWER = 1.25  # than dense, where nothing is pruned (the project's own bound)


def arguments(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Returns x and the values of the slots, as shapes; the pattern is the case's."""
    slots = (*case.abstract.chunks.shape, case.chunk, case.tile)
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((case.M, case.K), slots)]


def product(case: Case, implementation: Implementation) -> Callable[..., jax.Array]:
    """tile_sparse_matmul of the arguments."""

    def run(x, values):
        # The compiler must not see the numbers: another mask runs the same program.
        pattern = jax.lax.optimization_barrier(cases.pattern(case))
        return tile_sparse_matmul(x, TileSparse(values, pattern), implementation=implementation)

    return run


def dense(case: Case) -> Side:
    """Returns the dense product, which ignores the mask."""
    shapes = (case.M, case.K), (case.K, case.N)
    return jnp.matmul, [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]


def sides(case: Case, implementation: Implementation) -> dict[str, Callable[[], Side]]:
    """Returns our kernel, plain JAX of the same weight, and the dense product."""
    return {
        "ours": lambda: (product(case, implementation), arguments(case)),
        "dense": lambda: dense(case),
        "reference": lambda: (product(case, "reference"), arguments(case)),
    }


def errors(case: Case, implementation: Implementation) -> dict[str, float]:
    """Returns error over bound of the result and of the gradients; at most 1 is right.

    With a bias, GELU, and a third of the entries inside slots pruned, which are NaN before packing.
    """
    random = np.random.default_rng(0)
    mask = case.mask & (random.random((case.K, case.N)) < 2 / 3)
    shapes = (case.M, case.K), (case.K, case.N), (case.N,), (case.M, case.N)
    x, w, bias, dy = (random.normal(size=s) / case.K**0.25 for s in shapes)
    w = np.where(mask, w, np.nan)

    @functools.partial(bench.rounding, static_argnums=0)
    def all_of(implementation: Implementation, x, weight, bias, dy):
        def run(x, values, bias):
            return tile_sparse_matmul(
                x,
                weight.replace(values=values),
                bias=bias,
                activation="gelu",
                implementation=implementation,
            )

        y, pull = jax.vjp(run, x, weight.values, bias)
        return y, *pull(dy)

    def results(implementation: Implementation, dtype: str) -> list[np.ndarray]:
        arrays: list[Any] = [jnp.asarray(a, jnp.bfloat16).astype(dtype) for a in (x, w, bias, dy)]
        arrays[1] = TileSparse.from_dense(arrays[1], mask, tile=case.tile, chunk=case.chunk)
        with jax.default_matmul_precision("highest" if dtype == "float32" else "default"):
            return [np.asarray(a, np.float64) for a in all_of(implementation, *arrays)]

    result, rough, want = (
        results(implementation, "bfloat16"),
        results("reference", "bfloat16"),
        results("reference", "float32"),
    )
    return {
        name: float(np.abs(f - w).max() / (2 * np.abs(r - w).max() + 1e-3))
        for name, f, r, w in zip(("y", "dx", "dvalues", "dbias"), result, rough, want, strict=True)
    }


def beside_dense(
    case: Case, implementation: Implementation, clock: bench.Clock, runs: int
) -> dict[str, float]:
    """Returns time over bound, of a case that prunes nothing."""

    def took(function: Callable, like: list[Any]) -> float:
        def draw(key: jax.Array) -> list[jax.Array]:
            keys = jax.random.split(key, len(like))
            return [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, like, strict=True)]

        inputs = [tuple(draw(key)) for key in jax.random.split(jax.random.key(0), 3)]
        return bench.measure(jax.jit(function), inputs, runs, min(runs, 10), clock).median_s

    ours = took(product(case, implementation), arguments(case))
    return {"time": ours / (SLOWER * took(*dense(case)))}


def checks(rehearsal: bool) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """(name, what gives error, or time, over bound). A rehearsal's times mean nothing."""
    implementation = "interpret" if rehearsal else "hopper"
    listed: list[tuple[str, Callable[[], dict[str, float]]]] = [
        (f"tile_sparse {case.M} rows, {case.name}", functools.partial(errors, case, implementation))
        for case in (TINY_CASES if rehearsal else CHECKED)
    ]
    for case in () if rehearsal else CASES:
        if case.sparsity == 0:
            compare = functools.partial(beside_dense, case, implementation, bench.device_clock, 50)
            listed.append((f"tile_sparse beside dense, {case.name}", compare))
    return listed


# ---- tunings
#
# What tune.py times of the tile-sparse product: y, dx and dw of every case.


def tunings() -> tuple[tuned.Tuning, ...]:
    """Returns those of each named shape: y as for inference, dx (where by a kernel) and dw."""
    return tuple(
        tuning(case, kind)
        for case in CASES
        for kind in KINDS
        if kind != "dx" or case.abstract.together == 1
    )


def tuning(case: Case, kind: str) -> tuned.Tuning:
    """One product of a case; x w, dz w^T or x^T dz of what is kept."""
    pattern, spec = case.abstract, Spec(None, "bfloat16")

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        # Also what the mask does not keep is drawn: in these cases it keeps whole slots.
        (left, right), (a, b) = jax.random.split(key), operands(kind, case, pattern)[:2]
        drawn = (jax.random.normal(k, x.shape, x.dtype) for k, x in ((left, a), (right, b)))
        bias = (None,) if kind == "forward" else ()
        return *drawn, *bias, cases.pattern(case)

    if kind == "dw":
        first = hopper_weights.heuristic(case.M, pattern)
        tiles = (first, *hopper_weights.candidates(pattern.unit, case.tile))
    else:
        shape = hopper.shape_of(pattern, kind == "dx")
        blocks = pattern.grid[0 if kind == "dx" else 1]
        first = hopper.heuristic(case.M, shape, blocks, pattern.chunks.size, spec)
        wider = (dataclasses.replace(first, snake=snake) for snake in (4, 16))
        tiles = (first, *hopper.candidates(shape, spec), *wider)
    key = api.key(jnp.bfloat16, kind, None, pattern, case.M)
    function = functools.partial(_timed, kind, spec)
    plain = functools.partial(_plain, kind, spec)
    return tuned.Tuning(api.OP, key, tuple(dict.fromkeys(tiles)), function, inputs, plain)


def _timed(kind: str, spec: Spec, tile: Any, interpret: bool) -> Callable[..., Any]:
    return kernel(kind, tile, spec, interpret)


def _plain(kind: str, spec: Spec, *args: Any) -> Any:
    """What the reference makes of the same operands."""
    if kind == "forward":
        return reference.forward(*args, spec=spec)
    pattern = args[2]
    if kind == "dx":
        return reference.gradient(args[0], args[1], pattern)
    return pattern.collect(args[0].T @ args[1])
