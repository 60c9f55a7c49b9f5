"""Roofline: an operation takes what its arithmetic or its memory traffic takes, whichever is more.

Williams et al. 2009, with one efficiency for each kind of operation, because no kernel reaches the
vendor's peak. The efficiencies are ASSUMED until a table measured on a GPU replaces them, and every
figure made from them is an estimate.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from megajax.core.hardware import DeviceCard, Link
from megajax.cost.base import ITEMSIZE, Op


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Efficiencies over the card's peaks, 0..1.

    matmul 0.7: (assumed; large bf16 GEMMs on H100). attention 0.5: (assumed; FlashAttention-3 on
    H100 reaches 0.75 forward and less backward, arXiv 2407.08608 section 4.1). memory 0.85:
    (assumed). sigma: standard deviation over the time, (assumed).
    """

    matmul: float = 0.7
    attention: float = 0.5
    memory_bandwidth: float = 0.85
    sigma: float = 0.15

    def op_time(self, op: Op, device: DeviceCard, dtype: str) -> tuple[float, float]:
        """Returns (seconds of one execution, their standard deviation)."""
        share = self.attention if op.part == "attention" else self.matmul
        arithmetic = op.flops / (share * device.flops[dtype])
        moved = op.elements * ITEMSIZE[dtype]
        seconds = max(arithmetic, moved / (self.memory_bandwidth * device.memory_bytes_per_s))
        return seconds, self.sigma * seconds

    def transfer_time(self, nbytes: float, link: Link) -> float:
        """Returns seconds from one device to another."""
        return link.latency_s + nbytes / link.bytes_per_s

    def memory(self, trees: Mapping[str, Iterable[Any]]) -> dict[str, int]:
        """Returns bytes a device by name; leaves have shape, dtype and sharding."""
        return {name: sum(map(leaf_bytes, leaves)) for name, leaves in trees.items()}


def leaf_bytes(leaf: Any) -> int:
    """Returns the bytes that the fullest device holds of an abstract array."""
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
