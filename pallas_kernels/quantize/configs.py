"""Every tile of the fused quantization kernels that is shipped, its deviceless compile.

A configuration is a case of cases.py, at 1/64 of its size, with the tile that `heuristic` gives
to it at its own size; or one that no case has: other groups, other codes, no transform.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels import aot
from pallas_kernels.quantize import hopper
from pallas_kernels.quantize.cases import ALL, CASES, Case
from pallas_kernels.quantize.reference import payload_bytes

OTHERS = (
    Case("send plain groups 512 4 bits", "hadamard_quantize", ALL, 8, 4, group=512, hadamard=False),
    Case("send groups 1024", "hadamard_quantize", ALL, 8, 4, group=1024, bits=8),
    Case("relay 16 senders groups 256", "reduce_requantize", ALL // 8, 16, 1, 2, 256, 8),
    Case("receive 16 senders 8 bits groups 256", "reduce_hadamard", ALL // 4, 16, 1, 1, 256, 8),
    Case("weights out 8 bits groups 128", "subtract_quantize", ALL // 2, bits=8, random=True),
    Case("weights in 8 bits groups 1024", "dequantize_add", ALL, 8, group=1024, bits=8),
)
CONFIGS = tuple(case.name for case in (*CASES, *OTHERS))
FOLDER = pathlib.Path(__file__).parent
FILES = ("hopper", "columns", "rows", "payloads", "registers", "counter", "stream")
Run = tuple[hopper.Problem, Callable[..., Any], tuple[Any, ...]]


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]:
    """Returns (function, its abstract arguments on an H100, the tile) of a configuration."""
    case = next(case for case in (*CASES, *OTHERS) if case.name == name)
    tile = hopper.heuristic(kernel(case)[0])
    _, run, args = kernel(dataclasses.replace(case, elements=case.elements // 64))
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return functools.partial(run, tile=tile), args, dataclasses.asdict(tile)


def kernel(case: Case) -> Run:
    """Returns (problem, kernel to call with a tile, its abstract arguments: as in hopper.py)."""
    dtype = jnp.dtype("float32" if case.wide else "bfloat16")
    n, group, bits = case.elements, case.group, case.bits
    problem = hopper.Problem(
        case.op, 1, n // group, group, case.payloads, dtype=dtype, bits=bits, noise=case.random
    )
    change = functools.partial(dataclasses.replace, problem)
    key_W = jax.ShapeDtypeStruct((2,), jnp.uint32) if case.random else None

    def line(dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n,), dtype)

    def payload(each: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((case.payloads, payload_bytes(each, bits, group)), jnp.uint8)

    args: tuple[Any, ...]
    match case.op:
        case "hadamard_quantize":
            pieces = case.payloads * case.places
            problem = change(
                pieces=pieces,
                groups=n // pieces // group,
                places=case.places,
                bits=8,
                new_bits=bits,
                hadamard=case.hadamard,
            )
            args = (line(dtype), key_W)
        case "reduce_requantize":
            problem = change(pieces=case.pieces, groups=n // case.pieces // group)
            args = (payload(n), key_W)
        case "reduce_hadamard":
            problem = change(hadamard=case.hadamard)
            args = (payload(n),)
        case "subtract_quantize":
            problem = change(bits=4, new_bits=bits)
            args = (line(jnp.float32), line(dtype), key_W)
        case _:
            pieces = case.payloads
            problem = change(pieces=pieces, groups=n // pieces // group, payloads=1, new_bits=bits)
            args = (payload(n // pieces), line(dtype))
    return problem, functools.partial(getattr(hopper, case.op), problem=problem), args


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernels."""
    return tuple(FOLDER / f"{file}.py" for file in FILES)
