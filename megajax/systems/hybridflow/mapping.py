"""Which models share devices, and how many devices each set of them gets.

HybridFlow (arXiv 2409.19256) section 6, algorithm 1: over all placements (partitions of the models
into sets that share devices) and all ways to share the devices out, it finds the shortest
iteration. An iteration has three stages, one after the other. In a stage the sets work side by
side, and the models of a set one after the other:

    seconds = sum over stages of the maximum over sets of the sum over a set's models of
              seconds(stage, model, n)

Nothing is simulated here: `seconds` and `least` are the caller's. Exact, by enumeration.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from megajax.core.errors import UserError

STAGES = ("generate", "prepare", "train")
Sets = tuple[tuple[str, ...], ...]
ROWS = 2**20  # (chosen) allocations that are compared at a time
MODELS = 10  # (chosen: 115,975 placements) models at most
ALLOCATIONS = 2**30  # (chosen: five minutes of one core) of all placements, at most


@dataclasses.dataclass(frozen=True)
class Mapping:
    """sets: of models that share devices. devices: of each set. seconds: of an iteration."""

    sets: Sets
    devices: tuple[int, ...]
    seconds: float


def placements(models: Sequence[str]) -> list[Sets]:
    """Returns all partitions of the models into sets: 15 for four models (Bell numbers).

    Sets and their members are in the order of `models`; the placement with all models in one set
    comes first. Raises: ValueError for no model, one that is listed twice, or more than MODELS.
    """
    names = list(models)
    if not 1 <= len(set(names)) == len(names) <= MODELS:
        raise ValueError(f"models={names} must be distinct names, from 1 to {MODELS}")
    partial: list[list[list[str]]] = [[]]
    for name in names:
        partial = [
            [
                [*group, name] if i == at else list(group)
                for i, group in enumerate([*sets, []])
                if i == at or group
            ]
            for sets in partial
            for at in range(len(sets) + 1)
        ]
    return sorted((tuple(tuple(g) for g in sets) for sets in partial), key=len)


def auto_map(
    models: Sequence[str],
    devices: int,
    seconds: Callable[[str, str, int], float],
    least: Callable[[tuple[str, ...]], int],
    among: Sequence[Sets] | None = None,
) -> Mapping:
    """Returns the mapping with the shortest iteration; of equal ones that with the fewest sets.

    Args: seconds(stage, model, n): of a model in a stage ('generate', 'prepare', 'train') on n
      devices, 0 where it does nothing, math.inf where it cannot run so. least(models) -> the fewest
      devices that have room for these models together. among: the placements to compare; None:
      all.
    Raises: ValueError if no placement has room, or none can run; for seconds that are no number;
      and for more than ALLOCATIONS ways to place the models and to share the devices out.
    """
    if devices < 1:
        raise ValueError(f"devices={devices} must be at least 1")
    timed = functools.cache(seconds)
    fitting: list[tuple[Sets, list[int], int]] = []
    too_small: list[tuple[float, Sets]] = []
    for sets in placements(models) if among is None else among:
        needed = [max(1, least(group)) for group in sets]
        smallest = [math.ceil(n) for n in needed if n < math.inf]
        if math.inf in needed or sum(smallest) > devices:
            too_small.append((sum(needed), sets))
        else:
            fitting.append((sets, smallest, devices - sum(smallest)))
    if not fitting:
        fewest, sets = min(too_small, key=lambda pair: pair[0])
        why = f"they need {fewest:g} for {_text(sets)}"
        raise ValueError(f"{', '.join(models)} do not fit on {devices} devices: {why}")
    ways = sum(math.comb(spare + len(sets) - 1, len(sets) - 1) for sets, _, spare in fitting)
    if ways > ALLOCATIONS:
        raise UserError(
            f"{', '.join(models)} can share {devices} devices in {ways:,} ways; at most "
            f"{ALLOCATIONS:,} are compared: give fewer devices, or fewer placements (--cluster)"
        )
    best: Mapping | None = None
    for sets, smallest, spare in fitting:
        # of each set: seconds by stage and by devices above the smallest number
        tables = [
            np.array(
                [
                    [sum(timed(s, m, low + more) for m in group) for more in range(spare + 1)]
                    for s in STAGES
                ]
            )
            for group, low in zip(sets, smallest, strict=True)
        ]
        if any(np.isnan(table).any() for table in tables):
            raise ValueError(f"seconds are no number for a model of {_text(sets)}")
        for shares_RG in _shares(spare, len(sets)):
            stages = [table[:, shares_RG[:, g]] for g, table in enumerate(tables)]
            total_R = np.maximum.reduce(stages).sum(axis=0)
            row = int(np.argmin(total_R))
            if np.isfinite(total_R[row]) and (best is None or total_R[row] < best.seconds):
                counts = (
                    int(low + more) for low, more in zip(smallest, shares_RG[row], strict=True)
                )
                best = Mapping(sets, tuple(counts), float(total_R[row]))
    if best is None:
        raise ValueError(
            f"{', '.join(models)} do not fit on {devices} devices: no placement can run"
        )
    return best


def _text(sets: Sets) -> str:
    return " | ".join("+".join(group) for group in sets)


def _shares(spare: int, groups: int) -> Iterator[np.ndarray]:
    """Yields, in parts, all ways to share `spare` devices out: int arrays (R, groups)."""
    dividers = itertools.combinations(range(spare + groups - 1), groups - 1)
    while part := list(itertools.islice(dividers, ROWS)):
        cuts_RG = np.array(part, np.int64).reshape(len(part), groups - 1)
        edges = np.column_stack(
            [np.full(len(part), -1), cuts_RG, np.full(len(part), spare + groups - 1)]
        )
        yield np.diff(edges, axis=1) - 1
