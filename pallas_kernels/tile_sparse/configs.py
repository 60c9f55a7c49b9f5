"""Every tile of the tile-sparse kernels that is shipped: its deviceless compile.

The usual format in all tiles that the heuristics can give, the others in their largest; y with the
least and the most that an epilogue does, dx, and dw whole and in splits.
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
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.tiles import Tile
from pallas_kernels.tile_sparse import hopper, hopper_weights
from pallas_kernels.tile_sparse.cases import Case
from pallas_kernels.tile_sparse.format import Pattern

KINDS = ("forward", "dx", "dw")
FULL = "bias gelu kept"  # the most that an epilogue does
LANES = "pingpong"
CONFIGS = (
    *(
        f"forward 128x64 {rows} {words}"
        for rows in ("256", "128", f"128 {LANES}", f"64 {LANES}")
        for words in ("plain", FULL)
    ),
    "forward 128x64 256 plain alone",
    "forward 128x64 256 plain float32",
    "forward 128x64 256 bias gelu_tanh kept",
    "forward 128x64 256 silu kept",
    f"forward 128x64 128 {LANES} bias gelu",
    "forward 128x32 256 plain",
    f"forward 128x32 256 {FULL}",
    f"forward 128x32 128 {LANES} {FULL}",
    "forward 256x64 128 plain",
    f"forward 256x64 128 {FULL}",
    f"forward 256x64 64 {LANES} {FULL}",
    f"forward 256x32 128 {FULL}",
    f"forward 64x64 256 {FULL}",
    f"forward 64x64 128 {LANES} {FULL}",
    f"forward 64x32 256 {FULL}",
    "forward 128x8 256 plain",
    f"forward 128x8 256 {FULL}",
    f"forward 128x8 128 {LANES} {FULL}",
    f"forward 128x16 256 {FULL}",
    *(f"dx 128x64 {rows}" for rows in ("256", "128", f"128 {LANES}", f"64 {LANES}")),
    *(f"dx {kind} 256" for kind in ("128x32", "256x64", "64x64")),
    *(f"dw 128x64 {rows}" for rows in ("256", "256 split", "256 alone", "128", "128 split")),
    "dw 128x32 256",
    "dw 128x32 256 split",
    "dw 256x64 128",
    "dw 256x32 128 split",
    "dw 64x64 256",
    "dw 64x32 256 split",
    "dw 128x8 256",
    "dw 128x8 256 split",
    "dw 128x16 256 split",
)
FOLDER = pathlib.Path(__file__).parent


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]:
    """Returns (function, its abstract arguments on an H100, the tile) of a configuration.

    'alone' is a thread block without a cluster.
    """
    kind, form, rows, *words = name.split()
    width, chunk = map(int, form.split("x"))
    case = Case(1024, 512, 1536, 50, tile=width, chunk=chunk)
    activation: Any = next((word for word in words if word in ("gelu", "gelu_tanh", "silu")), None)
    spec = Spec(activation, "float32" if "float32" in words else "bfloat16", "kept" in words)
    tile = _tile(kind, int(rows), words, case.abstract, spec)
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())
    args = arguments(kind, case, case.abstract, "bias" in words)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    return kernel(kind, tile, spec), abstract, dataclasses.asdict(tile)


def _tile(kind: str, rows: int, words: list[str], pattern: Pattern, spec: Spec) -> Any:
    cluster = 1 if "alone" in words else 2
    if kind == "dw":
        tile = Tile(rows, pattern.tile, cluster=cluster, splits=4 if "split" in words else 1)
        return hopper_weights.fitted(tile, pattern.unit)
    tile = Tile(rows, pattern.tile, cluster=cluster, pingpong=LANES in words)
    return hopper.fitted(tile, hopper.shape_of(pattern, kind == "dx"), spec)


def arguments(kind: str, case: Case, pattern: Pattern, bias: bool = False) -> tuple[Any, ...]:
    """Shapes of a kernel's operands, and the pattern."""
    P, S = pattern.columns.size, pattern.chunks.size
    x = jax.ShapeDtypeStruct((case.M, case.K), jnp.bfloat16)
    dz = jax.ShapeDtypeStruct((case.M, P), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((S, case.chunk, case.tile), jnp.bfloat16)
    bias_P = jax.ShapeDtypeStruct((P,), jnp.float32) if bias else None
    return {
        "forward": (x, slots, bias_P, pattern),
        "dx": (dz, slots, pattern),
        "dw": (x, dz, pattern),
    }[kind]


def kernel(kind: str, tile: Any, spec: Spec, interpret: bool = False) -> Callable[..., Any]:
    """Returns the kernel as a function of the operands that `arguments` makes."""
    named = {"tile": tile, "interpret": interpret}
    if kind == "forward":
        return functools.partial(hopper.forward, spec=spec, **named)
    return functools.partial(hopper.gradient if kind == "dx" else hopper_weights.weights, **named)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernel."""
    file = "hopper_weights.py" if name.startswith("dw") else "hopper.py"
    return FOLDER / file, *FILES
