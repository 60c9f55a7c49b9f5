"""Simulates the tasks of a step on streams: its time, and the communication that nothing hides.

A stream runs its tasks one after the other, such as the compute stream or the communication stream
of a GPU (or one of each for every stage of a pipeline). A task starts when the tasks that it
depends on have ended. CDMPP (arXiv 2311.09690) calls this a replay of the graph of a model's
operations. The times come from the simulator of schedules (schedule/simulator.py), for which a
stream is a task's resource. `contention` lets computation and communication of one device slow each
other down while both run.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from megajax.core.errors import UserError
from megajax.schedule import simulator
from megajax.schedule.ir import Task, Timeline
from megajax.schedule.simulator import Slowdown


@dataclasses.dataclass(frozen=True)
class Replay:
    """What a replay gives. timeline: the tasks with their times in seconds, in the order given."""

    timeline: Timeline

    @property
    def seconds(self) -> float:
        """Seconds from 0, when every stream is free, until the last task ends."""
        return self.timeline.end

    @property
    def exposed_s(self) -> float:
        """Seconds in which some COMM task runs and no task of another kind runs on any stream.

        Two COMM tasks at one time count once. For several devices this is the time in which none of
        them computes; replay a device's tasks alone for its own.
        """
        moving, busy = [], []
        for task, start, end in self.timeline.spans:
            (moving if task.kind == "COMM" else busy).append((start, end))
        return _uncovered(_union(moving), _union(busy))


def replay(tasks: Sequence[Task], slowdown: Slowdown | None = None) -> Replay:
    """Runs each stream's tasks in the order given, each as soon as all its deps have ended.

    Args: tasks: `resource` is the stream; kind 'COMM' is communication, any other kind computes.
      slowdown: how many times longer a task takes beside the others that run, such as
      `contention`; None: no task slows another.
    Raises: UserError naming the tasks, where a name stands twice, a dependency is no task, a
      duration is negative or not finite, a slowdown is less than 1, or tasks wait for each other
      through their dependencies and the order of their streams.
    """
    for task in tasks:
        if not 0 <= task.duration < math.inf:
            raise UserError(
                f"{task.name} takes {task.duration} s; a duration is a finite number, at least 0"
            )
    computing = dict.fromkeys(task.resource for task in tasks if task.kind != "COMM")
    return Replay(simulator.run(tasks, tuple(computing), slowdown))


def contention(computation: float = 1.0, communication: float = 1.0) -> Slowdown:
    """Returns how computation and communication of one device slow each other while both run.

    Both move bytes through one memory, and collectives take SMs. A task slows another one only
    where both have the same `stage`.

    Args: computation: factor on the time of computing tasks beside communication; communication:
      the other way round. At least 1; 1 is none.
    Raises: UserError on other factors.
    """
    for name, factor in (("computation", computation), ("communication", communication)):
        if not 1 <= factor < math.inf:
            raise UserError(f"{name}={factor} of a contention must be a finite number, at least 1")

    def factor_of(task: Task, others: Sequence[Task]) -> float:
        is_sent = task.kind == "COMM"
        meets = any((o.kind == "COMM") != is_sent and o.stage == task.stage for o in others)
        return (communication if is_sent else computation) if meets else 1

    return factor_of


def repeat(body: Sequence[Task], times: int) -> list[Task]:
    """Returns the tasks of a loop's iterations in order, for `replay`; 'x#2' is 'x' of number 2.

    Iterations are numbered from 0. A dependency on a task of the body is one on the task of the
    same iteration; other dependencies do not change. Each stream runs the iterations in order, so
    the communication of one may run beside the computation of the next if no dependency forbids it.
    Raises: UserError where `times` is negative.
    """
    if times < 0:
        raise UserError(f"a loop turns {times} times; at least 0")
    inside = {task.name for task in body}
    return [
        dataclasses.replace(
            task,
            name=f"{task.name}#{number}",
            deps=tuple(f"{d}#{number}" if d in inside else d for d in task.deps),
        )
        for number in range(times)
        for task in body
    ]


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns intervals in order that do not touch and cover the same points."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def _uncovered(
    intervals: Sequence[tuple[float, float]], by: Sequence[tuple[float, float]]
) -> float:
    """Returns the length of `intervals` outside `by`; both as `_union` gives them."""
    total, index = 0.0, 0
    for start, end in intervals:
        while index < len(by) and by[index][1] <= start:
            index += 1
        at = index
        while start < end and at < len(by) and by[at][0] < end:
            total += max(by[at][0] - start, 0)
            start = max(start, by[at][1])
            at += 1
        total += max(end - start, 0)
    return total
