"""The visited area over the useful pairs, against a count of tiles in NumPy."""

import numpy as np
import pytest

from experiments.reports import bytetransformer
from pallas_kernels.cases import paper_lengths


def counted(lengths, block_q, block_k, own_q, own_k):
    """Pairs in blocks that hold a live one, over the live: blocks alone, and those that share."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    ids = np.pad(ids, (0, -len(ids) % 256), constant_values=-1)
    seen = (ids[:, None] == ids) & (ids >= 0)[:, None]
    tiles = seen.reshape(len(ids) // block_q, block_q, -1, block_k).any((1, 3))
    shared = tiles.reshape(tiles.shape[0] // own_q, own_q, -1, own_k).any((1, 3)) * own_q * own_k
    return tuple(n.sum() * block_q * block_k / seen.sum() for n in (tiles, shared))


@pytest.mark.parametrize(
    ("longest", "block", "bound"),
    [
        (64, 32, 4.5),
        pytest.param(256, 64, 2.1, marks=pytest.mark.slow),
        pytest.param(1024, 128, 1.4, marks=pytest.mark.slow),
    ],
)
def test_area_on_the_papers_draws(longest, block, bound):
    """block: of keys in the forward kernel; the backward kernels' are at most 64."""
    lengths = paper_lengths(longest)
    got = bytetransformer.of_lengths(lengths, 64)
    small = min(block, 64)
    want = {
        "forward": counted(lengths, 64, block, 2, 1),
        "dq": counted(lengths, 64, small, 2, 1),
        "dkv": counted(lengths, small, 64, 1, 2),
    }
    for name, each in want.items():
        np.testing.assert_allclose((got[name].computed, got[name].passed), each, err_msg=name)
        assert 1 <= got[name].computed <= got[name].passed <= bound


def test_heads_of_a_group_in_a_tile_visit_less():
    lengths = paper_lengths(64)
    alone, grouped = (bytetransformer.of_lengths(lengths, 64, group)["forward"] for group in (1, 4))
    assert (grouped.computed, grouped.passed) == pytest.approx(counted(lengths, 16, 32, 2, 1))
    assert grouped.computed < 0.7 * alone.computed
