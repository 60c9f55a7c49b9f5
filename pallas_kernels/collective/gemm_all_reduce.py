"""Product + all-reduce in one kernel, for the few rows of decoding: every rank gets every sum.

Little computation can hide such a small exchange, so its steps are as few as possible: the
epilogue stores a piece of sums to all ranks, from the same shared memory, and each rank adds up
what came, rank 0's first, so that all ranks have the same bits in every run. No block is kept for
communication, nothing is stored twice. Bytes on the wire: (R - 1) m n sums a rank against
2 (R - 1) / R m n of an all-reduce in two steps, which is why this is for small m only.

    compute    product, sums to inbox[my rank] of every rank | arrive flag[tile] at every rank
    the same   for my tiles: wait for R ranks' arrivals; y = inbox[0] + ... + inbox[R - 1] + bias

Source of the one-shot exchange: TensorRT-LLM's custom all-reduce; papers: Flux section 5 (decode).

Legend: K contracted (this rank's share), M rows, N columns.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import engine, fused, relay
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.fused import Fusion
from pallas_kernels.hopper.memory import span
from pallas_kernels.hopper.peers import Peers
from pallas_kernels.work import product

NAME = "gemm_all_reduce"


def gemm_all_reduce(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    delays: jax.Array | None = None,
    into: Any = None,
    *,
    rows: int,
    peers: Peers,
    fusion: Fusion,
    spec: Spec,
    turned: bool = False,
    blocks: int = SMS,
) -> jax.Array:
    """all_reduce(x w) + bias + residual, the same on every rank.

    C: `peers.copies`, the ranks whose arrays these are; 1 but for virtual ranks.
    Args:
      x: (C, height, K), height at least the tile's and a multiple of 8.
      w: (C, K, N), or (C, N, K) where turned; N at least the tile's; K a multiple of 64, N of 128,
        as the tile's columns.
      bias: (C, N) float32. residual: (C, height, N).
      delays: (C,) int32, ns that a rank starts late (tests).
      into: a jax.Ref of (C R, height, N) sums, for what arrives (tests: full of NaN).
      rows: how many rows of x are live.
      fusion: without communication blocks; its chunk is not used.
      spec: out_dtype is that of the sums that cross ranks; the result has x's.
      blocks: thread blocks, at most what the GPU runs at once.
    Returns: y (C, height, N); rows past `rows` are undefined.
    """
    copies, R, tile = peers.copies, peers.ranks, fusion.tile
    clusters = fused.clusters_of(NAME, fusion, peers, blocks, copying=False)
    (_, height, K), N = x.shape, w.shape[2 - turned]
    inputs = {"x": x, "w": w, "bias": bias, "residual": residual, "delays": delays, "inbox": into}
    sums = jnp.dtype(spec.out_dtype)
    outputs = {"y": jax.ShapeDtypeStruct((copies, height, N), x.dtype)}
    if into is None:
        outputs["inbox"] = jax.ShapeDtypeStruct((peers.reached * R, height, N), sums)
    worker = functools.partial(fused.Worker, peers, fusion, clusters, turned)
    shared = engine.buffers(tile, x.dtype, sums, turned_b=turned)
    return engine.launch(
        functools.partial(_body, steps=pl.cdiv(K, tile.block_k), rows=rows, of=worker),
        inputs,
        outputs,
        fused.scratch(NAME, fusion, shared, functools.partial(relay.scratch, N, sums)),
        work=product(NAME, copies * rows, N, K),
        tile=tile,
        clusters=clusters * copies,
    )["y"]


def _body(gmem, *, steps, rows, of, **memory):
    worker = of(steps, memory, gmem.get("delays"))
    peers, tile, rank = worker.peers, worker.tile, worker.rank
    R, N = peers.ranks, gmem["y"].shape[2]
    sent = jnp.dtype(gmem["inbox"].dtype).itemsize
    across = pl.cdiv(N, tile.block_n)
    total = pl.cdiv(rows, tile.block_m * tile.cluster) * across
    # A flag for each tile, at each rank.
    flags = peers.flags(total)

    def corner(i):
        """The cluster's first row, and the first column."""
        row = lax.div(i, jnp.int32(across)) * (tile.cluster * tile.block_m)
        return row, pl.multiple_of(lax.rem(i, jnp.int32(across)) * tile.block_n, tile.block_n)

    def load(place, s, buffer, barrier):
        (row, column), k = place, span(s, tile.block_k)
        worker.load_left(peers.private_page(gmem["x"]).at[worker.rows(row), k], buffer, barrier)
        n = pl.ds(column, tile.block_n)
        worker.load_right(peers.private_page(gmem["w"]), n, k, buffer, barrier)

    def send(i, acc):
        began = peers.now()
        row, column = corner(i)
        top = worker.top(row)

        def copy(piece, down, right):
            part = pl.ds(top + down, piece.shape[0]), pl.ds(column + right, piece.shape[1])
            for distance in range(R):
                to = lax.rem(rank + distance, R)
                inbox = peers.peer(gmem["inbox"], to, rank)
                plgpu.copy_smem_to_gmem(piece, inbox.at[part], commit_group=distance == R - 1)

        worker.store(acc, lambda z, _: z, copy)
        plgpu.wait_smem_to_gmem(0)
        peers.pace(began, jnp.int32((R - 1) * tile.block_m * tile.block_n * sent))
        pl.loop(0, R)(lambda d: peers.signal(flags, lax.rem(rank + d, R), i))

    def reduce(i):
        peers.wait(flags, i, R * tile.cluster * tile.warpgroups)
        row, column = corner(i)
        row = worker.top(row)
        each = 256 if tile.block_n % 256 == N % 256 == 0 else 128
        layout = plgpu.Layout.WG_STRIDED((each,), vec_size=each // 128)
        wide = lax.div(jnp.minimum(N - column, tile.block_n), each)

        @pl.loop(0, jnp.clip(rows - row, 0, tile.rows) * wide)
        def _(p):
            m, at = row + lax.div(p, wide), pl.ds(column + lax.rem(p, wide) * each, each)

            def read(ref: Any, *index: Any) -> Any:
                values = plgpu.load(ref.at[(*index, at)], layout=layout, optimized=False)
                return values.astype(jnp.float32)

            parts = [read(peers.shared_page(gmem["inbox"], source), m) for source in range(R)]
            y = functools.reduce(jnp.add, parts)
            if "bias" in gmem:
                y += read(peers.private_page(gmem["bias"]))
            if "residual" in gmem:
                y += read(peers.private_page(gmem["residual"]), m)
            peers.private_page(gmem["y"]).at[m, at][...] = y.astype(gmem["y"].dtype)

    def compute():
        worker.compute(total, send)
        worker.product.each(total, reduce)

    worker.specialise(compute, lambda: worker.product.produce(total, corner, load))
