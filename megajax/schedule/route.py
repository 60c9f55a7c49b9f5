"""What every stage does at every tick, as arrays that drive a program.

A `Table` says which work runs when. An executor that runs all stages in lockstep must also know
where each value lies meanwhile: the input of a chunk from the tick in which it arrives until its
backward pass, the gradient of its output until that is used. `route` finds places for them by
colouring intervals, so the buffers are as small as the table allows (for 1F1B they do not grow with
the microbatches).

A value is named by the kind whose work takes it: `F`, a chunk's input; `B`, the gradient of its
output. What one lane gives another is named by both kinds, as `EF>F` and `B>EB` are.

Legend of arrays: T ticks, P stages. -1: nothing.
"""

import functools
import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megajax.schedule.ir import DECODER, Kind, Table, Work

NOTHING = -1
Array = Any  # of NumPy; in a program that a route is an argument of, of JAX
Key = tuple[int, int, int]  # stage, chunk, microbatch


class Cells(NamedTuple):
    """One kind of work: chunk_TP, microbatch_TP, and {value that it reads: place_TP}; int32."""

    chunk: Array
    microbatch: Array
    places: Mapping[str, Array]


class Stretch(NamedTuple):
    """Ticks that one loop runs.

    kinds: the kinds of the work in them, in the order in which they run inside a tick. events: E
    where microbatches enter the decoder, H where they meet the head and L where their gradients
    leave. chunks: how many of the decoder's chunks, from the first, have been used when it ends.
    done: the decoder's chunks whose last weight gradient it makes.
    """

    first: int
    ticks: int
    kinds: tuple[str, ...]
    events: frozenset[str]
    chunks: int
    done: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """The whole table as arrays.

    cells: the cells of each kind. land: {value: the place for what arrives before the tick}; (T, P)
    if it comes from the neighbour, (T, P, Q) if stage Q of another lane made it. head: (T,) the
    microbatch whose last chunk the last stage finishes in this tick; its gradient goes to the last
    stage's place head_place. embed: (T,) the microbatch that enters the decoder. unembed: (T,) the
    microbatch whose gradient leaves the decoder's first chunk. sizes: (value, places of a stage).
    kinds: the kinds in the order in which they run inside a tick. loops: the ticks, stretch by
    stretch.
    """

    cells: Mapping[str, Cells]
    land: Mapping[str, Array]
    head: Array
    head_place: Array
    embed: Array
    unembed: Array
    sizes: tuple[tuple[str, int], ...]
    kinds: tuple[Kind, ...]
    loops: tuple[Stretch, ...]


def route(table: Table, backward: bool = True, by_chunk: bool = False) -> Route:
    """Returns the route of a table.

    backward False: its forward half alone, for evaluation. by_chunk: a new loop also begins where a
    chunk of the decoder is used for the first time and where it has been for the last.
    """
    kinds = {k.name: k for k in table.kinds if backward or k.sends > 0}
    when = {work: tick for work, tick in table.tick_of.items() if work.kind in kinds}
    T, P = max(when.values()) + 1, table.stages
    lives: dict[str, dict[Key, tuple[int, int]]] = {k: {} for k in kinds if kinds[k].sends}
    landings: dict[str, list[tuple[int, Key, int]]] = {}  # tick, key and the stage that made it
    readers = {value: [k for k in kinds if value in (k, *kinds[k].reads)] for value in lives}
    for work, tick in when.items():
        key, start = work[1:], tick
        for needed in table.needs(work):
            if not table.is_sent(needed, work):
                start = when[needed]  # made in place
                continue
            value, arrival = work.kind, when[needed] + 1
            if needed.kind == work.kind:
                start = arrival
            else:
                value = f"{needed.kind}>{work.kind}"
                lives.setdefault(value, {})[key] = arrival, tick
            landings.setdefault(value, []).append((arrival, key, needed.stage))
        if work.kind in readers:
            reads = [Work(reader, *key) for reader in readers[work.kind]]
            lives[work.kind][key] = start, max(when[read] for read in reads if read in when)
    places: dict[str, dict[Key, int]] = {}
    sizes = []
    for value, by_key in lives.items():
        places[value], size = _places(by_key, P)
        sizes.append((value, size))
    nothing = functools.partial(np.full, fill_value=NOTHING, dtype=np.int32)
    cells = {}
    for kind in kinds:
        read = [v for v in lives if kind in readers.get(v, ()) or v.endswith(f">{kind}")]
        cells[kind] = Cells(nothing((T, P)), nothing((T, P)), {v: nothing((T, P)) for v in read})
    for (kind, stage, chunk, microbatch), tick in when.items():
        cells[kind].chunk[tick, stage], cells[kind].microbatch[tick, stage] = chunk, microbatch
        for value, place in cells[kind].places.items():
            place[tick, stage] = places[value].get((stage, chunk, microbatch), NOTHING)
    land = {value: nothing((T, P) if value in kinds else (T, P, P)) for value in lives}
    for value, arrivals in landings.items():
        for tick, key, source in arrivals:
            at = (tick, key[0]) if value in kinds else (tick, key[0], source)
            land[value][at] = places[value][key]
    head, head_place, embed, unembed = (nothing(T) for _ in range(4))
    for microbatch in range(table.microbatches):
        last = table.place("F", -1, microbatch)
        embed[when[table.place("F", 0, microbatch)]] = head[when[last]] = microbatch
        if backward:
            head_place[when[last]] = places["B"][last[1:]]
            unembed[when[table.place("B", 0, microbatch)]] = microbatch
    loops = _loops(table, cells, {"E": embed, "H": head, "L": unembed}, by_chunk)
    runs = tuple(sizes), tuple(kinds.values()), loops
    return Route(cells, land, head, head_place, embed, unembed, *runs)


def _places(lives: dict[Key, tuple[int, int]], stages: int) -> tuple[dict[Key, int], int]:
    """Gives each value the lowest place that is free from its first to its last tick."""
    places: dict[Key, int] = {}
    most = 0
    for stage in range(stages):
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        used = 0
        of_stage: Iterable = sorted((life, key) for key, life in lives.items() if key[0] == stage)
        for (start, end), key in of_stage:
            while busy and busy[0][0] < start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, used)
                used += 1
            places[key] = heapq.heappop(free)
            heapq.heappush(busy, (end, places[key]))
        most = max(most, used)
    return places, most


def _loops(
    table: Table, cells: Mapping[str, Cells], events: Mapping[str, np.ndarray], by_chunk: bool
) -> tuple[Stretch, ...]:
    """Cuts the ticks where the set of kinds changes. A loop with any event has it in every tick."""
    busy = np.stack([(cell.chunk >= 0).any(1) for cell in cells.values()])
    decoder = [cell.chunk for k, cell in cells.items() if table.kind_of[k].lane == DECODER]
    chunks = range(table.chunks)
    starts = [int(np.flatnonzero((decoder[0] == c).any(1))[0]) for c in chunks]
    ends = [int(np.flatnonzero((decoder[-1] == c).any(1))[-1]) for c in chunks]
    cuts = {0, *(1 + np.flatnonzero((busy[:, 1:] != busy[:, :-1]).any(0))), busy.shape[1]}
    if by_chunk:
        cuts |= {*starts, *(end + 1 for end in ends)}
    edges = sorted(int(tick) for tick in cuts)
    loops = []
    for a, b in itertools.pairwise(edges):
        kinds = tuple(kind for kind, works in zip(cells, busy[:, a], strict=True) if works)
        present = frozenset(e for e, number in events.items() if (number[a:b] >= 0).any())
        used = sum(start < b for start in starts)
        done = tuple(c for c, end in enumerate(ends) if a <= end < b)
        loops.append(Stretch(a, b - a, kinds, present, used, done))
    return tuple(loops)
