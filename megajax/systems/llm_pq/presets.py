"""The eleven clusters and models of LLM-PQ (arXiv 2403.01136, table of clusters; released scripts).

32 requests of 512 tokens, 100 new ones each: the released defaults. The paper's clusters have one
host for each kind of GPU; that all stages talk over 100 Gbit/s Ethernet is ASSUMED.
"""

import dataclasses
from typing import NamedTuple

from megajax.core.hardware import CARDS, ETHERNET, MixedCluster
from megajax.cost.base import Stack
from megajax.systems.llm_pq.costs import Workload


class Preset(NamedTuple):
    """A model with its requests, and the devices that serve it."""

    workload: Workload
    cluster: MixedCluster


def _stack(layers: int, width: int, heads: int) -> Stack:
    return Stack(layers, width, heads, heads, width // heads, 4 * width)


# OPT (arXiv 2205.01068, table 1), BLOOM (arXiv 2211.05100, table 3). OPT's positions: 2048 + 2.
OPT_13B = Workload("OPT-13B", _stack(40, 5120, 40), 50272, 2050)
OPT_30B = Workload("OPT-30B", _stack(48, 7168, 56), 50272, 2050)
OPT_66B = Workload("OPT-66B", _stack(64, 9216, 72), 50272, 2050)
BLOOM_176B = Workload("BLOOM-176B", _stack(70, 14336, 112), 250880)

# The smaller GPUs of a name, from the same datasheets as their cards.
A100_40 = dataclasses.replace(
    CARDS["A100"], name="A100-40", memory_bytes=40 * 10**9, memory_bytes_per_s=1.555e12
)
P100_12 = dataclasses.replace(
    CARDS["P100"], name="P100-12", memory_bytes=12 * 10**9, memory_bytes_per_s=549e9,
    flops={"float32": 9.3e12, "float16": 18.7e12}, link_bytes_per_s=16e9,
)  # fmt: skip
V100, T4, A100 = CARDS["V100"], CARDS["T4"], CARDS["A100"]


def _case(workload: Workload, *kinds) -> Preset:
    cards = tuple(card for count, card in kinds for _ in range(count))
    return Preset(workload, MixedCluster(cards, ETHERNET))


PRESETS = {
    "case1": _case(OPT_13B, (1, V100)),
    "case2": _case(OPT_13B, (1, A100_40)),
    "case3": _case(OPT_30B, (3, T4), (1, V100)),
    "case4": _case(OPT_30B, (3, P100_12), (1, V100)),
    "case5": _case(OPT_66B, (4, T4), (2, V100)),
    "case6": _case(OPT_66B, (2, V100), (2, A100_40)),
    "case7": _case(BLOOM_176B, (4, V100), (4, A100_40)),
    "case8": _case(BLOOM_176B, (4, V100), (2, A100)),
    "case9": _case(OPT_30B, (4, T4)),
    "case10": _case(OPT_66B, (4, V100)),
    "case11": _case(BLOOM_176B, (4, A100)),
}
