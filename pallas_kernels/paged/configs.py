"""Every tile of the paged kernel that is shipped, and its deviceless compile.

A configuration is a step that decodes or that has a piece of a prompt, at a head width with the
tile that `heuristic` gives; 'all' has a window, a soft cap and sinks. How many sequences there are,
how long they are and what their pages hold is data. The kernel that adds up parts comes with each.
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
from pallas_kernels.attention.reference import Spec
from pallas_kernels.paged import passes
from pallas_kernels.paged import tile as tiles
from pallas_kernels.paged.reference import Pages

CONFIGS = (
    *(f"{kind} d{width}" for kind in ("decode", "chunk") for width in tiles.WIDTHS),
    *(f"{kind} d{width} all" for kind in ("decode", "chunk") for width in tiles.WIDTHS),
    *(f"{kind} d{width} int8 all" for kind in ("decode", "chunk") for width in tiles.SMALL_WIDTHS),
    *(f"{kind} d128 float8_e4m3fn all" for kind in ("decode", "chunk")),
    *(f"decode d128 {word}" for word in ("alone", "float16", "page8", "page128")),
)
FOLDER = pathlib.Path(__file__).parent
FILES = ("hopper.py", "combine.py", "plan.py", "tile.py", "passes.py", "../hopper/logits.py")
SEQUENCES = 64


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]:
    """Returns (function, its abstract arguments on an H100, the tile) of a configuration."""
    kind, width, *words = name.split()
    tokens, K, group = SEQUENCES if kind == "decode" else 512, int(width[1:]), 4
    H, G = (2, 2) if "alone" in words else (8, 8 // group)
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())

    def array(*shape: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    dtype = jnp.float16 if "float16" in words else jnp.bfloat16
    small = [word for word in words if word in ("int8", "float8_e4m3fn")]
    page = next((int(word[4:]) for word in words if word.startswith("page")), 16)
    shape = 1024, page, G, K
    keys = array(*shape, dtype=jnp.dtype(small[0]) if small else dtype)
    scale = array(*shape[:3], dtype=jnp.float32) if small else None
    one = array(SEQUENCES, dtype=jnp.int32)
    table = array(SEQUENCES, 4096 // page, dtype=jnp.int32)
    pages = Pages(keys, keys, scale, scale, table, one, one, one)
    everything = "all" in words
    sinks = array(H, dtype=jnp.float32) if everything else None
    q = array(tokens, H, K, dtype=dtype)
    tile = tiles.heuristic(tiles.shape_of(q, pages), tokens, SEQUENCES)
    run = functools.partial(
        passes.forward,
        tile=tile,
        spec=Spec(K**-0.5, 30.0 if everything else None),
        window=(1023, 0) if everything else None,
    )
    return run, (q, pages, sinks), dataclasses.asdict(tile)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernels."""
    return tuple(FOLDER / file for file in FILES)
