"""Each wait of the experts' copies, deleted, is missed by the interpreter.

The waits for flags: tests/pallas_kernels/test_communication_mutants.py. The product's own waits are
those of tests/pallas_kernels/hopper/test_engine_mutants.py.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret as interpreter
from pallas_kernels.expert import gemm_combine, rows
from pallas_kernels.expert.tables import FLAG, PAIRS, PEER, ROWS
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.expert import test_expert_interpreted as interpreted

SLOTS, CHUNK, COLUMNS = 5, 6, 64  # of the ring; rows of a job, at most; columns of a row


def relayed(late, jobs=(6, 1, 6, 4)):
    """A warpgroup sends the rows of jobs to others. late: a job waits for its rows at its start."""
    random, total = np.random.default_rng(0), sum(jobs)
    x = random.standard_normal((total, COLUMNS)).astype(np.float32)
    to, table, first = random.permutation(total), np.zeros((len(jobs), PAIRS + 2 * CHUNK), int), 0
    for n, count in enumerate(jobs):
        span = np.arange(first, first + count)
        table[n, [PEER, ROWS, FLAG]] = 0, count, n
        table[n, PAIRS : PAIRS + 2 * count] = np.stack([span, to[span]], 1).reshape(-1)
        first += count

    def body(x, table, y, flags, ring, tables, arrived, listed):
        def finish(n, _, flag):  # a flag may be raised: what was stored is seen
            flags[flag] = y[table[n, PAIRS + 1], 0]
            # The interpreter wants a fence between the warpgroup's reads of a table and the copy of
            # a later one into the same memory. The kernel has none.
            plgpu.commit_smem()

        rows.relay(
            (ring, tables),
            (arrived, listed),
            jnp.int32(len(jobs)),
            parts=lambda _: jnp.int32(1),
            table=lambda n: table.at[n],
            source=lambda n, row, p: x.at[pl.ds(row, 1)],
            finish=finish,
            pace=lambda n, q: None,
            target=lambda n, peer, row, p: y.at[pl.ds(row, 1)],
            begin=(lambda n: None) if late else None,
        )

    run = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(x.shape, jnp.float32),
            jax.ShapeDtypeStruct((len(jobs),), jnp.float32),
        ],
        scratch_types={
            "ring": plgpu.SMEM((SLOTS, 1, COLUMNS), jnp.float32),
            "tables": plgpu.SMEM((2, table.shape[1]), jnp.int32),
            "arrived": plgpu.Barrier(num_barriers=SLOTS),
            "listed": plgpu.Barrier(num_barriers=2),
        },
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpreter.params(),
    )
    with interpreter.checked():
        y, flags = jax.block_until_ready(jax.jit(run)(x, table.astype(np.int32)))
    np.testing.assert_array_equal(np.asarray(y)[to], x)
    np.testing.assert_array_equal(flags, x[np.cumsum((0, *jobs[:-1])), 0])


def combined():
    with interpreter.checked():
        interpreted.test_combined_product(2, 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_relay(late):
    relayed(late)


RUNS = {
    (rows, "relay"): [functools.partial(relayed, late) for late in (False, True)],
    (gemm_combine, "_body"): [combined],
}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {
    "_body.finish.wait_smem_to_gmem(0)": (
        (0,),
        "what waits for the store is another rank; test_communication_mutants.py misses it",
    )
}


@pytest.mark.parametrize("site", parameters([rows, gemm_combine]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
