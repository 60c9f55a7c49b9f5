"""Named shapes of experts' products for tests, reports and benchmarks.

Sizes of papers/models as their configurations say them; each token's rows are drawn for experts at
random, so that no group is a multiple of a tile. FLOPs count the rows in groups; bytes every
operand and result once, weights of groups without rows too.

Legend: M rows (tokens times experts a token), G groups (experts), K contracted, N columns.
"""

import dataclasses

import numpy as np

from pallas_kernels.cases import Workload

TOKENS = 8192  # of a device's batch (chosen: two sequences of 4096)


@dataclasses.dataclass(frozen=True)
class Case(Workload):
    """One grouped product of 16-bit operands. hot: the share of all rows that one group has."""

    name: str
    M: int
    G: int
    K: int
    N: int
    hot: float = 0.0

    @property
    def sizes(self) -> np.ndarray:
        """int32 (G,), adding up to M; the same each time."""
        share = np.full(self.G, (1 - self.hot) / self.G)
        share[self.G // 2] += self.hot
        return np.random.default_rng(0).multinomial(self.M, share).astype(np.int32)

    def flops(self, backward: bool = False) -> float:
        """Returns the FLOPs of the forward product, or of the two backward ones."""
        return 2 * self.M * self.K * self.N * (2 if backward else 1)

    def bytes(self, backward: bool = False) -> float:
        """Forward: lhs, rhs, y; backward: lhs, rhs, dy, dlhs, drhs."""
        lhs, rhs, y = self.M * self.K, self.G * self.K * self.N, self.M * self.N
        return 2 * ((2 * lhs + 2 * rhs + y) if backward else lhs + rhs + y)


def experts(model: str, G: int, top_k: int, width: int, hidden: int) -> tuple[Case, ...]:
    """One of an expert's products into its hidden width, and the one back."""
    M = TOKENS * top_k
    return Case(f"{model} up", M, G, width, hidden), Case(f"{model} down", M, G, hidden, width)


CASES = (
    *experts("mixtral e8", 8, 2, 4096, 14336),
    *experts("phi3.5 e16", 16, 2, 4096, 6400),
    *experts("qwen2 e64", 64, 4, 2048, 1408),
    *experts("deepseek v3 e256", 256, 8, 7168, 2048),
    Case("mixtral e8 hot up", 2 * TOKENS, 8, 4096, 14336, hot=0.5),
    Case("mixtral e8 decode up", 256, 8, 4096, 14336),
)
