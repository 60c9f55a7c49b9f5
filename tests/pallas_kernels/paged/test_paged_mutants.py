"""Each wait of the paged kernels, deleted, is missed by the interpreter."""

import dataclasses
import functools

import pytest

from pallas_kernels.paged import combine, hopper
from pallas_kernels.paged.tile import Tile
from tests.kernel_mutants import check, parameters, sites
from tests.paged_oracle import Case
from tests.pallas_kernels.paged.test_paged_hopper import INT8, run

# More steps than buffers, items that are whole and that are cut, several parts of a thread block.
ONE = Case((300, 128, 70), (1, 1, 1), heads=(4, 2), width=64)
# Two warpgroups, of which one lets go where a sequence decodes; values of nobody at both ends.
TWO = Case((140, 90), (1, 40), heads=(4, 1), width=64, page=32, window=(50, 0))
LONG = dataclasses.replace(TWO, contexts=(300, 290), window=None)
CALLS = {
    "one": functools.partial(run, ONE, 0, Tile(1, 64, 2)),
    "two": functools.partial(run, TWO, 0, Tile(32, 64, 2)),
    "two, long": functools.partial(run, LONG, 0, Tile(32, 64, 2)),
    "one, 8 bits": functools.partial(run, ONE, 0, Tile(1, 64, 2), INT8),
    "two, 8 bits": functools.partial(run, TWO, 0, Tile(32, 64, 2), INT8),
    "two, long, 8 bits": functools.partial(run, LONG, 0, Tile(32, 64, 2), INT8),
}
RUNS = {
    (hopper, "multiply_into"): [CALLS["one"]],
    (hopper, "_Warpgroup"): [*CALLS.values()],
    (hopper, "_body"): [CALLS["one"], CALLS["two"]],
}
UNSEEN: dict[str, tuple[tuple[int, ...], str]] = {
    "_Warpgroup.publish.commit_smem()": (
        (0, 3),
        "the interpreter's weights are staged, and committed again, before values are multiplied; "
        "test_paged_products.py misses it",
    ),
}


@pytest.mark.parametrize("site", parameters([hopper]))
def test_a_deleted_wait_is_missed(site):
    check(site, RUNS, UNSEEN)


def test_adding_up_waits_for_nothing():
    """Registers to registers: a kernel before it has stored what it loads."""
    assert not sites(combine)
