"""Each wait of the norm's kernels, deleted, is missed by the interpreter."""

import functools

import pytest

from pallas_kernels.norm import hopper
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.norm.test_norm_hopper import (
    Shape,
    run_backward,
    run_forward,
    run_unpacked,
)

# More groups of rows than slots; vectors in shared memory, and zeros for rows that pad.
ROWS = Shape(10, 256, hopper.Tile(2, 2, 1))
PADDED = Shape(14, 256, hopper.Tile(2, 2, 3), lengths=(3, 0, 5, 1))
FORWARD = [functools.partial(run_forward, ROWS, 0), functools.partial(run_unpacked, PADDED, 0)]
BACKWARD = [functools.partial(run_backward, ROWS, 0)]
RUNS = {
    (hopper, "_Ring"): FORWARD,
    (hopper, "_norm_forward"): FORWARD,
    (hopper, "_clear"): FORWARD[1:],
    (hopper, "_norm_backward"): BACKWARD,
}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([hopper]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
