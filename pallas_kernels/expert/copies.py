"""The communication of an expert kernel alone, which the product has to hide."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.expert import rows
from pallas_kernels.expert.tables import JOBS, OWN, Tables
from pallas_kernels.hopper.cards import RESERVED_BYTES, SHARED_BYTES
from pallas_kernels.hopper.memory import share, span
from pallas_kernels.hopper.peers import Peers
from pallas_kernels.work import Work


def send_rows(
    x: jax.Array, work: Tables, *, peers: Peers, comm: int, chunk: int, height: int
) -> jax.Array:
    """Sends the jobs of the tables that go to other ranks, by `comm` blocks: (pages, height, K).

    x: (C, rows, K) of any type, whole rows of which are sent. height: rows of a page of the result.
    """
    K = x.shape[2]
    across = rows.part(K, x.dtype.itemsize)
    most = SHARED_BYTES - RESERVED_BYTES
    smem, barriers = rows.scratch(across, x.dtype, chunk, most)
    parts, moved = K // across, across * x.dtype.itemsize

    def body(x, jobs, totals, y, smem, barriers):
        me, began = peers.cluster(), peers.now()
        jobs, totals = peers.private_page(jobs), peers.private_page(totals)
        local_jobs = totals[OWN] + 0

        def piece(ref, row, p):
            return ref.at[pl.ds(row, 1), span(p, across)]

        rows.relay(
            smem,
            barriers,
            share(totals[JOBS] - local_jobs, me, comm),
            parts=lambda _: jnp.int32(parts),
            table=lambda n: jobs.at[local_jobs + me + n * comm],
            source=lambda n, row, p: piece(peers.private_page(x), row, p),
            target=lambda n, peer, row, p: piece(peers.peer(y, peer), row, p),
            pace=lambda n, q: peers.pace(began, (n * chunk * parts + q + 1) * moved),
            finish=lambda n, peer, flag: None,
        )

    result = jax.ShapeDtypeStruct((peers.reached, height, K), x.dtype)
    kernel = plgpu.kernel(
        body,
        out_type=result,
        scratch_types={"smem": smem, "barriers": barriers},
        grid=(comm * peers.copies,),
        grid_names=("block",),
        kernel_name="send_rows",
    )
    operands = x, work.jobs_CW, work.totals
    with Work("send_rows").scope(operands, [result]):
        return kernel(*operands)
