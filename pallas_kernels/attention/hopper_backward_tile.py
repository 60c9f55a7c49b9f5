"""The tiles of the backward kernels, and what of them fits in a thread block of a Hopper GPU."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_kernels.attention.blocks import ROWS, WARPGROUPS
from pallas_kernels.hopper import tiles as limits
from pallas_kernels.hopper.cards import COMPUTE_REGISTERS

FUSED_WIDTHS = (64, 96, 128)


@dataclasses.dataclass(frozen=True)
class Tile:
    """block: rows of a tile of either ring, of keys in dq, of queries in dkv.

    stages: tiles in flight in each. fused: one kernel, of block_dkv and stages_dkv, for all.
    """

    block_dq: int
    stages_dq: int
    block_dkv: int
    stages_dkv: int
    fused: bool = False


def dq_buffers(tile: Tile, width: int, dtype: Any) -> limits.Buffers:
    """The shared memory of a thread block of dq."""
    own = ((WARPGROUPS, ROWS, width), dtype)
    tiles = ((tile.stages_dq, tile.block_dq, width), dtype)
    return {"q_smem": own, "dout_smem": own, "k_smem": tiles, "v_smem": tiles}


def dkv_buffers(tile: Tile, width: int, dtype: Any) -> limits.Buffers:
    """The shared memory of a thread block of dkv or of the fused kernel."""
    pieces = pieces_of(width)
    own = ((WARPGROUPS // pieces, pieces, ROWS, width // pieces), dtype)
    tiles = ((tile.stages_dkv, pieces, tile.block_dkv, width // pieces), dtype)
    found: dict[str, tuple[tuple[int, ...], Any]] = {
        "k_smem": own,
        "v_smem": own,
        "q_smem": tiles,
        "dout_smem": tiles,
        "sum_smem": ((tile.stages_dkv, 2, tile.block_dkv), jnp.float32),
        "row_smem": ((tile.stages_dkv, 3, tile.block_dkv), jnp.int32),
    }
    if tile.fused:
        found["ds_smem"] = ((2, WARPGROUPS, ROWS, tile.block_dkv), dtype)
        found["dq_smem"] = ((tile.block_dkv, width), jnp.float32)
    return found


def pieces_of(width: int) -> int:
    """How many warpgroups share key rows, each with a piece of the columns."""
    return 1 if width <= 128 else WARPGROUPS


def fits_beside(tile: Tile, width: int, softcap: bool) -> bool:
    """Whether registers of dkv hold the product of V and dO while the weights are computed.

    The derivative of soft capping is one tile more (width 128: 268 bytes spill).
    """
    sums, logits_shape = (ROWS, width // pieces_of(width)), (ROWS, tile.block_dkv)
    needed = limits.accumulator_registers(sums, sums, *[logits_shape] * (3 if softcap else 2))
    return needed + 32 <= COMPUTE_REGISTERS[WARPGROUPS]


def check(tile: Tile, width: int, dtype: Any) -> None:
    """Raises: ValueError for tiles that the hardware does not take."""
    op = "varlen_attention backward"
    for name in ("block_dq", "block_dkv"):
        limits.check_multiple(op, name, getattr(tile, name), 32, 256)
    for name in ("stages_dq", "stages_dkv"):
        limits.check_multiple(op, name, getattr(tile, name), 1)
    if tile.fused and (tile.block_dkv != ROWS or width not in FUSED_WIDTHS):
        raise ValueError(
            f"{op}: fused needs block_dkv={ROWS}, got {tile.block_dkv}, and a head width of "
            f"{FUSED_WIDTHS}, got {width}"
        )
    # All live at once: sums, the weights and their derivative. What else is live is little.
    if not tile.fused:
        limits.check_shared(f"{op} (dq)", dq_buffers(tile, width, dtype))
        logits_shape = (ROWS, tile.block_dq)
        limits.check_registers(
            f"{op} (dq)", WARPGROUPS, (ROWS, width), logits_shape, logits_shape, spare=32
        )
    limits.check_shared(f"{op} (dkv)", dkv_buffers(tile, width, dtype))
    sums, logits_shape = (ROWS, width // pieces_of(width)), (ROWS, tile.block_dkv)
    limits.check_registers(
        f"{op} (dkv)", WARPGROUPS, sums, sums, logits_shape, logits_shape, spare=32
    )
