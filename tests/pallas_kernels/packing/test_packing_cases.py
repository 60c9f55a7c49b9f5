"""Floors of the named shapes, by hand."""

from pallas_kernels.packing.cases import CASES, Case


def test_floors():
    pack = Case("x", (3, 5), 100, 4)
    assert pack.capacity == 128
    assert pack.bytes() == 2 * 4 * (8 + 128) and pack.bytes(backward=True) == 2 * 4 * (8 + 200)
    unpack = Case("x", (3, 5), 100, 4, unpacks=True)
    assert unpack.bytes() == pack.bytes(backward=True)
    assert unpack.bytes(backward=True) == pack.bytes()
    assert unpack.floor_s() == unpack.bytes() / 4.8e12 and not unpack.flops()
    assert len({case.name for case in CASES}) == len(CASES)
