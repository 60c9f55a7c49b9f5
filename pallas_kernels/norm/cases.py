"""Named shapes of the fused norm for tests, reports and benchmarks, and their floors.

Bytes count every row once: forward x, the residual, y and h; backward h, dy, dx, and dh where h is
used again, as in a network that normalises before its layers. Rows on their way back to padding
are counted as long as they are written. Scale, offset and bias are a few kilobytes and left out.
"""

import dataclasses
from typing import ClassVar

from pallas_kernels.cases import LANE_FLOPS, Workload, paper_lengths
from pallas_kernels.norm import reference


@dataclasses.dataclass(frozen=True)
class Case(Workload):
    """One workload of 16-bit rows. centred: LayerNorm with an offset, else RMSNorm.

    added: a residual is added, and the backward pass has a gradient of h. bias: a bias is added.
    padded_rows: rows into which y is unpacked (then h is kept for the backward pass and has no
    gradient of its own); 0: y is not unpacked.
    """

    name: str
    rows: int
    width: int
    centred: bool = True
    added: bool = True
    bias: bool = False
    padded_rows: int = 0

    PEAK_FLOPS: ClassVar[float] = LANE_FLOPS

    def flops(self, backward: bool = False) -> float:
        """Counted from the formulas in reference.py: one for each element and operation."""
        each = reference.flops(self.centred, backward, self.added, self.bias)
        return self.rows * self.width * each

    def bytes(self, backward: bool = False) -> float:
        """Returns the bytes of all arrays of rows, each once."""
        if backward:
            rows = self.rows * (3 + (self.added and not self.padded_rows))
        else:
            writes_h = self.added or self.bias or bool(self.padded_rows)
            rows = self.rows * (1 + self.added + writes_h) + (self.padded_rows or self.rows)
        return 2.0 * rows * self.width


PAPER_TOKENS = -(-sum(paper_lengths(1024)) // 128) * 128
CASES = (
    Case("layer 32k x 1024", 32768, 1024),
    Case("layer 16k x 4096", 16384, 4096),
    Case("layer 8k x 12288", 8192, 12288),
    Case("rms 32k x 2048", 32768, 2048, centred=False),
    Case("rms 16k x 4096", 16384, 4096, centred=False),
    Case("rms 8k x 8192", 8192, 8192, centred=False),
    Case("bert 1024", PAPER_TOKENS, 768, bias=True),
    Case("bert 1024 unpacked", PAPER_TOKENS, 768, bias=True, padded_rows=16 * 1024),
)
