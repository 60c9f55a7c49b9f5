"""Every tile of the grouped products that is shipped: its deviceless compile, and what to time.

All that the heuristics can give: the largest tile with and without a cluster, the others as
clusters, which need more; y, the rows' gradient (weights read transposed) and the weights'.
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

from pallas_kernels import aot, tuned
from pallas_kernels.grouped import api, hopper, hopper_weights, library, reference
from pallas_kernels.grouped.cases import CASES, Case
from pallas_kernels.hopper import FILES
from pallas_kernels.hopper.tiles import BLOCKS, Tile, fitted

KINDS = ("forward", "transposed", "weights")
LARGEST, *SMALLER = (f"{m}x{n}" for m, n in BLOCKS)
CONFIGS = (
    *(f"{kind} {LARGEST}" for kind in KINDS),
    *(f"{kind} {LARGEST} alone" for kind in KINDS),
    *(f"{kind} {block}" for block in SMALLER for kind in KINDS),
)
FOLDER = pathlib.Path(__file__).parent


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]:
    """Returns (function, its abstract arguments on an H100, the tile) of a configuration.

    'alone' is a thread block without a cluster.
    """
    kind, block, *words = name.split()
    M, N, K, G = 4096, 1536, 512, 64
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    block_m, block_n = map(int, block.split("x"))
    cluster = 1 if "alone" in words else 2
    tile = fitted(Tile(block_m, block_n, 64, 6, block_m // 64, cluster), hopper.buffers)
    right = {"forward": (G, K, N), "transposed": (G, N, K), "weights": (M, N)}[kind]
    args = array(M, K), array(*right), array(G, dtype=jnp.int32)
    return kernel(kind, tile), args, dataclasses.asdict(tile)


def kernel(kind: str, tile: Tile, interpret: bool = False) -> Callable[..., Any]:
    """Of the operands (a, b, sizes)."""
    if kind == "weights":
        return functools.partial(hopper_weights.weights, tile=tile, interpret=interpret)
    turned = kind == "transposed"
    return functools.partial(hopper.product, transpose=turned, tile=tile, interpret=interpret)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernel."""
    files = ("hopper_weights.py", "hopper.py") if name.startswith("weights") else ("hopper.py",)
    return *(FOLDER / file for file in files), *FILES


def tunings() -> tuple[tuned.Tuning, ...]:
    """For every named shape y, the rows' gradient and the weights'."""
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
    tiles = tuple(dict.fromkeys((first, *hopper.candidates(), *wider)))
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
    return tuned.Tuning(api.OP, api.key(kind, G, M, N, K), tiles, function, inputs, plain, others)
