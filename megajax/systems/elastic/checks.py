"""Self-checks of hosts and their links between two attempts: short, with answers that are known.

The checks are short on purpose: longer ones would find more and cost more time (MegaScale section
4). They measure memory bandwidth, write a file and read it back, send bytes around the loopback,
and on hosts with GPUs compute a product with a known answer on each GPU and a sum over all of them.
Agents run the checks of their host (`run`, `answer`, `reach`). The driver asks all agents
(`check_all`) and limits the time of a check that hangs.
"""

import errno
import os
import random
import selectors
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from megajax.systems.elastic.wire import Door, dial, family, join_address

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
    results: dict[str, float | str] = {}
    for name, check in checks.items():
        for _ in range(2):
            try:
                results[name] = check()
                break
            except (ValueError, OSError, subprocess.SubprocessError) as error:
                results[name] = str(error) or type(error).__name__
                if isinstance(error, OSError) and error.errno in NOT_TRIED:
                    del results[name]
                if not isinstance(error, TimeoutError):
                    break
    return results


def failing(
    results: Mapping[str, Mapping[str, float | str] | None],
    named: Collection[str],
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Returns {host: why} of those that fail.

    Speeds are compared between hosts of one job and one kind, because nobody knows what a host
    should reach. Only hosts that the fault named may fail for a low speed: the load of a neighbour
    may slow the others. results: {host: its results, or None if it never answered}. named: the
    hosts of the fault. kinds: {host: the kind of its devices}; hosts that have none are of one.
    """
    bad = {host: "its self-checks never ended" for host, r in results.items() if r is None}
    for host, result in results.items():
        kind = kinds.get(host, "")
        alike = [r for other, r in results.items() if r and kinds.get(other, "") == kind]
        for name, figure in (result or {}).items():
            if isinstance(figure, str):
                bad[host] = f"{name}: {figure}"
                continue
            said = [f for r in alike if isinstance(f := r.get(name), float)]
            usual = statistics.median(said)
            slow = figure < min(SLOW * usual, ENOUGH.get(name, 0.0)) and len(said) >= COMPARED
            if slow and host in named:
                bad[host] = f"{name}: {figure:.3g}, the median of the hosts is {usual:.3g}"
    return bad


# ---- checks of the links between hosts: echoes over TCP between agents (MegaScale section 4)
#
# In a round each host talks with one other, so no pair disturbs another; after ROUNDS rounds a host
# has been heard by so many. A link has two ends: a host is named when all its links are bad and
# each of the others has a good one elsewhere. Two hosts alone can therefore not tell whose link it
# is. The bytes of an echo are known to everybody and are not encrypted; both ends prove the job's
# secret.


ROUNDS = 3  # (chosen) pairs of a host: a majority can be right
ECHO_BYTES = 2 * 2**20  # (chosen) each way; tenths of a second on a slow network
ECHOES = 3
WAIT_S = 10.0  # (chosen) for the other host to come; a link that takes longer is bad
PORT_S = 15.0  # (chosen) for the port at which a host waits for another
SLOW_LINK = 0.25  # (chosen) of the median of all hosts, of each its best link
FAST_LINK = (
    50.0  # (chosen) MB/s that a busy machine still reaches; faster than this is never a fault
)

DAMAGED = "other bytes come back than were sent"
ECHO = "echo"  # the purpose of such a connection
Pair = tuple[str, str]


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Returns up to ROUNDS rounds of disjoint pairs; no pair comes twice (as in a tournament)."""
    ring: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    schedule = []
    for _ in range(min(len(ring) - 1, ROUNDS)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        schedule.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return schedule


def answer(address: str, secret: str) -> int:
    """Waits, in a thread, for one host that holds the secret, and sends back what it sends.

    address: this host's address in the job's network, the only one that is listened on. Returns:
    the port.
    """
    server = socket.create_server((address, 0), family=family(address))
    threading.Thread(target=_echo, args=(server, secret), daemon=True).start()
    return server.getsockname()[1]


def _echo(server: socket.socket, secret: str) -> None:
    """Serves one host; connections of others that come before it are closed."""
    end, served = time.monotonic() + WAIT_S, None
    with selectors.DefaultSelector() as selector:
        door = Door(server, selector, secret, (ECHO,))
        while time.monotonic() < end and not (served is not None and served.closed):
            for key, _ in selector.select(0.1):
                line: Any = key.fileobj
                if line is server:
                    door.accept()
                    continue
                try:
                    messages = line.receive()
                    if door.admits(line):
                        served, end = line, max(end, time.monotonic() + WAIT_S)
                    for message in messages:
                        line.send({"echo": message["data"]})
                except (OSError, KeyError) as error:
                    door.turn_away(line, str(error))  # the other side reports it
            door.sweep()
        if served is not None and not served.closed:
            door.turn_away(served, "the time is over")
        door.close()


def reach(address: str, secret: str) -> float:
    """Sends data to a host that answers, and compares the echo. Returns MB/s, both ways together.

    Raises: OSError when it cannot be reached in time; ValueError when other bytes come back.
    """
    data = random.Random(2).randbytes(ECHO_BYTES // 2).hex()
    line = dial(address, secret, ECHO, "link")
    try:
        best, end = float("inf"), time.monotonic() + WAIT_S
        for _ in range(ECHOES):
            began = time.perf_counter()
            line.send({"data": data})
            back: list[dict] = []
            while not back:
                if time.monotonic() > end:
                    raise TimeoutError(f"no answer in {WAIT_S:g} s")
                back = line.receive()
            best = min(best, time.perf_counter() - began)
            if zlib.crc32(back[0].get("echo", "").encode()) != zlib.crc32(data.encode()):
                raise ValueError(DAMAGED)
    finally:
        line.close()
    return 2 * ECHO_BYTES / best / 1e6


class Agents(Protocol):
    """Asks the agents of a job's hosts (driver.py: Hosts). A host has a name and an address."""

    def good(self) -> list[Any]:
        """Returns the hosts that are there and not excluded."""
        ...

    def has(self, host: Any) -> bool:
        """Tells whether a host is still there."""
        ...

    def ask(
        self,
        hosts: Sequence[Any],
        answer: str,
        seconds: float,
        stop: Callable[[], bool] = ...,
        **message: Any,
    ) -> list[Any]:
        """Returns what each host answers, None where it does not in time."""
        ...

    def ask_each(
        self, messages: dict[str, dict], hosts: Sequence[Any], answer: str, seconds: float
    ) -> list[Any]:
        """Does what `ask` does, with a message for each host by its name."""
        ...


def check_links(agents: Agents, hosts: Sequence[Any]) -> dict[Pair, float | str]:
    """Returns MB/s of the links between pairs of hosts, or what is wrong with them.

    A pair of which an agent does not answer is left out: that says nothing about the link.
    """
    by_name = {host.name: host for host in hosts}
    figures: dict[Pair, float | str] = {}
    for pairs in filter(None, rounds(sorted(by_name))):
        servers = [by_name[b] for _, b in pairs]
        ports = agents.ask(servers, "answers", PORT_S, do="answer")
        requests = {
            a: {"do": "reach", "at": join_address(by_name[b].address, port or 1)}
            for (a, b), port in zip(pairs, ports, strict=True)
        }
        clients = [by_name[a] for a, _ in pairs]
        replies = agents.ask_each(requests, clients, "reached", 2 * WAIT_S)
        for pair, port, figure in zip(pairs, ports, replies, strict=True):
            if figure is not None and port is not None:
                figures[pair] = figure
    return figures


def failing_links(
    links: Mapping[Pair, float | str],
    named: Collection[str],
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Returns {host: why} of hosts whose links are bad.

    links: MB/s of each link, or what is wrong with it. named: the hosts of the fault; no other
    host is to blame for links that are only slow. kinds: as of `failing`; a link is slow if it is
    slow for both of its hosts.
    """
    by_host: dict[str, list[Pair]] = {}
    for pair in links:
        for host in pair:
            by_host.setdefault(host, []).append(pair)
    speed = {p: 0.0 if isinstance(f, str) else f for p, f in links.items()}
    # Of each host the best link: one bad host makes two links of three slow.
    best: dict[str, list[float]] = {}
    for host, pairs in by_host.items():
        best.setdefault(kinds.get(host, ""), []).append(max(speed[p] for p in pairs))
    usual = {host: statistics.median(best[kinds.get(host, "")]) for host in by_host}
    least = {p: min(*(SLOW_LINK * usual[host] for host in p), FAST_LINK) for p in links}
    bad = {p for p, f in links.items() if isinstance(f, str) or f < least[p]}
    guilty_hosts = {}
    for host, pairs in by_host.items():
        others = [p[0] if p[1] == host else p[1] for p in pairs]
        broken = any(isinstance(links[p], str) for p in pairs)
        guilty = bad.issuperset(pairs) and all(set(by_host[o]) - bad for o in others)
        if guilty and (broken or host in named):
            said = links[pairs[0]]
            how = said if isinstance(said, str) else f"{said:.3g} MB/s, usually {usual[host]:.3g}"
            guilty_hosts[host] = f"links to {', '.join(others)}: {how}"
    return guilty_hosts


# ---- all checks of a job, between two attempts


CHECK_S = 400.0  # (chosen) for self-checks; those of GPUs may take 300
Results = dict[str, dict[str, float | str] | None]  # by host, by check


def check_all(
    agents: Agents,
    named: Collection[str],
    stop: Callable[[], bool],
    kinds: Mapping[str, str] = MappingProxyType({}),
) -> tuple[dict[str, str], Results, dict[str, float | str]] | None:
    """Asks all hosts to check themselves, and then their links.

    named: the hosts of the fault; no other is bad for being slow. stop: nobody goes on. kinds:
    {host: the kind of its devices}, as far as an attempt has said it.
    Returns: ({bad host: why}, the results of each host, MB/s of each link or what is wrong with
    it); None: it was stopped.
    """
    present = agents.good()
    replies = agents.ask(present, "checks", CHECK_S, stop, do="check")
    if stop():
        return None
    results = {h.name: r for h, r in zip(present, replies, strict=True) if agents.has(h)}
    bad = failing(results, named, kinds)
    sound = [h for h in present if h.name not in bad and agents.has(h)]
    links = check_links(agents, sound)
    if failing_links(
        links, named, kinds
    ):  # once more: a host that was frozen for a moment is not bad
        damaged = {pair: figure for pair, figure in links.items() if figure == DAMAGED}
        links = check_links(agents, sound) | damaged
    gone = {h.name for h in sound if not agents.has(h)}  # an agent that ended says nothing
    sure = {pair: figure for pair, figure in links.items() if gone.isdisjoint(pair)}
    between = {" - ".join(pair): figure for pair, figure in links.items()}
    return bad | failing_links(sure, named, kinds), results, between
