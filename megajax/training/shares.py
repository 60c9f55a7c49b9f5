"""Unequal parts of a batch for unlike devices: strong ones take more rows of each step.

--shares=strong:3,weak:1 is the other way to let strong GPUs not wait for weak ones: QSync (arXiv
2407.02327) compares its precisions with such uneven batches. Each process compiles the common step
with the rows of its own devices, as if every device took as many; the collectives carry gradients
and sums, whose shapes do not depend on rows. So the sums of a step, and their count, are those of
all rows of the batch.

The rows of a step are those of a step without shares, and each is read by one data-parallel rank. A
checkpoint's position counts them, so a run may go on with other shares, or without.

Held-out evaluations cut their batches evenly: their program is the same on all devices.

Legend: A micro-batches, N data-parallel ranks, B rows that one of them has of a micro-batch.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from megajax.core.axes import BATCH_AXES
from megajax.core.errors import UserError, nearest_multiples
from megajax.core.tree import is_words, named_leaves
from megajax.data.loader import Share
from megajax.models.parts import ModelParts
from megajax.training.task import Task, count_targets


def parse(text: str) -> dict[str, int]:
    """Returns {kind: rows relative to those of other kinds} of --shares. Raises: UserError."""
    shares: dict[str, int] = {}
    for word in text.split(","):
        kind, _, number = (part.strip() for part in word.rpartition(":"))
        if not kind or not number.isdecimal() or not int(number):
            raise UserError(
                f"shares={text}: {word!r} must be KIND:NUMBER with a whole number of at least 1, "
                f"e.g. {kind or 'strong'}:1 (--shares)"
            )
        if kind in shares:
            raise UserError(
                f"shares={text}: {kind} has two numbers; leave one of them out (--shares)"
            )
        shares[kind] = int(number)
    return shares


def rows_of_ranks(cfg: Any, mesh: Mesh, kinds: Sequence[str]) -> tuple[int, ...]:
    """Returns how many rows of a step each data-parallel rank takes; without shares the rows of
    all ranks together, alone.

    Args: cfg: a JobConfig. kinds: of each process of the job.
    Raises: UserError for a rank of several kinds, and for rows that cannot be cut so.
    """
    if cfg.shares is None:
        return (cfg.train.global_batch,)
    of_ranks = []
    for rank, devices in enumerate(_ranks(mesh)):
        # A mesh to compile for has devices of other hosts, and one kind.
        one = {kinds[d.process_index] if len(kinds) > 1 else kinds[0] for d in devices}
        if len(one) > 1:
            raise UserError(
                f"shares={cfg.shares}: data-parallel rank {rank} has devices of the kinds "
                f"{', '.join(sorted(one))}, which would hold the same rows; make mesh.context x "
                "mesh.tensor divide the devices of a process (--mesh.tensor, --mesh.context)"
            )
        of_ranks.append(one.pop())
    return cut(parse(cfg.shares), of_ranks, cfg.train.global_batch, cfg.train.accumulate)


def cut(shares: dict[str, int], kinds: Sequence[str], rows: int, pieces: int) -> tuple[int, ...]:
    """Returns the rows of each rank. kinds: of each rank. pieces: micro-batches.

    Raises: UserError where the micro-batches of a rank would not have a whole number of rows each.
    """
    parts = [shares[kind] for kind in kinds]
    parts = [part // math.gcd(*parts) for part in parts]
    unit = sum(parts) * pieces  # each micro-batch has so many rows, or a multiple
    if rows % unit:
        counts = {kind: kinds.count(kind) for kind in shares if kind in kinds}
        sizes = " + ".join(f"{n} x {parts[kinds.index(kind)]}" for kind, n in counts.items())
        micro = f", times train.accumulate {pieces}" if pieces > 1 else ""
        near = nearest_multiples(rows, math.lcm(unit, len(kinds) * pieces))
        raise UserError(
            f"train.global_batch={rows} must be divisible by {unit}, which is {sizes} rows for the "
            f"data-parallel ranks of kind {', '.join(counts)}{micro}; {near} "
            "(--train.global_batch, --shares)"
        )
    return tuple(part * rows // sum(parts) for part in parts)


def share_of(mesh: Mesh, rows: Sequence[int], pieces: int) -> Share:
    """Returns the part of each batch that this process reads, of the batch that it compiles for.

    That batch gives every rank as many rows as this process's ranks have. The share numbers them
    all, though only those of this process's ranks are read by it. rows: of each rank. Of each
    micro-batch the ranks take rows in their order.
    """
    local = jax.process_index()
    counts = [
        count
        for count, devices in zip(rows, _ranks(mesh), strict=True)
        if any(device.process_index == local for device in devices)
    ]
    # A mesh to compile for has no local devices, and one kind.
    B = (counts or rows)[0] // pieces
    last_N = np.cumsum(rows) // pieces
    first_N = last_N - np.asarray(rows) // pieces
    first_AN = np.arange(pieces)[:, None] * last_N[-1] + first_N[None]
    numbers_ANB = first_AN[..., None] + np.arange(B)[None, None]
    return Share(numbers_ANB.ravel(), sum(rows))


def check(cfg: Any, task: Task, parts: ModelParts) -> None:
    """Refuses, with --shares, what depends on the rows of a device by more than counted sums.

    Raises: UserError.
    """
    if cfg.shares is None:
        return
    reason = ""
    if parts.network is not None:
        reason = "this model computes its loss by itself, by means over the rows of a device"
    elif parts.tower is not None:
        reason = "the rows of a model with images are cut by their images"
    elif any({"expert", "router"} & {*words} for _, words in named_leaves(parts.axes, is_words)):
        reason = "the penalties and the slots of experts are means over the tokens of a batch"
    elif task.count is not count_targets:
        reason = "this task counts by itself, and a count of rows would be wrong"
    if reason:
        raise UserError(
            f"shares={cfg.shares}: {reason}; leave it out, all devices then take as many rows "
            "(--shares)"
        )
    if cfg.model.dropout:
        raise UserError(
            f"model.dropout={cfg.model.dropout}: with --shares several rows would lose the same "
            "activations, because devices draw by the numbers of their rows; nearest: 0 "
            "(--model.dropout, --shares)"
        )


def _ranks(mesh: Mesh) -> np.ndarray:
    """Returns the devices of each data-parallel rank, (ranks, devices of one). The pipeline has
    one stage."""
    ways = math.prod(mesh.shape.get(axis, 1) for axis in BATCH_AXES)
    return mesh.devices.reshape(ways, -1)
