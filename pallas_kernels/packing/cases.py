"""Named shapes of packing: ByteTransformer's draws (its benchmark), and their floors.

Bytes: a packed row is read and written once; what pads is written (unpack) but never read.
"""

import dataclasses

from pallas_kernels.cases import Workload, paper_lengths
from pallas_kernels.packing.api import bucket


@dataclasses.dataclass(frozen=True)
class Case(Workload):
    """Sequences of these lengths in padded rows of 16-bit vectors; `backward` swaps the two."""

    name: str
    lengths: tuple[int, ...]
    longest: int
    width: int
    unpacks: bool = False

    @property
    def capacity(self) -> int:
        """T, as `bucket` picks it."""
        return bucket(sum(self.lengths), most=len(self.lengths) * self.longest)

    def flops(self, backward: bool = False) -> float:
        """Returns 0, as data only moves."""
        return 0.0

    def bytes(self, backward: bool = False) -> float:
        """Returns the bytes of the tokens, which are read, and of the result, which is written."""
        padded = self.unpacks != backward
        written = len(self.lengths) * self.longest if padded else self.capacity
        return 2.0 * self.width * (sum(self.lengths) + written)


CASES = tuple(
    Case(f"{'unpack' if unpacks else 'pack'} {n}", paper_lengths(n), n, 768, unpacks)
    for unpacks in (False, True)
    for n in (64, 256, 512, 1024)
)
