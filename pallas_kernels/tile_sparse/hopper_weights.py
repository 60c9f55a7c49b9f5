"""The gradient of a tile-sparse weight for Hopper: x^T dy of the slots that are kept, no others.

A job is up to block_m rows of consecutive slots of ONE tile (their chunks of x beside each other,
against the tile's columns of dy) over one of `splits` parts of the rows of x; grouped/visits.py
makes the list from the lengths of the tiles. Small weights have few jobs: splits give every SM one,
in float32, and XLA adds them up, each time in the same order. Each job has one owner.

    producer      wait free[s] | TMA dy rows of the tile, x rows of every chunk -> ready[s]
    each compute  wait ready[s] | acc += x^T dy of its half of the chunks (wgmma, one left in
                  flight), arrive free[s - 1]; half a job without a slot: only the barriers
    epilogue      64 rows, 128 bytes of columns at a time by TMA, of the slots that there are

In a job's last chunks, where a tile has no more, the last one is read again and not stored. Inside
slots what the mask does not keep is set to 0 afterwards, with the sum over splits.

Legend: M rows, K contracted, P packed columns, S slots, V jobs of one split.
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
from pallas_kernels.tile_sparse import hopper, reference
from pallas_kernels.tile_sparse.format import Pattern
from pallas_kernels.tile_sparse.hopper import ALIGN, OP, ROWS, SLOTS, WARPGROUPS

BLOCK_K = 64  # rows of x and dy contracted at a time
BLOCKS = (256, 128)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
SUM_BYTES = 0.7 * 4.8e12  # a second, of an XLA fusion (chosen: 0.7 of H200's datasheet)
TILE, FIRST, _, STOP = range(4)  # columns of the table of visits


@dataclasses.dataclass(frozen=True)
class Tile:
    """block_m: rows of the slots of a job. stages: of the ring, steps of 64 rows in flight.

    cluster: thread blocks with further slots of the same tile, which read dy once for all (TMA
    multicast). splits: parts of the rows of x.
    """

    block_m: int
    stages: int = 6
    cluster: int = 1
    splits: int = 1

    @property
    def rows(self) -> int:
        """Of slots, that a warpgroup computes."""
        return self.block_m // WARPGROUPS


def heuristic(M: int, pattern: Pattern) -> Tile:
    """The tile where nothing was measured: the least time by waves, tensor cores, L2, and sums."""
    (_, T), S, width = pattern.grid, pattern.chunks.size, pattern.tile

    def seconds(tile: Tile) -> float:
        rows = tile.block_m * tile.cluster
        # A tile's slots end anywhere in its last job: half a job is wasted, on average.
        jobs = (S * pattern.chunk / rows + 0.5 * min(T, S)) * tile.cluster * tile.splits
        flops = 2 * tile.block_m * width * BLOCK_K
        loaded = 2 * BLOCK_K * (tile.block_m + width / tile.cluster)
        steps = pl.cdiv(pl.cdiv(M, BLOCK_K), tile.splits)
        product = steps * max(flops / SM_FLOPS, loaded / SM_L2_BYTES)
        finish = tile.block_m * width / SM_EPILOGUE[0]
        summed = 4 * (tile.splits - 1) * S * pattern.chunk * width / SUM_BYTES
        return -(-jobs // SMS) * (product + finish) + summed

    return min(candidates(pattern.unit, width), key=seconds)


def candidates(unit: int, width: int) -> list[Tile]:
    """What the heuristic and the tuner choose from, each with the most stages that fit."""
    return [
        fitted(Tile(m, cluster=cluster, splits=splits), unit, width)
        for m in BLOCKS
        for cluster in (1, 2)
        for splits in SPLITS
        if m // WARPGROUPS * width <= 128 * 128
    ]


def fitted(tile: Tile, unit: int, width: int) -> Tile:
    """The same tile with no more stages than fit."""

    def fits(stages: int) -> bool:
        found = buffers(dataclasses.replace(tile, stages=stages), unit, width)
        return tiles.shared_bytes(found) <= tiles.SHARED_BYTES - tiles.RESERVED_BYTES

    stages = next((n for n in range(tile.stages, 2, -1) if fits(n)), 2)
    return dataclasses.replace(tile, stages=stages)


def block_of(unit: int, width: int) -> tuple[int, int]:
    """What a unit's gradient is computed as: wgmma has 64 rows, so 32 of them are columns."""
    return (unit, width) if unit >= ROWS else (width, unit)


def buffers(
    tile: Tile, unit: int, width: int, dtype: Any = jnp.bfloat16
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shared memory, as (shape, type)."""
    out_dtype = dtype if tile.splits == 1 else jnp.float32
    columns = min(128 // jnp.dtype(out_dtype).itemsize, block_of(unit, width)[1])
    return {
        "a_smem": ((tile.stages, tile.block_m // unit, BLOCK_K, unit), dtype),
        "b_smem": ((tile.stages, BLOCK_K, width), dtype),
        "y_smem": ((WARPGROUPS, SLOTS, ROWS, columns), out_dtype),
    }


def check(tile: Tile, unit: int, width: int) -> None:
    """Raises: ValueError where a tile breaks the rules of wgmma, of registers or of memory."""
    tiles.check_multiple(OP, "block_m", tile.block_m, ROWS * WARPGROUPS, 2 * ROWS * WARPGROUPS)
    tiles.check_registers(OP, WARPGROUPS, (tile.rows, width))
    if tile.stages < 2 or tile.cluster not in (1, 2) or tile.splits < 1:
        raise ValueError(
            f"{OP}: {tile} needs at least 2 stages, a cluster of 1 or 2, and 1 split or more"
        )
    tiles.check_shared(OP, buffers(tile, unit, width))


def backward(
    x_xK: jax.Array,
    slots_Skn: jax.Array,
    dz_xP: jax.Array,
    pattern: Pattern,
    *,
    tile_dx: hopper.Tile,
    tile_dw: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> tuple[jax.Array, jax.Array]:
    """As reference.backward, for bf16 and f16. blocks: thread blocks, one an SM.

    A result of 8 or 16 columns is too narrow for wgmma: with such chunks dx is one dense product.
    """
    static = {"interpret": interpret, "blocks": blocks}
    if pattern.together > 1:
        dx_xK = reference.gradient(dz_xP, slots_Skn, pattern)
    else:
        dx_xK = hopper.gradient(dz_xP, slots_Skn, pattern, tile=tile_dx, **static)
    return dx_xK, weights(x_xK, dz_xP, pattern, tile=tile_dw, **static)


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
    check(tile, unit, width)
    x_MK, dz_MP = (x.reshape(-1, x.shape[-1]) for x in (x_xK, dz_xP))
    (C, _), (M, _), S, dtype = pattern.grid, x_MK.shape, pattern.chunks.size, x_MK.dtype
    align = BLOCK_K if each > 1 else ALIGN
    whole_M = max(BLOCK_K, pl.cdiv(M, align) * align)
    x_MK, dz_MP = (
        jnp.pad(x, ((0, whole_M - M), (0, columns - x.shape[1])))
        for x, columns in ((x_MK, C * pattern.chunk), (dz_MP, dz_MP.shape[1]))
    )
    lengths_T = pattern.tile_starts[1:] - pattern.tile_starts[:-1]
    units = S // each
    jobs = visits.visits(lengths_T // each, units, tile.block_m // unit * tile.cluster, 1)
    clusters = min(blocks // tile.cluster, jobs.table.shape[0] * tile.splits)
    shared = buffers(tile, unit, width, dtype)
    # wgmma takes operands of one swizzle, and a row of x's chunk may be 64 bytes.
    scratch = {name: ring(*buffer, most=2 * unit) for name, buffer in shared.items()}
    free = {"num_arrivals": WARPGROUPS, "num_barriers": tile.stages}
    scratch |= {
        "ready": plgpu.Barrier(
            num_arrivals=1 + tile.block_m // pattern.chunk, num_barriers=tile.stages
        ),
        "free": plgpu.ClusterBarrier(collective_axes=("cluster",), **free)
        if tile.cluster > 1
        else plgpu.Barrier(**free),
    }
    down, across = block_of(unit, width)
    dw = plgpu.kernel(
        functools.partial(_body, tile=tile, unit=unit, chunk=pattern.chunk, clusters=clusters),
        out_type=jax.ShapeDtypeStruct((tile.splits, units * down, across), shared["y_smem"][1]),
        scratch_types=scratch,
        grid=(clusters,),
        grid_names=("block",),
        cluster=(tile.cluster,),
        cluster_names=("cluster",),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="tile_sparse_dw",
        interpret=interpreter.params() if interpret else None,
    )(
        jobs.table, jobs.count.reshape(1), pattern.chunks.reshape(1, S),
        x_MK.T if each > 1 else x_MK, dz_MP,
    )  # fmt: skip
    dw = varying_as(x_MK, dw).sum(0, dtype=jnp.float32).reshape(units, down, across)
    dw = dw if down == unit else dw.swapaxes(1, 2)
    dw_Skn = jnp.where(pattern.kept_Skn, dw.reshape(S, pattern.chunk, width), 0)
    return dw_Skn.astype(dtype)


def _body(
    table, total, chunks, x_gmem, dz_gmem, dw_gmem, *, a_smem, b_smem, y_smem, ready, free,
    tile, unit, chunk, clusters,
):  # fmt: skip
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    rank, stages = lax.axis_index("cluster"), jnp.int32(tile.stages)
    each, width, columns = tile.block_m // unit, b_smem.shape[2], y_smem.shape[3]
    down, across = block_of(unit, width)
    pieces = down * across // (ROWS * columns)  # of a slot
    count = total[0] + 0
    own_jobs = lax.div(count * tile.splits - block + clusters - 1, jnp.int32(clusters))
    all_steps = pl.cdiv(dz_gmem.shape[0], BLOCK_K)
    most = pl.cdiv(all_steps, tile.splits)

    def job_of(j):
        """Of this block's job j: split, tile, first slot, end of them, first step, steps."""
        index = block + j * clusters
        split = lax.div(index, count)
        visit = index - split * count
        column, first, stop = (number(table, visit, c) for c in (TILE, FIRST, STOP))
        begin = split * most
        steps = jnp.clip(all_steps - begin, 0, most)
        return split, column, first + rank * each, stop, begin, steps

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        mine = tile.rows // unit

        def product(first, steps, live, *accs):
            @pl.loop(first, first + jnp.where(live, steps, 0))
            def _(i):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(ready.at[slot])
                for g, acc in enumerate(accs):
                    x_part, dz_part = a_smem.at[slot, warpgroup * mine + g], b_smem.at[slot]
                    if unit > chunk:
                        plgpu.wgmma(acc, x_part, dz_part)
                    elif down == unit:
                        plgpu.wgmma(acc, x_part.T, dz_part)
                    else:
                        plgpu.wgmma(acc, dz_part.T, x_part)
                plgpu.wgmma_wait(mine)

                @pl.when(i > first)
                def _():
                    plgpu.barrier_arrive(free.at[lax.rem(i - 1, stages)])

            plgpu.wgmma_wait(0)

            @pl.when(live & (steps > 0))
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(first + steps - 1, stages)])

            @pl.loop(first + jnp.where(live, steps, 0), first + steps)
            def _(i):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(ready.at[slot])
                plgpu.barrier_arrive(free.at[slot])

            return tuple(acc[...] for acc in accs)

        @pl.loop(0, own_jobs, init_carry=jnp.int32(0))
        def _(j, first):
            split, _, slot, stop, _, steps = job_of(j)
            slot += warpgroup * mine
            found = pl.run_scoped(
                functools.partial(product, first, steps, slot < stop),
                *[plgpu.ACC((down, across), jnp.float32)] * mine,
            )

            def store(p):
                # What was stored SLOTS pieces ago has been read, or all of the job before.
                plgpu.wait_smem_to_gmem(SLOTS - 1 if p else 0, wait_read_only=True)
                g, at = divmod(p, pieces)
                top, left = at // (across // columns) * ROWS, at % (across // columns) * columns
                value = found[g][top : top + ROWS, left : left + columns]
                y_smem[warpgroup, p % SLOTS] = value.astype(y_smem.dtype)
                plgpu.commit_smem()
                here = pl.ds(pl.multiple_of((slot + g) * down + top, ROWS), ROWS)
                plgpu.copy_smem_to_gmem(
                    y_smem.at[warpgroup, p % SLOTS], dw_gmem.at[split, here, pl.ds(left, columns)]
                )

            for p in range(mine * pieces):
                pl.when(slot + p // pieces < stop)(functools.partial(store, p))
            return first + steps

        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _produce():
        plgpu.set_max_registers(24, action="decrease")

        @pl.loop(0, own_jobs, init_carry=jnp.int32(0))
        def total_steps(j, first):
            _, column, top, stop, begin, steps = job_of(j)
            n = pl.ds(pl.multiple_of(column * width, width), width)

            @pl.loop(first, first + steps)
            def _(i):
                slot = lax.rem(i, stages)
                m = pl.ds(pl.multiple_of((begin + i - first) * BLOCK_K, BLOCK_K), BLOCK_K)
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                shared = "cluster" if tile.cluster > 1 else None
                plgpu.copy_gmem_to_smem(
                    dz_gmem.at[m, n], b_smem.at[slot], ready.at[slot], collective_axes=shared
                )
                for g in range(each):
                    own = jnp.minimum(top + g, stop - 1) * (unit // chunk)
                    for h in range(unit // chunk):
                        k = pl.ds(pl.multiple_of(number(chunks, 0, own + h) * chunk, chunk), chunk)
                        if unit > chunk:
                            # An empty slot's chunk lies past the last: TMA brings zeros.
                            left, there = x_gmem.at[k, m], pl.ds(h * chunk, chunk)
                        else:
                            left, there = x_gmem.at[m, k], slice(None)
                        plgpu.copy_gmem_to_smem(left, a_smem.at[slot, g, there], ready.at[slot])

            return first + steps

        # Every phase of every barrier is observed before the block ends.
        @pl.loop(jnp.maximum(0, total_steps - stages), total_steps)
        def _(i):
            plgpu.barrier_wait(free.at[lax.rem(i, stages)])
