"""An encoder's work in the idle places of a decoder's table (Optimus, arXiv 2408.03505).

The paper's scheduler fills the bubbles of a timeline with the encoder's kernels. Here the same is
done in a lockstep table, which the executor runs: a tick costs as many units as its fullest stage
has slots, so a stage that has fewer can do a segment of the encoder at no cost. Where no place is
idle, a tick gets one unit more, which is a place on every stage; before the first tick and after
the last one, ticks are added.

Microbatches are dealt to the stage with the least encoder work so far, in the order of the decoder;
each stage then has jobs of its own: EF segments, each before the first F of its microbatch, and EB
segments, each after the last B. All jobs take one place, and no two EF, or two EB, share a tick of
a stage. For such jobs, placing each EF as early and each EB as late as possible uses the fewest
places, so a job that does not fit shows which tick must grow: the last one before the deadline for
EF, the first one after the gradient for EB. So features and gradients wait no longer than a few
ticks, whatever the number of microbatches.

Legend: T ticks, P stages.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megajax.core.errors import UserError
from megajax.schedule.ir import Slot, Table

Segments = tuple[int, int]  # (forward, backward) segments of a microbatch


class Job(NamedTuple):
    """One segment on a stage. limit: the last tick in which EF may run, the first one of EB."""

    limit: int
    microbatch: int
    segment: int


Jobs = list[list[Job]]  # of each stage, by their limits


def place(table: Table, encoder_work: Sequence[Segments]) -> Table:
    """Returns the table with the encoder's work in it.

    The decoder's slots keep their order on every stage, and may start later; its microbatches may
    be renamed, all in the same way, so that the first one has little encoder work before it.

    Args: table: of a decoder alone. encoder_work: the (forward, backward) segments of each
      microbatch: (n, n), (n, 0) where the encoder is frozen, (0, 0) without images.
    Returns: a table whose slots of kinds EF and EB have the segment as their chunk.
    Raises: UserError for other pairs, another number of them, or a table with an encoder.
    """
    work = _checked(table, encoder_work)
    orders = [[*range(len(work))]]
    if len({*work}) > 1:
        orders.append(_light_ends(work))
    tables = []
    for order in orders:
        slots = tuple(slot._replace(microbatch=order[slot.microbatch]) for slot in table.slots)
        tables.append(_placed(dataclasses.replace(table, slots=slots), work))
    return min(tables, key=lambda placed: placed.units)


def _checked(table: Table, encoder_work: Sequence[Segments]) -> tuple[Segments, ...]:
    if table.extra_lanes:
        raise UserError(f"{table.name} has an encoder already; place takes a decoder's table")
    work = tuple(tuple(pair) for pair in encoder_work)
    if len(work) != table.microbatches:
        raise UserError(
            f"encoder_work has {len(work)} pairs, and {table.name} has {table.microbatches} "
            "microbatches; each needs one (--pipeline.microbatches)"
        )
    for number, pair in enumerate(work):
        is_pair = len(pair) == 2 and all(isinstance(n, (int, np.integer)) for n in pair)
        if not is_pair or pair[0] < 0 or pair[1] not in (0, pair[0]):
            raise UserError(
                f"encoder_work of microbatch {number} is {pair}; it must be (n, n), (n, 0) for a "
                "frozen encoder, or (0, 0) without images"
            )
    return tuple((int(f), int(b)) for f, b in work)


def _light_ends(work: Sequence[Segments]) -> list[int]:
    """Returns an order of the microbatches with those of little work at both ends."""
    by_size = sorted(range(len(work)), key=lambda m: sum(work[m]))
    return by_size[::2] + by_size[1::2][::-1]


def _placed(table: Table, work: tuple[Segments, ...]) -> Table:
    """Returns the table with the encoder's work, its microbatches as they are."""
    T, P = table.ticks, table.stages
    first, last = {}, {}
    used_TP = np.zeros((T, P), np.int64)
    for tick, stage, kind, chunk, microbatch in table.slots:
        used_TP[tick, stage] += 1
        if (stage, kind, chunk) == (0, "F", 0):
            first[microbatch] = tick
        if (stage, kind, chunk) == (0, "B", 0):
            last[microbatch] = tick
    ahead: Jobs = [[] for _ in range(P)]
    behind: Jobs = [[] for _ in range(P)]
    for m in sorted(first, key=first.__getitem__):
        stage = min(range(P), key=lambda s: len(ahead[s]) + len(behind[s]))
        forward, backward = work[m]
        ahead[stage] += [Job(first[m] - forward + i, m, i) for i in range(forward)]
        behind[stage] += [Job(last[m] + backward - i, m, i) for i in range(backward)]
    ahead, behind = ([sorted(jobs) for jobs in lane] for lane in (ahead, behind))
    idle_TP = used_TP.max(1, initial=0, keepdims=True) - used_TP
    room = _room(idle_TP, ahead, behind)
    # The same in the other direction of time, in which EB comes first; the cheaper one is taken.
    other = _room(idle_TP[::-1], _mirrored(behind, T), _mirrored(ahead, T))
    if other.cost < room.cost:
        early_TP, late_TP = other.second_TP[::-1], other.first_TP[::-1]
        room = Room(other.places_TP[::-1], early_TP, late_TP, other.after, other.before)
    slots = [slot._replace(tick=slot.tick + room.before) for slot in table.slots]
    for stage in range(P):
        early, late = (
            [job._replace(limit=job.limit + room.before) for job in lane[stage]]
            for lane in (ahead, behind)
        )
        columns = (x_TP[:, stage] for x_TP in (room.places_TP, room.second_TP))
        slots += _assigned(stage, early, late, *columns)
    return dataclasses.replace(table, slots=tuple(slots), encoder_work=work)


class Room(NamedTuple):
    """Places for the encoder's jobs, int64 (T, P) each.

    places_TP: all. first_TP, second_TP: those that the jobs of the first and of the second lane
    take. before, after: ticks that were added at the front and at the end.
    """

    places_TP: np.ndarray
    first_TP: np.ndarray
    second_TP: np.ndarray
    before: int
    after: int

    @property
    def cost(self) -> int:
        """A number that is smaller where fewer ticks have grown or been added."""
        return int(self.places_TP.sum())


def _room(idle_TP: np.ndarray, ahead: Jobs, behind: Jobs) -> Room:
    """Returns places for jobs with a last tick (ahead) and for jobs with a first tick (behind)."""
    places_TP, before = _grown(idle_TP, ahead)
    early_TP = _earliest(places_TP, ahead)
    shifted = [[job._replace(limit=job.limit + before) for job in jobs] for jobs in behind]
    lane = _mirrored(shifted, len(places_TP))
    free_TP, after = _grown((places_TP - early_TP)[::-1], lane)
    late_TP, early_TP = _earliest(free_TP, lane)[::-1], np.pad(early_TP, ((0, after), (0, 0)))
    return Room(free_TP[::-1] + early_TP, early_TP, late_TP, before, after)


def _earliest(places_TP: np.ndarray, lane: Jobs) -> np.ndarray:
    """Returns 1 where a stage has the first of its places, one for each job."""
    taken_TP = np.zeros_like(places_TP)
    for stage, jobs in enumerate(lane):
        taken_TP[np.flatnonzero(places_TP[:, stage])[: len(jobs)], stage] = 1
    return taken_TP


def _mirrored(lane: Jobs, ticks: int) -> Jobs:
    """Returns jobs as they are in the other direction of time."""
    return [[job._replace(limit=ticks - 1 - job.limit) for job in jobs[::-1]] for jobs in lane]


def _grown(idle_TP: np.ndarray, lane: Jobs) -> tuple[np.ndarray, int]:
    """Returns (idle places with those that make each job end by its limit, ticks added in front).

    The job with the earliest limit of all that have no place decides which tick grows: the last one
    before the limit that has no place on its stage. It grows for all stages.
    """
    room_TP, added = idle_TP.copy(), 0
    limits = [np.array([job.limit for job in jobs], np.int64) for jobs in lane]
    while True:
        late: list[tuple[int, int]] = []
        for stage, limit_N in enumerate(limits):
            tick_N = np.flatnonzero(room_TP[:, stage])[: len(limit_N)]
            tick_N = np.pad(tick_N, (0, len(limit_N) - len(tick_N)), constant_values=2**31)
            if (is_late_N := tick_N > limit_N + added).any():
                late.append((int(limit_N[is_late_N.argmax()]) + added, stage))
        if not late:
            return room_TP, added
        limit, stage = min(late)
        full = np.flatnonzero(room_TP[: max(limit + 1, 0), stage] == 0)
        if len(full):
            room_TP[full[-1]] += 1
        else:
            room_TP = np.concatenate([np.ones_like(room_TP[:1]), room_TP])
            added += 1


def _assigned(
    stage: int,
    ahead: list[Job],
    behind: list[Job],
    places_T: np.ndarray,
    late_T: np.ndarray,
) -> list[Slot]:
    """Returns the slots of a stage. late_T: those of its places that EB takes.

    EF and EB are moved towards the decoder's work as far as the other leaves room, so that features
    and gradients wait little.
    """
    forward = _latest(places_T - late_T, [job.limit for job in ahead])
    early_T = np.bincount(np.array(forward, np.int64), minlength=len(places_T))
    last = len(places_T) - 1
    limits = [last - job.limit for job in reversed(behind)]
    backward = [last - tick for tick in reversed(_latest((places_T - early_T)[::-1], limits))]
    return [
        Slot(tick, stage, kind, job.segment, job.microbatch)
        for kind, ticks, jobs in (("EF", forward, ahead), ("EB", backward, behind))
        for tick, job in zip(ticks, jobs, strict=True)
    ]


def _latest(room_T: np.ndarray, limits: list[int]) -> list[int]:
    """Returns the latest ticks with a place, one for each limit, in the order of the limits."""
    ticks, before = [], len(room_T)
    for limit in reversed(limits):
        before = min(limit + 1, before)
        before = int(np.flatnonzero(room_T[:before])[-1])
        ticks.append(before)
    return ticks[::-1]
