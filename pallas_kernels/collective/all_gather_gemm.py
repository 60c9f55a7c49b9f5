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

from pallas_kernels import interpret as interpreter
from pallas_kernels import tiles
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
    into: Any = None,
    *,
    rows: int,
    peers: Peers,
    plan: Plan,
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
      rows: of x that are live, a multiple of 8. keep: own rows are copied to gathered as well.
      blocks: thread blocks, at most what the GPU runs at once.
      interpret: in Mosaic GPU's interpreter, with ReadyPeer.
    Returns: ys, (C R, height, N) each; gathered (C R, height, K). Rows past `rows` are undefined,
      and so are gathered's own rows without keep.
    """
    copies, R, tile = peers.copies, peers.ranks, plan.tile
    launch = core.launch(NAME, plan, peers, blocks)
    height, K = x.shape[1:]
    inputs = {"x": x, **{f"w{i}": w for i, w in enumerate(weights)}}
    inputs |= {} if bias is None else {"bias": bias}
    inputs |= {} if delays is None else {"delays": delays}
    outputs = {
        f"y{i}": jax.ShapeDtypeStruct((copies * R, height, w.shape[2 - turned]), spec.out_dtype)
        for i, w in enumerate(weights)
    }
    if into is None:
        outputs["gathered"] = jax.ShapeDtypeStruct((copies * R, height, K), x.dtype)
    else:
        inputs["gathered"] = into
    body = functools.partial(
        _body, names=(*inputs, *outputs), peers=peers, plan=plan, spec=spec, turned=turned,
        clusters=launch["grid"][0] // copies,
        split=schedule.Split(R * rows, R, tile.block_m * tile.cluster, plan.chunk), keep=keep,
    )  # fmt: skip
    found = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=core.scratch(plan, x.dtype, spec.out_dtype, turned, K, x.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
        **launch,
    )(*inputs.values())
    return list(found[: len(weights)]), found[-1] if into is None else into[...]


def _body(*refs, names, peers, plan, spec, turned, clusters, split, keep, smem, ready, free,
          arrived=None):  # fmt: skip
    gmem = dict(zip(names, refs, strict=True))
    (a_smem, b_smem, y_smem), *ring = smem if plan.comm else (smem,)
    tile, R = plan.tile, peers.ranks
    K = gmem["x"].shape[2]
    steps = pl.cdiv(K, tile.block_k)
    product = core.Product(tile, steps, turned, a_smem, b_smem, y_smem, ready, free)
    flags = peers.flags(R * split.chunks + 1)
    rank, cluster = peers.rank(), peers.cluster()
    block, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
    talking = plan.comm // tile.cluster  # clusters
    computing = clusters - talking
    widths = [gmem[name].shape[2 - turned] for name in names if name.startswith("w")]
    columns = [pl.cdiv(N, tile.block_n) for N in widths]
    first = [sum(columns[:i]) for i in range(len(columns))]
    row_tiles, all_columns = split.row_tiles, sum(columns)
    count = core.share(R * row_tiles * all_columns, cluster - talking, computing)
    if "delays" in gmem:
        spin(clock(), gmem["delays"][rank])

    def place_of(j):
        i = cluster - talking + j * computing
        i = plan.step(i, rank, R, row_tiles * all_columns)
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
        if peers.ready:
            return place
        pl.loop(place.first_flag, place.last_flag)(lambda flag: peers.wait(flags, flag, 1))
        return place

    def load(place, step, a, b, barrier):
        k = core.span(step, tile.block_k)
        m = pl.ds(pl.multiple_of(place.row + block * tile.block_m, tile.block_m), tile.block_m)

        if peers.ready:
            plgpu.copy_gmem_to_smem(peers.peer(gmem["x"], place.peer).at[m, k], a, barrier)
        else:

            @pl.when(place.peer == rank)
            def _():
                plgpu.copy_gmem_to_smem(peers.mine(gmem["x"]).at[m, k], a, barrier)

            @pl.when(place.peer != rank)
            def _():
                rows = peers.own(gmem["gathered"], place.peer)
                plgpu.copy_gmem_to_smem(rows.at[m, k], a, barrier)

        def load_b(i, at):
            n = pl.ds(at, tile.block_n)
            plgpu.copy_gmem_to_smem(
                peers.own(gmem[f"w{i}"]).at[(n, k) if turned else (k, n)], b, barrier,
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

    if plan.comm:

        @pl.when((cluster < talking) & (warpgroup == 0))
        def _communicate():
            me = cluster * tile.cluster + block
            pull(gmem["x"], gmem["gathered"], flags, ring[0][0], arrived, peers=peers, split=split,
                 me=me, comm=plan.comm, keep=keep)  # fmt: skip

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


def pull(x, gathered, flags, ring, arrived, *, peers, split, me, comm, keep):
    """Communication block `me` of `comm` copies its chunks of x to gathered, and raises flags.

    flags: one for each chunk, then how many blocks are done with this rank's rows.
    """
    R, rank, chunks = peers.ranks, peers.rank(), peers.ranks * split.chunks
    down, across = ring.shape[1:]
    wide = x.shape[2] // across
    pieces = split.chunk // down * wide
    mine = core.share((R - 1 + keep) * split.chunks, me, comm)
    moved, began = down * across * jnp.dtype(x.dtype).itemsize, peers.now()

    def chunk_of(n):
        return schedule.gather_chunk(me + n * comm, rank, split)

    def where(q):
        chunk, p = chunk_of(lax.div(q, pieces)), lax.rem(q, pieces)
        row, right = lax.div(p, wide) * down, lax.rem(p, wide) * across
        return chunk, row, (pl.ds(chunk.row + row, down), pl.ds(right, across))

    def source(q):
        chunk, _, here = where(q)
        return peers.peer(x, chunk.peer).at[here]

    def target(q):
        chunk, _, here = where(q)
        return peers.own(gathered, chunk.peer).at[here]

    def live(q):
        chunk, row, _ = where(q)
        return row < chunk.rows

    core.relay(
        ring, arrived, mine * pieces, jnp.int32(pieces),
        source=source, target=target, live=live,
        pace=lambda q: peers.pace(began, (q + 1) * moved),
        finish=lambda n: peers.signal(flags, rank, chunk_of(n).flag),
    )  # fmt: skip
    # My last pulls are over: every peer may know.
    pl.loop(1, R)(lambda d: peers.signal(flags, lax.rem(rank + d, R), chunks))
    peers.wait(flags, chunks, (R - 1) * comm)


def all_gather(x: jax.Array, *, peers: Peers, comm: int, chunk: int) -> jax.Array:
    """The communication alone, by as many blocks: (C R, height, K); what a product has to hide.

    x: as in all_gather_gemm, of any type; all of its rows travel, own ones do not.
    """
    (_, height, width), R = x.shape, peers.ranks
    split = schedule.Split(R * height, R, height, chunk)
    ring, barriers = core.relay_scratch(width, x.dtype, tiles.SHARED_BYTES - tiles.RESERVED_BYTES)

    def body(x, gathered, ring, arrived):
        flags = peers.flags(R * split.chunks + 1)
        pull(x, gathered, flags, ring, arrived, peers=peers, split=split, me=peers.cluster(),
             comm=comm, keep=False)  # fmt: skip

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((peers.copies * R, height, width), x.dtype),
        scratch_types={"ring": ring, "arrived": barriers},
        grid=(comm * peers.copies,),
        grid_names=("block",),
        kernel_name="all_gather",
    )(x)
