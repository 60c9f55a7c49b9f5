"""The counters of a host, or of a group of its processes, as text that Prometheus reads.

This is for hosts on which no exporter runs. The names are those of Prometheus' node_exporter and
NVIDIA's dcgm-exporter, so that dashboards and the table of sources/convert.py need no others. A
group is shown as if it were a machine: its processors are those of the host, idle where the group
does not use them, its memory is the host's with the group's share of it used. Several groups of one
host can then play several machines.

A group that is gone is answered with status 503, so that its series stop, as those of a dead host
do. Network counters belong to a network namespace: a group shows those of its own namespace, and
none where it shares that of the exporter. GPUs are read through NVML; what only DCGM measures
(activity of tensor cores, NVLink) is not here. No jax import.
"""

import contextlib
import http.server
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megajax.core.errors import UserError
from megajax.monitor import meter
from megajax.monitor.meter import PAGE, SYSTEM, TICKS_PER_S, Gpus, table

Row = tuple[str, str, dict[str, str], float]  # name, type, labels, value
MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")  # of /proc/stat
SECTOR = 512  # bytes; /proc/diskstats counts in these, whatever the disk has
BACK_S = 3.0  # (node_exporter) by which a counter of processor time falls without a new beginning
SLOW_S = 5.0  # (chosen) after which a client that says nothing is dropped
ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})  # of Prometheus' label values
# GPU value of meter.py -> (dcgm-exporter's name, factor)
DCGM = {
    "gpu_duty": ("DCGM_FI_DEV_GPU_UTIL", 100.0),
    "gpu_memory_duty": ("DCGM_FI_DEV_MEM_COPY_UTIL", 100.0),
    "gpu_memory_bytes": ("DCGM_FI_DEV_FB_USED", 2.0**-20),
    "gpu_power_w": ("DCGM_FI_DEV_POWER_USAGE", 1.0),
    "gpu_celsius": ("DCGM_FI_DEV_GPU_TEMP", 1.0),
    "gpu_clock_mhz": ("DCGM_FI_DEV_SM_CLOCK", 1.0),
}


class Gone(Exception):
    """What was to be shown is no more."""


class Host:
    """All of this host."""

    def __init__(self, system: Path = SYSTEM, gpus: Gpus | None = None, folder: Path = SYSTEM):
        """gpus: None: those that this machine's NVML lists. folder: its disk's space is shown."""
        self._system, self._folder = system, folder
        self._gpus = Gpus.find() if gpus is None else gpus
        self._ticks: dict[tuple[str, str], int] = {}

    def rows(self) -> Iterator[Row]:
        """Yields all counters that this host has."""
        for part in (self._processors, self._memory, self._disks, self._space, self._cards):
            with contextlib.suppress(OSError, ValueError, LookupError):
                yield from list(part())
        yield from network(self._system / "proc/net/dev")
        yield from self._infiniband()
        yield from devices(self._gpus)

    def _processors(self) -> Iterator[Row]:
        for line in (self._system / "proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name != "cpu":
                for mode, n in zip(MODES, ticks, strict=False):
                    labels, key = {"cpu": name[3:], "mode": mode}, (name, mode)
                    before, now = self._ticks.get(key, 0), int(n)
                    if before - BACK_S * TICKS_PER_S < now < before:  # Linux' idle time may fall
                        now = before
                    self._ticks[key] = now
                    yield "node_cpu_seconds_total", "counter", labels, now / TICKS_PER_S

    def _memory(self) -> Iterator[Row]:
        memory = table((self._system / "proc/meminfo").read_text())
        for name in ("MemTotal", "MemAvailable"):
            yield f"node_memory_{name}_bytes", "gauge", {}, 1024 * memory[name]

    def _disks(self) -> Iterator[Row]:
        for line in (self._system / "proc/diskstats").read_text().splitlines():
            _, _, device, *counts = line.split()
            is_disk = (self._system / "sys/block" / device).exists()  # else it is a part of one
            if is_disk and not device.startswith(("loop", "ram", "zram")):
                label = {"device": device}
                read, written, busy_ms = int(counts[2]), int(counts[6]), int(counts[9])
                yield "node_disk_read_bytes_total", "counter", label, SECTOR * read
                yield "node_disk_written_bytes_total", "counter", label, SECTOR * written
                yield "node_disk_io_time_seconds_total", "counter", label, busy_ms / 1000

    def _space(self) -> Iterator[Row]:
        space = os.statvfs(self._folder)
        label = {"mountpoint": str(self._folder), "fstype": ""}
        yield "node_filesystem_size_bytes", "gauge", label, space.f_frsize * space.f_blocks
        yield "node_filesystem_avail_bytes", "gauge", label, space.f_frsize * space.f_bavail

    def _cards(self) -> Iterator[Row]:
        for card in sorted((self._system / "sys/class/net").glob("*")):
            counted: dict[str, int] = {}
            with contextlib.suppress(OSError):
                counted = meter.counters(card.name)
            for prefix, word in (("tx", "transmitted"), ("rx", "received")):
                for k in range(8):
                    if (name := f"{prefix}_prio{k}_pause") in counted:
                        label = {"device": card.name}
                        row = f"node_ethtool_{word}_prio{k}_pause"
                        yield row, "untyped", label, counted[name]

    def _infiniband(self) -> Iterator[Row]:
        places = (self._system / "sys/class/infiniband").glob("*/ports/*/counters")
        for place in sorted(places):
            for file, direction in (
                ("port_rcv_data", "received"),
                ("port_xmit_data", "transmitted"),
            ):
                with contextlib.suppress(OSError, ValueError):
                    count = 4 * int((place / file).read_text())  # counted in words of four bytes
                    labels = {"device": place.parts[-4], "port": place.parts[-2]}
                    name = f"node_infiniband_port_data_{direction}_bytes_total"
                    yield name, "counter", labels, count


def network(file: Path) -> Iterator[Row]:
    """Yields the bytes that each network device has received and sent, under node_exporter's names.
    Nothing is yielded from a file that cannot be read.

    file: net/dev of a process in /proc, which lists the devices of the process's network
    namespace.
    """
    with contextlib.suppress(OSError, ValueError, LookupError):
        for line in file.read_text().splitlines()[2:]:
            device, _, counters = line.partition(":")
            fields, label = counters.split(), {"device": device.strip()}
            yield "node_network_receive_bytes_total", "counter", label, int(fields[0])
            yield "node_network_transmit_bytes_total", "counter", label, int(fields[8])


def devices(gpus: Gpus | None) -> Iterator[Row]:
    """Yields the values of each GPU that NVML returns; a GPU that does not answer has no row."""
    for number, values in enumerate([] if gpus is None else gpus.read()):
        for name, value in values.items():
            if name in DCGM:
                row, factor = DCGM[name]
                yield row, "gauge", {"gpu": str(number)}, factor * value


class Group:
    """The process group of a process, with all that its processes started."""

    def __init__(self, pid: int, system: Path = SYSTEM):
        """pid: a process of the group. Raises: UserError if there is no such process."""
        self._proc, self._pid = system / "proc", pid
        self._memory_bytes = 1024 * table((self._proc / "meminfo").read_text())["MemTotal"]
        self._spent = dict.fromkeys(("user", "system", "read", "written"), 0.0)
        try:
            self._leader = self._stat(pid)[2]  # the group's number
        except (OSError, LookupError):
            raise UserError(f"pid={pid}: there is no such process (--pid)") from None
        self._last, _ = self._read()
        self._processor = _Processor()

    def rows(self) -> Iterator[Row]:
        """Yields the counters of the group. Raises: Gone when none of its processes is left."""
        processes, resident = self._read()
        if not processes:
            raise Gone(f"no process of the group of {self._pid} is left")
        for key, counts in processes.items():
            before = self._last.get(key, {})
            for name, count in counts.items():  # those of processes that ended stay counted
                self._spent[name] += max(0.0, count - before.get(name, 0.0))
        self._last = processes
        yield from self._processor.rows(self._spent["user"], self._spent["system"])
        yield "node_memory_MemTotal_bytes", "gauge", {}, self._memory_bytes
        yield "node_memory_MemAvailable_bytes", "gauge", {}, self._memory_bytes - resident
        for name in ("read", "written"):
            label = {"device": "group"}
            yield f"node_disk_{name}_bytes_total", "counter", label, self._spent[name]
        yield from own_network(self._proc, next(iter(processes))[0])

    def _stat(self, pid: int) -> list[str]:
        """Returns the fields of a process from its state on."""
        return (self._proc / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()

    def _read(self) -> tuple[dict[tuple[int, str], dict[str, float]], float]:
        """Returns (counts of each process, bytes in memory of all)."""
        all_ = {}
        for name in os.listdir(self._proc):
            if name.isdecimal():
                with contextlib.suppress(OSError, LookupError):
                    all_[int(name)] = self._stat(int(name))
        group = {pid for pid, fields in all_.items() if fields[2] == self._leader}
        while more := {pid for pid, f in all_.items() if int(f[1]) in group} - group:
            group |= more
        processes, resident = {}, 0.0
        for pid in group:
            fields = all_[pid]
            if fields[0] == "Z":
                continue
            counts = {
                "user": int(fields[11]) / TICKS_PER_S,
                "system": int(fields[12]) / TICKS_PER_S,
            }
            with contextlib.suppress(OSError, ValueError, LookupError):
                counted = table((self._proc / str(pid) / "io").read_text())
                counts |= {"read": counted["read_bytes"], "written": counted["write_bytes"]}
            with contextlib.suppress(OSError, ValueError, LookupError):
                resident += PAGE * int((self._proc / str(pid) / "statm").read_text().split()[1])
            processes[pid, fields[19]] = counts
        return processes, resident


class Cgroup:
    """A control group, of version 1 or 2."""

    def __init__(self, path: str, system: Path = SYSTEM):
        """path: below /sys/fs/cgroup (version 2) or below its controllers (version 1), such as
        "jobs/7". Raises: UserError when there is no such group."""
        self._root, self._path = system / "sys/fs/cgroup", path.strip("/")
        self._memory_bytes = 1024 * table((system / "proc/meminfo").read_text())["MemTotal"]
        self._first, self._processor = self._seconds(), _Processor()
        if self._first is None:
            raise UserError(f"cgroup={path}: there is none below {self._root} (--cgroup)")

    def _seconds(self) -> float | None:
        """Returns the processor time that the group has used, None when it is gone."""
        with contextlib.suppress(OSError, ValueError):
            text = (self._root / self._path / "cpu.stat").read_text()
            fields = dict(line.split() for line in text.splitlines())
            if "usage_usec" in fields:
                return int(fields["usage_usec"]) / 1e6
        with contextlib.suppress(OSError, ValueError):
            text = (self._root / "cpuacct" / self._path / "cpuacct.usage").read_text()
            return int(text) / 1e9
        return None

    def _stat(self, *places: tuple[str, str]) -> float | None:
        """Returns the first number that exists.

        places: (file below the root, word before the number).
        """
        for file, word in places:
            with contextlib.suppress(OSError, ValueError):
                for line in (self._root / file).read_text().splitlines():
                    if line.split()[0] == word:
                        return float(line.split()[1])
        return None

    def rows(self) -> Iterator[Row]:
        """Yields the counters of the group. Raises: Gone."""
        spent, first = self._seconds(), self._first
        if spent is None or first is None:
            raise Gone(f"the control group {self._path} is gone")
        yield from self._processor.rows(spent - first, 0.0)
        resident = self._stat(
            (f"{self._path}/memory.stat", "anon"), (f"memory/{self._path}/memory.stat", "rss")
        )
        if resident is not None:
            yield "node_memory_MemTotal_bytes", "gauge", {}, self._memory_bytes
            yield "node_memory_MemAvailable_bytes", "gauge", {}, self._memory_bytes - resident


class _Processor:
    """One processor that stands for all of a host; it is full if a group keeps all of them busy."""

    def __init__(self) -> None:
        self._cpus, self._began, self._idle = os.cpu_count() or 1, time.monotonic(), 0.0

    def rows(self, user: float, system: float) -> Iterator[Row]:
        """Yields its modes. user, system: seconds of all processors since this was made.

        What is left of the time is idle. Ticks come late, so that this could fall, which would look
        like a counter that began again.
        """
        user, system = user / self._cpus, system / self._cpus
        self._idle = max(self._idle, time.monotonic() - self._began - user - system)
        for mode, seconds in (("user", user), ("system", system), ("idle", self._idle)):
            labels = {"cpu": "group", "mode": mode}
            yield "node_cpu_seconds_total", "counter", labels, seconds


def own_network(proc: Path, pid: int) -> Iterator[Row]:
    """Yields the network counters of a process that has a namespace of its own."""
    with contextlib.suppress(OSError):
        theirs, ours = (os.readlink(proc / p / "ns/net") for p in (str(pid), "self"))
        if theirs != ours:
            yield from network(proc / str(pid) / "net/dev")


def text(rows: Iterator[Row]) -> str:
    """Returns rows in the text format of Prometheus, version 0.0.4."""
    lines: dict[str, list[str]] = {}
    for name, kind, labels, value in rows:
        pairs = ",".join(f'{k}="{v.translate(ESCAPES)}"' for k, v in labels.items())
        listed = lines.setdefault(name, [f"# TYPE {name} {kind}"])
        listed.append(f"{name}{{{pairs}}} {value!r}" if pairs else f"{name} {value!r}")
    return "\n".join(line for listed in lines.values() for line in listed) + "\n"


class Server(http.server.ThreadingHTTPServer):
    """Answers GET /metrics. `address` is where."""

    daemon_threads = True

    def __init__(self, host: str, port: int, rows: Callable[[], Iterator[Row]]):
        """port: 0: any that is free. Raises: UserError when the port cannot be had."""
        self.rows, self.lock = rows, threading.Lock()
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise UserError(
                f"port={port} of {host} cannot be had: {error.strerror} (--host, --port)"
            ) from None
        self.address = f"{host}:{self.server_address[1]}"

    def server_bind(self) -> None:
        """Binds without a look-up of the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request, client_address) -> None:
        """Ignores clients that hang up."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = SLOW_S

    def do_GET(self) -> None:
        """Answers with the counters of now."""
        if self.path.split("?")[0] != "/metrics":
            self._say(404, "the counters are at /metrics\n")
            return
        server = self.server
        assert isinstance(server, Server)
        try:
            with server.lock:  # counters are not read by two at a time
                page = text(server.rows())
        except Gone as error:
            self._say(503, f"{error}\n")
        else:
            self._say(200, page)

    def _say(self, status: int, words: str) -> None:
        body = words.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """A request a second is no news."""
