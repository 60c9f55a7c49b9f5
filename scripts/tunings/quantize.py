"""What tune.py times of SDP4Bit's fused kernels: each case, over tiles that fit."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.quantize import api, bench, fused_reference, hopper
from pallas_kernels.quantize.cases import CASES, Case
from pallas_kernels.quantize.configs import kernel


def tunings() -> Iterator[tuned.Tuning]:
    """Yields the tunings of all cases."""
    for case in CASES:
        problem, run, args = kernel(case)

        def function(tile: hopper.Tile, interpret: bool, run=run) -> Callable[..., Any]:
            return functools.partial(run, tile=tile, interpret=interpret)

        def inputs(key: jax.Array, args=args) -> tuple[Any, ...]:
            return tuple(_values(jax.random.fold_in(key, i), x) for i, x in enumerate(args))

        yield tuned.Tuning(
            op=problem.op,
            key=api.key_of(problem),
            candidates=candidates(problem),
            function=function,
            inputs=inputs,
            reference=functools.partial(getattr(fused_reference, problem.op), **options(case)),
        )


def options(case: Case) -> dict[str, Any]:
    """What fused_reference's function of a case is told."""
    found: dict[str, Any] = {"bits": case.bits, "group": case.group}
    match case.op:
        case "hadamard_quantize":
            found |= {"rows": case.payloads, "nodes": case.places, "hadamard": case.hadamard}
        case "reduce_requantize":
            found |= {"n": case.elements, "rows": case.pieces, "new_bits": 4}
        case "reduce_hadamard":
            found |= {"n": case.elements, "hadamard": case.hadamard}
    return found


def candidates(problem: hopper.Problem) -> list[hopper.Tile]:
    """Returns the heuristic's tile, then its neighbours that fit in shared memory."""
    found = [hopper.heuristic(problem)]
    for times in (1, 2, 4):
        for blocks, stages in ((1, 3), (1, 4), (2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (4, 3)):
            tile = hopper.Tile(problem.least * times, stages, hopper.SMS * blocks)
            few = tile.groups * problem.group <= 4 * hopper.STEP  # registers
            if few and hopper.fit(problem, tile) == tile:
                found.append(tile)
    return list(dict.fromkeys(found))


def _values(key: jax.Array, like: Any) -> Any:
    """Random numbers; payloads' bytes are those of pairs of bfloat16, as in bench.py."""
    if like is None:
        return None
    if like.dtype == jnp.uint32:
        return jax.random.bits(key, like.shape, like.dtype)
    if like.dtype != jnp.uint8:
        return jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype)
    rows, size = like.shape
    return bench.payload_of(jax.random.normal(key, (rows, size // 2), jnp.bfloat16))
