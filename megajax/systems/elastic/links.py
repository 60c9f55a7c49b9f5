"""Checks of the links between hosts: echoes over TCP between pairs of agents (MegaScale section 4).

In a round each host talks with one other, so no pair disturbs another; after ROUNDS rounds a host
has been heard by so many. A link has two ends: a host is named when all its links are bad and each
of the others has a good one elsewhere. Two hosts alone can therefore not tell whose link it is.
The bytes of an echo are known to everybody and are not encrypted; both ends prove the job's secret.
"""

import random
import selectors
import socket
import statistics
import threading
import time
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megajax.systems.elastic.door import Door
from megajax.systems.elastic.wire import dial

ROUNDS = 3  # (chosen) pairs of a host: a majority can be right
ECHO_BYTES = 2 * 2**20  # (chosen) each way; tenths of a second on a slow network
ECHOES = 3
WAIT_S = 10.0  # (chosen) for the other host to come; a link that takes longer is bad
SLOW = 0.25  # (chosen) of the median of all hosts, of each its best link
ENOUGH = 50.0  # (chosen) MB/s that a busy machine still reaches; faster than this is never a fault

DAMAGED = "other bytes come back than were sent"
ECHO = "echo"  # the purpose of such a connection
Pair = tuple[str, str]


def rounds(hosts: Sequence[str]) -> list[list[Pair]]:
    """Returns up to ROUNDS rounds of disjoint pairs; no pair comes twice (as in a tournament)."""
    ring: list[str | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    found = []
    for _ in range(min(len(ring) - 1, ROUNDS)):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        found.append([(a, b) for a, b in pairs if a is not None and b is not None])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return found


def answer(address: str, secret: str) -> int:
    """Waits, in a thread, for one host that holds the secret, and sends back what it sends.

    address: of this host in the job's network; no other is listened on. Returns: the port there.
    """
    server = socket.create_server((address, 0), family=family(address))
    threading.Thread(target=_echo, args=(server, secret), daemon=True).start()
    return server.getsockname()[1]


def family(address: str) -> socket.AddressFamily:
    """Returns which kind of address this is."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _echo(server: socket.socket, secret: str) -> None:
    """Serves one host; strangers who come first are sent away."""
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
    """Sends data to a host that answers, and compares what comes back. Returns MB/s, both ways.

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


def failing(links: Mapping[Pair, float | str], named: Collection[str]) -> dict[str, str]:
    """Returns {host: why} of those that are to blame. links: MB/s, or what is wrong.

    named: the hosts of the fault; no other is to blame for links that are only slow.
    """
    mine: dict[str, list[Pair]] = {}
    for pair in links:
        for host in pair:
            mine.setdefault(host, []).append(pair)
    speed = {p: 0.0 if isinstance(f, str) else f for p, f in links.items()}
    # Of each host the best link: one bad host makes two links of three slow.
    usual = statistics.median([max(speed[p] for p in own) for own in mine.values()] or [0.0])
    bad = {p for p, f in links.items() if isinstance(f, str) or f < min(SLOW * usual, ENOUGH)}
    found = {}
    for host, pairs in mine.items():
        others = [p[0] if p[1] == host else p[1] for p in pairs]
        broken = any(isinstance(links[p], str) for p in pairs)
        guilty = bad.issuperset(pairs) and all(set(mine[o]) - bad for o in others)
        if guilty and (broken or host in named):
            said = links[pairs[0]]
            how = said if isinstance(said, str) else f"{said:.3g} MB/s, usually {usual:.3g}"
            found[host] = f"links to {', '.join(others)}: {how}"
    return found
