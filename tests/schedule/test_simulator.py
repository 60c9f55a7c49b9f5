"""The simulator against an event simulation that shares no code with it, and against all orders."""

import dataclasses
import heapq
import itertools
import random
from collections import defaultdict
from fractions import Fraction

import pytest

import megajax.schedule
from megajax.core.errors import UserError
from megajax.schedule import build
from megajax.schedule.ir import Task
from megajax.schedule.simulator import lockstep, run, simulate

# ---- the oracle: stages that react to events; an op is (kind, stage, chunk, microbatch)


def source(op, stages, chunks):
    """Where an op's input comes from."""
    kind, s, c, m = op
    if kind == "W":
        return "B", s, c, m
    if kind == "F":
        return ("F", s - 1, c, m) if s else ("F", stages - 1, c - 1, m) if c else None
    if s < stages - 1:
        return "B", s + 1, c, m
    return ("B", 0, c + 1, m) if c < chunks - 1 else ("F", s, c, m)


def happen(orders, chunks, seconds, transfer=0):
    """Plays events in the order of time; returns {op: (start, end)}."""
    stages = len(orders)
    queues = [list(order)[::-1] for order in orders]
    made, received, times = {None}, set(), {}
    events = [(0, 0, made, None)]
    number, busy_until, link_until = itertools.count(1), [0] * stages, defaultdict(int)
    users = defaultdict(set)
    for op in itertools.chain(*orders):
        if (needed := source(op, stages, chunks)) is not None:
            users[needed].add(op[1])
    while events:
        now, _, where, op = heapq.heappop(events)
        where.add(op)
        for user in users[op] if where is made else ():
            if user != op[1]:
                link = op[1], user
                link_until[link] = max(link_until[link], now) + transfer
                heapq.heappush(events, (link_until[link], next(number), received, op))
        for s, queue in enumerate(queues):
            if queue and busy_until[s] <= now:
                needed = source(queue[-1], stages, chunks)
                is_own = needed is None or needed[1] == s
                if needed in (made if is_own else received):
                    started = queue.pop()
                    busy_until[s] = now + seconds(started)
                    times[started] = now, busy_until[s]
                    heapq.heappush(events, (busy_until[s], next(number), made, started))
    assert not any(queues), "deadlock"
    return times


def orders_of(table):
    return [
        [(k, s, c, m) for _, s, k, c, m in table.slots if s == stage]
        for stage in range(table.stages)
    ]


def megatron_orders(stages, microbatches, chunks):
    """The order of Megatron-LM's forward_backward_pipelining functions, from its own counts."""
    total = microbatches * chunks
    orders = []
    for s in range(stages):
        warm = stages - s - 1 if chunks == 1 else 2 * (stages - s - 1) + (chunks - 1) * stages
        warm = min(warm, total)

        def forward(k, s=s):
            inside = k % (stages * chunks)
            return "F", s, inside // stages, k // (stages * chunks) * stages + inside % stages

        def backward(k, s=s):
            kind, s, c, m = forward(k, s)
            return "B", s, chunks - 1 - c, m

        order = [forward(k) for k in range(warm)]
        for k in range(total - warm):
            order += [forward(warm + k), backward(k)]
        orders.append(order + [backward(k) for k in range(total - warm, total)])
    return orders


def makespan(times):
    return max(end for _, end in times.values())


def as_times(timeline):
    return {
        (s.task.kind, s.task.stage, s.task.chunk, s.task.microbatch): (s.start, s.end)
        for s in timeline.spans
        if s.task.kind != "COMM"
    }


# ---- makespans

GRID = [
    (s, m, v)
    for s in (2, 4, 8)
    for v in (1, 2, 3)
    for m in range(s, 3 * s + 1)
    if v == 1 or m % s == 0
]


@pytest.mark.parametrize(("s", "m", "v"), GRID)
def test_interleaved_takes_what_the_formula_says(s, m, v):
    """(M + (S - 1) / v)(tf + tb), exactly, in both executions and in Megatron's own order."""
    tf, tb = 6.0, 12.0  # thirds and halves are exact
    table = build.interleaved(s, m, v) if m % s == 0 else build.one_f_one_b(s, m)
    expected = (m + Fraction(s - 1, v)) * 18
    timeline = megajax.schedule.simulate(table, {"F": tf, "B": tb})
    assert timeline.makespan == expected
    assert lockstep(table, {"F": tf, "B": tb}).makespan == expected
    assert abs(timeline.bubble_fraction - Fraction(s - 1, v) / (m + Fraction(s - 1, v))) < 1e-12

    def seconds(op):
        return {"F": tf, "B": tb}[op[0]] / v

    assert makespan(happen(megatron_orders(s, m, v), v, seconds)) == expected
    assert makespan(happen(orders_of(table), v, seconds)) == expected


@pytest.mark.parametrize("name", build.BUILDERS)
@pytest.mark.parametrize(("s", "m"), [(1, 3), (2, 2), (2, 6), (3, 3), (4, 8), (4, 12)])
@pytest.mark.parametrize("transfer", [0, 3, 40])
def test_every_start_equals_the_event_simulation(name, s, m, transfer, seed):
    """With a random duration for each op; links that are slower than stages queue."""
    rng = random.Random(seed)
    table = build.BUILDERS[name](s, m, 2 if name in ("gpipe", "interleaved") else 1)
    spent = {slot.work: rng.randrange(1, 20) for slot in table.slots}

    def seconds(task):
        return spent[task.kind, task.stage, task.chunk, task.microbatch]

    timeline = simulate(table, seconds, transfer)
    assert as_times(timeline) == happen(orders_of(table), table.chunks, spent.get, transfer)
    links = [x for x in timeline.spans if x.task.kind == "COMM"]
    groups = s * table.chunks
    assert len(links) == (2 * (groups - 1) * m if transfer and s > 1 else 0)
    if not transfer:
        assert timeline.makespan <= lockstep(table, seconds).makespan


def test_a_sender_does_not_wait():
    """Two stages, two micro-batches: F 1 starts before F 0 has arrived."""
    timeline = simulate(build.one_f_one_b(2, 2), {"F": 1, "B": 2}, transfer=5)
    starts = {x.task.name: x.start for x in timeline.spans}
    assert starts["F stage 0 chunk 0 microbatch 1"] == 1
    assert starts["F stage 1 chunk 0 microbatch 0"] == 6
    assert timeline.resources == ("stage 0", "stage 1")


# ---- all orders of tiny cases


def optimum(stages, microbatches, durations):
    """The least makespan of any order of any stage's ops; exhaustive, cut by a lower bound."""
    kinds = sorted(durations)
    ops = list(itertools.product(kinds, range(stages), [0], range(microbatches)))
    best, seen = [float("inf")], set()

    def extend(ends):
        if len(ends) == len(ops):
            best[0] = min(best[0], max(ends.values()))
            return
        free = [max((e for o, e in ends.items() if o[1] == s), default=0) for s in range(stages)]
        remaining = [
            sum(durations[o[0]] for o in ops if o[1] == s and o not in ends) for s in range(stages)
        ]
        state = tuple(ends.get(op) for op in ops)
        if state in seen or max(f + r for f, r in zip(free, remaining, strict=True)) >= best[0]:
            return
        seen.add(state)
        for op in ops:
            needed = source(op, stages, 1)
            if op not in ends and (needed is None or needed in ends):
                start = max(free[op[1]], ends.get(needed, 0))
                extend({**ends, op: start + durations[op[0]]})

    extend({})
    return best[0]


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize(("tf", "tb"), [(1, 2), (1, 1), (3, 1)])
def test_gpipe_and_1f1b_reach_the_optimum(m, tf, tb):
    best = optimum(2, m, {"F": tf, "B": tb})
    assert best == (m + 1) * (tf + tb)
    for builder in (build.gpipe, build.one_f_one_b):
        assert simulate(builder(2, m), {"F": tf, "B": tb}).makespan == best


@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize(("tf", "tb", "tw"), [(1, 1, 1), (2, 1, 3), (1, 2, 2), (1, 2, 1)])
def test_zero_bubble_reaches_the_optimum_of_split_backwards(m, tf, tb, tw):
    """But for one second where B is longer than F and W and there are 3 micro-batches."""
    durations = {"F": tf, "B": tb, "W": tw}
    best = optimum(2, m, durations)
    missed = 1 if (tf, tb, tw, m) == (1, 2, 1, 3) else 0
    assert simulate(build.zero_bubble(2, m), durations).makespan == best + missed
    for builder in (build.gpipe, build.one_f_one_b):
        assert simulate(builder(2, m), durations).makespan > best


@pytest.mark.parametrize(("s", "m"), [(2, 1), (2, 4), (4, 2), (4, 4), (4, 9), (8, 8), (8, 24)])
def test_zero_bubble_against_1f1b(s, m):
    """tf = tb = tw: ZB-H1's (S - 1)(tf + tb - tw) of idle time; lockstep saves (S - 1) tw."""
    durations = {"F": 1, "B": 1, "W": 1}
    split, joined = build.zero_bubble(s, m), build.one_f_one_b(s, m)
    assert simulate(joined, durations).makespan == 3 * (m + s - 1)
    assert simulate(split, durations).makespan <= 3 * (m + s - 1)
    if m >= s:
        assert simulate(split, durations).makespan == 3 * m + s - 1
    assert lockstep(split, {"F": 5, "B": 7, "W": 3}).makespan == (m + s - 1) * 12 + 3 * m


# ---- lockstep, durations, errors


@pytest.mark.parametrize("name", build.BUILDERS)
def test_lockstep_adds_up_the_slowest_of_each_part(name, seed):
    rng = random.Random(seed)
    table = build.BUILDERS[name](3, 6, 2 if name == "interleaved" else 1)
    spent = {slot.work: rng.randrange(1, 20) for slot in table.slots}
    timeline = lockstep(table, lambda t: spent[t.kind, t.stage, t.chunk, t.microbatch])
    parts = defaultdict(list)
    for slot in table.slots:
        parts[slot.tick, "FBW".index(slot.kind)].append(slot)
    now, expected = 0, {}
    for _, slots in sorted(parts.items()):
        expected |= {slot.work: (now, now + spent[slot.work]) for slot in slots}
        now += max(spent[slot.work] for slot in slots)
    assert timeline.makespan == now
    assert as_times(timeline) == expected
    assert len(timeline.masked) == len(table.free())


@pytest.mark.parametrize("name", build.BUILDERS)
def test_lockstep_that_skips_adds_up_the_fullest_stages(name, seed):
    rng = random.Random(seed)
    table = build.BUILDERS[name](3, 6, 2 if name == "interleaved" else 1)
    spent = {slot.work: rng.randrange(1, 20) for slot in table.slots}
    timeline = lockstep(table, lambda t: spent[t.kind, t.stage, t.chunk, t.microbatch], "skip")
    now, expected = 0, {}
    for tick in range(table.ticks):
        ends = [now] * table.stages
        for slot in sorted(table.slots, key=lambda s: "FBW".index(s.kind)):
            if slot.tick == tick:
                end = ends[slot.stage] + spent[slot.work]
                expected[slot.work] = ends[slot.stage], end
                ends[slot.stage] = end
        now = max(ends)
    assert as_times(timeline) == expected and timeline.makespan == now
    assert not timeline.masked


def test_durations_are_of_all_chunks_and_exact():
    table = build.interleaved(2, 2, 3)
    timeline = simulate(table, {"F": Fraction(1), "B": Fraction(2), "W": Fraction(1, 2)})
    assert {s.task.duration for s in timeline.spans} == {Fraction(1, 3), Fraction(5, 6)}
    assert timeline.makespan == (2 + Fraction(1, 3)) * Fraction(7, 2)


def test_bad_durations_are_refused():
    with pytest.raises(UserError, match="zero_bubble needs 'W' too"):
        simulate(build.zero_bubble(2, 2), {"F": 1, "B": 1})
    with pytest.raises(UserError, match="at least 0"):
        lockstep(build.gpipe(2, 2), {"F": 1, "B": -1})


def test_run_refuses_what_cannot_run():
    a = Task("a", "x", ("b",), 1.0, "F")
    b = Task("b", "x", (), 1.0, "B")
    with pytest.raises(ValueError, match="wait for each other: .*a"):
        run([a, b], ("x",))
    with pytest.raises(ValueError, match="a depends on b, which is no task"):
        run([a], ("x",))
    with pytest.raises(ValueError, match="two tasks have one name"):
        run([b, b], ("x",))
    assert run([b, a], ("x",)).makespan == 2


@pytest.mark.parametrize("slowdown", [None, lambda task, others: 1 + len(others)])
def test_a_release_is_a_task_that_takes_as_long(slowdown, seed):
    """On a resource of its own, where nothing slows it and it slows nothing."""
    rng = random.Random(seed)
    for _ in range(20):
        tasks, twins, waits = [], [], []
        for k in range(8):
            deps = tuple({f"{rng.randrange(k)}" for _ in range(rng.randrange(3))} if k else ())
            release, resource = Fraction(rng.randrange(30)), f"r{rng.randrange(3)}"
            task = Task(f"{k}", resource, deps, Fraction(rng.randrange(9)), "F", release=release)
            tasks.append(task)
            waits.append(Task(f"wait {k}", f"wait {k}", (), release, "wait"))
            deps = (*deps, f"wait {k}")
            twins.append(dataclasses.replace(task, deps=deps, release=0))

        def among_twins(task, others):
            if task.kind == "wait":
                return 1
            return slowdown(task, [other for other in others if other.kind != "wait"])

        expected = run([*twins, *waits], (), slowdown and among_twins)
        timeline = run(tasks, (), slowdown)
        assert [s[1:] for s in timeline.spans] == [s[1:] for s in expected.spans[:8]]
