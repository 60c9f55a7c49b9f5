"""The gradient of a grouped product's weights for Hopper: a^T b over each group's rows.

On the engine of pallas_kernels/hopper. A tile is block_m x block_n of ONE group's result, and its
steps go through the group's rows: their number differs from group to group. Every tile has one
owner, which adds up all of its rows in their order: the result is the same each time.

Rows are read at multiples of 8, so a group's first step may begin, and its last end, with rows of
its neighbours, or past the last group with anything. In those steps the compute warpgroups set
these rows to 0 in shared memory before the product: each its columns of a, and all together b, for
0 times NaN is NaN. So values that are not finite reach no group but their own.

    each compute  wait ready[s] | edge: a = 0, b = 0, all wait for all | acc += a^T b

A group without rows has acc = 0.

Legend: M rows, G groups, K and N the widths of a and b: rows and columns of a result.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import work
from pallas_kernels.grouped.tiling import PIECE, candidates, check
from pallas_kernels.hopper import engine, visits
from pallas_kernels.hopper.cards import ROWS, SMS
from pallas_kernels.hopper.epilogue import WGMMA, Staging
from pallas_kernels.hopper.memory import PIECE as ALIGN
from pallas_kernels.hopper.memory import by_row, number, pad, up, varying_as
from pallas_kernels.hopper.tiles import Tile

ROW, LO, HI = range(3)  # columns of the table of groups


class Place(NamedTuple):
    """A tile: its group, first row and column of the result, the group's rows, its steps."""

    group: Any
    m: Any
    n: Any
    row: Any
    lo: Any
    hi: Any
    steps: Any


def heuristic(M: int, N: int, K: int, groups: int) -> Tile:
    """The tile where nothing was measured: the least time when the groups are equally large."""

    def seconds(tile: Tile) -> float:
        count = pl.cdiv(K, tile.block_m * tile.cluster) * tile.cluster * pl.cdiv(N, tile.block_n)
        # A group begins anywhere: half a step of it is another's, on average.
        return visits.seconds(tile, groups * count, M / groups + 0.5 * tile.block_k)

    return min(candidates(), key=seconds)


def weights(
    a_MK: jax.Array,
    b_MN: jax.Array,
    sizes_G: jax.Array,
    *,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> jax.Array:
    """Returns what reference.weights does, for bf16 and f16. blocks: thread blocks, one an SM."""
    check(tile)
    (M, K), N, G = a_MK.shape, b_MN.shape[1], sizes_G.shape[0]
    whole_M = max(tile.block_k, up(M, ALIGN))
    whole_K, whole_N = max(tile.block_m, up(K, PIECE)), max(tile.block_n, up(N, PIECE))
    lo_G, hi_G = visits.bounds(sizes_G, M)
    grid = (pl.cdiv(whole_K, tile.block_m * tile.cluster), pl.cdiv(whole_N, tile.block_n))
    clusters = min(blocks // tile.cluster, G * grid[0] * grid[1])
    shared = engine.buffers(tile, a_MK.dtype, a_MK.dtype, turned_a=True)
    results = engine.launch(
        functools.partial(_body, tile=tile, grid=grid, clusters=clusters),
        {
            "table": jnp.stack([lo_G // ALIGN * ALIGN, lo_G, hi_G], axis=1),
            "a": pad(a_MK, (whole_M, whole_K)),
            "b": pad(b_MN, (whole_M, whole_N)),
        },
        {"w": jax.ShapeDtypeStruct((G, whole_K, whole_N), a_MK.dtype)},
        engine.scratch(shared, staged=by_row)
        | engine.barriers(tile)
        | {"together": plgpu.Barrier(num_arrivals=tile.warpgroups)},
        work=work.product("grouped_weights", K, N, M),
        tile=tile,
        clusters=clusters,
        interpret=interpret,
    )
    return varying_as(a_MK, results["w"][:, :K, :N])


def _body(gmem, *, tile, grid, clusters, a_smem, b_smem, y_smem, ready, free, together):
    table, w = gmem["table"], gmem["w"]
    G, whole_K, whole_N = w.shape
    rank, each = lax.axis_index("cluster"), grid[0] * grid[1]
    product = engine.Product(
        tile, ready, free, lambda place: place.steps, lax.axis_index("block"), clusters
    )
    staging = Staging((y_smem,), product.warpgroup)

    def place_of(i):
        group = lax.div(i, jnp.int32(each))
        m, n = plgpu.planar_snake(lax.rem(i, jnp.int32(each)), grid, 0, tile.snake)
        m = pl.multiple_of((m * tile.cluster + rank) * tile.block_m, tile.block_m)
        row, lo, hi = (number(table, group, column) for column in (ROW, LO, HI))
        steps = jnp.where(lo < hi, lax.div(hi - row + tile.block_k - 1, jnp.int32(tile.block_k)), 0)
        n = pl.multiple_of(n * tile.block_n, tile.block_n)
        return Place(group, m, n, row, lo, hi, steps)

    def load(place, s, buffer, barrier):
        m, n = pl.ds(place.m, tile.block_m), pl.ds(place.n, tile.block_n)
        k = pl.ds(pl.multiple_of(place.row + s * tile.block_k, ALIGN), tile.block_k)
        plgpu.copy_gmem_to_smem(gmem["a"].at[k, m], a_smem.at[buffer], barrier)
        plgpu.copy_gmem_to_smem(
            gmem["b"].at[k, n], b_smem.at[buffer], barrier, collective_axes=tile.multicast
        )

    def clean(smem, buffer, columns, first, last):
        """Sets all rows but first <= r < last of 64 columns of a buffer to 0."""
        for down in range(0, tile.block_k, ROWS):
            piece = (buffer, pl.ds(down, ROWS), columns)
            value = plgpu.load(smem.at[piece], layout=WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, (ROWS, PIECE), 0, layout=WGMMA) + down
            live = (row >= first) & (row < last)
            smem[piece] = jnp.where(live, value, jnp.zeros((), value.dtype))

    def multiply(place, s, buffer, acc):
        at = place.row + s * tile.block_k
        first, last = place.lo - at, place.hi - at

        # Only the first and the last step may have rows of other groups.
        @pl.when((first > 0) | (last < tile.block_k))
        def _():
            clean(a_smem, buffer, product.part_rows, first, last)
            for p in range(tile.block_n // PIECE):
                assigned = product.warpgroup == p % tile.warpgroups
                piece = pl.ds(p * PIECE, PIECE)
                pl.when(assigned)(functools.partial(clean, b_smem, buffer, piece, first, last))
            plgpu.commit_smem()
            plgpu.barrier_arrive(together)
            plgpu.barrier_wait(together)

        plgpu.wgmma(acc, a_smem.at[buffer, :, product.part_rows].T, b_smem.at[buffer])

    def finish(place, sums):
        m = place.m + product.warpgroup * ROWS

        def store(p, left, columns):
            target = place.group, pl.ds(m, ROWS), pl.ds(place.n + left, PIECE)
            staging.put(
                p, (sums[:, columns],), lambda piece: plgpu.copy_smem_to_gmem(piece, w.at[target])
            )

        for p, (_, left, _, columns) in enumerate(staging.pieces((ROWS, tile.block_n))):
            inside = (m < whole_K) & (place.n + left < whole_N)
            pl.when(inside)(functools.partial(store, p, left, columns))

    total, shape = G * each, (ROWS, tile.block_n)
    product.specialise(
        lambda: product.compute(total, multiply, finish, sums=[shape], begin=place_of),
        lambda: product.produce(total, place_of, load),
    )
