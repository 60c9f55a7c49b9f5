"""The waits of the product with packed weights, deleted one by one, are missed."""

import functools

import pytest

from pallas_kernels.quant_gemm import hopper
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.quant_gemm import test_quant_gemm_hopper as kernel

RUN = functools.partial(kernel.product, kernel.CASES["int4"], 0)
RUNS = {(hopper, "Product"): [RUN], (hopper, "_body"): [RUN]}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([hopper]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
