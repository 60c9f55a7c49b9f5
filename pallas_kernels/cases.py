"""The rates of an H200, floors and lengths of segments, for the cases of all kernel folders.

The `cases.py` of a kernel folder lists the folder's cases (`CASES`). That list serves everyone: the
folder's tests, its `bench.py`, which times and tunes the cases, and the reports, which print them
beside their floors.

Source of the rates: datasheet of H200, dense.
"""

from typing import ClassVar

import numpy as np

TENSOR_FLOPS, LANE_FLOPS = 989.5e12, 67e12  # a second: bf16 products; float32 outside of them
HBM_BYTES = 4.8e12  # a second
PAPER_BATCH, PAPER_ALPHA = 16, 0.6  # ByteTransformer section 4: sequences, average over longest


class Workload:
    """A case's FLOPs and bytes, and the time below which no Hopper GPU can compute it."""

    PEAK_FLOPS: ClassVar[float] = TENSOR_FLOPS  # a second, of the units that compute it

    def flops(self, backward: bool = False) -> float:
        """Returns the FLOPs of the forward or of the backward pass."""
        raise NotImplementedError

    def bytes(self, backward: bool = False) -> float:
        """Returns the bytes that are read and written, each once."""
        raise NotImplementedError

    def floor_s(self, backward: bool = False, bytes_per_s: float = HBM_BYTES) -> float:
        """Returns the seconds that no kernel can beat; bytes_per_s: the memory's rate."""
        return max(self.flops(backward) / self.PEAK_FLOPS, self.bytes(backward) / bytes_per_s)


def paper_lengths(
    longest: int, batch: int = PAPER_BATCH, seed: int = 0, alpha: float = PAPER_ALPHA
) -> tuple[int, ...]:
    """Returns ByteTransformer's draw (its benchmark): uniform in [2 average - longest, longest].

    alpha: average over longest; below a half, uniform in [0, 2 average].
    """
    average = int(alpha * longest)
    least, most = max(2 * average - longest, 0), min(2 * average, longest)
    drawn = np.random.default_rng(seed).integers(least, most + 1, batch)
    return tuple(int(n) for n in drawn)
