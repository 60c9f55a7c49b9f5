"""Every kind of tile of the product with packed weights that is shipped: its deviceless compile.

All numbers of tokens that `hopper.heuristic` takes, with the step and the warpgroups that it gives
them; every number of bits, with zero points and without, in splits and with the heaviest epilogue.
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
from pallas_kernels.hopper import FILES
from pallas_kernels.quant_gemm import hopper
from pallas_kernels.quant_gemm.reference import BITS, Spec
from pallas_kernels.quantize.reference import code_bytes, groups_of

CONFIGS = (
    *(f"tokens {tokens} 4 bits split" for tokens in hopper.TOKENS),
    *(f"tokens {tokens} 4 bits gelu" for tokens in (16, 64, 128)),
    *(f"tokens 16 {bits} bits split" for bits in BITS if bits != 4),
    *(f"tokens 16 {bits} bits zeros split" for bits in BITS),
    *(f"tokens 128 {bits} bits zeros silu" for bits in BITS),
    "tokens 16 4 bits groups 32 split",
    "tokens 16 4 bits four groups 32",
    "tokens 128 4 bits groups 32 silu",
    "tokens 128 4 bits deep groups 32",
    "tokens 128 4 bits deep gelu",
    "tokens 128 4 bits groups 32 float16",
    "tokens 16 4 bits narrow split",
    "tokens 63 3 bits ragged",
    "tokens 63 3 bits ragged split",
    *(f"tokens {n} 4 bits {word} split" for n in (8, 16) for word in ("three", "four")),
    *(f"tokens 16 {bits} bits three zeros split" for bits in BITS),
    "tokens 8 4 bits four zeros split",
    "tokens 16 8 bits four split",
    *(f"tokens {n} 4 bits four {word}" for n in (8, 16) for word in ("halves", "quarters")),
    *(f"tokens {n} 4 bits four {word} warp" for n in (8, 16) for word in ("halves", "quarters")),
    "tokens 16 4 bits four split warp",
    "tokens 16 3 bits zeros halves split",
    "tokens 64 4 bits halves split",
)
WARPGROUPS = {"three": 3, "four": 4}  # that compute, where it is not the heuristic's
PARTS = {"halves": 2, "quarters": 4}  # of a step's K, where warpgroups share their columns
FOLDER = pathlib.Path(__file__).parent


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]:
    """Returns (function, its abstract arguments on an H100, the tile) of a configuration.

    'narrow' is one warpgroup that computes; 'halves', 'quarters': PARTS; 'warp': a tile by warps;
    'deep': a step of twice the heuristic's; 'groups 32': others are of 128. 'ragged': neither
    tokens nor columns are whole pieces of what TMA writes.
    """
    _, tokens, bits, _, *words = name.split()
    M, N, K = int(tokens), 1024, 2048
    N = 128 if "narrow" in words else 272 if "ragged" in words else N
    dtype = jnp.float16 if "float16" in words else jnp.bfloat16
    activation: Any = next((word for word in words if word in ("gelu", "silu")), None)
    group = 32 if "groups" in words else 128
    spec = Spec(int(bits), group, "zeros" not in words, activation)
    tile = hopper.heuristic(M, N, K, spec, dtype)
    splits = 2 if "split" in words else 1
    groups = next((n for word, n in WARPGROUPS.items() if word in words), tile.warpgroups)
    parts = next((n for word, n in PARTS.items() if word in words), 1)
    tile = dataclasses.replace(
        tile,
        warpgroups=groups,
        block_m=groups // parts * hopper.COLUMNS,
        splits=splits,
        stages=8,
        block_k=parts * tile.block_k * (2 if "deep" in words else 1),
        by_warp="warp" in words,
    )
    tile = hopper.fitted(tile, spec, dtype)
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    numbers = array(groups_of(K, group), N)
    args = (
        array(M, K, dtype=dtype),
        array(code_bytes(K, spec.bits), N, dtype=jnp.uint8),
        numbers,
        None if spec.signed else numbers,
        array(N),
    )
    run = functools.partial(hopper.multiply, spec=spec, tile=tile)
    return run, args, dataclasses.asdict(tile)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernel."""
    return *(FOLDER / f"{file}.py" for file in ("hopper", "pairs", "registers")), *FILES
