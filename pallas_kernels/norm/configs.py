"""Every tile of the norm's Hopper kernels that is shipped, its deviceless compile.

A configuration is a kernel at a width with the tile that `heuristic` gives, with all that adds
registers: LayerNorm with bias, residual, offset, and backward a gradient of h.
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
from pallas_kernels.norm import hopper
from pallas_kernels.norm.cases import Case
from pallas_kernels.norm.reference import Spec

# 768 and 1024: several rows a group. 1000: rows narrower than their slot. 5120 and more: chunks.
# 12288: sums over rows by XLA; at 16384 bias and offset do not fit in shared memory.
CONFIGS = (
    *(f"{k} d{d}" for k in ("forward", "backward") for d in (768, 1000, 1024, 4096, 12288)),
    *(f"{kind} d{d} rms" for kind in ("forward", "backward") for d in (4096, 8192)),
    *(f"{kind} d{d} float32" for kind in ("forward", "backward") for d in (1024, 4096)),
    *(f"{kind} d1024 odd" for kind in ("forward", "backward")),
    "forward d768 unpack",
    "forward d16384",
)
FOLDER = pathlib.Path(__file__).parent
Run = tuple[hopper.Problem, functools.partial[Any], tuple[Any, ...]]


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]:
    """Returns (function, its abstract arguments on an H100, the tile) of a configuration."""
    words = name.split()
    case = Case(
        name,
        4097 if "odd" in words else 4096,
        int(words[1][1:]),
        "rms" not in words,
        bias="rms" not in words,
        padded_rows=16 * 512 if "unpack" in words else 0,
    )
    dtype = jnp.float32 if "float32" in words else jnp.bfloat16
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())
    problem, run, args = kernel(case, words[0] == "backward", dtype)
    tile = hopper.heuristic(problem)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return functools.partial(run, tile=tile), args, dataclasses.asdict(tile)


def kernel(case: Case, backward: bool, dtype: Any = jnp.bfloat16) -> Run:
    """Returns (problem, kernel to call with a tile, its abstract arguments); 16 sequences."""
    T, D = case.rows, case.width
    x_TD, v_D, one_T1 = (
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (((T, D), dtype), ((D,), jnp.float32), ((T, 1), jnp.float32))
    )
    writes = case.added or case.bias or bool(case.padded_rows)
    length = case.padded_rows // 16 if case.padded_rows else None
    spec = Spec(case.centred, 1e-5, case.bias, case.centred, writes, length)
    if backward:
        dh_TD = x_TD if case.added and not case.padded_rows else None
        problem = hopper.backward_problem(x_TD, v_D, dh_TD, spec)
        args = (x_TD, one_T1, one_T1, v_D, x_TD, dh_TD)
        return problem, functools.partial(hopper.backward, spec=spec), args
    vectors = (v_D if case.bias else None, v_D, v_D if case.centred else None)
    residual_TD = x_TD if case.added else None
    problem = hopper.forward_problem(x_TD, residual_TD, *vectors, spec)
    ends = jax.ShapeDtypeStruct((17,), jnp.int32) if case.padded_rows else None
    args = (x_TD, residual_TD, *vectors, ends)
    return problem, functools.partial(hopper.forward, spec=spec), args


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernels."""
    return (FOLDER / "hopper.py",)
