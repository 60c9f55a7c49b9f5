"""The tile-sparse product for Hopper, and its gradient of x: persistent, warp-specialised.

One kernel for both. The result has blocks of columns, each with a list of (block of a, slot of the
weight): for y its tile's chunks of x; for dx, whose blocks are chunks, the tiles of dy that keep
it. Nothing else is read or multiplied. Lists differ in length, so blocks of columns are taken with
the longest list first, in strips of `snake` clusters of rows that stay in L2; thread blocks take
tiles in turn, and a producer warpgroup starts copies (TMA, by the numbers of the list) over all of
them without a pause. The compute warpgroups share a tile or, in ping-pong, have one each, so that
one's epilogue hides behind the other's product: with few chunks left a tile is mostly epilogue.

    producer      wait free[s] | TMA a rows of block list[i], slot list[i] -> ready[s]
    each compute  wait ready[s], acc += a b (wgmma, one left in flight), arrive free[s - 1]
    epilogue      for pieces of 64 rows and 128 bytes: bias, activation, SMEM, TMA to memory while
                  the next piece is computed; an empty list has acc = 0

Where a tile reaches over an edge TMA reads zeros and writes nothing (PTX ISA, tensor copies:
out-of-bound access), in whole pieces of the swizzled tiling: other sizes are copied first.

Legend: M rows, K contracted, P packed columns, S slots, B blocks of result columns (T tiles or C
chunks).
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
from pallas_kernels.gemm.hopper import SM_EPILOGUE, SM_FLOPS, SM_L2_BYTES, SMS, gelu
from pallas_kernels.gemm.reference import Activation, Spec, activate
from pallas_kernels.tile_sparse.format import Pattern

OP = "tile_sparse_matmul"
ROWS = tiles.ROWS  # of a piece, and of a wgmma instruction
ALIGN = 8  # rows of a piece of the tiling
STEP = 64  # 16-bit columns of it, 128 bytes: contracted at a time
SLOTS = 2  # buffers of an epilogue's pieces
TILES, CHUNKS = (64, 128, 256), (8, 16, 32, 64)  # that the kernels take
WARPGROUPS = 2  # that compute
BLOCKS = ((256, False), (128, False), (128, True), (64, True))  # rows of a tile, ping-pong
WGMMA = plgpu.Layout.WGMMA
BLOCK, FIRST, COUNT = range(3)  # columns of the table of jobs
SLOT, SOURCE = range(2)  # and of the list; more sources follow


@dataclasses.dataclass(frozen=True)
class Tile:
    """block_m: rows of a tile; its columns are the format's. stages: of a ring, steps in flight.

    cluster: thread blocks, one below the other, that read the weight once for all (TMA multicast).
    snake: clusters down M that are taken before the next block of columns. pingpong: each
    warpgroup has tiles of its own, else they share each tile's rows.
    """

    block_m: int
    stages: int = 6
    cluster: int = 1
    snake: int = 8
    pingpong: bool = False

    @property
    def rings(self) -> int:
        """Of buffers, each with one tile after the other."""
        return WARPGROUPS if self.pingpong else 1

    @property
    def rows(self) -> int:
        """Of a tile, that a warpgroup computes."""
        return self.block_m * self.rings // WARPGROUPS


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the format fixes: width, columns of a result block; depth, contracted with one slot.

    transpose: a slot is stored as (width, depth), for dx, else as (depth, width). together: chunks
    that are multiplied as one slot; above 1 a is stored transposed, for TMA copies its rows.
    """

    width: int
    depth: int
    transpose: bool
    together: int = 1

    @property
    def step(self) -> int:
        """Contracted at a time."""
        return min(self.depth, STEP)


def shape_of(pattern: Pattern, transpose: bool) -> Shape:
    """Of y, or (transpose) of dx."""
    if transpose:
        return Shape(pattern.chunk, pattern.tile, True)
    return Shape(pattern.tile, pattern.unit, False, pattern.together)


def heuristic(M: int, shape: Shape, blocks: int, slots: int, spec: Spec) -> Tile:
    """The tile where nothing was measured: the least time by waves, tensor cores and L2.

    blocks, slots: of the pattern; lists are taken to be equally long.
    """

    def seconds(tile: Tile) -> float:
        count = pl.cdiv(M, tile.block_m * tile.cluster) * tile.cluster * max(blocks, 1)
        waves = max(count / (SMS * tile.rings), 1)
        flops = 2 * tile.block_m * shape.width * shape.depth
        loaded = 2 * shape.depth * (tile.block_m + shape.width / tile.cluster)
        product = slots / max(blocks, 1) * max(flops / SM_FLOPS, loaded / SM_L2_BYTES)
        finish = tile.block_m * shape.width / SM_EPILOGUE[spec.activation is not None]
        if tile.pingpong:
            return 2 * waves * max(product, (product + finish) / 2) + finish
        return waves * (product + finish)

    found = candidates(shape, spec)
    return min((t for t in found if t.cluster == 1 or M > t.block_m), key=seconds)


def candidates(shape: Shape, spec: Spec) -> list[Tile]:
    """What the heuristic and the tuner choose from: at least three steps are in flight."""
    found = (
        fitted(Tile(m, cluster=cluster, pingpong=pingpong), shape, spec)
        for m, pingpong in BLOCKS
        for cluster in (2, 1)
    )
    return [t for t in found if t.rings * t.stages > 2 and t.rows * shape.width <= 128 * 128]


def fitted(tile: Tile, shape: Shape, spec: Spec) -> Tile:
    """The same tile with no more stages than its epilogue's buffers leave room for."""

    def fits(stages: int) -> bool:
        found = buffers(dataclasses.replace(tile, stages=stages), shape, spec)
        return tiles.shared_bytes(found) <= tiles.SHARED_BYTES - tiles.RESERVED_BYTES

    stages = next((n for n in range(tile.stages, 2, -1) if fits(n)), 2)
    return dataclasses.replace(tile, stages=stages)


def check(tile: Tile, shape: Shape) -> None:
    """Raises: ValueError where a tile breaks the rules of wgmma or of registers."""
    tiles.check_multiple(OP, "block_m", tile.block_m, ROWS * WARPGROUPS // tile.rings)
    tiles.check_registers(OP, WARPGROUPS, (tile.rows, shape.width))
    if tile.stages < 2 or tile.cluster not in (1, 2):
        raise ValueError(f"{OP}: {tile} needs at least 2 stages, and a cluster of 1 or 2")


def buffers(
    tile: Tile, shape: Shape, spec: Spec, dtype: Any = jnp.bfloat16
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shared memory, as (shape, type)."""
    out_dtype = jnp.dtype(spec.out_dtype)
    stages = tile.rings * tile.stages
    b = (shape.width, shape.step) if shape.transpose else (shape.step, shape.width)
    columns = min(128 // out_dtype.itemsize, shape.width)
    staging = (WARPGROUPS, SLOTS, ROWS, columns)
    a = (tile.block_m, shape.step)[:: -1 if shape.together > 1 else 1]
    found: dict[str, tuple[tuple[int, ...], Any]] = {
        "a_smem": ((stages, *a), dtype),
        "b_smem": ((stages, *b), dtype),
        "y_smem": (staging, out_dtype),
    }
    return found | ({"z_smem": (staging, dtype)} if spec.keep else {})


def forward(
    x_xK: jax.Array,
    slots_Skn: jax.Array,
    bias_P: jax.Array | None,
    pattern: Pattern,
    *,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> tuple[jax.Array, jax.Array | None]:
    """As reference.forward, for bf16 and f16. blocks: thread blocks, one an SM."""
    (C, _), x_MK, each = pattern.grid, x_xK.reshape(-1, x_xK.shape[-1]), pattern.together
    units = pattern.chunks.size // each
    sources = pattern.chunks.reshape(units, each)
    entries = jnp.concatenate([jnp.arange(units, dtype=jnp.int32)[:, None], sources], 1)
    found = multiply(
        _pad(x_MK, (x_MK.shape[0], C * pattern.chunk)),
        slots_Skn.reshape(units, pattern.unit, pattern.tile), bias_P,
        _jobs(pattern.tile_order, pattern.tile_starts // each), entries, spec=spec,
        tile=tile, shape=shape_of(pattern, False), interpret=interpret, blocks=blocks,
    )  # fmt: skip
    y_xP, z_xP = jax.tree.map(lambda y: y.reshape(*x_xK.shape[:-1], y.shape[1]), found)
    return y_xP, z_xP


def gradient(
    dz_xP: jax.Array,
    slots_Skn: jax.Array,
    pattern: Pattern,
    *,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> jax.Array:
    """dx_xK = dz w^T of kept tiles, as reference.backward."""
    K, dz_MP = pattern.shape[0], dz_xP.reshape(-1, dz_xP.shape[-1])
    sources = pattern.tiles.at[pattern.by_chunk].get(mode="clip")
    entries = jnp.stack([pattern.by_chunk, sources], 1)
    dx_MK, _ = multiply(
        dz_MP, slots_Skn, None, _jobs(pattern.chunk_order, pattern.chunk_starts), entries,
        spec=Spec(None, dz_MP.dtype.name), tile=tile, shape=shape_of(pattern, True),
        interpret=interpret, blocks=blocks,
    )  # fmt: skip
    return dx_MK[:, :K].reshape(*dz_xP.shape[:-1], K)


def _jobs(order_B: jax.Array, starts: jax.Array) -> jax.Array:
    """int32 (B, 3): result block, its first entry, how many, those with most first."""
    return jnp.stack([order_B, starts[:-1][order_B], (starts[1:] - starts[:-1])[order_B]], 1)


def multiply(
    a_MK: jax.Array,
    slots_Skn: jax.Array,
    bias_P: jax.Array | None,
    jobs: jax.Array,
    entries: jax.Array,
    *,
    shape: Shape,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> tuple[jax.Array, jax.Array | None]:
    """One kernel: (activate(z), z if kept, in a's type), both (M, B * width).

    jobs: as of _jobs. entries: int32 (S, 1 + together), the slot and its blocks of a, by result
    block.
    """
    M, dtype = a_MK.shape[0], a_MK.dtype
    align = STEP if shape.together > 1 else ALIGN
    whole_M = max(tile.block_m, pl.cdiv(M, align) * align)
    columns = jobs.shape[0] * shape.width
    a_MK = _pad(a_MK, (whole_M, a_MK.shape[1]))
    a = a_MK.T if shape.together > 1 else a_MK
    inputs = {"jobs": jobs, "entries": entries, "a": a, "b": slots_Skn}
    if bias_P is not None:
        inputs["bias"] = bias_P.astype(jnp.float32)
    outputs = {"z": dtype} if spec.keep else {}
    outputs["y"] = jnp.dtype(spec.out_dtype)
    check(tile, shape)
    shared = buffers(tile, shape, spec, dtype)
    tiles.check_shared(OP, shared)
    stages = tile.rings * tile.stages
    free = {"num_arrivals": WARPGROUPS // tile.rings, "num_barriers": stages}
    # wgmma takes operands of one swizzle, a's rows may be 64 bytes.
    scratch = {name: ring(*buffer, most=2 * shape.step) for name, buffer in shared.items()} | {
        "ready": plgpu.Barrier(num_arrivals=1 + shape.together, num_barriers=stages),
        "free": plgpu.ClusterBarrier(collective_axes=("cluster",), **free)
        if tile.cluster > 1
        else plgpu.Barrier(**free),
    }
    down = pl.cdiv(whole_M, tile.block_m * tile.cluster)
    clusters = min(blocks // tile.cluster, down * jobs.shape[0])
    body = functools.partial(
        _body, names=(*inputs, *outputs), spec=spec, tile=tile, shape=shape,
        grid=(down, jobs.shape[0]), clusters=clusters,
    )  # fmt: skip
    found = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((whole_M, columns), x) for x in outputs.values()],
        scratch_types=scratch,
        grid=(clusters,),
        grid_names=("block",),
        cluster=(tile.cluster,),
        cluster_names=("cluster",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="tile_sparse_dx" if shape.transpose else OP,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
    )(*inputs.values())
    named = dict(zip(outputs, varying_as(a_MK, [x[:M] for x in found]), strict=True))
    return named["y"], named.get("z")


def _pad(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """With zeros at the ends; no copy where nothing is missing."""
    return jnp.pad(x, [(0, whole - size) for whole, size in zip(shape, x.shape, strict=True)])


def corner(index, grid: tuple[int, int], snake: int):
    """(row of clusters, job) of the index-th tile: in strips of rows, each with the jobs in order.

    Rows of a strip are taken forwards and backwards in turn, so that what was read last is read
    again first.
    """
    down, jobs = grid
    strip = lax.div(index, jnp.int32(snake * jobs))
    inside = index - strip * (snake * jobs)
    width = jnp.minimum(snake, down - strip * snake)
    job = lax.div(inside, width)
    m = inside - job * width
    m = jnp.where(lax.rem(job, jnp.int32(2)) == 1, width - 1 - m, m)
    return strip * snake + m, job


def finish(activation: Activation | None, z):
    """As activate. (With the logistic function SiLU spilled two registers.)"""
    if activation == "gelu":
        return gelu(z)
    return z / (1 + jnp.exp(-z)) if activation == "silu" else activate(activation, z)


def _body(*refs, names, spec, tile, shape, grid, clusters, a_smem, b_smem, y_smem, ready, free,
          **kept):  # fmt: skip
    gmem = dict(zip(names, refs, strict=True))
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    stages, pieces_of_slot = jnp.int32(tile.stages), shape.depth // shape.step
    rows = shape.depth // shape.together  # of a copy of a, where it is stored transposed
    height, columns = y_smem.shape[2:]
    across = shape.width // columns
    pieces = tile.rows // height * across
    own_tiles = lax.div(grid[0] * grid[1] - 1 - block, jnp.int32(clusters)) + 1

    def tile_of(j):
        """Of this block's tile j: first row, block of columns, first entry, steps."""
        m, job = corner(block + j * clusters, grid, tile.snake)
        m = pl.multiple_of((m * tile.cluster + lax.axis_index("cluster")) * tile.block_m, ALIGN)
        column, first, count = (number(gmem["jobs"], job, c) for c in (BLOCK, FIRST, COUNT))
        return m, column, first, count * pieces_of_slot

    def slot_of(lane, i):
        """Of step i in a ring."""
        return lane * tile.stages + lax.rem(i, stages)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        lane, part = (warpgroup, 0) if tile.pingpong else (0, warpgroup)
        own = pl.ds(part * tile.rows, tile.rows)

        def product(first, steps, acc):
            @pl.loop(first, first + steps)
            def _(i):
                slot = slot_of(lane, i)
                plgpu.barrier_wait(ready.at[slot])
                right = b_smem.at[slot].T if shape.transpose else b_smem.at[slot]
                left = a_smem.at[slot, :, own].T if shape.together > 1 else a_smem.at[slot, own]
                plgpu.wgmma(acc, left, right)
                plgpu.wgmma_wait(1)

                @pl.when(i > first)
                def _():
                    plgpu.barrier_arrive(free.at[slot_of(lane, i - 1)])

            plgpu.wgmma_wait(0)

            @pl.when(steps > 0)
            def _():
                plgpu.barrier_arrive(free.at[slot_of(lane, first + steps - 1)])

            return acc[...]

        @pl.loop(
            0, lax.div(own_tiles - lane + tile.rings - 1, jnp.int32(tile.rings)),
            init_carry=jnp.int32(0),
        )  # fmt: skip
        def _(j, first):
            m, column, _, steps = tile_of(lane + j * tile.rings)
            m += part * tile.rows
            accumulated = pl.run_scoped(
                functools.partial(product, first, steps),
                plgpu.ACC((tile.rows, shape.width), jnp.float32),
            )
            for p in range(pieces):
                down, right = p // across * height, p % across * columns
                here = pl.ds(m + down, height), pl.ds(column * shape.width + right, columns)
                z = accumulated[down : down + height, right : right + columns]
                if "bias" in gmem:
                    bias = plgpu.load(
                        gmem["bias"].at[here[1]], layout=WGMMA.reduce(0), optimized=False
                    )
                    z += lax.broadcast_in_dim(bias, z.shape, [1])
                y = finish(spec.activation, z)
                # What was stored SLOTS pieces ago has been read.
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                staged = [("z", z, kept["z_smem"])] if spec.keep else []
                staged.append(("y", y, y_smem))
                # Pieces of one tile may be odd in number: the slot goes on over tiles.
                slot = lax.rem(j * pieces + p, jnp.int32(SLOTS)) if pieces % SLOTS else p % SLOTS
                for _, value, smem in staged:
                    smem[warpgroup, slot] = value.astype(smem.dtype)
                plgpu.commit_smem()
                for name, _, smem in staged:
                    plgpu.copy_smem_to_gmem(
                        smem.at[warpgroup, slot], gmem[name].at[here], commit_group=name == "y"
                    )
            return first + steps

        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _produce():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, own_tiles, init_carry=(jnp.int32(0),) * tile.rings)
        def totals(j, counts):
            m, _, entry, steps = tile_of(j)
            m = pl.ds(m, tile.block_m)
            lane = lax.rem(j, jnp.int32(tile.rings))
            first = counts[0]
            for r in range(1, tile.rings):
                first = jnp.where(lane == r, counts[r], first)

            @pl.loop(0, steps)
            def _(s):
                i = first + s
                slot = slot_of(lane, i)
                at = entry + lax.div(s, jnp.int32(pieces_of_slot))
                inside = lax.rem(s, jnp.int32(pieces_of_slot)) * shape.step
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                weight = number(gmem["entries"], at, SLOT)
                part = pl.ds(pl.multiple_of(inside, shape.step), shape.step)
                right = gmem["b"].at[
                    (weight, slice(None), part) if shape.transpose else (weight, part)
                ]
                shared = "cluster" if tile.cluster > 1 else None
                plgpu.copy_gmem_to_smem(
                    right, b_smem.at[slot], ready.at[slot], collective_axes=shared
                )
                for g in range(shape.together):
                    source = number(gmem["entries"], at, SOURCE + g)
                    if shape.together > 1:
                        # An empty slot's chunk lies past the last: TMA brings zeros.
                        k = pl.ds(pl.multiple_of(source * rows, rows), rows)
                        left, there = gmem["a"].at[k, m], a_smem.at[slot, pl.ds(g * rows, rows)]
                    else:
                        k = pl.multiple_of(source * shape.depth + inside, shape.step)
                        left, there = gmem["a"].at[m, pl.ds(k, shape.step)], a_smem.at[slot]
                    plgpu.copy_gmem_to_smem(left, there, ready.at[slot])

            return tuple(jnp.where(lane == r, first + steps, c) for r, c in enumerate(counts))

        # Every phase of every barrier is observed before the block ends.
        for r, total in enumerate(totals):

            @pl.loop(jnp.maximum(0, total - stages), total)
            def _(i, r=r):
                plgpu.barrier_wait(free.at[slot_of(r, i)])
