"""The tile-sparse product for Hopper, and its gradient of x.

One kernel for both, on the engine of pallas_kernels/hopper. The result has blocks of columns, each
with a list of (block of a, slot of the weight): for y its tile's chunks of x; for dx, whose blocks
are chunks, the tiles of dy that keep it. Nothing else is read or multiplied. Lists differ in
length, so blocks of columns are taken with the longest list first, in strips of `snake` clusters of
rows that stay in L2. With few chunks left a tile is mostly epilogue, which ping-pong hides.

    producer      wait free[s] | TMA a rows of block list[i], slot list[i] -> ready[s]

An empty list has acc = 0. Where a tile reaches over an edge TMA reads zeros and writes nothing (PTX
ISA, tensor copies: out-of-bound access), in whole pieces of the swizzled tiling: other sizes are
copied first.

Legend: M rows, K contracted, P packed columns, S slots, B blocks of result columns (T tiles or C
chunks).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import engine, tiles
from pallas_kernels.hopper.activations import Activation, Spec, activate_tile
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.epilogue import Staging, add_bias
from pallas_kernels.hopper.memory import PIECE as ALIGN
from pallas_kernels.hopper.memory import number, pad, up, varying_as
from pallas_kernels.hopper.tiles import Tile
from pallas_kernels.tile_sparse.format import OP, Pattern
from pallas_kernels.work import Work

STEP = 64  # 16-bit columns of a piece of the tiling, 128 bytes: contracted at a time
GRAIN = 32  # of which a block's columns, and what is contracted at a time, are multiples
TILES, CHUNKS = (64, 128, 256), (8, 16, 32, 64)  # that the kernels take
BLOCKS = ((256, False), (128, False), (128, True), (64, True))  # rows of a tile, ping-pong
BLOCK, FIRST, COUNT = range(3)  # columns of the table of jobs
SLOT, SOURCE = range(2)  # and of the list; more sources follow


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes that the format fixes: width, columns of a result block; depth of one slot.

    transpose: a slot is stored as (width, depth), for dx, else as (depth, width). together: chunks
    that are multiplied as one slot; above 1 a is stored transposed, for TMA copies its rows.
    """

    width: int
    depth: int
    transpose: bool
    together: int = 1

    @property
    def step(self) -> int:
        """How much is contracted at a time."""
        return min(self.depth, STEP)


def shape_of(pattern: Pattern, transpose: bool) -> Shape:
    """Returns the shape of y's blocks, or (transpose) of those of dx."""
    if transpose:
        return Shape(pattern.chunk, pattern.tile, True)
    return Shape(pattern.tile, pattern.unit, False, pattern.together)


def cut(tile: Tile, shape: Shape) -> Tile:
    """Returns the tile with the columns and the step that the format fixes."""
    return dataclasses.replace(tile, block_n=shape.width, block_k=shape.step)


def heuristic(M: int, shape: Shape, blocks: int, slots: int, spec: Spec) -> Tile:
    """Returns the tile if nothing was measured: the least time by waves, tensor cores and L2.

    blocks, slots: counts of the pattern; lists are assumed to be equally long.
    """

    def seconds(tile: Tile) -> float:
        count = pl.cdiv(M, tile.block_m * tile.cluster) * tile.cluster * max(blocks, 1)
        waves = max(count / (SMS * tile.rings), 1)
        contracted = slots / max(blocks, 1) * shape.depth
        product, finish = tile.seconds(contracted, spec.activation is not None)
        if tile.pingpong:
            return 2 * waves * max(product, (product + finish) / 2) + finish
        return waves * (product + finish)

    choices = candidates(shape, spec)
    return min((t for t in choices if t.cluster == 1 or M > t.block_m), key=seconds)


def candidates(shape: Shape, spec: Spec) -> list[Tile]:
    """Returns the tiles for the heuristic and the tuner, with at least three steps in flight."""
    fitting = (
        fitted(Tile(m, shape.width, cluster=cluster, pingpong=pingpong), shape, spec)
        for m, pingpong in BLOCKS
        for cluster in (2, 1)
    )
    return [t for t in fitting if t.buffers > 2 and t.rows * shape.width <= 128 * 128]


def fitted(tile: Tile, shape: Shape, spec: Spec) -> Tile:
    """The same tile with no more stages than its epilogue's buffers leave room for."""
    return tiles.fitted(cut(tile, shape), lambda tile: buffers(tile, shape, spec))


def buffers(
    tile: Tile, shape: Shape, spec: Spec, dtype: Any = jnp.bfloat16
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shared memory, as (shape, type)."""
    shared = engine.buffers(tile, dtype, spec.out_dtype, shape.together > 1, shape.transpose)
    return shared | ({"z_smem": (shared["y_smem"][0], dtype)} if spec.keep else {})


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
    """Returns what reference.forward does, for bf16 and f16. blocks: thread blocks, one an SM."""
    (C, _), x_MK, each = pattern.grid, x_xK.reshape(-1, x_xK.shape[-1]), pattern.together
    units = pattern.chunks.size // each
    sources = pattern.chunks.reshape(units, each)
    entries = jnp.concatenate([jnp.arange(units, dtype=jnp.int32)[:, None], sources], 1)
    results = multiply(
        pad(x_MK, (x_MK.shape[0], C * pattern.chunk)),
        slots_Skn.reshape(units, pattern.unit, pattern.tile),
        bias_P,
        _jobs(pattern.tile_order, pattern.tile_starts // each),
        entries,
        spec=spec,
        tile=tile,
        shape=shape_of(pattern, False),
        interpret=interpret,
        blocks=blocks,
    )
    y_xP, z_xP = jax.tree.map(lambda y: y.reshape(*x_xK.shape[:-1], y.shape[1]), results)
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
        dz_MP,
        slots_Skn,
        None,
        _jobs(pattern.chunk_order, pattern.chunk_starts),
        entries,
        spec=Spec(None, dz_MP.dtype.name),
        tile=tile,
        shape=shape_of(pattern, True),
        interpret=interpret,
        blocks=blocks,
    )
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

    jobs: from `_jobs`. entries: int32 (S, 1 + together), the slot and its blocks of a, by result
    block.
    """
    M, dtype, tile = a_MK.shape[0], a_MK.dtype, cut(tile, shape)
    whole_M = max(tile.block_m, up(M, STEP if shape.together > 1 else ALIGN))
    a_MK = pad(a_MK, (whole_M, a_MK.shape[1]))
    outputs = ({"z": dtype} if spec.keep else {}) | {"y": jnp.dtype(spec.out_dtype)}
    tiles.check(OP, tile, GRAIN)
    shared = buffers(tile, shape, spec, dtype)
    tiles.check_shared(OP, shared)
    grid = pl.cdiv(whole_M, tile.block_m * tile.cluster), jobs.shape[0]
    clusters = min(blocks // tile.cluster, grid[0] * grid[1])
    result = whole_M, jobs.shape[0] * shape.width
    name = "tile_sparse_dx" if shape.transpose else OP
    results = engine.launch(
        functools.partial(_body, spec=spec, tile=tile, shape=shape, grid=grid, clusters=clusters),
        {
            "jobs": jobs,
            "entries": entries,
            "a": a_MK.T if shape.together > 1 else a_MK,
            "b": slots_Skn,
            "bias": None if bias_P is None else bias_P.astype(jnp.float32),
        },
        {name: jax.ShapeDtypeStruct(result, dtype) for name, dtype in outputs.items()},
        # wgmma takes operands of one swizzle, a's rows may be 64 bytes.
        engine.scratch(shared, most=2 * shape.step) | engine.barriers(tile, 1 + shape.together),
        work=Work(name, 2.0 * M * slots_Skn.size, (1, M, result[1], a_MK.shape[1])),
        tile=tile,
        clusters=clusters,
        interpret=interpret,
    )
    results = varying_as(a_MK, {name: x[:M] for name, x in results.items()})
    return results["y"], results.get("z")


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


def finished(activation: Activation | None, z):
    """Applies activate_tile. (With the logistic function SiLU spilled two registers.)"""
    return z / (1 + jnp.exp(-z)) if activation == "silu" else activate_tile(activation, z)


class Place(NamedTuple):
    """A tile: its first row, block of columns, first entry of the list, and steps."""

    m: Any
    column: Any
    entry: Any
    steps: Any


def _body(gmem, *, spec, tile, shape, grid, clusters, a_smem, b_smem, y_smem, ready, free, **more):
    product = engine.Product(
        tile, ready, free, lambda place: place.steps, lax.axis_index("block"), clusters
    )
    results = ({"z": more["z_smem"]} if spec.keep else {}) | {"y": y_smem}
    staging = Staging(tuple(results.values()), product.warpgroup)
    height, width = y_smem.shape[2:]
    each = shape.depth // shape.step  # steps of a slot
    rows = shape.depth // shape.together  # of a copy of a, where it is stored transposed

    def place_of(i):
        m, job = corner(i, grid, tile.snake)
        m = pl.multiple_of((m * tile.cluster + lax.axis_index("cluster")) * tile.block_m, ALIGN)
        column, first, count = (number(gmem["jobs"], job, c) for c in (BLOCK, FIRST, COUNT))
        return Place(m, column, first, count * each)

    def load(place, s, buffer, barrier):
        at, inside = place.entry + lax.div(s, jnp.int32(each)), lax.rem(s, jnp.int32(each))
        inside *= shape.step
        m, part = (
            pl.ds(place.m, tile.block_m),
            pl.ds(pl.multiple_of(inside, shape.step), shape.step),
        )
        weight = number(gmem["entries"], at, SLOT)
        right = gmem["b"].at[(weight, slice(None), part) if shape.transpose else (weight, part)]
        plgpu.copy_gmem_to_smem(right, b_smem.at[buffer], barrier, collective_axes=tile.multicast)
        for g in range(shape.together):
            source = number(gmem["entries"], at, SOURCE + g)
            if shape.together > 1:
                # An empty slot's chunk lies past the last: TMA brings zeros.
                k = pl.ds(pl.multiple_of(source * rows, rows), rows)
                left, there = gmem["a"].at[k, m], a_smem.at[buffer, pl.ds(g * rows, rows)]
            else:
                k = pl.multiple_of(source * shape.depth + inside, shape.step)
                left, there = gmem["a"].at[m, pl.ds(k, shape.step)], a_smem.at[buffer]
            plgpu.copy_gmem_to_smem(left, there, barrier)

    def multiply(_, s, buffer, acc):
        turned = shape.together > 1
        left = (
            a_smem.at[buffer, :, product.part_rows].T
            if turned
            else a_smem.at[buffer, product.part_rows]
        )
        plgpu.wgmma(acc, left, b_smem.at[buffer].T if shape.transpose else b_smem.at[buffer])

    def finish(place, sums):
        m, n = place.m + product.part * tile.rows, place.column * shape.width
        for p, (top, left, down, right) in enumerate(staging.pieces((tile.rows, shape.width))):
            part = pl.ds(m + top, height), pl.ds(n + left, width)
            z = sums[down, right]
            if "bias" in gmem:
                z = add_bias(z, gmem["bias"], part[1])
            y = finished(spec.activation, z)

            def copy(*staged, part=part):
                for name, piece in zip(results, staged, strict=True):
                    target = gmem[name].at[part]
                    plgpu.copy_smem_to_gmem(piece, target, commit_group=name == "y")

            staging.put(p, (z, y) if spec.keep else (y,), copy)

    total, sums = grid[0] * grid[1], [(tile.rows, shape.width)]
    product.specialise(
        lambda: product.compute(total, multiply, finish, sums=sums, begin=place_of),
        lambda: product.produce(total, place_of, load),
    )
