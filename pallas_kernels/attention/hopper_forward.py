"""The forward kernel for Hopper, after FlashAttention-3 (arXiv 2407.08608) sections 3.1 and 3.2.

One thread block takes 128 query rows of one head: two compute warpgroups of 64 rows and a warpgroup
that only starts copies. For short segments the 64 rows may be fewer positions of several heads of a
group, which see the same keys (FlashAttention-3's pack_gqa): head by head, each a TMA copy of whole
8-row tiles. Tiles of keys and values come through a ring of `stages` buffers:

    producer      wait k_free[s] | TMA K -> k_ready[s]      wait v_free[s] | TMA V -> v_ready[s]
    each compute  wait k_ready[s], S = Q K^T, arrive k_free[s], mask, softmax,
                  wait v_ready[s], O += P V, arrive v_free[s]
    overlap       each compute: S of tile c, then O += P V of tile c - 1, are both started; softmax
                  of c when S is there (wgmma_wait(1)) beside the second product; wgmma_wait(0)
    turns         the two compute warpgroups alternate: one has the tensor cores while the other
                  does its softmax; each step passes the barrier twice

The table of ranges.py lists the tiles; all lie on the aligned grid. Both warpgroups pass every tile
that either needs, so that each observes every phase of every barrier; a tile that only the other
needs is released at once. The other tiles of a warpgroup fall in three loops: masked, without a
mask, masked. Softmax is in base 2, as the hardware's exponential is.

Legend: T query rows, S key rows, H query heads, G key-value heads, K head width, C thread blocks of
128 rows, N rows of a key tile, P positions of a warpgroup, X = T x heads of a tile: rows in the
order of the tiles.
"""

import dataclasses
import functools
import math
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
from pallas_kernels.attention.reference import LOWEST, Spec
from pallas_kernels.hopper import tiles as limits
from pallas_kernels.hopper.cards import ROWS
from pallas_kernels.hopper.epilogue import WGMMA
from pallas_kernels.hopper.logits import LOG2E, by_row, logits, product, row_vector, staging
from pallas_kernels.hopper.memory import number, swizzled, varying_as
from pallas_kernels.work import attention

HEADS = 8  # of a tile at most: TMA writes whole tiles of 8 rows
SMALL_BYTES = 3 * 1024  # (measured, deviceless: what barriers and staging take beside the tiles)


@dataclasses.dataclass(frozen=True)
class Tile:
    """block_k: key rows of a tile. stages: tiles in flight.

    heads: query heads of one group that share the 64 rows of a warpgroup, 64 / heads positions of
    each. overlap: a warpgroup starts the next tile's logits before this tile's softmax.
    """

    block_k: int
    stages: int
    heads: int = 1
    overlap: bool = True


def heuristic(width: int, group: int = 1, longest: int | None = None) -> Tile:
    """Returns the tile if nothing was measured: the largest that fits, smaller for short segments.

    group: query heads that share a key-value head. longest: rows of the longest segment, if known.
    """
    block_k = short_rows(longest, 64 if width > 128 else 128)
    heads = math.gcd(group, HEADS) if longest is not None and longest <= 256 else 1
    # 128 KiB of keys and values in flight.
    return Tile(block_k, min(8, max(2, 32768 // (block_k * width))), heads)


def buffers(tile: Tile, width: int, dtype: Any) -> limits.Buffers:
    """The shared memory of a thread block."""
    keys = ((tile.stages, tile.block_k, width), dtype)
    return {
        "q_smem": ((WARPGROUPS, ROWS, width), dtype),
        "k_smem": keys,
        "v_smem": keys,
        "lse_smem": ((WARPGROUPS, ROWS), jnp.float32),
    }


def check(tile: Tile, width: int, group: int, dtype: Any) -> None:
    """Raises: ValueError for a tile that the hardware does not take."""
    op = "varlen_attention forward"
    limits.check_multiple(op, "block_k", tile.block_k, 32, 256)
    limits.check_multiple(op, "stages", tile.stages, 1)
    if math.gcd(group, HEADS) % tile.heads:
        raise ValueError(
            f"{op}: heads={tile.heads} of a tile must divide {HEADS} and the {group} heads of a "
            f"group; nearest: {math.gcd(tile.heads, math.gcd(group, HEADS))}"
        )
    small = {"barriers and staging": ((SMALL_BYTES,), jnp.int8)}
    limits.check_shared(op, {**buffers(tile, width, dtype), **small})
    limits.check_registers(op, WARPGROUPS, (ROWS, width), (ROWS, tile.block_k))
    # A warpgroup keeps a tile of values while it waits for the next tile of keys.
    if tile.overlap and tile.stages < 2:
        raise ValueError(f"{op}: stages={tile.stages} deadlocks with overlap; nearest: 2")


def forward(
    q_THK: jax.Array,
    k_SGK: jax.Array,
    v_SGK: jax.Array,
    rows: Rows,
    slopes_H: jax.Array | None,
    *,
    spec: Spec,
    tile: Tile,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns what reference.forward does, for bf16 and f16; copies nothing that is whole tiles.

    Raises: ValueError for a tile that does not fit.
    """
    (T, H, K), (S, G, _) = q_THK.shape, k_SGK.shape
    check(tile, K, H // G, q_THK.dtype)
    P = ROWS // tile.heads
    table, tiles = tables(rows, S, tile)
    rows_3T = pad(jnp.stack([rows.lo, rows.hi, rows.self]), WARPGROUPS * P, axis=1)
    rows_3X = by_tile(rows_3T[:, None].repeat(tile.heads, 1), tile.heads)
    q_THK = pad(q_THK, WARPGROUPS * P)
    k_SGK, v_SGK = (pad(x, tile.block_k) for x in (k_SGK, v_SGK))
    shapes = buffers(tile, K, q_THK.dtype)
    # Tiles of V have the products' inner dimension as rows: a swizzle must fit those as well.
    scratch = {
        "q_smem": swizzled(*shapes["q_smem"]),
        "k_smem": swizzled(*shapes["k_smem"]),
        "v_smem": swizzled(*shapes["v_smem"], most=2 * math.gcd(tile.block_k, 64)),
        "lse_smem": plgpu.SMEM(*shapes["lse_smem"]),
        "p_smem": staging((WARPGROUPS, ROWS, tile.block_k), q_THK.dtype, interpret),
        "q_ready": plgpu.Barrier(num_arrivals=tile.heads, num_barriers=WARPGROUPS),
        "k_ready": plgpu.Barrier(num_barriers=tile.stages),
        "v_ready": plgpu.Barrier(num_barriers=tile.stages),
        "k_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tile.stages),
        "v_free": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=tile.stages),
        "switch": plgpu.Barrier(num_arrivals=WARPGROUPS),
    }
    slopes_H = None if slopes_H is None else slopes_H * LOG2E
    body = functools.partial(
        _body, spec=spec, tile=tile, alibi=slopes_H is not None, interpret=interpret
    )
    results = (
        jax.ShapeDtypeStruct(q_THK.shape, q_THK.dtype),
        jax.ShapeDtypeStruct((H // tile.heads, rows_3X.shape[1]), jnp.float32),
    )
    kernel = plgpu.kernel(
        body,
        out_type=results,
        scratch_types=scratch,
        grid=(H // tile.heads, table.shape[0]),
        grid_names=("head", "block"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        kernel_name="varlen_attention_forward",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
    )
    pairs = T * S if spec.pairs is None else spec.pairs
    done = attention("attention_forward", pairs, H, (T, S, K), 2)
    with done.scope((q_THK, k_SGK, v_SGK, rows_3X), results):
        out_THK, lse_HX = kernel(
            table, tiles, rows_3X, row_slopes(slopes_H, H, tile.heads), q_THK, k_SGK, v_SGK
        )
    lse_HT = lse_HX.reshape(H // tile.heads, -1, tile.heads, P).swapaxes(1, 2).reshape(H, -1)
    return varying_as(q_THK, (out_THK[:T], lse_HT[:, :T]))


def tables(rows: Rows, keys: int, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Returns what the kernel reads: (its block table, the list of tiles it points into)."""
    over_keys, _ = visits(rows, keys, ROWS // tile.heads, tile.block_k)
    return block_table(over_keys.spans, WARPGROUPS), over_keys.tiles


def by_tile(x_RT: jax.Array, heads: int) -> jax.Array:
    """(..., heads, T) as rows of tiles: 64 / heads positions of each head, then the next ones."""
    x = x_RT.reshape(*x_RT.shape[:-1], -1, ROWS // heads)
    return x.swapaxes(-3, -2).reshape(*x_RT.shape[:-2], -1)


def multiply_into(acc, left, right_smem, staging_smem, interpret: bool):
    """acc + left right, left in registers.

    The interpreter knows neither such operands nor initialised accumulators: there, left goes
    through shared memory, and the sum is made afterwards.
    """
    if interpret:
        staging_smem[...] = left
        plgpu.commit_smem()

        def run(acc_ref):
            plgpu.wgmma(acc_ref, staging_smem, right_smem)
            return acc_ref[...]

        return acc + pl.run_scoped(run, plgpu.ACC(acc.shape, jnp.float32))
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, left, right_smem))(plgpu.ACC.init(acc))


def logits_beside_sum(factors, acc, weighted, staging_smem, then, like, interpret) -> tuple:
    """Starts left right^T, then acc + weights values; then(the first) runs beside the second.

    factors: (left, right). weighted: (weights, in registers, values). then: returns arrays like
    those of `like`. Returns: (acc + weights values, what `then` returns).
    """
    (left, right), (weights, values) = factors, weighted
    shape = (left.shape[0], right.shape[0])

    def run(acc_ref, logits_ref, weights):
        plgpu.wgmma(logits_ref, left, right.transpose((1, 0)))
        plgpu.wgmma(acc_ref, weights, values)
        return then(plgpu.wgmma_accumulator_load(logits_ref, wait_n=1))

    if interpret:  # as in `multiply_into`
        staging_smem[...] = weights
        plgpu.commit_smem()

        def both(acc_ref, logits_ref):
            results = run(acc_ref, logits_ref, staging_smem)
            return acc + acc_ref[...], results

        return pl.run_scoped(both, plgpu.ACC(acc.shape), plgpu.ACC(shape))

    def initialised(refs):
        acc_ref, result_refs = refs

        def scoped(logits_ref):
            for ref, result in zip(result_refs, run(acc_ref, logits_ref, weights), strict=True):
                ref[...] = result

        pl.run_scoped(scoped, plgpu.ACC(shape))

    return pl.run_state(initialised)((plgpu.ACC.init(acc), like))


@dataclasses.dataclass(frozen=True)
class _Warpgroup:
    """The steps of a compute warpgroup, c the number of a tile in the list.

    Their carry: acc, maximum, total and, with overlap, the weights of the tile before.
    shape: the size of a tile of logits. bias: its rows' (positions, slopes), or None. span: the
    keys that its rows see.
    """

    own_q: Any
    k_smem: Any
    v_smem: Any
    p_smem: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any
    switch: Any
    tiles: Any
    slot_of: Any
    shape: tuple[int, int]
    bias: tuple[Any, Any]
    span: tuple[Any, Any]
    spec: Spec
    interpret: bool

    def take_turn(self):
        plgpu.barrier_arrive(self.switch)
        plgpu.barrier_wait(self.switch)

    def softmax(self, c, s, maximum, total, masked):
        """Returns (weights, maximum, total, the factor of sums so far)."""
        shape = s.shape
        key = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=WGMMA) + self.tiles[c] * shape[1]
        s, _ = logits(s, key, *self.bias, self.spec.scale, self.spec.softcap)
        if masked:
            lo, hi = (by_row(x, shape) for x in self.span)
            s = jnp.where((key >= lo) & (key < hi), s, -jnp.inf)
        new = jnp.maximum(maximum, s.max(axis=1))
        shrink = jnp.exp2(maximum - new)
        p = jnp.exp2(s - by_row(new, shape))
        return p, new, total * shrink + p.sum(axis=1), shrink

    def first_logits(self, c):
        slot = self.slot_of(c)
        plgpu.barrier_wait(self.k_ready.at[slot])
        s = product([self.own_q], [self.k_smem.at[slot]], self.shape, self.take_turn)
        plgpu.barrier_arrive(self.k_free.at[slot])
        return s

    def waiting(self, c, carry, masked):
        """A tile: its logits, their softmax, its part of the sum, one after the other."""
        acc, maximum, total = carry
        p, new, total, shrink = self.softmax(c, self.first_logits(c), maximum, total, masked)
        acc *= by_row(shrink, acc.shape)
        p = p.astype(self.own_q.dtype)
        if not self.interpret:
            acc, total, new, p = lax.optimization_barrier((acc, total, new, p))
        plgpu.barrier_arrive(self.switch)  # the other's products may start
        slot = self.slot_of(c)
        plgpu.barrier_wait(self.v_ready.at[slot])
        plgpu.barrier_wait(self.switch)
        acc = multiply_into(acc, p, self.v_smem.at[slot], self.p_smem, self.interpret)
        plgpu.barrier_arrive(self.v_free.at[slot])
        return acc, new, total

    def begin(self, c, carry):
        """The first tile's weights."""
        acc, maximum, total, _ = carry
        p, maximum, total, _ = self.softmax(c, self.first_logits(c), maximum, total, True)
        self.take_turn()
        return acc, maximum, total, p.astype(self.own_q.dtype)

    def overlapped(self, c, carry, masked):
        """A tile's logits and weights, and beside its softmax the part of the tile before."""
        acc, maximum, total, p = carry
        slot, before = self.slot_of(c), self.slot_of(c - 1)
        plgpu.barrier_wait(self.k_ready.at[slot])
        plgpu.barrier_wait(self.v_ready.at[before])

        def then(s):
            self.take_turn()
            plgpu.barrier_arrive(self.k_free.at[slot])
            result = self.softmax(c, s, maximum, total, masked)
            plgpu.barrier_arrive(self.switch)
            return result

        like = (jnp.zeros(self.shape, jnp.float32), maximum, total, total)
        acc, (p, new, total, shrink) = logits_beside_sum(
            (self.own_q, self.k_smem.at[slot]),
            acc,
            (p, self.v_smem.at[before]),
            self.p_smem,
            then,
            like,
            self.interpret,
        )
        if not self.interpret:
            # Not before the products are over: those of the weights before read registers.
            acc, p = lax.optimization_barrier((acc, p))
        plgpu.barrier_arrive(self.v_free.at[before])
        plgpu.barrier_wait(self.switch)
        return acc * by_row(shrink, acc.shape), new, total, p.astype(self.own_q.dtype)

    def end(self, c, carry):
        """The last tile's part of the sum."""
        acc, maximum, total, p = carry
        slot = self.slot_of(c)
        plgpu.barrier_wait(self.v_ready.at[slot])
        acc = multiply_into(acc, p, self.v_smem.at[slot], self.p_smem, self.interpret)
        plgpu.barrier_arrive(self.v_free.at[slot])
        return acc, maximum, total, p

    def skip(self, c, _):
        """A tile that only the other warpgroup needs."""
        slot = self.slot_of(c)
        plgpu.barrier_wait(self.k_ready.at[slot])
        plgpu.barrier_arrive(self.k_free.at[slot])
        self.take_turn()
        plgpu.barrier_wait(self.v_ready.at[slot])
        plgpu.barrier_arrive(self.v_free.at[slot])
        self.take_turn()


def _body(
    table, tiles, rows_3X, slopes, q_THK, k_SGK, v_SGK, out_THK, lse_HX,
    *, q_smem, k_smem, v_smem, lse_smem, p_smem, q_ready, k_ready, v_ready, k_free, v_free, switch,
    spec, tile, alibi, interpret,
):  # fmt: skip
    H, K = q_THK.shape[1:]
    N, stages, P = tile.block_k, tile.stages, ROWS // tile.heads
    shape = (ROWS, N)
    head, warpgroup = lax.axis_index("head"), lax.axis_index("warpgroup")
    # Later rows see more keys under a causal mask: the long blocks start first.
    block = table.shape[0] - 1 - lax.axis_index("block")
    begin, end = (number(table, block, i) for i in range(2))

    def slot_of(c):
        return lax.rem(c - begin, jnp.int32(stages))

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        start = pl.multiple_of(block * BLOCK_Q + warpgroup * ROWS, ROWS)
        place = pl.multiple_of((block * WARPGROUPS + warpgroup) * P, P)
        own_q = q_smem.at[warpgroup]
        # What lies where: each head's rows in memory and in the tile.
        parts = [
            ((pl.ds(place, P), head * tile.heads + r), own_q.at[pl.ds(r * P, P)])
            for r in range(tile.heads)
        ]
        for rows, part in parts:
            plgpu.copy_gmem_to_smem(q_THK.at[rows], part, q_ready.at[warpgroup])
        lo, hi = (row_vector(rows_3X.at[i], start) for i in range(2))
        first, full_first, full_last, last = (
            number(table, block, 2 + 4 * warpgroup + j) for j in range(4)
        )
        position = by_row(row_vector(rows_3X.at[2], start), shape) if alibi else None
        slope = by_row(row_vector(slopes.at[head], 0), shape) if alibi else None
        do = _Warpgroup(
            own_q, k_smem, v_smem, p_smem.at[warpgroup], k_ready, v_ready, k_free, v_free, switch,
            tiles, slot_of, shape, (position, slope), (lo, hi), spec, interpret,
        )  # fmt: skip
        plgpu.barrier_wait(q_ready.at[warpgroup])
        pl.when(warpgroup == 1)(do.take_turn)

        def filled(value):
            return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), WGMMA.reduce(1))

        acc = plgpu.layout_cast(jnp.zeros((ROWS, K), jnp.float32), WGMMA)
        carry = (acc, filled(LOWEST), filled(0.0))
        lax.fori_loop(begin, first, do.skip, None)
        step, start_of = do.waiting, first
        if tile.overlap:
            p = plgpu.layout_cast(jnp.zeros(shape, q_THK.dtype), WGMMA)
            second = jnp.minimum(first + 1, last)
            carry = lax.fori_loop(first, second, do.begin, (*carry, p))
            step, start_of = do.overlapped, second
        masked, plain = (functools.partial(step, masked=m) for m in (True, False))
        full_first, full_last = (jnp.maximum(start_of, x) for x in (full_first, full_last))
        carry = lax.fori_loop(start_of, full_first, masked, carry)
        carry = lax.fori_loop(full_first, full_last, plain, carry)
        carry = lax.fori_loop(full_last, last, masked, carry)
        if tile.overlap:
            *carry, _ = lax.fori_loop(jnp.maximum(first, last - 1), last, do.end, carry)
        lax.fori_loop(last, end, do.skip, None)
        pl.when(warpgroup == 0)(do.take_turn)

        acc, maximum, total = carry
        live = lo < hi
        total = jnp.where(live, total, 1.0)
        acc = jnp.where(by_row(live, acc.shape), acc / by_row(total, acc.shape), 0.0)
        own_q[...] = acc.astype(q_THK.dtype)  # all reads of q are over
        lse = (maximum + jnp.log2(total)) / LOG2E
        lse_smem[warpgroup] = jnp.where(live, lse, -jnp.inf)
        plgpu.commit_smem()
        for rows, part in parts:
            plgpu.copy_smem_to_gmem(part, out_THK.at[rows])
        plgpu.copy_smem_to_gmem(lse_smem.at[warpgroup], lse_HX.at[head, pl.ds(start, ROWS)])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == WARPGROUPS)
    def _produce():
        plgpu.set_max_registers(40, action="decrease")
        kv_head = lax.div(head, jnp.int32(H // k_SGK.shape[1] // tile.heads))

        @pl.loop(begin, end)
        def _(c):
            slot = slot_of(c)
            rows = (pl.ds(pl.multiple_of(tiles[c] * N, N), N), kv_head)
            for source, target, ready, free in (
                (k_SGK, k_smem, k_ready, k_free),
                (v_SGK, v_smem, v_ready, v_free),
            ):
                pl.when(c >= begin + stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                plgpu.copy_gmem_to_smem(source.at[rows], target.at[slot], ready.at[slot])

        # Every phase of every barrier is observed before the block ends.
        @pl.loop(jnp.maximum(begin, end - stages), end)
        def _(c):
            plgpu.barrier_wait(k_free.at[slot_of(c)])
            plgpu.barrier_wait(v_free.at[slot_of(c)])
