"""SDP4Bit's fused kernels on a GPU: correctness, and every case beside its rivals.

Correct: codes are those of plain JAX but for a few in a hundred thousand, which differ by one where
a sum was fused differently; float32 results differ by rounding. Rivals: what XLA makes of plain
JAX, and a copy that reads and writes as many bytes, which is no rival but the bound.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import tuned
from pallas_kernels.bench import Side
from pallas_kernels.dispatch import Implementation
from pallas_kernels.quantize import api, fused_reference, hopper, reference
from pallas_kernels.quantize.cases import CASES as CASES
from pallas_kernels.quantize.cases import Case
from pallas_kernels.quantize.configs import kernel

TINY_CASES = (
    Case("tiny", "subtract_quantize", 2 * 8192, group=2048),
    Case("tiny in", "dequantize_add", 2 * 8192, 2, group=2048),
)
CHECKED = (
    Case("send", "hadamard_quantize", 2**20, 4, 2, bits=8),
    Case("send random bf16", "hadamard_quantize", 2**20, 4, 2, bits=8, wide=False, random=True),
    Case("relay", "reduce_requantize", 2**19, 8, pieces=4, bits=8),
    Case("receive", "reduce_hadamard", 2**19, 4),
    Case("weights out", "subtract_quantize", 2**20, group=2048),
    Case(
        "weights out random bf16", "subtract_quantize", 2**20, group=2048, wide=False, random=True
    ),
    Case("weights in", "dequantize_add", 2**20, 8, group=2048),
    Case("weights in bf16", "dequantize_add", 2**20, 8, group=2048, wide=False),
    Case("send groups 512 4 bits", "hadamard_quantize", 2**20, 4, 2, group=512),
    Case("relay random", "reduce_requantize", 2**19, 16, pieces=2, bits=8, random=True),
)
SELDOM = 1e-4  # codes that may differ by one (chosen: a fused sum moves fewer over a boundary)
ROUNDING = 2e-6  # of float32 results, relative to the largest (chosen: sums of 16, and a transform)


def numbers(case: Case) -> list[jax.ShapeDtypeStruct]:
    """What is drawn: x, main and copy as they are, payloads as pairs of bytes of bfloat16.

    Any bytes are codes, and two such pairs a finite scale.
    """
    n, like = case.elements, jax.ShapeDtypeStruct
    dtype = jnp.float32 if case.wide else jnp.bfloat16
    match case.op:
        case "hadamard_quantize":
            return [like((n,), dtype)]
        case "subtract_quantize":
            return [like((n,), jnp.float32), like((n,), dtype)]
    each = n // case.payloads if case.op == "dequantize_add" else n
    size = reference.payload_bytes(each, case.bits, case.group)
    shapes = [like((case.payloads, size // 2), jnp.bfloat16)]
    return shapes + [like((n,), dtype)] * (case.op == "dequantize_add")


def call(case: Case, implementation: Implementation) -> Callable[..., jax.Array]:
    """Returns the function of a case; its arguments are those of `numbers`."""
    options: dict[str, Any] = {"bits": case.bits, "group": case.group}
    options["implementation"] = implementation
    if case.random:
        options["key"] = jax.random.key(7)
    match case.op:
        case "hadamard_quantize":
            options |= {"rows": case.payloads, "nodes": case.places, "hadamard": case.hadamard}
        case "reduce_requantize":
            options |= {"rows": case.pieces, "n": case.elements}
        case "reduce_hadamard":
            options |= {"n": case.elements, "hadamard": case.hadamard}

    def run(*args: jax.Array) -> jax.Array:
        if case.op not in ("hadamard_quantize", "subtract_quantize"):
            args = (payload_of(args[0]), *args[1:])
        return getattr(api, case.op)(*args, **options)

    return run


def payload_of(pairs: jax.Array) -> jax.Array:
    """Returns the bytes of pairs, as rows."""
    return jax.lax.bitcast_convert_type(pairs, jnp.uint8).reshape(pairs.shape[0], -1)


def copied(case: Case) -> Side:
    """Returns a copy that moves as many bytes as the case, half of them as reads."""
    like = jax.ShapeDtypeStruct((int(case.bytes()) // 8,), jnp.float32)
    return lambda x: x + 1.0, [like]


def sides(case: Case, implementation: Implementation) -> dict[str, Callable[[], Side]]:
    """Returns our kernel, plain JAX under XLA, and a copy."""
    return {
        "ours": lambda: (call(case, implementation), numbers(case)),
        "xla": lambda: (call(case, "reference"), numbers(case)),
        "copy": lambda: copied(case),
    }


def drawn(case: Case) -> list[jax.Array]:
    """Returns the numbers of a check; payloads are encoded from numbers, with their scales."""
    random = np.random.default_rng(0)
    arrays = []
    for like in numbers(case):
        if like.ndim == 1:
            arrays.append(jnp.asarray(random.standard_normal(like.shape), like.dtype))
            continue
        n = case.elements // (like.shape[0] if case.op == "dequantize_add" else 1)
        x = jnp.asarray(random.standard_normal((like.shape[0], n)), jnp.float32)
        payload = reference.encode(x, case.bits, case.group)
        pairs = payload.reshape(*like.shape, 2)
        arrays.append(jax.lax.bitcast_convert_type(pairs, jnp.bfloat16))
    return arrays


def errors(case: Case, implementation: Implementation) -> dict[str, float]:
    """Returns error over bound; at most 1 is right."""
    inputs = drawn(case)
    result, want = (
        np.asarray(jax.jit(call(case, which))(*inputs)) for which in (implementation, "reference")
    )
    if result.dtype != np.uint8:
        result, want = (np.asarray(x, np.float64) for x in (result, want))
        bound = 2**-8 if not case.wide else ROUNDING
        return {"sum": float(np.abs(result - want).max() / (bound * np.abs(want).max()))}
    bits = 4 if case.op == "reduce_requantize" else case.bits
    rows = result.reshape(-1, result.shape[-1]).shape[0]
    return apart(result, want, case.elements // rows, bits)


def apart(result: np.ndarray, want: np.ndarray, n: int, bits: int) -> dict[str, float]:
    """Returns error over bound of payloads of n elements a row."""
    (code, scale), (right, true) = (
        _parts(jnp.asarray(x.reshape(-1, x.shape[-1])), n, bits) for x in (result, want)
    )
    steps = np.abs(code - right)
    return {
        "scales": float((np.abs(scale / true - 1) / ROUNDING).max()),
        "codes apart by more than 1": float(steps.max()),
        "codes that differ": float((steps > 0).mean() / SELDOM),
    }


def _parts(payload_RP: jax.Array, n: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    packed, scale = reference.split_payload(payload_RP, n, bits)
    return np.asarray(reference.unpack(packed, n, bits), np.int32), np.asarray(scale, np.float64)


def checks(rehearsal: bool) -> list[tuple[str, Callable[[], dict[str, float]]]]:
    """(name, what gives error over bound)."""
    cases = TINY_CASES if rehearsal else CHECKED
    implementation = "interpret" if rehearsal else "hopper"
    return [
        (f"quantize {case.name}", functools.partial(errors, case, implementation)) for case in cases
    ]


# ---- tunings
#
# What tune.py times of SDP4Bit's fused kernels: each case, over tiles that fit.


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
    """Returns the keyword arguments of fused_reference's function for a case."""
    static: dict[str, Any] = {"bits": case.bits, "group": case.group}
    match case.op:
        case "hadamard_quantize":
            static |= {"rows": case.payloads, "nodes": case.places, "hadamard": case.hadamard}
        case "reduce_requantize":
            static |= {"n": case.elements, "rows": case.pieces, "new_bits": 4}
        case "reduce_hadamard":
            static |= {"n": case.elements, "hadamard": case.hadamard}
    return static


def candidates(problem: hopper.Problem) -> list[hopper.Tile]:
    """Returns the heuristic's tile, then its neighbours that fit in shared memory."""
    tiles = [hopper.heuristic(problem)]
    for times in (1, 2, 4):
        for blocks, stages in ((1, 3), (1, 4), (2, 2), (2, 3), (3, 2), (3, 3), (4, 2), (4, 3)):
            tile = hopper.Tile(problem.least * times, stages, hopper.SMS * blocks)
            few = tile.groups * problem.group <= 4 * hopper.STEP  # registers
            if few and hopper.fit(problem, tile) == tile:
                tiles.append(tile)
    return list(dict.fromkeys(tiles))


def _values(key: jax.Array, like: Any) -> Any:
    """Random numbers; payloads' bytes are those of pairs of bfloat16, as in bench.py."""
    if like is None:
        return None
    if like.dtype == jnp.uint32:
        return jax.random.bits(key, like.shape, like.dtype)
    if like.dtype != jnp.uint8:
        return jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype)
    rows, size = like.shape
    return payload_of(jax.random.normal(key, (rows, size // 2), jnp.bfloat16))
