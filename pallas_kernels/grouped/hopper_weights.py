"""The gradient of a grouped product's weights for Hopper: a^T b over each group's rows.

As hopper.py, but a tile is block_m x block_n of ONE group's result, and its steps go through the
group's rows: their number differs from group to group, so the ring's place is counted along. Every
tile has one owner, which adds up all of its rows in their order: the result is the same each time.

Rows are read at multiples of 8, so a group's first step may begin, and its last end, with rows of
its neighbours, or past the last group with anything. In those steps the compute warpgroups set
these rows to 0 in shared memory before the product: each its columns of a, and all together b, for
0 times NaN is NaN. So values that are not finite reach no group but their own.

    producer      wait free[s] | TMA a rows, b rows -> ready[s]
    each compute  wait ready[s] | edge: a = 0, b = 0, all wait for all | acc += a^T b
    epilogue      64 x 64 at a time by TMA; a group without rows has acc = 0

Legend: M rows, G groups, K and N the widths of a and b: rows and columns of a result.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper_forward import number, varying_as
from pallas_kernels.gemm.hopper import SMS
from pallas_kernels.grouped import visits
from pallas_kernels.grouped.hopper import (
    ALIGN,
    PIECE,
    ROWS,
    SLOTS,
    Tile,
    call,
    candidates,
    check,
    pad,
    seconds_of,
    turns,
    up,
)

ROW, LO, HI = range(3)  # columns of the table of groups
WGMMA = plgpu.Layout.WGMMA


def heuristic(M: int, N: int, K: int, groups: int) -> Tile:
    """The tile where nothing was measured: the least time when the groups are equally large."""

    def seconds(tile: Tile) -> float:
        count = pl.cdiv(K, tile.block_m * tile.cluster) * tile.cluster * pl.cdiv(N, tile.block_n)
        # A group begins anywhere: half a step of it is another's, on average.
        return seconds_of(tile, groups * count, M / groups + 0.5 * tile.block_k)

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
    """As reference.weights, for bf16 and f16. blocks: thread blocks, one an SM."""
    check(tile)
    (M, K), N, G = a_MK.shape, b_MN.shape[1], sizes_G.shape[0]
    whole_M = max(tile.block_k, up(M, ALIGN))
    whole_K, whole_N = max(tile.block_m, up(K, PIECE)), max(tile.block_n, up(N, PIECE))
    a_MK, b_MN = pad(a_MK, (whole_M, whole_K)), pad(b_MN, (whole_M, whole_N))
    lo_G, hi_G = visits.bounds(sizes_G, M)
    table = jnp.stack([lo_G // ALIGN * ALIGN, lo_G, hi_G], axis=1)
    grid = (pl.cdiv(whole_K, tile.block_m * tile.cluster), pl.cdiv(whole_N, tile.block_n))
    clusters = min(blocks // tile.cluster, G * grid[0] * grid[1])
    buffers = tile.buffers | {"a_smem": ((tile.stages, tile.block_k, tile.block_m), a_MK.dtype)}
    together = plgpu.Barrier(num_arrivals=tile.warpgroups)
    w_GKN = call(
        functools.partial(_body, tile=tile, grid=grid, clusters=clusters),
        jax.ShapeDtypeStruct((G, whole_K, whole_N), a_MK.dtype), tile, buffers, clusters,
        "grouped_weights", interpret, together=together,
    )(table, a_MK, b_MN)  # fmt: skip
    return varying_as(a_MK, w_GKN[:, :K, :N])


def _body(
    table, a_gmem, b_gmem, w_gmem, *, a_smem, b_smem, y_smem, ready, free, together,
    tile, grid, clusters,
):  # fmt: skip
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    rank, stages = lax.axis_index("cluster"), jnp.int32(tile.stages)
    G, whole_K, whole_N = w_gmem.shape
    each = grid[0] * grid[1]
    own_tiles = turns(G * each, block, clusters)

    def tile_of(j):
        """Group, this block's first row and column of the result, the group's rows, its steps."""
        job = block + j * clusters
        group = lax.div(job, jnp.int32(each))
        m, n = plgpu.planar_snake(lax.rem(job, jnp.int32(each)), grid, 0, tile.snake)
        m = pl.multiple_of((m * tile.cluster + rank) * tile.block_m, tile.block_m)
        row, lo, hi = (number(table, group, column) for column in (ROW, LO, HI))
        steps = jnp.where(lo < hi, lax.div(hi - row + tile.block_k - 1, jnp.int32(tile.block_k)), 0)
        return group, m, pl.multiple_of(n * tile.block_n, tile.block_n), row, lo, hi, steps

    @pl.when(warpgroup < tile.warpgroups)
    def _compute():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(240, action="increase")
        own = pl.ds(warpgroup * ROWS, ROWS)

        def clean(smem, slot, columns, first, last):
            """Sets all rows but first <= r < last of 64 columns of a buffer to 0."""
            for down in range(0, tile.block_k, ROWS):
                here = (slot, pl.ds(down, ROWS), columns)
                value = plgpu.load(smem.at[here], layout=WGMMA)
                row = plgpu.broadcasted_iota(jnp.int32, (ROWS, PIECE), 0, layout=WGMMA) + down
                kept = (row >= first) & (row < last)
                smem[here] = jnp.where(kept, value, jnp.zeros((), value.dtype))

        def step(i, acc, first, row, lo, hi, masked):
            slot, at = lax.rem(i, stages), row + (i - first) * tile.block_k
            plgpu.barrier_wait(ready.at[slot])
            if masked:
                clean(a_smem, slot, own, lo - at, hi - at)
                for p in range(tile.block_n // PIECE):
                    piece = pl.ds(p * PIECE, PIECE)
                    mine = warpgroup == p % tile.warpgroups
                    pl.when(mine)(functools.partial(clean, b_smem, slot, piece, lo - at, hi - at))
                plgpu.commit_smem()
                plgpu.barrier_arrive(together)
                plgpu.barrier_wait(together)

            plgpu.wgmma(acc, a_smem.at[slot, :, own].T, b_smem.at[slot])
            plgpu.wgmma_wait(1)

            @pl.when(i > first)
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(i - 1, stages)])

        def product(first, row, lo, hi, steps, acc):
            # Only the first and the last step may have rows of other groups.
            last = first + steps
            head = jnp.minimum(first + (row < lo).astype(jnp.int32), last)
            odd = lax.rem(hi - row, jnp.int32(tile.block_k)) != 0
            tail = jnp.maximum(last - odd.astype(jnp.int32), head)
            for begin, stop, masked in (
                (first, head, True),
                (head, tail, False),
                (tail, last, True),
            ):
                pl.loop(begin, stop)(
                    lambda i, masked=masked: step(i, acc, first, row, lo, hi, masked)
                )
            plgpu.wgmma_wait(0)

            @pl.when(steps > 0)
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(last - 1, stages)])

            return acc[...]

        @pl.loop(0, own_tiles, init_carry=jnp.int32(0))
        def _(j, first):
            group, m, n, row, lo, hi, steps = tile_of(j)
            m += warpgroup * ROWS
            acc = pl.run_scoped(
                functools.partial(product, first, row, lo, hi, steps),
                plgpu.ACC((ROWS, tile.block_n), jnp.float32),
            )

            def store(p):
                # What was stored SLOTS pieces ago has been read, or all of the tile before.
                plgpu.wait_smem_to_gmem(SLOTS - 1 if p else 0, wait_read_only=True)
                slot = p % SLOTS
                y_smem[warpgroup, slot] = acc[:, p * PIECE : (p + 1) * PIECE].astype(y_smem.dtype)
                plgpu.commit_smem()
                here = (group, pl.ds(m, ROWS), pl.ds(n + p * PIECE, PIECE))
                plgpu.copy_smem_to_gmem(y_smem.at[warpgroup, slot], w_gmem.at[here])

            for p in range(tile.block_n // PIECE):
                inside = (m < whole_K) & (n + p * PIECE < whole_N)
                pl.when(inside)(functools.partial(store, p))
            return first + steps

        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == tile.warpgroups)
    def _produce():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, own_tiles, init_carry=jnp.int32(0))
        def total(j, first):
            _, m, n, row, _, _, steps = tile_of(j)
            m, n = pl.ds(m, tile.block_m), pl.ds(n, tile.block_n)

            @pl.loop(first, first + steps)
            def _(i):
                slot = lax.rem(i, stages)
                k = pl.ds(pl.multiple_of(row + (i - first) * tile.block_k, ALIGN), tile.block_k)
                pl.when(i >= tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                shared = "cluster" if tile.cluster > 1 else None
                plgpu.copy_gmem_to_smem(a_gmem.at[k, m], a_smem.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(
                    b_gmem.at[k, n], b_smem.at[slot], ready.at[slot], collective_axes=shared
                )

            return first + steps

        # Every phase of every barrier is observed before the block ends.
        @pl.loop(jnp.maximum(0, total - tile.stages), total)
        def _(i):
            plgpu.barrier_wait(free.at[lax.rem(i, stages)])
