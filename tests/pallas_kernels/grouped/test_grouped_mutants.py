"""Each wait of the weights' gradient's own, deleted, is missed; others are the engine's."""

import functools

import pytest

from pallas_kernels.grouped import hopper_weights
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.grouped.test_grouped_hopper import WEIGHTS, WIDE, weights

WEIGHT = [
    functools.partial(weights, case, 0)
    for case in (((264, 72, 72), [130, 0, 9, 90], WIDE, 1), WEIGHTS["three steps"])
]
RUNS = {(hopper_weights, "_body"): WEIGHT}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([hopper_weights]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
