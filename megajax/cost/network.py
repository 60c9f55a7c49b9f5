"""Alpha-beta model of collectives: a latency (alpha) for each message, then bytes over bandwidth.

Let n be the number of devices, and N the bytes on one device of the operand or the result,
whichever is larger (the result of an all-gather, the operand of a reduce-scatter). A ring sends
(n - 1) / n N bytes over the link of every device, which is the least possible (Chan et al. 2007,
table 1). An all-reduce is a reduce-scatter followed by an all-gather. The number of messages is
n - 1 inside a host (NCCL's ring) and log2 n between hosts (NCCL's trees and PAT; in a ring of 1,536
hosts the latencies alone would add up to 20 ms). A group with m members on each of k hosts works in
two levels: each member exchanges an m-th of the bytes between hosts, over all m NICs at once, then
the members of a host exchange theirs.
"""

import collections
import dataclasses
import math
from collections.abc import Sequence

from megajax.core.hardware import Cluster, DeviceCard, Link

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
    names; 'ragged-all-to-all' like all-to-all). nbytes: of the larger side on one device.
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
