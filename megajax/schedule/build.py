"""Builders of tick tables: GPipe, 1F1B, interleaved 1F1B, zero-bubble.

Legend: S stages, M micro-batches, v chunks a stage. Every stage goes through the same sequence of
(chunk, micro-batch), one tick after its neighbour, so all that is sent is used in the next tick.
Sources: GPipe (arXiv 1811.06965), 1F1B and interleaving (Megatron-LM, arXiv 2104.04473 section 2.2;
MegaScale section 3.2 overlaps its transfers), zero-bubble (arXiv 2401.10241, ZB-H1).
"""

from typing import Literal

from megajax.core.errors import UserError, nearest_multiples
from megajax.schedule.ir import B, F, Slot, Table, W


def gpipe(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """All F, then all B in the reverse order; keeps v M chunk inputs. chunks > 1: circular.

    Raises: UserError where a size is below 1, or chunks > 1 and M is no multiple of S.
    """
    _check_sizes(stages, microbatches, chunks, grouped=chunks > 1)
    forwards = _forwards(stages, microbatches, chunks)
    last = 2 * (chunks * microbatches + stages - 1) - 1
    backwards = [Slot(last - t, s, "B", c, m) for t, s, _, c, m in forwards]
    return Table("gpipe", stages, microbatches, chunks, (*forwards, *backwards))


def one_f_one_b(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """F and B in turn once the pipeline is full; keeps at most 2 S - 1 inputs whatever M is.

    Raises: UserError where a size is below 1 or chunks > 1 (that is `interleaved`).
    """
    _refuse_chunks("1f1b", chunks)
    _check_sizes(stages, microbatches, chunks, grouped=False)
    return Table("1f1b", stages, microbatches, 1, _alternating(stages, microbatches, 1))


def interleaved(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """1F1B with v chunks on each stage: the bubble falls to (S - 1) / (v M).

    Groups of S micro-batches pass chunk after chunk. Keeps at most (v + 1) S - 1 inputs, as many
    as Megatron's asynchronous form does, since `route` takes places again in any order (a
    buffer indexed by the work's number mod its size needs 2 v S - 1).
    Raises: UserError where a size is below 1 or M is no multiple of S.
    """
    _check_sizes(stages, microbatches, chunks, grouped=True)
    slots = _alternating(stages, microbatches, chunks)
    return Table("interleaved", stages, microbatches, chunks, slots)


def zero_bubble(stages: int, microbatches: int, chunks: int = 1) -> Table:
    """1F1B with the weight gradient split off and put where stages would wait (ZB-H1).

    All stages compute W of one micro-batch in the same tick: as soon as the first stage has its B.
    So W costs M ticks in lockstep, not M + S - 1, and no input is kept longer than 1F1B keeps
    stage 0's: at most 2 S - 1.
    Raises: UserError where a size is below 1 or chunks > 1.
    """
    _refuse_chunks("zero_bubble", chunks)
    _check_sizes(stages, microbatches, chunks, grouped=False)
    weights = [
        Slot(2 * (stages - 1) + m, s, "W", 0, m) for s in range(stages) for m in range(microbatches)
    ]
    slots = (*_alternating(stages, microbatches, 1), *weights)
    return Table("zero_bubble", stages, microbatches, 1, slots, (F, B, W))


# The values of --pipeline.schedule. The cost of one is a closed form in cost/step.py, Pipeline.
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
BUILDERS = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}


def _forwards(stages: int, microbatches: int, chunks: int) -> tuple[Slot, ...]:
    sequence = _sequence(stages, microbatches, chunks)
    return tuple(
        Slot(k + s, s, "F", c, m) for s in range(stages) for k, (c, m) in enumerate(sequence)
    )


def _alternating(stages: int, microbatches: int, chunks: int) -> tuple[Slot, ...]:
    """F as early as can be; B from the tick in which the last chunk has its first output."""
    first = chunks * stages - 1
    sequence = _sequence(stages, microbatches, chunks)
    backwards = (
        Slot(first + stages - 1 - s + k, s, "B", chunks - 1 - c, m)
        for s in range(stages)
        for k, (c, m) in enumerate(sequence)
    )
    return (*_forwards(stages, microbatches, chunks), *backwards)


def _sequence(stages: int, microbatches: int, chunks: int) -> list[tuple[int, int]]:
    """Returns the (chunk, micro-batch) of a stage: S micro-batches a chunk, then the next chunk."""
    groups = ((k // (chunks * stages), k % (chunks * stages)) for k in range(chunks * microbatches))
    return [(r // stages, g * stages + r % stages) for g, r in groups]


def _check_sizes(stages: int, microbatches: int, chunks: int, *, grouped: bool) -> None:
    flags = {"mesh.pipe": stages, "pipeline.microbatches": microbatches, "pipeline.chunks": chunks}
    for flag, value in flags.items():
        if value < 1:
            raise UserError(f"{flag}={value} must be at least 1 (--{flag})")
    if grouped and microbatches % stages:
        raise UserError(
            f"pipeline.microbatches={microbatches} must be a multiple of mesh.pipe = {stages} "
            f"where chunks are interleaved; {nearest_multiples(microbatches, stages)} "
            "(--pipeline.microbatches)"
        )


def _refuse_chunks(schedule: str, chunks: int) -> None:
    if chunks > 1:
        raise UserError(
            f"pipeline.chunks={chunks}: schedule {schedule} has one chunk a stage; use 1, or "
            "--pipeline.schedule=interleaved (--pipeline.chunks)"
        )
