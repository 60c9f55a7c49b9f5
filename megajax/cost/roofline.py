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
from megajax.cost.base import Op
from megajax.cost.kernels import Attention, Collective, Matmul
from megajax.cost.network import Group, collective_time

# Rows and columns of the tiles among which a product of `in_waves` takes the fastest.
TILES = ((128, 256), (256, 128), (128, 192), (128, 128))


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Efficiencies over the card's peaks, 0..1.

    matmul 0.7: (assumed; large bf16 GEMMs on H100). attention 0.5: (assumed; FlashAttention-3 on
    H100 reaches 0.75 forward and less backward, arXiv 2407.08608 section 4.1). memory 0.85:
    (assumed). sigma: standard deviation over the time, (assumed). link: share of a link's bandwidth
    that `transfer_time` assumes. cores: number of SMs of the device. If it is given, a product
    takes a whole number of waves of tiles, one tile on each SM, and its loads from memory are
    hidden by its arithmetic. None: a product of any size reaches the efficiency `matmul`.
    """

    matmul: float = 0.7
    attention: float = 0.5
    memory_bandwidth: float = 0.85
    sigma: float = 0.15
    link: float = 1.0
    cores: int | None = None

    def op_time(self, op: Op, device: DeviceCard, dtype: str | None = None) -> tuple[float, float]:
        """Returns (seconds of one execution, their standard deviation).

        dtype: a data type that replaces those of all operands and of the result; None: the
        operation keeps its own.
        """
        op = op if dtype is None else op.cast(dtype)
        kernel = op.kernel
        if isinstance(kernel, Collective):
            group = Group(kernel.inside, kernel.hosts)
            seconds = collective_time(kernel.kind, kernel.nbytes, group, device)
        elif self.cores is not None and isinstance(kernel, Matmul):
            seconds = self._waves(kernel, self.cores, device.peak(op.dtype))
        else:
            share = self.attention if isinstance(kernel, Attention) else self.matmul
            arithmetic = op.flops / (share * device.peak(op.dtype)) if op.flops else 0.0
            moving = op.nbytes / (self.memory_bandwidth * device.memory_bytes_per_s)
            seconds = max(arithmetic, moving)
        return seconds, self.sigma * seconds

    def transfer_time(self, nbytes: float, link: Link) -> float:
        """Returns seconds from one device to another."""
        return link.latency_s + nbytes / (self.link * link.bytes_per_s)

    def memory(self, trees: Mapping[str, Iterable[Any]]) -> dict[str, int]:
        """Returns bytes a device by name; leaves have shape, dtype and sharding."""
        return {name: sum(map(leaf_bytes, leaves)) for name, leaves in trees.items()}

    def _waves(self, kernel: Matmul, cores: int, peak: float) -> float:
        """Returns seconds of a product with the fastest of TILES, in whole waves of tiles."""
        waves = (
            (
                math.ceil(kernel.batch * math.ceil(kernel.m / a) * math.ceil(kernel.n / b) / cores),
                2 * a * b * kernel.k,
            )
            for a, b in TILES
        )
        return min(count * flops for count, flops in waves) / (peak * self.matmul / cores)


def in_waves(cores: int) -> Roofline:
    """Returns a model for small products, whose number of tiles is rounded up to whole waves.

    0.667 of the peak and 0.889 of the link: (chosen: 660 TFLOP/s and 400 GB/s of an H100; to be
    replaced by measurements). 1.0 of the memory: (chosen).
    """
    return Roofline(matmul=0.667, memory_bandwidth=1.0, link=0.889, cores=cores)


def leaf_bytes(leaf: Any) -> int:
    """Returns the bytes that the fullest device holds of an abstract array."""
    sharding = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * leaf.dtype.itemsize
