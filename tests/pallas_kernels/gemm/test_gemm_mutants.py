"""The wait of the product's own, deleted, is missed by the interpreter; others are the engine's."""

import pytest

from pallas_kernels.gemm import hopper
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.hopper.test_engine_mutants import PINGPONG, SHARED

RUNS = {(hopper, "_body"): [SHARED, PINGPONG]}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([hopper]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
