"""Each wait of the tile-sparse products, deleted, is missed by the interpreter."""

import functools

import pytest

from pallas_kernels.tile_sparse import hopper, hopper_weights
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.tile_sparse.test_tile_sparse_hopper import (
    CASES,
    SMALL,
    WEIGHTS,
    Weights,
    product,
    weights,
)

# More steps than stages, two tiles for a block, an empty one, more pieces than buffers.
PRODUCT = [
    functools.partial(product, case, 0)
    for case in (
        ((136, 264, 160), (64, 64), [1, 0, 4], SMALL, 1),
        CASES["ping-pong"],
        ((72, 192, 256), (256, 64), [3], SMALL, 1),
    )
]
WEIGHT = [
    functools.partial(weights, case, 0)
    for case in (
        ((200, 200, 128), (64, 64), [3, 1], Weights(128, 2), 1),
        ((136, 64, 256), (256, 64), [1], Weights(128, 2), 1),
        WEIGHTS["128 rows a warpgroup"],
    )
]
RUNS = {(hopper, "_body"): PRODUCT, (hopper_weights, "_body"): WEIGHT}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([hopper, hopper_weights]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
