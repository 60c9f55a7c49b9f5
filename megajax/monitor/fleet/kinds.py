"""The fault types of Minder with their shares, and an assumed signature for each.

From the paper: the names, the shares (Table 1, 7 months; the evaluation set of 150 faults), that a
fault type moves a metric only in some of its cases (an OR), that PCIe downgrading shows in PFC
packets, that GPU execution errors and PCIe downgrading spread to a group within seconds, that an
optical cable (AOC) has no counters of its own, and that most abnormal patterns last for more than
5 minutes before the job halts.

ASSUMED is everything else: the probability with which a group of metrics moves, how far, in which
shape, how the job slows. The paper's own table of probabilities was not available to us. Sizes are
drawn log-uniformly, so that the weak end of each range lies near the noise between machines.
"""

from dataclasses import dataclass
from typing import NamedTuple

from megajax.monitor.fleet.disturbances import Target

GROUPS: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu_usage",),
    "gpu": (
        "gpu_duty_cycle", "gpu_power_draw", "gpu_graphics_engine_activity", "gpu_tensor_activity",
        "gpu_sm_activity", "gpu_fp_engine_activity", "gpu_memory_bandwidth_utilization",
    ),
    "clock": ("gpu_power_draw", "gpu_clocks"),
    "heat": ("gpu_temperature",),
    "pfc": ("pfc_tx_packet_rate", "ecn_packet_rate", "cnp_packet_rate"),
    "nvlink": ("nvlink_bandwidth",),
    "network": ("tcp_rdma_throughput", "pcie_bandwidth", "pcie_usage"),
    "tcp": ("tcp_throughput",),
    "disk": ("disk_usage",),
    "memory": ("memory_usage", "gpu_memory_used"),
}  # fmt: skip


class Effect(NamedTuple):
    """What a group of metrics does. low, high: range of the sizes (see disturbances.Move)."""

    group: str
    probability: float
    target: Target
    low: float
    high: float


@dataclass(frozen=True)
class Kind:
    """A fault type. table, evaluation: its share of Table 1 and of the evaluation set, in percent.

    hangs: probability that the whole job stops at once, with all GPUs waiting; slows: that it goes
    on at a speed drawn from `speed`. spreads: probability that peers show the same, weaker: by a
    share drawn from `spread`. creeps: probability of a gradual onset. sole: effects that always
    come, of which the first is what the fault type is known by.
    """

    table: float
    evaluation: float
    effects: tuple[Effect, ...]
    hangs: float = 0.0
    slows: float = 0.5
    speed: tuple[float, float] = (0.5, 0.95)
    spreads: float = 0.3
    spread: tuple[float, float] = (0.1, 0.5)
    creeps: float = 0.2
    vanishes: float = 0.0


KINDS: dict[str, Kind] = {
    # A correctable storm or a page retirement: the process crawls, or dies and leaves memory.
    "ecc_error": Kind(
        38.9,
        25.7,
        (
            Effect("cpu", 0.75, "idle", 0.25, 1.0),
            Effect("gpu", 0.66, "idle", 0.12, 1.0),
            Effect("pfc", 0.10, "high", 0.2, 0.7),
            Effect("nvlink", 0.4, "idle", 0.15, 1.0),
            Effect("memory", 0.5, "idle", 0.2, 0.9),
            Effect("tcp", 0.2, "idle", 0.2, 0.8),
        ),
        hangs=0.35,
        slows=0.4,
    ),
    "cuda_execution_error": Kind(
        14.6,
        15.0,
        (
            Effect("cpu", 0.65, "idle", 0.3, 1.0),
            Effect("gpu", 0.70, "idle", 0.15, 1.0),
            Effect("nvlink", 0.5, "idle", 0.2, 1.0),
            Effect("memory", 0.4, "idle", 0.2, 0.9),
        ),
        hangs=0.5,
        slows=0.3,
    ),
    # Several GPUs of the host at once, and the group around it within seconds.
    "gpu_execution_error": Kind(
        7.7,
        10.0,
        (
            Effect("gpu", 0.75, "idle", 0.12, 0.8),
            Effect("cpu", 0.45, "idle", 0.25, 0.9),
            Effect("nvlink", 0.35, "idle", 0.15, 0.8),
        ),
        hangs=0.4,
        slows=0.4,
        spreads=0.8,
        spread=(0.3, 0.8),
    ),
    # The link halves; the buffers of the card fill; it sends pauses; so do its neighbours.
    "pcie_downgrading": Kind(
        6.6,
        8.6,
        (
            Effect("pfc", 1.0, "high", 0.35, 0.9),
            Effect("network", 0.8, "idle", 0.1, 0.5),
            Effect("gpu", 0.15, "idle", 0.1, 0.4),
            Effect("nvlink", 0.2, "idle", 0.1, 0.4),
        ),
        slows=0.95,
        speed=(0.3, 0.9),
        spreads=0.85,
        spread=(0.3, 0.8),
        creeps=0.1,
    ),
    "machine_unreachable": Kind(
        6.0,
        7.6,
        (
            Effect("cpu", 0.5, "idle", 0.5, 1.0),
            Effect("gpu", 0.5, "zero", 0.3, 1.0),
            Effect("network", 0.7, "zero", 0.8, 1.0),
            Effect("tcp", 0.8, "zero", 0.8, 1.0),
            Effect("pfc", 0.3, "zero", 0.6, 1.0),
        ),
        hangs=0.9,
        slows=0.1,
        creeps=0.0,
        vanishes=0.6,
    ),
    "nic_dropout": Kind(
        5.7,
        7.2,
        (
            Effect("network", 1.0, "zero", 0.1, 1.0),
            Effect("cpu", 0.8, "idle", 0.3, 1.0),
            Effect("gpu", 0.7, "idle", 0.15, 1.0),
            Effect("pfc", 0.6, "zero", 0.5, 1.0),
        ),
        hangs=0.7,
        slows=0.3,
        creeps=0.05,
    ),
    # Retries against a storage system: threads burn CPU or sleep; the GPUs of the host starve.
    "hdfs_error": Kind(
        5.7,
        7.2,
        (
            Effect("cpu", 0.75, "high", 0.12, 0.7),
            Effect("tcp", 0.9, "zero", 0.4, 1.0),
            Effect("disk", 0.3, "high", 0.2, 0.8),
            Effect("gpu", 0.35, "idle", 0.12, 0.6),
        ),
        hangs=0.3,
        slows=0.4,
        creeps=0.3,
    ),
    # One GPU of eight is gone: the host's mean falls by an eighth, or its series end.
    "gpu_card_drop": Kind(
        2.0,
        2.5,
        (
            Effect("gpu", 0.9, "zero", 0.125, 0.5),
            Effect("cpu", 0.7, "idle", 0.25, 1.0),
            Effect("nvlink", 0.5, "zero", 0.125, 1.0),
        ),
        hangs=0.7,
        slows=0.2,
        creeps=0.0,
        vanishes=0.5,
    ),
    "nvlink_error": Kind(
        1.7,
        2.1,
        (
            Effect("nvlink", 0.9, "zero", 0.15, 1.0),
            Effect("gpu", 0.6, "idle", 0.1, 0.7),
            Effect("cpu", 0.4, "idle", 0.2, 0.8),
        ),
        hangs=0.4,
        slows=0.5,
    ),
    # Weak: only its consequences are seen.
    "aoc_error": Kind(
        0.9,
        1.2,
        (
            Effect("pfc", 0.8, "high", 0.25, 0.6),
            Effect("network", 0.5, "idle", 0.1, 0.4),
            Effect("nvlink", 0.2, "idle", 0.2, 0.4),
        ),
        slows=0.8,
        speed=(0.7, 0.98),
        spreads=0.5,
        spread=(0.3, 0.7),
        creeps=0.1,
    ),
    # The paper's "others", divided by us.
    "fail_slow": Kind(  # power or heat holds the clocks down: all wait for this machine
        5.0,
        6.3,
        (Effect("clock", 1.0, "idle", 0.12, 0.6), Effect("heat", 0.7, "high", 0.2, 0.8)),
        slows=1.0,
        speed=(0.4, 0.92),
        spreads=0.0,
        creeps=0.6,
    ),
    "cpu_contention": Kind(
        3.2,
        4.0,
        (Effect("cpu", 1.0, "high", 0.12, 0.9), Effect("gpu", 0.3, "idle", 0.08, 0.4)),
        slows=0.6,
        creeps=0.3,
        spreads=0.1,
    ),
    "memory_leak": Kind(
        2.0,
        2.6,
        (Effect("memory", 1.0, "high", 0.3, 1.0), Effect("cpu", 0.8, "high", 0.12, 0.6)),
        slows=0.4,
        creeps=0.9,
        spreads=0.0,
    ),
}


# Mixes of fault types, as weights. The shares of the evaluation set are known for four types; the
# rest is divided as in Table 1. The last three are for held-out cases: ASSUMED.
MIXES: dict[str, dict[str, float]] = {
    "table": {name: kind.table for name, kind in KINDS.items()},
    "evaluation": {name: kind.evaluation for name, kind in KINDS.items()},
    "even": dict.fromkeys(KINDS, 1.0),
    "weak": {
        name: 4.0 if name in ("pcie_downgrading", "gpu_execution_error", "aoc_error") else 1.0
        for name in KINDS
    },
    "slow": {
        name: 4.0 if name in ("fail_slow", "cpu_contention", "memory_leak") else 1.0
        for name in KINDS
    },
}
