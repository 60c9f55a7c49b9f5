"""Named shapes of products with quantized weights for tests, reports and benchmarks.

FLOPs are those of the product only. Bytes count x, packed codes, scales, zeros, bias and y once.

Legend: M rows (tokens), K contracted, N columns.
"""

import dataclasses

from pallas_kernels.cases import Workload
from pallas_kernels.hopper.activations import Activation
from pallas_kernels.quant_gemm.reference import Spec
from pallas_kernels.quantize.reference import code_bytes, groups_of


@dataclasses.dataclass(frozen=True)
class Case(Workload):
    """One product: bf16 activations and results, codes of `bits`, float32 scales of groups."""

    name: str
    M: int
    N: int
    K: int
    bits: int
    group: int = 128
    zeros: bool = False
    activation: Activation | None = None
    bias: bool = False

    @property
    def spec(self) -> Spec:
        """The static arguments of the product."""
        return Spec(self.bits, self.group, not self.zeros, self.activation)

    def flops(self, backward: bool = False) -> float:
        """FLOPs of the product. backward: 0, because plain JAX computes the gradients."""
        return 0.0 if backward else 2.0 * self.M * self.N * self.K

    def bytes(self, backward: bool = False) -> float:
        """Bytes that are read and written, each once. backward: 0."""
        if backward:
            return 0.0
        numbers = 4 * groups_of(self.K, self.group) * self.N * (1 + self.zeros)
        weight = code_bytes(self.K, self.bits) * self.N + numbers
        return weight + 2 * (self.M * self.K + self.M * self.N) + 4 * self.N * self.bias


# Llama 3 8B: width 4096, hidden width 14336, queries, keys and values 6144 together; Llama 3 70B:
# width 8192, hidden width 28672.
CASES = (
    Case("decode 1 70B gate int4", 1, 28672, 8192, 4),
    Case("decode 16 70B gate int4", 16, 28672, 8192, 4),
    Case("decode 16 70B down int4", 16, 8192, 28672, 4),
    Case("decode 1 gate int4", 1, 14336, 4096, 4),
    Case("decode 16 gate int4", 16, 14336, 4096, 4),
    Case("decode 64 gate int4", 64, 14336, 4096, 4),
    Case("decode 16 qkv int4", 16, 6144, 4096, 4),
    Case("decode 16 down int4", 16, 4096, 14336, 4),
    Case("decode 16 down int4 zeros", 16, 4096, 14336, 4, zeros=True),
    Case("decode 16 gate int8", 16, 14336, 4096, 8),
    Case("decode 16 gate 3 bits", 16, 14336, 4096, 3),
    Case("prefill 256 gate int4", 256, 14336, 4096, 4),
    Case("prefill 2048 gate int4 silu", 2048, 14336, 4096, 4, activation="silu"),
    Case("prefill 8192 down int4", 8192, 4096, 14336, 4),
    Case("prefill 8192 gate int8", 8192, 14336, 4096, 8),
)

# The blocks of Llama 3.2 1B: query, key and value together, output, gate and up together, down.
# They are tuned, so that its engine runs the kernel where that is faster. The engine's smallest
# step has 8 tokens; 512 are of a prompt.
SERVED = tuple(
    Case(f"1B served {M} {N} x {K}", M, N, K, 4)
    for M in (8, 64, 512)
    for N, K in ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))
)
