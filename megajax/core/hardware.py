"""Cards of devices and links: the physical limits that MFU, rooflines and plans divide by.

Plain data, no jax. Peaks are dense (no structured sparsity) vendor figures; what a kernel can reach
is measured elsewhere and never written here.
Sources: NVIDIA A100 datasheet (nvidia-a100-datasheet-us-nvidia-1758950-r4), H100 datasheet
(SXM5 column, halved where the sheet quotes sparsity), H200 datasheet, H800 (H100 die, NVLink cut to
400 GB/s both ways; secondary source), DGX B200 datasheet divided by its 8 GPUs. Latencies of links:
NCCL src/graph/tuning.cc (ring, simple protocol). Network adapters: ConnectX-5 of Slingshot-10
(arXiv 2008.08886, section 2), ConnectX-6 and ConnectX-7 datasheets (HDR, NDR InfiniBand). SMs, L2
and boost clock: A100 whitepaper (table 4: 108, 40 MB, 1410 MHz), H100 whitepaper (132, 50 MB) with
the largest SM clock that nvidia-smi names for SXM5 (1980 MHz); H200 and H800 have the H100's die;
B200: 148 SMs, 126.5 MiB and 1965 MHz are secondary sources. V100 SXM2, P100 SXM2, T4, A10, L4 and
L40S: their datasheets, halved where a sheet quotes sparsity; SMs, L2 and clocks: the Volta, Pascal,
Turing, Ampere GA102 and Ada whitepapers. V100, P100 and T4 compute no bfloat16, P100 has no tensor
cores. Cards without NVLink have one direction of their PCIe x16 in its place (generation 3: 16
GB/s, 4: 32 GB/s). The network of these six is ASSUMED: 100 Gbit/s a GPU.
"""

import collections
import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megajax.core.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Link:
    """One direction of a link: bytes a second, and seconds that a message waits."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class DeviceCard:
    """Peaks of one device.

    flops: FLOP/s by dtype name. memory_bytes: HBM capacity. memory_bytes_per_s: HBM bandwidth.
    link_bytes_per_s: NVLink, one direction. network_bytes_per_s: its NIC, one direction.
    sms: streaming multiprocessors (of a CPU: threads that compute). l2_bytes: the last cache that
    all of them share. clock_hz: the largest (boost) clock. capability: CUDA's compute capability,
    9.0 for example. power_w: the power limit. 0: unknown.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    sms: int = 0
    l2_bytes: float = 0
    clock_hz: float = 0
    capability: float = 0
    power_w: float = 0

    def floor_s(self, flops: float, nbytes: float, dtype: str = "bfloat16") -> float:
        """Returns seconds below which no kernel can stay: at the peaks, without efficiencies."""
        return max(flops / self.peak(dtype), nbytes / self.memory_bytes_per_s)

    def peak(self, dtype: str) -> float:
        """Returns FLOP/s in a data type. Raises: UserError for one that the device has not."""
        if dtype not in self.flops:
            known = ", ".join(self.flops)
            raise UserError(f"{self.name} does not compute in {dtype}, only {known}")
        return self.flops[dtype]

    @property
    def inside(self) -> Link:
        """NVLink between devices of a host."""
        return Link(self.link_bytes_per_s, 3.4e-6)

    @property
    def between(self) -> Link:
        """A device's own NIC to another host."""
        return Link(self.network_bytes_per_s, 14e-6)


_HOPPER_FLOPS = {
    "float32": 67e12,
    "tfloat32": 494.5e12,
    "bfloat16": 989.5e12,
    "float16": 989.5e12,
    "float8": 1979e12,
    "int8": 1979e12,
}
# SMs, L2, clock, compute capability, power limit (data sheets, CUDA C++ programming guide)
_HOPPER_DIE = (132, 50 * 2**20, 1.98e9, 9.0, 700.0)
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
_ADA_FLOPS = {"float32": 91.6e12, "tfloat32": 183e12, "bfloat16": 362.05e12, "float16": 362.05e12}

CARDS = {
    "A100": DeviceCard(
        "A100", _A100_FLOPS, 80 * 10**9, 2.039e12, 300e9, 25e9, 108, 40 * 2**20, 1.41e9,
        8.0, 400.0,
    ),
    "H100": DeviceCard("H100", _HOPPER_FLOPS, 80 * 10**9, 3.35e12, 450e9, 50e9, *_HOPPER_DIE),
    "H200": DeviceCard("H200", _HOPPER_FLOPS, 141 * 10**9, 4.8e12, 450e9, 50e9, *_HOPPER_DIE),
    "H800": DeviceCard("H800", _HOPPER_FLOPS, 80 * 10**9, 3.35e12, 200e9, 50e9, *_HOPPER_DIE),
    "B200": DeviceCard(
        "B200", _B200_FLOPS, 180 * 10**9, 7.7e12, 900e9, 50e9, 148, 126.5 * 2**20, 1.965e9,
        10.0, 1000.0,
    ),
    "V100": DeviceCard(
        "V100", {"float32": 15.7e12, "float16": 125e12}, 32 * 10**9, 900e9, 150e9, 12.5e9, 80,
        6 * 2**20, 1.53e9, 7.0, 300.0,
    ),
    "P100": DeviceCard(
        "P100", {"float32": 10.6e12, "float16": 21.2e12}, 16 * 10**9, 732e9, 80e9, 12.5e9, 56,
        4 * 2**20, 1.48e9, 6.0, 250.0,
    ),
    "T4": DeviceCard(
        "T4", {"float32": 8.1e12, "float16": 65e12, "int8": 130e12}, 16 * 10**9, 320e9, 16e9,
        12.5e9, 40, 4 * 2**20, 1.59e9, 7.5, 70.0,
    ),
    "A10": DeviceCard(
        "A10",
        {"float32": 31.2e12, "tfloat32": 62.5e12, "bfloat16": 125e12, "float16": 125e12,
         "int8": 250e12},
        24 * 10**9, 600e9, 32e9, 12.5e9, 72, 6 * 2**20, 1.695e9, 8.6, 150.0,
    ),
    "L4": DeviceCard(
        "L4",
        {"float32": 30.3e12, "tfloat32": 60e12, "bfloat16": 121e12, "float16": 121e12,
         "float8": 242.5e12, "int8": 242.5e12},
        24 * 10**9, 300e9, 32e9, 12.5e9, 58, 48 * 2**20, 2.04e9, 8.9, 72.0,
    ),
    "L40S": DeviceCard(
        "L40S", _ADA_FLOPS | {"float8": 733e12, "int8": 733e12}, 48 * 10**9, 864e9, 32e9, 12.5e9,
        142, 96 * 2**20, 2.52e9, 8.9, 350.0,
    ),
}  # fmt: skip

# Bytes a second of a network adapter, one direction.
ADAPTERS = {"Slingshot-10": 12.5e9, "InfiniBand HDR": 25e9, "InfiniBand NDR": 50e9}


def shared(card: DeviceCard, adapter: str, adapters: int, gpus: int) -> DeviceCard:
    """Returns the card of a GPU whose host has so many of these adapters for so many GPUs."""
    share = ADAPTERS[adapter] * adapters / gpus
    return dataclasses.replace(card, network_bytes_per_s=share)


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices. Devices are numbered host by host.

    hosts_per_pod: hosts under one set of top-of-rack switches (MegaScale section 3.6: 64).
    """

    card: DeviceCard
    hosts: int
    gpus_per_host: int
    hosts_per_pod: int = 64

    @property
    def devices(self) -> int:
        """All devices."""
        return self.hosts * self.gpus_per_host

    @property
    def inside(self) -> Link:
        """NVLink between devices of a host."""
        return self.card.inside

    @property
    def between(self) -> Link:
        """A device's own NIC to another host."""
        return self.card.between

    @property
    def name(self) -> str:
        """E.g. 'h100:1536x8'."""
        return f"{self.card.name.lower()}:{self.hosts}x{self.gpus_per_host}"


@dataclass(frozen=True)
class MixedCluster:
    """Devices of several kinds. link: one direction between any two, the slowest of the cluster."""

    cards: tuple[DeviceCard, ...]
    link: Link

    @property
    def devices(self) -> int:
        """All devices."""
        return len(self.cards)

    @property
    def name(self) -> str:
        """E.g. 't4:3,v100:1'."""
        kinds = collections.Counter(card.name.lower() for card in self.cards)
        return ",".join(f"{kind}:{count}" for kind, count in kinds.items())


ETHERNET = Link(12.5e9, 14e-6)  # 100 Gbit/s between hosts (assumed), latency as above


def parse_mixed(text: str, link: Link = ETHERNET) -> MixedCluster:
    """Returns the cluster of 'kind:GPUS,kind:GPUS', e.g. 't4:3,v100:1'. Raises: UserError."""
    kinds = {name.lower(): card for name, card in CARDS.items()}
    cards: list[DeviceCard] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\w+):(\d+)", part.strip())
        if match is None or not int(match[2]):
            raise UserError(f"cluster={text} must be kind:GPUS,... e.g. t4:3,v100:1 (--cluster)")
        if (card := kinds.get(match[1].lower())) is None:
            near = did_you_mean(match[1].lower(), kinds)
            raise UserError(
                f"cluster={text}: {match[1]} must be one of {', '.join(kinds)}.{near} (--cluster)"
            )
        cards += [card] * int(match[2])
    return MixedCluster(tuple(cards), link)


def parse_cluster(text: str) -> Cluster:
    """Returns the cluster of 'kind:hosts x gpus', e.g. 'h100:1536x8'. Raises: UserError."""
    match = re.fullmatch(r"(\w+):(\d+)x(\d+)", text)
    if match is None or not int(match[2]) or not int(match[3]):
        raise UserError(f"cluster={text} must be kind:HOSTSxGPUS, e.g. h100:1536x8 (--cluster)")
    kinds = {name.lower(): card for name, card in CARDS.items()}
    card = kinds.get(match[1].lower())
    if card is None:
        near = did_you_mean(match[1].lower(), kinds)
        raise UserError(
            f"cluster={text}: {match[1]} must be one of {', '.join(kinds)}.{near} (--cluster)"
        )
    return Cluster(card, int(match[2]), int(match[3]))


def find_card(device_kind: str, dtype: str | None = None) -> DeviceCard | None:
    """Returns the card whose name is a word of jax's `device_kind`, or None (a CPU, a new GPU).

    dtype: in which it must compute; None: in any.

    GH200 is another word than H200. A card is of the largest GPU of its name: an A100 with 40 GB
    gets the card with 80 (`mesh.memory_bytes` asks the GPU).
    """
    words = re.findall(r"\w+", device_kind)
    card = next((card for name, card in CARDS.items() if name in words), None)
    return card if card and (dtype is None or dtype in card.flops) else None
