"""Each wait of the engine, deleted, is missed by the interpreter in a kernel that runs on it."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret as interpreter
from pallas_kernels.hopper import engine, epilogue, relay
from pallas_kernels.hopper.epilogue import Staging
from pallas_kernels.hopper.tiles import Tile
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.gemm.test_gemm_hopper import KEPT, PARTS, PLAIN, TURNS, WIDE, X, run
from tests.pallas_kernels.grouped import test_grouped_hopper as grouped
from tests.pallas_kernels.tile_sparse import test_tile_sparse_hopper as tile_sparse

SLOTS, PIECES = 6, 5  # of the ring; of a chunk


def relayed(rows):
    """A warpgroup copies chunks of PIECES rows, of which the last may be dead; then they are read.

    rows: live ones of each chunk.
    """
    live = np.concatenate([np.arange(PIECES) < n for n in rows])
    total = len(live)
    x = np.random.default_rng(0).standard_normal((total, 64)).astype(np.float32)

    def body(x, live, y, flags, ring, arrived):
        def finish(n):  # a flag may be raised: what was stored is seen
            flags[n] = y[n * PIECES, 0]

        relay.relay(
            ring,
            arrived,
            jnp.int32(total),
            jnp.int32(PIECES),
            source=lambda q: x.at[q],
            target=lambda q: y.at[q],
            live=lambda q: live[q] != 0,
            pace=lambda q: None,
            finish=finish,
        )

    padded = jnp.asarray(np.pad(live, (0, SLOTS)), jnp.int32)  # it asks beyond the last piece
    run = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((total, 64), jnp.float32),
            jax.ShapeDtypeStruct((len(rows),), jnp.float32),
        ],
        scratch_types={
            "ring": plgpu.SMEM((SLOTS, 64), jnp.float32),
            "arrived": plgpu.Barrier(num_barriers=SLOTS),
        },
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpreter.params(),
    )
    with interpreter.checked():
        y, flags = jax.block_until_ready(jax.jit(run)(x, padded))
    np.testing.assert_array_equal(np.asarray(y)[live], x[live])
    np.testing.assert_array_equal(flags, x[::PIECES, 0])


def cleared(end=70, height=200):
    """After a store that may go on, the rows from `end` on are set to 0."""

    def body(x, y, y_smem):
        y_smem[0, 0] = plgpu.load(x.at[:], layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_smem.at[0, 0], y.at[pl.ds(0, 64)])
        Staging((y_smem,), jnp.int32(0)).clear(y, jnp.int32(end), jnp.int32(0), 1)

    x = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    run = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((height, 64), jnp.float32),
        scratch_types={"y_smem": plgpu.SMEM((1, 1, 64, 64), jnp.float32)},
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        interpret=interpreter.params(),
    )
    with interpreter.checked():
        y = np.asarray(jax.block_until_ready(jax.jit(run)(x)))
    np.testing.assert_array_equal(y[:64], x)
    assert not y[end:].any()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(5, 5, 5, 5), (5, 4, 5), (5, 3, 5)], ids=str)
def test_relay(rows):
    relayed(rows)


@pytest.mark.slow
def test_clear():
    cleared()


# More steps than stages, two tiles for a block.
SHARED = functools.partial(run, ((136, 72, 136), WIDE, X, KEPT, PARTS, 1), 0)
PINGPONG = functools.partial(run, ((200, 64, 192), TURNS, X, KEPT, PARTS, 1), 0)
CLUSTER = functools.partial(
    run, ((256, 64, 192), Tile(64, 64, 64, 2, 1, cluster=2), X, PLAIN, (), 2), 0
)
# More pieces than buffers of the epilogue.
THREE = functools.partial(run, ((64, 192, 130), Tile(64, 192, 64, 3, 1), X, KEPT, PARTS, 1), 0)
# A warpgroup without a row; rows past the sum, which are cleared; a second tile.
GROUPED = functools.partial(
    grouped.product, ((136, 200, 72), [30, 0, 66], grouped.WIDE, False, 1), 0
)
# Lists of different lengths, one of them empty, in rings of their own.
LISTS = functools.partial(tile_sparse.product, tile_sparse.CASES["ping-pong"], 0)
# Several sums a step, of jobs without a slot for one warpgroup.
SEVERAL = functools.partial(
    tile_sparse.weights,
    ((200, 200, 128), (64, 64), [3, 1], tile_sparse.Weights(128, 2), 1),
    0,
)
RUNS = {
    (engine, "Product"): [SHARED, PINGPONG, CLUSTER, GROUPED, LISTS, SEVERAL],
    (epilogue, "Staging"): [SHARED, PINGPONG, THREE, cleared],
    (relay, "relay"): [functools.partial(relayed, rows) for rows in ((5, 5, 5, 5), (5, 3, 5))],
}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}
# The second without which a ring's slot was filled while it was being stored: a dead piece commits
# no group of copies, so that a wait for all but so many groups waits for too few.
QUICK = [
    "relay._._.barrier_wait(arrived.at[slot])",
    "relay._.wait_smem_to_gmem(0, wait_read_only=True)",
]


@pytest.mark.parametrize("site", parameters([engine, epilogue, relay], QUICK))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
