"""What the fused kernels share: the product's two roles, and the blocks that only copy.

The product is that of gemm/hopper.py, persistent and warp-specialised, whose tiles come in the
order of schedule.py and whose operands and results a kernel names tile by tile:

    producer      begin(tile): wait for its flags | for k: wait free[s] | TMA a, b -> ready[s]
    each compute  wait ready[s], acc += a b (wgmma, one left in flight), arrive free[s - 1]
    epilogue      finish(tile, acc): 64 rows and 128 bytes at a time through SMEM, TMA

A communication block moves pieces of contiguous rows through a ring of buffers, by bulk copies
without a descriptor, so that a peer may be any traced number:

    loads         piece q + slots - 2 is on its way while piece q is stored
    a chunk's end all its stores done (waited for) | finish: the flag
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tiles
from pallas_kernels.attention.hopper_forward import ring as swizzled
from pallas_kernels.collective.peers import Peers
from pallas_kernels.gemm import hopper

RING_BYTES = 32 * 1024  # of a piece, at most (chosen: six on their way hide 2 us at 100 GB/s)
STORING = 2  # pieces whose stores may still be read from the ring
Int = Any  # traced int32


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a fused kernel runs.

    tile: of the product, as gemm's; not ping-pong. comm: thread blocks that only copy, in whole
    clusters; none where the epilogue sends. chunk: rows that travel under one flag.
    rotated: tiles begin with the rank's own rows, or those of the next; False: with row 0, to see
    what the rotation is worth.
    """

    tile: hopper.Tile
    comm: int
    chunk: int
    rotated: bool = True

    def step(self, i: Int, first: Int, ranks: int, each: int) -> Int:
        """The step that the order takes i-th: `each` tiles a rank, rank `first` is the first."""
        if self.rotated:
            return i
        rank = lax.rem(lax.div(i, jnp.int32(each)) + ranks - first, jnp.int32(ranks))
        return rank * each + lax.rem(i, jnp.int32(each))


def launch(op: str, plan: Plan, peers: Peers, blocks: int, copying: bool = True) -> dict[str, Any]:
    """Returns how a kernel is launched: the clusters, of all its ranks, that run at one time.

    copying: whether the kernel has communication blocks.
    Raises: ValueError where a plan breaks the rules of the product, leaves no block for it, or has
      none that communicates where the product would wait for it.
    """
    tile = plan.tile
    hopper.check(tile)
    if tile.pingpong:
        raise ValueError(f"{op}: {tile} shares its tiles; ping-pong is not for fused kernels")
    clusters = blocks // tile.cluster // peers.copies
    if (plan.comm > 0) != (copying and not peers.ready):
        raise ValueError(f"{op}: comm={plan.comm} of {plan}: some block must copy, or none can")
    if plan.comm < 0 or plan.comm % tile.cluster or plan.comm // tile.cluster >= clusters:
        raise ValueError(
            f"{op}: comm={plan.comm} of {clusters * tile.cluster} thread blocks must be whole "
            f"clusters of {tile.cluster} and leave one for the product"
        )
    tiles.check_multiple(op, "chunk", plan.chunk, hopper.PIECE)
    return {
        "grid": (clusters * peers.copies,),
        "grid_names": ("block",),
        "cluster": (tile.cluster,),
        "cluster_names": ("cluster",),
        "num_threads": tile.warpgroups + 1,
        "thread_name": "warpgroup",
        "kernel_name": op,
    }


def piece_shape(width: int, itemsize: int) -> tuple[int, int]:
    """Returns (rows, columns) of the contiguous piece that one copy moves; width: of a row.

    Rows divide 8, and so every chunk's rows; where a row is too long, its columns are divided.
    """
    for rows in (8, 4, 2, 1):
        if rows * width * itemsize <= RING_BYTES:
            return rows, width
    most = RING_BYTES // itemsize
    return 1, next(n for n in range(most - most % 64, 0, -64) if width % n == 0)


def buffers(tile: hopper.Tile, dtype: Any, out_dtype: Any, turned: bool = False) -> tiles.Buffers:
    """Returns the shared memory of the product, as (shape, type). turned: b is stored (N, K)."""
    b = (tile.block_n, tile.block_k) if turned else (tile.block_k, tile.block_n)
    columns = hopper.SWIZZLE // jnp.dtype(out_dtype).itemsize
    return {
        "a_smem": ((tile.stages, tile.block_m, tile.block_k), dtype),
        "b_smem": ((tile.stages, *b), dtype),
        "y_smem": ((tile.warpgroups, 2, tiles.ROWS, columns), jnp.dtype(out_dtype)),
    }


def scratch(
    plan: Plan, dtype: Any, out_dtype: Any, turned: bool, width: int, piece_dtype: Any
) -> dict[str, Any]:
    """Returns shared memory and barriers: the product's buffers, or the ring of pieces.

    width: of the rows that communication blocks copy, of piece_dtype.
    """
    tile = plan.tile
    product = buffers(tile, dtype, out_dtype, turned)
    tiles.check_shared("fused product", product)
    smem = tuple(swizzled(*buffer) for buffer in product.values())
    free = {"num_arrivals": tile.warpgroups, "num_barriers": tile.stages}
    found = {
        "smem": smem,
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
        "free": plgpu.ClusterBarrier(collective_axes=("cluster",), **free)
        if tile.cluster > 1
        else plgpu.Barrier(**free),
    }
    if plan.comm:
        ring, barriers = relay_scratch(width, piece_dtype, tiles.shared_bytes(product))
        found |= {"smem": plgpu.RefUnion(smem, (ring,)), "arrived": barriers}
    return found


def relay_scratch(width: int, dtype: Any, most: int) -> tuple[Any, Any]:
    """Returns a ring of pieces in at most `most` bytes of shared memory, and its barriers."""
    piece = piece_shape(width, jnp.dtype(dtype).itemsize)
    slots = min(16, most // tiles.shared_bytes({"piece": (piece, dtype)}))
    return plgpu.SMEM((slots, *piece), dtype), plgpu.Barrier(num_barriers=slots)


@dataclasses.dataclass(frozen=True)
class Product:
    """The roles of the thread blocks that compute. steps: tiles of K. turned: b is (N, K)."""

    tile: hopper.Tile
    steps: int
    turned: bool
    a_smem: Any
    b_smem: Any
    y_smem: Any
    ready: Any
    free: Any

    def _slot(self, i: Int) -> Int:
        return lax.rem(i, jnp.int32(self.tile.stages))

    def compute(self, count: Int, finish: Callable[[Int, Any], None]) -> None:
        """A compute warpgroup: `count` tiles; finish(j, sums of its rows) stores tile j."""
        tile, steps = self.tile, self.steps
        own = pl.ds(lax.axis_index("warpgroup") * tile.rows, tile.rows)

        def step(i, acc):
            slot = self._slot(i)
            plgpu.barrier_wait(self.ready.at[slot])
            right = self.b_smem.at[slot]
            plgpu.wgmma(acc, self.a_smem.at[slot, own], right.T if self.turned else right)

        def product(first, acc):
            step(first, acc)

            @pl.loop(first + 1, first + steps)
            def _(i):
                step(i, acc)
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(self.free.at[self._slot(i - 1)])

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(self.free.at[self._slot(first + steps - 1)])
            return acc[...]

        @pl.loop(0, count)
        def _(j):
            shape = (tile.rows, tile.block_n)
            finish(j, pl.run_scoped(functools.partial(product, j * steps), plgpu.ACC(shape)))

    def store(
        self, acc: Any, value: Callable[[Any, int], Any], copy: Callable[[Any, int, int], None]
    ) -> None:
        """Stores a warpgroup's sums, piece by piece.

        value(sums, right): what is stored of those from column `right` of the tile on.
        copy(piece in SMEM, down, right): one group of copies (TMA) of the piece there.
        """
        warpgroup = lax.axis_index("warpgroup")
        slots, height, columns = self.y_smem.shape[1:]
        across = self.tile.block_n // columns
        for p in range(self.tile.rows // height * across):
            down, right = p // across * height, p % across * columns
            y = value(acc[down : down + height, right : right + columns], right)
            # What was stored `slots` pieces ago has been read, or all of the tile before.
            plgpu.wait_smem_to_gmem(slots - 1 if p else 0, wait_read_only=True)
            self.y_smem[warpgroup, p % slots] = y.astype(self.y_smem.dtype)
            plgpu.commit_smem()
            copy(self.y_smem.at[warpgroup, p % slots], down, right)

    def produce(
        self,
        count: Int,
        begin: Callable[[Int], Any],
        load: Callable[[Any, Any, Any, Any, Any], None],
    ) -> None:
        """The producer warpgroup: begin(j) says where tile j lies once its rows are there.

        load(place, step, a's buffer, b's buffer, barrier): starts both copies of a tile of K; b's
        is for the whole cluster.
        """
        stages = self.tile.stages

        @pl.loop(0, count)
        def _(j):
            place = begin(j)

            @pl.loop(0, self.steps)
            def _(s):
                i = j * self.steps + s
                slot = self._slot(i)
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(self.free.at[slot]))
                load(place, s, self.a_smem.at[slot], self.b_smem.at[slot], self.ready.at[slot])

        # Every phase of every barrier is observed before the block ends.
        total = count * self.steps

        @pl.loop(jnp.maximum(0, total - stages), total)
        def _(i):
            plgpu.barrier_wait(self.free.at[self._slot(i)])


def relay(
    ring: Any,
    arrived: Any,
    total: Int,
    pieces: Int,
    *,
    source: Callable[[Int], Any],
    target: Callable[[Int], Any],
    pace: Callable[[Int], None],
    finish: Callable[[Int], None],
    live: Callable[[Int], Any] = lambda q: q >= 0,
) -> None:
    """A warpgroup copies pieces 0 .. total - 1, `pieces` a chunk, from source(q) to target(q).

    pace(q): before piece q is stored. finish(n): after all of chunk n is stored. live(q): false
    for pieces past a chunk's rows, which come last in it.
    """
    slots = ring.shape[0]
    ahead = slots - STORING

    def fetch(q):
        @pl.when((q < total) & live(q))
        def _():
            slot = lax.rem(q, jnp.int32(slots))
            plgpu.copy_gmem_to_smem(
                source(q), ring.at[slot], arrived.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )  # fmt: skip

    pl.loop(0, ahead)(fetch)

    @pl.loop(0, total)
    def _(q):
        @pl.when(live(q))
        def _():
            slot = lax.rem(q, jnp.int32(slots))
            plgpu.barrier_wait(arrived.at[slot])
            pace(q)
            plgpu.copy_smem_to_gmem(ring.at[slot], target(q))

        @pl.when(lax.rem(q, pieces) == pieces - 1)
        def _():
            plgpu.wait_smem_to_gmem(0)
            finish(lax.div(q, pieces))

        # The slot that is filled now was stored from STORING pieces ago.
        plgpu.wait_smem_to_gmem(STORING, wait_read_only=True)
        fetch(q + ahead)


def span(step: Int, size: int) -> Any:
    """The indices of a tile: size * step and what follows."""
    return pl.ds(pl.multiple_of(step * size, size), size)


def share(total: Int, first: Int, stride: int) -> Int:
    """Returns how many of first, first + stride, ... are below total."""
    return jnp.maximum(lax.div(total - first + stride - 1, jnp.int32(stride)), 0)
