"""A device whose times are known exactly: the ground truth of the predictor's tests.

Products run in waves of 128 x 128 tiles at a share of the peak, row-wise passes at a share of the
bandwidth; a launch costs five microseconds. No part is the network's own arithmetic: it takes the
slower of compute and traffic, the network a smooth maximum over many times.
"""

import math

import numpy as np

from megajax.core.hardware import DeviceCard
from megajax.cost.record import OpRecord, product, rowwise
from megajax.systems.cdmpp import Dataset


def card(name: str, tflops: float, gigabytes: float, sms: int, l2_mib: float) -> DeviceCard:
    """Returns a card in the units of a datasheet; the clock is that of 64 lanes an SM."""
    clock = tflops * 1e12 / (128 * sms)
    flops = {"float32": tflops * 1e12}
    return DeviceCard(name, flops, 10**10, gigabytes * 1e9, 0, 0, sms, l2_mib * 2**20, clock)


CARDS = {
    c.name: c
    for c in (
        card("small", 6, 200, 40, 2),
        card("wide", 9, 700, 56, 4),
        card("large", 14, 900, 80, 6),
        card("largest", 20, 1500, 108, 20),
    )
}


def seconds(record: OpRecord, device: DeviceCard, efficiency: float = 0.8) -> float:
    """Returns how long a record takes on this device."""
    compute = record.flops / device.flops["float32"] / efficiency
    if record["k"]:
        tiles = record["batch"] * math.ceil(record["m"] / 128) * math.ceil(record["n"] / 128)
        waves = math.ceil(tiles / device.sms)
        one = 2 * 128 * 128 * record["k"] / (device.flops["float32"] / device.sms) / efficiency
        compute = waves * one
    return 5e-6 + max(compute, record.nbytes / device.memory_bytes_per_s / 0.9)


def programs(count: int, seed: int) -> list[OpRecord]:
    """Returns products and element-wise passes of random sizes."""
    rng = np.random.default_rng(seed)
    records = []
    for place in range(count):
        m, n, k = (int(x) for x in np.exp(rng.uniform(np.log(64), np.log(4096), 3)))
        batch = int(np.exp(rng.uniform(0, np.log(64)))) if place % 3 == 1 else 1
        if place % 3 == 2:
            records.append(rowwise(("add",), 8 * m, n, 2, "float32"))
        else:
            records.append(product(batch, m, n, k, "float32"))
    return records


def dataset(names: tuple[str, ...], count: int, seed: int, efficiency: float = 0.8) -> Dataset:
    """Returns the same programs on each of these devices."""
    records = programs(count, seed)
    times = [seconds(r, CARDS[name], efficiency) for name in names for r in records]
    devices = [name for name in names for _ in records]
    return Dataset(records * len(names), np.array(times), devices, CARDS)
