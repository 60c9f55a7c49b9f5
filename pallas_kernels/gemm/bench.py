"""Matrix products with epilogues on a GPU: correctness, and every case beside its rivals.

Correct: the error against float32 is at most twice that of the plain 16-bit program, plus 1e-3.
Rivals: XLA's program of the same, and PyTorch's, whose product is cuBLAS's as well.
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
from pallas_kernels.gemm import api, hopper, reference
from pallas_kernels.gemm.cases import CASES as CASES
from pallas_kernels.gemm.cases import Case
from pallas_kernels.gemm.configs import STORED
from pallas_kernels.gemm.hopper import Stored
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.tiles import Tile

TINY_CASES = (Case("tiny", 64, 128, 64, "gelu", bias=True, residual=True),)
CHECKED = (
    Case("256 x 512 x 384", 256, 512, 384),
    Case("200 x 192 x 320 gelu", 200, 192, 320, "gelu", bias=True),
    Case("130 x 256 x 128 silu, residual", 130, 256, 128, "silu", bias=True, residual=True),
)


def arguments(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Returns x, w and, if the case has them, bias and residual, as shapes."""
    shapes = [(case.M, case.K), (case.K, case.N)]
    shapes += [(case.N,)] * case.bias + [(case.M, case.N)] * case.residual
    return [jax.ShapeDtypeStruct(s, jnp.float32 if len(s) == 1 else jnp.bfloat16) for s in shapes]


def product(case: Case, implementation: Implementation) -> Callable[..., jax.Array]:
    """fused_gemm of the arguments."""

    def run(x, w, *operands):
        left = list(operands)
        bias = left.pop(0) if case.bias else None
        residual = left.pop(0) if case.residual else None
        return pallas_kernels.fused_gemm(
            x,
            w,
            bias=bias,
            activation=case.activation,
            residual=residual,
            implementation=implementation,
        )

    return run


def sides(case: Case, implementation: Implementation) -> dict[str, Callable[[], Side]]:
    """Returns our kernel, and XLA's product with the element-wise work that it fuses."""
    return {
        "ours": lambda: (product(case, implementation), arguments(case)),
        "xla": lambda: (product(case, "reference"), arguments(case)),
    }


def torch_sides(case: Case) -> dict[str, Callable[[], rivals.Rival]]:
    """Returns torch.matmul, under torch.compile if the product has an epilogue."""
    alone = case.activation is None and not case.bias and not case.residual
    function = rivals.matmul if alone else rivals.gemm(case.activation, case.bias, case.residual)
    return {"torch": lambda: rivals.Rival(function, product(case, "reference"), arguments(case))}


def errors(case: Case, implementation: Implementation) -> dict[str, float]:
    """Returns error over bound of the result and of the gradients; at most 1 is right."""
    like = arguments(case)
    random = np.random.default_rng(0)
    scaled = (random.normal(size=x.shape) / case.K**0.25 for x in like)
    inputs = [jnp.asarray(x, y.dtype) for x, y in zip(scaled, like, strict=True)]

    def all_of(implementation: Implementation, exact: bool) -> list[np.ndarray]:
        def run(*x):
            out, pull = jax.vjp(product(case, implementation), *x)
            return out, *pull(jnp.ones_like(out))

        arrays = (
            jnp.asarray(x, jnp.float32 if exact else s.dtype)
            for x, s in zip(inputs, like, strict=True)
        )
        with jax.default_matmul_precision("highest" if exact else "default"):
            return [np.asarray(x, np.float64) for x in bench.rounding(run)(*arrays)]

    result, rough, want = (
        all_of(implementation, False),
        all_of("reference", False),
        all_of("reference", True),
    )
    names = ("out", "dx", "dw", *["dbias"] * case.bias, *["dresidual"] * case.residual)
    return {
        name: float(np.abs(f - w).max() / (2 * np.abs(r - w).max() + 1e-3))
        for name, f, r, w in zip(names, result, rough, want, strict=True)
    }


def checks(rehearsal: bool) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """Returns (name, a function that returns error over bound) for each check."""
    cases: tuple[Any, ...] = TINY_CASES if rehearsal else CHECKED
    implementation = "interpret" if rehearsal else "hopper"
    return [
        (f"gemm {case.name}", functools.partial(errors, case, implementation)) for case in cases
    ]


# ---- tunings
#
# What tune.py times of the product with its epilogue: y as for inference, dx and dw.


def tunings() -> tuple[tuned.Tuning, ...]:
    """Returns those of each named shape: y as for inference, dx and dw of what is trained."""
    return tuple(
        tuning(case, kind) for case in CASES for kind in STORED if kind == "forward" or case.trained
    )


def tuning(case: Case, kind: str) -> tuned.Tuning:
    """One product of a case; x w, dz w^T or x^T dz."""
    sizes = {
        "forward": (case.M, case.N, case.K),
        "dx": (case.M, case.K, case.N),
        "dw": (case.K, case.N, case.M),
    }
    (M, N, K), stored = sizes[kind], STORED[kind]
    forward = kind == "forward"
    spec = Spec(case.activation if forward else None, "bfloat16")
    residual = case.residual and forward

    def function(tile: Tile, interpret: bool) -> Callable[..., Any]:
        return functools.partial(
            hopper.multiply, spec=spec, tile=tile, stored=stored, interpret=interpret
        )

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        keys = jax.random.split(key, 4)

        def normal(place: int, *shape: int) -> jax.Array:
            return jax.random.normal(keys[place], shape, jnp.bfloat16)

        a = normal(0, *(K, M) if stored.a else (M, K))
        b = normal(1, *(N, K) if stored.b else (K, N))
        bias = normal(2, N) if case.bias and forward else None
        return a, b, bias, normal(3, M, N) if residual else None

    first = hopper.heuristic(M, N, K, spec=spec, residual=residual)
    others = hopper.candidates(spec, residual) + hopper.split_candidates(M, N, K)
    wider = (dataclasses.replace(first, snake=snake) for snake in (4, 16))
    key = api.key(jnp.bfloat16, kind, spec.activation, residual, M, N, K)
    tiles = tuple(dict.fromkeys((first, *others, *wider)))
    plain = functools.partial(_plain, spec, stored)
    return tuned.Tuning(api.OP, key, tiles, function, inputs, plain)


def _plain(
    spec: Spec,
    stored: Stored,
    a: jax.Array,
    b: jax.Array,
    bias: jax.Array | None,
    residual: jax.Array | None,
) -> tuple[jax.Array, jax.Array | None]:
    """What the reference makes of stored operands: XLA's product turns none around."""
    a, b = (x.T if turned else x for x, turned in ((a, stored.a), (b, stored.b)))
    return reference.forward(a, b, bias, residual, spec=spec)
