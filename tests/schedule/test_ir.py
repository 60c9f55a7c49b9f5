"""Tables: what `check` refuses, what the executor reads; timelines."""

import dataclasses
import random

import pytest

from megajax.schedule import build
from megajax.schedule.ir import Span, Table, Task, Timeline

TABLES = [
    build.gpipe(3, 4),
    build.gpipe(2, 4, 2),
    build.one_f_one_b(4, 8),
    build.one_f_one_b(4, 2),
    build.interleaved(2, 6, 3),
    build.interleaved(1, 3, 2),
    build.zero_bubble(4, 8),
    build.zero_bubble(3, 2),
]
SMALL = build.one_f_one_b(2, 3)


def replace(table, old, *new):
    """The table with one slot changed for others."""
    assert old in table.slots
    return dataclasses.replace(table, slots=(*(s for s in table.slots if s != old), *new))


def loosened(table, rng):
    """The same order with idle ticks strewn in and every W later: valid, but not systolic."""
    later = {s: 3 * s.tick + rng.randrange(2) + (9 if s.kind == "W" else 0) for s in table.slots}
    tied = {s.work: tick for s, tick in later.items() if s.kind == "F"}
    slots = []
    for slot, tick in later.items():
        turns = [tied[n] for n in table.needs(slot.work) if slot.kind == "B" and n.kind == "F"]
        slots.append(slot._replace(tick=max(tick, *turns) if turns else tick))
    return dataclasses.replace(table, slots=tuple(slots))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ((2, 1, "F", 0, 1), [], "microbatch=1.* missing"),
        ((1, 1, "B", 0, 0), [(1, 1, "B", 0, 0), (9, 1, "B", 0, 0)], "runs again in tick 9"),
        ((1, 0, "F", 0, 1), [(1, 0, "F", 0, 1)] * 2, "share a place"),
        ((1, 0, "F", 0, 1), [(0, 0, "F", 0, 1)], r"\(0, 0, 'F', 0, 0\) and .* share a place"),
        ((1, 1, "F", 0, 0), [(0, 1, "F", 0, 0)], r"\(0, 1, 'F', 0, 0\) needs .*tick 1 on"),
        ((2, 0, "B", 0, 0), [(1, 0, "B", 0, 0)], r"\(1, 0, 'B', 0, 0\) needs .*tick 2 on"),
        ((3, 1, "B", 0, 2), [(0, 1, "B", 0, 2)], r"\(0, 1, 'B', 0, 2\) needs .*tick 3 on"),
        ((0, 0, "F", 0, 0), [(-1, 0, "F", 0, 0)], "out of range"),
        ((0, 0, "F", 0, 0), [(0, 0, "F", 1, 0)], "out of range"),
        ((0, 0, "F", 0, 0), [(0, 0, "G", 0, 0)], "out of range"),
        ((0, 0, "F", 0, 0), [(0, 0, "F", 0, 0), (7, 0, "W", 0, 0)], r"'W', 0, 0\) is out of range"),
    ],
)
def test_check_refuses(old, new, message):
    SMALL.check()
    with pytest.raises(ValueError, match=message):
        replace(SMALL, old, *new).check()


def test_check_refuses_weights_before_their_gradient():
    table = build.zero_bubble(2, 3)
    table.check()
    with pytest.raises(ValueError, match=r"\(1, 0, 'W', 0, 0\) needs"):
        replace(table, (2, 0, "W", 0, 0), (1, 0, "W", 0, 0)).check()


def test_check_refuses_a_chunk_before_its_predecessor():
    """Chunk 1 of stage 0 takes what the last stage made of chunk 0, a tick later."""
    table = build.interleaved(2, 2, 2)
    moved = replace(table, (2, 0, "F", 1, 0), (0, 0, "F", 1, 0))
    swapped = replace(moved, (0, 0, "F", 0, 0), (2, 0, "F", 0, 0))
    with pytest.raises(ValueError, match=r"\(0, 0, 'F', 1, 0\) needs .*stage=1, chunk=0"):
        swapped.check()


def test_slots_run_in_order_and_tables_are_keys():
    shuffled = list(SMALL.slots)
    random.Random(0).shuffle(shuffled)
    again = dataclasses.replace(SMALL, slots=tuple(tuple(s) for s in shuffled))
    assert again == SMALL and hash(again) == hash(SMALL)
    assert SMALL.slots[:3] == ((0, 0, "F", 0, 0), (1, 0, "F", 0, 1), (1, 1, "F", 0, 0))
    at_turn = [s.kind for s in build.zero_bubble(1, 1).slots]
    assert at_turn == ["F", "B", "W"]


@pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.name}-{t.stages}-{t.microbatches}")
@pytest.mark.parametrize("is_loose", [False, True])
def test_live_inputs_are_counted(table, is_loose, seed):
    """Tick by tick: F takes an input in, then B or W lets it go."""
    table = loosened(table, random.Random(seed)) if is_loose else table
    held, most = [set() for _ in range(table.stages)], [0] * table.stages
    for tick in range(table.ticks):
        slots = [s for s in table.slots if s.tick == tick]
        for slot in [s for s in slots if s.kind == "F"]:
            held[slot.stage].add(slot.work[1:])
        most = [max(m, len(h)) for m, h in zip(most, held, strict=True)]
        for slot in [s for s in slots if s.kind == ("W" if table.is_split else "B")]:
            held[slot.stage].remove(slot.work[1:])
    assert table.live() == tuple(most) and table.check() == max(most)


@pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.name}-{t.stages}-{t.microbatches}")
def test_phases_and_free_places_say_what_slots_say(table):
    phases = []
    for first, ticks, kinds in table.phases:
        phases += [kinds] * ticks
        assert len(phases) == first + ticks
    for tick, kinds in enumerate(phases):
        assert set(kinds) == {s.kind for s in table.slots if s.tick == tick}
    free = table.free()
    assert len(free) + len(table.slots) == sum(map(len, phases)) * table.stages
    assert not {s[:3] for s in table.slots} & set(free)


def test_idle_time_of_a_timeline():
    """Links and masked work count neither as busy nor as stages."""
    a = Span(Task("a", "stage 0", (), 2.0, "F"), 1.0, 3.0)
    hop = Span(Task("h", "link 0-1", ("a",), 1.0, "COMM"), 3.0, 4.0)
    b = Span(Task("b", "stage 1", ("h",), 1.0, "F"), 4.0, 5.0)
    waste = Span(Task("m", "stage 0", (), 2.0, "F"), 3.0, 5.0)
    timeline = Timeline((a, hop, b), ("stage 0", "stage 1"), (waste,))
    assert timeline.makespan == 4.0
    assert timeline.bubble_fraction == 1 - 3 / 8
    assert Table("none", 1, 0, 1, ()).ticks == 0 and Timeline((), ()).bubble_fraction == 0
