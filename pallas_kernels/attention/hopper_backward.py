"""The backward kernels for Hopper: one for dq, one for dk and dv, deterministic; or one for all.

FlashAttention-2 (arXiv 2307.08691) section 3.1.2 with the roles of the forward kernel: two compute
warpgroups and a producer around a ring of tiles. Both recompute the weights from lse:

    dq    resident: 64 query rows a warpgroup; ring: tiles of K, V over the keys they see
          S = Q K^T, P = exp2(S - lse), dS = P (dO V^T - delta), dQ += dS K
    dkv   resident: 64 key rows a warpgroup; ring: tiles of Q, dO (lse, delta and rows beside them)
          over the queries that see them, for each query head of the group
          S^T = K Q^T, P^T, dV += P^T dO, dS^T = P^T (V dO^T - delta), dK += dS^T Q
    fused dkv that also adds each tile's dS K into dQ in device memory (FlashAttention-3 section
          3.2): 5 products instead of 7, and an order of additions that no one knows

Both start S and the product of dO and V before they wait for S: the weights are computed beside the
second, where registers suffice (`fits_beside`). The sums dQ, dK and dV are accumulators over all
tiles, waited for in each.

The ring of dkv follows the inverse table (ranges.py), so all do work in proportion to the useful
pairs. Head width 256: two accumulators of 256 columns do not fit in a warpgroup's registers, so
both warpgroups take the same 64 key rows (`row_group`; at other widths each has rows of its own)
and each half of the columns of dK and dV (`part`); they compute S^T and dP^T twice (1.5 times the
products of the others) and spill nothing. Shared memory then has no room for what fused needs:
width 256 has two kernels only.

Barriers: ready[s] completes with the tile's copies, free[s] with one arrival a warpgroup. Every
warpgroup passes every tile of the ring. Fused, with n the number of a tile:

    each compute   dS^T of its keys (0 where it sees none of the tile) -> ds[n % 2] | both
    warpgroup n%2  wait both, dQ = dS K over the keys of both, -> dq, TMA adds dq to memory

The other goes on to tile n + 1; ds[n % 2] is written again at n + 2, after both of n + 1.

Legend: as hopper_forward.py; N rows of a ring's tile, R = H / G.
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
from pallas_kernels.attention.blocks import (
    BLOCK_Q,
    WARPGROUPS,
    block_table,
    pad,
    row_slopes,
    short_rows,
)
from pallas_kernels.attention.ranges import Rows, visits
from pallas_kernels.attention.reference import Spec
from pallas_kernels.hopper import tiles as limits
from pallas_kernels.hopper.cards import COMPUTE_REGISTERS, ROWS
from pallas_kernels.hopper.epilogue import WGMMA
from pallas_kernels.hopper.logits import LOG2E, by_row, logits, product, row_vector, staging
from pallas_kernels.hopper.memory import number, swizzled, varying_as
from pallas_kernels.work import attention

FUSED_WIDTHS = (64, 96, 128)


@dataclasses.dataclass(frozen=True)
class Tile:
    """block: rows of a tile of either ring, of keys in dq, of queries in dkv.

    stages: tiles in flight in each. fused: one kernel, of block_dkv and stages_dkv, for all.
    """

    block_dq: int
    stages_dq: int
    block_dkv: int
    stages_dkv: int
    fused: bool = False


def dq_buffers(tile: Tile, width: int, dtype: Any) -> limits.Buffers:
    """The shared memory of a thread block of dq."""
    resident = ((WARPGROUPS, ROWS, width), dtype)
    tiles = ((tile.stages_dq, tile.block_dq, width), dtype)
    return {"q_smem": resident, "dout_smem": resident, "k_smem": tiles, "v_smem": tiles}


def dkv_buffers(tile: Tile, width: int, dtype: Any) -> limits.Buffers:
    """The shared memory of a thread block of dkv or of the fused kernel."""
    pieces = pieces_of(width)
    resident = ((WARPGROUPS // pieces, pieces, ROWS, width // pieces), dtype)
    tiles = ((tile.stages_dkv, pieces, tile.block_dkv, width // pieces), dtype)
    shared: dict[str, tuple[tuple[int, ...], Any]] = {
        "k_smem": resident,
        "v_smem": resident,
        "q_smem": tiles,
        "dout_smem": tiles,
        "sum_smem": ((tile.stages_dkv, 2, tile.block_dkv), jnp.float32),
        "row_smem": ((tile.stages_dkv, 3, tile.block_dkv), jnp.int32),
    }
    if tile.fused:
        shared["ds_smem"] = ((2, WARPGROUPS, ROWS, tile.block_dkv), dtype)
        shared["dq_smem"] = ((tile.block_dkv, width), jnp.float32)
    return shared


def pieces_of(width: int) -> int:
    """How many warpgroups share key rows, each with a piece of the columns."""
    return 1 if width <= 128 else WARPGROUPS


def fits_beside(tile: Tile, width: int, softcap: bool) -> bool:
    """Whether registers of dkv hold the product of V and dO while the weights are computed.

    The derivative of soft capping is one tile more (width 128: 268 bytes spill).
    """
    sums, logits_shape = (ROWS, width // pieces_of(width)), (ROWS, tile.block_dkv)
    needed = limits.accumulator_registers(sums, sums, *[logits_shape] * (3 if softcap else 2))
    return needed + 32 <= COMPUTE_REGISTERS[WARPGROUPS]


def check(tile: Tile, width: int, dtype: Any) -> None:
    """Raises: ValueError for tiles that the hardware does not take."""
    op = "varlen_attention backward"
    for name in ("block_dq", "block_dkv"):
        limits.check_multiple(op, name, getattr(tile, name), 32, 256)
    for name in ("stages_dq", "stages_dkv"):
        limits.check_multiple(op, name, getattr(tile, name), 1)
    if tile.fused and (tile.block_dkv != ROWS or width not in FUSED_WIDTHS):
        raise ValueError(
            f"{op}: fused needs block_dkv={ROWS}, got {tile.block_dkv}, and a head width of "
            f"{FUSED_WIDTHS}, got {width}"
        )
    # All live at once: sums, the weights and their derivative. What else is live is little.
    if not tile.fused:
        limits.check_shared(f"{op} (dq)", dq_buffers(tile, width, dtype))
        logits_shape = (ROWS, tile.block_dq)
        limits.check_registers(
            f"{op} (dq)", WARPGROUPS, (ROWS, width), logits_shape, logits_shape, spare=32
        )
    limits.check_shared(f"{op} (dkv)", dkv_buffers(tile, width, dtype))
    sums, logits_shape = (ROWS, width // pieces_of(width)), (ROWS, tile.block_dkv)
    limits.check_registers(
        f"{op} (dkv)", WARPGROUPS, sums, sums, logits_shape, logits_shape, spare=32
    )


def heuristic(width: int, longest: int | None = None, deterministic: bool = True) -> Tile:
    """The tiles with which nothing spills, and the most in flight that fits in SMEM.

    longest: rows of the longest segment, if known.
    """
    if not deterministic and width in FUSED_WIDTHS:
        return Tile(64, 4, 64, 2 if width > 96 else 4, fused=True)
    if short_rows(longest, 64) == 32:
        return Tile(32, 2, 32, 4) if width > 128 else Tile(32, 6, 32, 6)
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
    """Returns what reference.backward does, for bf16 and f16.

    Raises: ValueError for tiles that do not fit.
    """
    T, H, K = q_THK.shape
    S = k_SGK.shape[0]
    check(tile, K, q_THK.dtype)
    # A dead row's weights are exp2(s - inf) = 0.
    lse_HT = jnp.where((rows.lo < rows.hi)[None], lse_HT * LOG2E, jnp.inf)
    sums_H2T = pad(jnp.stack([lse_HT, delta_HT], 1), BLOCK_Q, axis=2)
    rows_3T = pad(jnp.stack([rows.lo, rows.hi, rows.self]), BLOCK_Q, axis=1)
    q_THK, dout_THK, k_SGK, v_SGK = (pad(x, BLOCK_Q) for x in (q_THK, dout_THK, k_SGK, v_SGK))
    slopes = row_slopes(None if slopes_H is None else slopes_H * LOG2E, H, 1)
    inputs = (rows_3T, sums_H2T, slopes, q_THK, k_SGK, v_SGK, dout_THK)
    static = {"spec": spec, "alibi": slopes_H is not None, "interpret": interpret}
    dkv = dkv_tables(rows, S, tile, K)
    if tile.fused:
        dq_THK, dk_SGK, dv_SGK = _fused(dkv, inputs, tile, static)
    else:
        dq_THK = _dq(dq_tables(rows, S, tile), inputs, tile, static)
        dk_SGK, dv_SGK = _dkv(dkv, inputs, tile, static)
    return varying_as(q_THK, (dq_THK[:T], dk_SGK[:S], dv_SGK[:S]))


def dq_tables(rows: Rows, keys: int, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Returns what dq reads: (its block table, the list of key tiles it points into)."""
    over_keys, _ = visits(rows, keys, ROWS, tile.block_dq)
    return block_table(over_keys.spans, WARPGROUPS), over_keys.tiles


def dkv_tables(rows: Rows, keys: int, tile: Tile, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns what dkv reads: (its block table, the list of query tiles it points into)."""
    _, over_queries = visits(rows, keys, tile.block_dkv, ROWS)
    return block_table(over_queries.spans, WARPGROUPS // pieces_of(width)), over_queries.tiles


def afresh(index, interpret: bool):
    """The index, computed anew where this is called.

    Otherwise the addresses of a warpgroup's own rows, one for each wgmma, stay in registers over
    the loop, and accumulators spill (120 bytes at head width 256; fused, 100 at 128).
    """
    return index if interpret else lax.optimization_barrier(index)


def multiply(acc_ref, left, right_smem, staging_smem, interpret: bool):
    """Starts acc += left right, left in registers: through shared memory where interpreted."""
    if interpret:
        staging_smem[...] = left
        plgpu.commit_smem()
        left = staging_smem
    plgpu.wgmma(acc_ref, left, right_smem)


def both_products(first, second, shape, then):
    """Starts two products; then(the first, a function that waits for the second).

    first, second: (lefts, rights), pieces in shared memory; right is transposed.
    """

    def run(*refs):
        for ref, pieces in zip(refs, (first, second), strict=True):
            for left, right in zip(*pieces, strict=True):
                plgpu.wgmma(ref, left, right.transpose((1, 0)))
        one = plgpu.wgmma_accumulator_load(refs[0], wait_n=len(second[0]))
        return then(one, lambda *_: refs[1][...])

    return pl.run_scoped(run, plgpu.ACC(shape), plgpu.ACC(shape))


def _work(name, inputs, spec):
    """dq makes 3 products again or anew, dkv 4, both together 5."""
    (T, H, K), S = inputs[3].shape, inputs[4].shape[0]
    pairs = T * S if spec.pairs is None else spec.pairs
    times = {"dq": 3, "dkv": 4, "fused": 5}[name]
    return attention(f"attention_{name}", pairs, H, (T, S, K), times)


def _call(name, body, out_type, scratch, grid, interpret):
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "block"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name=f"varlen_attention_{name}",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
    )


def _dq(tables, inputs, tile, static):
    q_THK = inputs[3]
    _, H, K = q_THK.shape
    shapes = dq_buffers(tile, K, q_THK.dtype)
    scratch = {
        # Tiles of K are both operands of wgmma: a swizzle must fit their rows as well.
        **{name: swizzled(*shapes[name], most=2 * tile.block_dq) for name in shapes},
        "ds_smem": staging((WARPGROUPS, ROWS, tile.block_dq), q_THK.dtype, static["interpret"]),
        "own_ready": plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
        "ready": plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages_dq),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tile.stages_dq),
    }
    body = functools.partial(_varlen_attention_dq, tile=tile, **static)
    out = jax.ShapeDtypeStruct(q_THK.shape, q_THK.dtype)
    grid = (H, tables[0].shape[0])
    call = _call("dq", body, out, scratch, grid, static["interpret"])
    with _work("dq", inputs, static["spec"]).scope(inputs, [out]):
        return call(*tables, *inputs)


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
        rows = (pl.ds(start, ROWS), head)
        own_q, own_dout = q_smem.at[warpgroup], dout_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_THK.at[rows], own_q, own_ready.at[warpgroup])
        plgpu.copy_gmem_to_smem(dout_THK.at[rows], own_dout, own_ready.at[warpgroup])
        lo, hi = (row_vector(rows_3T.at[i], start) for i in range(2))
        lse, delta = (row_vector(sums_H2T.at[head, i], start) for i in range(2))
        first, full_first, full_last, last = (
            number(table, block, 2 + 4 * warpgroup + j) for j in range(4)
        )
        position = by_row(row_vector(rows_3T.at[2], start), shape) if alibi else None
        slope = slopes[head, 0] if alibi else None
        plgpu.barrier_wait(own_ready.at[warpgroup])

        def weights(c, s, masked):
            """Returns the weights of a tile times the derivative of its logits."""
            key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + tiles[c] * N
            s, change = logits(s, key, position, slope, spec.scale, spec.softcap)
            p = jnp.exp2(s - by_row(lse, shape))
            if masked:
                p = jnp.where((key >= by_row(lo, shape)) & (key < by_row(hi, shape)), p, 0.0)
            return p * change

        def step(c, _, dq_ref, masked):
            slot = slot_of(c)
            plgpu.barrier_wait(ready.at[slot])
            here_q, here_dout = (x.at[afresh(warpgroup, interpret)] for x in (q_smem, dout_smem))

            def finish(s, derivative):
                p = weights(c, s, masked)
                return (p * (derivative() - by_row(delta, shape))).astype(q_THK.dtype)

            keys, values = ([here_q], [k_smem.at[slot]]), ([here_dout], [v_smem.at[slot]])
            ds = both_products(keys, values, shape, finish)
            multiply(dq_ref, ds, k_smem.at[slot], ds_smem.at[warpgroup], interpret)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot])

        def skip(c, _):
            plgpu.barrier_wait(ready.at[slot_of(c)])
            plgpu.barrier_arrive(free.at[slot_of(c)])

        def add_up(dq_ref):
            masked, plain = (
                functools.partial(step, dq_ref=dq_ref, masked=m) for m in (True, False)
            )
            lax.fori_loop(first, full_first, masked, None)
            lax.fori_loop(full_first, full_last, plain, None)
            lax.fori_loop(full_last, last, masked, None)
            return dq_ref[...]

        lax.fori_loop(begin, first, skip, None)
        dq = pl.run_scoped(add_up, plgpu.ACC((ROWS, K)))
        lax.fori_loop(last, end, skip, None)
        own_q[...] = dq.astype(q_THK.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(own_q, dq_THK.at[rows])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _produce():
        plgpu.set_max_registers(24, action="decrease")
        kv_head = lax.div(head, jnp.int32(H // k_SGK.shape[1]))

        @pl.loop(begin, end)
        def _(c):
            slot = slot_of(c)
            pl.when(c >= begin + stages)(lambda: plgpu.barrier_wait(free.at[slot]))
            rows = (pl.ds(pl.multiple_of(tiles[c] * N, N), N), kv_head)
            plgpu.copy_gmem_to_smem(k_SGK.at[rows], k_smem.at[slot], ready.at[slot])
            plgpu.copy_gmem_to_smem(v_SGK.at[rows], v_smem.at[slot], ready.at[slot])

        # Every phase of every barrier is observed before the block ends.
        @pl.loop(jnp.maximum(begin, end - stages), end)
        def _(c):
            plgpu.barrier_wait(free.at[slot_of(c)])


def copy_pieces(sources, head, rows, targets, place, barrier):
    """Starts loads of a head's rows, the columns in the pieces of shared memory."""
    for source, target in zip(sources, targets, strict=True):
        _, pieces, _, width = target.shape
        for i in range(pieces):
            piece = source.at[rows, head, pl.ds(i * width, width)]
            plgpu.copy_gmem_to_smem(piece, target.at[place, i], barrier)


def by_column(ref, shape):
    """Spreads one value a column over the rows."""
    x = plgpu.load(ref, layout=WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(x, shape, [1])


def weights_by_column(s, start, slope, sums, rows, spec, masked):
    """Returns (weights of key rows from `start` on x queries, the derivative of their logits).

    slope: None without ALiBi. sums, rows: those of the queries, in shared memory.
    """
    key = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=WGMMA) + start
    own_key = None if slope is None else by_column(rows.at[2], s.shape)
    s, change = logits(s, key, own_key, slope, spec.scale, spec.softcap)
    p = jnp.exp2(s - by_column(sums.at[0], s.shape))
    if masked:
        p = jnp.where(key >= by_column(rows.at[0], s.shape), p, 0.0)
        p = jnp.where(key < by_column(rows.at[1], s.shape), p, 0.0)
    return p, change


def _dkv(tables, inputs, tile, static, *sums):
    """sums: for the fused kernel, where it adds dq."""
    q_THK, k_SGK = inputs[3:5]
    G, K = k_SGK.shape[1:]
    pieces, N, stages = pieces_of(K), tile.block_dkv, tile.stages_dkv
    shapes = dkv_buffers(tile, K, q_THK.dtype)
    rings = {
        n: swizzled(*shapes[n], most=2 * N) for n in ("k_smem", "v_smem", "q_smem", "dout_smem")
    }
    scratch: dict[str, Any] = {
        "own_smem": (rings["k_smem"], rings["v_smem"]),
        "tile_smem": (rings["q_smem"], rings["dout_smem"]),
        "sum_smem": plgpu.SMEM(*shapes["sum_smem"]),
        "row_smem": plgpu.SMEM(*shapes["row_smem"]),
        "left_smem": staging((WARPGROUPS, 2, ROWS, N), q_THK.dtype, static["interpret"]),
        "own_ready": plgpu.Barrier(num_arrivals=2 * pieces, num_barriers=WARPGROUPS // pieces),
        "ready": plgpu.Barrier(num_arrivals=2 * pieces + 2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
        "done": plgpu.Barrier(num_arrivals=WARPGROUPS),
        "fused": (),
    }
    if tile.fused:
        # Both operands of a wgmma have one swizzle: that of K.
        ds = swizzled(*shapes["ds_smem"], most=plgpu.find_swizzle(K * 16))
        both = plgpu.Barrier(num_arrivals=WARPGROUPS)
        scratch["fused"] = (ds, swizzled(*shapes["dq_smem"]), both)
    body = functools.partial(_varlen_attention_dkv, tile=tile, pieces=pieces, **static)
    out = jax.ShapeDtypeStruct(k_SGK.shape, k_SGK.dtype)
    name, grid = "fused" if tile.fused else "dkv", (G, tables[0].shape[0])
    call = _call(name, body, (out, out), scratch, grid, static["interpret"])
    with _work(name, inputs, static["spec"]).scope((*inputs, *sums), [out, out]):
        return call(*tables, *inputs, *sums)


def _fused(tables, inputs, tile, static):
    """Returns (dq_THK, dk_SGK, dv_SGK).

    The interpreter knows no adding stores: there, each thread block has sums of its own.
    """
    q_THK = inputs[3]
    blocks = tables[0].shape[0] if static["interpret"] else 1
    # Inside a shard_map a kernel takes no references that vary: `varying_as` comes afterwards.
    sums = jax.new_ref(jnp.zeros((blocks, *q_THK.shape), jnp.float32))
    dk_SGK, dv_SGK = _dkv(tables, inputs, tile, static, sums)
    return jax.freeze(sums).sum(0).astype(q_THK.dtype), dk_SGK, dv_SGK


def _varlen_attention_dkv(
    table, tiles, rows_3T, sums_H2T, slopes, q_THK, k_SGK, v_SGK, dout_THK, *outputs,
    own_smem, tile_smem, sum_smem, row_smem, left_smem, fused,
    own_ready, ready, free, done, tile, pieces, spec, alibi, interpret,
):  # fmt: skip
    *dq_1THK, dk_SGK, dv_SGK = outputs
    G, K = k_SGK.shape[1:]
    R, row_groups, width = q_THK.shape[1] // G, WARPGROUPS // pieces, K // pieces
    N, stages = tile.block_dkv, tile.stages_dkv
    shape = (ROWS, N)  # key rows x query columns
    kv_head, warpgroup = lax.axis_index("head"), lax.axis_index("warpgroup")
    block = lax.axis_index("block")
    begin, end = (number(table, block, i) for i in range(2))

    def number_of(c, r):  # the ring goes on from head to head of the group
        return r * (end - begin) + c - begin

    def slot_of(c, r):
        return lax.rem(number_of(c, r), jnp.int32(stages))

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        row_group, part = (f(warpgroup, jnp.int32(pieces)) for f in (lax.div, lax.rem))
        start = pl.multiple_of(block * (row_groups * ROWS) + row_group * ROWS, ROWS)
        first, full_first, full_last, last = (
            number(table, block, 2 + 4 * row_group + j) for j in range(4)
        )
        plgpu.barrier_wait(own_ready.at[row_group])

        def share(c, r, ds):  # adds the tile's part of dq
            ds_smem, dq_smem, both = fused
            parity = afresh(lax.rem(number_of(c, r), jnp.int32(2)), interpret)
            ds_smem[parity, warpgroup] = ds
            plgpu.commit_smem()
            # Its last tile of dq has left shared memory: the other may write there.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(both)
            plgpu.barrier_wait(both)

            @pl.when(warpgroup == parity)
            def _():
                def multiply(acc_ref):
                    for i in range(row_groups):
                        keys = own_smem[0].at[afresh(jnp.int32(i), interpret), 0]
                        plgpu.wgmma(acc_ref, ds_smem.at[parity, i].transpose((1, 0)), keys)
                    return acc_ref[...]

                dq_smem[...] = pl.run_scoped(multiply, plgpu.ACC((N, K), jnp.float32))
                plgpu.commit_smem()
                queries = pl.ds(pl.multiple_of(tiles[c] * N, N), N)
                target = dq_1THK[0].at[block if interpret else 0, queries, kv_head * R + r]
                plgpu.copy_smem_to_gmem(dq_smem, target, reduction_op=None if interpret else "add")

        def step(c, _, r, sums, masked):
            dk_ref, dv_ref = sums
            slot = slot_of(c, r)
            plgpu.barrier_wait(ready.at[slot])
            group_index = afresh(row_group, interpret)
            own_k, own_v = ([x.at[group_index, i] for i in range(pieces)] for x in own_smem)
            q, dout = (x.at[slot] for x in tile_smem)

            qs, douts = ([x.at[i] for i in range(pieces)] for x in (q, dout))

            def finish(s, derivative):
                slope = slopes[kv_head * R + r, 0] if alibi else None
                sums_here, rows_here = sum_smem.at[slot], row_smem.at[slot]
                p, change = weights_by_column(s, start, slope, sums_here, rows_here, spec, masked)
                left = p.astype(q.dtype)
                # Before dp: the tiles that are live at once are what registers must hold.
                p *= change
                ds = p * (derivative(left) - by_column(sums_here.at[1], shape))
                return left, ds.astype(q.dtype)

            def add_dv(p):
                multiply(dv_ref, p, dout.at[part], left_smem.at[warpgroup, 0], interpret)

            def in_turn(p):
                add_dv(p)
                plgpu.wgmma_wait(0)
                return product(own_v, douts, shape)

            if fits_beside(tile, K, spec.softcap is not None):
                p, ds = both_products((own_k, qs), (own_v, douts), shape, finish)
                add_dv(p)
            else:
                _, ds = finish(product(own_k, qs, shape), in_turn)
            multiply(dk_ref, ds, q.at[part], left_smem.at[warpgroup, 1], interpret)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(free.at[slot])
            if fused:
                share(c, r, ds)

        def group(r, _, sums):
            def skip(c, _):
                plgpu.barrier_wait(ready.at[slot_of(c, r)])
                plgpu.barrier_arrive(free.at[slot_of(c, r)])
                if fused:
                    share(c, r, plgpu.layout_cast(jnp.zeros(shape, k_SGK.dtype), WGMMA))

            lax.fori_loop(begin, first, skip, None)
            masked, plain = (
                functools.partial(step, r=r, sums=sums, masked=m) for m in (True, False)
            )
            lax.fori_loop(first, full_first, masked, None)
            lax.fori_loop(full_first, full_last, plain, None)
            lax.fori_loop(full_last, last, masked, None)
            lax.fori_loop(last, end, skip, None)

        def add_up(*sums):
            lax.fori_loop(0, R, functools.partial(group, sums=sums), None)
            return tuple(ref[...] for ref in sums)

        sums = pl.run_scoped(add_up, *(plgpu.ACC((ROWS, width)) for _ in range(2)))
        # With shared rows, the other warpgroup may still read what is now overwritten.
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)
        columns = pl.ds(pl.multiple_of(part * width, width), width)
        for total, smem, target in zip(sums, own_smem, (dk_SGK, dv_SGK), strict=True):
            smem[row_group, part] = total.astype(k_SGK.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                smem.at[row_group, part], target.at[pl.ds(start, ROWS), kv_head, columns]
            )
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _produce():
        plgpu.set_max_registers(24, action="decrease")
        for i in range(row_groups):
            start = pl.multiple_of(block * (row_groups * ROWS) + i * ROWS, ROWS)
            rows = pl.ds(start, ROWS)
            copy_pieces((k_SGK, v_SGK), kv_head, rows, own_smem, i, own_ready.at[i])

        @pl.loop(0, R)
        def _(r):
            head = kv_head * R + r

            @pl.loop(begin, end)
            def _(c):
                slot = slot_of(c, r)
                pl.when(number_of(c, r) >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                start = pl.multiple_of(tiles[c] * N, N)
                queries = pl.ds(start, N)
                copy_pieces((q_THK, dout_THK), head, queries, tile_smem, slot, ready.at[slot])
                for source, target in ((sums_H2T.at[head], sum_smem), (rows_3T, row_smem)):
                    plgpu.copy_gmem_to_smem(source.at[:, queries], target.at[slot], ready.at[slot])

        # Every phase of every barrier is observed before the block ends.
        total = R * (end - begin)

        @pl.loop(jnp.maximum(0, total - stages), total)
        def _(n):
            plgpu.barrier_wait(free.at[lax.rem(n, jnp.int32(stages))])
