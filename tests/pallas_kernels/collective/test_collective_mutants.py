"""Each wait of what the fused kernels share, deleted, is missed by the interpreter.

The waits for flags are those of the protocols: test_collective_protocol.py.
"""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import interpret as interpreter
from pallas_kernels.collective import all_gather_gemm, core, gemm_reduce_scatter
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.collective import test_collective_interpreted as interpreted

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

        core.relay(
            ring, arrived, jnp.int32(total), jnp.int32(PIECES),
            source=lambda q: x.at[q], target=lambda q: y.at[q], live=lambda q: live[q] != 0,
            pace=lambda q: None, finish=finish,
        )  # fmt: skip

    given = jnp.asarray(np.pad(live, (0, SLOTS)), jnp.int32)  # it asks beyond the last piece
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
        grid=(1,), grid_names=("block",), num_threads=1, thread_name="warpgroup",
        interpret=interpreter.params(),
    )  # fmt: skip
    with interpreter.checked():
        y, flags = jax.block_until_ready(jax.jit(run)(x, given))
    np.testing.assert_array_equal(np.asarray(y)[live], x[live])
    np.testing.assert_array_equal(flags, x[::PIECES, 0])


RAGGED = pytest.mark.xfail(
    raises=RuntimeError,
    strict=True,
    reason="dead pieces commit no store, so to wait for all but STORING stores guards too few",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows", [(5, 5, 5, 5), (5, 4, 5), pytest.param((5, 3, 5), marks=RAGGED)], ids=str
)
def test_relay(rows):
    relayed(rows)


# Tiles of 64 and of 128 columns, two products of which a block makes several tiles.
PRODUCT = [
    functools.partial(interpreted.gathered, 1, (64, 64, 1, 1), 72, True, "bfloat16", 0, K=192)
]
RUNS = {
    (core, "Product"): PRODUCT,
    (all_gather_gemm, "_body"): PRODUCT,
    (gemm_reduce_scatter, "_body"): [
        functools.partial(interpreted.test_scattered_product, 1, 1, 0)
    ],
    (core, "relay"): [functools.partial(relayed, (5, 5, 5, 5))],
}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([core, all_gather_gemm, gemm_reduce_scatter]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
