"""How few rows lie in the registers of a warpgroup, in the paged kernels."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.hopper.memory import PIECE


def few_rows(width: int) -> Any:
    """(8, width): two rows a warp, half a warp a row, neighbours of a vector.

    width: a multiple of 32.
    """
    vector = 4 if width % 64 == 0 else 2
    columns = 16 * vector
    tiling = plgpu.Tiling(((PIECE, columns), (2, columns), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
