"""Each wait of the grouped products, deleted, is missed by the interpreter."""

import functools

import pytest

from pallas_kernels.grouped import hopper, hopper_weights
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.grouped.test_grouped_hopper import (
    LARGE,
    PRODUCTS,
    WEIGHTS,
    WIDE,
    product,
    weights,
)

# More steps than stages; a warpgroup without a row; more pieces than buffers; a second tile.
PRODUCT = [
    functools.partial(product, case, 0)
    for case in (
        ((136, 200, 72), [30, 0, 66], WIDE, False, 1),
        PRODUCTS["cluster transposed"],
        ((136, 64, 192), [64], LARGE, False, 2),
    )
]
WEIGHT = [
    functools.partial(weights, case, 0)
    for case in (((264, 72, 72), [130, 0, 9, 90], WIDE, 1), WEIGHTS["three steps"])
]
RUNS = {(hopper, "_body"): PRODUCT, (hopper_weights, "_body"): WEIGHT}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([hopper, hopper_weights]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
