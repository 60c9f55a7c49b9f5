"""Cards of devices and links: the physical limits that MFU, rooflines and plans divide by.

Plain data, no jax. Peaks are dense (no structured sparsity) vendor figures; what a kernel can reach
is measured elsewhere and never written here.
Sources: NVIDIA A100 datasheet (nvidia-a100-datasheet-us-nvidia-1758950-r4), H100 datasheet
(SXM5 column, halved where the sheet quotes sparsity), H200 datasheet, H800 (H100 die, NVLink cut to
400 GB/s both ways; secondary source), DGX B200 datasheet divided by its 8 GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceCard:
    """Peaks of one device.

    flops: FLOP/s by dtype name. memory_bytes: HBM capacity. memory_bytes_per_s: HBM bandwidth.
    link_bytes_per_s: NVLink, one direction. network_bytes_per_s: its NIC, one direction.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float


_HOPPER_FLOPS = {
    "float32": 67e12,
    "tfloat32": 494.5e12,
    "bfloat16": 989.5e12,
    "float16": 989.5e12,
    "float8": 1979e12,
    "int8": 1979e12,
}
_A100_FLOPS = {
    "float32": 19.5e12,
    "tfloat32": 156e12,
    "bfloat16": 312e12,
    "float16": 312e12,
    "int8": 624e12,
}
_B200_FLOPS = {
    "float32": 75e12,
    "tfloat32": 1125e12,
    "bfloat16": 2250e12,
    "float16": 2250e12,
    "float8": 4500e12,
    "int8": 4500e12,
}

CARDS = {
    "A100": DeviceCard("A100", _A100_FLOPS, 80 * 10**9, 2.039e12, 300e9, 25e9),
    "H100": DeviceCard("H100", _HOPPER_FLOPS, 80 * 10**9, 3.35e12, 450e9, 50e9),
    "H200": DeviceCard("H200", _HOPPER_FLOPS, 141 * 10**9, 4.8e12, 450e9, 50e9),
    "H800": DeviceCard("H800", _HOPPER_FLOPS, 80 * 10**9, 3.35e12, 200e9, 50e9),
    "B200": DeviceCard("B200", _B200_FLOPS, 180 * 10**9, 7.7e12, 900e9, 50e9),
}


def find_card(device_kind: str) -> DeviceCard | None:
    """Returns the card whose name stands in jax's `device_kind`, or None (a CPU, a new GPU)."""
    return next((card for name, card in CARDS.items() if name in device_kind), None)
