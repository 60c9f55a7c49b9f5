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

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.collective import core, schedule
from pallas_kernels.collective.core import Plan
from pallas_kernels.collective.peers import Peers, clock, spin
from pallas_kernels.gemm import hopper
from pallas_kernels.gemm.hopper import SMS, WGMMA, Spec
from pallas_kernels.gemm.reference import activate

NAME = "all_gather_gemm"


def all_gather_gemm(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    bias: jax.Array | None = None,
    delays: jax.Array | None = None,
    *,
    rows: int,
    peers: Peers,
    plan: Plan,
    spec: Spec,
    keep: bool = False,
    blocks: int = SMS,
) -> tuple[list[jax.Array], jax.Array]:
    """activate(all_gather(x) w + bias) for each w, and the gathered x.

    C: `peers.copies`, the ranks whose arrays these are; 1 but for virtual ranks.
    Args:
      x: (C, height, K), height at least the tile's and a multiple of 8; GhostPeer's is (R, ...),
        all ranks' rows.
      weights: (C, K, N) each, N at least the tile's; K and N multiples of 64.
      bias: (C, all weights' columns, each filled up to whole tiles) float32.
      delays: (C,) int32, ns that a rank starts late (tests).
      rows: of x that are live, a multiple of 8. keep: own rows are copied to gathered as well.
      blocks: thread blocks, at most what the GPU runs at once.
    Returns: ys, (C R, height, N) each; gathered (C R, height, K). Rows past `rows` are undefined,
      and so are gathered's own rows without keep.
    """
    copies, R, tile = peers.copies, peers.ranks, plan.tile
    launch = core.launch(NAME, plan, copies, blocks)
    height, K = x.shape[1:]
    inputs = {"x": x, **{f"w{i}": w for i, w in enumerate(weights)}}
    inputs |= {} if bias is None else {"bias": bias}
    inputs |= {} if delays is None else {"delays": delays}
    outputs = {
        f"y{i}": jax.ShapeDtypeStruct((copies * R, height, w.shape[2]), spec.out_dtype)
        for i, w in enumerate(weights)
    }
    outputs["gathered"] = jax.ShapeDtypeStruct((copies * R, height, K), x.dtype)
    piece = core.piece_shape(K, x.dtype.itemsize)
    body = functools.partial(
        _body, names=(*inputs, *outputs), peers=peers, plan=plan, spec=spec,
        clusters=launch["grid"][0] // copies,
        split=schedule.Split(R * rows, R, tile.block_m * tile.cluster, plan.chunk), keep=keep,
    )  # fmt: skip
    found = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=core.scratch(tile, x.dtype, spec.out_dtype, piece, x.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        **launch,
    )(*inputs.values())
    return found[:-1], found[-1]


def _body(*refs, names, peers, plan, spec, clusters, split, keep, smem, ready, free, arrived):
    gmem = dict(zip(names, refs, strict=True))
    (a_smem, b_smem, y_smem), (ring,) = smem
    tile, R = plan.tile, peers.ranks
    K = gmem["x"].shape[2]
    product = core.Product(tile, pl.cdiv(K, tile.block_k), a_smem, b_smem, y_smem, ready, free)
    # A page of flags for each rank: one for each chunk, then how many blocks are done with my rows.
    chunks = R * split.chunks
    flags = pl.get_global(plgpu.SemaphoreType.REGULAR((peers.copies * (chunks + 1),)))
    rank, cluster = peers.rank(), peers.cluster()
    block, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
    talking = plan.comm // tile.cluster  # clusters
    computing = clusters - talking
    widths = [gmem[name].shape[2] for name in names if name.startswith("w")]
    columns = [pl.cdiv(N, tile.block_n) for N in widths]
    first = [sum(columns[:i]) for i in range(len(columns))]
    row_tiles, all_columns = split.row_tiles, sum(columns)
    count = core.share(R * row_tiles * all_columns, cluster - talking, computing)
    if "delays" in gmem:
        spin(clock(), gmem["delays"][rank])

    def place_of(j):
        i = cluster - talking + j * computing
        band = max(1, plan.chunk // split.tile)
        return schedule.gather_tile(i, rank, split, all_columns, band)

    def each_weight(column, do):
        """do(i, first column) of the weight that a tile of columns belongs to."""
        for i in range(len(columns)):
            here = (column >= first[i]) & (column < first[i] + columns[i])
            at = pl.multiple_of((column - first[i]) * tile.block_n, tile.block_n)
            pl.when(here)(functools.partial(do, i, at))

    def begin(j):
        place = place_of(j)
        pl.loop(place.first_flag, place.last_flag)(lambda flag: peers.wait(flags, flag, 1))
        return place

    def load(place, k, a, b, barrier):
        m = pl.ds(pl.multiple_of(place.row + block * tile.block_m, tile.block_m), tile.block_m)

        @pl.when(place.peer == rank)
        def _():
            plgpu.copy_gmem_to_smem(peers.mine(gmem["x"]).at[m, k], a, barrier)

        @pl.when(place.peer != rank)
        def _():
            rows = peers.own(gmem["gathered"], place.peer)
            plgpu.copy_gmem_to_smem(rows.at[m, k], a, barrier)

        def load_b(i, at):
            columns = pl.ds(at, tile.block_n)
            plgpu.copy_gmem_to_smem(
                peers.own(gmem[f"w{i}"]).at[k, columns], b, barrier,
                collective_axes="cluster" if tile.cluster > 1 else None,
            )  # fmt: skip

        each_weight(place.column, load_b)

    def finish(j, acc):
        place = place_of(j)
        top = place.row + block * tile.block_m + warpgroup * tile.rows

        def value(z, right):
            if "bias" in gmem:
                at = pl.ds(place.column * tile.block_n + right, z.shape[1])
                part = plgpu.load(
                    peers.own(gmem["bias"]).at[at], layout=WGMMA.reduce(0), optimized=False
                )
                z += lax.broadcast_in_dim(part, z.shape, [1])
            return hopper.gelu(z) if spec.activation == "gelu" else activate(spec.activation, z)

        def copy(piece, down, right):
            def to(i, at):
                here = (pl.ds(top + down, piece.shape[0]), pl.ds(at + right, piece.shape[1]))
                y = peers.own(gmem[f"y{i}"], place.peer)
                plgpu.copy_smem_to_gmem(piece, y.at[here])

            each_weight(place.column, to)

        product.store(acc, value, copy)

    def pull():
        me = cluster * tile.cluster + block
        down, across = ring.shape[1:]
        wide = K // across
        pieces = split.chunk // down * wide
        mine = core.share((R - 1 + keep) * split.chunks, me, plan.comm)
        moved, began = down * across * gmem["x"].dtype.itemsize, clock()

        def where(q):
            chunk = schedule.gather_chunk(me + lax.div(q, pieces) * plan.comm, rank, split)
            p = lax.rem(q, pieces)
            row, right = lax.div(p, wide) * down, lax.rem(p, wide) * across
            return chunk, row, (pl.ds(chunk.row + row, down), pl.ds(right, across))

        def source(q):
            chunk, _, here = where(q)
            return peers.peer(gmem["x"], chunk.peer).at[here]

        def target(q):
            chunk, _, here = where(q)
            return peers.own(gmem["gathered"], chunk.peer).at[here]

        def live(q):
            chunk, row, _ = where(q)
            return row < chunk.rows

        def raise_flag(n):
            chunk = schedule.gather_chunk(me + n * plan.comm, rank, split)
            peers.signal(flags, rank, chunk.flag)

        core.relay(
            ring, arrived, mine * pieces, jnp.int32(pieces),
            source=source, target=target, live=live, finish=raise_flag,
            pace=lambda q: peers.pace(began, (q + 1) * moved),
        )  # fmt: skip
        # My last pulls are over: every peer may know.
        pl.loop(1, R)(lambda d: peers.signal(flags, lax.rem(rank + d, R), chunks))
        peers.wait(flags, chunks, (R - 1) * plan.comm)

    @pl.when(cluster < talking)
    def _communicate():
        pl.when(warpgroup == 0)(pull)

    @pl.when((cluster >= talking) & (warpgroup < tile.warpgroups))
    def _compute():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(232, action="increase")
        product.compute(count, finish)
        plgpu.wait_smem_to_gmem(0)

    @pl.when((cluster >= talking) & (warpgroup == tile.warpgroups))
    def _produce():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(40, action="decrease")
        product.produce(count, begin, load)
