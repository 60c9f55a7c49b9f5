"""The backward kernels for Hopper: one for dq, one for dk and dv; deterministic, no atomics.

FlashAttention-2 (arXiv 2307.08691) section 3.1.2 with the roles of the forward kernel: two compute
warpgroups and a producer around a ring of tiles. Both recompute the weights from lse:

    dq    own: 64 query rows a warpgroup; ring: tiles of K, V over the keys they see
          S = Q K^T, P = exp2(S - lse), dS = P (dO V^T - delta), dQ += dS K
    dkv   own: 64 key rows a warpgroup; ring: tiles of Q, dO (lse, delta and rows beside them) over
          the queries that see them, for each query head of the group
          S^T = K Q^T, P^T, dV += P^T dO, dS^T = P^T (V dO^T - delta), dK += dS^T Q

The ring of dkv follows the inverse table (ranges.py), so both do work in proportion to the useful
pairs. Head width 256: two accumulators of 256 columns do not fit in a warpgroup's registers, so
both warpgroups take the same 64 key rows and each half of the columns of dK and dV; they compute
S^T and dP^T twice (1.5 times the products of the others) and spill nothing.

Barriers: ready[s] completes with the tile's copies, free[s] with one arrival a warpgroup. Every
warpgroup passes every tile of the ring.

Legend: as hopper_forward.py; N rows of a ring's tile, R = H / G.
"""

import dataclasses
import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import interpret as interpreter
from pallas_kernels.attention.hopper_forward import (
    BLOCK_Q,
    LOG2E,
    ROWS,
    WARPGROUPS,
    WGMMA,
    block_table,
    by_row,
    logits,
    multiply_into,
    number,
    pad,
    product,
    ring,
    row_vector,
    staging,
    varying_as,
)
from pallas_kernels.attention.ranges import Rows, visits
from pallas_kernels.attention.reference import Spec


@dataclasses.dataclass(frozen=True)
class Tile:
    """block: rows of a tile of either ring, of keys in dq, of queries in dkv.

    stages: tiles in flight in each.
    """

    block_dq: int
    stages_dq: int
    block_dkv: int
    stages_dkv: int


def heuristic(width: int) -> Tile:
    """The tiles with which nothing spills, and the most in flight that fits in SMEM."""
    if width <= 64:
        return Tile(64, 4, 64, 4)
    return Tile(64, 4, 64, 3) if width <= 128 else Tile(32, 2, 64, 2)


def backward(
    q_THK: jax.Array,
    k_SGK: jax.Array,
    v_SGK: jax.Array,
    rows: Rows,
    slopes_H: jax.Array | None,
    lse_HT: jax.Array,
    delta_HT: jax.Array,
    dout_THK: jax.Array,
    *,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As reference.backward, for bf16 and f16."""
    T, H, _ = q_THK.shape
    S = k_SGK.shape[0]
    over_keys, _ = visits(rows, S, ROWS, tile.block_dq)
    _, over_queries = visits(rows, S, tile.block_dkv, ROWS)
    # A dead row's weights are exp2(s - inf) = 0.
    lse_HT = jnp.where((rows.lo < rows.hi)[None], lse_HT * LOG2E, jnp.inf)
    sums_H2T = pad(jnp.stack([lse_HT, delta_HT], 1), BLOCK_Q, axis=2)
    rows_3T = pad(jnp.stack([rows.lo, rows.hi, rows.self]), BLOCK_Q, axis=1)
    q_THK, dout_THK, k_SGK, v_SGK = (pad(x, BLOCK_Q) for x in (q_THK, dout_THK, k_SGK, v_SGK))
    slopes = jnp.zeros(H, jnp.float32) if slopes_H is None else slopes_H * LOG2E
    inputs = (rows_3T, sums_H2T, slopes, q_THK, k_SGK, v_SGK, dout_THK)
    static = {"spec": spec, "alibi": slopes_H is not None, "interpret": interpret}
    dq_THK = _dq(over_keys, inputs, tile, static)
    dk_SGK, dv_SGK = _dkv(over_queries, inputs, tile, static)
    return varying_as(q_THK, (dq_THK[:T], dk_SGK[:S], dv_SGK[:S]))


def afresh(index, interpret: bool):
    """The index, computed anew where this is called.

    Otherwise the addresses of a warpgroup's own rows, one for each wgmma, stay in registers over
    the loop, and accumulators spill (120 bytes at head width 256).
    """
    return index if interpret else lax.optimization_barrier(index)


def _call(body, out_type, scratch, grid, names, interpret):
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=names,
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=body.func.__name__.strip("_"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
    )


def _dq(over_keys, inputs, tile, static):
    q_THK = inputs[3]
    T, H, K = q_THK.shape
    # Tiles of K are both operands of wgmma: a swizzle must fit their rows as well.
    rings = functools.partial(ring, dtype=q_THK.dtype, most=2 * tile.block_dq)
    own = rings((WARPGROUPS, ROWS, K))
    tiles = rings((tile.stages_dq, tile.block_dq, K))
    scratch = {
        "q_smem": own,
        "dout_smem": own,
        "k_smem": tiles,
        "v_smem": tiles,
        "ds_smem": staging((WARPGROUPS, ROWS, tile.block_dq), q_THK.dtype, static["interpret"]),
        "own_ready": plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages_dq),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tile.stages_dq),
    }
    C = T // BLOCK_Q
    body = functools.partial(_varlen_attention_dq, tile=tile, **static)
    out = jax.ShapeDtypeStruct(q_THK.shape, q_THK.dtype)
    call = _call(body, out, scratch, (H, C), ("head", "block"), static["interpret"])
    return call(block_table(over_keys.spans, WARPGROUPS, C), over_keys.tiles, *inputs)


def _varlen_attention_dq(
    table, tiles, rows_3T, sums_H2T, slopes, q_THK, k_SGK, v_SGK, dout_THK,
    dq_THK, *, q_smem, dout_smem, k_smem, v_smem, ds_smem, own_ready, ready, free,
    tile, spec, alibi, interpret,
):  # fmt: skip
    H, K = q_THK.shape[1:]
    N, stages = tile.block_dq, tile.stages_dq
    shape = (ROWS, N)
    head, warpgroup = lax.axis_index("head"), lax.axis_index("warpgroup")
    block = table.shape[0] - 1 - lax.axis_index("block")
    begin, end = (number(table, block, i) for i in range(2))

    def slot_of(c):
        return lax.rem(c - begin, jnp.int32(stages))

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        start = pl.multiple_of(block * BLOCK_Q + warpgroup * ROWS, ROWS)
        here = (pl.ds(start, ROWS), head)
        own_q, own_dout = q_smem.at[warpgroup], dout_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_THK.at[here], own_q, own_ready.at[warpgroup])
        plgpu.copy_gmem_to_smem(dout_THK.at[here], own_dout, own_ready.at[warpgroup])
        lo, hi = (row_vector(rows_3T.at[i], start) for i in range(2))
        lse, delta = (row_vector(sums_H2T.at[head, i], start) for i in range(2))
        first, full_first, full_last, last = (
            number(table, block, 2 + 4 * warpgroup + j) for j in range(4)
        )
        own = by_row(row_vector(rows_3T.at[2], start), shape) if alibi else None
        slope = slopes[head] if alibi else None
        plgpu.barrier_wait(own_ready.at[warpgroup])

        def step(c, dq, masked):
            slot = slot_of(c)
            plgpu.barrier_wait(ready.at[slot])
            here_q, here_dout = (x.at[afresh(warpgroup, interpret)] for x in (q_smem, dout_smem))
            s = product([here_q], [k_smem.at[slot]], shape)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + tiles[c] * N
            s, change = logits(s, key, own, slope, spec)
            p = jnp.exp2(s - by_row(lse, shape))
            if masked:
                p = jnp.where((key >= by_row(lo, shape)) & (key < by_row(hi, shape)), p, 0.0)
            dp = product([here_dout], [v_smem.at[slot]], shape)
            ds = (p * (dp - by_row(delta, shape)) * change).astype(q_THK.dtype)
            dq = multiply_into(dq, ds, k_smem.at[slot], ds_smem.at[warpgroup], interpret)
            plgpu.barrier_arrive(free.at[slot])
            return dq

        def let_go(c, _):
            plgpu.barrier_wait(ready.at[slot_of(c)])
            plgpu.barrier_arrive(free.at[slot_of(c)])

        dq = plgpu.layout_cast(jnp.zeros((ROWS, K), jnp.float32), WGMMA)
        lax.fori_loop(begin, first, let_go, None)
        masked, plain = (functools.partial(step, masked=m) for m in (True, False))
        dq = lax.fori_loop(first, full_first, masked, dq)
        dq = lax.fori_loop(full_first, full_last, plain, dq)
        dq = lax.fori_loop(full_last, last, masked, dq)
        lax.fori_loop(last, end, let_go, None)
        own_q[...] = dq.astype(q_THK.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_q, dq_THK.at[here])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _produce():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(H // k_SGK.shape[1]))

        @pl.loop(begin, end)
        def _(c):
            slot = slot_of(c)
            pl.when(c >= begin + stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            here = (pl.ds(pl.multiple_of(tiles[c] * N, N), N), kv_head)
            plgpu.copy_gmem_to_smem(k_SGK.at[here], k_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(v_SGK.at[here], v_smem.at[slot], ready.at[slot])

        # Every phase of every barrier is observed before the block ends.
        @pl.loop(jnp.maximum(begin, end - stages), end)
        def _(c):
            plgpu.barrier_wait(free.at[slot_of(c)])


def _dkv(over_queries, inputs, tile, static):
    q_THK, k_SGK = inputs[3:5]
    S, G, K = k_SGK.shape
    pieces = 1 if K <= 128 else WARPGROUPS
    own = WARPGROUPS // pieces
    N, stages = tile.block_dkv, tile.stages_dkv
    rings = functools.partial(ring, dtype=q_THK.dtype, most=2 * N)
    rows = rings((own, pieces, ROWS, K // pieces))
    tiles = rings((stages, pieces, N, K // pieces))
    scratch = {
        "own_smem": (rows, rows),
        "tile_smem": (tiles, tiles),
        "sum_smem": plgpu.SMEM((stages, 2, N), jnp.float32),
        "row_smem": plgpu.SMEM((stages, 3, N), jnp.int32),
        "left_smem": staging((WARPGROUPS, ROWS, N), q_THK.dtype, static["interpret"]),
        "own_ready": plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=own),
        "ready": plgpu.Barrier(num_arrivals=2 * pieces + 2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        "done": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    C = S // (own * ROWS)
    body = functools.partial(_varlen_attention_dkv, tile=tile, pieces=pieces, **static)
    out = jax.ShapeDtypeStruct(k_SGK.shape, k_SGK.dtype)
    call = _call(body, (out, out), scratch, (G, C), ("head", "block"), static["interpret"])
    return call(block_table(over_queries.spans, own, C), over_queries.tiles, *inputs)


def _varlen_attention_dkv(
    table, tiles, rows_3T, sums_H2T, slopes, q_THK, k_SGK, v_SGK, dout_THK,
    dk_SGK, dv_SGK, *, own_smem, tile_smem, sum_smem, row_smem, left_smem,
    own_ready, ready, free, done, tile, pieces, spec, alibi, interpret,
):  # fmt: skip
    G, K = k_SGK.shape[1:]
    R, own, width = q_THK.shape[1] // G, WARPGROUPS // pieces, K // pieces
    N, stages = tile.block_dkv, tile.stages_dkv
    shape = (ROWS, N)  # key rows x query columns
    kv_head, warpgroup = lax.axis_index("head"), lax.axis_index("warpgroup")
    block = lax.axis_index("block")
    begin, end = (number(table, block, i) for i in range(2))

    def slot_of(c, r):  # the ring goes on from head to head of the group
        return lax.rem(r * (end - begin) + c - begin, jnp.int32(stages))

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        # Either rows of its own, or the same rows and columns of its own.
        mine, part = (f(warpgroup, jnp.int32(pieces)) for f in (lax.div, lax.rem))
        start = pl.multiple_of(block * (own * ROWS) + mine * ROWS, ROWS)
        first, full_first, full_last, last = (
            number(table, block, 2 + 4 * mine + j) for j in range(4)
        )
        plgpu.barrier_wait(own_ready.at[mine])

        def by_column(ref):
            x = plgpu.load(ref, layout=WGMMA.reduce(0), optimized=False)
            return lax.broadcast_in_dim(x, shape, [1])

        def step(c, carry, r, masked):
            dk, dv = carry
            slot = slot_of(c, r)
            plgpu.barrier_wait(ready.at[slot])
            here = afresh(mine, interpret)
            own_k, own_v = ([x.at[here, i] for i in range(pieces)] for x in own_smem)
            q, dout = (x.at[slot] for x in tile_smem)
            lse, delta = (sum_smem.at[slot, i] for i in range(2))
            lo, hi, place = (row_smem.at[slot, i] for i in range(3))
            s = product(own_k, [q.at[i] for i in range(pieces)], shape)
            key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=WGMMA) + start
            own_key = by_column(place) if alibi else None
            slope = slopes[kv_head * R + r] if alibi else None
            s, change = logits(s, key, own_key, slope, spec)
            p = jnp.exp2(s - by_column(lse))
            if masked:
                p = jnp.where(key >= by_column(lo), p, 0.0)
                p = jnp.where(key < by_column(hi), p, 0.0)
            left = left_smem.at[warpgroup]
            dv = multiply_into(dv, p.astype(q.dtype), dout.at[part], left, interpret)
            dp = product(own_v, [dout.at[i] for i in range(pieces)], shape)
            ds = p * (dp - by_column(delta)) * change
            dk = multiply_into(dk, ds.astype(q.dtype), q.at[part], left, interpret)
            plgpu.barrier_arrive(free.at[slot])
            return dk, dv

        def group(r, carry):
            def let_go(c, _):
                plgpu.barrier_wait(ready.at[slot_of(c, r)])
                plgpu.barrier_arrive(free.at[slot_of(c, r)])

            lax.fori_loop(begin, first, let_go, None)
            masked, plain = (functools.partial(step, r=r, masked=m) for m in (True, False))
            carry = lax.fori_loop(first, full_first, masked, carry)
            carry = lax.fori_loop(full_first, full_last, plain, carry)
            carry = lax.fori_loop(full_last, last, masked, carry)
            lax.fori_loop(last, end, let_go, None)
            return carry

        zeros = plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), WGMMA)
        sums = lax.fori_loop(0, R, group, (zeros, zeros))
        # With shared rows, the other warpgroup may still read what is now overwritten.
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        columns = pl.ds(pl.multiple_of(part * width, width), width)
        for total, smem, target in zip(sums, own_smem, (dk_SGK, dv_SGK), strict=True):
            smem[mine, part] = total.astype(k_SGK.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                smem.at[mine, part], target.at[pl.ds(start, ROWS), kv_head, columns]
            )
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _produce():
        plgpu.set_max_registers(24, action="decrease")

        def copy(sources, head, start, size, targets, place, barrier):
            for source, target in zip(sources, targets, strict=True):
                for i in range(pieces):
                    here = source.at[pl.ds(start, size), head, pl.ds(i * width, width)]
                    plgpu.copy_gmem_to_smem(here, target.at[place, i], barrier)

        for i in range(own):
            start = pl.multiple_of(block * (own * ROWS) + i * ROWS, ROWS)
            copy((k_SGK, v_SGK), kv_head, start, ROWS, own_smem, i, own_ready.at[i])

        @pl.loop(0, R)
        def _(r):
            head = kv_head * R + r

            @pl.loop(begin, end)
            def _(c):
                slot = slot_of(c, r)
                filled = r * (end - begin) + c - begin >= stages
                pl.when(filled)(lambda: plgpu.barrier_wait(free.at[slot]))
                start = pl.multiple_of(tiles[c] * N, N)
                copy((q_THK, dout_THK), head, start, N, tile_smem, slot, ready.at[slot])
                here = pl.ds(start, N)
                for source, target in ((sums_H2T.at[head], sum_smem), (rows_3T, row_smem)):
                    plgpu.copy_gmem_to_smem(source.at[:, here], target.at[slot], ready.at[slot])

        # Every phase of every barrier is observed before the block ends.
        total = R * (end - begin)

        @pl.loop(jnp.maximum(0, total - stages), total)
        def _(n):
            plgpu.barrier_wait(free.at[lax.rem(n, jnp.int32(stages))])
