"""Named shapes of SDP4Bit's fused kernels for tests, reports and benchmarks, and their floors.

Sizes are of 2^26 parameters on 4 nodes of 8 GPUs, and of a shard of them where that is too small to
fill a GPU's memory system. Bytes count every array once: numbers, and payloads with their scales.
"""

import dataclasses
from typing import ClassVar

from pallas_kernels.cases import LANE_FLOPS, Workload
from pallas_kernels.quantize.reference import flops, payload_bytes


@dataclasses.dataclass(frozen=True)
class Case(Workload):
    """One call. op: a name of api.py. elements: those of x, of the sum, of main or of the copy.

    payloads: rows that are read or written. places: parts of a row (nodes). pieces: rows that the
    sum is cut into. wide: float32 in (or the copy), else bfloat16. random: rounds so.
    hadamard: whether the operation does its transform, if it has one.
    """

    name: str
    op: str
    elements: int
    payloads: int = 1
    places: int = 1
    pieces: int = 1
    group: int = 128
    bits: int = 4
    wide: bool = True
    random: bool = False
    hadamard: bool = True

    PEAK_FLOPS: ClassVar[float] = LANE_FLOPS

    def bytes(self, backward: bool = False) -> float:
        """Returns the bytes that are read and written, each once. backward: 0."""
        if backward:
            return 0.0
        n, size = self.elements, 4 if self.wide else 2

        def rows(count: int, each: int, bits: int) -> int:
            return count * payload_bytes(each, bits, self.group)

        return float(
            {
                "hadamard_quantize": n * size + rows(self.payloads, n // self.payloads, self.bits),
                "reduce_requantize": rows(self.payloads, n, self.bits)
                + rows(self.pieces, n // self.pieces, 4),
                "reduce_hadamard": rows(self.payloads, n, self.bits) + 4 * n,
                "subtract_quantize": n * (4 + size) + rows(1, n, self.bits),
                "dequantize_add": rows(self.payloads, n // self.payloads, self.bits) + 2 * n * size,
            }[self.op]
        )

    def flops(self, backward: bool = False) -> float:
        """Operations on float32 and on words, which share the lanes of an SM. backward: 0."""
        if backward:
            return 0.0
        return self.elements * flops(self.op, self.payloads, self.random)


ALL = 2**26
CASES = (
    Case("send 64M float32", "hadamard_quantize", ALL, 8, 4, bits=8),
    Case("send 64M float32 random", "hadamard_quantize", ALL, 8, 4, bits=8, random=True),
    Case("send 64M bf16 random", "hadamard_quantize", ALL, 8, 4, bits=8, wide=False, random=True),
    Case("relay 8 x 8M", "reduce_requantize", ALL // 8, 8, pieces=4, bits=8),
    Case("relay 8 x 8M random", "reduce_requantize", ALL // 8, 8, pieces=4, bits=8, random=True),
    Case("receive 4 x 16M", "reduce_hadamard", ALL // 4, 4),
    Case("weights out 32M float32", "subtract_quantize", ALL // 2, group=2048),
    Case(
        "weights out 32M bf16 random",
        "subtract_quantize",
        ALL // 2,
        group=2048,
        wide=False,
        random=True,
    ),
    Case("weights in 64M float32", "dequantize_add", ALL, 32, group=2048),
    Case("weights in 64M bf16", "dequantize_add", ALL, 32, group=2048, wide=False),
)
