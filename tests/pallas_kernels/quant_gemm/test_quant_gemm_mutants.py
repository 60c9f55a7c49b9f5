"""The waits of the product with packed weights, deleted one by one, are missed."""

import functools

import pytest

from pallas_kernels.quant_gemm import hopper
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.quant_gemm import test_quant_gemm_hopper as kernel

# Several steps, of one 64 of K or two; of codes as they are, and of whole weights; warpgroups that
# share columns.
ONE, TWO, EXACT, EXACT_TWO, SHARED, BY_WARP, PAIRS = (
    functools.partial(kernel.product, kernel.CASES[name], 0)
    for name in (
        "3 bits",
        "2 bits",
        "int4",
        "int4 split",
        "halves",
        "quarters by warp",
        "pairs of 32",
    )
)
RUNS = {
    (hopper, "Product"): [ONE, TWO],
    (hopper, "Flowing"): [PAIRS],
    (hopper, "Grouped"): [EXACT, EXACT_TWO],
    (hopper, "_body"): [EXACT_TWO, TWO, ONE, BY_WARP, PAIRS],
    (hopper, "_meet"): [SHARED],
}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([hopper]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
