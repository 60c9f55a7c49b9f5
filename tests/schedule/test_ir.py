"""Tables: what `check` refuses, what the executor reads; timelines."""

import dataclasses
import random

import pytest

from megajax.schedule import build
from megajax.schedule.ir import Slot, Span, Table, Task, Timeline

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
    tied = {s.op: tick for s, tick in later.items() if s.kind == "F"}
    slots = []
    for slot, tick in later.items():
        needed = table.needs(slot.op)
        is_turn = slot.kind == "B" and needed is not None and needed.kind == "F"
        slots.append(slot._replace(tick=max(tick, tied[needed]) if is_turn else tick))
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
        ((0, 0, "F", 0, 0), [(0, 0, "F", 0, 0), (7, 0, "W", 0, 0)], "missing"),
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
def test_rings_keep_every_value_and_are_least(table, is_loose, seed):
    """Buffers are replayed tick by tick; F writes before B and W of any stage read."""
    table = loosened(table, random.Random(seed)) if is_loose else table
    assert table.check() == table.ring("F")[1] == max(table.live)
    assert table.is_systolic != is_loose or table.stages * table.chunks == 1
    reads = {"F": "W" if table.is_split else "B", "B": "W" if table.is_split else "B", "H": "B"}
    last = table.stages - 1, table.chunks - 1
    for kind, reader in reads.items():
        index, size = table.ring(kind)
        writer = "F" if kind == "H" else kind
        buffer, kept, most = {}, [0] * table.stages, 0
        for tick in range(table.ticks):
            slots = [s for s in table.slots if s.tick == tick]
            if kind == "H":
                slots = [s for s in slots if (s.stage, s.chunk) == last]
            for slot in [s for s in slots if s.kind == writer]:
                buffer[slot.stage, index[slot[1], slot.chunk, slot.microbatch]] = slot.op[1:]
                kept[slot.stage] += 1
            most = max(most, *kept)
            for slot in [s for s in slots if s.kind == reader]:
                place = slot.stage, index[slot.stage, slot.chunk, slot.microbatch]
                assert buffer[place] == slot.op[1:]
                kept[slot.stage] -= 1
        assert size == most and index.max() == size - 1
        assert (index >= 0).all() or kind == "H"


@pytest.mark.parametrize("table", TABLES, ids=lambda t: f"{t.name}-{t.stages}-{t.microbatches}")
def test_arrays_phases_and_free_places_say_what_slots_say(table):
    rebuilt, phases = [], []
    for kind in ("F", "B", "W"):
        array = table.array(kind)
        assert array.dtype == "int32" and array.shape == (table.ticks, table.stages, 2)
        for tick, stage in zip(*(array[..., 0] >= 0).nonzero(), strict=True):
            rebuilt.append(Slot(tick, stage, kind, *array[tick, stage]))
        assert ((array[..., 0] < 0) == (array[..., 1] < 0)).all()
    assert set(rebuilt) == set(table.slots) and len(rebuilt) == len(table.slots)
    for first, ticks, kinds in table.phases:
        phases += [kinds] * ticks
        assert len(phases) == first + ticks
    for tick, kinds in enumerate(phases):
        assert kinds == tuple(k for k in "FBW" if (table.array(k)[tick] >= 0).any())
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
