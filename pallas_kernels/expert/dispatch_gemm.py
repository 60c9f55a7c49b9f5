"""Dispatch + grouped product in one kernel: tiles wait for the ranks whose rows they hold.

Tokens are pushed, row by row, to where their experts' rows lie; a few thread blocks do nothing
else. The rows of an expert are sorted by the distance of the rank that they come from, and tiles
are taken in the order of their farthest source: those of own rows first, which all blocks copy
together before they compute (COMET, arXiv 2502.19811, sections 3.1 and 3.2: its layer 0, whose
copies its host starts; here they are of this kernel):

    communication  for job: 64 rows of x --bulk copies--> a peer's rows, its flag[distance, job]
    producer       own jobs, in turn | for tile: wait flag[its sources' jobs]; load
    compute        product, activation, store the rows that are this expert's

A rank's kernel ends when its tiles have seen all rows that come to it, and its own copies are
complete when their flags are raised: nothing is left to wait for.

Legend: T tokens of a rank, K contracted, N rows of a rank's experts, F columns of a weight.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.expert import product as shared
from pallas_kernels.expert import rows as rows_
from pallas_kernels.expert import tables
from pallas_kernels.expert.product import ExpertFusion
from pallas_kernels.expert.tables import FAR, FLAGS, JOBS, NEAR, OWN, Tables
from pallas_kernels.hopper import engine, fused, schedule
from pallas_kernels.hopper.activations import Spec, activate_tile
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.memory import number, share, span
from pallas_kernels.hopper.peers import Peers
from pallas_kernels.work import product

NAME = "dispatch_gemm"


def dispatch_gemm(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    work: Tables,
    delays: jax.Array | None = None,
    into: Any = None,
    *,
    rows: int,
    flags: int,
    peers: Peers,
    fusion: ExpertFusion,
    spec: Spec,
    turned: bool = False,
    blocks: int = SMS,
    interpret: bool = False,
) -> tuple[list[jax.Array], jax.Array]:
    """activate(rows of experts times w) for each w, and those rows.

    C: `peers.copies`, the ranks whose arrays these are; 1 but for virtual ranks.
    Args:
      x: (C, T, K), any T.
      weights: (C, E, K, F) each, or (C, E, F, K) where turned; F at least the tile's, K and F
        multiples of 64.
      work: tables.dispatch of each rank, (C, ...) each, for block_m * cluster and fusion.chunk.
      delays: (C,) int32, ns that a rank starts late (tests).
      into: a jax.Ref like the rows, that they go to (tests: full of NaN); for ReadyPeer the rows.
      rows: N. flags: from `tables.flags`.
      blocks: thread blocks, at most what the GPU runs at once.
      interpret: in Mosaic GPU's interpreter, with ReadyPeer.
    Returns: ys, (C, N, F) each, 0 past the rows that came; the rows (C, height, K), of ReadyPeer
      those of all ranks; height is N, at least the tile's, in whole pieces of 8; what did not come
      is undefined.
    """
    C, tile, K = peers.copies, fusion.tile, x.shape[2]
    clusters = fused.clusters_of(NAME, fusion, peers, blocks)
    inputs = {"x": x, **{f"w{i}": w for i, w in enumerate(weights)}}
    inputs |= {"visits": work.visits_VW, "jobs": work.jobs_CW, "totals": work.totals}
    inputs |= {"delays": delays, "rows": into}
    widths = [w.shape[3 - turned] for w in weights]
    outputs = {
        f"y{i}": jax.ShapeDtypeStruct((C, rows, F), spec.out_dtype) for i, F in enumerate(widths)
    }
    if into is None:
        height = shared.height(rows, tile)
        outputs["rows"] = jax.ShapeDtypeStruct((peers.reached, height, K), x.dtype)
    buffers = engine.buffers(tile, x.dtype, spec.out_dtype, turned_b=turned)
    results = engine.launch(
        functools.partial(
            _body,
            steps=pl.cdiv(K, tile.block_k),
            spec=spec,
            widths=widths,
            count=flags,
            of=functools.partial(fused.Worker, peers, fusion, clusters, turned),
        ),
        inputs,
        outputs,
        shared.scratch(NAME, fusion, buffers, K, x.dtype),
        work=product(NAME, C * rows, sum(widths), K),
        tile=tile,
        clusters=clusters * C,
        interpret=interpret,
    )
    came = results["rows"] if into is None else into if peers.ready else into[...]
    return [results[f"y{i}"] for i in range(len(weights))], came


def _body(
    gmem, *, steps, spec, widths, count, of, begun: Any = None, arrived: Any = None, **memory
):
    K, height = gmem["x"].shape[2], gmem["rows"].shape[1]
    worker = of(steps, memory, gmem.get("delays"))
    peers, fusion, tile = worker.peers, worker.fusion, worker.tile
    flags = peers.flags(count)
    visits, jobs, totals = (peers.private_page(gmem[name]) for name in ("visits", "jobs", "totals"))
    columns = fused.Parts([pl.cdiv(F, tile.block_n) for F in widths])
    count_visits = number(totals, tables.VISITS)
    total = count_visits * columns.total

    def place_of(i):
        visit, column = schedule.raster(i, count_visits, columns.total, fusion.band)
        return shared.place(visits, visit, column)

    def begin(i):
        place = place_of(i)
        if peers.ready:
            return place

        @pl.loop(number(visits, place.visit, NEAR), number(visits, place.visit, FAR))
        def _(distance):
            at = FLAGS + 2 * distance
            first_flag, last_flag = (number(visits, place.visit, at + i) for i in (0, 1))
            pl.loop(first_flag, last_flag)(lambda flag: peers.wait(flags, flag, 1))

        return place

    def load(place, s, buffer, barrier):
        k = span(s, tile.block_k)
        m = shared.rows_of(place, worker.block, tile, height)
        worker.load_left(peers.shared_page(gmem["rows"]).at[m, k], buffer, barrier)

        def load_right(w, column):
            weight = peers.private_page(gmem[f"w{w}"]).at[place.group]
            worker.load_right(weight, span(column, tile.block_n), k, buffer, barrier)

        columns.each(place.column, load_right)

    def finish(i, sums):
        place = place_of(i)
        top = worker.top(place.row)

        def copy(piece, down, right):
            def to(w, column):
                y, at = (
                    peers.private_page(gmem[f"y{w}"]),
                    pl.multiple_of(column * tile.block_n, tile.block_n),
                )
                shared.store_rows(piece, y, top + down, at + right, place.lo, place.hi)

            columns.each(place.column, to)

        def store():
            worker.store(sums, lambda z, _: activate_tile(spec.activation, z), copy)

        shared.when_live(place, top, tile, store)

    def send(first_job, last_job, me, stride):
        across = worker.ring[0].shape[2]
        moved, began = across * jnp.dtype(gmem["x"].dtype).itemsize, peers.now()

        def piece(ref, row, p):
            return ref.at[pl.ds(row, 1), span(p, across)]

        rows_.relay(
            worker.ring,
            arrived,
            share(last_job - first_job, me, stride),
            parts=lambda _: jnp.int32(K // across),
            table=lambda n: jobs.at[first_job + me + n * stride],
            source=lambda n, row, p: piece(peers.private_page(gmem["x"]), row, p),
            target=lambda n, peer, row, p: piece(peers.peer(gmem["rows"], peer), row, p),
            pace=lambda n, q: peers.pace(began, (n * fusion.chunk * (K // across) + q + 1) * moved),
            finish=lambda n, peer, flag: peers.signal(flags, peer, flag),
        )

    local_jobs, every = number(totals, OWN), number(totals, JOBS)

    def communicate():
        me = functools.partial(send, local_jobs, every, worker.number, fusion.comm)
        pl.when(worker.warpgroup == 0)(me)

    def compute():
        if fusion.comm:
            plgpu.barrier_wait(begun)
        worker.compute(total, finish)
        me, everyone = worker.computing_warpgroup
        for w in range(len(widths)):
            worker.staging.clear(
                peers.private_page(gmem[f"y{w}"]), number(totals, tables.END), me, everyone
            )

    def produce():
        if fusion.comm:
            send(
                jnp.int32(0),
                local_jobs,
                worker.number - fusion.comm,
                worker.computing * tile.cluster,
            )
            # The ring lies where tiles come, a cluster's weights for both of its blocks.
            plgpu.barrier_arrive(begun)
            plgpu.barrier_wait(begun)
        worker.product.produce(total, begin, load)

    worker.specialise(compute, produce, communicate)
