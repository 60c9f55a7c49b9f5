"""Each wait of the stream of tiles, deleted, is missed by the interpreter."""

import functools

import pytest

from pallas_kernels.quantize import stream
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.quantize.test_quantize_hopper import OUT, Case, run

# More tiles than slots, and than places of results.
TILES = functools.partial(run, Case("out", OUT, 5 * 8192, group=2048), 0)
RUNS = {(stream, "stream"): [TILES]}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {}


@pytest.mark.parametrize("site", parameters([stream]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
