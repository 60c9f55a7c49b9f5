"""Tables with an encoder's lane, made by hand: order, places, times, idle time, charts.

The encoder's EF of a microbatch comes before the decoder's first F of it, its EB after the last B.
"""

import dataclasses
import itertools
import random
from collections import defaultdict

import jax
import pytest

from megajax.schedule import bubbles, build, trace
from megajax.schedule.encoder import place
from megajax.schedule.ir import EB, EF, ENCODER, B, F, Kind, Lane, Slot, Table, W
from megajax.schedule.route import route
from megajax.schedule.simulator import lockstep, simulate
from tests.schedule.test_route import replay

# Two stages, each with a whole encoder: microbatch 0 is encoded on stage 0, 1 on stage 1.
COPIES = Table(
    "copies", 2, 2, 1,
    (
        Slot(0, 0, "EF", 0, 0), Slot(0, 1, "EF", 0, 1),
        Slot(1, 0, "F", 0, 0),
        Slot(2, 0, "F", 0, 1), Slot(2, 1, "F", 0, 0), Slot(2, 1, "B", 0, 0),
        Slot(3, 1, "F", 0, 1), Slot(3, 1, "B", 0, 1), Slot(3, 0, "B", 0, 0),
        Slot(4, 0, "B", 0, 1), Slot(4, 0, "EB", 0, 0),
        Slot(5, 1, "EB", 0, 1),
    ),
    (EF, F, B, EB), (Lane(ENCODER, 1, 1),),
)  # fmt: skip


def chain(kind, first, stages, chunk_of, microbatch):
    """Slots of one microbatch, a tick after each other."""
    return [Slot(first + i, stage, kind, chunk_of(i), microbatch) for i, stage in enumerate(stages)]


# Four stages hold two copies of an encoder with two stages and two chunks; W is split off.
DEEP = Table(
    "deep",
    4,
    2,
    1,
    (
        *chain("EF", 0, (2, 3, 2, 3), lambda i: i // 2, 0),
        *chain("EF", 0, (0, 1, 0, 1), lambda i: i // 2, 1),
        *(s for m in range(2) for s in chain("F", 4 + m, range(4), lambda i: 0, m)),
        *(s for m in range(2) for s in chain("B", 7 + m, (3, 2, 1, 0), lambda i: 0, m)),
        *(Slot(10 + m, s, "W", 0, m) for m in range(2) for s in range(4)),
        *chain("EB", 11, (3, 2, 3, 2), lambda i: 1 - i // 2, 0),
        *chain("EB", 12, (1, 0, 1, 0), lambda i: 1 - i // 2, 1),
    ),
    (EF, F, B, W, EB),
    (Lane(ENCODER, 2, 2),),
)
# Only the decoder is trained: the encoder has no backward pass.
FROZEN = dataclasses.replace(
    DEEP, slots=tuple(s for s in DEEP.slots if s.kind != "EB"), kinds=(EF, F, B, W)
)
# All of the encoder's work is on stage 0, and what the lanes give each other waits there.
WAITING = dataclasses.replace(
    COPIES,
    slots=(
        Slot(0, 0, "EF", 0, 0),
        Slot(1, 0, "EF", 0, 1),
        Slot(8, 0, "EB", 0, 0),
        Slot(9, 0, "EB", 0, 1),
        *(s._replace(tick=s.tick + 2) for s in COPIES.slots if s.kind in "FB"),
    ),
)
TABLES = [COPIES, DEEP, FROZEN, WAITING]
# A kind that the schedule knows nothing of: an optimizer's update after each B.
UPDATED = dataclasses.replace(
    build.one_f_one_b(2, 1),
    slots=(*build.one_f_one_b(2, 1).slots, Slot(1, 1, "U", 0, 0), Slot(2, 0, "U", 0, 0)),
    kinds=(F, B, Kind("U", "decoder", 0, sources=("B",), reads=("F",))),
)


def is_valid(table):
    """The order of work by inequalities, microbatch by microbatch; no code of the schedule."""
    places = [slot[:3] for slot in table.slots]
    if len(set(places)) < len(places):
        return False
    (_, S, chunks), P = table.extra_lanes[0], table.stages
    names = {kind.name for kind in table.kinds}
    when = {slot[1:]: slot.tick for slot in table.slots}
    if len(when) < len(table.slots) or min(when.values()) < 0:
        return False
    for m in range(table.microbatches):
        copies = {s // S for s, k, _, i in when if i == m and k in ("EF", "EB")}
        if len(copies) != 1:
            return False
        copy = copies.pop()
        encoder = [(copy * S + s, c) for c in range(chunks) for s in range(S)]
        decoder = [(s, c) for c in range(table.chunks) for s in range(P)]
        try:
            up = [when[s, "EF", c, m] for s, c in encoder]
            up += [when[s, "F", c, m] for s, c in decoder]
            down = [when[s, "B", c, m] for s, c in decoder[::-1]]
            if "EB" in names:
                down += [when[s, "EB", c, m] for s, c in encoder[::-1]]
            late = [when[s, "W", c, m] - when[s, "B", c, m] for s, c in decoder if "W" in names]
        except KeyError:
            return False
        if any(a >= b for path in (up, down) for a, b in itertools.pairwise(path)):
            return False
        if up[-1] > down[0] or min(late, default=0) < 0:
            return False
    return True


@pytest.mark.parametrize("table", TABLES, ids=["copies", "deep", "frozen", "waiting"])
def test_check_accepts_what_the_inequalities_accept(table, seed):
    """Slots are moved to other ticks, stages and chunks, one or two at a time."""
    assert is_valid(table) and table.check() == max(table.live("F"))
    rng, verdicts = random.Random(seed), []
    for _ in range(400):
        slots = list(table.slots)
        for _ in range(rng.randrange(1, 3)):
            i = rng.randrange(len(slots))
            if rng.random() < 0.8:
                slots[i] = slots[i]._replace(tick=slots[i].tick + rng.choice((-2, -1, 1, 2, 3)))
            else:
                slots[i] = slots[i]._replace(stage=rng.randrange(table.stages))
        moved = dataclasses.replace(table, slots=tuple(slots))
        verdicts.append(is_valid(moved))
        try:
            moved.check()
        except ValueError:
            assert not verdicts[-1], slots
        else:
            assert verdicts[-1], slots
    assert 20 < sum(verdicts) < 380


def moved(table, old, *new):
    assert old in table.slots
    return dataclasses.replace(table, slots=(*(s for s in table.slots if s != old), *new))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            moved(COPIES, (1, 0, "F", 0, 0), (0, 0, "F", 0, 0)),
            r"\(0, 0, 'F', 0, 0\) needs .*'EF', stage=0, .*there from tick 1 on",
        ),
        (
            moved(COPIES, (4, 0, "EB", 0, 0), (3, 0, "EB", 0, 0)),
            r"\(3, 0, 'EB', 0, 0\) needs .*'B', stage=0, .*there from tick 4 on",
        ),
        (
            moved(COPIES, (5, 1, "EB", 0, 1), (5, 0, "EB", 0, 1)),
            "are in two copies of the encoder; a microbatch passes through one",
        ),
        (moved(COPIES, (0, 1, "EF", 0, 1)), "'EF', stage=1, chunk=0, microbatch=1.* missing"),
        (moved(COPIES, (0, 1, "EF", 0, 1), (0, 1, "EF", 1, 1)), "out of range"),
        (dataclasses.replace(COPIES, extra_lanes=()), "EF has no lane 'encoder'"),
        (dataclasses.replace(DEEP, extra_lanes=(Lane(ENCODER, 3, 2),)), "divide the table's 4"),
        (dataclasses.replace(COPIES, kinds=(F, B, EB)), "EB takes what EF leaves on its stage"),
        (dataclasses.replace(COPIES, kinds=(EF, B, F, EB)), "B takes what F .* EF, B, F, EB"),
    ],
)
def test_check_refuses(table, message):
    with pytest.raises(ValueError, match=message):
        table.check()


def loosened(table, rng):
    """The same order with idle ticks strewn in: values wait for the work that takes them."""
    gaps = list(itertools.accumulate(1 + rng.randrange(3) for _ in range(table.ticks)))
    return dataclasses.replace(
        table, slots=tuple(s._replace(tick=gaps[s.tick] - gaps[0]) for s in table.slots)
    )


@pytest.mark.parametrize("is_loose", [False, True])
@pytest.mark.parametrize("table", [COPIES, WAITING], ids=["copies", "waiting"])
def test_every_value_is_where_it_is_read(table, is_loose, seed):
    table = loosened(table, random.Random(seed)) if is_loose else table
    done, plan = replay(table)
    assert sorted(done) == sorted((s.kind, s.stage, s.chunk, s.microbatch) for s in table.slots)
    sizes = dict(plan.sizes)
    assert sizes["F"] >= max(table.live("F"))
    assert {value for value in sizes if ">" in value} == {"EF>F", "B>EB"}
    assert [loop.kinds for loop in plan.loops] == [("EF", "F", "B", "EB")]


def test_an_encoder_that_is_cut_into_stages_has_no_route():
    with pytest.raises(ValueError, match="deep: .*stages=2.*must have all layers"):
        route(DEEP)


def test_routes_of_one_shape():
    """A smaller table gets the ticks, places and kinds of a larger one, and no larger one fits."""
    decoder = build.one_f_one_b(2, 4)
    large = route(place(decoder, [(2, 2)] * 4))
    for work in ([(2, 2)] * 4, [(0, 0)] * 4, [(2, 2), (0, 0), (2, 2), (0, 0)]):
        table = place(decoder, work)
        _, small = replay(table, like=large)
        assert (small.sizes, small.kinds, small.loops) == (large.sizes, large.kinds, large.loops)
        assert jax.tree.structure(vars(small) | {"loops": 0, "kinds": 0}) == jax.tree.structure(
            vars(large) | {"loops": 0, "kinds": 0}
        )
    with pytest.raises(ValueError, match="1f1b does not fit: ticks 1. of"):
        route(place(decoder, [(4, 4)] * 4), like=large)


def test_live_inputs_of_an_encoder():
    """Copy 1 keeps each of its groups' inputs of microbatch 0 until EB; stage 2 has two groups."""
    assert DEEP.live("EF") == (2, 2, 2, 2) and FROZEN.live("EF") == (1, 1, 1, 1)
    assert DEEP.live("F") == (2, 2, 2, 2) and COPIES.live("F") == (2, 1)


def test_phases_and_free_places():
    kinds = [("EF",), ("F",), ("F", "B"), ("B", "EB"), ("EB",)]
    assert [phase.kinds for phase in COPIES.phases] == kinds
    assert [phase.ticks for phase in COPIES.phases] == [1, 1, 2, 1, 1]
    free = [(1, 1, "F"), (2, 0, "B"), (3, 0, "F"), (4, 1, "B"), (4, 1, "EB"), (5, 0, "EB")]
    assert sorted(COPIES.free()) == free


SECONDS = {"F": 1, "B": 2, "EF": 3, "EB": 4}


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        (0, {"EF0": (0, 3), "F0": (3, 4), "F1": (4, 5), "B0": (7, 9), "B1": (10, 12),
             "EB0": (12, 16), "ef1": (0, 3), "f0": (4, 5), "b0": (5, 7), "f1": (7, 8),
             "b1": (8, 10), "eb1": (12, 16)}),
        # F 1 of stage 0 waits for a hop of EF 1, EB 1 for one of B 1.
        (2, {"EF0": (0, 3), "F0": (3, 4), "F1": (5, 6), "B0": (11, 13), "B1": (14, 16),
             "EB0": (16, 20), "ef1": (0, 3), "f0": (6, 7), "b0": (7, 9), "f1": (9, 10),
             "b1": (10, 12), "eb1": (18, 22)}),
    ],
)  # fmt: skip
def test_times_by_hand(transfer, expected):
    """Capitals are stage 0."""
    timeline = simulate(COPIES, SECONDS, transfer)
    names = {
        (s.task.kind if s.task.stage == 0 else s.task.kind.lower()) + str(s.task.microbatch): s[1:]
        for s in timeline.spans
        if s.task.kind != "COMM"
    }
    assert names == expected
    hops = defaultdict(list)
    for span in timeline.spans:
        if span.task.kind == "COMM":
            hops[span.task.resource].append(span[1:])
    if transfer:
        assert hops == {
            "link 1-0": [(3, 5), (9, 11), (12, 14)],  # EF 1, B 0, B 1
            "link 0-1": [(4, 6), (6, 8), (16, 18)],  # F 0, F 1, B 1 to its EB
        }
    else:
        assert not hops


def test_lockstep_by_hand():
    """Ticks of 3, 1, 1 + 2, 1 + 2, 2 + 4 and 4 s; an encoder's chunk takes its part."""
    timeline = lockstep(COPIES, SECONDS)
    assert timeline.makespan == 20 and len(timeline.masked) == len(COPIES.free()) == 6
    starts = {s.task.kind + str(s.task.microbatch): s.start for s in timeline.spans}
    assert starts["EB0"] == 12 and starts["EB1"] == 16
    seconds = {"F": 1, "B": 1, "W": 1, "EF": 2, "EB": 6}
    # Ticks: 4 of EF (1 s), 3 of F, 2 of F and B, B, B and W, one of B, W and EB (3 s), 4 of EB.
    assert lockstep(DEEP, seconds).makespan == 4 * 1 + 3 + 2 * 2 + 1 + 2 + (1 + 1 + 3) + 4 * 3


def test_lockstep_that_skips_by_hand():
    """Stage 1 encodes in tick 1, beside F of stage 0: 3 s if idle slots are skipped, else 3 + 1."""
    late = [slot._replace(tick=1) if slot[1:3] == (1, "EF") else slot for slot in COPIES.slots]
    table = dataclasses.replace(COPIES, slots=tuple(late))
    assert lockstep(table, SECONDS).makespan == 3 + 4 + 3 + 3 + 6 + 4
    timeline = lockstep(table, SECONDS, "skip")
    assert timeline.makespan == 3 + 3 + 3 + 3 + 6 + 4 and not timeline.masked
    assert timeline.bubble_fraction == pytest.approx(1 - 26 / 44)


def test_idle_time_of_an_encoders_table():
    timeline = simulate(COPIES, SECONDS)
    idle = bubbles.account(timeline)
    # Stage 0 waits in 5..7 and 9..10; stage 1 in 3..4 and 10..12.
    assert idle == {"warm-up": 0, "wait": 6, "cool-down": 0, "masked": 0}
    masked = bubbles.account(lockstep(COPIES, SECONDS))
    assert masked["masked"] == 1 + 2 + 1 + 2 + 4 + 4 and masked["wait"] == 0


def test_a_new_kind_needs_data_alone():
    UPDATED.check()
    with pytest.raises(ValueError, match="'U', 0, 0.* needs .*'B', stage=0"):
        moved(UPDATED, (2, 0, "U", 0, 0), (1, 0, "U", 0, 0)).check()
    timeline = simulate(UPDATED, {"F": 1, "B": 2, "U": 5})
    assert timeline.makespan == 11  # F, F, B, B, and U of stage 0
    names = {event["name"] for event in trace.perfetto(timeline)["traceEvents"]}
    assert {"U 0", "F 0", "B 0"} <= names
