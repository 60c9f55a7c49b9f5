"""Meters: what a training loop derives from its steps, and what Linux and NVML count on a host.

Meter: throughput, MFU in two conventions, memory, data wait, ETA, in the training process.
HostMeter: the counters of a host and its network cards and GPUs, read by an agent from outside the
training processes. No jax import but for the memory of local devices.
"""

import array
import contextlib
import ctypes
import fcntl
import math
import os
import re
import resource
import shutil
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.monitor.records import Record

WINDOW = 20  # (chosen) steps whose median gives throughput and ETA
SMOOTHING = 0.9  # (chosen) weight of the past in the smoothed loss


@dataclass(frozen=True)
class Work:
    """What a step does, for throughput and MFU.

    unit: what is counted ('tokens', 'images'). flops_megatron, flops_causal: floating-point
    operations for one unit, in both conventions; None: the model does not say. peak_flops: sum over
    all devices; None: unknown, as for a CPU.
    """

    units_per_step: int
    flops_megatron: float | None
    flops_causal: float | None
    peak_flops: float | None
    unit: str = "tokens"


class Meter:
    """Measures the steps of a training loop: throughput, MFU, wait for data, time that is left.

    The loop calls `waited` with the seconds that it waited for a batch, and `finish` after each
    step; the time between two calls of `finish` is the time of a step.
    """

    def __init__(self, work: Work, steps: int):
        """steps: steps of the run."""
        self.work, self._steps = work, steps
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._smooth: float | None = None
        self._last = time.perf_counter()
        self._wait = 0.0

    def restart(self) -> None:
        """Starts the time of the next step now, after work that is no step (an evaluation, a save,
        a sample)."""
        self._last = time.perf_counter()

    def waited(self, seconds: float) -> None:
        """Adds time that the loop stood waiting for data."""
        self._wait += seconds

    def finish(self, step: int, loss: float, units: int | None = None) -> dict[str, float | None]:
        """Returns the measures of a finished step, by the names of their metrics.

        units: what the step counted; None: work.units_per_step.
        mfu: model FLOPs over peak FLOPs, 0..1, in Megatron's convention (attention to all keys of a
        row), as published tables have it. mfu_causal: the same with the keys that a token sees.
        Both are None if no peak is known. step_time_s: seconds, of the first step with its
        compilation. eta_s: the median step time times the remaining steps, without the first one.
        data_wait: share of the step that waited for data. memory_gib: the peak so far.
        """
        now = time.perf_counter()
        elapsed, self._last = now - self._last, now
        if self._smooth is None:
            self._smooth = loss
        else:
            self._times.append(elapsed)
            self._smooth = SMOOTHING * self._smooth + (1 - SMOOTHING) * loss
        usual = sorted(self._times)[len(self._times) // 2] if self._times else float("inf")
        wait, self._wait = self._wait, 0.0
        rate = (self.work.units_per_step if units is None else units) / elapsed

        def mfu(flops: float | None) -> float | None:
            peak = self.work.peak_flops
            return rate * flops / peak if peak and flops is not None else None

        return {
            "loss_smooth": self._smooth,
            "step_time_s": elapsed,
            f"{self.work.unit}_per_s": rate,
            "mfu": mfu(self.work.flops_megatron),
            "mfu_causal": mfu(self.work.flops_causal),
            "memory_gib": memory_bytes() / 2**30,
            "data_wait": min(wait / elapsed, 1.0),
            "eta_s": usual * (self._steps - step),
        }


def memory_bytes() -> int:
    """Returns the peak of the fullest local device, or of this process where devices do not say."""
    import jax  # an agent and a driver, which read this file, must not load it

    stats = [d.memory_stats() for d in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if s and "peak_bytes_in_use" in s]
    if peaks:
        return max(peaks)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux: KiB


# ---- the counters that a network card's driver keeps, as `ethtool -S` shows them
#
# Legend: the requests and layouts are those of linux/ethtool.h.


_SIOCETHTOOL = 0x8946
_DRIVER, _STRINGS, _STATS = 0x3, 0x1B, 0x1D  # ETHTOOL_GDRVINFO, GSTRINGS, GSTATS
_OF_STATS = 1  # ETH_SS_STATS
_DRIVER_BYTES, _COUNT_AT = 192, 4 + 5 * 32 + 12 + 4  # where ethtool_drvinfo has n_stats
_NAME = 32  # bytes


def _ask(sock: socket.socket, interface: str, request: bytes) -> bytes:
    buffer = array.array("B", request)
    address, _ = buffer.buffer_info()
    fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", interface.encode(), address))
    return buffer.tobytes()


def counters(interface: str) -> dict[str, int]:
    """Returns {name: count} of a network card. Raises: OSError where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        driver = _ask(sock, interface, struct.pack("<I", _DRIVER) + bytes(_DRIVER_BYTES))
        (count,) = struct.unpack_from("<I", driver, _COUNT_AT)
        head = struct.pack("<III", _STRINGS, _OF_STATS, count)
        names = _ask(sock, interface, head + bytes(count * _NAME))[len(head) :]
        head = struct.pack("<II", _STATS, count)
        counts = _ask(sock, interface, head + bytes(count * 8))[len(head) :]
    words = [names[i * _NAME : (i + 1) * _NAME].split(b"\0")[0].decode() for i in range(count)]
    return dict(zip(words, struct.unpack(f"<{count}Q", counts), strict=True))


# ---- the counters of a host, from outside the training processes
#
# An agent reads it once a period, so the values go on while a training process hangs. They are the
# metrics that detectors of sick machines use: CPU, memory, network, congestion of the network (PFC
# pause packets), and the duty, memory, power and temperature of GPUs (Minder, arXiv 2411.01791,
# table 1). What a host does not have is left out.
#
# Legend: a rate is taken between two readings, so the first reading has none.


SYSTEM = Path("/")  # tests read the files of another machine
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
PAUSE = re.compile(r"[rt]x_prio\d_pause")  # as the driver mlx5 calls the counters of PFC
_TEMPERATURE_OF_GPU, _CLOCK_OF_SM = 0, 1  # nvml.h: NVML_TEMPERATURE_GPU, NVML_CLOCK_SM

Values = dict[str, float]


class HostMeter:
    """Reads the counters of this host and of single processes."""

    def __init__(self, system: Path = SYSTEM, gpus: "Gpus | None" = None, count=counters):
        """gpus: None: those that this machine's NVML lists. count: reads the counters of a network
        card."""
        self._system, self._count = system, count
        self._gpus = Gpus.find() if gpus is None else gpus
        self._last: dict[Any, tuple[float, float]] = {}  # counter -> (moment, count)

    def host(self, folder: Path) -> Values:
        """Returns the values of the host. folder: a folder on the disk whose space counts."""
        values = {"disk_free_bytes": disk_free(folder), "network_bytes": traffic(self._system)}
        with contextlib.suppress(OSError, ValueError, IndexError):
            busy, idle = _cpu_ticks((self._system / "proc/stat").read_text())
            self._share(values, "cpu_share", busy, busy + idle)
        with contextlib.suppress(OSError, ValueError, KeyError):
            memory = table((self._system / "proc/meminfo").read_text())
            values["memory_share"] = 1 - memory["MemAvailable"] / memory["MemTotal"]
        if pauses := self._pauses():
            self._rate(values, "pfc_packets_per_s", sum(pauses))
        return values

    def records(self, name: str, folder: Path) -> list[Record]:
        """Returns the values of the host and of its GPUs as records. name: the host's name."""
        now, parts = time.time(), {None: self.host(folder), **self.devices()}
        return [
            Record(now, name, None, device, None, metric, value)
            for device, values in parts.items()
            for metric, value in values.items()
        ]

    def process(self, pid: int) -> Values:
        """Returns {"cpu_cores", "resident_bytes"} of a process; nothing of one that is gone."""
        values: Values = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            folder = self._system / "proc" / str(pid)
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            spent = (int(fields[11]) + int(fields[12])) / TICKS_PER_S  # user and system time
            self._rate(values, "cpu_cores", spent, pid)
            waited = sum(_waited(task) for task in (folder / "task").iterdir())
            self._rate(values, "cpu_wait_cores", waited, ("waited", pid))
            if pages := int((folder / "statm").read_text().split()[1]):  # else it is ending
                values["resident_bytes"] = pages * PAGE
        return values

    def devices(self) -> dict[int, Values]:
        """Returns {number of a GPU: its values}; empty without NVML."""
        return {} if self._gpus is None else dict(enumerate(self._gpus.read()))

    def _pauses(self) -> list[int]:
        """Returns the PFC packets of each priority and direction, of all network cards."""
        packets = []
        for card in (self._system / "sys/class/net").glob("*"):
            with contextlib.suppress(OSError):
                counted = self._count(card.name)
                packets += [n for name, n in counted.items() if PAUSE.fullmatch(name)]
        return packets

    def _rate(self, values: Values, name: str, count: float, of: Any = None) -> None:
        """Adds how fast a counter grows; a counter that began again has no rate."""
        now = time.monotonic()
        before = self._last.get((name, of))
        self._last[name, of] = now, count
        if before is not None and now > before[0] and count >= before[1]:
            values[name] = (count - before[1]) / (now - before[0])

    def _share(self, values: Values, name: str, part: float, total: float) -> None:
        """Adds the part of a counter that grows with another one."""
        before = self._last.get(name)
        self._last[name] = part, total
        if before is not None and total > before[1]:
            values[name] = (part - before[0]) / (total - before[1])


def _cpu_ticks(stat: str) -> tuple[float, float]:
    """Returns (busy, idle) of /proc/stat; the time that waits for disks is idle."""
    ticks = [int(x) for x in stat.split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, idle


def _waited(task: Path) -> float:
    """Returns the seconds that a thread was ready to run and waited for a processor."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((task / "schedstat").read_text().split()[1]) / 1e9
    return 0.0


def table(text: str) -> Values:
    """Returns {name: number} of lines 'name: number unit'."""
    rows = (line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {name: float(amount.split()[0]) for name, amount in rows}


def disk_free(folder: Path) -> float:
    """Returns the bytes that are free where a folder is, or was."""
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return math.inf


def traffic(system: Path = SYSTEM) -> int:
    """Returns bytes in and out of this host's network and InfiniBand ports since they began."""
    total = 0
    for line in (system / "proc/net/dev").read_text().splitlines()[2:]:
        fields = line.split(":", 1)[1].split()
        total += int(fields[0]) + int(fields[8])
    for name in ("port_xmit_data", "port_rcv_data"):
        for counter in (system / "sys/class/infiniband").glob(f"*/ports/*/counters/{name}"):
            with contextlib.suppress(OSError, ValueError):
                total += 4 * int(counter.read_text())  # counted in words of four bytes
    return total


class _Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class Gpus:
    """The GPUs of this host, through NVIDIA's management library NVML, a part of the driver."""

    def __init__(self, library: Any):
        """library: NVML, initialised."""
        self._nvml = library
        count = ctypes.c_uint(0)
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        self._handles = [ctypes.c_void_p() for _ in range(count.value)]
        for i, handle in enumerate(self._handles):
            self._ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(i), ctypes.byref(handle))

    @classmethod
    def find(cls) -> "Gpus | None":
        """Returns those of this machine, None without a driver."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        return cls(library) if library.nvmlInit_v2() == 0 else None

    def _ask(self, function: str, *arguments: Any) -> bool:
        """Calls a function of NVML; tells whether it succeeded."""
        return getattr(self._nvml, function)(*arguments) == 0

    def read(self) -> list[Values]:
        """Returns the values of each GPU, as far as it has them."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: ctypes.c_void_p) -> Values:
        values: Values = {}
        rates, memory, number = _Rates(), _Memory(), ctypes.c_uint(0)
        if self._ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates)):
            values |= {"gpu_duty": rates.gpu / 100, "gpu_memory_duty": rates.memory / 100}
        if self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
            values["gpu_memory_bytes"] = memory.used
        if self._ask("nvmlDeviceGetPowerUsage", handle, ctypes.byref(number)):
            values["gpu_power_w"] = number.value / 1000
        kind = ctypes.c_uint(_TEMPERATURE_OF_GPU)
        if self._ask("nvmlDeviceGetTemperature", handle, kind, ctypes.byref(number)):
            values["gpu_celsius"] = number.value
        kind = ctypes.c_uint(_CLOCK_OF_SM)
        if self._ask("nvmlDeviceGetClockInfo", handle, kind, ctypes.byref(number)):
            values["gpu_clock_mhz"] = number.value
        return values
