"""The grouped product for Hopper: persistent, warp-specialised, whatever the number of groups.

A cluster of thread blocks takes output tiles in turn: a visit (up to block_m rows a block, of one
group; visits.py made the table from the sizes) and block_n columns, in an order that snakes so that
what runs together shares rows and weights in L2. A producer warpgroup only starts copies (TMA),
over all tiles without a pause; each compute warpgroup has 64 rows of a tile:

    producer      wait free[s] | TMA a rows, b[group] -> ready[s]       s = 0 .. stages - 1, round
    each compute  wait ready[s], acc += a b (wgmma, one left in flight), arrive free[s - 1]
                  64 rows without one of the visit's: only the barriers
    epilogue      for 64 columns at a time: SMEM, then those of the 64 rows that are the visit's,
                  by TMA in pieces of 64, 32, .., 1 rows; meanwhile the producer fills the ring

The rows before `lo` and from `hi` on are other groups': computed, and not stored. Every row past
the last group is stored as 0 at the end, by all. Rows are read at multiples of 8, the tiling's;
where a tile reaches over an edge TMA reads zeros (PTX ISA, tensor copies: out-of-bound access), and
nothing is stored over an edge. Sizes that do not fit the swizzled tiling are copied first.

Legend: M rows, G groups, K contracted, N columns; a, b the operands as they are stored.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret as interpreter
from pallas_kernels import tiles
from pallas_kernels.attention.hopper_forward import number, ring, varying_as
from pallas_kernels.gemm.hopper import SM_EPILOGUE, SM_FLOPS, SM_L2_BYTES, SMS
from pallas_kernels.grouped import visits

OP = "grouped_matmul"
ROWS = tiles.ROWS  # of a compute warpgroup
ALIGN = 8  # rows of a piece of the tiling
PIECE = 64  # 16-bit columns of it: 128 bytes
SLOTS = 2  # buffers of an epilogue's 64 columns
BLOCKS = ((128, 256), (128, 192), (128, 128), (64, 256), (64, 128), (64, 64))
GROUP, ROW, LO, HI = range(4)  # columns of a table of visits


@dataclasses.dataclass(frozen=True)
class Tile:
    """block_m, block_n, block_k: of a thread block. stages: tiles of a and b in flight.

    cluster: thread blocks, one below the other, that read b once for all (TMA multicast).
    snake: clusters' visits that are taken before the next column of tiles.
    """

    block_m: int
    block_n: int
    block_k: int = 64
    stages: int = 6
    cluster: int = 1
    snake: int = 8

    @property
    def warpgroups(self) -> int:
        """That compute."""
        return self.block_m // ROWS

    @property
    def buffers(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shared memory of 16-bit operands and results, as (shape, type)."""
        return {
            "a_smem": ((self.stages, self.block_m, self.block_k), jnp.bfloat16),
            "b_smem": ((self.stages, self.block_k, self.block_n), jnp.bfloat16),
            "y_smem": ((self.warpgroups, SLOTS, ROWS, PIECE), jnp.bfloat16),
        }


def heuristic(M: int, N: int, K: int, groups: int) -> Tile:
    """The tile where nothing was measured: the least time when the groups are equally large."""

    def seconds(tile: Tile) -> float:
        rows = -(-M // groups)
        # A group begins anywhere: half a tile of it is another's, on average.
        steps = groups * (rows / (tile.block_m * tile.cluster) + 0.5)
        count = max(steps, 1) * tile.cluster * pl.cdiv(N, tile.block_n)
        return seconds_of(tile, count, K)

    return min(candidates(), key=seconds)


def seconds_of(tile: Tile, count: float, contracted: float) -> float:
    """An estimate of `count` output tiles: waves of them, tensor cores and L2."""
    flops = 2 * tile.block_m * tile.block_n * tile.block_k
    loaded = 2 * tile.block_k * (tile.block_m + tile.block_n / tile.cluster)
    step = max(flops / SM_FLOPS, loaded / SM_L2_BYTES)
    finish = tile.block_m * tile.block_n / SM_EPILOGUE[0]
    # Tiles of different groups end at different times: waves are not whole.
    waves = max(count / SMS, 1)
    return waves * (contracted / tile.block_k * step + finish)


def candidates() -> list[Tile]:
    """What the heuristic and the tuner choose from, each with the most stages that fit."""
    return [fitted(Tile(m, n, cluster=cluster)) for m, n in BLOCKS for cluster in (2, 1)]


def fitted(tile: Tile) -> Tile:
    """The same tile with no more stages than fit."""

    def fits(stages: int) -> bool:
        buffers = dataclasses.replace(tile, stages=stages).buffers
        return tiles.shared_bytes(buffers) <= tiles.SHARED_BYTES - tiles.RESERVED_BYTES

    stages = next((n for n in range(tile.stages, 2, -1) if fits(n)), 2)
    return dataclasses.replace(tile, stages=stages)


def check(tile: Tile) -> None:
    """Raises: ValueError where a tile breaks the rules of wgmma, of registers or of memory."""
    tiles.check_multiple(OP, "block_m", tile.block_m, ROWS, 2 * ROWS)
    tiles.check_multiple(OP, "block_n", tile.block_n, 64, 256)
    tiles.check_multiple(OP, "block_k", tile.block_k, 64, 256)
    if tile.stages < 2 or tile.cluster not in (1, 2):
        raise ValueError(f"{OP}: {tile} needs at least 2 stages, and a cluster of 1 or 2")
    tiles.check_shared(OP, tile.buffers)


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
    """As reference.product, for bf16 and f16. blocks: thread blocks, one an SM."""
    check(tile)
    (M, K), N = a_MK.shape, b.shape[1 if transpose else 2]
    whole_M = max(tile.block_m, up(M, ALIGN))
    whole_N, whole_K = max(tile.block_n, up(N, PIECE)), max(tile.block_k, up(K, PIECE))
    a_MK = pad(a_MK, (whole_M, whole_K))
    b = pad(b, (b.shape[0], *((whole_N, whole_K) if transpose else (whole_K, whole_N))))
    steps = visits.visits(sizes_G, M, tile.block_m * tile.cluster, ALIGN)
    clusters = min(blocks // tile.cluster, steps.table.shape[0] * pl.cdiv(whole_N, tile.block_n))
    body = functools.partial(_body, transpose=transpose, tile=tile, clusters=clusters)
    buffers = tile.buffers
    if transpose:
        buffers["b_smem"] = (tile.stages, tile.block_n, tile.block_k), b.dtype
    y_MN = call(
        body, jax.ShapeDtypeStruct((M, whole_N), a_MK.dtype), tile, buffers, clusters, OP, interpret
    )(steps.table, jnp.stack([steps.count, steps.end]), a_MK, b)  # fmt: skip
    return varying_as(a_MK, y_MN[:, :N])


def call(
    body, out_type, tile: Tile, buffers: tiles.Buffers, clusters: int, name: str, interpret: bool,
    **barriers,
):  # fmt: skip
    """A persistent kernel of a tile: its rings and their barriers, a producer warpgroup besides."""
    dtype = out_type.dtype
    scratch = {key: ring(shape, dtype) for key, (shape, _) in buffers.items()}
    # Rows of a piece may be stored from any row on: a tiling of 8 could not be cut there.
    y_tiling = plgpu.TilingTransform((1, PIECE)), plgpu.SwizzleTransform(2 * PIECE)
    scratch["y_smem"] = plgpu.SMEM(buffers["y_smem"][0], dtype, transforms=y_tiling)
    free = {"num_arrivals": tile.warpgroups, "num_barriers": tile.stages}
    scratch |= {
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "free": plgpu.ClusterBarrier(collective_axes=("cluster",), **free)
        if tile.cluster > 1
        else plgpu.Barrier(**free),
    }
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch | barriers,
        grid=(clusters,),
        grid_names=("block",),
        cluster=(tile.cluster,),
        cluster_names=("cluster",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
    )


def up(size: int, multiple: int) -> int:
    """The next multiple."""
    return pl.cdiv(size, multiple) * multiple


def pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """With zeros at the ends; no copy where nothing is missing."""
    return jnp.pad(x, [(0, whole - size) for whole, size in zip(shape, x.shape, strict=True)])


def turns(total, own, all_of: int):
    """How many of `total` jobs are mine when all take them in turn."""
    return lax.div(total - own + all_of - 1, jnp.int32(all_of))


def store_rows(smem, buffer, gmem, row, columns, begin, stop):
    """Starts copies of rows begin <= r < stop of smem[buffer] to gmem[row + r], as one group.

    A copy's size is static: the number of rows is put together from powers of two.
    """
    size = 1 << (min(ROWS, gmem.shape[0]).bit_length() - 1)
    while size:
        some = (stop - begin) & size

        @pl.when(some != 0)
        def _(begin=begin, size=size):
            plgpu.copy_smem_to_gmem(
                smem.at[*buffer, pl.ds(begin, size)], gmem.at[pl.ds(row + begin, size), columns],
                commit_group=False,
            )  # fmt: skip

        begin, size = begin + some, size // 2
    plgpu.commit_smem_to_gmem_group()


def _body(
    table, totals, a_gmem, b_gmem, y_gmem, *, a_smem, b_smem, y_smem, ready, free,
    transpose, tile, clusters,
):  # fmt: skip
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    rank = lax.axis_index("cluster")
    (whole_M, whole_K), (M, whole_N) = a_gmem.shape, y_gmem.shape
    steps, across = pl.cdiv(whole_K, tile.block_k), pl.cdiv(whole_N, tile.block_n)
    count, end = totals[0] + 0, totals[1] + 0
    own_tiles = turns(count * across, block, clusters)

    def tile_of(j):
        """Visit, this block's first row, first column."""
        visit, n = plgpu.planar_snake(block + j * clusters, (count, across), 0, tile.snake)
        row = number(table, visit, ROW) + rank * tile.block_m
        return visit, row, pl.multiple_of(n * tile.block_n, tile.block_n)

    @pl.when(warpgroup < tile.warpgroups)
    def _compute():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(240, action="increase")

        def product(first, live, acc):
            @pl.loop(first, first + jnp.where(live, steps, 0))
            def _(i):
                slot = lax.rem(i, jnp.int32(tile.stages))
                plgpu.barrier_wait(ready.at[slot])
                left = a_smem.at[slot, pl.ds(warpgroup * ROWS, ROWS)]
                plgpu.wgmma(acc, left, b_smem.at[slot].T if transpose else b_smem.at[slot])
                plgpu.wgmma_wait(1)

                @pl.when(i > first)
                def _():
                    plgpu.barrier_arrive(free.at[lax.rem(i - 1, jnp.int32(tile.stages))])

            plgpu.wgmma_wait(0)

            @pl.when(live)
            def _():
                last = first + steps - 1
                plgpu.barrier_arrive(free.at[lax.rem(last, jnp.int32(tile.stages))])

            @pl.loop(first + jnp.where(live, steps, 0), first + steps)
            def _(i):
                slot = lax.rem(i, jnp.int32(tile.stages))
                plgpu.barrier_wait(ready.at[slot])
                plgpu.barrier_arrive(free.at[slot])

            return acc[...]

        @pl.loop(0, own_tiles)
        def _(j):
            visit, row, n = tile_of(j)
            row += warpgroup * ROWS
            begin = jnp.maximum(number(table, visit, LO) - row, 0)
            stop = jnp.minimum(number(table, visit, HI) - row, ROWS)
            live = begin < stop
            acc = pl.run_scoped(
                functools.partial(product, j * steps, live),
                plgpu.ACC((ROWS, tile.block_n), jnp.float32),
            )

            def store(p):
                # What was stored SLOTS pieces ago has been read, or all of the tile before.
                plgpu.wait_smem_to_gmem(SLOTS - 1 if p else 0, wait_read_only=True)
                y_smem[warpgroup, p % SLOTS] = acc[:, p * PIECE : (p + 1) * PIECE].astype(
                    y_smem.dtype
                )
                plgpu.commit_smem()
                columns = pl.ds(n + p * PIECE, PIECE)
                store_rows(y_smem, (warpgroup, p % SLOTS), y_gmem, row, columns, begin, stop)

            for p in range(tile.block_n // PIECE):
                pl.when(live & (n + p * PIECE < whole_N))(functools.partial(store, p))

        plgpu.wait_smem_to_gmem(0)
        y_smem[warpgroup, 0] = plgpu.layout_cast(
            jnp.zeros((ROWS, PIECE), y_smem.dtype), plgpu.Layout.WGMMA
        )
        plgpu.commit_smem()
        worker = (block * tile.cluster + rank) * tile.warpgroups + warpgroup
        columns = whole_N // PIECE
        jobs = pl.cdiv(M - end, ROWS) * columns

        @pl.loop(0, turns(jobs, worker, clusters * tile.cluster * tile.warpgroups))
        def _(j):
            job = worker + j * clusters * tile.cluster * tile.warpgroups
            row = end + lax.div(job, jnp.int32(columns)) * ROWS
            here = pl.ds(lax.rem(job, jnp.int32(columns)) * PIECE, PIECE)
            store_rows(y_smem, (warpgroup, 0), y_gmem, row, here, 0, jnp.minimum(M - row, ROWS))

        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == tile.warpgroups)
    def _produce():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, own_tiles)
        def _(j):
            visit, row, n = tile_of(j)
            group = number(table, visit, GROUP)
            # A second block may lie below all rows; what it reads it does not store.
            row = pl.multiple_of(jnp.where(row < whole_M, row, 0), ALIGN)
            m, n = pl.ds(row, tile.block_m), pl.ds(n, tile.block_n)

            @pl.loop(0, steps)
            def _(s):
                i = j * steps + s
                slot = lax.rem(i, jnp.int32(tile.stages))
                k = pl.ds(pl.multiple_of(s * tile.block_k, tile.block_k), tile.block_k)
                pl.when(i >= tile.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                right = b_gmem.at[(group, n, k) if transpose else (group, k, n)]
                shared = "cluster" if tile.cluster > 1 else None
                plgpu.copy_gmem_to_smem(a_gmem.at[m, k], a_smem.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(
                    right, b_smem.at[slot], ready.at[slot], collective_axes=shared
                )

        # Every phase of every barrier is observed before the block ends.
        total = own_tiles * steps

        @pl.loop(jnp.maximum(0, total - tile.stages), total)
        def _(i):
            plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(tile.stages))])
