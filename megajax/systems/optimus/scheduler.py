"""Places an encoder's kernels in the idle time of a decoder's pipeline (Optimus, algorithm 2).

First the decoder's timeline, kernel by kernel, and its gaps. The coarse schedule runs all forward
passes of the encoder before the decoder starts and all backward passes after it ends. The fine one
moves microbatches, one after the other, into the gaps inside; a kernel is never cut. The i-th
microbatch that leaves the encoder becomes the i-th of the decoder. Backward passes are scheduled as
forward passes are, with time running backwards.

Not modelled: that kernels on SMs and link slow each other, and the memory of the encoder's
activations (as in the paper).

Legend: P stages of the decoder, m pipelines of the encoder on a replica of the decoder.
"""

import dataclasses
import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from megajax.cost.base import Workload
from megajax.schedule import build, simulator
from megajax.schedule.ir import Span, Task, Work
from megajax.search.partition import balance
from megajax.systems.optimus.problem import (
    Degrees,
    Job,
    Kernel,
    Passes,
    encoder_networks,
    even,
    network,
)

SLACK_S = 1e-12  # times that differ by less are equal

# How a step is scheduled: see planner.py, Plan.
Method = Literal["optimus", "decoder", "megatron", "uniform", "balanced"]


# ---- the decoder


Room = tuple[list[float], list[float]]  # sorted gaps of a resource: their starts, their ends
Chain = tuple[Kernel, ...]


class Backbone:
    """A pipeline's timeline: each stage's kernels, and when microbatches enter and leave.

    groups: the passes of each group of layers; chunk c of stage s is the group c * P + s. load: the
    network whose residual stream goes from stage to stage. params: of each stage's fullest GPU.
    Second 0 is the start of the first stage.
    """

    def __init__(self, job: Job, groups: Sequence[Passes], load: Workload, params: float):
        """Simulates the pipeline (schedule/simulator.py)."""
        cut, stages = job.decoder, job.decoder.pipe
        make = build.interleaved if cut.chunks > 1 else build.one_f_one_b
        self.table = make(stages, job.microbatches, cut.chunks)
        self.passes = {
            (kind, group): kernels
            for group, both in enumerate(groups)
            for kind, kernels in (("F", both.forward), ("B", both.backward))
        }
        spent = {key: sum(k.seconds for k in kernels) for key, kernels in self.passes.items()}
        self.hop = job.hop(load)
        timeline = simulator.simulate(
            self.table,
            lambda task: spent[task.kind, task.chunk * stages + task.stage],
            self.hop if stages > 1 else 0,
        )
        self.end = timeline.end
        spans = [span for span in timeline.spans if span.task.kind in ("F", "B")]
        self.spans = self._late(spans, self.hop if stages > 1 else 0)
        self.gather, self.scatter = job.exchange(params, cut)
        firsts = {s.task.microbatch: s.start for s in self.ends_of("F")}
        lasts = {s.task.microbatch: s.end for s in self.ends_of("B")}
        self.enters = [firsts[m] for m in sorted(firsts)]
        self.leaves = [lasts[m] for m in sorted(lasts)]
        self.by_stage: list[list[Span]] = [[] for _ in range(stages)]
        for span in self.spans:
            self.by_stage[span.task.stage].append(span)
        for spans in self.by_stage:
            spans.sort(key=lambda span: span.start)

    def _late(self, spans: list[Span], hop: float) -> list[Span]:
        """Returns the work with each forward pass as late as the backward passes allow.

        What a stage waits then comes before forward passes of later microbatches, whose features
        have more time (section 4.2: the number of warm-up microbatches is adjusted).
        """
        spans = sorted(spans, key=lambda span: span.start)
        users: dict[Work, list[Work]] = {}
        for slot in self.table.slots:
            for needed in self.table.needs(slot.work):
                users.setdefault(needed, []).append(slot.work)
        starts: dict[Work, float] = {}
        following: dict[int, float] = {}  # the start of the work after it on its stage
        late = []
        for span in reversed(spans):
            task, (start, end) = span.task, span[1:]
            work = Work(task.kind, task.stage, task.chunk, task.microbatch)
            if task.kind == "F":
                by = [following.get(task.stage, self.end)]
                by += [starts[user] - hop * (user.stage != task.stage) for user in users[work]]
                start, end = start + min(by) - end, min(by)
            starts[work] = following[task.stage] = start
            late.append(Span(task, start, end))
        return late[::-1]

    def ends_of(self, kind: str) -> Iterable[Span]:
        """Yields the work of a kind on the first group of layers."""
        return (s for s in self.spans if (s.task.kind, s.task.stage, s.task.chunk) == (kind, 0, 0))

    @property
    def step_s(self) -> float:
        """The seconds of a step without an encoder beside it."""
        return self.gather + self.end + self.scatter

    def group(self, task: Task) -> int:
        """Returns the group of layers that a task works on."""
        return task.chunk * self.table.stages + task.stage

    @functools.cached_property
    def rooms(self) -> list[tuple[Room, Room]]:
        """The gaps of each stage's SMs and of its link between its first and its last work."""
        offsets = {}
        for key, kernels in self.passes.items():
            edges = np.cumsum([0.0, *(kernel.seconds for kernel in kernels)])
            sends = np.array([kernel.kind == "COMM" for kernel in kernels], bool)
            offsets[key] = [(edges[:-1][on], edges[1:][on]) for on in (~sends, sends)]

        def room(spans: list[Span], resource: int) -> Room:
            pieces = [
                (span.start + starts, span.start + ends)
                for span in spans
                for starts, ends in [offsets[span.task.kind, self.group(span.task)][resource]]
            ]
            starts, ends = (np.concatenate(side) for side in zip(*pieces, strict=True))
            begins = np.concatenate([[spans[0].start], ends])
            ends = np.concatenate([starts, [spans[-1].end]])
            free = ends - begins > SLACK_S
            return begins[free].tolist(), ends[free].tolist()

        return [(room(spans, 0), room(spans, 1)) for spans in self.by_stage]


def backbone_of(job: Job, method: Method) -> Backbone:
    """Returns a pipeline: of the decoder alone, split evenly, or of a rival, whose groups of layers
    hold the encoder too."""
    cut, load = job.decoder, job.decoder_load
    stages, number = cut.pipe, cut.pipe * cut.chunks
    decoder = network(job, load, cut.tensor, ("F", "B"))
    groups, most = decoder.pieces(even(decoder.layers, number)), load.params / stages
    if method == "decoder":
        return Backbone(job, groups, load, most / cut.tensor)
    towers = encoder_networks(job, cut.tensor)
    theirs = sum(one.params for one in job.tower_loads)
    if method == "megatron":
        encoder = Passes.join(tower.pieces([tower.layers])[0] for tower in towers)
        groups[0] = Passes.join([encoder, groups[0]])
        return Backbone(job, groups, load, (most + theirs) / cut.tensor)
    layers = [piece for tower in towers for piece in tower.pieces([1] * tower.layers)]
    many = len(layers)
    layers += decoder.pieces([1] * decoder.layers)
    costs = [layer.seconds for layer in layers]
    sizes = balance(costs, number) if method == "balanced" else even(len(layers), number)
    cuts = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    held = [0.0] * stages  # parameters
    for group, (a, b) in enumerate(cuts):
        encoders = max(min(b, many) - a, 0)
        held[group % stages] += encoders * theirs / many
        held[group % stages] += (b - a - encoders) * load.params / decoder.layers
    groups = [Passes.join(layers[a:b]) for a, b in cuts]
    return Backbone(job, groups, load, max(held) / cut.tensor)


# ---- the scheduler


def into_gaps(chain: Chain, rooms: tuple[Room, Room], ready: float) -> list[float] | None:
    """Places kernels one after the other, each whole into the first gap of its resource.

    rooms: of the SMs and of the link; what is placed is taken out of them, also if not all of the
    kernels fit.
    Returns: the kernels' starts; None if a kernel finds no gap.
    """
    at = [bisect_right(ends, ready) for _, ends in rooms]
    placed = []
    for seconds, kind in chain:
        resource = kind == "COMM"
        starts, ends = rooms[resource]
        i, number = at[resource], len(starts)
        while i < number:
            begin = starts[i] if starts[i] > ready else ready
            if begin + seconds <= ends[i] + SLACK_S:
                break
            i += 1
        else:
            return None
        ready = begin + seconds
        placed.append(begin)
        end = ends[i]
        if begin - starts[i] > SLACK_S:
            ends[i] = begin
            i += 1
            if end - ready > SLACK_S:
                starts.insert(i, ready)
                ends.insert(i, end)
        elif end - ready > SLACK_S:
            starts[i] = ready
        else:
            del starts[i], ends[i]
        at[resource] = i
    return placed


@dataclasses.dataclass
class Direction:
    """One direction of the encoder's work: its forward passes before the decoder's, or, with time
    running backwards, its backward passes after the decoder's.

    chains: the kernels of each stage of the encoder. devices: of each pipeline, by stage. opens:
    when the decoder starts on a device. rooms: the gaps of each device from then on. hop: seconds
    from stage to stage and to the decoder. limits: of each pipeline, by when its k-th microbatch
    before the decoder's start must have ended. sets: (pipelines, by when their i-th microbatch must
    have arrived at the decoder).

    `run` makes blocks: of each pipeline and microbatch before the decoder's start, the starts of
    the stages; and moved: of those in gaps, the starts of the kernels of the stages.
    """

    chains: list[Chain]
    devices: list[list[int]]
    opens: list[float]
    rooms: list[tuple[Room, Room]]
    hop: float
    limits: list[list[float]]
    sets: list[tuple[list[int], list[float]]]
    blocks: list[list[list[float]]] = dataclasses.field(default_factory=list)
    moved: list[list[list[list[float]]]] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def spent(self) -> list[float]:
        """The seconds of each stage's chain."""
        return [sum(kernel.seconds for kernel in chain) for chain in self.chains]

    def block(self, pipeline: int, number: int) -> list[list[float]]:
        """Returns the latest starts of a pipeline's stages for so many microbatches that it runs
        back to back before the decoder starts on its devices."""
        devices, last = self.devices[pipeline], len(self.chains) - 1
        free = [self.opens[device] for device in devices]
        limits = self.limits[pipeline]
        rows = []
        for k in reversed(range(number)):
            until = limits[min(k, len(limits) - 1)]
            row = [0.0] * (last + 1)
            for stage in range(last, -1, -1):
                end = min(until, free[stage])
                row[stage] = free[stage] = end - self.spent[stage]
                until = row[stage] - self.hop
            rows.append(row)
        return rows[::-1]

    def lead(self, pipeline: int) -> float:
        """Returns how long before second 0 a pipeline starts."""
        return -min((min(row) for row in self.blocks[pipeline]), default=0.0)

    def ends(self, pipeline: int) -> list[float]:
        """Returns when a pipeline's microbatches have ended."""
        last, chain = self.spent[-1], self.chains[-1]
        before = [row[-1] + last for row in self.blocks[pipeline]]
        seconds = chain[-1].seconds if chain else 0.0
        return before + [stages[-1][-1] + seconds for stages in self.moved[pipeline]]

    def items(self, pipeline: int) -> list[tuple[float, list[list[float]]]]:
        """Returns when each of a pipeline's microbatches has ended, and its starts (`Placed`)."""
        rows = [[[start] for start in row] for row in self.blocks[pipeline]]
        return list(zip(self.ends(pipeline), rows + self.moved[pipeline], strict=True))

    def in_time(self, pipeline: int) -> bool:
        """Whether all microbatches of the set that a pipeline is in end in time: the i-th by the
        i-th time (section 4.2, global ordering)."""
        members, times = next(one for one in self.sets if pipeline in one[0])
        ends = sorted(end for member in members for end in self.ends(member))
        return all(e + self.hop <= t + SLACK_S for e, t in zip(ends, times, strict=True))

    def run(self, counts: Sequence[int], bubble: float, fine: bool) -> float:
        """Schedules counts[j] microbatches on pipeline j.

        bubble: seconds before second 0 in which the decoder does not compute. fine: whether
        microbatches move into the decoder's gaps: always one of the pipeline that starts first.
        Returns: how long before second 0 the first pipeline starts.
        """
        self.moved = [[] for _ in counts]
        self.blocks = [self.block(j, n) for j, n in enumerate(counts)]
        if not all(self.in_time(members[0]) for members, _ in self.sets):
            # Unequal counts change the order; by the limit of its first, all may end.
            self.limits = [limits[:1] for limits in self.limits]
            self.blocks = [self.block(j, n) for j, n in enumerate(counts)]
        while fine:
            critical = max(range(len(counts)), key=self.lead)
            if self.lead(critical) <= bubble or not self._move(critical):
                break
        return max(self.lead(j) for j in range(len(counts)))

    def _move(self, pipeline: int) -> bool:
        """Moves one microbatch into gaps; leaves all as it was if it would not end in time."""
        devices = self.devices[pipeline]
        copies: dict[int, tuple[Room, Room]] = {}
        for device in devices:
            sms, link = self.rooms[device]
            copies[device] = (sms[0][:], sms[1][:]), (link[0][:], link[1][:])
        placed: list[list[float]] = []
        ready = self.opens[devices[0]]
        for chain, device in zip(self.chains, devices, strict=True):
            starts = into_gaps(chain, copies[device], ready)
            if starts is None:
                return False
            placed.append(starts)
            if chain:
                ready = starts[-1] + chain[-1].seconds + self.hop
        before = self.blocks[pipeline]
        self.blocks[pipeline] = self.block(pipeline, len(before) - 1)
        self.moved[pipeline].append(placed)
        if not self.in_time(pipeline):
            self.blocks[pipeline] = before
            self.moved[pipeline].pop()
            return False
        for device, rooms in copies.items():
            self.rooms[device] = rooms
        return True


class Placed(NamedTuple):
    """A microbatch of the encoder, its pipeline, and the starts of its kernels on each stage, in
    the time of its `Direction`; the first one alone where they run back to back."""

    microbatch: int
    pipeline: int
    rows: list[list[float]]


@dataclasses.dataclass(frozen=True)
class Placement:
    """The encoder's work beside a decoder's.

    front_s, back_s: seconds before the decoder's start and after its end. share: of the encoder's
    time that lies in a step of the decoder alone. leads: of each pipeline, how long it works before
    the decoder's start, and after its end.
    """

    forward: list[Placed]
    backward: list[Placed]
    front_s: float
    back_s: float
    share: float
    leads: tuple[list[float], list[float]]

    def step_s(self, backbone: Backbone) -> float:
        """The seconds of a step."""
        return self.front_s + backbone.end + self.back_s


def pipelines(decoder: Degrees, encoder: Degrees) -> list[list[int]]:
    """Returns the devices of each pipeline of an encoder on a replica of the decoder, by stage.

    A stage of the decoder is decoder.tensor / encoder.tensor devices, numbered stage by stage.
    """
    parts, stages = decoder.tensor // encoder.tensor, range(encoder.pipe)
    firsts = range(0, decoder.pipe, encoder.pipe)
    return [[(a + s) * parts + part for s in stages] for a in firsts for part in range(parts)]


class EncoderCut:
    """A cut of the encoder on a backbone, for which compositions of microbatches are scheduled."""

    def __init__(self, job: Job, backbone: Backbone, cut: Degrees):
        """Makes its kernels, and the rooms that the backbone leaves it."""
        self.job, self.backbone, self.cut = job, backbone, cut
        towers = encoder_networks(job, cut.tensor)
        split = (tower.pieces(even(tower.layers, cut.pipe)) for tower in towers)
        self.stages = [Passes.join(stage) for stage in zip(*split, strict=True)]
        self.devices = pipelines(job.decoder, cut)
        params = sum(load.params for load in job.tower_loads) / (cut.pipe * cut.tensor)
        self.gather_s, self.scatter_s = job.exchange(params, cut) if job.exchanges else (0.0, 0.0)
        # Weights are gathered, and gradients scattered, layer by layer.
        self.buckets = max(sum(tower.layers for tower in job.towers) // cut.pipe, 1)
        self.hop = max(job.hop(load) for load in job.tower_loads)
        self.parts = job.decoder.tensor // cut.tensor
        self.opens, self.closes = [], []
        for spans in backbone.by_stage:
            self.opens += [spans[0].start] * self.parts
            self.closes += [backbone.end - spans[-1].end] * self.parts
        # Pipelines take turns; of one round, those that the decoder lets end later end later.
        number, last = job.microbatches, [self.opens[devices[-1]] for devices in self.devices]
        self.limits: list[list[float]] = [[] for _ in last]
        for rank, j in enumerate(sorted(range(len(last)), key=last.__getitem__)):
            ranks = (min(k * len(last) + rank, number - 1) for k in range(number))
            self.limits[j] = [backbone.enters[i] - self.hop for i in ranks]

    @property
    def least_s(self) -> float:
        """Seconds below which no composition comes: all work is in bubbles."""
        return self.gather_s + self.backbone.step_s + self.scatter_s

    def forward_side(self) -> Direction:
        """Returns the forward passes."""
        every = list(range(len(self.devices)))
        rooms = [room for room in self.backbone.rooms for _ in range(self.parts)]
        chains = [stage.forward for stage in self.stages]
        sets = [(every, self.backbone.enters)]
        return Direction(chains, self.devices, self.opens, rooms, self.hop, self.limits, sets)

    def backward_side(self, rooms: list[tuple[Room, Room]], members: list[list[int]]) -> Direction:
        """Returns the backward passes, in which time runs backwards from the decoder's end.

        rooms: what the forward passes leave. members: the microbatches of each pipeline.
        """
        end = self.backbone.end

        def mirrored(room: Room) -> Room:
            starts, ends = room
            return [end - t for t in reversed(ends)], [end - t for t in reversed(starts)]

        times = [sorted(end - self.backbone.leaves[m] for m in ms) for ms in members]
        return Direction(
            [stage.backward[::-1] for stage in self.stages],
            self.devices,
            self.closes,
            [(mirrored(sms), mirrored(link)) for sms, link in rooms],
            self.hop,
            [[time - self.hop for time in ts] for ts in times],
            [([j], ts) for j, ts in enumerate(times)],
        )

    def schedule(self, counts: Sequence[int], fine: bool = True) -> Placement:
        """Returns the placement of counts[j] microbatches on pipeline j (algorithm 2)."""
        backbone, side = self.backbone, self.forward_side()
        front = side.run(counts, backbone.gather, fine)
        every = range(len(counts))
        items = sorted((end, j, rows) for j in every for end, rows in side.items(j))
        forward = [Placed(m, j, rows) for m, (_, j, rows) in enumerate(items)]
        members = [[p.microbatch for p in forward if p.pipeline == j] for j in every]
        other = self.backward_side(side.rooms if fine else [], members)
        back = other.run(counts, backbone.scatter, fine)
        backward = []
        for j, numbers in enumerate(members):
            numbers = sorted(numbers, key=lambda m: -backbone.leaves[m])
            for m, (_, rows) in zip(numbers, sorted(other.items(j)), strict=True):
                backward.append(Placed(m, j, rows))
        return Placement(
            forward,
            backward,
            max(self.gather_s + backbone.gather, front + self.gather_s / self.buckets),
            max(self.scatter_s + backbone.scatter, back + self.scatter_s / self.buckets),
            self._share(side, other),
            ([side.lead(j) for j in every], [other.lead(j) for j in every]),
        )

    def starts(self, placed: Placed, kind: str) -> list[list[float]]:
        """Returns the starts of a microbatch's kernels on each stage, from the start of the
        decoder's first stage on."""
        out = []
        for stage, row in zip(self.stages, placed.rows, strict=True):
            chain = stage.forward if kind == "EF" else stage.backward[::-1]
            if len(row) == 1:  # back to back
                spent = itertools.accumulate((k.seconds for k in chain), initial=row[0])
                row = list(itertools.islice(spent, len(chain)))
            if kind == "EB":
                ends = (start + k.seconds for start, k in zip(row, chain, strict=True))
                row = [self.backbone.end - end for end in ends][::-1]
            out.append(row)
        return out

    def _share(self, forward: Direction, backward: Direction) -> float:
        """Returns which share of the encoder's time lies in a step of the decoder alone."""
        outside = total = 0.0
        for lane, bubble in (forward, self.backbone.gather), (backward, self.backbone.scatter):
            for j in range(len(self.devices)):
                number = len(lane.blocks[j]) + len(lane.moved[j])
                total += number * sum(lane.spent)
                for row in lane.blocks[j]:
                    for start, spent in zip(row, lane.spent, strict=True):
                        outside += min(max(-bubble - start, 0.0), spent)
        return 1 - outside / total if total else 1.0

    def dealt(self) -> list[int]:
        """Returns a composition for which the coarse schedule is short: one microbatch after the
        other goes to the pipeline with which the step is shortest."""
        number, every = self.job.microbatches, range(len(self.devices))
        side = self.forward_side()
        other = self.backward_side([], [[0] for _ in every])
        other.limits = [[float("inf")] for _ in every]
        bubbles = self.backbone.gather, self.backbone.scatter

        def leads(j: int, many: int) -> list[float]:
            return [-min(map(min, one.block(j, many))) for one in (side, other)]

        counts = [1 for _ in every]
        now = [leads(j, 1) for j in every]
        for _ in range(number - len(counts)):
            options = [leads(j, counts[j] + 1) for j in every]
            costs = []
            for option in options:
                worst = (max(lead) for lead in zip(option, *now, strict=True))
                longest = sum(max(pair) for pair in zip(worst, bubbles, strict=True))
                costs.append((longest, sum(option)))
            j = costs.index(min(costs))
            counts[j], now[j] = counts[j] + 1, options[j]
        return counts

    def search(self, tries: int) -> tuple[list[int], Placement]:
        """Returns the best composition among those that are scheduled, and its placement.

        All compositions, if there are at most `tries`; else `dealt`, and then as long as the step
        gets shorter, a microbatch goes from the pipeline that is longest outside the decoder's step
        to the one that is shortest.
        """
        m, number = len(self.devices), self.job.microbatches
        cuts = itertools.combinations(range(1, number), m - 1)
        few = list(itertools.islice(cuts, tries + 1))
        if len(few) <= tries:
            edges = [(0, *cut, number) for cut in few]
            options = [[b - a for a, b in itertools.pairwise(edge)] for edge in edges]
            return min(
                ((counts, self.schedule(counts)) for counts in options),
                key=lambda one: one[1].step_s(self.backbone),
            )
        counts = self.dealt()
        best = counts, self.schedule(counts)
        seen = {tuple(counts)}
        while len(seen) < tries:
            shortest = best[1].step_s(self.backbone)
            if shortest <= self.least_s + SLACK_S:
                break
            option = next((c for c in self._moves(*best) if tuple(c) not in seen), None)
            if option is None:
                break
            seen.add(tuple(option))
            placed = self.schedule(option)
            if placed.step_s(self.backbone) < shortest - SLACK_S:
                best = option, placed
        return best

    def _moves(self, counts: list[int], placed: Placement) -> Iterable[list[int]]:
        """Yields compositions in which one microbatch has gone to another pipeline."""
        for leads in placed.leads:
            order = sorted(range(len(counts)), key=leads.__getitem__)
            for source in order[::-1]:
                for target in order[:2]:
                    if counts[source] > 1 and source != target:
                        moved = list(counts)
                        moved[source] -= 1
                        moved[target] += 1
                        yield moved
