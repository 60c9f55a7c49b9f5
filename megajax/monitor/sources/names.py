"""What exporters call the metrics of a machine, and what the detector of sick machines calls them.

The 21 metrics that Minder collects (NSDI 2025, arXiv 2411.01791, section 4.2 and its appendix; the
first seven are those that it uses, in its order), and a few more that only name a cause. Each has
one or more ways in which an exporter shows it: NVIDIA's dcgm-exporter (default-counters.csv and
dcp-metrics-included.csv), Prometheus' node_exporter with its collectors ethtool and infiniband
(PFC counters as the driver mlx5 names them), and this project's own records
(megajax/monitor/host_meter.py). The first way that a machine has is used.

Units: shares are from 0 to 1, bytes and not multiples of them, seconds, watts, degrees Celsius,
MHz. convert.py applies the table to samples, promql.py writes it as expressions of Prometheus.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

GAUGE: Literal["gauge"] = "gauge"
COUNTER: Literal["counter"] = "counter"

# Network devices that pass on what another device counts as well, and file systems in memory.
_CARDS = (
    'device!~"lo|veth.*|docker.*|br-.*|virbr.*|cni.*|flannel.*|cali.*|tap.*|tun.*|bond.*|ifb.*"'
)
_DISKS = 'fstype!~"tmpfs|ramfs|devtmpfs|overlay|squashfs|fuse.*|nsfs|iso9660"'


@dataclasses.dataclass(frozen=True)
class Way:
    """One way in which an exporter shows a metric.

    names: the exporter's; their values are added up where all other labels are equal.
    kind: a counter becomes a rate a second. scale: from the exporter's unit. only: conditions on
    labels, as in PromQL. over: how the series of one machine become one: "devices" gives the mean
    and, as metrics of their own, the least and the greatest. rest_of: the value is 1 - names /
    rest_of; "1": it is 1 - names.
    """

    names: tuple[str, ...]
    kind: Literal["gauge", "counter"] = GAUGE
    scale: float = 1.0
    only: str = ""
    over: Literal["devices", "sum", "max", "mean"] = "devices"
    rest_of: str = ""

    def takes(self, labels: Mapping[str, str]) -> bool:
        """Tells whether a series of one of these names meets the conditions."""
        for label, operator, pattern in re.findall(r'(\w+)(!~|=~|!=|=)"([^"]*)"', self.only):
            same = bool(re.fullmatch(pattern, labels.get(label, "")))
            if same == (operator[0] == "!"):
                return False
        return True


def _sum(*names: str, only: str = "") -> Way:
    """A way: the sum of counters over the devices of a machine."""
    return Way(names, COUNTER, only=only, over="sum")


def _priorities(prefix: str, suffix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{k}{suffix}" for k in range(8))


_TCP = ("node_network_receive_bytes_total", "node_network_transmit_bytes_total")
_RDMA = (
    "node_infiniband_port_data_received_bytes_total",
    "node_infiniband_port_data_transmitted_bytes_total",
)

# Metric -> ways. The seven that the paper uses come first, in the order that it learnt.
METRICS: Mapping[str, tuple[Way, ...]] = {
    "pfc_tx_packet_rate": (
        _sum(*_priorities("node_ethtool_transmitted_prio", "_pause")),
        Way(("pfc_packets_per_s",), over="sum"),  # of both directions
    ),
    "cpu_usage": (
        Way(("node_cpu_seconds_total",), COUNTER, only='mode="idle"', over="mean", rest_of="1"),
        Way(("cpu_share",)),
    ),
    "gpu_duty_cycle": (Way(("DCGM_FI_DEV_GPU_UTIL",), scale=0.01), Way(("gpu_duty",))),
    "gpu_power_draw": (Way(("DCGM_FI_DEV_POWER_USAGE",)), Way(("gpu_power_w",))),
    "gpu_graphics_engine_activity": (Way(("DCGM_FI_PROF_GR_ENGINE_ACTIVE",)),),
    "gpu_tensor_activity": (Way(("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",)),),
    "nvlink_bandwidth": (
        Way(("DCGM_FI_PROF_NVLINK_TX_BYTES", "DCGM_FI_PROF_NVLINK_RX_BYTES")),
        # default-counters.csv calls it a counter, but DCGM gives a rate in MB/s
        # (github.com/NVIDIA/dcgm-exporter/pull/658).
        Way(("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",), scale=1e6),
    ),
    "memory_usage": (
        Way(("node_memory_MemAvailable_bytes",), over="sum", rest_of="node_memory_MemTotal_bytes"),
        Way(("memory_share",)),
    ),
    "disk_usage": (
        Way(
            ("node_filesystem_avail_bytes",),
            only=_DISKS,
            over="max",
            rest_of="node_filesystem_size_bytes",
        ),
    ),
    "tcp_throughput": (_sum(*_TCP, only=_CARDS),),
    "tcp_rdma_throughput": (
        _sum(*_TCP, *_RDMA, only=_CARDS),
        Way(("network_bytes",), COUNTER, over="sum"),
    ),
    "gpu_memory_used": (
        Way(("DCGM_FI_DEV_FB_USED",), scale=2.0**20),
        Way(("gpu_memory_bytes",)),
    ),
    "gpu_temperature": (Way(("DCGM_FI_DEV_GPU_TEMP",)), Way(("gpu_celsius",))),
    "gpu_sm_activity": (Way(("DCGM_FI_PROF_SM_ACTIVE",)),),
    "gpu_clocks": (Way(("DCGM_FI_DEV_SM_CLOCK",)), Way(("gpu_clock_mhz",))),
    "gpu_fp_engine_activity": (Way(("DCGM_FI_PROF_PIPE_FP32_ACTIVE",)),),
    "gpu_memory_bandwidth_utilization": (
        Way(("DCGM_FI_PROF_DRAM_ACTIVE",)),
        Way(("DCGM_FI_DEV_MEM_COPY_UTIL",), scale=0.01),
        Way(("gpu_memory_duty",)),
    ),
    "pcie_bandwidth": (
        Way(("DCGM_FI_PROF_PCIE_TX_BYTES", "DCGM_FI_PROF_PCIE_RX_BYTES")),
        # A rate in kB/s too, whatever its type says (github.com/NVIDIA/dcgm-exporter/issues/354).
        Way(("DCGM_FI_DEV_PCIE_TX_THROUGHPUT", "DCGM_FI_DEV_PCIE_RX_THROUGHPUT"), scale=1e3),
    ),
    "pcie_usage": (),  # a share of the link's width and speed, which no exporter of these shows
    "ecn_packet_rate": (
        _sum("node_infiniband_np_ecn_marked_roce_packets_received_total"),
        _sum("node_ethtool_received_ecn_mark"),
    ),
    "cnp_packet_rate": (
        _sum(
            "node_infiniband_np_cnp_packets_sent_total",
            "node_infiniband_rp_cnp_packets_handled_total",
        ),
    ),
    # Beyond the paper's.
    "pfc_rx_packet_rate": (_sum(*_priorities("node_ethtool_received_prio", "_pause")),),
    "disk_busy": (Way(("node_disk_io_time_seconds_total",), COUNTER, over="max"),),
    "disk_throughput": (_sum("node_disk_read_bytes_total", "node_disk_written_bytes_total"),),
    "gpu_xid": (Way(("DCGM_FI_DEV_XID_ERRORS",), over="max"),),
    "pcie_replay_rate": (_sum("DCGM_FI_DEV_PCIE_REPLAY_COUNTER"),),
    "gpu_ecc_error_rate": (_sum("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL"),),
    "nvlink_error_rate": (
        _sum(
            "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
            "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
            "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
            "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        ),
    ),
}
MINDER = tuple(METRICS)[:7]  # (arXiv 2411.01791, section 4.4) in the order that the paper learnt
# What jobs are judged by. A GPU whose clock is held down by heat makes all machines wait; among
# Minder's seven, only its power may show it.
WATCHED = (*MINDER, "gpu_clocks", "gpu_temperature")
COLLECTED = tuple(METRICS)[:21]  # (the same, appendix) all that the paper collects

# How many GPUs of a machine answer in a second. A mean over the GPUs that are left looks healthy
# when one of them is off its bus. Of the first of these metrics that the machine has.
GPU_COUNT = "gpu_count"
COUNTED = ("gpu_temperature", "gpu_duty_cycle", "gpu_power_draw", "gpu_memory_used")

LEAST, GREATEST = "_min", "_max"  # of the devices of a machine, behind the metric's name


_PAIR = re.compile(r'\s*([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')


def parse(series: str) -> tuple[str, dict[str, str]]:
    """Returns (name, labels) of a series as Prometheus writes it: name{label="value",...}.

    What does not have this form is a name without labels.
    """
    name, brace, inside = series.partition("{")
    if not brace or not inside.endswith("}"):
        return series, {}
    inside, at, labels = inside[:-1], 0, dict[str, str]()
    while at < len(inside):  # pair by pair, so that the time is that of one pass
        if (pair := _PAIR.match(inside, at)) is None:
            return (name.strip(), labels) if not inside[at:].strip() else (series, {})
        labels[pair[1]], at = pair[2], pair.end()
    return name.strip(), labels
