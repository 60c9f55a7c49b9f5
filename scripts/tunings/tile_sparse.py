"""What tune.py times of the tile-sparse product: y, dx and dw of every case."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.tile_sparse import api, cases, hopper, hopper_weights, reference
from pallas_kernels.tile_sparse.cases import CASES, Case
from pallas_kernels.tile_sparse.configs import KINDS, arguments, kernel


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
        (left, right), (a, b) = jax.random.split(key), arguments(kind, case, pattern)[:2]
        drawn = (jax.random.normal(k, x.shape, x.dtype) for k, x in ((left, a), (right, b)))
        rest = (None,) if kind == "forward" else ()
        return *drawn, *rest, cases.pattern(case)

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
