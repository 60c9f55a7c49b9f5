"""Which rows each step of a grouped product takes, computed from the group sizes on the device.

A step visits up to `block` rows of ONE group. Steps start at a row that is a multiple of `align`:
TMA at any other row reads other rows without an error. So the first step of a group may begin with
rows of the group before, and its last may end with rows of the next, which its `lo` and `hi` leave
out. The table's length is the worst case of any sizes: a program has one shape, however the rows
fall, and its work is proportional to the rows; the number of groups is in the table only.

Legend: G groups, V visits.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.tiles import Tile

GROUP, ROW, LO, HI = range(4)  # columns of a table


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visits:
    """Steps in the order of their rows.

    table: int32 (V, 4): group, first row, lo, hi; rows lo <= row < hi of the group are visited.
    count: int32 (), steps that visit a row; those after them have lo == hi. end: int32 (), rows in
    all groups.
    """

    table: jax.Array
    count: jax.Array
    end: jax.Array


def bounds(sizes_G: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns int32 starts_G and ends_G; what lies past the last of `rows` is cut off."""
    sizes_G = jnp.clip(sizes_G.astype(jnp.int32), 0, rows)
    ends_G = jnp.cumsum(sizes_G, dtype=jnp.int32)
    # The sum may become more than int32 holds, but not where it first passes the rows.
    past_G = jax.lax.cummax((ends_G > rows).astype(jnp.int32)) > 0
    ends_G = jnp.where(past_G, rows, ends_G)
    return jnp.concatenate([jnp.zeros_like(ends_G[:1]), ends_G[:-1]]), ends_G


def capacity(rows: int, groups: int, block: int, align: int) -> int:
    """Returns V: steps that suffice for any sizes.

    A group of s > 0 rows needs at most (s + align - 1 + block - 1) / block, the first, which begins
    at row 0, (s + block - 1) / block.
    """
    filled = min(groups, rows)
    return max(rows + filled * (block - 1) + (filled - 1) * (align - 1), 0) // block


def visits(sizes_G: jax.Array, rows: int, block: int, align: int) -> Visits:
    """Returns the steps over `rows` rows, of which the first sum(sizes_G) are in groups."""
    starts_G, ends_G = bounds(sizes_G, rows)
    first_G = starts_G // align * align
    steps_G = jnp.where(starts_G < ends_G, -(-(ends_G - first_G) // block), 0)
    after_G = jnp.cumsum(steps_G, dtype=jnp.int32)
    step_V = jnp.arange(capacity(rows, sizes_G.shape[0], block, align), dtype=jnp.int32)
    # How many groups end at or before a step; comparing with all of them is one fused pass.
    group_V = (step_V[:, None] >= after_G[None]).sum(1, dtype=jnp.int32)
    live_V = group_V < sizes_G.shape[0]
    group_V = jnp.minimum(group_V, sizes_G.shape[0] - 1)
    row_V = first_G[group_V] + (step_V - (after_G - steps_G)[group_V]) * block
    lo_V = jnp.maximum(row_V, starts_G[group_V])
    hi_V = jnp.minimum(row_V + block, ends_G[group_V])
    table = jnp.stack([group_V, row_V, lo_V, hi_V], axis=1)
    return Visits(jnp.where(live_V[:, None], table, 0), after_G[-1], ends_G[-1])


def visited(tile: Tile, rows: int, columns: int, groups: int) -> float:
    """Returns an estimate of the number of output tiles of equally large groups.

    A group begins anywhere: half a tile of it is another's, on average.
    """
    steps = groups * (-(-rows // groups) / (tile.block_m * tile.cluster) + 0.5)
    return max(steps, 1) * tile.cluster * -(-columns // tile.block_n)


def seconds(tile: Tile, count: float, contracted: float) -> float:
    """Returns an estimate of the seconds of `count` output tiles, which need not fill a wave."""
    return max(count / SMS, 1) * sum(tile.seconds(contracted))
