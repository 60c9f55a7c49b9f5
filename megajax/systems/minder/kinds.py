"""Types of faults by the metrics that they move: the nearest one explains an alert.

Source: the relation of Minder, table 1 and section 3.1 (which metrics an ECC error, a PCIe
downgrade, a NIC or GPU that drops out, or a storage error show in), in words there; the signs and
weights here are ASSUMED, because the paper's table of probabilities is not public.
"""

from collections.abc import Mapping

# metric -> direction (+ up, - down) and weight of a fault type
KINDS: Mapping[str, Mapping[str, float]] = {
    "pcie_downgrading": {"pfc_tx_packet_rate": 1.0, "gpu_duty_cycle": -0.3, "cpu_usage": 0.1},
    "ecc_error": {"cpu_usage": -0.8, "gpu_duty_cycle": -0.6, "gpu_power_draw": -0.6,
                  "gpu_tensor_activity": -0.6, "gpu_graphics_engine_activity": -0.6},
    "nic_dropout": {"pfc_tx_packet_rate": -0.6, "cpu_usage": -0.6, "tcp_rdma_throughput": -1.0},
    "gpu_card_drop": {"gpu_duty_cycle": -1.0, "gpu_power_draw": -1.0, "gpu_tensor_activity": -1.0,
                      "gpu_graphics_engine_activity": -1.0, "nvlink_bandwidth": -0.7},
    "nvlink_error": {"nvlink_bandwidth": -1.0, "gpu_tensor_activity": -0.4},
    "storage_error": {"disk_busy": 0.6, "disk_throughput": 1.0, "cpu_usage": 0.5},
    "cpu_contention": {"cpu_usage": 1.0},
}  # fmt: skip
LEAST = 0.45  # (chosen) cosine below which no type is near


def nearest(scores: Mapping[str, float]) -> str:
    """Returns the type whose signature has the largest cosine with the scores of a machine.

    scores: {metric: score with its sign}; 'unknown' where no type is near, as with metrics that
    the table does not have. A metric of a signature that is not measured counts against it: without
    it, one common metric would make types alike.
    """
    length = sum(s * s for s in scores.values()) ** 0.5
    best, name = LEAST, "unknown"
    for kind, signature in KINDS.items():
        shared = sum(scores.get(m, 0.0) * w for m, w in signature.items())
        own = sum(w * w for w in signature.values()) ** 0.5
        if length and own and shared / (length * own) > best:
            best, name = shared / (length * own), kind
    return name
