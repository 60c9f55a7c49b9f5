"""Many ranks' measured spans on one clock, as one Perfetto file (MegaScale section 6.2).

Each host has its own clock. All hosts leave a barrier within the time that its message takes, so
the moments at which they left the same barriers give each host's offset from the first one: the
median over the barriers, which one late wake-up does not move. Arrows join the two ends of a
transfer. Opens in ui.perfetto.dev; no server.

No jax import.
"""

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Measured:
    """A span of one rank by its own host's clock.

    begin, end: seconds. lane: what runs beside each other on a rank ('host', 'compute', 'send').
    flow: equal for the two ends of a transfer; the earlier end is where its arrow starts.
    """

    host: int
    rank: int
    lane: str
    name: str
    begin: float
    end: float
    step: int = 0
    flow: str | None = None


def offsets(barriers: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Returns what to add to each host's clock to read the first host's.

    barriers: {host: the moments at which it left the same barriers, by its clock}.
    Raises: ValueError when hosts passed different numbers of barriers, or none.
    """
    counts = {len(moments) for moments in barriers.values()}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"every host must have passed the same barriers, one at least: {counts}")
    base = barriers[min(barriers)]
    return {
        host: statistics.median(b - m for b, m in zip(base, moments, strict=True))
        for host, moments in barriers.items()
    }


def merge(spans: Iterable[Measured], offset: Mapping[int, float]) -> list[Measured]:
    """Returns all spans on one clock, by their begin; a host without an offset keeps its own."""
    moved = [
        dataclasses.replace(s, begin=s.begin + offset.get(s.host, 0.0),
                            end=s.end + offset.get(s.host, 0.0))
        for s in spans
    ]  # fmt: skip
    return sorted(moved, key=lambda s: (s.begin, s.rank))


def perfetto(spans: Sequence[Measured]) -> dict[str, Any]:
    """Returns Chrome trace events: a process for each rank, a thread for each of its lanes."""
    if not spans:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    start = min(s.begin for s in spans)
    lanes = {lane: i for i, lane in enumerate(dict.fromkeys(s.lane for s in spans))}
    events: list[dict[str, Any]] = []
    for rank, host in sorted({(s.rank, s.host) for s in spans}):
        name = {"name": f"rank {rank} (host {host})"}
        events.append({"ph": "M", "pid": rank, "tid": 0, "name": "process_name", "args": name})
        events += [
            {"ph": "M", "pid": rank, "tid": i, "name": "thread_name", "args": {"name": lane}}
            for lane, i in lanes.items()
        ]
    ends: dict[str, list[Measured]] = {}
    for s in spans:
        events.append(
            {
                "ph": "X", "name": s.name, "cat": s.lane, "pid": s.rank, "tid": lanes[s.lane],
                "ts": 1e6 * (s.begin - start), "dur": 1e6 * (s.end - s.begin),
                "args": {"step": s.step},
            }
        )  # fmt: skip
        if s.flow is not None:
            ends.setdefault(s.flow, []).append(s)
    for number, (flow, pair) in enumerate(sorted(ends.items())):
        if len(pair) != 2:  # its other end was not recorded
            continue
        for phase, s in zip("sf", sorted(pair, key=lambda s: s.begin), strict=True):
            arrow = {"ph": phase, "id": number, "name": flow, "cat": "transfer", "pid": s.rank}
            bind = {"bp": "e"} if phase == "f" else {}
            events.append(arrow | bind | {"tid": lanes[s.lane], "ts": 1e6 * (s.begin - start)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(
    path: str | PathLike[str],
    spans: Iterable[Measured],
    barriers: Mapping[int, Sequence[float]],
) -> None:
    """Writes `perfetto` of the spans on the first host's clock."""
    merged = merge(spans, offsets(barriers) if barriers else {})
    Path(path).write_text(json.dumps(perfetto(merged)))
