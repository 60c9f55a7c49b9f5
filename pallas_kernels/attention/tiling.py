"""Chooses the kernels' tiles: measured ones if a table has them, else the heuristics'.

A table (tuned.py) has rows of the ops FORWARD and BACKWARD. Their keys leave out causal order,
windows and the lengths but the longest: those are data to the kernels, and change how many tiles
are visited far more than which tile is best.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.attention import hopper_backward, hopper_forward

FORWARD, BACKWARD = "varlen_attention_forward", "varlen_attention_backward"
BLOCKS, STAGES = (32, 64, 128), (8, 6, 4, 3, 2)


def key(dtype: Any, width: int, group: int, tokens: int, longest: int | None) -> dict[str, Any]:
    """Returns the key of FORWARD's rows; those of BACKWARD have `deterministic` as well.

    group: query heads of a key-value head. tokens: T. longest: rows of the longest segment. The
    width is a word: a kernel of another head width is another program.
    """
    return {
        "dtype": jnp.dtype(dtype).name,
        "width": str(width),
        "group": group,
        "longest": longest or tokens,
        "tokens": tokens,
    }


def choose(
    dtype: Any, width: int, group: int, tokens: int, longest: int | None, deterministic: bool
) -> tuple[list[dict | None], hopper_forward.Tile, hopper_backward.Tile]:
    """Returns (the rows of both passes for `dispatch.choose`, the kernels' tiles).

    A row's tile that does not fit here (the nearest row may be of another group) is passed over.
    """
    about = key(dtype, width, group, tokens, longest)
    rows = [
        tuned.find(FORWARD, about),
        tuned.find(BACKWARD, about | {"deterministic": deterministic}),
    ]

    def measured(row: dict | None, make: Callable[..., Any], check: Callable) -> Any:
        tile = tuned.tile(row)
        return _legal(make(**tile), check) if tile else None

    forward = measured(
        rows[0],
        hopper_forward.Tile,
        lambda tile: hopper_forward.check(tile, width, group, dtype),
    )
    backward = measured(
        rows[1], hopper_backward.Tile, lambda tile: hopper_backward.check(tile, width, dtype)
    )
    return (
        rows,
        forward or hopper_forward.heuristic(width, group, longest),
        backward or hopper_backward.heuristic(width, longest, deterministic),
    )


def forward_tiles(
    dtype: Any, width: int, group: int, longest: int | None
) -> list[hopper_forward.Tile]:
    """The heuristic's tile, and for every block the legal one with the most tiles in flight.

    Each with and without the overlap of softmax and products in a warpgroup.
    Shared memory that a tile leaves free serves nobody: registers let an SM have one thread block.
    """
    candidates = [hopper_forward.heuristic(width, group, longest)]
    grouped = {1, math.gcd(group, hopper_forward.HEADS)}
    for block, heads, overlap in itertools.product(BLOCKS, grouped, (True, False)):
        tiles = (hopper_forward.Tile(block, stages, heads, overlap) for stages in STAGES)
        candidates += _first(tiles, lambda tile: hopper_forward.check(tile, width, group, dtype))
    return list(dict.fromkeys(candidates))


def backward_tiles(
    dtype: Any, width: int, longest: int | None, deterministic: bool
) -> list[hopper_backward.Tile]:
    """Returns tiles as `forward_tiles` does, for both kernels, or the fused one where allowed."""
    candidates = [hopper_backward.heuristic(width, longest, deterministic)]
    if not deterministic:
        candidates.append(hopper_backward.heuristic(width, longest))
    for dq, dkv in itertools.product(BLOCKS, BLOCKS):
        stages = sorted(itertools.product(STAGES, STAGES), key=sum, reverse=True)
        tiles = (hopper_backward.Tile(dq, a, dkv, b) for a, b in stages)
        candidates += _first(tiles, lambda tile: hopper_backward.check(tile, width, dtype))
    return list(dict.fromkeys(candidates))


def _first(tiles: Iterator[Any], check: Callable[[Any], None]) -> list[Any]:
    return [tile for tile in tiles if _legal(tile, check)][:1]


def _legal(tile: Any, check: Callable[[Any], None]) -> Any:
    try:
        check(tile)
    except ValueError:
        return None
    return tile
