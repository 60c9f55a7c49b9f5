"""Product + reduce-scatter in one kernel: a chunk of sums leaves as soon as its tiles are there.

Tiles are taken owner by owner, the next rank's rows first and the own rows last, so that at every
time the ranks send to different owners. Their sums stay in fp32 memory of this GPU, as a store to a
peer in the epilogue would leave bubbles in the product (Flux, arXiv 2406.06858, sections 3 and 4.2,
its Hopper kernel with a separate communication part); here the same kernel's communication blocks
push them, and at the end all blocks add up what came, rank 0's first, so that the result is the
same in every run:

    compute        product, sums to `outbox` (own rows: `inbox`), arrive flag[its chunks]
    communication  for chunk: wait flag[chunk] | push to the owner's inbox[my rank], arrive there
    all            for chunk of own rows: wait for its own tiles and the others' R - 1 arrivals;
                   y = inbox[0] + ... + inbox[R - 1] + bias + residual

Legend: K contracted (this rank's share), N columns; a rank's pages are (rows, columns).
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import engine, fused, relay, schedule
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.fused import Fusion
from pallas_kernels.hopper.memory import share, span
from pallas_kernels.hopper.peers import Peers
from pallas_kernels.work import product

NAME = "gemm_reduce_scatter"


def gemm_reduce_scatter(
    xs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
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
    interpret: bool = False,
) -> list[jax.Array]:
    """reduce_scatter(x w + ...) + bias + residual; the latter are added once, by the owner.

    C: `peers.copies`, the ranks whose arrays these are; 1 but for virtual ranks.
    Args:
      xs: (C R, height, K) each: a page holds the rows of an owner; height at least the tile's and
        a multiple of 8. K of its own for each pair, a multiple of 64.
      ws: (C, K, N) each, or (C, N, K) where turned; N at least the tile's, a multiple of 128.
      bias: (C, N) float32. residual: (C, height, N).
      delays: (C,) int32, ns that a rank starts late (tests).
      into: a jax.Ref like the last result, for what arrives (tests: full of NaN).
      rows: how many rows of a page are live, a multiple of 8.
      spec: out_dtype is that of the sums that cross ranks; the result has x's.
      blocks: thread blocks, at most what the GPU runs at once.
      interpret: in Mosaic GPU's interpreter, with ReadyPeer.
    Returns: y (C, height, N); rows past `rows` are undefined. Then the sums of this rank: for each
      owner (C R, height, N) and, where it is the owner itself, as a page of (C R, height, N); with
      ReadyPeer only these.
    """
    copies, R, tile = peers.copies, peers.ranks, fusion.tile
    clusters = fused.clusters_of(NAME, fusion, peers, blocks)
    (_, height, _), N, dtype = xs[0].shape, ws[0].shape[2 - turned], xs[0].dtype
    inputs = {f"x{i}": x for i, x in enumerate(xs)} | {f"w{i}": w for i, w in enumerate(ws)}
    inputs |= {"bias": bias, "residual": residual, "delays": delays, "inbox": into}
    sums = jnp.dtype(spec.out_dtype)
    outputs = {
        "y": jax.ShapeDtypeStruct((copies, height, N), dtype),
        "outbox": jax.ShapeDtypeStruct((copies * R, height, N), sums),
    }
    if into is None:
        outputs["inbox"] = jax.ShapeDtypeStruct((peers.reached * R, height, N), sums)
    split = schedule.Split(R * rows, R, tile.block_m * tile.cluster, fusion.chunk)
    results = engine.launch(
        functools.partial(
            _body,
            split=split,
            # The products follow each other in the steps of one sum.
            steps=fused.Parts([pl.cdiv(x.shape[2], tile.block_k) for x in xs]),
            of=functools.partial(fused.Worker, peers, fusion, clusters, turned),
        ),
        inputs,
        outputs,
        fused.scratch(
            NAME,
            fusion,
            engine.buffers(tile, dtype, sums, turned_b=turned),
            functools.partial(relay.scratch, N, sums),
        ),
        work=product(NAME, copies * R * rows, N, sum(x.shape[2] for x in xs)),
        tile=tile,
        clusters=clusters * copies,
        interpret=interpret,
    )
    return [*results.values(), *([] if into is None else [into[...]])]


def _body(gmem, *, split, steps, of, arrived=None, **memory):
    worker = of(steps.total, memory, gmem.get("delays"))
    peers, fusion, tile, rank = worker.peers, worker.fusion, worker.tile, worker.rank
    R, N = peers.ranks, gmem["y"].shape[2]
    # A page of flags for each rank: tiles of each chunk of each owner, then what came of my chunks.
    chunks = R * split.chunks
    flags = peers.flags(chunks + split.chunks)
    columns = pl.cdiv(N, tile.block_n)
    total = R * split.row_tiles * columns

    def place_of(i):
        i = fusion.step(i, lax.rem(rank + 1, R), R, split.row_tiles * columns)
        return schedule.scatter_tile(i, rank, split, columns, max(1, fusion.chunk // split.tile))

    def load(place, s, buffer, barrier):
        m, n = worker.rows(place.row), span(place.column, tile.block_n)

        def load_pair(pair, step):
            k, x = span(step, tile.block_k), peers.private_page(gmem[f"x{pair}"], place.peer)
            worker.load_left(x.at[m, k], buffer, barrier)
            worker.load_right(peers.private_page(gmem[f"w{pair}"]), n, k, buffer, barrier)

        steps.each(s, load_pair)

    def finish(i, sums):
        place = place_of(i)
        top = worker.top(place.row)

        def copy(piece, down, right):
            m = pl.ds(top + down, piece.shape[0])
            at = pl.multiple_of(place.column * tile.block_n, tile.block_n) + right
            n = pl.ds(at, piece.shape[1])

            @pl.when(place.peer == rank)
            def _():
                plgpu.copy_smem_to_gmem(piece, peers.shared_page(gmem["inbox"], rank).at[m, n])

            @pl.when(place.peer != rank)
            def _():
                plgpu.copy_smem_to_gmem(
                    piece, peers.private_page(gmem["outbox"], place.peer).at[m, n]
                )

        worker.store(sums, lambda z, _: z, copy)
        plgpu.wait_smem_to_gmem(0)
        if peers.ready:
            return
        pl.loop(place.first_flag, place.last_flag)(lambda flag: peers.signal(flags, rank, flag))

    def computed(chunk):
        """Waits for all warpgroups' parts of a chunk's tiles."""
        parts = tile.cluster * tile.warpgroups
        peers.wait(flags, chunk.flag, schedule.chunk_tiles(chunk, split, columns) * parts)

    def push():
        (ring,) = worker.ring
        down, across = ring.shape[1:]
        wide = N // across
        pieces = split.chunk // down * wide
        moved, began = down * across * jnp.dtype(ring.dtype).itemsize, peers.now()

        @pl.loop(0, share((R - 1) * split.chunks, worker.number, fusion.comm))
        def _(n):
            chunk = schedule.scatter_chunk(worker.number + n * fusion.comm, rank, split, columns)
            computed(chunk)

            def piece_of(q):
                row, right = lax.div(q, wide) * down, lax.rem(q, wide) * across
                return pl.ds(chunk.row + row, down), pl.ds(right, across)

            total = lax.div(chunk.rows, down) * wide
            relay.relay(
                ring,
                arrived,
                total,
                total,
                source=lambda q: peers.private_page(gmem["outbox"], chunk.peer).at[piece_of(q)],
                target=lambda q: peers.peer(gmem["inbox"], chunk.peer, rank).at[piece_of(q)],
                finish=lambda _: peers.signal(
                    flags, chunk.peer, chunks + lax.rem(chunk.flag, split.chunks)
                ),
                pace=lambda q: peers.pace(began, (n * pieces + q + 1) * moved),
            )

    def reduce():
        @pl.loop(0, split.chunks)
        def _(c):
            # The own chunks are the last that a rotation over all ranks would send.
            chunk = schedule.scatter_chunk((R - 1) * split.chunks + c, rank, split, columns)
            computed(chunk)
            peers.wait(flags, chunks + c, R - 1)
            _add_up(gmem, peers, chunk, *worker.worker)

    def communicate():
        pl.when(worker.warpgroup == 0)(push)
        reduce()

    def compute():
        worker.compute(total, finish)
        if not peers.ready:
            reduce()

    worker.specialise(compute, lambda: worker.product.produce(total, place_of, load), communicate)


def _add_up(gmem, peers, chunk, me, everyone):
    """Warpgroup `me` of `everyone` stores its pieces of a chunk's rows, rank 0's sums first."""
    N = gmem["y"].shape[2]
    each = next(128 * vector for vector in (4, 2, 1) if N % (128 * vector) == 0)
    layout = plgpu.Layout.WG_STRIDED((each,), vec_size=each // 128)
    wide = jnp.int32(N // each)

    @pl.loop(0, share(chunk.rows * wide, me, everyone))
    def _(i):
        p = me + i * everyone
        row, at = chunk.row + lax.div(p, wide), pl.ds(lax.rem(p, wide) * each, each)

        def read(ref: Any, *index: Any) -> Any:
            values = plgpu.load(ref.at[(*index, at)], layout=layout, optimized=False)
            return values.astype(jnp.float32)

        parts = [
            read(peers.shared_page(gmem["inbox"], source), row) for source in range(peers.ranks)
        ]
        y = functools.reduce(jnp.add, parts)
        if "bias" in gmem:
            y += read(peers.private_page(gmem["bias"]))
        if "residual" in gmem:
            y += read(peers.private_page(gmem["residual"]), row)
        peers.private_page(gmem["y"]).at[row, at][...] = y.astype(gmem["y"].dtype)
