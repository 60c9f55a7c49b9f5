"""Where a timeline idles, why, and what else could run there.

Causes: 'warm-up' (before a stage's first slot), 'cool-down' (after its last), 'wait' (between, for
a neighbour), 'masked' (lockstep: the device computes what nobody uses, so nothing else fits).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from megajax.schedule.ir import Span, Task, Timeline

Cause = Literal["warm-up", "cool-down", "wait", "masked"]
CAUSES: tuple[Cause, ...] = ("warm-up", "cool-down", "wait", "masked")


@dataclass(frozen=True)
class Bubble:
    """An interval, in seconds, in which a resource does no work whose result is used."""

    resource: str
    start: float
    end: float
    cause: Cause

    @property
    def seconds(self) -> float:
        """The length of the interval."""
        return self.end - self.start


def find(timeline: Timeline) -> list[Bubble]:
    """Returns the idle intervals of the timeline's resources, in the order of their times.

    They add up to bubble_fraction x stages x makespan.
    """
    bubbles = []
    for resource in timeline.resources:
        busy = sorted((s.start, s.end) for s in timeline.spans if s.task.resource == resource)
        masked = sorted((s.start, s.end) for s in timeline.masked if s.task.resource == resource)
        bubbles += [Bubble(resource, start, end, "masked") for start, end in masked]
        first = busy[0][0] if busy else timeline.end
        last = busy[-1][1] if busy else timeline.end
        for start, end in _gaps(sorted(busy + masked), timeline.start, timeline.end):
            cause = "warm-up" if end <= first else "cool-down" if start >= last else "wait"
            bubbles.append(Bubble(resource, start, end, cause))
    return sorted(bubbles, key=lambda b: (b.start, b.resource))


def account(timeline: Timeline) -> dict[Cause, float]:
    """Returns idle seconds by cause, all resources together."""
    bubbles = find(timeline)
    return {cause: sum(b.seconds for b in bubbles if b.cause == cause) for cause in CAUSES}


def fill(
    timeline: Timeline, tasks: Sequence[Task], deadlines: Mapping[str, float] | None = None
) -> tuple[Timeline, list[Task]]:
    """Puts each task, in the order given, into the first bubble of its resource that holds it.

    Nothing that is there moves and the makespan stays. A task starts when its deps have ended (of
    the timeline, or placed before it) and is never cut; masked work leaves no room.
    Args: deadlines: {task name: seconds at which it must have ended}.
    Returns: the fuller timeline; the tasks for which no bubble had room.
    """
    gaps: dict[str, list[tuple[float, float]]] = {}
    for bubble in find(timeline):
        if bubble.cause != "masked":
            gaps.setdefault(bubble.resource, []).append((bubble.start, bubble.end))
    ends = {span.task.name: span.end for span in timeline.spans}
    placed, left = [], []
    for task in tasks:
        room = gaps.get(task.resource, [])
        deadline = (deadlines or {}).get(task.name, timeline.end)
        ready = max((ends.get(d, deadline) for d in task.deps), default=timeline.start)
        holds = (
            i
            for i, (start, end) in enumerate(room)
            if max(start, ready) + task.duration <= min(end, deadline)
        )
        if (i := next(holds, None)) is None:
            left.append(task)
            continue
        start, end = room[i]
        begin = max(start, ready)
        span = Span(task, begin, begin + task.duration)
        pieces = (start, begin), (span.end, end)
        room[i : i + 1] = [(a, b) for a, b in pieces if a < b]
        ends[task.name] = span.end
        placed.append(span)
    return dataclasses.replace(timeline, spans=(*timeline.spans, *placed)), left


def _gaps(
    taken: Sequence[tuple[float, float]], start: float, end: float
) -> list[tuple[float, float]]:
    """Returns what sorted intervals leave of start..end."""
    gaps, now = [], start
    for begin, until in (*taken, (end, end)):
        if begin > now:
            gaps.append((now, begin))
        now = max(now, until)
    return gaps
