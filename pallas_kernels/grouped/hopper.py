"""The grouped product for Hopper: one kernel, whatever the number of groups.

On the engine of pallas_kernels/hopper. A tile is a visit (up to block_m rows a block, of one group;
hopper/visits.py made the table from the sizes) and block_n columns, in an order that snakes so that
what runs together shares rows and weights in L2. A compute warpgroup of whose 64 rows none is the
visit's multiplies nothing. What is stored are those of the 64 rows that are the visit's, by TMA in
copies of 64, 32, .., 1 rows.

The rows before `lo` and from `hi` on are other groups': computed, and not stored. Every row past
the last group is stored as 0 at the end, by all. Rows are read at multiples of 8, the tiling's;
where a tile reaches over an edge TMA reads zeros (PTX ISA, tensor copies: out-of-bound access), and
nothing is stored over an edge. Sizes that do not fit the swizzled tiling are copied first.

Legend: M rows, G groups, K contracted, N columns; a, b the operands as they are stored.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import work
from pallas_kernels.grouped.tiling import OP, PIECE, candidates, check
from pallas_kernels.hopper import engine, visits
from pallas_kernels.hopper.cards import ROWS, SMS
from pallas_kernels.hopper.epilogue import Staging, store_rows
from pallas_kernels.hopper.memory import PIECE as ALIGN
from pallas_kernels.hopper.memory import by_row, number, pad, span, up, varying_as
from pallas_kernels.hopper.tiles import Tile
from pallas_kernels.hopper.visits import GROUP, HI, LO, ROW


def heuristic(M: int, N: int, K: int, groups: int) -> Tile:
    """The tile where nothing was measured: the least time when the groups are equally large."""

    def seconds(tile: Tile) -> float:
        return visits.seconds(tile, visits.visited(tile, M, N, groups), K)

    return min(candidates(), key=seconds)


def product(
    a_MK: jax.Array,
    b: jax.Array,
    sizes_G: jax.Array,
    *,
    transpose: bool,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> jax.Array:
    """Returns what reference.product does, for bf16 and f16. blocks: thread blocks, one an SM."""
    check(tile)
    (M, K), N = a_MK.shape, b.shape[1 if transpose else 2]
    whole_M = max(tile.block_m, up(M, ALIGN))
    whole_N, whole_K = max(tile.block_n, up(N, PIECE)), max(tile.block_k, up(K, PIECE))
    steps = visits.visits(sizes_G, M, tile.block_m * tile.cluster, ALIGN)
    clusters = min(blocks // tile.cluster, steps.table.shape[0] * pl.cdiv(whole_N, tile.block_n))
    right = (whole_N, whole_K) if transpose else (whole_K, whole_N)
    shared = engine.buffers(tile, a_MK.dtype, a_MK.dtype, turned_b=transpose)
    results = engine.launch(
        functools.partial(_body, transpose=transpose, tile=tile, clusters=clusters),
        {
            "table": steps.table,
            "totals": jnp.stack([steps.count, steps.end]),
            "a": pad(a_MK, (whole_M, whole_K)),
            "b": pad(b, (b.shape[0], *right)),
        },
        {"y": jax.ShapeDtypeStruct((M, whole_N), a_MK.dtype)},
        engine.scratch(shared, staged=by_row) | engine.barriers(tile),
        work=work.product(OP, M, N, K),
        tile=tile,
        clusters=clusters,
        interpret=interpret,
    )
    return varying_as(a_MK, results["y"][:, :N])


def _body(gmem, *, transpose, tile, clusters, a_smem, b_smem, y_smem, ready, free):
    table, y = gmem["table"], gmem["y"]
    (whole_M, whole_K), whole_N = gmem["a"].shape, y.shape[1]
    count, end = (number(gmem["totals"], i) for i in range(2))
    across = pl.cdiv(whole_N, tile.block_n)
    block, rank = lax.axis_index("block"), lax.axis_index("cluster")
    product = engine.Product(tile, ready, free, pl.cdiv(whole_K, tile.block_k), block, clusters)
    staging = Staging((y_smem,), product.warpgroup)

    def place_of(i):
        """Visit, this block's first row, first column."""
        visit, n = plgpu.planar_snake(i, (count, across), 0, tile.snake)
        row = number(table, visit, ROW) + rank * tile.block_m
        return visit, row, pl.multiple_of(n * tile.block_n, tile.block_n)

    def rows_of(i):
        """This warpgroup's first row, first column, the visit's rows."""
        visit, row, n = place_of(i)
        return row + product.warpgroup * ROWS, n, number(table, visit, LO), number(table, visit, HI)

    def live(i):
        row, _, lo, hi = rows_of(i)
        return (row < hi) & (row + ROWS > lo)

    def multiply(_, s, buffer, acc):
        right = b_smem.at[buffer].T if transpose else b_smem.at[buffer]
        plgpu.wgmma(acc, a_smem.at[buffer, product.part_rows], right)

    def finish(i, sums):
        # Read again: that leaves more registers to the product.
        row, n, lo, hi = rows_of(i)

        def store(p, left, columns):
            across = pl.ds(n + left, PIECE)
            staging.put(
                p, (sums[:, columns],), lambda piece: store_rows(piece, y, row, across, lo, hi)
            )

        for p, (_, left, _, columns) in enumerate(staging.pieces((ROWS, tile.block_n))):
            inside = (row < hi) & (row + ROWS > lo) & (n + left < whole_N)
            pl.when(inside)(functools.partial(store, p, left, columns))

    def compute():
        product.compute(count * across, multiply, finish, sums=[(ROWS, tile.block_n)], live=live)
        worker = (block * tile.cluster + rank) * tile.warpgroups + product.warpgroup
        staging.clear(y, end, worker, clusters * tile.cluster * tile.warpgroups)

    def begin_load(i):
        visit, row, n = place_of(i)
        # A second block may lie below all rows; what it reads it does not store.
        row = pl.multiple_of(jnp.where(row < whole_M, row, 0), ALIGN)
        return number(table, visit, GROUP), pl.ds(row, tile.block_m), pl.ds(n, tile.block_n)

    def load(place, s, buffer, barrier):
        (group, m, n), k = place, span(s, tile.block_k)
        right = gmem["b"].at[(group, n, k) if transpose else (group, k, n)]
        plgpu.copy_gmem_to_smem(gmem["a"].at[m, k], a_smem.at[buffer], barrier)
        plgpu.copy_gmem_to_smem(right, b_smem.at[buffer], barrier, collective_axes=tile.multicast)

    product.specialise(compute, lambda: product.produce(count * across, begin_load, load))
