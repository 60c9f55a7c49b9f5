"""What tune.py times of the grouped product: y, the gradient of the rows and of the weights."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.grouped import api, hopper, hopper_weights, library, reference, tiling
from pallas_kernels.grouped.cases import CASES, Case
from pallas_kernels.grouped.configs import KINDS, kernel


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
