"""The gradient of a tile-sparse weight for Hopper: x^T dy of the slots that are kept, no others.

On the engine of pallas_kernels/hopper. A job is up to block_m rows of consecutive slots of ONE tile
(their chunks of x beside each other, against the tile's columns of dy) over one of `splits` parts
of the rows of x; hopper/visits.py makes the list from the lengths of the tiles. Small weights have
few jobs: splits give every SM one, in float32, and XLA adds them up, each time in the same order.
Each job has one owner, and a compute warpgroup half of its slots.

In a job's last chunks, where a tile has no more, the last one is read again and not stored. Inside
slots what the mask does not keep is set to 0 afterwards, with the sum over splits.

Legend: M rows, K contracted, P packed columns, S slots, V jobs of one split.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import engine, tiles, visits
from pallas_kernels.hopper.cards import ROWS, SMS
from pallas_kernels.hopper.epilogue import Staging, staging_shape
from pallas_kernels.hopper.memory import PIECE as ALIGN
from pallas_kernels.hopper.memory import number, pad, span, up, varying_as
from pallas_kernels.hopper.tiles import Tile
from pallas_kernels.tile_sparse.format import OP, Pattern
from pallas_kernels.work import Work

BLOCK_K = 64  # rows of x and dy contracted at a time
BLOCKS = (256, 128)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
SUM_BYTES = 0.7 * 4.8e12  # a second, of an XLA fusion (chosen: 0.7 of H200's datasheet)
TILE, FIRST, _, STOP = range(4)  # columns of the table of visits


def heuristic(M: int, pattern: Pattern) -> Tile:
    """The tile where nothing was measured: the least time by waves, tensor cores, L2, and sums."""
    (_, T), S, width = pattern.grid, pattern.chunks.size, pattern.tile

    def seconds(tile: Tile) -> float:
        rows = tile.block_m * tile.cluster
        # A tile's slots end anywhere in its last job: half a job is wasted, on average.
        jobs = (S * pattern.chunk / rows + 0.5 * min(T, S)) * tile.cluster * tile.splits
        times = tile.seconds(pl.cdiv(pl.cdiv(M, BLOCK_K), tile.splits) * BLOCK_K)
        summed = 4 * (tile.splits - 1) * S * pattern.chunk * width / SUM_BYTES
        return -(-jobs // SMS) * sum(times) + summed

    return min(candidates(pattern.unit, width), key=seconds)


def candidates(unit: int, width: int) -> list[Tile]:
    """Returns the tiles for the heuristic and the tuner, each with the most stages that fit."""
    return [
        fitted(Tile(m, width, BLOCK_K, cluster=cluster, splits=splits), unit)
        for m in BLOCKS
        for cluster in (1, 2)
        for splits in SPLITS
        if m // 2 * width <= 128 * 128
    ]


def fitted(tile: Tile, unit: int) -> Tile:
    """The same tile with no more stages than fit. block_m: rows of the slots of a job."""
    return tiles.fitted(tile, lambda tile: buffers(tile, unit))


def block_of(unit: int, width: int) -> tuple[int, int]:
    """What a unit's gradient is computed as: wgmma has 64 rows, so 32 of them are columns."""
    return (unit, width) if unit >= ROWS else (width, unit)


def buffers(
    tile: Tile, unit: int, dtype: Any = jnp.bfloat16
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shared memory, as (shape, type)."""
    out_dtype = dtype if tile.splits == 1 else jnp.float32
    sums = block_of(unit, tile.block_n)
    return {
        "a_smem": ((tile.buffers, tile.block_m // unit, BLOCK_K, unit), dtype),
        "b_smem": ((tile.buffers, BLOCK_K, tile.block_n), dtype),
        "y_smem": staging_shape(tile.warpgroups, sums, out_dtype, tile.rows // unit),
    }


def check(tile: Tile, unit: int) -> None:
    """Raises: ValueError where a tile breaks the rules of wgmma, of registers or of memory."""
    tiles.check_multiple(OP, "block_m", tile.block_m, ROWS * tile.warpgroups, max(BLOCKS))
    tiles.check(OP, tile)
    tiles.check_shared(OP, buffers(tile, unit))


def weights(
    x_xK: jax.Array,
    dz_xP: jax.Array,
    pattern: Pattern,
    *,
    tile: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> jax.Array:
    """(S, chunk, tile) in x's type, as reference.backward. blocks: thread blocks, one an SM."""
    width, unit, each = pattern.tile, pattern.unit, pattern.together
    tile = dataclasses.replace(tile, block_n=width)
    check(tile, unit)
    x_MK, dz_MP = (x.reshape(-1, x.shape[-1]) for x in (x_xK, dz_xP))
    (C, _), (M, _), S, dtype = pattern.grid, x_MK.shape, pattern.chunks.size, x_MK.dtype
    whole_M = max(BLOCK_K, up(M, BLOCK_K if each > 1 else ALIGN))
    x_MK = pad(x_MK, (whole_M, C * pattern.chunk))
    lengths_T = pattern.tile_starts[1:] - pattern.tile_starts[:-1]
    units = S // each
    jobs = visits.visits(lengths_T // each, units, tile.block_m // unit * tile.cluster, 1)
    clusters = min(blocks // tile.cluster, jobs.table.shape[0] * tile.splits)
    shared = buffers(tile, unit, dtype)
    down, across = block_of(unit, width)
    result = tile.splits, units * down, across
    results = engine.launch(
        functools.partial(_body, tile=tile, unit=unit, chunk=pattern.chunk, clusters=clusters),
        {
            "table": jobs.table,
            "total": jobs.count.reshape(1),
            "chunks": pattern.chunks.reshape(1, S),
            "x": x_MK.T if each > 1 else x_MK,
            "dz": pad(dz_MP, (whole_M, dz_MP.shape[1])),
        },
        {"dw": jax.ShapeDtypeStruct(result, shared["y_smem"][1])},
        # wgmma takes operands of one swizzle, and a row of x's chunk may be 64 bytes.
        engine.scratch(shared, most=2 * unit)
        | engine.barriers(tile, 1 + tile.block_m // pattern.chunk),
        work=Work(
            "tile_sparse_dw", 2.0 * M * S * pattern.chunk * width, (1, S * pattern.chunk, width, M)
        ),
        tile=tile,
        clusters=clusters,
        interpret=interpret,
    )
    dw = varying_as(x_MK, results["dw"]).sum(0, dtype=jnp.float32).reshape(units, down, across)
    dw = dw if down == unit else dw.swapaxes(1, 2)
    dw_Skn = jnp.where(pattern.kept_Skn, dw.reshape(S, pattern.chunk, width), 0)
    return dw_Skn.astype(dtype)


class Place(NamedTuple):
    """A job: its split, tile of columns, this block's first slot and their end, steps."""

    split: Any
    column: Any
    slot: Any
    stop: Any
    begin: Any
    steps: Any


def _body(gmem, *, tile, unit, chunk, clusters, a_smem, b_smem, y_smem, ready, free):
    product = engine.Product(
        tile, ready, free, lambda place: place.steps, lax.axis_index("block"), clusters
    )
    staging = Staging((y_smem,), product.warpgroup)
    each, slots = tile.block_m // unit, tile.rows // unit  # slots of a job, and of a warpgroup
    down, across = block_of(unit, tile.block_n)
    height, width = y_smem.shape[2:]
    count = number(gmem["total"], 0)
    all_steps = pl.cdiv(gmem["dz"].shape[0], BLOCK_K)
    most = pl.cdiv(all_steps, tile.splits)

    def place_of(i):
        split = lax.div(i, count)
        visit = i - split * count
        column, first, stop = (number(gmem["table"], visit, c) for c in (TILE, FIRST, STOP))
        begin = split * most
        steps = jnp.clip(all_steps - begin, 0, most)
        slot = first + lax.axis_index("cluster") * each
        return Place(split, column, slot, stop, begin, steps)

    def load(place, s, buffer, barrier):
        m, n = span(place.begin + s, BLOCK_K), span(place.column, tile.block_n)
        plgpu.copy_gmem_to_smem(
            gmem["dz"].at[m, n], b_smem.at[buffer], barrier, collective_axes=tile.multicast
        )
        for g in range(each):
            first_chunk = jnp.minimum(place.slot + g, place.stop - 1) * (unit // chunk)
            for h in range(unit // chunk):
                k = span(number(gmem["chunks"], 0, first_chunk + h), chunk)
                if unit > chunk:
                    # An empty slot's chunk lies past the last: TMA brings zeros.
                    left, there = gmem["x"].at[k, m], pl.ds(h * chunk, chunk)
                else:
                    left, there = gmem["x"].at[m, k], slice(None)
                plgpu.copy_gmem_to_smem(left, a_smem.at[buffer, g, there], barrier)

    def multiply(_, s, buffer, *accumulators):
        for g, acc in enumerate(accumulators):
            x_part, dz_part = a_smem.at[buffer, product.warpgroup * slots + g], b_smem.at[buffer]
            if unit > chunk:
                plgpu.wgmma(acc, x_part, dz_part)
            elif down == unit:
                plgpu.wgmma(acc, x_part.T, dz_part)
            else:
                plgpu.wgmma(acc, dz_part.T, x_part)

    def live(place):
        return place.slot + product.warpgroup * slots < place.stop

    def finish(place, *sums):
        pieces = staging.pieces((down, across))

        def store(p):
            g, (top, left, rows, columns) = p // len(pieces), pieces[p % len(pieces)]
            slot = place.slot + product.warpgroup * slots + g
            part = pl.ds(pl.multiple_of(slot * down + top, ROWS), height), pl.ds(left, width)
            target = gmem["dw"].at[place.split, *part]
            staging.put(
                p, (sums[g][rows, columns],), lambda piece: plgpu.copy_smem_to_gmem(piece, target)
            )

        first = place.slot + product.warpgroup * slots
        for p in range(slots * len(pieces)):
            inside = first + p // len(pieces) < place.stop
            pl.when(inside)(functools.partial(store, p))

    total, sums = count * tile.splits, [(down, across)] * slots
    product.specialise(
        lambda: product.compute(total, multiply, finish, sums=sums, begin=place_of, live=live),
        lambda: product.produce(total, place_of, load),
    )
