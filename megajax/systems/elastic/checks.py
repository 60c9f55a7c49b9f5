"""Self-checks of a host between two attempts: short, and with answers that are known.

MegaScale section 4: short on purpose, time against false positives. Memory bandwidth, a file that
must read back as written, bytes around the loopback, and on hosts with GPUs a product with a known
answer on each and a sum over all of them. A check that hangs is the driver's to time out.
"""

import errno
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

MEMORY_BYTES = 64 * 2**20  # (chosen) beyond the caches of a core
DISK_BYTES = 16 * 2**20  # (chosen) a second on a slow disk
LOOP_BYTES = 8 * 2**20
SLOW = 0.25  # (chosen) of the median of all hosts: a broken channel, not a busy neighbour
SHOTS = 3  # (chosen) of which the best counts: a neighbour disturbs some of them
COMPARED = 3  # hosts: of two that differ, nobody knows which is wrong
# (chosen) GB/s and MB/s that a busy machine still reaches; faster than this is never a fault.
ENOUGH = {"memory": 1.0, "disk": 20.0, "loopback": 100.0}

# A disk that is full or a folder that somebody removed says nothing about the host; nor do
# descriptors and memory that are used up.
NOT_TRIED = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)

GPU_CHECK = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
n = 2048
for d in jax.devices():
    x = jax.device_put(jnp.full((n, n), 0.5, jnp.bfloat16), d)
    assert (np.asarray(jnp.dot(x, x, preferred_element_type=jnp.float32)) == n / 4).all(), d
count = len(jax.devices())
mesh = jax.make_mesh((count,), ("d",))
ones = jax.device_put(np.ones((count, 1 << 20), np.float32), NamedSharding(mesh, P("d")))
total = jax.jit(lambda a: a.sum(0), out_shardings=NamedSharding(mesh, P()))(ones)
assert (np.asarray(total) == count).all()
"""


def memory() -> float:
    """Returns GB/s read and written by one thread."""
    a, b = bytearray(b"\x5a" * MEMORY_BYTES), bytearray(MEMORY_BYTES)
    best = float("inf")
    for _ in range(SHOTS):
        began = time.perf_counter()
        memoryview(b)[:] = a  # one memcpy
        best = min(best, time.perf_counter() - began)
    if a != b:
        raise ValueError("memory does not hold what was written")
    return 2 * MEMORY_BYTES / best / 1e9


def disk(folder: Path) -> float:
    """Writes a file, reads it back past the page cache, compares. Returns MB/s of write and fsync.

    Raises: ValueError when other bytes come back; OSError.
    """
    data = random.Random(0).randbytes(DISK_BYTES)
    path = folder / f".selfcheck-{os.getpid()}"
    try:
        with open(path, "wb") as file:
            began = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            took = time.perf_counter() - began
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if zlib.crc32(path.read_bytes()) != zlib.crc32(data):
            raise ValueError(f"{folder} gives other bytes back than were written")
    finally:
        path.unlink(missing_ok=True)
    return DISK_BYTES / took / 1e6


def loopback() -> float:
    """Sends bytes to itself through TCP. Returns MB/s. Raises: ValueError, OSError."""
    return max(_loopback() for _ in range(SHOTS))


def _loopback() -> float:
    data = random.Random(1).randbytes(LOOP_BYTES)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname(), timeout=10)
        receiver, _ = server.accept()
    with sender, receiver:
        receiver.settimeout(10)
        began = time.perf_counter()
        thread = threading.Thread(target=sender.sendall, args=(data,), daemon=True)
        thread.start()
        got = bytearray()
        while len(got) < LOOP_BYTES and (part := receiver.recv(1 << 20)):
            got += part
        took = time.perf_counter() - began
    if zlib.crc32(got) != zlib.crc32(data):
        raise ValueError("the loopback gives other bytes back than were sent")
    return LOOP_BYTES / took / 1e6


def gpu(timeout: float = 300.0) -> float:
    """Products with known answers and a sum over all GPUs of the host. Returns its seconds.

    In a process of its own, so that no device stays held. Raises: ValueError with the last line.
    """
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", GPU_CHECK], capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1])
    return time.perf_counter() - began


def run(folder: Path) -> dict[str, float | str]:
    """Returns {check: its figure, or what is wrong}. folder: whose disk is tried.

    What takes too long is tried once more: a host that was frozen for a moment is not broken.
    """
    checks = {"memory": memory, "disk": lambda: disk(folder), "loopback": loopback}
    if shutil.which("nvidia-smi"):
        checks["gpu"] = gpu
    found: dict[str, float | str] = {}
    for name, check in checks.items():
        for _ in range(2):
            try:
                found[name] = check()
                break
            except (ValueError, OSError, subprocess.SubprocessError) as error:
                found[name] = str(error) or type(error).__name__
                if isinstance(error, OSError) and error.errno in NOT_TRIED:
                    del found[name]
                if not isinstance(error, TimeoutError):
                    break
    return found


def failing(
    results: Mapping[str, Mapping[str, float | str] | None], named: Collection[str]
) -> dict[str, str]:
    """Returns {host: why} of those that fail. results: of each host; None: it never answered.

    Speeds are compared between hosts of one job, because nobody knows what a host should reach. A
    host is slow only if the fault named it: a neighbour's load is no reason to lose another one.
    """
    bad = {host: "its self-checks never ended" for host, r in results.items() if r is None}
    for host, result in results.items():
        for name, figure in (result or {}).items():
            if isinstance(figure, str):
                bad[host] = f"{name}: {figure}"
                continue
            said = [f for r in results.values() if r and isinstance(f := r.get(name), float)]
            usual = statistics.median(said)
            slow = figure < min(SLOW * usual, ENOUGH.get(name, 0.0)) and len(said) >= COMPARED
            if slow and host in named:
                bad[host] = f"{name}: {figure:.3g}, the median of the hosts is {usual:.3g}"
    return bad
