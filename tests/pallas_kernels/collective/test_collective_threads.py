"""The dense fused kernels' own code, all ranks and warpgroups at once: exact, and free of races."""

import functools

import pytest

from tests import kernel_cases as kernels
from tests.kernel_cases import run

QUICK = [kernels.gather, kernels.scatter, functools.partial(kernels.reduce, ranks=2, cluster=2)]
SLOW = [
    functools.partial(kernels.gather, ranks=2, cluster=2, comm=2, keep=True),
    functools.partial(kernels.gather, ranks=4, rows=136, warpgroups=2, comm=2),
    kernels.copies,
    functools.partial(kernels.copies, ranks=4, comm=3),
    functools.partial(kernels.scatter, ranks=2, cluster=2, comm=2),
    functools.partial(kernels.scatter, ranks=4, rows=136, warpgroups=2, comm=2, depths=(64,)),
    kernels.reduce,
    functools.partial(kernels.reduce, ranks=4, rows=136, warpgroups=2),
]


def name_of(case):
    options = getattr(case, "keywords", {})
    named = getattr(case, "func", case).__name__
    return "-".join([named, *(f"{key}={value}" for key, value in options.items())])


@pytest.mark.parametrize("case", QUICK, ids=name_of)
def test_a_kernel_is_exact_and_free_of_races(case, seed):
    run(case, seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=name_of)
@pytest.mark.parametrize("number", range(3))
def test_of_other_shapes(case, number, seed):
    run(case, seed + number)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("case", [kernels.gather, kernels.scatter, kernels.reduce], ids=name_of)
def test_of_a_rank_that_is_late(case, late, seed):
    run(case, seed, slow=late)
