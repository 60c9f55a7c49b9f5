"""Tiles of logits and rows of a warpgroup, for all attention kernels on Hopper.

Attention over packed tokens and attention over pages compute their logits from the same products,
in the registers of a warpgroup and with base-2 exponents. Their loops over keys differ.

Legend: as attention/hopper_forward.py.
"""

import math
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.cards import ROWS
from pallas_kernels.hopper.epilogue import WGMMA
from pallas_kernels.hopper.memory import swizzled

LOG2E = math.log2(math.e)


def staging(shape: tuple[int, ...], dtype, interpret: bool) -> Any:
    """Returns memory for the left operand of an interpreted `multiply_into`; a GPU needs none."""
    return swizzled(shape, dtype) if interpret else plgpu.SMEM(shape[:-2], jnp.int32)


def product(lefts, rights, shape: tuple[int, int], meanwhile=lambda: None):
    """Returns the sum of left right^T over pieces of the columns, all in shared memory.

    meanwhile: runs before the wait for the result.
    """

    def run(acc_ref):
        for left, right in zip(lefts, rights, strict=True):
            plgpu.wgmma(acc_ref, left, right.transpose((1, 0)))
        meanwhile()
        return acc_ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def row_vector(ref, start):
    """Returns 64 values, one for each row of a wgmma result."""
    return plgpu.load(ref.at[pl.ds(start, ROWS)], layout=WGMMA.reduce(1), optimized=False)


def by_row(x, shape):
    """Spreads one value a row over the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def logits(s, key, position, slope, scale: float, softcap: float | None):
    """Returns (base-2 logits before the mask from s = q k; the natural ones' derivative by s).

    key, own: int32 like s; own None: no ALiBi.
    """
    change = scale
    if softcap is None:
        s = s * (scale * LOG2E)
    else:
        bounded = jnp.tanh(s * (scale / softcap))
        s, change = bounded * (softcap * LOG2E), scale * (1 - bounded * bounded)
    if position is not None:
        s -= slope * jnp.abs(position - key).astype(jnp.float32)
    return s, change
