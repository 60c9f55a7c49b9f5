"""Finds the card of this machine's device, which has its peak FLOP/s, bandwidth and other limits.

The card of a GPU has the numbers of its datasheet (core/hardware.py). The card of a CPU is
measured, because the memory bandwidth of a datasheet does not bound a program whose small arrays
are in a cache. A few simple programs are timed, and the card gets the largest rates that any of
them reached. An operation whose arrays are in the nearest cache is then not faster than the
roofline.
"""

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError
from megajax.core.hardware import CARDS, DeviceCard
from megajax.systems.cdmpp.families import Program
from megajax.systems.cdmpp.profile import measure

_CPU = Path("/sys/devices/system/cpu/cpu0/cache")


def card(threads: int) -> DeviceCard:
    """Returns the card of jax's first device. threads: CPU threads that this process may use.

    Raises: UserError on a GPU that no card describes.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _cpu_card(threads)
    kind = device.device_kind
    for name, found in CARDS.items():
        if re.search(rf"\b{re.escape(name)}\b", kind.upper()):
            return found
    raise UserError(f"device {kind} has no card; there are {', '.join(CARDS)}")


def _cpu_card(threads: int) -> DeviceCard:
    timed = measure(list(_simple_programs()), passes=6)
    rates = [
        (record.flops / seconds, record.nbytes / seconds)
        for one in timed
        for record, seconds in zip(one.records, one.halves.min(1), strict=True)
    ]
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*: (.*)", info)
    clocks = [float(mhz) for mhz in re.findall(r"cpu MHz\s*: ([\d.]+)", info)]
    return DeviceCard(
        name=f"{model[1].strip() if model else platform.processor() or 'CPU'}, {threads} threads",
        flops={"float32": max(flops for flops, _ in rates)},
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memory_bytes_per_s=max(nbytes for _, nbytes in rates),
        link_bytes_per_s=0.0,
        network_bytes_per_s=0.0,
        sms=threads,
        l2_bytes=_last_cache(),
        clock_hz=max(clocks, default=0.0) * 1e6,
    )


def _last_cache() -> float:
    """Returns the bytes of the last cache; 0 where the system does not say."""
    sizes = [p.read_text().strip() for p in sorted(_CPU.glob("index*/size"))]
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    return max((int(s[:-1]) * units[s[-1]] for s in sizes if s and s[-1] in units), default=0.0)


def _simple_programs() -> Iterator[Program]:
    """Yields products and additions of arrays from a cache's size to many times it."""
    for number, size in enumerate((256, 512, 768, 1024)):
        square = jnp.ones((size, size), jnp.float32)
        yield Program(10**9 + number, "card", jnp.matmul, (square, square))
    for number, kib in enumerate((16, 64, 256, 1024, 4096, 32768)):
        array = jnp.ones(kib * 256, jnp.float32)
        yield Program(10**9 + 100 + number, "card", lambda x, y: x + y, (array, array))
