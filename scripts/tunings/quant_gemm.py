"""What tune.py times of the product with packed weights: tiles by tokens, steps and splits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.quant_gemm import api, hopper, reference
from pallas_kernels.quant_gemm.bench import arguments
from pallas_kernels.quant_gemm.cases import CASES, SERVED, Case


def tunings() -> tuple[tuned.Tuning, ...]:
    """One for every named shape."""
    return tuple(tuning(case) for case in (*CASES, *SERVED))


def tuning(case: Case) -> tuned.Tuning:
    """The product of a case."""
    spec = case.spec
    tiles = tuple(dict.fromkeys(hopper.candidates(case.M, case.N, case.K, spec)))

    def function(tile: hopper.Tile, interpret: bool) -> Callable[..., Any]:
        return functools.partial(hopper.multiply, spec=spec, tile=tile, interpret=interpret)

    def inputs(key: jax.Array) -> tuple[Any, ...]:
        x, pairs, scales, *rest = arguments(case)
        keys = jax.random.split(key, 5)
        packed = jax.random.bits(keys[1], (pairs.shape[0], case.N), jnp.uint8)
        zeros = rest.pop(0) if case.zeros else None
        bias = rest.pop(0) if case.bias else None
        drawn = [
            None if like is None else jax.random.normal(k, like.shape, like.dtype)
            for k, like in zip((keys[0], *keys[2:]), (x, scales, zeros, bias), strict=True)
        ]
        return drawn[0], packed, *drawn[1:]

    key = api.key(jnp.bfloat16, spec, case.M, case.N, case.K)
    plain = functools.partial(reference.forward, spec=spec)
    return tuned.Tuning(api.OP, key, tiles, function, inputs, plain)
