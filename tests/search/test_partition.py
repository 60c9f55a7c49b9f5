"""Contiguous parts with the smallest largest sum, against all cuts."""

import itertools

import numpy as np
import pytest

from megajax.core.errors import UserError
from megajax.search.partition import balance


def largest(costs, sizes):
    ends = [0, *itertools.accumulate(sizes)]
    return max(sum(costs[a:b]) for a, b in itertools.pairwise(ends))


def test_no_cut_is_better(seed):
    random = np.random.default_rng(seed)
    for _ in range(150):
        n = int(random.integers(1, 9))
        parts = int(random.integers(1, n + 1))
        costs = random.choice([0, 1, 2, 5, 0.25], n).tolist()
        sizes = balance(costs, parts)
        assert len(sizes) == parts and min(sizes) >= 1 and sum(sizes) == n
        cuts = itertools.combinations(range(1, n), parts - 1)
        every = [[b - a for a, b in itertools.pairwise((0, *cut, n))] for cut in cuts]
        assert largest(costs, sizes) == min(largest(costs, each) for each in every)


def test_equal_costs_are_cut_evenly():
    assert balance([1] * 12, 4) == [3, 3, 3, 3]
    assert balance([4, 1, 1, 1, 1], 2) == [1, 4]


@pytest.mark.parametrize(
    ("costs", "parts", "message"),
    [
        ([1, 2], 3, "2 costs cannot be cut into 3 parts"),
        ([1, 2], 0, "parts must be from 1 to 2"),
        ([1, -1], 1, "a cost is -1"),
        ([1, float("nan")], 1, "a cost is nan"),
    ],
)
def test_what_cannot_be_cut_is_refused(costs, parts, message):
    with pytest.raises(UserError, match=message):
        balance(costs, parts)
