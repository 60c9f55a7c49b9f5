"""Each wait of the product, deleted, is missed by the interpreter."""

import functools

import pytest

from pallas_kernels.gemm import hopper
from pallas_kernels.gemm.hopper import Tile
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.gemm.test_gemm_hopper import KEPT, PARTS, PLAIN, TURNS, WIDE, X, run

# More steps than stages, two tiles for a block, more pieces than buffers of the epilogue.
SHARED = functools.partial(run, ((136, 72, 136), WIDE, X, KEPT, PARTS, 1), 0)
PINGPONG = functools.partial(run, ((200, 64, 192), TURNS, X, KEPT, PARTS, 1), 0)
CLUSTER = functools.partial(
    run, ((256, 64, 192), Tile(64, 64, 64, 2, 1, cluster=2), X, PLAIN, (), 2), 0
)
RUNS = {(hopper, "_body"): [SHARED, PINGPONG, CLUSTER]}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([hopper], ["_body._compute.product.wgmma_wait(0)"]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
