"""Named shapes of packed attention: what tests, reports and benchmarks share, and their floors.

FLOPs count useful pairs only: 4 K a pair and query head forward, 2.5 times that backward
(FlashAttention-3 section 4.1). Bytes count every operand once.
"""

import dataclasses

import numpy as np

# H200 (datasheet, dense): bf16 FLOP/s and HBM bytes a second.
PEAK_FLOPS, PEAK_BYTES = 989.5e12, 4.8e12
PAPER_BATCH, PAPER_ALPHA = 16, 0.6  # ByteTransformer section 4: sequences, average over longest


@dataclasses.dataclass(frozen=True)
class Case:
    """One workload: segment lengths (of queries and keys alike), heads (H, G), head width."""

    name: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    width: int
    causal: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Useful pairs of a query and a key, of one head."""
        return sum(n * (n + 1) // 2 if self.causal else n * n for n in self.lengths)

    def flops(self, backward: bool = False) -> float:
        """Returns the FLOPs of the forward or of the backward pass."""
        return 4 * self.pairs * self.heads[0] * self.width * (2.5 if backward else 1)

    def bytes(self, backward: bool = False) -> float:
        """16-bit operands and results: q, o (and dq, do), k, v (and dk, dv); float32 lse."""
        H, G = self.heads
        wide = self.tokens * self.width * 2
        return wide * (2 * H + 2 * G) * (2 if backward else 1) + 4 * self.tokens * H

    def floor_s(self, backward: bool = False, bytes_per_s: float = PEAK_BYTES) -> float:
        """No kernel is faster on a Hopper GPU with such memory; H200's by default."""
        return max(self.flops(backward) / PEAK_FLOPS, self.bytes(backward) / bytes_per_s)


def paper_lengths(
    longest: int, batch: int = PAPER_BATCH, seed: int = 0, alpha: float = PAPER_ALPHA
) -> tuple[int, ...]:
    """ByteTransformer's draw (its benchmark): uniform in [2 average - longest, longest].

    alpha: average over longest; below a half, uniform in [0, 2 average].
    """
    average = int(alpha * longest)
    least, most = max(2 * average - longest, 0), min(2 * average, longest)
    drawn = np.random.default_rng(seed).integers(least, most + 1, batch)
    return tuple(int(n) for n in drawn)


def dense(width: int, length: int, causal: bool) -> Case:
    """16k tokens of equal segments, 2048 columns of heads: the shapes that papers report."""
    name = f"d{width} {length // 1024}k {'causal' if causal else 'full'}"
    return Case(name, (length,) * (16384 // length), (2048 // width,) * 2, width, causal)


CASES = (
    dense(128, 16384, False),
    dense(128, 16384, True),
    dense(128, 2048, True),
    dense(64, 16384, False),
    dense(64, 16384, True),
    dense(256, 16384, False),
    dense(256, 16384, True),
    Case("gqa 32/8 d128 4k causal", (4096,) * 8, (32, 8), 128, True),
    Case("varlen d128 1k", paper_lengths(1024), (16, 16), 128),
    Case("varlen d128 4k", paper_lengths(4096), (16, 16), 128),
    *(Case(f"bert {n}", paper_lengths(n), (12, 12), 64) for n in (64, 256, 512, 1024)),
)
