"""Tasks, timelines and tick tables: the one form of a schedule, planned, executed or measured.

A `Table` says in which tick which stage computes what; build.py makes it, simulator.py gives it
times, parallel/pipeline.py executes the same object, bubbles.py and trace.py read the `Timeline`.

A table is LOCKSTEP (one program on all stages, papers' asynchronous schedules made synchronous). A
`Kind` describes one kind of work, and a `Lane` the network that it works on: the decoder's F
(forward), B (backward) and W (weight gradient, where a table splits it off), and an encoder's EF
and EB, whose outputs enter the decoder (Optimus, arXiv 2408.03505). In a tick a stage runs at most
one slot of each kind, in the order of `Table.kinds`. What a slot sends, to another group of layers
or to another lane, can be used from the next tick on. What stays on its stage can be used in the
same tick: B may follow the F of the last group, because the loss stands between them.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import Literal, NamedTuple

import numpy as np

DECODER, ENCODER = "decoder", "encoder"

# What a stage does in a tick of a kind that it has no work of: 'mask': it computes, and the result
# is thrown away. 'skip': nothing, so a tick takes as long as the work of its fullest stage.
Idle = Literal["mask", "skip"]


@dataclass(frozen=True)
class Kind:
    """One kind of a table's work.

    lane: the name of the network that it works on. sends: 1 if its result goes to the lane's next
    group of layers, -1 if to the previous one, 0 if it stays. sources: the kinds whose results
    start it, as far as a table has them. The first work of a chain (along `sends`) needs the last
    work of each source, and a kind that sends nothing needs the source's work on the same group.
    reads: the kinds of its lane whose inputs it reads besides its own input; these are kept until
    then. includes: the kinds that it does the work of in a table without them.
    """

    name: str
    lane: str
    sends: int
    sources: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    includes: tuple[str, ...] = ()


F = Kind("F", DECODER, 1, sources=("EF",))
B = Kind("B", DECODER, -1, sources=("F",), reads=("F",), includes=("W",))
W = Kind("W", DECODER, 0, sources=("B",), reads=("F", "B"))
EF = Kind("EF", ENCODER, 1)
EB = Kind("EB", ENCODER, -1, sources=("B",), reads=("EF",))


class Lane(NamedTuple):
    """A network that microbatches pass through, cut into stages x chunks groups of layers.

    Chunk c of stage s is the group c * stages + s. Where a lane has fewer stages than its table,
    the table's stages hold copies of it, each on `stages` neighbours, and a microbatch passes
    through one of the copies.
    """

    name: str
    stages: int
    chunks: int


@dataclass(frozen=True)
class Task:
    """A piece of work on one resource ('stage 2', 'link 1-2').

    deps: names of the tasks that must end before it starts. duration: seconds. microbatch, stage,
    chunk: -1 where the task has none. kind: the name of a table's `Kind`, or 'COMM' (a transfer),
    'GEN' (generation). release: seconds before which it does not start.
    """

    name: str
    resource: str
    deps: tuple[str, ...]
    duration: float
    kind: str
    microbatch: int = -1
    stage: int = -1
    chunk: int = -1
    release: float = 0


class Span(NamedTuple):
    """A task with its times in seconds."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Tasks with the times at which they ran. resources: those whose idle time counts (the stages,
    not the links). masked: lockstep work whose result is thrown away; the device is busy with it,
    yet it counts as idle (there is none where idle slots are skipped).
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
        available = len(self.resources) * self.makespan
        return 1 - busy / available if available else 0.0

    def to_perfetto(self, path: str | PathLike[str]) -> None:
        """Writes the JSON that ui.perfetto.dev and chrome://tracing open."""
        from megajax.schedule import trace  # it imports this module

        trace.write_perfetto(self, path)


class Work(NamedTuple):
    """What a slot computes, without its tick."""

    kind: str
    stage: int
    chunk: int
    microbatch: int


class Slot(NamedTuple):
    """One entry of a table."""

    tick: int
    stage: int
    kind: str
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
    """A static lockstep schedule.

    stages: the stages of the decoder, each on a group of devices. chunks: the chunks of the decoder
    on each stage. slots: Slot tuples, which are sorted into the order in which they run. kinds: the
    kinds of the slots, in the order in which they run inside a tick. extra_lanes: the lanes besides
    the decoder. encoder_work: for each microbatch the (forward, backward) segments of its encoder,
    which are the chunks of EF and EB; a stage has all layers of the encoder, and a microbatch's
    segments are on one stage. (n, 0): a frozen encoder, (0, 0): no images. (): all microbatches
    have the chunks of the encoder's lane, if there is one. With encoder_work, kinds and extra_lanes
    that lack the encoder get it.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    slots: tuple[Slot, ...]
    kinds: tuple[Kind, ...] = (F, B)
    extra_lanes: tuple[Lane, ...] = ()
    encoder_work: tuple[tuple[int, int], ...] = ()

    def __post_init__(self):
        if self.encoder_work:
            self._add_encoder()
        rank = {kind.name: i for i, kind in enumerate(self.kinds)}
        slots = itertools.starmap(Slot, self.slots)
        ordered = sorted(slots, key=lambda s: (*s[:2], rank.get(s.kind, -1), *s[3:]))
        object.__setattr__(self, "slots", tuple(ordered))

    def _add_encoder(self) -> None:
        work = tuple((int(f), int(b)) for f, b in self.encoder_work)
        if len(work) != self.microbatches or any(f < 0 or b not in (0, f) for f, b in work):
            raise ValueError(
                f"{self.name}: encoder_work={work} must have a pair (n, n), (n, 0) or (0, 0) for "
                f"each of {self.microbatches} microbatches"
            )
        kinds, names = self.kinds, {kind.name for kind in self.kinds}
        if "EF" not in names:
            kinds = (EF, *kinds)
        if "EB" not in names and any(b for _, b in work):
            kinds = (*kinds, EB)
        lanes = self.extra_lanes
        if ENCODER not in {lane.name for lane in lanes}:
            lanes = (*lanes, Lane(ENCODER, 1, max(1, *(f for f, _ in work))))
        for name, value in (("encoder_work", work), ("kinds", kinds), ("extra_lanes", lanes)):
            object.__setattr__(self, name, value)

    @property
    def ticks(self) -> int:
        """How many ticks it takes."""
        return self.slots[-1].tick + 1 if self.slots else 0

    @property
    def units(self) -> int:
        """The time it takes if all slots take equally long: in lockstep a tick costs as many units
        as its fullest stage has slots."""
        counts = Counter((slot.tick, slot.stage) for slot in self.slots)
        fullest: dict[int, int] = {}
        for (tick, _), count in counts.items():
            fullest[tick] = max(fullest.get(tick, 0), count)
        return sum(fullest.values())

    @cached_property
    def tick_of(self) -> dict[Work, int]:
        """The tick of all work."""
        return {slot.work: slot.tick for slot in self.slots}

    @cached_property
    def kind_of(self) -> dict[str, Kind]:
        """The table's kinds by name, in the order in which they run inside a tick."""
        return {kind.name: kind for kind in self.kinds}

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The decoder and the extra lanes."""
        return Lane(DECODER, self.stages, self.chunks), *self.extra_lanes

    @cached_property
    def lane_of(self) -> dict[str, Lane]:
        """The lane of each kind."""
        lanes = {lane.name: lane for lane in self.lanes}
        return {kind.name: lanes[kind.lane] for kind in self.kinds}

    @cached_property
    def copy_of(self) -> dict[tuple[str, int], int]:
        """{(lane, microbatch): the copy of the lane that the microbatch passes through}."""
        copies: dict[tuple[str, int], int] = {}
        for _, stage, kind, _, microbatch in self.slots:
            lane = self.lane_of[kind]
            copies.setdefault((lane.name, microbatch), stage // lane.stages)
        return copies

    @cached_property
    def is_split(self) -> bool:
        """Whether W stands apart from B; if not, B computes both gradients."""
        return "W" in self.kind_of

    def groups(self, kind: str, microbatch: int) -> int:
        """Returns on how many groups of its lane's layers a kind works for a microbatch."""
        lane = self.lane_of[kind]
        if lane.name == ENCODER and self.encoder_work:
            return self.encoder_work[microbatch][self.kind_of[kind].sends < 0]
        return lane.stages * lane.chunks

    def place(self, kind: str, group: int, microbatch: int) -> Work:
        """Returns the work of a kind on a group of its lane's layers; -1 is the last group."""
        lane = self.lane_of[kind]
        group = self.groups(kind, microbatch) - 1 if group < 0 else group
        chunk, stage = divmod(group, lane.stages)
        copy = self.copy_of.get((lane.name, microbatch), 0)
        return Work(kind, copy * lane.stages + stage, chunk, microbatch)

    def needs(self, work: Work) -> tuple[Work, ...]:
        """Returns the work whose results `work` takes."""
        kind, lane = self.kind_of[work.kind], self.lane_of[work.kind]
        group = work.chunk * lane.stages + work.stage % lane.stages
        before = group - kind.sends
        if kind.sends and 0 <= before < self.groups(work.kind, work.microbatch):
            return (self.place(work.kind, before, work.microbatch),)
        sources = [
            self.kind_of[name]
            for name in kind.sources
            if name in self.kind_of and self.groups(name, work.microbatch)
        ]
        if not kind.sends:
            return tuple(self.place(source.name, group, work.microbatch) for source in sources)
        ends = {1: -1, 0: group, -1: 0}  # the last group that a source works on
        return tuple(self.place(s.name, ends[s.sends], work.microbatch) for s in sources)

    def is_sent(self, result: Work, to: Work) -> bool:
        """Whether a result travels to the work that takes it, and is there a tick later."""
        return result.kind == to.kind or self.lane_of[result.kind] != self.lane_of[to.kind]

    def check(self) -> int:
        """Refuses a table that cannot be executed.

        Returns: the greatest number of the decoder's chunk inputs that any stage keeps at once.
        Raises: ValueError naming the slots: work that is missing, doubled or out of range, a
          result used before it is there, two ops of a kind on one stage in one tick, a microbatch
          in two copies of a lane. ValueError naming kinds or lanes that do not fit each other.
        """
        lanes, earlier = {lane.name for lane in self.lanes}, set[str]()
        for lane in self.lanes:
            if lane.stages < 1 or lane.chunks < 1 or self.stages % lane.stages:
                raise ValueError(
                    f"{self.name}: {lane} must have at least 1 chunk, and stages that divide the "
                    f"table's {self.stages}"
                )
        for kind in self.kinds:
            if kind.lane not in lanes:
                raise ValueError(f"{self.name}: {kind.name} has no lane {kind.lane!r}")
            sources = (self.kind_of[name] for name in kind.sources if name in self.kind_of)
            local = {*kind.reads, *(s.name for s in sources if s.lane == kind.lane)}
            if late := sorted(local - earlier):
                raise ValueError(
                    f"{self.name}: {kind.name} takes what {late[0]} leaves on its stage, so "
                    f"{late[0]} must be a kind before it; the kinds are {', '.join(self.kind_of)}"
                )
            earlier.add(kind.name)
        places: dict[tuple[int, int, str], Slot] = {}
        for slot in self.slots:
            lane = self.lane_of.get(slot.kind)
            sizes = range(self.stages), range(lane.chunks if lane else 0), range(self.microbatches)
            numbers = slot.stage, slot.chunk, slot.microbatch
            if slot.tick < 0 or any(n not in size for n, size in zip(numbers, sizes, strict=True)):
                raise ValueError(f"{self.name}: {tuple(slot)} is out of range")
            if (
                slot.chunk
                >= self.groups(slot.kind, slot.microbatch) / self.lane_of[slot.kind].stages
            ):
                raise ValueError(
                    f"{self.name}: {tuple(slot)} is out of range: the microbatch has the encoder's "
                    f"work {self.encoder_work[slot.microbatch]}"
                )
            if self.tick_of[slot.work] != slot.tick:
                raise ValueError(
                    f"{self.name}: {tuple(slot)} runs again in tick {self.tick_of[slot.work]}"
                )
            if other := places.get(slot[:3]):
                raise ValueError(f"{self.name}: {tuple(other)} and {tuple(slot)} share a place")
            places[slot[:3]] = slot
        required = {
            self.place(kind, group, microbatch)
            for kind in self.kind_of
            for microbatch in range(self.microbatches)
            for group in range(self.groups(kind, microbatch))
        }
        for slot in self.slots:
            if slot.work not in required:
                other = next(
                    s
                    for s in self.slots
                    if s.microbatch == slot.microbatch
                    and self.lane_of[s.kind] == self.lane_of[slot.kind]
                )
                raise ValueError(
                    f"{self.name}: {tuple(slot)} and {tuple(other)} are in two copies of the "
                    f"{self.lane_of[slot.kind].name}; a microbatch passes through one"
                )
        if missing := sorted(required - self.tick_of.keys()):
            raise ValueError(f"{self.name}: {', '.join(map(str, missing[:4]))} missing")
        for slot in self.slots:
            for needed in self.needs(slot.work):
                earliest = self.tick_of[needed] + self.is_sent(needed, slot.work)
                if slot.tick < earliest:
                    raise ValueError(
                        f"{self.name}: {tuple(slot)} needs {needed}, there from tick {earliest} on"
                    )
        return max(self.live())

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
        by_tick = (tuple(k for k in self.kind_of if k in kinds) for kinds in present)
        runs = ((kinds, len(list(run))) for kinds, run in itertools.groupby(by_tick))
        phases, first = [], 0
        for kinds, ticks in runs:
            phases.append(Phase(first, ticks, kinds))
            first += ticks
        return phases

    def live(self, kind: str = "F") -> tuple[int, ...]:
        """Returns the greatest number of a kind's inputs that each stage keeps at once.

        An input counts from its work until the last work that reads it: for F until B, or until W
        where B and W are split. `route` finds the places where inputs lie.
        """
        readers = [k.name for k in self.kinds if kind in k.reads]
        changes = np.zeros((self.stages, self.ticks + 1), np.int64)
        for tick, stage, name, chunk, microbatch in self.slots:
            if name == kind:
                changes[stage, tick] += 1
                reads = [Work(reader, stage, chunk, microbatch) for reader in readers]
                ends = (self.tick_of[work] for work in reads if work in self.tick_of)
                changes[stage, max(ends, default=tick) + 1] -= 1
        return tuple(changes.cumsum(1).max(1).tolist())
