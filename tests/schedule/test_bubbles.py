"""Idle time: found, accounted by cause, and filled."""

import random

import pytest

from megajax.schedule import bubbles, build
from megajax.schedule.bubbles import Bubble
from megajax.schedule.ir import Task
from megajax.schedule.simulator import lockstep, simulate

UNIT = {"F": 1, "B": 2, "W": 1}


def test_causes_on_two_stages():
    """Stage 0: F, waits for the other's F and B, B. Stage 1: waits, F, B, is done early."""
    timeline = simulate(build.one_f_one_b(2, 1), {"F": 1, "B": 2})
    assert bubbles.find(timeline) == [
        Bubble("stage 1", 0, 1, "warm-up"),
        Bubble("stage 0", 1, 4, "wait"),
        Bubble("stage 1", 4, 6, "cool-down"),
    ]
    assert bubbles.account(timeline) == {"warm-up": 1, "wait": 3, "cool-down": 2, "masked": 0}


@pytest.mark.parametrize("name", build.BUILDERS)
@pytest.mark.parametrize("execute", [simulate, lockstep])
def test_causes_add_up_to_the_bubble(name, execute, seed):
    rng = random.Random(seed)
    table = build.BUILDERS[name](3, 6, 2 if name == "interleaved" else 1)
    timeline = execute(table, lambda task: rng.randrange(1, 9))
    idle = timeline.bubble_fraction * 3 * timeline.makespan
    assert sum(bubbles.account(timeline).values()) == pytest.approx(idle)


@pytest.mark.parametrize("name", build.BUILDERS)
def test_lockstep_idles_by_masked_work_only(name):
    """With equal durations a program of one loop body a phase computes all the time."""
    table = build.BUILDERS[name](4, 8, 2 if name == "interleaved" else 1)
    idle = bubbles.account(lockstep(table, UNIT))
    assert idle.pop("masked") > 0 and not any(idle.values())


def test_unequal_durations_let_lockstep_wait():
    timeline = lockstep(build.one_f_one_b(2, 2), lambda t: 3 if t.stage else 1)
    assert bubbles.account(timeline)["wait"] > 0


def task(name, stage, duration, deps=()):
    return Task(name, f"stage {stage}", deps, duration, "EF", 0)


def test_fill_takes_the_first_bubble_that_holds():
    """Stage 0 idles in 1..4, stage 1 in 0..1 and 4..6; nothing is cut or moved."""
    timeline = simulate(build.one_f_one_b(2, 1), {"F": 1, "B": 2})
    tasks = [
        task("a", 0, 2),
        task("b", 0, 2),  # only 3..4 is left
        task("c", 0, 1),
        task("d", 1, 1, ("c",)),  # c ends at 4, so not in 0..1
        task("e", 1, 1, ("b",)),  # b has no place
        task("f", 1, 1, ("F stage 1 chunk 0 microbatch 0",)),
        task("g", 1, 1),
    ]
    fuller, left = bubbles.fill(timeline, tasks)
    assert [t.name for t in left] == ["b", "e"]
    placed = {s.task.name: (s.start, s.end) for s in fuller.spans[len(timeline.spans) :]}
    assert placed == {"a": (1, 3), "c": (3, 4), "d": (4, 5), "f": (5, 6), "g": (0, 1)}
    assert fuller.spans[: len(timeline.spans)] == timeline.spans
    assert fuller.makespan == timeline.makespan and fuller.bubble_fraction == 0


def test_fill_meets_deadlines():
    timeline = simulate(build.one_f_one_b(2, 1), {"F": 1, "B": 2})
    assert bubbles.fill(timeline, [task("a", 1, 1)], {"a": 1})[1] == []
    late = [task("a", 1, 1), task("b", 1, 1)]
    assert bubbles.fill(timeline, late, {"b": 4})[1] == late[1:]


def test_fill_of_masked_work_finds_no_room():
    timeline = lockstep(build.one_f_one_b(2, 1), {"F": 1, "B": 2})
    assert bubbles.fill(timeline, [task("a", 0, 0.5)])[1]


@pytest.mark.parametrize("trial", range(5))
def test_filled_tasks_never_overlap_and_the_rest_really_has_no_place(trial, seed):
    rng = random.Random(seed + trial)
    timeline = simulate(build.zero_bubble(4, 6), UNIT, transfer=rng.randrange(3))
    tasks = []
    for i in range(40):
        deps = (f"t{rng.randrange(i)}",) if i and rng.random() < 0.3 else ()
        tasks.append(task(f"t{i}", rng.randrange(4), rng.randrange(1, 4), deps))
    fuller, left = bubbles.fill(timeline, tasks)
    assert len(fuller.spans) + len(left) == len(timeline.spans) + len(tasks)
    ends = {s.task.name: s.end for s in fuller.spans}
    for resource in timeline.resources:
        spans = sorted((s.start, s.end) for s in fuller.spans if s.task.resource == resource)
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
    for span in fuller.spans[len(timeline.spans) :]:
        assert all(ends[d] <= span.start for d in span.task.deps)
        assert 0 <= span.start and span.end <= timeline.end
    idle = bubbles.find(fuller)
    for t in left:
        ready = max((ends.get(d, timeline.end) for d in t.deps), default=0)
        room = [b.end - max(b.start, ready) for b in idle if b.resource == t.resource]
        assert max(room, default=0) < t.duration
