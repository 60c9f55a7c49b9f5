"""What every stage does at every tick, as arrays that a program can be driven by.

A `Table` says which work runs when. An executor that runs all stages in lockstep must also know
where each value lies meanwhile: the input of a chunk from the tick in which it arrives until its
backward pass, the gradient of its output until that is used. `route` finds places for both by
colouring intervals, so the buffers are as small as the table allows (for 1F1B they do not grow with
the microbatches).

Legend of arrays: T ticks, P stages. -1: nothing.
"""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megajax.schedule.ir import KINDS, Kind, Table, Work

NOTHING = -1
Key = tuple[int, int, int]  # stage, chunk, microbatch


@dataclass(frozen=True)
class Lane:
    """One kind of work: chunk_TP, microbatch_TP, input_TP and grad_TP (places), each int32."""

    chunk: np.ndarray
    microbatch: np.ndarray
    input: np.ndarray
    grad: np.ndarray


class Stretch(NamedTuple):
    """Ticks that one loop runs.

    kinds: of the work in them; with E where microbatches enter, H where they meet the head and L
    where their gradients leave. chunks: how many chunks, from the first, have
    been used when it ends. done: the chunks whose last weight gradient it makes.
    """

    first: int
    ticks: int
    kinds: frozenset[str]
    chunks: int
    done: tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """The whole table as arrays.

    lanes: of F, B and (if split) W. land_input_TP, land_grad_TP: the place for what arrives from
    the neighbour before the tick. head_T: the microbatch whose last chunk the last stage finishes
    in this tick; its gradient goes to the last stage's head_place_T. embed_T, unembed_T: the
    microbatch that enters, whose first chunk's backward leaves. inputs, grads: places of a stage.
    loops: the ticks, stretch by stretch.
    """

    lanes: Mapping[Kind, Lane]
    land_input: np.ndarray
    land_grad: np.ndarray
    head: np.ndarray
    head_place: np.ndarray
    embed: np.ndarray
    unembed: np.ndarray
    inputs: int
    grads: int
    loops: tuple[Stretch, ...]


def route(table: Table, backward: bool = True, by_chunk: bool = False) -> Route:
    """Returns the route of a table.

    backward False: its forward half alone, for evaluation. by_chunk: a new loop also begins where a
    chunk is used for the first time and where it has been for the last.
    """
    when = {work: tick for work, tick in table.tick_of.items() if backward or work.kind == "F"}
    kinds: list[Kind] = [k for k in KINDS if any(work.kind == k for work in when)]
    T, P = max(when.values()) + 1, table.stages
    keys = [(work.stage, work.chunk, work.microbatch) for work in when if work.kind == "F"]

    def arrives(kind: Kind, key: Key) -> int | None:
        """The tick before which the key's value comes from a neighbour; None: made in place."""
        source = table.needs(Work(kind, *key))
        return when[source] + 1 if source is not None and source.kind == kind else None

    def life(kind: Kind, key: Key) -> tuple[int, int]:
        start = arrives(kind, key)
        start = when[Work("F", *key)] if start is None else start  # embedded, or its loss taken
        return start, when[Work(kinds[-1], *key)]

    input_of, inputs = _places({k: life("F", k) for k in keys}, P)
    grad_of, grads = _places({k: life("B", k) for k in keys}, P) if backward else ({}, 0)
    empty = np.full((T, P), NOTHING, np.int32)
    lanes = {k: Lane(*(empty.copy() for _ in range(4))) for k in kinds}
    for work, tick in when.items():
        lane, stage = lanes[work.kind], work.stage
        key = (stage, work.chunk, work.microbatch)
        lane.chunk[tick, stage], lane.microbatch[tick, stage] = work.chunk, work.microbatch
        lane.input[tick, stage] = input_of[key]
        lane.grad[tick, stage] = grad_of.get(key, NOTHING)
    land_input, land_grad = empty.copy(), empty.copy()
    head, head_place, embed, unembed = (np.full(T, NOTHING, np.int32) for _ in range(4))
    last = P - 1, table.chunks - 1
    for key in keys:
        stage, chunk, microbatch = key
        tick = when[Work("F", *key)]
        if (landing := arrives("F", key)) is not None:
            land_input[landing, stage] = input_of[key]
        else:
            embed[tick] = microbatch
            if backward:
                unembed[when[Work("B", *key)]] = microbatch
        if (stage, chunk) == last:
            head[tick], head_place[tick] = microbatch, grad_of.get(key, NOTHING)
        elif backward and (landing := arrives("B", key)) is not None:
            land_grad[landing, stage] = grad_of[key]
    loops = _loops(lanes, {"E": embed, "H": head, "L": unembed}, by_chunk)
    return Route(
        lanes, land_input, land_grad, head, head_place, embed, unembed, inputs, grads, loops
    )


def _places(lives: dict[Key, tuple[int, int]], stages: int) -> tuple[dict[Key, int], int]:
    """Gives each value the lowest place that is free from its first to its last tick."""
    found: dict[Key, int] = {}
    most = 0
    for stage in range(stages):
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        used = 0
        mine: Iterable = sorted((life, key) for key, life in lives.items() if key[0] == stage)
        for (start, end), key in mine:
            while busy and busy[0][0] < start:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, used)
                used += 1
            found[key] = heapq.heappop(free)
            heapq.heappush(busy, (end, found[key]))
        most = max(most, used)
    return found, most


def _loops(
    lanes: Mapping[Kind, Lane], events: Mapping[str, np.ndarray], by_chunk: bool
) -> tuple[Stretch, ...]:
    """Cuts the ticks where the set of kinds changes. A loop with any event has it in every tick."""
    busy = np.stack([(lane.chunk >= 0).any(1) for lane in lanes.values()])
    starts, ends = _spans(list(lanes.values()))
    cuts = {0, *(1 + np.flatnonzero((busy[:, 1:] != busy[:, :-1]).any(0))), busy.shape[1]}
    if by_chunk:
        cuts |= {*starts, *(end + 1 for end in ends)}
    edges = sorted(int(tick) for tick in cuts)
    loops = []
    for a, b in zip(edges, edges[1:], strict=False):
        kinds = {kind for kind, works in zip(lanes, busy[:, a], strict=True) if works}
        kinds |= {event for event, number in events.items() if (number[a:b] >= 0).any()}
        used = sum(start < b for start in starts)
        done = tuple(c for c, end in enumerate(ends) if a <= end < b)
        loops.append(Stretch(a, b - a, frozenset(kinds), used, done))
    return tuple(loops)


def _spans(lanes: list[Lane]) -> tuple[list[int], list[int]]:
    """Returns the first and the last tick of each chunk's work on any stage."""
    first, last = lanes[0].chunk, lanes[-1].chunk
    chunks = range(first.max() + 1)
    ticks = [[np.flatnonzero((lane == c).any(1)) for c in chunks] for lane in (first, last)]
    return [int(t[0]) for t in ticks[0]], [int(t[-1]) for t in ticks[1]]
