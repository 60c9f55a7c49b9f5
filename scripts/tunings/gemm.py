"""What tune.py times of the product with its epilogue: y as for inference, dx and dw."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.gemm import api, hopper, reference
from pallas_kernels.gemm.cases import CASES, Case
from pallas_kernels.gemm.configs import STORED
from pallas_kernels.gemm.hopper import Stored
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.tiles import Tile


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
