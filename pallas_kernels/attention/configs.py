"""Every tile of the Hopper kernels that is shipped, and its deviceless compile.

A configuration is a kernel at a head width with the tile that `heuristic` gives, plain and with all
that adds registers (softcap, ALiBi); 'medium' and 'short' are the tiles for segments of at most 256
and 128 rows, 'grouped' those for several heads of a group. Causal order and windows are data: one
program serves them.
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
from pallas_kernels.attention import hopper_backward, hopper_forward
from pallas_kernels.attention.ranges import Rows
from pallas_kernels.attention.reference import Spec

WIDTHS = (64, 96, 128, 256)
CONFIGS = (
    *(f"{kind} d{width}" for kind in ("forward", "backward") for width in WIDTHS),
    *(f"{kind} d{width} softcap alibi" for kind in ("forward", "backward") for width in WIDTHS),
    *(f"forward d{width} medium" for width in (64, 96, 128)),
    *(f"{kind} d{width} short" for kind in ("forward", "backward") for width in WIDTHS),
    *(f"forward d{width} short grouped softcap alibi" for width in (64, 128)),
    *(f"fused d{width}" for width in hopper_backward.FUSED_WIDTHS),
    *(f"fused d{width} softcap alibi" for width in hopper_backward.FUSED_WIDTHS),
)
FOLDER = pathlib.Path(__file__).parent


def program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, int]]:
    """Returns (function, its abstract arguments on an H100, the tile) of a configuration."""
    kind, width = name.split()[0], int(name.split()[1][1:])
    T, H, G = 1024, 8, 2
    sharding = NamedSharding(Mesh(np.array(aot.devices(1, 1)), "x"), PartitionSpec())

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rows = Rows(*(array(T, dtype=jnp.int32),) * 3)
    slopes = array(H, dtype=jnp.float32) if "alibi" in name else None
    spec = Spec(width**-0.5, 30.0 if "softcap" in name else None)
    q, k, sums = array(T, H, width), array(T, G, width), array(H, T, dtype=jnp.float32)
    longest = 128 if "short" in name else 256 if "medium" in name else None
    if kind == "forward":
        tile = hopper_forward.heuristic(width, H // G if "grouped" in name else 1, longest)
        run = functools.partial(hopper_forward.forward, spec=spec, tile=tile)
        return run, (q, k, k, rows, slopes), dataclasses.asdict(tile)
    tile = hopper_backward.heuristic(width, longest, deterministic=kind == "backward")
    run = functools.partial(hopper_backward.backward, spec=spec, tile=tile)
    return run, (q, k, k, rows, slopes, sums, sums, q), dataclasses.asdict(tile)


def sources(name: str) -> tuple[pathlib.Path, ...]:
    """The files that make a configuration's kernels."""
    kernel = "hopper_forward.py" if name.startswith("forward") else "hopper_backward.py"
    return tuple(FOLDER / file for file in ("blocks.py", "../hopper/logits.py", kernel))
