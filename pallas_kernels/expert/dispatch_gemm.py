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
from jax import lax

from pallas_kernels import interpret as interpreter
from pallas_kernels.collective import core, schedule
from pallas_kernels.collective.peers import Peers, clock, spin
from pallas_kernels.expert import product as shared
from pallas_kernels.expert import rows as rows_
from pallas_kernels.expert import tables
from pallas_kernels.expert.product import Plan
from pallas_kernels.expert.tables import FAR, FLAGS, JOBS, NEAR, OWN, Tables
from pallas_kernels.gemm import hopper
from pallas_kernels.gemm.hopper import SMS, Spec
from pallas_kernels.gemm.reference import activate

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
    plan: Plan,
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
      work: tables.dispatch of each rank, (C, ...) each, for block_m * cluster and the plan's chunk.
      delays: (C,) int32, ns that a rank starts late (tests).
      into: a jax.Ref like the rows, that they go to (tests: full of NaN); for ReadyPeer the rows.
      rows: N. flags: of `tables.flags`.
      blocks: thread blocks, at most what the GPU runs at once.
      interpret: in Mosaic GPU's interpreter, with ReadyPeer.
    Returns: ys, (C, N, F) each, 0 past the rows that came; the rows (C, height, K), of ReadyPeer
      those of all ranks; height is N, at least the tile's, in whole pieces of 8; what did not come
      is undefined.
    """
    C = peers.copies
    launch = core.launch(NAME, plan, peers, blocks)
    K, tile = x.shape[2], plan.tile
    inputs = {"x": x, **{f"w{i}": w for i, w in enumerate(weights)}}
    inputs |= {"visits": work.visits_VW, "jobs": work.jobs_CW, "totals": work.totals}
    inputs |= {} if delays is None else {"delays": delays}
    outputs = {
        f"y{i}": jax.ShapeDtypeStruct((C, rows, w.shape[3 - turned]), spec.out_dtype)
        for i, w in enumerate(weights)
    }
    if into is None:
        height = shared.height(rows, tile)
        outputs["rows"] = jax.ShapeDtypeStruct((peers.reached, height, K), x.dtype)
    else:
        inputs["rows"] = into
    body = functools.partial(
        _body, names=(*inputs, *outputs), peers=peers, plan=plan, spec=spec, turned=turned,
        clusters=launch["grid"][0] // C, count=flags,
    )  # fmt: skip
    found = plgpu.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=shared.scratch(plan, x.dtype, spec.out_dtype, turned, K, x.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpreter.params() if interpret else None,
        **launch,
    )(*inputs.values())
    came = found[-1] if into is None else into if peers.ready else into[...]
    return list(found[: len(weights)]), came


def _body(*refs, names, peers, plan, spec, turned, clusters, count, smem, ready, free,
          begun: Any = None, arrived: Any = None):  # fmt: skip
    gmem = dict(zip(names, refs, strict=True))
    (a_smem, b_smem, y_smem), *ring = smem if plan.comm else (smem,)
    tile, K, height = plan.tile, gmem["x"].shape[2], gmem["rows"].shape[1]
    product = core.Product(
        tile, pl.cdiv(K, tile.block_k), turned, a_smem, b_smem, y_smem, ready, free
    )
    flags = peers.flags(count)
    rank, cluster = peers.rank(), peers.cluster()
    block, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
    talking = plan.comm // tile.cluster  # clusters
    computing = clusters - talking
    visits, jobs, totals = (peers.own(gmem[name]) for name in ("visits", "jobs", "totals"))
    widths = [gmem[name].shape[3 - turned] for name in names if name.startswith("w")]
    columns = [pl.cdiv(F, tile.block_n) for F in widths]
    first = [sum(columns[:i]) for i in range(len(columns))]
    count_visits = totals[tables.VISITS] + 0
    tiles_here = core.share(count_visits * sum(columns), cluster - talking, computing)
    if "delays" in gmem:
        spin(clock(), gmem["delays"][rank])

    def place_of(j):
        i = cluster - talking + j * computing
        visit, column = schedule.raster(i, count_visits, sum(columns), plan.band)
        return shared.place(visits, visit, column)

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

        @pl.loop(visits[place.visit, NEAR] + 0, visits[place.visit, FAR] + 0)
        def _(distance):
            at = FLAGS + 2 * distance
            first_flag, last_flag = (visits[place.visit, at + i] + 0 for i in (0, 1))
            pl.loop(first_flag, last_flag)(lambda flag: peers.wait(flags, flag, 1))

        return place

    def load(place, step, a, b, barrier):
        k = core.span(step, tile.block_k)
        m = shared.rows_of(place, block, tile, height)
        plgpu.copy_gmem_to_smem(peers.mine(gmem["rows"]).at[m, k], a, barrier)

        def load_b(i, at):
            n = pl.ds(at, tile.block_n)
            plgpu.copy_gmem_to_smem(
                peers.own(gmem[f"w{i}"]).at[(place.group, n, k) if turned else (place.group, k, n)],
                b, barrier, collective_axes="cluster" if tile.cluster > 1 else None,
            )  # fmt: skip

        each_weight(place.column, load_b)

    def finish(j, acc):
        place = place_of(j)
        top = place.row + block * tile.block_m + warpgroup * tile.rows

        def value(z, _):
            return hopper.gelu(z) if spec.activation == "gelu" else activate(spec.activation, z)

        def copy(piece, down, right):
            def to(i, at):
                y = peers.own(gmem[f"y{i}"])
                shared.store_rows(piece, y, top + down, at + right, place.lo, place.hi)

            each_weight(place.column, to)

        shared.when_live(place, top, tile, lambda: product.store(acc, value, copy))

    def send(first_job, last_job, me, stride):
        across = ring[0][0].shape[2]
        moved, began = across * jnp.dtype(gmem["x"].dtype).itemsize, peers.now()

        def piece(ref, row, p):
            return ref.at[pl.ds(row, 1), core.span(p, across)]

        rows_.relay(
            ring[0], arrived, core.share(last_job - first_job, me, stride),
            parts=lambda _: jnp.int32(K // across),
            table=lambda n: jobs.at[first_job + me + n * stride],
            source=lambda n, row, p: piece(peers.own(gmem["x"]), row, p),
            target=lambda n, peer, row, p: piece(peers.peer(gmem["rows"], peer), row, p),
            pace=lambda n, q: peers.pace(began, (n * plan.chunk * (K // across) + q + 1) * moved),
            finish=lambda n, peer, flag: peers.signal(flags, peer, flag),
        )  # fmt: skip

    own, every = totals[OWN] + 0, totals[JOBS] + 0
    if plan.comm:

        @pl.when((cluster < talking) & (warpgroup == 0))
        def _communicate():
            send(own, every, cluster * tile.cluster + block, plan.comm)

    @pl.when((cluster >= talking) & (warpgroup < tile.warpgroups))
    def _compute():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(232, action="increase")
        if plan.comm:
            plgpu.barrier_wait(begun)
        product.compute(tiles_here, finish)
        plgpu.wait_smem_to_gmem(0)
        me = ((cluster - talking) * tile.cluster + block) * tile.warpgroups + warpgroup
        everyone = computing * tile.cluster * tile.warpgroups
        for i in range(len(widths)):
            shared.clear(y_smem, peers.own(gmem[f"y{i}"]), totals[tables.END] + 0, me, everyone)

    @pl.when((cluster >= talking) & (warpgroup == tile.warpgroups))
    def _produce():
        if tile.warpgroups > 1:
            plgpu.set_max_registers(40, action="decrease")
        if plan.comm:
            me = (cluster - talking) * tile.cluster + block
            send(jnp.int32(0), own, me, computing * tile.cluster)
            # The ring lies where tiles come, a cluster's weights for both of its blocks.
            plgpu.barrier_arrive(begun)
            plgpu.barrier_wait(begun)
        product.produce(tiles_here, begin, load)
