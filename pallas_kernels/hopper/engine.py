"""The persistent, warp-specialised product that every product kernel of this package runs on.

A thread block for each SM takes output tiles in turn. A producer warpgroup only starts copies (TMA)
into rings of buffers, over all tiles of its block without a pause. The compute warpgroups share a
tile, each with its rows of it, and one ring; or, in ping-pong, each has every other tile and a ring
of its own, so that one's epilogue hides behind the other's product (CUTLASS' cooperative and
ping-pong kernels):

    producer      begin(tile) | for its steps: wait free[s] | load: TMA -> ready[s]
    each compute  begin(tile) | for its steps: wait ready[s] | multiply: wgmma, one step left in
                  flight | arrive free[s - 1]
    epilogue      finish(tile, sums): piece by piece through shared memory (epilogue.py), while the
                  producer fills the ring for the next tile

A kernel says which tile comes when, how many steps it has, what is loaded and multiplied, and how
it ends; a number of steps may be read from a table, and be 0, as for lists of sparse blocks.

Why not `emit_pipeline_warp_specialized` of jax.experimental.pallas.mosaic_gpu? It pipelines one
product, and was decided against after these trials with jax 0.11.2, lowered for an H100:

- Its ring runs empty after every tile, unless `pipeline_state` joins the pipelines of several
  tiles. With that it takes no number of steps that stages do not divide ("only allowed when the
  number of steps ... is divisible"), and none that is traced ("not supported with dynamic grids"):
  K of 6 blocks in 4 stages, a group's rows and a list of sparse blocks would all pause the copies.
- A step is one copy of each input, whose block an index map names. The chunks of a sparse slot come
  as up to eight copies into one buffer, a fused product chooses among several weights, and has to
  wait for a flag before it copies; an index map can do none of these (read in its source).
- It has one ring; ping-pong has one for each warpgroup, filled in turn by one producer.

With one product of fixed steps it lowers, and would replace `Product.produce` and `_product`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret as interpreter
from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.epilogue import staging_shape
from pallas_kernels.hopper.memory import Int, share, swizzled
from pallas_kernels.hopper.tiles import Tile
from pallas_kernels.work import Work

# Registers of a thread of a compute warpgroup, and of the producer, once the latter has handed its
# own over; the second pair where the producer also waits for flags and copies rows.
REGISTERS, BUSY = (240, 24), (232, 40)
OPERANDS = ("a_smem", "b_smem")


def barriers(tile: Tile, arrivals: int = 2) -> dict[str, Any]:
    """Returns the barriers of a tile's rings. arrivals: copies of a step.

    An arrival is one of each thread of the producer warpgroup, so two copies make 256: Pallas
    starts no copy without (jax 0.11.2), and its own pipelines count in the same way.
    """
    free = {"num_arrivals": tile.warpgroups // tile.rings, "num_barriers": tile.buffers}
    return {
        "ready": plgpu.Barrier(num_arrivals=arrivals, num_barriers=tile.buffers),
        "free": plgpu.ClusterBarrier(collective_axes=("cluster",), **free)
        if tile.cluster > 1
        else plgpu.Barrier(**free),
    }


def buffers(
    tile: Tile, dtype: Any, out_dtype: Any, turned_a: bool = False, turned_b: bool = False
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns the shared memory of operands and results, as (shape, type).

    turned_a: a is stored (K, M). turned_b: b is stored (N, K).
    """
    a, b = (tile.block_m, tile.block_k), (tile.block_k, tile.block_n)
    return {
        "a_smem": ((tile.buffers, *(a[::-1] if turned_a else a)), dtype),
        "b_smem": ((tile.buffers, *(b[::-1] if turned_b else b)), dtype),
        "y_smem": staging_shape(tile.warpgroups, (tile.rows, tile.block_n), out_dtype),
    }


def scratch(
    buffers: tiles.Buffers,
    most: int = 128,
    staged: Callable[[tuple[int, ...], Any], Any] = swizzled,
) -> dict[str, Any]:
    """Returns shared memory: a_smem and b_smem of the rings, the others for pieces of results.

    most: bytes of a swizzle, of which wgmma takes one for both operands. staged: makes the others.
    """
    return {
        name: swizzled(shape, dtype, most) if name in OPERANDS else staged(shape, dtype)
        for name, (shape, dtype) in buffers.items()
    }


def launch(
    body: Callable[..., None],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    *,
    work: Work,
    tile: Tile,
    clusters: int,
    interpret: bool = False,
) -> dict[str, jax.Array]:
    """Runs a persistent kernel: body(arrays in memory by name, scratch by name).

    inputs: those that are None are left out. work: the kernel's name and what it computes.
    clusters: the number of clusters of thread blocks that run at one time.
    """
    operands = {key: value for key, value in inputs.items() if value is not None}
    names = (*operands, *outputs)

    def run(*refs: Any, **scratch: Any) -> None:
        body(dict(zip(names, refs, strict=True)), **scratch)

    kernel = plgpu.kernel(
        run,
        out_type=list(outputs.values()),
        scratch_types=dict(scratch),
        grid=(clusters,),
        grid_names=("block",),
        cluster=(tile.cluster,),
        cluster_names=("cluster",),
        num_threads=tile.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name=work.name,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
    )
    with work.scope(operands.values(), outputs.values()):
        results = kernel(*operands.values())
    return dict(zip(outputs, results, strict=True))


@dataclasses.dataclass(frozen=True)
class Product:
    """The roles of a thread block.

    steps: how many a tile's product has, each block_k of what is contracted; an int, or a function
    of the result of `begin`. first, stride: the tiles of this block's cluster are first, first +
    stride ...
    """

    tile: Tile
    ready: Any
    free: Any
    steps: int | Callable[[Any], Int]
    first: Int
    stride: int

    @property
    def warpgroup(self) -> Int:
        """The number of this warpgroup in its thread block."""
        return lax.axis_index("warpgroup")

    @property
    def part(self) -> Int:
        """The number of the part of a tile that this compute warpgroup has."""
        return 0 if self.tile.pingpong else self.warpgroup

    @property
    def part_rows(self) -> Any:
        """The rows of a tile that are this compute warpgroup's."""
        return pl.ds(self.part * self.tile.rows, self.tile.rows)

    def specialise(
        self,
        compute: Callable[[], None],
        produce: Callable[[], None],
        registers: tuple[int, int] = REGISTERS,
        computes: Any = True,
    ) -> None:
        """Gives each warpgroup its role. computes: whether this block computes."""
        some = self.tile.warpgroups > 1

        @pl.when(computes & (self.warpgroup < self.tile.warpgroups))
        def _compute():
            if some:
                plgpu.set_max_registers(registers[0], action="increase")
            compute()

        @pl.when(computes & (self.warpgroup == self.tile.warpgroups))
        def _produce():
            if some:
                plgpu.set_max_registers(registers[1], action="decrease")
            produce()

    def compute(
        self,
        total: Int,
        multiply: Callable[..., None],
        finish: Callable[..., None],
        *,
        sums: Sequence[tuple[int, int]],
        begin: Callable[[Int], Any] = lambda i: i,
        live: Callable[[Any], Any] | None = None,
    ) -> None:
        """Runs a compute warpgroup over its share of `total` tiles.

        begin(i): returns the place of tile i, which the other functions get. multiply(place, s,
        buffer, *accumulators): one wgmma into each accumulator, from buffer `buffer` of the rings,
        which holds step s. finish(place, *sums): stores the sums. sums: their shapes. live(place):
        false if nothing of the tile is stored, so that nothing is multiplied.
        """
        tile, ring = self.tile, self.warpgroup if self.tile.pingpong else 0

        def one(n, first):
            place = begin(self._tile(ring + n * tile.rings))
            steps = self.steps if isinstance(self.steps, int) else self.steps(place)
            run = functools.partial(
                self._product,
                (ring, first, steps),
                None if live is None else live(place),
                functools.partial(multiply, place),
            )
            finish(place, *pl.run_scoped(run, *(plgpu.ACC(shape) for shape in sums)))
            return first + steps

        self._loop(self._tiles(total, ring), one)
        # What a block's shared memory holds is stored before the block ends.
        plgpu.wait_smem_to_gmem(0)

    def produce(
        self,
        total: Int,
        begin: Callable[[Int], Any],
        load: Callable[[Any, Int, Int, Any], None],
    ) -> None:
        """Runs the producer warpgroup over this block's share of `total` tiles.

        begin(i): as in `compute`; it also waits until the operands of tile i are there. load(place,
        s, buffer, barrier): starts the copies of step s into buffer `buffer` of the rings.
        """
        tile, steps = self.tile, self.steps
        count = self._tiles(total)

        def one(n, begun):
            """begun: the steps that went through each ring before tile n."""
            place, ring = begin(self._tile(n)), lax.rem(n, jnp.int32(tile.rings))
            first = begun[0]
            for r in range(1, tile.rings):
                first = jnp.where(ring == r, begun[r], first)
            some = steps if isinstance(steps, int) else steps(place)

            @pl.loop(0, some)
            def _(s):
                i = first + s
                buffer = self._buffer(ring, i)
                pl.when(i >= tile.stages)(lambda: plgpu.barrier_wait(self.free.at[buffer]))
                load(place, s, buffer, self.ready.at[buffer])

            return tuple(jnp.where(ring == r, first + some, c) for r, c in enumerate(begun))

        if isinstance(steps, int):

            @pl.loop(0, count)
            def _(n):
                one(n, (lax.div(n, jnp.int32(tile.rings)) * steps,) * tile.rings)

            totals = [self._tiles(total, r) * steps for r in range(tile.rings)]
        else:
            totals = pl.loop(0, count, init_carry=(jnp.int32(0),) * tile.rings)(one)
        # Every phase of every barrier is observed before the block ends.
        for r, end in enumerate(totals):

            @pl.loop(jnp.maximum(0, end - tile.stages), end)
            def _(i, r=r):
                plgpu.barrier_wait(self.free.at[self._buffer(r, i)])

    def each(self, total: Int, do: Callable[[Int], None]) -> None:
        """Calls do(i) for each tile i of this block's share of `total` tiles, once more."""
        pl.loop(0, self._tiles(total))(lambda n: do(self._tile(n)))

    def _tile(self, n: Int) -> Int:
        """Returns the number of this block's n-th tile, among all tiles."""
        return self.first + n * self.stride

    def _tiles(self, total: Int, ring: Int | None = None) -> Int:
        """Returns how many of `total` tiles this block has, or how many go through one ring."""
        count = share(total, self.first, self.stride)
        rings = self.tile.rings
        if ring is None or rings == 1:
            return count
        return lax.div(count - ring + rings - 1, jnp.int32(rings))

    def _buffer(self, ring: Int, i: Int) -> Int:
        """Returns the buffer of step i of a ring."""
        slot = lax.rem(i, jnp.int32(self.tile.stages))
        return slot if self.tile.rings == 1 else ring * self.tile.stages + slot

    def _loop(self, count: Int, one: Callable[[Int, Int], Int]) -> None:
        """Runs one(n, first step), which returns the next one's first step."""
        steps = self.steps
        if not isinstance(steps, int):
            pl.loop(0, count, init_carry=jnp.int32(0))(one)
            return

        @pl.loop(0, count)
        def _(n):
            one(n, n * steps)

    def _product(self, where, live, multiply, *accumulators):
        ring, first, steps = where
        fixed = isinstance(steps, int) and live is None
        done = steps if live is None else jnp.where(live, steps, 0)

        def step(i):
            buffer = self._buffer(ring, i)
            plgpu.barrier_wait(self.ready.at[buffer])
            multiply(i - first, buffer, *accumulators)

        def release(i):
            plgpu.barrier_arrive(self.free.at[self._buffer(ring, i)])

        if fixed:
            step(first)

        @pl.loop(first + int(fixed), first + done)
        def _(i):
            step(i)
            plgpu.wgmma_wait(len(accumulators))
            pl.when(fixed or i > first)(lambda: release(i - 1))

        plgpu.wgmma_wait(0)
        pl.when(fixed or done > 0)(lambda: release(first + done - 1))
        if live is not None:
            # What others of the block need passes by.
            @pl.loop(first + done, first + steps)
            def _(i):
                plgpu.barrier_wait(self.ready.at[self._buffer(ring, i)])
                release(i)

        return tuple(accumulator[...] for accumulator in accumulators)
