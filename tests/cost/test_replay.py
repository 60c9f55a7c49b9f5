"""Replays against graphs solved by hand, and against a clock that looks at every stream in turn."""

import dataclasses
import random
from fractions import Fraction

import pytest

from megajax.core.errors import UserError
from megajax.cost.replay import contention, repeat, replay
from megajax.schedule import build
from megajax.schedule.ir import Task
from megajax.schedule.simulator import simulate


def comp(name, seconds, *deps, on="compute"):
    return Task(name, on, deps, seconds, "F")


def comm(name, seconds, *deps, on="network"):
    return Task(name, on, deps, seconds, "COMM")


# ---- solved by hand


def test_five_tasks_solved_by_hand():
    # a 0-2, gather 2-5 beside b 2-3, c waits for the gather 5-6, scatter 6-8 with nothing beside.
    replayed = replay(
        [
            comp("a", 2.0),
            comm("gather", 3.0, "a"),
            comp("b", 1.0, "a"),
            comp("c", 1.0, "gather", "b"),
            comm("scatter", 2.0, "c"),
        ]
    )
    times = {s.task.name: (s.start, s.end) for s in replayed.timeline.spans}
    assert times == {
        "a": (0, 2),
        "gather": (2, 5),
        "b": (2, 3),
        "c": (5, 6),
        "scatter": (6, 8),
    }
    assert replayed.seconds == 8
    assert replayed.exposed_s == 2 + 2


def test_exposed_is_the_union_of_communication_without_any_computation():
    # Two streams of communication at once, 0-4 and 0-3, count once; computation lies in 1-2.
    replayed = replay(
        [
            comm("long", 4.0, on="network"),
            comm("wait", 1.0, on="other"),
            comm("short", 2.0, "wait", on="other"),
            comp("x", 1.0, "wait"),
        ]
    )
    assert replayed.seconds == 4
    assert replayed.exposed_s == 3
    # A second compute stream covers too, whatever its kind.
    covered = replay([comm("c", 2.0), comp("x", 2.0, on="a"), Task("w", "b", (), 1.0, "W")])
    assert covered.exposed_s == 0


def test_a_stream_keeps_its_order_and_an_empty_step_takes_nothing():
    # b could start at 0, but stands behind a, which waits for the network.
    replayed = replay([comm("n", 3.0), comp("a", 1.0, "n"), comp("b", 1.0)])
    assert (replayed.seconds, replayed.exposed_s) == (5, 3)
    assert (replay([]).seconds, replay([]).exposed_s) == (0, 0)
    zero = replay([comp("a", 0.0), comm("c", 0.0, "a")])
    assert (zero.seconds, zero.exposed_s) == (0, 0)


@pytest.mark.parametrize("microbatches", [1, 4, 7])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_pipeline_takes_its_known_length(stages, microbatches):
    # 1F1B of M micro-batches on S stages: (M + S - 1) (F + B) where transfers cost nothing.
    table = build.one_f_one_b(stages, microbatches)
    spans = simulate(table, {"F": 1.0, "B": 2.0}).spans
    assert replay([s.task for s in spans]).seconds == (microbatches + stages - 1) * 3.0


def test_a_loop_scales_linearly_and_overlaps_its_turns():
    # Each turn computes 2 s; the gather of the next turn's weights takes 1 s beside it.
    body = [comm("gather", 1.0), comp("block", 2.0, "gather")]
    for turns in (1, 2, 50):
        replayed = replay(repeat(body, turns))
        assert replayed.seconds == 1 + 2 * turns
        assert replayed.exposed_s == 1
    # Where the gather waits for the block before it, nothing is hidden.
    serial = [comp("block", 2.0), comm("gather", 1.0, "block")]
    chained = replay(repeat([*serial, comp("end", 0.0, "gather")], 50))
    assert (chained.seconds, chained.exposed_s) == (150, 50)
    outer = replay([comp("before", 5.0), *repeat([comp("x", 1.0, "before")], 3)])
    assert outer.seconds == 8
    assert repeat(body, 0) == []


# ---- against a clock


def clock(tasks):
    """Advances a clock by 1 second at a time; durations are whole. Returns (seconds, exposed)."""
    queues, running, done, now, exposed = {}, {}, set(), 0, 0
    for task in tasks:
        queues.setdefault(task.resource, []).append(task)
    while any(queues.values()) or running:
        for stream, (task, left) in list(running.items()):
            if left == 0:
                done.add(task.name)
                del running[stream]
        moved = True
        while moved:  # a task of 0 seconds ends as it starts
            moved = False
            for stream, queue in queues.items():
                if queue and stream not in running and set(queue[0].deps) <= done:
                    task, moved = queue.pop(0), True
                    if task.duration:
                        running[stream] = task, task.duration
                    else:
                        done.add(task.name)
        kinds = [task.kind == "COMM" for task, _ in running.values()]
        if running:
            now += 1
            exposed += all(kinds)
            running = {s: (t, left - 1) for s, (t, left) in running.items()}
        else:
            assert not any(queues.values()), "deadlock"
    return now, exposed


def drawn(rng):
    """Draws a graph without a cycle; the list's order is one in which all of it can run."""
    streams = [f"s{i}" for i in range(rng.randint(1, 4))]
    tasks = []
    for i in range(rng.randint(1, 14)):
        deps = rng.sample(range(i), min(i, rng.choice((0, 0, 1, 2, 3))))
        kind = rng.choice(("COMM", "F", "B", "COMM"))
        names = tuple(f"t{d}" for d in deps)
        tasks.append(Task(f"t{i}", rng.choice(streams), names, rng.randint(0, 5), kind))
    return tasks


def test_random_graphs_equal_a_clock():
    rng = random.Random("replay")
    for _ in range(400):
        tasks = drawn(rng)
        replayed = replay(tasks)
        assert (replayed.seconds, replayed.exposed_s) == clock(tasks)
        assert replayed.exposed_s <= replayed.seconds
        exact = [
            Task(t.name, t.resource, t.deps, Fraction(t.duration, 3), t.kind) for t in tasks
        ]  # thirds are exact where floats are not
        assert replay(exact).seconds * 3 == replayed.seconds


def test_order_across_streams_means_nothing():
    rng = random.Random("order")
    for _ in range(50):
        tasks = drawn(rng)
        by_stream = sorted(tasks, key=lambda t: t.resource)  # stable: each stream keeps its order
        assert replay(by_stream).seconds == replay(tasks).seconds
        assert replay(by_stream).exposed_s == replay(tasks).exposed_s


# ---- contention


def test_contention_solved_by_hand():
    # Beside the gather, a is 1.5 times slower and the gather 2 times: the gather ends at 4, when a
    # has done 4 / 1.5 of its 4 seconds; the other 4/3 run alone.
    a, gather = comp("a", Fraction(4)), comm("gather", Fraction(2))
    replayed = replay([a, gather], contention(Fraction(3, 2), 2))
    times = {s.task.name: (s.start, s.end) for s in replayed.timeline.spans}
    assert times == {"gather": (0, 4), "a": (0, 4 + Fraction(4, 3))}
    # A task that starts behind the gather's end is as fast as alone, and so is the gather before a.
    later = replay(
        [comp("b", Fraction(1)), a, comm("gather", Fraction(2), "b"), comp("c", Fraction(1))],
        contention(Fraction(3, 2), 2),
    )
    assert later.seconds == 1 + (4 + Fraction(4, 3)) + 1
    assert later.exposed_s == 0


def test_only_tasks_of_one_device_slow_each_other():
    computing = Task("a", "stage 0", (), 4.0, "F", stage=0)
    there = Task("hop", "link", (), 4.0, "COMM", stage=1)
    both = contention(2.0, 2.0)
    assert replay([computing, there], both).seconds == 4
    assert replay([computing, dataclasses.replace(there, stage=0)], both).seconds == 8
    # Two computing streams, or two of communication, do not.
    assert replay([comp("x", 4.0, on="p"), comp("y", 4.0, on="q")], both).seconds == 4
    assert replay([comm("x", 4.0, on="p"), comm("y", 4.0, on="q")], both).seconds == 4


def slow_clock(tasks, computation, communication, tick):
    """Advances a clock by `tick`; in each, a running task does tick / factor of its seconds."""
    queues, left, done, now = {}, {}, set(), 0.0
    for task in tasks:
        queues.setdefault(task.resource, []).append(task)
    while any(queues.values()) or left:
        moved = True
        while moved:
            moved = False
            for name in [t.name for t, seconds in left.values() if seconds <= 1e-9]:
                done.add(name)
                moved = True
            left = {s: (t, seconds) for s, (t, seconds) in left.items() if t.name not in done}
            for stream, queue in queues.items():
                if queue and stream not in left and set(queue[0].deps) <= done:
                    task = queue.pop(0)
                    left[stream] = task, task.duration
                    moved = True
        kinds = {task.kind == "COMM" for task, _ in left.values()}
        for stream, (task, seconds) in left.items():
            slow = communication if task.kind == "COMM" else computation
            left[stream] = task, seconds - tick / (slow if len(kinds) == 2 else 1)
        now += tick if left else 0
    return now


def test_random_graphs_with_contention_equal_a_slow_clock():
    rng = random.Random("contention")
    tick = 1 / 64
    differ = 0
    for _ in range(60):
        tasks = drawn(rng)
        factors = rng.choice((1.0, 1.25, 2.0)), rng.choice((1.0, 1.5, 3.0))
        replayed = replay(tasks, contention(*factors))
        # A task ends at most a tick late, and what follows it with it.
        assert replayed.seconds <= slow_clock(tasks, *factors, tick) + 1e-6
        assert slow_clock(tasks, *factors, tick) <= replayed.seconds + (len(tasks) + 1) * tick
        differ += replayed.seconds > replay(tasks).seconds
        assert replayed.exposed_s <= replayed.seconds
    assert differ > 20


def test_without_contention_the_event_loop_equals_the_order_of_dependencies():
    rng = random.Random("one")
    for _ in range(100):
        tasks = [dataclasses.replace(t, duration=Fraction(t.duration, 3)) for t in drawn(rng)]
        assert replay(tasks, contention(1, 1)).timeline == replay(tasks).timeline


@pytest.mark.parametrize("microbatches", [1, 5])
def test_a_pipeline_with_slow_neighbours(microbatches):
    # Each stage's collective lies beside its computation all the time: everything takes 1.5 times.
    stages = 3
    table = build.one_f_one_b(stages, microbatches)
    spans = simulate(table, {"F": 1.0, "B": 2.0}).spans
    total = (microbatches + stages - 1) * 3.0
    sending = [Task(f"c{s}", f"net {s}", (), 4 * total, "COMM", stage=s) for s in range(stages)]
    replayed = replay([*(s.task for s in spans), *sending], contention(computation=1.5))
    ends = [s.end for s in replayed.timeline.spans if s.task.kind != "COMM"]
    assert max(ends) == pytest.approx(1.5 * total)


def test_impossible_slowdowns_are_refused():
    with pytest.raises(UserError, match="computation=0.5"):
        contention(0.5)
    with pytest.raises(UserError, match="communication=inf"):
        contention(1, float("inf"))
    with pytest.raises(UserError, match="a is slowed 0 times"):
        replay([comp("a", 1.0)], lambda task, others: 0)


# ---- what is refused


def test_cycles_are_refused_by_name():
    with pytest.raises(UserError, match="wait for each other: .*(north -> south|south -> north)"):
        replay([comp("north", 1.0, "south"), comm("south", 1.0, "north"), comp("far", 1.0)])
    with pytest.raises(UserError, match="self -> self"):
        replay([comp("self", 1.0, "self")])
    # By the order of a stream: early stands before late, and needs it through the network.
    crossed = [comp("early", 1.0, "hop"), comp("late", 1.0), comm("hop", 1.0, "late")]
    with pytest.raises(UserError, match="order of its resource") as caught:
        replay(crossed)
    assert all(name in str(caught.value) for name in ("early", "late", "hop"))


def test_unknown_names_doubled_names_and_bad_durations_are_refused():
    with pytest.raises(UserError, match="a depends on ghost, which is no task"):
        replay([comp("a", 1.0, "ghost")])
    with pytest.raises(UserError, match="two tasks have one name: b"):
        replay([comp("a", 1.0), comp("b", 1.0), comm("b", 1.0)])
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="x takes .* finite number"):
            replay([comp("x", bad)])
    with pytest.raises(UserError, match="-1 times"):
        repeat([comp("x", 1.0)], -1)


def test_a_long_step_is_replayed_without_recursion():
    body = [comp("block", 1.0), comm("gather", 0.5, "block")]
    replayed = replay(repeat(body, 5_000))
    assert (replayed.seconds, replayed.exposed_s) == (5_000.5, 0.5)
