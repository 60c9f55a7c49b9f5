"""Paged attention on Hopper: XLA's tables and gathers around the two kernels.

XLA makes the plan and gathers the queries of each tile; the kernel of hopper.py computes sums, that
of combine.py adds up the parts of items that were cut, and XLA gathers the results of each token.

Legend: as hopper.py.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.attention.ranges import Window
from pallas_kernels.attention.reference import LOWEST, Spec
from pallas_kernels.hopper.cards import ROWS, SMS
from pallas_kernels.hopper.logits import LOG2E
from pallas_kernels.paged import hopper
from pallas_kernels.paged.combine import combine
from pallas_kernels.paged.plan import Tiles, cut, plan
from pallas_kernels.paged.reference import Pages
from pallas_kernels.paged.tile import Shape, Tile, check, shape_of

FEW = 3
LEAST = 2  # steps of a thread block at least (chosen: a part less is a slot less to add up)


def forward(
    q_THK: jax.Array,
    pages: Pages,
    sinks_H: jax.Array | None,
    *,
    spec: Spec,
    window: Window | None,
    tile: Tile,
    interpret: bool = False,
    blocks: int | None = None,
) -> jax.Array:
    """Returns what reference.forward does, for what `tile.misfits` lets pass.

    blocks: thread blocks; None: one an SM, of the interpreter, where each takes a second, FEW.
    Raises: ValueError for a tile that does not fit.
    """
    (T, H, K), shape = q_THK.shape, shape_of(q_THK, pages, window)
    check(tile, shape)
    blocks = blocks or (FEW if interpret else SMS)
    tiles = cut(T, pages.start_B, pages.count_B, pages.context_B, tile.tokens, window)
    positions = pages.table_BM.shape[1] * shape.page
    seen = positions if shape.left is None else min(positions, shape.left + 1)
    spec = dataclasses.replace(spec, pairs=T * seen)
    work = plan(tiles, shape.heads, tile.keys, blocks, LEAST)
    rows = shape.rows(tile)
    q_rows = _tiled(q_THK, tiles, shape.heads, rows)
    out, sums, lse = hopper.sums(
        q_rows,
        pages,
        _sinks(sinks_H, shape, tile),
        work,
        shape=shape,
        tile=tile,
        spec=spec,
        interpret=interpret,
    )
    cut_out = combine(sums, lse, work, rows=rows, dtype=q_THK.dtype, interpret=interpret)

    # Of each token and key-value head: its tile, and the item's job where it was cut.
    tile_T1 = jnp.maximum(tiles.tile_T, 0)[:, None]
    item_TG = tile_T1 * shape.heads + jnp.arange(shape.heads, dtype=jnp.int32)[None]
    job_TG = work.job_I[item_TG]
    each = (-1, rows, K)
    group_R = jnp.arange(shape.group, dtype=jnp.int32)
    here_TGR = tiles.place_T[:, None, None] * shape.group + group_R[None, None]
    whole_TGRK = out.reshape(each)[item_TG[..., None], here_TGR]
    parts_TGRK = cut_out.reshape(each)[jnp.maximum(job_TG, 0)[..., None], here_TGR]
    found_TGRK = jnp.where(job_TG[..., None, None] < 0, whole_TGRK, parts_TGRK)
    live_T = tiles.tile_T >= 0
    found_TGRK = jnp.where(live_T[:, None, None, None], found_TGRK, jnp.zeros((), q_THK.dtype))
    return found_TGRK.reshape(T, H, K)


def _tiled(q_THK: jax.Array, tiles: Tiles, heads: int, rows: int) -> jax.Array:
    """The queries of each item, (I E, K), token by token; rows of nobody are 0."""
    (T, H, K), (X, Q) = q_THK.shape, tiles.row_XQ.shape
    live_XQ = tiles.lo_XQ < tiles.hi_XQ
    q_XQGRK = q_THK.reshape(T, heads, H // heads, K)[tiles.row_XQ]
    q_XQGRK = jnp.where(live_XQ[..., None, None, None], q_XQGRK, jnp.zeros((), q_THK.dtype))
    q_XGEK = q_XQGRK.swapaxes(1, 2).reshape(X, heads, Q * H // heads, K)
    q_XGEK = jnp.pad(q_XGEK, ((0, 0), (0, 0), (0, rows - q_XGEK.shape[2]), (0, 0)))
    return q_XGEK.reshape(-1, K)


def _sinks(sinks_H: jax.Array | None, shape: Shape, tile: Tile) -> jax.Array | None:
    """Returns the sink of each row of an item, base 2."""
    if sinks_H is None:
        return None
    sinks_GR = jnp.maximum(sinks_H * LOG2E, LOWEST).reshape(shape.heads, shape.group)
    sinks_GE = jnp.tile(sinks_GR, (1, tile.tokens))
    return jnp.pad(sinks_GE, ((0, 0), (0, shape.warpgroups(tile) * ROWS - sinks_GE.shape[1])))
