"""The waits of the products' own, deleted, are missed by the interpreter; others: the engine's."""

import functools

import pytest

from pallas_kernels.gemm import hopper, promotion
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.gemm import test_gemm_scaled as scaled
from tests.pallas_kernels.hopper.test_engine_mutants import PINGPONG, SHARED

RUNS = {
    (hopper, "_body"): [SHARED, PINGPONG],
    (promotion, "Promoted"): [functools.partial(scaled.product, scaled.CASES[0], 0)],
}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([hopper, promotion]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
