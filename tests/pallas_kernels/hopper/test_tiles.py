"""What fits in a thread block, by hand."""

import pytest

from pallas_kernels.hopper import tiles


def test_shared_memory_is_counted_in_aligned_buffers():
    buffers = {"k": ((2, 128, 128), "bfloat16"), "lse": ((2, 64), "float32")}
    assert tiles.shared_bytes(buffers) == 65536 + 1024
    tiles.check_shared("op", buffers)
    tiles.check_shared("op", {"most": ((226, 1024), "int8")})
    with pytest.raises(ValueError, match=r"231424.*k bfloat16\[8, 128, 128\]"):
        tiles.check_shared("op", buffers | {"k": ((8, 128, 128), "bfloat16")})


def test_registers_of_accumulators():
    assert tiles.accumulator_registers((64, 256), (64, 64)) == 128 + 32
    tiles.check_registers("op", 2, (64, 256), (64, 64))
    with pytest.raises(ValueError, match="256 registers of a thread"):
        tiles.check_registers("op", 2, (64, 256), (64, 256))


@pytest.mark.parametrize(
    ("value", "near"),
    [(100, "64, 128"), (0, "64, 128"), (-5, "64, 128"), (300, "256"), (1, "64, 128")],
)
def test_a_wrong_size_names_the_nearest_legal_ones(value, near):
    tiles.check_multiple("op", "block_n", 256, 64, 256)
    with pytest.raises(ValueError, match=f"block_n={value} must be .* nearest: {near}$"):
        tiles.check_multiple("op", "block_n", value, 64, 256)
