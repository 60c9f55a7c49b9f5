"""The experts' kernels' own code, all ranks and warpgroups at once: exact, and free of races."""

import functools

import pytest

from tests import kernel_cases as kernels
from tests.kernel_cases import run

BOTH = [kernels.dispatch, kernels.combine]
UNEVEN = [
    "one hot expert",
    "an empty rank",
    "a silent rank",
    "none",
    "cut in two",
    "the same twice",
]
OTHERS = [
    {"ranks": 2, "cluster": 2, "comm": 2},
    {"ranks": 4, "comm": 2},
    {"ranks": 2, "warpgroups": 2},
]


@pytest.mark.parametrize("case", BOTH)
def test_a_kernel_is_exact_and_free_of_races(case, seed):
    run(functools.partial(case, ranks=2, cluster=2), seed)


@pytest.mark.slow
@pytest.mark.parametrize("routing", UNEVEN)
@pytest.mark.parametrize("case", BOTH)
def test_of_uneven_routings(case, routing, seed):
    run(functools.partial(case, routing=routing), seed)


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERS, ids=str)
@pytest.mark.parametrize("case", BOTH)
@pytest.mark.parametrize("number", range(3))
def test_of_other_shapes(case, options, number, seed):
    run(functools.partial(case, **options), seed + number)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("case", BOTH)
def test_of_a_rank_that_is_late(case, late, seed):
    run(case, seed, slow=late)
