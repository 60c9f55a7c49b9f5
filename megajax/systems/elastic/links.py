"""Checks of the links between hosts: echoes over TCP between pairs of agents (MegaScale section 4).

In a round each host talks with one other, so no pair disturbs another; after ROUNDS rounds a host
has been heard by so many. A link has two ends: a host is named when all its links are bad and each
of the others has a good one elsewhere. Two hosts alone can therefore not tell whose link it is.
"""

import random
import socket
import statistics
import threading
import time
import zlib
from collections.abc import Mapping, Sequence

from megajax.systems.elastic.wire import Line, dial

ROUNDS = 3  # (chosen) pairs of a host: a majority can be right
ECHO_BYTES = 2 * 2**20  # (chosen) each way; tenths of a second on a slow network
ECHOES = 3
WAIT_S = 10.0  # (chosen) for the other host to come; a link that takes longer is bad
SLOW = 0.25  # (chosen) of the median of all hosts, of each its best link

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


def answer(token: str) -> int:
    """Waits, in a thread, for one host that knows the token, and sends back what it sends.

    Returns: the port to come to.
    """
    server = socket.create_server(("", 0))
    server.settimeout(WAIT_S)
    threading.Thread(target=_echo, args=(server, token), daemon=True).start()
    return server.getsockname()[1]


def _echo(server: socket.socket, token: str) -> None:
    try:
        with server:
            sock, _ = server.accept()
        line = Line(sock)
        try:
            while True:
                for message in line.receive():
                    if message.get("token") != token:
                        return
                    line.send({"echo": message["data"]})
        finally:
            line.close()
    except OSError:
        return  # the other side reports it


def reach(address: str, token: str) -> float:
    """Sends data to a host that answers, and compares what comes back. Returns MB/s, both ways.

    Raises: OSError when it cannot be reached in time; ValueError when other bytes come back.
    """
    data = random.Random(2).randbytes(ECHO_BYTES // 2).hex()
    line = dial(address)
    try:
        best, end = float("inf"), time.monotonic() + WAIT_S
        for _ in range(ECHOES):
            began = time.perf_counter()
            line.send({"token": token, "data": data})
            back: list[dict] = []
            while not back:
                if time.monotonic() > end:
                    raise TimeoutError(f"no answer in {WAIT_S:g} s")
                back = line.receive()
            best = min(best, time.perf_counter() - began)
            if zlib.crc32(back[0].get("echo", "").encode()) != zlib.crc32(data.encode()):
                raise ValueError("other bytes come back than were sent")
    finally:
        line.close()
    return 2 * ECHO_BYTES / best / 1e6


def failing(links: Mapping[Pair, float | str]) -> dict[str, str]:
    """Returns {host: why} of those that are to blame. links: MB/s, or what is wrong."""
    mine: dict[str, list[Pair]] = {}
    for pair in links:
        for host in pair:
            mine.setdefault(host, []).append(pair)
    speed = {p: 0.0 if isinstance(f, str) else f for p, f in links.items()}
    # Of each host the best link: one bad host makes two links of three slow.
    usual = statistics.median([max(speed[p] for p in own) for own in mine.values()] or [0.0])
    bad = {p for p, f in links.items() if isinstance(f, str) or f < SLOW * usual}
    found = {}
    for host, pairs in mine.items():
        others = [p[0] if p[1] == host else p[1] for p in pairs]
        if bad.issuperset(pairs) and all(set(mine[o]) - bad for o in others):
            said = links[pairs[0]]
            how = said if isinstance(said, str) else f"{said:.3g} MB/s, usually {usual:.3g}"
            found[host] = f"links to {', '.join(others)}: {how}"
    return found
