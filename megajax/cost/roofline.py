"""Roofline: an operation takes what its arithmetic or its memory traffic takes, whichever is more.

Williams et al. 2009, with one efficiency for each kind of operation, because no kernel reaches the
vendor's peak. The efficiencies are ASSUMED until a table measured on a GPU replaces them, and every
figure made from them is an estimate.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megajax.core.hardware import Cluster, DeviceCard, Link
from megajax.cost.base import Op
from megajax.cost.kernels import Attention, Collective, Matmul

# ---- network
#
# Alpha-beta model of collectives: a latency (alpha) for each message, then bytes over bandwidth.
#
# Let n be the number of devices, and N the bytes on one device of the operand or the result,
# whichever is larger (the result of an all-gather, the operand of a reduce-scatter). A ring sends
# (n - 1) / n N bytes over the link of every device, which is the least possible (Chan et al. 2007,
# table 1). An all-reduce is a reduce-scatter followed by an all-gather. The number of messages is n
# - 1 inside a host (NCCL's ring) and log2 n between hosts (NCCL's trees and PAT; in a ring of 1,536
# hosts the latencies alone would add up to 20 ms). A group with m members on each of k hosts works
# in two levels: each member exchanges an m-th of the bytes between hosts, over all m NICs at once,
# then the members of a host exchange theirs.


CALL_S = 8.4e-6  # (NCCL src/graph/tuning.cc: base latency, ring, simple protocol)


Machine = Cluster | DeviceCard  # both know the link inside a host and the one between hosts


@dataclasses.dataclass(frozen=True)
class Group:
    """Devices that talk to each other: `inside` of them on each of `hosts` hosts."""

    inside: int
    hosts: int

    @property
    def size(self) -> int:
        """All members."""
        return self.inside * self.hosts


def group_of(members: Sequence[int], gpus_per_host: int) -> Group:
    """Returns the shape of a group of device numbers; hosts with few members count as full."""
    hosts = collections.Counter(m // gpus_per_host for m in members)
    return Group(max(hosts.values()), len(hosts))


def _scatter(nbytes: float, n: int, link: Link, messages: int) -> float:
    return messages * link.latency_s + (n - 1) / n * nbytes / link.bytes_per_s if n > 1 else 0.0


def _spread(nbytes: float, group: Group, machine: Machine) -> float:
    """An all-gather or a reduce-scatter, which mirror each other."""
    between = nbytes / group.inside
    inside = _scatter(nbytes, group.inside, machine.inside, group.inside - 1)
    return inside + _scatter(
        between, group.hosts, machine.between, math.ceil(math.log2(max(group.hosts, 1)))
    )


def collective_time(kind: str, nbytes: float, group: Group, machine: Machine) -> float:
    """Returns seconds of one execution.

    kind: 'all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all' or 'collective-permute' (XLA's
    names; 'ragged-all-to-all' like all-to-all). nbytes: bytes on one device of the operand or the
    result, whichever is larger.
    """
    if group.size == 1:
        return 0.0
    if kind == "collective-permute":
        link = machine.between if group.hosts > 1 else machine.inside
        return CALL_S + link.latency_s + nbytes / link.bytes_per_s
    if kind == "all-reduce":
        return CALL_S + 2 * _spread(nbytes, group, machine)
    if kind in ("all-to-all", "ragged-all-to-all"):
        n = group.size
        near = nbytes * (group.inside - 1) / n / machine.inside.bytes_per_s
        far = nbytes * (n - group.inside) / n / machine.between.bytes_per_s
        # The two go over different links at the same time; messages are pipelined per peer class.
        latency = machine.between.latency_s if group.hosts > 1 else machine.inside.latency_s
        return CALL_S + latency + max(near, far)
    if kind in ("all-gather", "reduce-scatter"):
        return CALL_S + _spread(nbytes, group, machine)
    raise ValueError(f"unknown collective {kind!r}")


# ---- roofline


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
