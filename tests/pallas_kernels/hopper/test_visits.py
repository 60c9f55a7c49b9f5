"""Steps over grouped rows, against a walk through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import visits
from tests.grouped_oracle import split

SIZES = {
    "even": [16, 16, 16],
    "uneven": [1, 30, 0, 7, 0, 0, 26],
    "one hot": [0, 0, 64, 0],
    "all empty": [0, 0, 0],
    "below the sum": [3, 5],
    "past the sum": [40, 40, 5],
    "all ones": [1] * 64,
    "more than int32 holds": [30, 2**31 - 1],
}


def walk(sizes, rows, block, align):
    """(group, first row, lo, hi) step after step."""
    steps, begin = [], 0
    for group, size in enumerate(sizes):
        end = min(begin + size, rows)
        row = begin - begin % align
        while begin < end and row < end:
            steps.append((group, row, max(row, begin), min(row + block, end)))
            row += block
        begin = end
    return steps, begin


@pytest.mark.parametrize("block, align", [(16, 1), (16, 8), (64, 8), (8, 8)])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_steps_are_those_of_a_walk(sizes, block, align):
    result = jax.jit(visits.visits, static_argnums=(1, 2, 3))(jnp.array(sizes), 64, block, align)
    want, end = walk(sizes, 64, block, align)
    assert (int(result.count), int(result.end)) == (len(want), end)
    np.testing.assert_array_equal(result.table[: len(want)], np.array(want).reshape(-1, 4))
    padding = result.table[len(want) :]
    assert (padding[:, 2] == padding[:, 3]).all()


def test_the_capacity_suffices_and_is_reached(seed):
    """Of random sizes none needs more; a last row in every block's next group needs all."""
    for i in range(200):
        random = np.random.default_rng([seed, i])
        rows, G, block = random.integers(1, 300), random.integers(1, 40), 8 * random.integers(1, 9)
        sizes = split(i, rows, G, empty=random.random())
        for align in (1, 8):
            assert len(walk(sizes, rows, block, align)[0]) <= visits.capacity(rows, G, block, align)
    # Groups of 2 rows that begin at the last row of 8: both rows are in steps of their own.
    assert len(walk([7, 2], 9, 8, 8)[0]) == visits.capacity(9, 2, 8, 8) == 3
