"""What both passes of attention on Hopper share: rows of a warpgroup, tables, tiles of logits.

Legend: as hopper_forward.py.
"""

import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.reference import Spec
from pallas_kernels.hopper.memory import swizzled

LOG2E = math.log2(math.e)
WARPGROUPS = 2
ROWS = 64  # of a warpgroup: the M of every wgmma instruction
BLOCK_Q = WARPGROUPS * ROWS
WGMMA = plgpu.Layout.WGMMA


def short_rows(longest: int | None, most: int) -> int:
    """Rows of a tile for segments of at most `longest` rows: `most` where they are long.

    Short segments visit many pairs in vain: at a longest of 64, tiles of 32 keys visit 3.2 times
    the useful pairs, of 128 keys 5.3; at 256, of 64 keys 1.7, of 128 keys 2.1 (README.md).
    """
    if longest is None or longest > 256:
        return most
    return min(most, 32 if longest <= 128 else 64)


def row_slopes(slopes_H: jax.Array | None, H: int, heads: int) -> jax.Array:
    """(H / heads, 64): the slope of each row of a warpgroup."""
    slopes_H = jnp.zeros(H, jnp.float32) if slopes_H is None else slopes_H
    return jnp.repeat(slopes_H.reshape(-1, heads), ROWS // heads, axis=1)


def pad(x: jax.Array, multiple: int, axis: int = 0) -> jax.Array:
    """Whole multiples along the token axis; added rows are dead."""
    widths = [(0, -n % multiple if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths)


def staging(shape: tuple[int, ...], dtype, interpret: bool) -> Any:
    """Returns memory for the left operand of an interpreted `multiply_into`; a GPU needs none."""
    return swizzled(shape, dtype) if interpret else plgpu.SMEM(shape[:-2], jnp.int32)


def block_table(spans: jax.Array, own: int) -> jax.Array:
    """(C, 2 + 4 own): the tiles a thread block loads, then each warpgroup's span among them.

    spans: of `ranges.visits`, `own` to a thread block.
    """
    spans = jnp.pad(spans, ((0, -spans.shape[0] % own), (0, 0))).reshape(-1, own, 4)
    empty = spans[..., 0] >= spans[..., 3]
    first = jnp.where(empty, jnp.iinfo(jnp.int32).max, spans[..., 0]).min(1)
    last = jnp.where(empty, 0, spans[..., 3]).max(1)
    first = jnp.minimum(first, last)
    spans = jnp.where(empty[..., None], first[:, None, None], spans)
    return jnp.concatenate([first[:, None], last[:, None], spans.reshape(-1, 4 * own)], axis=1)


def product(lefts, rights, shape: tuple[int, int], meanwhile=lambda: None):
    """The sum of left right^T over pieces of the columns, all in shared memory.

    meanwhile: runs before the wait for the result.
    """

    def run(acc_ref):
        for left, right in zip(lefts, rights, strict=True):
            plgpu.wgmma(acc_ref, left, right.transpose((1, 0)))
        meanwhile()
        return acc_ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))


def row_vector(ref, start):
    """64 values, one a row of a wgmma result."""
    return plgpu.load(ref.at[pl.ds(start, ROWS)], layout=WGMMA.reduce(1), optimized=False)


def by_row(x, shape):
    """Spreads one value a row over the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def logits(s, key, own, slope, spec: Spec):
    """Returns (base-2 logits before the mask from s = q k; the natural ones' derivative by s).

    key, own: int32 like s; own None: no ALiBi.
    """
    change = spec.scale
    if spec.softcap is None:
        s = s * (spec.scale * LOG2E)
    else:
        bounded = jnp.tanh(s * (spec.scale / spec.softcap))
        s, change = bounded * (spec.softcap * LOG2E), spec.scale * (1 - bounded * bounded)
    if own is not None:
        s -= slope * jnp.abs(own - key).astype(jnp.float32)
    return s, change
