"""Gives a table its times: asynchronous, as papers draw it, and lockstep, as one program runs it.

Durations are the seconds of ALL chunks of a stage by kind, so one chunk's work takes its part; or a
function of the task. Seconds may be any exact number too (fractions.Fraction). `run` times any
tasks; there, a task may have a release, and tasks that run at one time may slow each other down, as
copies that share a link do. LLM-PQ's pipelines (systems/llm_pq/problem.py), replays of compiled
programs (cost/replay.py) and the copies of fused kernels (experiments/reports/overlap_simulator.py)
are simulated as such tasks.
"""

import collections
import dataclasses
import graphlib
import heapq
import math
from collections.abc import Callable, Mapping, Sequence

from megajax.core.errors import UserError
from megajax.schedule.ir import Idle, Slot, Span, Table, Task, Timeline, Work

Durations = Mapping[str, float] | Callable[[Task], float]
# (a task, the others that run) -> how many times longer it takes than alone, at least 1
Slowdown = Callable[[Task, Sequence[Task]], float]


def simulate(table: Table, durations: Durations, transfer: float = 0) -> Timeline:
    """Runs each stage's ops in the table's order, each as soon as its inputs are there.

    Args: durations: {'F', 'B', 'W': seconds} or Task -> seconds. A kind takes the seconds of those
      that it includes too: where a table does not split the backward pass, B takes B + W.
      transfer: seconds of a hop between two stages. Sends are
      decoupled (MegaScale section 3.2): the receiver waits for a hop, the sender goes on; a link
      carries one value at a time in each direction.
    Returns: the stages' ops from second 0 on, and the hops on 'link a-b' if transfer > 0.
    Raises: UserError where a duration is missing or negative.
    """
    tasks = _tasks(table, durations)
    receivers: dict[Work, set[int]] = {}
    for work in tasks if transfer else ():
        for needed in table.needs(work):
            if needed.stage != work.stage:
                receivers.setdefault(needed, set()).add(work.stage)
    planned = []
    for slot in table.slots:
        task = tasks[slot.work]
        if transfer:
            deps = (_arrival(needed, slot.stage) for needed in table.needs(slot.work))
            task = dataclasses.replace(task, deps=tuple(deps))
        planned.append(task)
        for stage in sorted(receivers.get(slot.work, ())):
            name, link = _arrival(slot.work, stage), f"link {slot.stage}-{stage}"
            planned.append(Task(name, link, (task.name,), transfer, "COMM", task.microbatch))
    return run(planned, _stages(table))


def lockstep(table: Table, durations: Durations, idle: Idle = "mask") -> Timeline:
    """Runs the table as one SPMD program does: a tick ends when all stages have ended it.

    Hops are taken as hidden.
    Args: idle: 'mask': in every tick of a phase all stages compute all kinds of the phase, one kind
      after the other, and what is no work of theirs is masked work. 'skip': stages compute their
      work alone, so a tick takes as long as the work of its fullest stage.
    Raises: as `simulate`.
    """
    tasks, stages = _tasks(table, durations), _stages(table)
    rank = {kind: i for i, kind in enumerate(table.kind_of)}
    # With 'mask' stages meet after every kind of a tick, with 'skip' after the tick.
    parts: dict[tuple[int, int], list[Slot]] = {}
    for slot in table.slots:
        part = slot.tick, rank[slot.kind] if idle == "mask" else 0
        parts.setdefault(part, []).append(slot)
    spans, masked = [], []
    now: float = 0
    for (tick, _), slots in sorted(parts.items()):
        ends = dict.fromkeys(stages, now)
        for slot in slots:  # of a stage in the order in which they run
            task = tasks[slot.work]
            start = ends[task.resource]
            ends[task.resource] = start + task.duration
            spans.append(Span(task, start, ends[task.resource]))
        begin, now = now, max(ends.values())
        if idle == "skip":
            continue
        kind, busy = slots[0].kind, {slot.stage for slot in slots}
        for stage, resource in enumerate(stages):
            if stage not in busy:
                name = f"masked {kind} stage {stage} tick {tick}"
                nothing = Task(name, resource, (), now - begin, kind, stage=stage)
                masked.append(Span(nothing, begin, now))
    return Timeline(tuple(spans), stages, tuple(masked))


def run(
    tasks: Sequence[Task], resources: tuple[str, ...], slowdown: Slowdown | None = None
) -> Timeline:
    """Returns the times of tasks that each resource takes in the order given.

    Args: resources: those whose idle time counts. slowdown: how many times longer a task takes
      beside the others that run; None: each takes its duration.
    Raises: UserError naming the tasks, where two have one name, a dependency is unknown, tasks
      wait for each other, or a slowdown is less than 1 or not finite.
    """
    by_name = {task.name: task for task in tasks}
    if len(by_name) < len(tasks):
        twice = next(n for n, k in collections.Counter(t.name for t in tasks).items() if k > 1)
        raise UserError(f"two tasks have one name: {twice}")
    waits_for: dict[str, tuple[str, ...]] = {}
    latest: dict[str, tuple[str, ...]] = {}
    for task in tasks:
        if unknown := [dep for dep in task.deps if dep not in by_name]:
            raise UserError(f"{task.name} depends on {min(unknown)}, which is no task")
        waits_for[task.name] = (*task.deps, *latest.get(task.resource, ()))
        latest[task.resource] = (task.name,)
    order = graphlib.TopologicalSorter(waits_for)
    try:
        order.prepare()
    except graphlib.CycleError as error:
        raise UserError(
            f"these tasks wait for each other: {' -> '.join(error.args[1])} (each must end before "
            f"the next one starts, by its dependencies or by the order of its resource)"
        ) from None
    if slowdown is None:
        spans: dict[str, Span] = {}
        while ready := order.get_ready():
            for name in ready:
                start = max((spans[w].end for w in waits_for[name]), default=0)
                start = max(start, by_name[name].release)
                spans[name] = Span(by_name[name], start, start + by_name[name].duration)
            order.done(*ready)
    else:
        spans = _slowed(order, by_name, slowdown)
    return Timeline(tuple(spans[task.name] for task in tasks), resources)


def _slowed(
    order: graphlib.TopologicalSorter, by_name: Mapping[str, Task], slowdown: Slowdown
) -> dict[str, Span]:
    """Returns the spans of tasks that slow each other: from event to event, rates are constant."""
    spans: dict[str, Span] = {}
    starts: dict[str, float] = {}
    left: dict[str, float] = {}  # seconds that running tasks would still take alone
    waiting: list[tuple[float, str]] = []  # (release, name): only their release keeps them
    now: float = 0
    while order.is_active():
        for name in order.get_ready():
            heapq.heappush(waiting, (by_name[name].release, name))
        if not left:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now:
            name = heapq.heappop(waiting)[1]
            starts[name], left[name] = now, by_name[name].duration
        running = [by_name[name] for name in left]
        needed = {}
        factors = {}
        for task in running:
            factor = slowdown(task, [other for other in running if other is not task])
            if not 1 <= factor < math.inf:
                raise UserError(f"{task.name} is slowed {factor} times; it must be 1 or more")
            factors[task.name], needed[task.name] = factor, left[task.name] * factor
        step = min(needed.values())
        if waiting and waiting[0][0] - now < step:
            step, now = waiting[0][0] - now, waiting[0][0]
        else:
            now += step
        for name, seconds in needed.items():
            if seconds <= step:
                del left[name]
                spans[name] = Span(by_name[name], starts[name], now)
                order.done(name)
            else:
                left[name] = max(left[name] - step / factors[name], 0)
    return spans


def _tasks(table: Table, durations: Durations) -> dict[Work, Task]:
    """Returns a task with its duration for all work of the table."""
    out = {}
    for work in table.tick_of:
        deps = tuple(map(_name, table.needs(work)))
        kind, stage, chunk, microbatch = work
        task = Task(_name(work), f"stage {stage}", deps, 0, kind, microbatch, stage, chunk)
        if callable(durations):
            seconds = durations(task)
        elif kind not in durations:
            raise UserError(
                f"durations has {sorted(durations)}, but {table.name} needs {kind!r} too"
            )
        else:
            absent = set(table.kind_of[kind].includes) - table.kind_of.keys()
            seconds = durations[kind] + sum(durations.get(other, 0) for other in absent)
            seconds = seconds / table.lane_of[kind].chunks
        if seconds < 0:
            raise UserError(f"{task.name} takes {seconds} s; a duration is at least 0")
        out[work] = dataclasses.replace(task, duration=seconds)
    return out


def _stages(table: Table) -> tuple[str, ...]:
    return tuple(f"stage {s}" for s in range(table.stages))


def _name(work: Work) -> str:
    return f"{work.kind} stage {work.stage} chunk {work.chunk} microbatch {work.microbatch}"


def _arrival(result: Work, stage: int) -> str:
    """Returns the name of the task after which a result is on a stage."""
    return _name(result) if result.stage == stage else f"hop to stage {stage} of {_name(result)}"
