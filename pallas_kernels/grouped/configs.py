"""Every tile of the grouped products that is shipped: its deviceless compile.

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

from pallas_kernels import aot
from pallas_kernels.grouped import hopper, hopper_weights, tiling
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
    tile = fitted(Tile(block_m, block_n, 64, 6, block_m // 64, cluster), tiling.buffers)
    right = {"forward": (G, K, N), "transposed": (G, N, K), "weights": (M, N)}[kind]
    args = array(M, K), array(*right), array(G, dtype=jnp.int32)
    return kernel(kind, tile), args, dataclasses.asdict(tile)


def kernel(kind: str, tile: Tile, interpret: bool = False) -> Callable[..., Any]:
    """Returns the kernel as a function of the operands (a, b, sizes)."""
    if kind == "weights":
        return functools.partial(hopper_weights.weights, tile=tile, interpret=interpret)
    turned = kind == "transposed"
    return functools.partial(hopper.product, transpose=turned, tile=tile, interpret=interpret)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernel."""
    file = "hopper_weights.py" if name.startswith("weights") else "hopper.py"
    return FOLDER / file, FOLDER / "tiling.py", *FILES
