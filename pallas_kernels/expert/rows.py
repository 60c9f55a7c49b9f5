"""Sends rows from a thread block to other ranks by bulk copies of one row, as a table of jobs says.

    table    of job n + 1 is on its way to shared memory while job n is sent
    loads    piece q + slots - STORING of a job is on its way while piece q is stored
    job's end  the next one's first loads start | all stores done (waited for) | finish: the flag

Rows go anywhere, so a copy is one row, or a part of one where it is long; bulk copies need no
descriptor, and rank and row may be any numbers read from memory.

Legend: as in tables.py.
"""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert.tables import FLAG, PAIRS, PEER, ROWS
from pallas_kernels.hopper import tiles
from pallas_kernels.hopper.memory import Int
from pallas_kernels.hopper.relay import RING_BYTES, STORING

SLOTS = 24  # pieces of the ring, at most (chosen: 4 KiB each hide 1 us at 100 GB/s)


def part(width: int, itemsize: int) -> int:
    """Returns the columns of a row that one copy moves."""
    most = RING_BYTES // itemsize
    return next(n for n in range(min(width, most), 0, -1) if width % n == 0 and n % 64 == 0)


def scratch(columns: int, dtype: Any, chunk: int, most: int) -> tuple[tuple[Any, Any], tuple]:
    """Returns (ring, tables) in at most `most` bytes of shared memory, and their barriers."""
    entries = (2, PAIRS + 2 * chunk)
    left = most - tiles.shared_bytes({"tables": (entries, jnp.int32)})
    slots = min(SLOTS, left // tiles.shared_bytes({"piece": ((1, columns), dtype)}))
    ring, tables = plgpu.SMEM((slots, 1, columns), dtype), plgpu.SMEM(entries, jnp.int32)
    return (ring, tables), (plgpu.Barrier(num_barriers=slots), plgpu.Barrier(num_barriers=2))


def relay(
    smem: tuple[Any, Any],
    barriers: tuple[Any, Any],
    jobs: Int,
    *,
    parts: Callable[[Int], Int],
    table: Callable[[Int], Any],
    source: Callable[[Int, Int, Int], Any],
    target: Callable[[Int, Int, Int, Int], Any],
    pace: Callable[[Int, Int], None],
    finish: Callable[[Int, Int, Int], None],
    begin: Callable[[Int], None] | None = None,
) -> None:
    """A warpgroup sends the rows of `jobs` jobs, each row in parts(n) parts.

    table(n): the entries of job n. begin(n): waits until its rows are there. source(n, row, p) and
    target(n, peer, row, p): part p of a row. pace(n, q): before the q-th copy of job n is stored.
    finish(n, peer, flag): after all of it is.
    """
    (ring, tables), (arrived, listed) = smem, barriers
    slots = ring.shape[0]
    ahead = slots - STORING

    def entry(n, i):
        return tables[lax.rem(n, jnp.int32(2)), i] + 0

    def list_rows(n):
        @pl.when(n < jobs)
        def _():
            slot = lax.rem(n, jnp.int32(2))
            plgpu.copy_gmem_to_smem(
                table(n),
                tables.at[slot],
                listed.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def fetch(n, q):
        @pl.when(q < entry(n, ROWS) * parts(n))
        def _():
            slot, row = lax.rem(q, jnp.int32(slots)), entry(n, PAIRS + 2 * lax.div(q, parts(n)))
            plgpu.copy_gmem_to_smem(
                source(n, row, lax.rem(q, parts(n))),
                ring.at[slot],
                arrived.at[slot],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def start(n):
        @pl.when(n < jobs)
        def _():
            plgpu.barrier_wait(listed.at[lax.rem(n, jnp.int32(2))])
            if begin is not None:
                begin(n)
            pl.loop(0, ahead)(lambda q: fetch(n, q))

    list_rows(jnp.int32(0))
    start(jnp.int32(0))

    @pl.loop(0, jobs)
    def _(n):
        # The table of the job before is no longer read.
        list_rows(n + 1)
        peer, flag, across = entry(n, PEER), entry(n, FLAG), parts(n)

        @pl.loop(0, entry(n, ROWS) * across)
        def _(q):
            slot, row = lax.rem(q, jnp.int32(slots)), entry(n, PAIRS + 1 + 2 * lax.div(q, across))
            plgpu.barrier_wait(arrived.at[slot])
            pace(n, q)
            plgpu.copy_smem_to_gmem(ring.at[slot], target(n, peer, row, lax.rem(q, across)))
            # The slot that is filled now was stored from STORING pieces ago.
            plgpu.wait_smem_to_gmem(STORING, wait_read_only=True)
            fetch(n, q + ahead)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if begin is None:
            start(n + 1)
        plgpu.wait_smem_to_gmem(0)
        finish(n, peer, flag)
        if begin is not None:
            start(n + 1)
