"""What every stage does at every tick, as arrays that drive a program.

A `Table` says which work runs when. An executor that runs all stages in lockstep must also know
where each value lies meanwhile: the input of a chunk from the tick in which it arrives until its
backward pass, the gradient of its output until that is used. `route` finds places for them by
colouring intervals, so the buffers are as small as the table allows (for 1F1B they do not grow with
the microbatches).

A value is named by the kind whose work takes it: `F`, a chunk's input; `B`, the gradient of its
output. What one lane gives another is named by both kinds, as `EF>F`, the features that an encoder
made of a microbatch, and `B>EB`, their gradient, are. An encoder's values never leave the stage
that runs it: the decoder's embedding reads them there.

A table that changes from step to step runs in one program if its arrays have one shape. `route(...,
like=)` gives them that of another route, with ticks at the end in which nothing runs.

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


@dataclass(frozen=True, eq=False)
class Route:
    """The whole table as arrays.

    cells: the cells of each kind. A stage reads `EF>F` of cells F where it holds the features of
    the microbatch that enters the decoder in this tick, and of cells B where it still holds those
    of the one that leaves it. land: {value: (T, P) a place}: of F and B for what the neighbour sent
    before the tick, of an encoder's values for what the stage makes in the tick. head: (T,) the
    microbatch whose last chunk the last stage finishes in this tick; its gradient goes to the last
    stage's place head_place. embed: (T,) the microbatch that enters the decoder. unembed: (T,) the
    microbatch whose gradient leaves the decoder's first chunk. sizes: (value, places of a stage).
    kinds: the kinds in the order in which they run inside a tick. loops: the ticks, stretch by
    stretch; with an encoder one stretch of all.
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


Read = tuple[str, str, int, Key]  # the kind that reads, the value, the tick, the value's key


def route(
    table: Table,
    backward: bool = True,
    by_chunk: bool = False,
    like: Route | None = None,
) -> Route:
    """Returns the route of a table.

    backward False: its forward half alone, for evaluation. by_chunk: a new loop also begins where a
    chunk of the decoder is used for the first time and where it has been for the last. like: the
    route of a larger table, whose kinds, ticks and places this one gets.
    Raises: ValueError for an encoder that is cut into stages, and for a table that does not fit
    into `like`.
    """
    kinds = {k.name: k for k in table.kinds if backward or k.sends > 0}
    when = {work: tick for work, tick in table.tick_of.items() if work.kind in kinds}
    if like is not None:
        kinds = {k.name: k for k in like.kinds}
    T, P = max(when.values()) + 1, table.stages
    if deep := [lane for lane in table.extra_lanes if lane.stages > 1]:
        raise ValueError(f"{table.name}: {deep[0]}: a stage must have all layers of this network")
    lives, reads, landings = _lives(table, kinds, when)
    places: dict[str, dict[Key, int]] = {}
    sizes = {}
    for value, by_key in lives.items():
        places[value], sizes[value] = _places(by_key, P)
    if like is not None:
        T, sizes = _fitted(table, T, sizes, like)
    nothing = functools.partial(np.full, fill_value=NOTHING, dtype=np.int32)
    names: dict[str, set[str]] = {kind: set() for kind in kinds}
    for kind in kinds:
        names[kind] = {
            v for v in lives if v in (kind, *kinds[kind].reads) or v.endswith(f">{kind}")
        }
    if "EF>F" in lives and "B" in kinds:
        names["B"] |= {"EF>F"}
    cells = {
        kind: Cells(nothing((T, P)), nothing((T, P)), {v: nothing((T, P)) for v in sorted(values)})
        for kind, values in names.items()
    }
    for (kind, stage, chunk, microbatch), tick in when.items():
        cells[kind].chunk[tick, stage], cells[kind].microbatch[tick, stage] = chunk, microbatch
    for kind, value, tick, key in reads:
        cells[kind].places[value][tick, key[0]] = places[value][key]
    land = {value: nothing((T, P)) for value in lives}
    for value, tick, key in landings:
        land[value][tick, key[0]] = places[value][key]
    head, head_place, embed, unembed = (nothing(T) for _ in range(4))
    for microbatch in range(table.microbatches):
        last = table.place("F", -1, microbatch)
        embed[when[table.place("F", 0, microbatch)]] = head[when[last]] = microbatch
        if backward:
            head_place[when[last]] = places["B"][last[1:]]
            unembed[when[table.place("B", 0, microbatch)]] = microbatch
    events = {"E": embed, "H": head, "L": unembed}
    if any(kinds[k].lane != DECODER for k in kinds):
        chunks = tuple(range(table.chunks))
        present = frozenset(events if backward else ("E", "H"))
        loops: tuple[Stretch, ...] = (Stretch(0, T, tuple(kinds), present, len(chunks), chunks),)
    else:
        loops = _loops(table, cells, events, by_chunk)
    runs = tuple(sizes.items()), tuple(kinds.values()), loops
    return Route(cells, land, head, head_place, embed, unembed, *runs)


def _lives(
    table: Table, kinds: Mapping[str, Kind], when: Mapping[Work, int]
) -> tuple[dict[str, dict[Key, tuple[int, int]]], list[Read], list[tuple[str, int, Key]]]:
    """Returns (the first and the last tick of each value's stay on a stage, who reads it when, the
    ticks in which it lands)."""
    lives: dict[str, dict[Key, tuple[int, int]]] = {k: {} for k in kinds if kinds[k].sends}
    reads: list[Read] = []
    landings: list[tuple[str, int, Key]] = []
    readers = {value: [k for k in kinds if value in (k, *kinds[k].reads)] for value in lives}
    inner = {k for k in kinds if kinds[k].lane != DECODER}
    for value in [f"{s}>{k}" for k in kinds for s in kinds[k].sources if s in kinds]:
        source, _, taker = value.partition(">")
        if kinds[source].lane != kinds[taker].lane:
            lives[value] = {}
    for work, tick in when.items():
        # An encoder's first segment begins with pixels, its last gradient with that of features.
        key, start, comes = work[1:], tick, work.kind not in inner
        for needed in table.needs(work):
            made = when[needed]
            if not table.is_sent(needed, work):
                start = made
            elif needed.kind == work.kind:
                start, comes = (made if work.kind in inner else made + 1), True
                landings.append((work.kind, start, key))
            else:
                value = f"{needed.kind}>{work.kind}"
                holder = (needed if needed.kind in inner else work).stage, 0, work.microbatch
                ticks = {work.kind: tick}
                is_last = "EB" not in table.kind_of or not table.groups("EB", work.microbatch)
                if work.kind == "F" and is_last and "B" in kinds:
                    ticks["B"] = when[table.place("B", 0, work.microbatch)]
                lives[value][holder] = made, max(ticks.values())
                landings.append((value, made, holder))
                reads += [(kind, value, at, holder) for kind, at in ticks.items()]
        if work.kind in readers and comes:
            takers = {k: when.get(Work(k, *key)) for k in readers[work.kind]}
            ticks = {k: at for k, at in takers.items() if at is not None}
            lives[work.kind][key] = start, max(ticks.values())
            reads += [(kind, work.kind, at, key) for kind, at in ticks.items()]
    return lives, reads, landings


def _fitted(
    table: Table, ticks: int, sizes: Mapping[str, int], like: Route
) -> tuple[int, dict[str, int]]:
    """Returns the ticks and sizes of `like`. Raises: ValueError where they do not suffice."""
    most, places = sum(loop.ticks for loop in like.loops), dict(like.sizes)
    needed, limits = {"ticks": ticks, **sizes}, {"ticks": most, **places}
    short = [f"{n} {x} of {limits.get(n, 0)}" for n, x in needed.items() if x > limits.get(n, 0)]
    if short:
        raise ValueError(f"{table.name} does not fit: {', '.join(short)}")
    return most, places


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
