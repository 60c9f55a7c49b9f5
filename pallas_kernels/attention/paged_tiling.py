"""Which tile the paged kernel takes: a measured one where a table has it, else the heuristic's."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuned
from pallas_kernels.attention import paged_tile
from pallas_kernels.attention.paged_reference import Pages
from pallas_kernels.attention.paged_tile import OP, Shape, Tile


def key(shape: Shape, tokens: int, segments: int, room: int) -> dict[str, Any]:
    """Returns the key of a table's row (tuned.py). tokens: T. segments: B. room: its positions.

    Contexts, window and sinks are data. The width is a word: a kernel of another head width is
    another program.
    """
    return {
        "dtype": jnp.dtype(shape.dtype).name,
        "pages": jnp.dtype(shape.kept).name,
        "width": str(shape.width),
        "group": shape.group,
        "heads": shape.heads,
        "page": shape.page,
        "tokens": tokens,
        "segments": segments,
        "room": room,
    }


def choose(q_THK: jax.Array, pages: Pages) -> tuple[dict | None, Tile]:
    """Returns (the row for `dispatch.choose`, the kernel's tile).

    A row's tile that does not fit here (the nearest row may be of another group) is passed over.
    """
    shape, (B, M) = paged_tile.shape_of(q_THK, pages), pages.table_BM.shape
    row = tuned.find(OP, key(shape, q_THK.shape[0], B, M * shape.page))
    measured = tuned.tile(row)
    if measured and _legal(tile := Tile(**measured), shape):
        return row, tile
    return row, paged_tile.heuristic(shape, q_THK.shape[0], B)


def candidates(shape: Shape, tokens: int, segments: int) -> list[Tile]:
    """The heuristic's tile, and those of other rows and keys with as many stages as fit."""
    first = paged_tile.heuristic(shape, tokens, segments)
    half = max(64 // shape.group, 1)  # one warpgroup's rows
    found = [first]
    for rows, keys in itertools.product({first.tokens, min(half, tokens)}, (128, 64)):
        tile = paged_tile.fitted(Tile(rows, keys, 8), shape)
        found += [tile] if _legal(tile, shape) else []
    return list(dict.fromkeys(found))


def _legal(tile: Tile, shape: Shape) -> bool:
    try:
        paged_tile.check(tile, shape)
    except ValueError:
        return False
    return True
