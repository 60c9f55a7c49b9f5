"""All-gather + product in one kernel: the product waits for the rows that it needs, chunk by chunk.

A few thread blocks pull the other ranks' chunks of rows into `gathered`, the next rank's first, and
raise a flag for each; all others compute tiles in the same order, own rows first, which need no
wait and are read where they are (Flux, arXiv 2406.06858, sections 3 and 4.3: its all-gather kernel,
whose host loop is replaced by communication blocks, and whose one flag a rank by one a chunk):

    communication  for chunk: pull from its rank, store, flag[chunk]  | done -> every peer
    (c blocks)     wait until every peer is done with my rows: they may not be freed before
    producer       for tile: wait flag[its chunks] unless own rows; load
    compute        product, bias, activation, store

Several weights share one gather: their columns follow each other in the order of tiles.

Legend: K contracted, N columns of a weight; a rank's pages are (rows, K).
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import engine, fused, relay, schedule
from pallas_kernels.hopper.activations import Spec, activate_tile
from pallas_kernels.hopper.cards import RESERVED_BYTES, SHARED_BYTES, SMS
from pallas_kernels.hopper.epilogue import add_bias
from pallas_kernels.hopper.fused import Fusion
from pallas_kernels.hopper.memory import share, span
from pallas_kernels.hopper.peers import Peers
from pallas_kernels.work import Work, product

NAME = "all_gather_gemm"


def all_gather_gemm(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    bias: jax.Array | None = None,
    delays: jax.Array | None = None,
    into: Any = None,
    *,
    rows: int,
    peers: Peers,
    fusion: Fusion,
    spec: Spec,
    keep: bool = False,
    turned: bool = False,
    blocks: int = SMS,
    interpret: bool = False,
) -> tuple[list[jax.Array], jax.Array]:
    """activate(all_gather(x) w + bias) for each w, and the gathered x.

    C: `peers.copies`, the ranks whose arrays these are; 1 but for virtual ranks.
    Args:
      x: (C, height, K), height at least the tile's and a multiple of 8; of ReadyPeer (R, height,
        K), all ranks' rows.
      weights: (C, K, N) each, or (C, N, K) where turned, as the product by a transposed weight
        needs it; N at least the tile's, K and N multiples of 64.
      bias: (C, all weights' columns, each filled up to whole tiles) float32.
      delays: (C,) int32, ns that a rank starts late (tests).
      into: a jax.Ref like gathered, to be gathered into (tests: full of NaN).
      rows: how many rows of x are live, a multiple of 8. keep: this rank's rows are copied to
        gathered as well.
      blocks: thread blocks, at most what the GPU runs at once.
      interpret: in Mosaic GPU's interpreter, with ReadyPeer.
    Returns: ys, (C R, height, N) each; gathered (C R, height, K). Rows past `rows` are undefined,
      and so are gathered's own rows without keep.
    """
    copies, R, tile = peers.copies, peers.ranks, fusion.tile
    clusters = fused.clusters_of(NAME, fusion, peers, blocks)
    height, K = x.shape[1:]
    inputs = {"x": x, **{f"w{i}": w for i, w in enumerate(weights)}}
    inputs |= {"bias": bias, "delays": delays, "gathered": into}
    outputs = {
        f"y{i}": jax.ShapeDtypeStruct((copies * R, height, w.shape[2 - turned]), spec.out_dtype)
        for i, w in enumerate(weights)
    }
    if into is None:
        outputs["gathered"] = jax.ShapeDtypeStruct((copies * R, height, K), x.dtype)
    split = schedule.Split(R * rows, R, tile.block_m * tile.cluster, fusion.chunk)
    results = engine.launch(
        functools.partial(
            _body,
            steps=pl.cdiv(K, tile.block_k),
            widths=[w.shape[2 - turned] for w in weights],
            spec=spec,
            split=split,
            keep=keep,
            of=functools.partial(fused.Worker, peers, fusion, clusters, turned),
        ),
        inputs,
        outputs,
        fused.scratch(
            NAME,
            fusion,
            engine.buffers(tile, x.dtype, spec.out_dtype, turned_b=turned),
            functools.partial(relay.scratch, K, x.dtype),
        ),
        work=product(NAME, copies * R * rows, sum(w.shape[2 - turned] for w in weights), K),
        tile=tile,
        clusters=clusters * copies,
        interpret=interpret,
    )
    gathered = results["gathered"] if into is None else into[...]
    return [results[f"y{i}"] for i in range(len(weights))], gathered


def _body(gmem, *, steps, widths, spec, split, keep, of, arrived=None, **memory):
    worker = of(steps, memory, gmem.get("delays"))
    peers, fusion, tile, rank = worker.peers, worker.fusion, worker.tile, worker.rank
    R = peers.ranks
    flags = peers.flags(R * split.chunks + 1)
    columns = fused.Parts([pl.cdiv(N, tile.block_n) for N in widths])
    each_rank = split.row_tiles * columns.total

    def place_of(i):
        i = fusion.step(i, rank, R, each_rank)
        return schedule.gather_tile(
            i, rank, split, columns.total, max(1, fusion.chunk // split.tile)
        )

    def begin(i):
        place = place_of(i)
        if not peers.ready:
            pl.loop(place.first_flag, place.last_flag)(lambda flag: peers.wait(flags, flag, 1))
        return place

    def load(place, s, buffer, barrier):
        k, m = span(s, tile.block_k), worker.rows(place.row)

        def load_left(page):
            worker.load_left(page.at[m, k], buffer, barrier)

        if peers.ready:
            load_left(peers.peer(gmem["x"], place.peer))
        else:
            local, gathered = (
                peers.shared_page(gmem["x"]),
                peers.private_page(gmem["gathered"], place.peer),
            )
            pl.when(place.peer == rank)(lambda: load_left(local))
            pl.when(place.peer != rank)(lambda: load_left(gathered))

        def load_right(w, column):
            n = span(column, tile.block_n)
            worker.load_right(peers.private_page(gmem[f"w{w}"]), n, k, buffer, barrier)

        columns.each(place.column, load_right)

    def finish(i, sums):
        place = place_of(i)
        top = worker.top(place.row)

        def value(z, right):
            if "bias" in gmem:
                at = pl.ds(place.column * tile.block_n + right, z.shape[1])
                z = add_bias(z, peers.private_page(gmem["bias"]), at)
            return activate_tile(spec.activation, z)

        def copy(piece, down, right):
            def to(w, column):
                at = pl.multiple_of(column * tile.block_n, tile.block_n) + right
                y = peers.private_page(gmem[f"y{w}"], place.peer)
                piece_rows = pl.ds(top + down, piece.shape[0]), pl.ds(at, piece.shape[1])
                plgpu.copy_smem_to_gmem(piece, y.at[piece_rows])

            columns.each(place.column, to)

        worker.store(sums, value, copy)

    def communicate():
        pl.when(worker.warpgroup == 0)(
            functools.partial(
                pull,
                gmem["x"],
                gmem["gathered"],
                flags,
                worker.ring[0],
                arrived,
                peers=peers,
                split=split,
                me=worker.number,
                comm=fusion.comm,
                keep=keep,
            )
        )

    worker.specialise(
        lambda: worker.compute(R * each_rank, finish),
        lambda: worker.product.produce(R * each_rank, begin, load),
        communicate,
    )


def pull(x, gathered, flags, ring, arrived, *, peers, split, me, comm, keep):
    """Communication block `me` of `comm` copies its chunks of x to gathered, and raises flags.

    flags: one for each chunk, then how many blocks are done with this rank's rows.
    """
    R, rank, chunks = peers.ranks, peers.rank(), peers.ranks * split.chunks
    down, across = ring.shape[1:]
    wide = x.shape[2] // across
    pieces = split.chunk // down * wide
    count = share((R - 1 + keep) * split.chunks, me, comm)
    moved, began = down * across * jnp.dtype(x.dtype).itemsize, peers.now()

    def chunk_of(n):
        return schedule.gather_chunk(me + n * comm, rank, split)

    def where(q):
        chunk, p = chunk_of(lax.div(q, pieces)), lax.rem(q, pieces)
        row, right = lax.div(p, wide) * down, lax.rem(p, wide) * across
        return chunk, row, (pl.ds(chunk.row + row, down), pl.ds(right, across))

    def source(q):
        chunk, _, part = where(q)
        return peers.peer(x, chunk.peer).at[part]

    def target(q):
        chunk, _, part = where(q)
        return peers.private_page(gathered, chunk.peer).at[part]

    def live(q):
        chunk, row, _ = where(q)
        return row < chunk.rows

    relay.relay(
        ring,
        arrived,
        count * pieces,
        jnp.int32(pieces),
        source=source,
        target=target,
        live=live,
        pace=lambda q: peers.pace(began, (q + 1) * moved),
        finish=lambda n: peers.signal(flags, rank, chunk_of(n).flag),
    )
    # My last pulls are over: every peer may know.
    pl.loop(1, R)(lambda d: peers.signal(flags, lax.rem(rank + d, R), chunks))
    peers.wait(flags, chunks, (R - 1) * comm)


def all_gather(x: jax.Array, *, peers: Peers, comm: int, chunk: int) -> jax.Array:
    """Runs the communication alone, with as many blocks. Returns: (C R, height, K).

    x: as in all_gather_gemm, of any type; all of its rows travel, own ones do not.
    """
    (_, height, width), R = x.shape, peers.ranks
    split = schedule.Split(R * height, R, height, chunk)
    (ring,), barriers = relay.scratch(width, x.dtype, SHARED_BYTES - RESERVED_BYTES)

    def body(x, gathered, ring, arrived):
        flags = peers.flags(R * split.chunks + 1)
        pull(x, gathered, flags, ring, arrived, peers=peers, split=split, me=peers.cluster(),
             comm=comm, keep=False)  # fmt: skip

    result = jax.ShapeDtypeStruct((peers.copies * R, height, width), x.dtype)
    kernel = plgpu.kernel(
        body,
        out_type=result,
        scratch_types={"ring": ring, "arrived": barriers},
        grid=(comm * peers.copies,),
        grid_names=("block",),
        kernel_name="all_gather",
    )
    with Work("all_gather").scope([x], [result]):
        return kernel(x)
