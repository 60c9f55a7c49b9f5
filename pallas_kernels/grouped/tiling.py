"""The tiles of both grouped kernels: the candidates, their shared memory, and the checks."""

import jax.numpy as jnp

from pallas_kernels.hopper import engine, tiles
from pallas_kernels.hopper.cards import ROWS
from pallas_kernels.hopper.tiles import BLOCKS, Tile

OP = "grouped_matmul"
PIECE = 64  # 16-bit columns of a piece of the tiling: 128 bytes


def candidates() -> list[Tile]:
    """Returns the tiles for the heuristics and the tuner, each with the most stages that fit."""
    every = (Tile(m, n, warpgroups=m // ROWS, cluster=c) for m, n in BLOCKS for c in (2, 1))
    return [tiles.fitted(tile, buffers) for tile in every]


def buffers(tile: Tile) -> tiles.Buffers:
    """Shared memory; operands and results have 16 bits."""
    return engine.buffers(tile, jnp.bfloat16, jnp.bfloat16)


def check(tile: Tile) -> None:
    """Raises: ValueError where a tile breaks the rules of wgmma, of registers or of memory."""
    most = ROWS * tile.warpgroups  # a piece of the epilogue has all rows of a warpgroup
    tiles.check_multiple(OP, "block_m", tile.block_m, most, most)
    tiles.check(OP, tile)
    tiles.check_shared(OP, buffers(tile))
