"""Norms with bias and residual on a GPU: correctness, and every case beside its rivals.

Correct: the error against float32 is at most twice that of the plain 16-bit program, plus 1e-3
(gradients: 2e-3).
Rivals: what XLA makes of the plain program, and what torch.compile makes of PyTorch's norms.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import PackInfo, bench, rivals, tuned
from pallas_kernels.bench import Side
from pallas_kernels.cases import paper_lengths
from pallas_kernels.dispatch import Implementation
from pallas_kernels.norm import api, hopper, reference
from pallas_kernels.norm.cases import CASES as CASES
from pallas_kernels.norm.cases import Case
from pallas_kernels.norm.configs import kernel

EPS = 1e-5  # of fused_layer_norm, if it is given none
TINY_CASES = (Case("tiny", 64, 128, bias=True),)
CHECKED = (
    Case("1000 x 1024", 1000, 1024, bias=True),
    Case("300 x 4096 rms", 300, 4096, centred=False),
    Case("77 x 1000, nothing added", 77, 1000, added=False),
    Case("bert 1024 unpacked", CASES[-1].rows, 768, bias=True, padded_rows=16 * 1024),
)


def arguments(case: Case) -> list[jax.ShapeDtypeStruct]:
    """Returns x, scale and, if the case has them, residual, offset and bias, as shapes."""
    shapes = [(case.rows, case.width), (case.width,)]
    shapes += [(case.rows, case.width)] * case.added
    shapes += [(case.width,)] * (case.centred + case.bias)
    return [jax.ShapeDtypeStruct(s, jnp.float32 if len(s) == 1 else jnp.bfloat16) for s in shapes]


def lengths_of(case: Case) -> tuple[int, ...]:
    """Returns the lengths of the sequences that a case unpacks."""
    return paper_lengths(case.padded_rows // 16)


def norm(case: Case, implementation: Implementation) -> Callable:
    """fused_layer_norm of the arguments, or norm_unpack into the paper's padded rows."""

    def run(x, scale, *operands):
        left = list(operands)
        options = {
            "residual": left.pop(0) if case.added else None,
            "scale": scale,
            "offset": left.pop(0) if case.centred else None,
            "bias": left.pop(0) if case.bias else None,
            "kind": "layer" if case.centred else "rms",
            "eps": EPS,
            "implementation": implementation,
        }
        if not case.padded_rows:
            return pallas_kernels.fused_layer_norm(x, **options)
        cu = jnp.asarray(np.concatenate([[0], np.cumsum(lengths_of(case))]), jnp.int32)
        info = PackInfo(cu, case.rows, case.padded_rows // 16)
        return pallas_kernels.norm_unpack(x, info, **options)

    return run


def sides(case: Case, implementation: Implementation) -> dict[str, Callable[[], Side]]:
    """Returns our kernel, and the plain program, of which XLA makes one or two kernels."""
    return {
        "ours": lambda: (norm(case, implementation), arguments(case)),
        "xla": lambda: (norm(case, "reference"), arguments(case)),
    }


def torch_sides(case: Case) -> dict[str, Callable[[], rivals.Rival]]:
    """Returns PyTorch's norm, compiled; if y is unpacked, with a copy to the tokens' places."""
    places = None
    if case.padded_rows:
        longest = case.padded_rows // 16
        places = np.concatenate(
            [i * longest + np.arange(n) for i, n in enumerate(lengths_of(case))]
        )

    def unpacked(*args: jax.Array) -> jax.Array:
        return norm(case, "reference")(*args).reshape(case.padded_rows, case.width)

    twin = unpacked if case.padded_rows else norm(case, "reference")
    function = rivals.norm(case.centred, case.added, case.bias, EPS, places, case.padded_rows)
    return {"torch compiled": lambda: rivals.Rival(function, twin, arguments(case))}


def errors(case: Case, implementation: Implementation) -> dict[str, float]:
    """Returns error over bound of the results and of the gradients; at most 1 is right."""
    like = arguments(case)
    random = np.random.default_rng(0)
    inputs = [jnp.asarray(random.normal(size=x.shape), x.dtype) for x in like]

    def all_of(implementation: Implementation, exact: bool) -> list[np.ndarray]:
        def run(*x):
            out, pull = jax.vjp(norm(case, implementation), *x)
            return jax.tree.leaves(out), pull(jax.tree.map(jnp.ones_like, out))

        arrays = (x.astype(jnp.float32) if exact else x for x in inputs)
        out, gradients = bench.rounding(run)(*arrays)
        return [np.asarray(x, np.float64) for x in (*out, *gradients)]

    result, rough, want = (
        all_of(implementation, False),
        all_of("reference", False),
        all_of("reference", True),
    )
    results = 1 if case.padded_rows else 2
    names = ["y", "h"][:results] + [f"gradient {i}" for i in range(len(result) - results)]
    spare = [1e-3] * results + [2e-3] * (len(result) - results)
    return {
        name: float(np.abs(f - w).max() / (2 * np.abs(r - w).max() + e))
        for name, f, r, w, e in zip(names, result, rough, want, spare, strict=True)
    }


def checks(rehearsal: bool) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """Returns (name, a function that returns error over bound) for each check."""
    cases = TINY_CASES if rehearsal else CHECKED
    implementation = "interpret" if rehearsal else "hopper"
    return [
        (f"norm {case.name}", functools.partial(errors, case, implementation)) for case in cases
    ]


# ---- tunings
#
# What tune.py times of the norm: each case forward and backward, over tiles that fit.


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
    tiles = [first]
    for rows in (1, 2, 4, 8):
        for blocks, stages in ((1, 2), (1, 4), (2, 2), (2, 3), (2, 4), (3, 3), (4, 2), (4, 3)):
            tile = hopper.Tile(rows, stages, hopper.SMS * blocks, first.resident)
            fitted = hopper.fit(problem, tile)
            if rows * problem.padded <= 2 * hopper.ELEMENTS and fitted == tile:
                tiles.append(tile)
    return list(dict.fromkeys(tiles))


def _values(key: jax.Array, place: int, like: Any, case: Case) -> Any:
    if like is None:
        return None
    if like.dtype == jnp.int32:  # equal sequences
        return jnp.arange(17, dtype=jnp.int32) * (case.rows // 16)
    values = jax.random.normal(jax.random.fold_in(key, place), like.shape, jnp.float32)
    return values.astype(like.dtype)
