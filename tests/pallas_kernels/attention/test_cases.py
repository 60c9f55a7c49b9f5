"""Floors of the named shapes, by hand."""

import pytest

from pallas_kernels.attention.cases import CASES, Case
from pallas_kernels.cases import paper_lengths


def test_floors():
    case = Case("x", (2, 3), (4, 2), 8)
    assert case.flops() == 4 * (4 + 9) * 4 * 8 and case.flops(backward=True) == 2.5 * case.flops()
    assert case.bytes() == 5 * 8 * 2 * (4 + 4 + 2 + 2) + 5 * 4 * 4
    assert Case("x", (2, 3), (4, 2), 8, causal=True).pairs == 3 + 6
    large = next(c for c in CASES if c.name == "d128 16k full")
    assert large.floor_s() == pytest.approx(4 * 16384**2 * 2048 / 989.5e12)


def test_the_papers_draws():
    lengths = paper_lengths(1024, batch=4000)
    assert min(lengths) >= 204 and max(lengths) <= 1024
    assert sum(lengths) / 4000 == pytest.approx(0.6 * 1024, rel=0.02)
    assert len({case.name for case in CASES}) == len(CASES)
