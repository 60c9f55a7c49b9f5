"""Tasks, timelines and tick tables: the one form of a schedule, planned, executed or measured.

A `Table` says in which tick which stage computes what; build.py makes it, simulator.py gives it
times, parallel/pipeline.py executes the same object, bubbles.py and trace.py read the `Timeline`.

A table is LOCKSTEP (one program on all stages, papers' asynchronous schedules made synchronous). In
a tick a stage runs at most one F (forward), one B (backward) and one W (weight gradient, where a
table splits it off), in this order. What a tick sends (F its activation to the next chunk, B its
gradient to the previous one) can be used from the next tick on. The model's last chunk sends
nothing: the loss stands between the F and the B part of a tick, so there B may follow F in a tick.
Chunk c of stage s is the layer group c * stages + s.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Literal, NamedTuple

import numpy as np

Kind = Literal["F", "B", "W", "COMM", "ENC", "GEN"]
KINDS = ("F", "B", "W")  # of a table, in the order in which they run inside a tick


@dataclass(frozen=True)
class Task:
    """A piece of work on one resource ('stage 2', 'link 1-2').

    deps: names of the tasks that must end before it starts. duration: seconds. microbatch, stage,
    chunk: -1 where the task has none.
    """

    name: str
    resource: str
    deps: tuple[str, ...]
    duration: float
    kind: Kind
    microbatch: int = -1
    stage: int = -1
    chunk: int = -1


class Span(NamedTuple):
    """A task with its times in seconds."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What ran when.

    resources: those whose idle time counts (the stages, not the links). masked: lockstep work whose
    result is thrown away; the device is busy with it, yet it counts as idle.
    """

    spans: tuple[Span, ...]
    resources: tuple[str, ...]
    masked: tuple[Span, ...] = ()

    @cached_property
    def start(self) -> float:
        """Seconds at which the first task starts."""
        return min((s.start for s in (*self.spans, *self.masked)), default=0)

    @cached_property
    def end(self) -> float:
        """Seconds at which the last task ends."""
        return max((s.end for s in (*self.spans, *self.masked)), default=0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    @property
    def bubble_fraction(self) -> float:
        """Idle time / (stages x makespan), 0..1."""
        busy = sum(s.end - s.start for s in self.spans if s.task.resource in self.resources)
        whole = len(self.resources) * self.makespan
        return 1 - busy / whole if whole else 0.0

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Writes the JSON that ui.perfetto.dev and chrome://tracing open."""
        from megajax.schedule import trace  # it imports this module

        trace.write_perfetto(self, path)


class Work(NamedTuple):
    """What a slot computes, without its tick."""

    kind: Kind
    stage: int
    chunk: int
    microbatch: int


class Slot(NamedTuple):
    """One entry of a table."""

    tick: int
    stage: int
    kind: Kind
    chunk: int
    microbatch: int

    @property
    def work(self) -> Work:
        """The slot without its tick."""
        return Work(self.kind, self.stage, self.chunk, self.microbatch)


class Phase(NamedTuple):
    """A run of ticks in which the same kinds occur: one loop of the executed program."""

    first_tick: int
    ticks: int
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A static lockstep schedule. slots: Slot tuples, kept in the order in which they run."""

    name: str
    stages: int
    microbatches: int
    chunks: int
    slots: tuple[Slot, ...]

    def __post_init__(self):
        ordered = sorted(itertools.starmap(Slot, self.slots), key=_running_order)
        object.__setattr__(self, "slots", tuple(ordered))

    @property
    def ticks(self) -> int:
        """How many ticks it takes."""
        return self.slots[-1].tick + 1 if self.slots else 0

    @cached_property
    def tick_of(self) -> dict[Work, int]:
        """The tick of all work."""
        return {slot.work: slot.tick for slot in self.slots}

    @cached_property
    def is_split(self) -> bool:
        """Whether W stands apart from B; if not, B computes both gradients."""
        return any(slot.kind == "W" for slot in self.slots)

    def needs(self, work: Work) -> Work | None:
        """Returns the work whose result `work` takes; None for the first chunk's F."""
        kind, stage, chunk, microbatch = work
        group = chunk * self.stages + stage
        if kind == "W":
            return Work("B", stage, chunk, microbatch)
        if kind == "B" and group == self.stages * self.chunks - 1:
            return Work("F", stage, chunk, microbatch)
        if kind == "F" and group == 0:
            return None
        chunk, stage = divmod(group - 1 if kind == "F" else group + 1, self.stages)
        return Work(kind, stage, chunk, microbatch)

    def check(self) -> int:
        """Refuses a table that cannot be executed.

        Returns: the greatest number of chunk inputs that any stage keeps at once.
        Raises: ValueError naming the slots: work that is missing, doubled or out of range, a
          result used before it is there, two ops of a kind on one stage in one tick.
        """
        kinds = KINDS if self.is_split else KINDS[:2]
        sizes = range(self.stages), range(self.chunks), range(self.microbatches)
        wanted = set(itertools.starmap(Work, itertools.product(kinds, *sizes)))
        places: dict[tuple[int, int, str], Slot] = {}
        for slot in self.slots:
            if slot.work not in wanted or slot.tick < 0:
                raise ValueError(f"{self.name}: {_spell(slot)} is out of range")
            if self.tick_of[slot.work] != slot.tick:
                raise ValueError(
                    f"{self.name}: {_spell(slot)} runs again in tick {self.tick_of[slot.work]}"
                )
            if other := places.get(slot[:3]):
                raise ValueError(f"{self.name}: {_spell(other)} and {_spell(slot)} share a place")
            places[slot[:3]] = slot
        if missing := sorted(wanted - self.tick_of.keys()):
            raise ValueError(f"{self.name}: {', '.join(map(str, missing[:4]))} missing")
        for slot in self.slots:
            needed = self.needs(slot.work)
            earliest = 0 if needed is None else self.tick_of[needed] + (needed.kind == slot.kind)
            if needed is not None and slot.tick < earliest:
                raise ValueError(
                    f"{self.name}: {_spell(slot)} needs {needed}, there from tick {earliest} on"
                )
        return max(self.live)

    def free(self) -> list[tuple[int, int, str]]:
        """Returns the (tick, stage, kind) that a phase computes but no work uses."""
        used = {slot[:3] for slot in self.slots}
        places = (
            (tick, stage, kind)
            for phase in self.phases
            for tick in range(phase.first_tick, phase.first_tick + phase.ticks)
            for stage in range(self.stages)
            for kind in phase.kinds
        )
        return [place for place in places if place not in used]

    @cached_property
    def phases(self) -> list[Phase]:
        """The maximal runs of ticks with one set of kinds; 1F1B has F, then F and B, then B."""
        present: list[set[str]] = [set() for _ in range(self.ticks)]
        for slot in self.slots:
            present[slot.tick].add(slot.kind)
        by_tick = (tuple(k for k in KINDS if k in kinds) for kinds in present)
        runs = ((kinds, len(list(run))) for kinds, run in itertools.groupby(by_tick))
        found, first = [], 0
        for kinds, ticks in runs:
            found.append(Phase(first, ticks, kinds))
            first += ticks
        return found

    @property
    def live(self) -> tuple[int, ...]:
        """The greatest number of chunk inputs that a stage keeps at once, for each stage: from F
        until B, or until W where B and W are split. Where they lie is `route`'s business."""
        last = "W" if self.is_split else "B"
        kept = np.zeros((self.stages, self.ticks + 1), np.int64)
        for tick, stage, kind, chunk, microbatch in self.slots:
            if kind == "F":
                kept[stage, tick] += 1
                kept[stage, self.tick_of[Work(last, stage, chunk, microbatch)] + 1] -= 1
        return tuple(kept.cumsum(1).max(1).tolist())


def _running_order(slot: Slot) -> tuple[int, int, int, int, int]:
    return slot.tick, slot.stage, "FBW".find(slot.kind), slot.chunk, slot.microbatch


def _spell(slot: Slot) -> str:
    return str(tuple(slot))
