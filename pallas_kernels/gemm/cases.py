"""Named shapes of matrix products with epilogues for tests, reports and benchmarks.

FLOPs of the products only; bytes count every operand and result once.

Legend: M rows (tokens), K contracted, N columns.
"""

import dataclasses

from pallas_kernels.cases import PAPER_ALPHA, PAPER_BATCH, Workload
from pallas_kernels.hopper.activations import Activation

BUCKET = 128  # (chosen: capacities of packed tokens are multiples of it)


@dataclasses.dataclass(frozen=True)
class Case(Workload):
    """One product with its epilogue; 16-bit operands and results, a float32 bias.

    trained: whether its gradients are worth tuning.
    """

    name: str
    M: int
    N: int
    K: int
    activation: Activation | None = None
    bias: bool = False
    residual: bool = False
    trained: bool = True

    def flops(self, backward: bool = False) -> float:
        """Returns the FLOPs of the forward product, or of the two backward ones."""
        return 2 * self.M * self.N * self.K * (2 if backward else 1)

    def bytes(self, backward: bool = False) -> float:
        """Forward: x, w, y, residual and bias; backward: x, w, dy, z, dx, dw, dbias."""
        x, w, y = self.M * self.K, self.K * self.N, self.M * self.N
        wide = 2 * (x + w) + y * (1 + (self.activation is not None))
        return 2 * (wide if backward else x + w + y * (1 + self.residual)) + 4 * self.N * self.bias


def bert(longest: int) -> tuple[Case, ...]:
    """The four products of a BERT-base layer at ByteTransformer's packed tokens."""
    tokens = -(-int(PAPER_BATCH * PAPER_ALPHA * longest) // BUCKET) * BUCKET
    return (
        Case(f"bert {longest} qkv", tokens, 2304, 768, bias=True),
        Case(f"bert {longest} out", tokens, 768, 768, bias=True, residual=True),
        Case(f"bert {longest} up", tokens, 3072, 768, "gelu", bias=True),
        Case(f"bert {longest} down", tokens, 768, 3072, bias=True, residual=True),
    )


CASES = (
    *bert(1024),
    *bert(256),
    Case("llama 8k qkv", 8192, 6144, 4096),
    Case("llama 8k out", 8192, 4096, 4096, residual=True),
    Case("llama 8k gate", 8192, 14336, 4096, "silu"),
    Case("llama 8k down", 8192, 4096, 14336, residual=True),
    Case("square 8192", 8192, 8192, 8192),
    # Decoding: the weight's bytes are all of the time, and there are fewer tiles than SMs.
    Case("llama decode 16 qkv", 16, 6144, 4096, trained=False),
    Case("llama decode 16 down", 16, 4096, 14336, residual=True, trained=False),
    Case("llama decode 128 out", 128, 4096, 4096, residual=True, trained=False),
)
