"""Grouped product + top-k combine in one kernel: answers leave column block by column block.

Tiles of all experts of one block of columns are taken before those of the next, so that the rows of
a block travel while the next is computed (COMET, arXiv 2502.19811, sections 3.1 and 3.2: its layer
1). A page of answers, in float32, has a row for each choice of the rank's own tokens, where answers
of others arrive, and one for each row of its experts, where its product's go:

    compute        product, sums to the page's rows of experts, arrive flag[block of columns]
    communication  for job of a block: wait flag[block] | rows --bulk copies--> their choices' rows
                   of the owner's page, arrive there at flag[blocks + block]
    all            for block: wait for its own tiles and all arrivals;
                   y[token] = sum over choices of weight * answer

A choice has a row of its own and choices are added in their order: the same bits in every run. A
rank's kernel ends when all answers to it have come, and its own copies are complete when their
flags are raised: nothing is left to wait for.

Legend: T tokens of a rank, A choices a token, S = T A, N rows of a rank's experts, K contracted, D
columns.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert import product as shared
from pallas_kernels.expert import rows as rows_
from pallas_kernels.expert import tables
from pallas_kernels.expert.product import ExpertFusion
from pallas_kernels.expert.tables import ARRIVALS, JOBS, Tables
from pallas_kernels.hopper import engine, fused, schedule
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.memory import number, share, span
from pallas_kernels.hopper.peers import Peers
from pallas_kernels.work import product

NAME = "gemm_combine"
TOGETHER = 8  # answers of a token that are loaded at one time (tried: of forty some spill)


def gemm_combine(
    hs: tuple[jax.Array, ...],
    ws: tuple[jax.Array, ...],
    work: Tables,
    places: jax.Array,
    weights: jax.Array,
    delays: jax.Array | None = None,
    into: Any = None,
    *,
    peers: Peers,
    fusion: ExpertFusion,
    spec: Spec,
    turned: bool = False,
    blocks: int = SMS,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns for each token the weighted sum of its answers; an answer is a row's sum of h w.

    C: `peers.copies`, the ranks whose arrays these are; 1 but for virtual ranks.
    Args:
      hs: (C, height, K) each, N rows and more up to `product.height`; what lies past the rows that
        came does not matter.
      ws: (C, E, K, D) each, or (C, E, D, K) where turned; D at least the tile's, a multiple of 128.
        K of its own for each pair, a multiple of 64.
      work: tables.combine of each rank, (C, ...) each, for block_m * cluster and fusion.chunk.
      places: int32 (C, T, A), `tables.places`. weights: float32 (C, T, A).
      delays: (C,) int32, ns that a rank starts late (tests).
      into: a jax.Ref like the pages of answers (tests: full of NaN).
      spec: out_dtype is that of the answers that cross ranks; the result has h's.
      blocks: thread blocks, at most what the GPU runs at once.
      interpret: in Mosaic GPU's interpreter, with ReadyPeer.
    Returns: y (C, T, D), 0 for a token without a choice; with ReadyPeer undefined. Then the pages
      of answers (C, S + N, D), of ReadyPeer those of all ranks.
    """
    C, tile = peers.copies, fusion.tile
    clusters = fused.clusters_of(NAME, fusion, peers, blocks)
    (_, T, A), D = places.shape, ws[0].shape[3 - turned]
    height = T * A + hs[0].shape[1]
    sums, dtype = jnp.dtype(spec.out_dtype), hs[0].dtype
    inputs = {f"x{i}": h for i, h in enumerate(hs)} | {f"w{i}": w for i, w in enumerate(ws)}
    inputs |= {"visits": work.visits_VW, "jobs": work.jobs_CW, "totals": work.totals}
    inputs |= {"places": places, "weights": weights, "delays": delays, "page": into}
    outputs = {"y": jax.ShapeDtypeStruct((C, T, D), dtype)}
    if into is None:
        outputs["page"] = jax.ShapeDtypeStruct((peers.reached, height, D), sums)
    wide = min(fusion.width * tile.block_n, D)
    buffers = engine.buffers(tile, dtype, sums, turned_b=turned)
    results = engine.launch(
        functools.partial(
            _body,
            # The products follow each other in the steps of one sum.
            steps=fused.Parts([pl.cdiv(h.shape[2], tile.block_k) for h in hs]),
            wide=wide,
            of=functools.partial(fused.Worker, peers, fusion, clusters, turned),
        ),
        inputs,
        outputs,
        shared.scratch(NAME, fusion, buffers, math.gcd(D, wide), sums),
        work=product(NAME, C * hs[0].shape[1], D, sum(h.shape[2] for h in hs)),
        tile=tile,
        clusters=clusters * C,
        interpret=interpret,
    )
    return results["y"], results["page"] if into is None else into[...]


def _body(gmem, *, steps, wide, of, begun: Any = None, arrived: Any = None, **memory):
    worker = of(steps.total, memory, gmem.get("delays"))
    peers, fusion, tile = worker.peers, worker.fusion, worker.tile
    height, D = gmem["x0"].shape[1], gmem["y"].shape[2]
    S = gmem["places"].shape[1] * gmem["places"].shape[2]
    blocks, columns = pl.cdiv(D, wide), pl.cdiv(D, tile.block_n)
    # Tiles of each block of columns, then what came of it.
    flags = peers.flags(2 * blocks)
    visits, jobs, totals = (peers.private_page(gmem[name]) for name in ("visits", "jobs", "totals"))
    count = number(totals, tables.VISITS)

    def place_of(i):
        column, visit = schedule.raster(i, columns, count, fusion.width)
        return shared.place(visits, visit, column)

    def load(place, s, buffer, barrier):
        m = shared.rows_of(place, worker.block, tile, height)
        n = span(place.column, tile.block_n)

        def load_pair(pair, step):
            k, w = span(step, tile.block_k), peers.private_page(gmem[f"w{pair}"]).at[place.group]
            worker.load_left(peers.private_page(gmem[f"x{pair}"]).at[m, k], buffer, barrier)
            worker.load_right(w, n, k, buffer, barrier)

        steps.each(s, load_pair)

    def finish(i, sums):
        place = place_of(i)
        top = worker.top(place.row)
        page = peers.shared_page(gmem["page"])

        def copy(piece, down, right):
            at = pl.multiple_of(place.column * tile.block_n, tile.block_n) + right
            shared.store_rows(piece, page, S + top + down, at, S + place.lo, S + place.hi)

        shared.when_live(place, top, tile, lambda: worker.store(sums, lambda z, _: z, copy))
        plgpu.wait_smem_to_gmem(0)
        if not peers.ready:
            peers.signal(flags, worker.rank, lax.div(place.column, jnp.int32(fusion.width)))

    def computed(b):
        """Waits for all warpgroups' parts of a block's tiles."""
        across = jnp.minimum(fusion.width, columns - b * fusion.width)
        peers.wait(flags, b, count * across * (tile.cluster * tile.warpgroups))

    def send():
        me, every = worker.number, jnp.maximum(number(totals, JOBS), 1)
        across = worker.ring[0].shape[2]
        moved, began = across * jnp.dtype(worker.ring[0].dtype).itemsize, peers.now()
        most = fusion.chunk * (wide // across)  # copies of a job

        def block_of(n):
            return lax.div(me + n * fusion.comm, every)

        def piece(ref, n, row, p):
            return ref.at[pl.ds(row, 1), span(block_of(n) * (wide // across) + p, across)]

        rows_.relay(
            worker.ring,
            arrived,
            share(blocks * number(totals, JOBS), me, fusion.comm),
            parts=lambda n: lax.div(jnp.minimum(wide, D - block_of(n) * wide), jnp.int32(across)),
            table=lambda n: jobs.at[lax.rem(me + n * fusion.comm, every)],
            source=lambda n, row, p: piece(peers.shared_page(gmem["page"]), n, row, p),
            target=lambda n, peer, row, p: piece(peers.peer(gmem["page"], peer), n, row, p),
            pace=lambda n, q: peers.pace(began, (n * most + q + 1) * moved),
            finish=lambda n, peer, _: peers.signal(flags, peer, blocks + block_of(n)),
            begin=lambda n: computed(block_of(n)),
        )

    def add_up():
        @pl.loop(0, blocks)
        def _(b):
            computed(b)
            peers.wait(flags, blocks + b, number(totals, ARRIVALS))
            _add_up(gmem, peers, b, wide, *worker.worker)

    def communicate():
        pl.when(worker.warpgroup == 0)(send)
        add_up()

    def compute():
        worker.compute(count * columns, finish)
        if not peers.ready:
            add_up()

    worker.specialise(
        compute, lambda: worker.product.produce(count * columns, place_of, load), communicate
    )


def _add_up(gmem, peers, b, wide, me, everyone):
    """Warpgroup `me` of `everyone` stores its tokens' sums of block b of the columns."""
    places, weights = (peers.private_page(gmem[name]) for name in ("places", "weights"))
    (T, A), D = places.shape, gmem["y"].shape[2]
    each = next(128 * vector for vector in (4, 2, 1) if math.gcd(D, wide) % (128 * vector) == 0)
    layout = plgpu.Layout.WG_STRIDED((each,), vec_size=each // 128)

    few = A % TOGETHER or TOGETHER  # choices of the first group; the others are whole
    groups = (A - few) // TOGETHER

    @pl.loop(0, share(jnp.int32(T), me, everyone))
    def _(i):
        token = me + i * everyone

        def choices(first, count):
            at = [first + a for a in range(count)]
            return [(places[token, a] + 0, weights[token, a] + 0.0) for a in at]

        early = choices(0, few)

        def store(at):
            def answer(place, weight):
                row = peers.shared_page(gmem["page"]).at[jnp.maximum(place, 0), at]
                values = plgpu.load(row, layout=layout, optimized=False).astype(jnp.float32)
                # A row that nobody writes may hold anything.
                return jnp.where(jnp.full((each,), place) >= 0, values * weight, 0.0)

            def add(group, y):
                more = choices(few + group * TOGETHER, TOGETHER)
                return functools.reduce(jnp.add, [answer(*choice) for choice in more], y)

            y = functools.reduce(jnp.add, [answer(*choice) for choice in early])
            y = lax.fori_loop(0, groups, add, y) if groups else y
            peers.private_page(gmem["y"]).at[token, at][...] = y.astype(gmem["y"].dtype)

        for first in range(0, wide, each):
            column = b * wide + first
            pl.when(column < D)(functools.partial(store, pl.ds(column, each)))
