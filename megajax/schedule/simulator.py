"""Gives a table its times: asynchronous, as papers draw it, and lockstep, as one program runs it.

Durations are the seconds of ALL chunks of a stage by kind, so one chunk's work takes its part; or a
function of the task. Seconds may be any exact number too (fractions.Fraction).
"""

import collections
import dataclasses
import graphlib
from collections.abc import Callable, Mapping, Sequence

from megajax.core.errors import UserError
from megajax.schedule.ir import KINDS, Span, Table, Task, Timeline, Work

Durations = Mapping[str, float] | Callable[[Task], float]


def simulate(table: Table, durations: Durations, transfer: float = 0) -> Timeline:
    """Runs each stage's ops in the table's order, each as soon as its inputs are there.

    Args: durations: {'F', 'B', 'W': seconds} or Task -> seconds. Where a table does not split the
      backward pass, B takes B + W. transfer: seconds of a hop between two stages. Sends are
      decoupled (MegaScale section 3.2): the receiver waits for a hop, the sender goes on; a link
      carries one value at a time in each direction.
    Returns: the stages' ops from second 0 on, and the hops on 'link a-b' if transfer > 0.
    Raises: UserError where a duration is missing or negative.
    """
    tasks = _tasks(table, durations)
    sent_to = {
        needed: work.stage
        for work in tasks
        if (needed := table.needs(work)) is not None and needed.stage != work.stage and transfer
    }
    planned = []
    for slot in table.slots:
        task, needed = tasks[slot.work], table.needs(slot.work)
        if needed is not None and sent_to.get(needed) == slot.stage:
            task = dataclasses.replace(task, deps=(_hop_name(tasks[needed]),))
        planned.append(task)
        if slot.work in sent_to:
            link = f"link {slot.stage}-{sent_to[slot.work]}"
            hop = Task(_hop_name(task), link, (task.name,), transfer, "COMM", task.microbatch)
            planned.append(hop)
    return run(planned, _stages(table))


def lockstep(table: Table, durations: Durations) -> Timeline:
    """Runs the table as one SPMD program does: a tick ends when all stages have ended it.

    In every tick of a phase all stages compute all kinds of the phase; what is no work of theirs is
    masked work. Hops are taken as hidden.
    Args and Raises: as `simulate`.
    """
    tasks = _tasks(table, durations)
    parts: dict[tuple[int, str], dict[int, Task]] = {}
    for slot in table.slots:
        parts.setdefault((slot.tick, slot.kind), {})[slot.stage] = tasks[slot.work]
    spans, masked = [], []
    now: float = 0
    for (tick, kind), part in sorted(parts.items(), key=lambda p: (p[0][0], KINDS.index(p[0][1]))):
        slowest = max(part.values(), key=lambda task: task.duration)
        for stage, resource in enumerate(_stages(table)):
            if stage in part:
                spans.append(Span(part[stage], now, now + part[stage].duration))
            else:
                name = f"masked {kind} stage {stage} tick {tick}"
                idle = Task(name, resource, (), slowest.duration, slowest.kind, stage=stage)
                masked.append(Span(idle, now, now + idle.duration))
        now += slowest.duration
    return Timeline(tuple(spans), _stages(table), tuple(masked))


def run(tasks: Sequence[Task], resources: tuple[str, ...]) -> Timeline:
    """Returns the times of tasks that each resource takes in the order given.

    Args: resources: those whose idle time counts.
    Raises: UserError naming the tasks, where two have one name, a dependency is unknown, or tasks
      wait for each other.
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
    ends: dict[str, float] = {}
    spans: dict[str, Span] = {}
    try:
        for name in graphlib.TopologicalSorter(waits_for).static_order():
            start = max((ends[w] for w in waits_for[name]), default=0)
            ends[name] = start + by_name[name].duration
            spans[name] = Span(by_name[name], start, ends[name])
    except graphlib.CycleError as error:
        raise UserError(
            f"these tasks wait for each other: {' -> '.join(error.args[1])} (each must end before "
            f"the next one starts, by its dependencies or by the order of its resource)"
        ) from None
    return Timeline(tuple(spans[task.name] for task in tasks), resources)


def _tasks(table: Table, durations: Durations) -> dict[Work, Task]:
    """Returns a task with its duration for all work of the table."""
    out = {}
    for work in table.tick_of:
        needed = table.needs(work)
        deps = () if needed is None else (_name(needed),)
        kind, stage, chunk, microbatch = work
        task = Task(_name(work), f"stage {stage}", deps, 0, kind, microbatch, stage, chunk)
        out[work] = dataclasses.replace(task, duration=_seconds(table, durations, task))
    return out


def _seconds(table: Table, durations: Durations, task: Task) -> float:
    if callable(durations):
        seconds = durations(task)
    else:
        if task.kind not in durations:
            raise UserError(
                f"durations has {sorted(durations)}, but {table.name} needs {task.kind!r} too"
            )
        joined = durations.get("W", 0) if task.kind == "B" and not table.is_split else 0
        seconds = (durations[task.kind] + joined) / table.chunks
    if seconds < 0:
        raise UserError(f"{task.name} takes {seconds} s; a duration is at least 0")
    return seconds


def _stages(table: Table) -> tuple[str, ...]:
    return tuple(f"stage {s}" for s in range(table.stages))


def _name(work: Work) -> str:
    return f"{work.kind} stage {work.stage} chunk {work.chunk} microbatch {work.microbatch}"


def _hop_name(task: Task) -> str:
    return f"hop after {task.name}"
