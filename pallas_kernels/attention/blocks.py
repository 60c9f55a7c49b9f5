"""Tables of tiles, slopes and tiles for short segments, for both passes of packed attention.

Legend: as hopper_forward.py.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.cards import ROWS

WARPGROUPS = 2
BLOCK_Q = WARPGROUPS * ROWS


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
    """Pads the token axis to the next multiple; the added rows are dead."""
    widths = [(0, -n % multiple if i == axis else 0) for i, n in enumerate(x.shape)]
    return jnp.pad(x, widths)


def block_table(spans: jax.Array, per_block: int) -> jax.Array:
    """(C, 2 + 4 per_block): the tiles a thread block loads, then each warpgroup's span among them.

    spans: from `ranges.visits`. per_block: how many of them a thread block has.
    """
    spans = jnp.pad(spans, ((0, -spans.shape[0] % per_block), (0, 0))).reshape(-1, per_block, 4)
    empty = spans[..., 0] >= spans[..., 3]
    first = jnp.where(empty, jnp.iinfo(jnp.int32).max, spans[..., 0]).min(1)
    last = jnp.where(empty, 0, spans[..., 3]).max(1)
    first = jnp.minimum(first, last)
    spans = jnp.where(empty[..., None], first[:, None, None], spans)
    return jnp.concatenate(
        [first[:, None], last[:, None], spans.reshape(-1, 4 * per_block)], axis=1
    )
