"""What tune.py times of the norm: each case forward and backward, over tiles that fit."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.norm import api, hopper, reference
from pallas_kernels.norm.cases import CASES, Case
from pallas_kernels.norm.configs import kernel


def tunings() -> Iterator[tuned.Tuning]:
    """Yields the tunings of all cases."""
    for case in CASES:
        for backward in (False, True):
            problem, run, args = kernel(case, backward)
            spec = run.keywords["spec"]
            added = (args[5] if backward else args[1]) is not None

            def function(tile: hopper.Tile, interpret: bool, run=run) -> Callable[..., Any]:
                return functools.partial(run, tile=tile, interpret=interpret)

            def inputs(key: jax.Array, args=args, case=case) -> tuple[Any, ...]:
                return tuple(_values(key, i, x, case) for i, x in enumerate(args))

            yield tuned.Tuning(
                op="fused_layer_norm_backward" if backward else "fused_layer_norm",
                key=api.key(problem, spec, added),
                candidates=candidates(problem),
                function=function,
                inputs=inputs,
                reference=functools.partial(
                    reference.backward if backward else reference.forward, spec=spec
                ),
            )


def candidates(problem: hopper.Problem) -> list[hopper.Tile]:
    """Returns the heuristic's tile, then its neighbours that fit in shared memory."""
    first = hopper.heuristic(problem)
    found = [first]
    for rows in (1, 2, 4, 8):
        for blocks, stages in ((1, 2), (1, 4), (2, 2), (2, 3), (2, 4), (3, 3), (4, 2), (4, 3)):
            tile = hopper.Tile(rows, stages, hopper.SMS * blocks, first.resident)
            fitted = hopper.fit(problem, tile)
            if rows * problem.padded <= 2 * hopper.ELEMENTS and fitted == tile:
                found.append(tile)
    return list(dict.fromkeys(found))


def _values(key: jax.Array, place: int, like: Any, case: Case) -> Any:
    if like is None:
        return None
    if like.dtype == jnp.int32:  # equal sequences
        return jnp.arange(17, dtype=jnp.int32) * (case.rows // 16)
    values = jax.random.normal(jax.random.fold_in(key, place), like.shape, jnp.float32)
    return values.astype(like.dtype)
