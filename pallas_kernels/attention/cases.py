"""Named shapes of packed attention for tests, reports and benchmarks, and their floors.

FLOPs count useful pairs only: 4 K a pair and query head forward, 2.5 times that backward
(FlashAttention-3 section 4.1). Bytes count every operand once.
"""

import dataclasses

from pallas_kernels.cases import Workload, paper_lengths


@dataclasses.dataclass(frozen=True)
class Case(Workload):
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
