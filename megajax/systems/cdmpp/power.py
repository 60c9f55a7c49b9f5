"""Computes the rates that GPUs reach in float32 products, and that their power limits allow.

At its power limit a GPU lowers its clock, and with it the voltage, so an operation needs
less energy. The power of a GPU is modelled as what it needs at any clock, plus the operations of a
second times the energy of one operation, which rises as a power of the current clock.
"""

import dataclasses

import numpy as np

from megajax.core.hardware import DeviceCard

CLOCK = 1.5e9  # Hz, assumed for a card that has no clock
# (words of a GPU's name, compute capability, power limit in watts). Libraries choose kernels by the
# compute capability (CUDA C++ programming guide). The power limits are from datasheets. The first
# entry whose words all occur in a name is used.
_GPUS = (
    ("K80", 3.7, 300), ("P100", 6.0, 250), ("P40", 6.1, 250), ("P4", 6.1, 75),
    ("V100 PCIE", 7.0, 250), ("V100", 7.0, 300), ("T4", 7.5, 70),
    ("A100 PCIE 40GB", 8.0, 250), ("A100 PCIE", 8.0, 300), ("A100", 8.0, 400), ("A30", 8.0, 165),
    ("A800", 8.0, 400), ("A10", 8.6, 150), ("A10G", 8.6, 150), ("A40", 8.6, 300),
    ("L4", 8.9, 72), ("L40", 8.9, 300), ("L40S", 8.9, 350), ("H100 PCIE", 9.0, 350),
    ("H100", 9.0, 700), ("H200", 9.0, 700), ("H800", 9.0, 700), ("GH200", 9.0, 900),
    ("H20", 9.0, 400), ("B200", 10.0, 1000), ("B300", 10.3, 1400), ("GB200", 10.0, 1200),
)  # fmt: skip
# Power that a GPU needs at any clock (memory, leakage, voltage regulators): a constant in watts,
# plus a share of its power limit (assumed: 26 W of 70 W, 40 W of 250 W).
_IDLE, _IDLE_SHARE = 20.0, 0.08
# _JOULES: energy of a float32 operation at a clock of 1 GHz. _ENERGY_RISE: the exponent with which
# it rises with the clock. _NODES: (compute capability, factor on the energy of GPUs below it); the
# factor is that of the process node of their chips. The first two and the factor of 7 nm are set so
# that large linear layers of T4 and A100-40 reach 96 % of the `sustained` rate, and V100 is not
# throttled, as measured (NeuSight's test rows); P4's rate is 5 % too low then. 5 nm needs 30 % less
# energy than 7 nm (TSMC, N5), its later variants 10 % less than that (TSMC, N5P); 8 nm and 28 nm
# are assumed.
_JOULES, _ENERGY_RISE = 11.7e-12, 0.8
_NODES = ((6.0, 2.0), (8.0, 1.0), (8.6, 0.9), (8.9, 0.95), (np.inf, 0.57))
# (compute capability, share of their peak that GPUs below it reach in float32 products), relative
# to GPUs whose SMs have 64 float32 lanes. An SM with 128 lanes has no more issue slots and no more
# bandwidth of shared memory than one with 64, so it cannot keep all lanes busy. cuBLAS keeps 73 %
# of the lanes of an RTX PRO 6000 busy and 82 % of an H200's (kernelspace.substack.com, "Surfacing a
# 60% performance bug in cuBLAS"); with 64 lanes, 95 %. The SMs of a P4 have 128 lanes too, but they
# issue two instructions a clock.
_BUSY = ((8.6, 1.0), (9.0, 0.77), (np.inf, 0.86))


def with_chip(card: DeviceCard, *names: str) -> DeviceCard:
    """Returns the card with the compute capability and power limit of the GPU that it is named for.

    Rows of other projects, and files from before cards had these numbers, say only what a GPU is
    called. A card of no known GPU, and one that has the numbers, is returned as it is.
    Args: names: further names of the device, looked up if the card's is of no known GPU.
    """
    if card.capability or card.power_w:
        return card
    for name in (card.name, *names):
        words = set(name.upper().replace("-", " ").replace("_", " ").split())
        for needed, capability, watts in _GPUS:
            if words.issuperset(needed.split()):
                return dataclasses.replace(card, capability=capability, power_w=float(watts))
    return card


def busy(card: DeviceCard) -> float:
    """Returns the share of a card's peak that its SMs reach in float32 products; see _BUSY."""
    return next(share for below, share in _BUSY if card.capability < below)


def sustained(card: DeviceCard) -> float:
    """Returns the float32 FLOP/s that a card's power limit allows at the energy of its full clock.

    Infinity if the card lacks its compute capability or its power limit.
    """
    if not (card.capability and card.power_w):
        return np.inf
    node = next(share for below, share in _NODES if card.capability < below)
    rise = ((card.clock_hz or CLOCK) / 1e9) ** _ENERGY_RISE
    return (card.power_w * (1 - _IDLE_SHARE) - _IDLE) / (_JOULES * rise * node)


def throttled(rate: np.ndarray, limit: np.ndarray) -> np.ndarray:
    """Returns the FLOP/s that are left of `rate` once the power limit has lowered the clock.

    Args: rate: FLOP/s at the card's full clock. limit: FLOP/s that the power limit would allow if
      each operation took the energy that it takes at full clock (see `sustained`). At a fraction s
      of that clock an operation takes s^_ENERGY_RISE of the energy, so the clock falls until
      s^(1 + _ENERGY_RISE) = limit / rate.
    """
    power = 1 / (1 + _ENERGY_RISE)
    return np.minimum(rate, rate ** (1 - power) * limit**power)
