"""The route against a replay of the table, value by value."""

import itertools

import numpy as np
import pytest

from megajax.schedule import build
from megajax.schedule.ir import Slot, Table
from megajax.schedule.route import route

CASES = [
    ("gpipe", 3, 4, 1),
    ("gpipe", 2, 4, 2),
    ("1f1b", 4, 5, 1),
    ("1f1b", 2, 1, 1),
    ("interleaved", 2, 4, 3),
    ("interleaved", 4, 8, 2),
    ("zero_bubble", 4, 6, 1),
]


def replay(table, like=None):
    """Walks through the ticks with real buffers; every read must find the value it needs.

    A value is (kind that takes it, group of layers, microbatch). The features that an encoder makes
    are ("EF>F", microbatch), their gradient ("B>EB", microbatch).
    """
    plan, P = route(table, like=like), table.stages
    buffers = {v: [[None] * size for _ in range(P)] for v, size in plan.sizes}
    decoder, encoder = (table.stages, table.chunks), None
    for lane in table.extra_lanes:
        encoder = lane[1:]
    work = table.encoder_work or ((encoder[1],) * 2 if encoder else (0, 0),) * table.microbatches
    trained = {s.microbatch for s in table.slots if s.kind == "EB"}
    homes = {s.microbatch: s.stage for s in table.slots if s.kind == "EF"}
    made, done = {}, []
    for t in range(len(plan.embed)):
        for value in {"F", "B"} & plan.land.keys():
            for s in range(P):
                source = value, (s - (1 if value == "F" else -1)) % P
                if (place := plan.land[value][t, s]) >= 0:
                    buffers[value][s][place] = made[source]
        ran = {(s.stage, s.kind): (s.chunk, s.microbatch) for s in table.slots if s.tick == t}
        made, lands = {}, set()
        for kind, s in itertools.product(plan.cells, range(P)):
            cell = plan.cells[kind]
            places = {v: place[t, s] for v, place in cell.places.items()}
            if kind in ("F", "B"):
                entering, held = plan.embed[t] if kind == "F" else plan.unembed[t], "EF>F"
                place = places.pop(held, -1)
                if place >= 0:
                    assert homes[entering] == s
                    assert buffers[held][s][place] == (held, entering)
                elif entering >= 0 and homes.get(entering) == s:
                    assert kind == "B" and entering in trained
            if (s, kind) not in ran:
                assert {cell.chunk[t, s], cell.microbatch[t, s], *places.values()} <= {-1}
                continue
            c, m = ran[s, kind]
            assert (cell.chunk[t, s], cell.microbatch[t, s]) == (c, m)

            def read(value, places=places, s=s):
                assert places[value] >= 0, (value, s)
                return buffers[value][s][places[value]]

            def land(value, content, t=t, s=s, lands=lands):
                assert plan.land[value][t, s] >= 0, (value, s)
                buffers[value][s][plan.land[value][t, s]] = content
                lands.add((value, s))

            if kind in ("EF", "EB"):
                last = work[m][kind == "EB"] - 1
                if c and (kind == "EF" or m in trained):
                    assert read("EF") == ("EF", c, m)
                if kind == "EF":
                    land(*(("EF", ("EF", c + 1, m)) if c < last else ("EF>F", ("EF>F", m))))
                else:
                    taken = "EB" if c < last else "B>EB"
                    assert read(taken) == (("EB", c, m) if c < last else ("B>EB", m))
                    if c:
                        land("EB", ("EB", c - 1, m))
                done.append((kind, s, c, m))
                continue
            S, chunks = decoder
            g, last = c * S + s % S, S * chunks - 1
            if kind == "F" and g == 0:
                assert plan.embed[t] == m
                buffers["F"][s][places["F"]] = ("F", 0, m)
            if kind == "F" and g == last:
                assert plan.head[t] == m
                buffers["B"][s][plan.head_place[t]] = ("B", g, m)
            if kind == "B" and s == 0:
                assert (plan.unembed[t] == m) == (g == 0)
                if g == 0 and m in trained:
                    buffers["B>EB"][homes[m]][plan.land["B>EB"][t, homes[m]]] = ("B>EB", m)
                    lands.add(("B>EB", homes[m]))
            for value in {"B": "FB", "W": "FB", "F": "F"}.get(kind, ""):
                assert read(value) == (value, g, m)
            made[kind, s] = (kind, g + 1 if kind == "F" else g - 1, m)
            done.append((kind, s, c, m))
        for value in plan.land.keys() - {"F", "B"}:
            for s in range(P):
                assert (plan.land[value][t, s] >= 0) == ((value, s) in lands)
    return done, plan


@pytest.mark.parametrize("name, stages, microbatches, chunks", CASES)
def test_every_value_is_where_it_is_read(name, stages, microbatches, chunks):
    table = build.BUILDERS[name](stages, microbatches, chunks)
    done, plan = replay(table)
    assert sorted(done) == sorted((s.kind, s.stage, s.chunk, s.microbatch) for s in table.slots)
    assert dict(plan.sizes)["F"] == table.check()


def test_values_wait_for_a_slow_neighbour():
    """A table by hand in which activations and gradients lie two ticks before they are used."""
    slots = [(0, 0, "F", 0, 0), (1, 0, "F", 0, 1), (3, 1, "F", 0, 0), (4, 1, "F", 0, 1)]
    slots += [(5, 1, "B", 0, 0), (6, 1, "B", 0, 1), (9, 0, "B", 0, 0), (10, 0, "B", 0, 1)]
    _, plan = replay(Table("slow", 2, 2, 1, tuple(Slot(*s) for s in slots)))
    assert dict(plan.sizes) == {"F": 2, "B": 2}


def test_a_place_that_is_taken_too_early_is_found():
    """The replay itself: one place shared by two living values must fail it."""
    table = build.one_f_one_b(3, 4)
    plan = route(table)
    for cell in plan.cells.values():
        np.minimum(cell.places["F"], 0, out=cell.places["F"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "route", lambda _, like: plan)
        with pytest.raises(AssertionError):
            replay(table)


@pytest.mark.parametrize("microbatches", [8, 16, 64])
def test_buffers_of_1f1b_do_not_grow(microbatches):
    plan = route(build.interleaved(4, microbatches, 2))
    assert dict(plan.sizes)["F"] <= 2 * 2 * 4 and dict(plan.sizes)["B"] == 1


@pytest.mark.parametrize("S, v, M", [(4, 1, 8), (4, 2, 8), (8, 6, 32)])
def test_trip_counts(S, v, M):
    plan = route(build.interleaved(S, M, v))
    assert [(loop.ticks, "".join(loop.kinds)) for loop in plan.loops] == [
        (v * S - 1, "F"),
        (v * M + S - v * S, "FB"),
        (v * S - 1, "B"),
    ]


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("name, stages, microbatches, chunks", CASES)
def test_loops_begin_and_end_with_the_chunks(name, stages, microbatches, chunks, backward):
    """What a loop may use is in `chunks`; what is `done` is never worked on again."""
    table = build.BUILDERS[name](stages, microbatches, chunks)
    slots = [s for s in table.slots if backward or s.kind == "F"]
    loops = route(table, backward, by_chunk=True).loops
    tick, open_before, finished = 0, 0, []
    for loop in loops:
        assert loop.first == tick and loop.ticks > 0
        tick += loop.ticks
        within = [s for s in slots if loop.first <= s.tick < tick]
        assert set(loop.kinds) == {s.kind for s in within}
        assert {s.chunk for s in within} <= set(range(loop.chunks)) - set(finished)
        # A loop that uses a chunk first uses it in its first tick: it never waits for nothing.
        new = {s.chunk for s in within if s.tick == loop.first} & set(range(open_before, chunks))
        assert new == set(range(open_before, loop.chunks))
        finished += loop.done
        open_before = loop.chunks
    assert sorted(finished) == list(range(chunks)) == list(range(open_before))
    last = slots[-1].kind if not backward else "W" if table.is_split else "B"
    for loop in loops:
        for chunk in loop.done:
            ends = max(s.tick for s in slots if s.chunk == chunk and s.kind == last)
            assert ends == loop.first + loop.ticks - 1


def test_warm_up_and_cool_down_open_and_finish_a_chunk_at_a_time():
    loops = route(build.interleaved(8, 32, 6), by_chunk=True).loops
    assert [loop.ticks for loop in loops] == [8] * 5 + [7, 152, 7] + [8] * 5
    assert [loop.chunks for loop in loops] == [1, 2, 3, 4, 5, 6] + [6] * 7
    assert [loop.done for loop in loops[7:]] == [(5,), (4,), (3,), (2,), (1,), (0,)]
    assert ["E" in loop.events for loop in loops[:7]] == [True] + [False] * 5 + [True]
    assert ["L" in loop.events for loop in loops[6:]] == [True] + [False] * 5 + [True]


def test_the_forward_half_alone():
    plan = route(build.interleaved(2, 4, 2), backward=False)
    assert set(plan.cells) == set(dict(plan.sizes)) == set(plan.land) == {"F"}
    assert sorted(plan.head[plan.head >= 0]) == [0, 1, 2, 3]
