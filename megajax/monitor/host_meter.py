"""What Linux and NVML count on a host, from outside the training processes.

An agent reads it once a period, so the values go on while a training process hangs. They are the
metrics that detectors of sick machines use: CPU, memory, network, congestion of the network (PFC
pause packets), and the duty, memory, power and temperature of GPUs (Minder, arXiv 2411.01791,
table 1). What a host does not have is left out. No jax import.

Legend: a rate is taken between two readings, so the first reading has none.
"""

import contextlib
import ctypes
import math
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from megajax.monitor import ethtool

SYSTEM = Path("/")  # tests read the files of another machine
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
PAUSE = re.compile(r"[rt]x_prio\d_pause")  # as the driver mlx5 calls the counters of PFC
_TEMPERATURE_OF_GPU, _CLOCK_OF_SM = 0, 1  # nvml.h: NVML_TEMPERATURE_GPU, NVML_CLOCK_SM

Values = dict[str, float]


class HostMeter:
    """Reads the counters of this host and of single processes."""

    def __init__(self, system: Path = SYSTEM, gpus: "Gpus | None" = None, count=ethtool.counters):
        """gpus: None: those of this machine's NVML, where it has one. count: reads the counters
        of a network card."""
        self._system, self._count = system, count
        self._gpus = Gpus.find() if gpus is None else gpus
        self._last: dict[Any, tuple[float, float]] = {}  # counter -> (moment, count)

    def host(self, folder: Path) -> Values:
        """Returns the values of the host. folder: whose disk counts."""
        found = {"disk_free_bytes": disk_free(folder), "network_bytes": traffic(self._system)}
        with contextlib.suppress(OSError, ValueError, IndexError):
            busy, idle = _cpu_ticks((self._system / "proc/stat").read_text())
            self._share(found, "cpu_share", busy, busy + idle)
        with contextlib.suppress(OSError, ValueError, KeyError):
            memory = table((self._system / "proc/meminfo").read_text())
            found["memory_share"] = 1 - memory["MemAvailable"] / memory["MemTotal"]
        if pauses := self._pauses():
            self._rate(found, "pfc_packets_per_s", sum(pauses))
        return found

    def process(self, pid: int) -> Values:
        """Returns {"cpu_cores", "resident_bytes"} of a process; nothing of one that is gone."""
        found: Values = {}
        with contextlib.suppress(OSError, ValueError, IndexError):
            folder = self._system / "proc" / str(pid)
            fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            spent = (int(fields[11]) + int(fields[12])) / TICKS_PER_S  # user and system time
            self._rate(found, "cpu_cores", spent, pid)
            waited = sum(_waited(task) for task in (folder / "task").iterdir())
            self._rate(found, "cpu_wait_cores", waited, ("waited", pid))
            if pages := int((folder / "statm").read_text().split()[1]):  # else it is ending
                found["resident_bytes"] = pages * PAGE
        return found

    def devices(self) -> dict[int, Values]:
        """Returns the values of each GPU by its number, none where there is no NVML."""
        return {} if self._gpus is None else dict(enumerate(self._gpus.read()))

    def _pauses(self) -> list[int]:
        """Returns the PFC packets of each priority and direction, of all network cards."""
        found = []
        for card in (self._system / "sys/class/net").glob("*"):
            with contextlib.suppress(OSError):
                counted = self._count(card.name)
                found += [n for name, n in counted.items() if PAUSE.fullmatch(name)]
        return found

    def _rate(self, found: Values, name: str, count: float, of: Any = None) -> None:
        """Adds how fast a counter grows; a counter that began again has no rate."""
        now = time.monotonic()
        before = self._last.get((name, of))
        self._last[name, of] = now, count
        if before is not None and now > before[0] and count >= before[1]:
            found[name] = (count - before[1]) / (now - before[0])

    def _share(self, found: Values, name: str, part: float, whole: float) -> None:
        """Adds the part of a counter that grows with another one."""
        before = self._last.get(name)
        self._last[name] = part, whole
        if before is not None and whole > before[1]:
            found[name] = (part - before[0]) / (whole - before[1])


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
    return {name: float(rest.split()[0]) for name, rest in rows}


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
    """The GPUs of this host, by NVIDIA's management library, which comes with its driver."""

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
        """Tells whether the library could answer."""
        return getattr(self._nvml, function)(*arguments) == 0

    def read(self) -> list[Values]:
        """Returns the values of each GPU, as far as it has them."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: ctypes.c_void_p) -> Values:
        found: Values = {}
        rates, memory, number = _Rates(), _Memory(), ctypes.c_uint(0)
        if self._ask("nvmlDeviceGetUtilizationRates", handle, ctypes.byref(rates)):
            found |= {"gpu_duty": rates.gpu / 100, "gpu_memory_duty": rates.memory / 100}
        if self._ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)):
            found["gpu_memory_bytes"] = memory.used
        if self._ask("nvmlDeviceGetPowerUsage", handle, ctypes.byref(number)):
            found["gpu_power_w"] = number.value / 1000
        kind = ctypes.c_uint(_TEMPERATURE_OF_GPU)
        if self._ask("nvmlDeviceGetTemperature", handle, kind, ctypes.byref(number)):
            found["gpu_celsius"] = number.value
        kind = ctypes.c_uint(_CLOCK_OF_SM)
        if self._ask("nvmlDeviceGetClockInfo", handle, kind, ctypes.byref(number)):
            found["gpu_clock_mhz"] = number.value
        return found
