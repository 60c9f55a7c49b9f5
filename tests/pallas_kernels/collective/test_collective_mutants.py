"""Each wait of the fused kernels, deleted, is missed by the interpreter; others are the engine's.

The waits for flags: tests/pallas_kernels/test_communication_mutants.py.
"""

import functools

import pytest

from pallas_kernels.collective import gemm_reduce_scatter
from tests.kernel_mutants import check, parameters
from tests.pallas_kernels.collective import test_collective_interpreted as interpreted

RUNS = {
    (gemm_reduce_scatter, "_body"): [
        functools.partial(interpreted.test_scattered_product, 1, 1, 0)
    ],
}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {
    "_body.finish.wait_smem_to_gmem(0)": (
        (0,),
        "what waits for the store is another rank; test_communication_mutants.py misses it",
    )
}


@pytest.mark.parametrize("site", parameters([gemm_reduce_scatter]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)
