"""Every tile of the Hopper product that is shipped: its deviceless compile.

All that `hopper.heuristic` can give: each block size with the lightest and the heaviest epilogue,
in splits, and with either operand transposed, and the largest, whose registers are nearly all
taken, with every epilogue. Those of 8-bit operands likewise.
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
from pallas_kernels.gemm import hopper, promotion, reference
from pallas_kernels.gemm.hopper import Stored
from pallas_kernels.hopper import FILES
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.tiles import BLOCKS, Tile

LARGEST, *SMALLER = (f"{m}x{n}" for m, n in BLOCKS)
BYTES = tuple(f"{m}x{n}" for m, n in promotion.BLOCKS)  # of 8-bit operands
OPERANDS = {
    "e4m3": (jnp.float8_e4m3fn, jnp.float8_e4m3fn),
    "mixed": (jnp.float8_e5m2, jnp.float8_e4m3fn),
    "int8": (jnp.int8, jnp.int8),
}
IN_TURN = "{}x{}".format(*hopper.PINGPONG)
HEAVIEST = "bias gelu residual kept"
EPILOGUES = (
    "plain",
    "plain float32",
    "bias",
    "bias gelu",
    "bias gelu kept",
    "bias gelu_tanh kept",
    "silu kept",
    "bias residual",
    HEAVIEST,
)
STORED = {"forward": Stored(), "dx": Stored(b=True), "dw": Stored(a=True)}
CONFIGS = (
    *(f"forward {LARGEST} {epilogue}" for epilogue in EPILOGUES),
    *(f"{kind} {LARGEST}" for kind in ("dx", "dw")),
    f"forward {LARGEST} alone plain",
    *(f"forward {block} {epilogue}" for block in SMALLER for epilogue in ("plain", HEAVIEST)),
    *(f"{kind} {block}" for block in SMALLER for kind in ("dx", "dw")),
    *(f"forward {IN_TURN} pingpong {epilogue}" for epilogue in ("plain", "bias gelu", HEAVIEST)),
    *(f"{kind} {IN_TURN} pingpong" for kind in ("dx", "dw")),
    *(f"forward {block} split" for block in (LARGEST, *SMALLER)),
    *(f"{kind} {LARGEST} split" for kind in ("dx", "dw")),
    *(f"scaled {block} {kind} bias gelu residual" for block in BYTES for kind in ("e4m3", "int8")),
    *(f"scaled {BYTES[0]} {words}" for words in ("e4m3", "e4m3 alone", "mixed")),
    *(f"scaled {BYTES[0]} {kind} split" for kind in ("e4m3", "int8")),
)
FOLDER = pathlib.Path(__file__).parent


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]:
    """Returns (function, its abstract arguments on an H100, the tile) of a configuration.

    'alone' is a thread block without a cluster.
    """
    kind, block, *words = name.split()
    M, N, K = 1024, 1536, 512
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    activation: Any = next((word for word in words if word in ("gelu", "gelu_tanh", "silu")), None)
    out_dtype = "float32" if "float32" in words else "bfloat16"
    spec, scaled = Spec(activation, out_dtype, "kept" in words), kind == "scaled"
    stored = Stored(b=True) if scaled else STORED[kind]
    block_m, block_n = map(int, block.split("x"))
    pingpong, cluster = "pingpong" in words, 1 if "alone" in words else 2
    warpgroups = 2 if pingpong else block_m // 64
    splits = 2 if "split" in words else 1
    depth = promotion.STEP if scaled else 64
    tile = Tile(block_m, block_n, depth, 6, warpgroups, cluster, pingpong=pingpong, splits=splits)
    types = next((OPERANDS[word] for word in words if word in OPERANDS), (jnp.bfloat16,) * 2)
    tile = hopper.fitted(tile, spec, "residual" in words, types[0])
    a, b = array(*(K, M) if stored.a else (M, K)), array(*(N, K) if stored.b else (K, N))
    bias = array(N, dtype=jnp.float32) if "bias" in words else None
    residual = array(M, N) if "residual" in words else None
    if scaled:
        x, w = (array(*s, dtype=t) for s, t in zip(((M, K), (K, N)), types, strict=True))
        scales = reference.Scales(array(M, dtype=jnp.float32), array(N, dtype=jnp.float32))
        run = functools.partial(hopper.multiply_scaled, spec=spec, tile=tile)
        return run, (x, w, scales, bias, residual), dataclasses.asdict(tile)
    run = functools.partial(hopper.multiply, spec=spec, tile=tile, stored=stored)
    return run, (a, b, bias, residual), dataclasses.asdict(tile)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernel."""
    return FOLDER / "hopper.py", FOLDER / "promotion.py", *FILES
