"""No product of the paged kernel is used before it is over, or reads what is not committed."""

import functools

import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest

from pallas_kernels.attention.reference import Spec
from pallas_kernels.paged import hopper, passes
from pallas_kernels.paged.plan import cut, plan
from pallas_kernels.paged.tile import Tile, shape_of
from tests import kernel_products
from tests.paged_oracle import Case
from tests.pallas_kernels.paged.test_paged_hopper import INT8, problem

# More steps than buffers; items that are whole and that are cut; one warpgroup that lets go.
ONE = Case((300, 130), (1, 1), heads=(2, 1), width=64)
TWO = Case((140, 190), (1, 40), heads=(4, 1), width=64, page=32, window=(100, 0))
KERNELS = {
    "one": (ONE, Tile(1, 64, 2), None),
    "two": (TWO, Tile(32, 64, 2), None),
    "one, 8 bits": (ONE, Tile(1, 64, 2), INT8),
    "two, 8 bits": (TWO, Tile(32, 64, 2), INT8),
}


def check(name):
    case, tile, small = KERNELS[name]
    (q, pages, _), _ = problem(case, 0, small=small)
    shape = shape_of(q, pages, case.window)

    def run(q, pages):
        tiles = cut(
            q.shape[0], pages.start_B, pages.count_B, pages.context_B, tile.tokens, case.window
        )
        work = plan(tiles, shape.heads, tile.keys, 2, 1)
        rows = passes._tiled(q, tiles, shape.heads, shape.rows(tile))
        sums = functools.partial(hopper.sums, shape=shape, tile=tile, spec=Spec(0.125))
        return sums(rows, pages, None, work)

    return kernel_products.check(run, q, pages)


@pytest.mark.parametrize("name", KERNELS)
def test_every_product_is_waited_for(name):
    assert all(count > 0 for count in check(name).values())


@pytest.mark.parametrize("name", KERNELS)
def test_a_commit_that_is_missing_is_seen(name, monkeypatch):
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    with pytest.raises(kernel_products.Early, match="not committed"):
        check(name)
