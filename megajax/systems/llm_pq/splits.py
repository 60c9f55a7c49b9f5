"""Partitions of layers of one width: the even split, and the one with the fastest slowest stage.

Rivals use them. The planner starts from them, so its result is never slower than theirs.
"""

import bisect
import itertools
from collections.abc import Iterator

import numpy as np

from megajax.systems.llm_pq.problem import SLACK, Problem, Stage


def even_split(problem: Problem) -> list[Stage]:
    """Returns stages with equally many layers, in the order of the cluster.

    The first devices take the remaining layers. Devices beyond the number of layers stay unused.
    """
    devices = min(problem.devices, problem.layers)
    small, more = divmod(problem.layers, devices)
    edges = [0]
    for d in range(devices):
        edges.append(edges[-1] + small + (d < more))
    return [(d, edges[d], edges[d + 1]) for d in range(devices)]


def partition(problem: Problem, column: int, seconds_D: np.ndarray) -> list[Stage] | None:
    """Returns the stages with the fastest slowest stage, all layers of one width; None: none fits.

    Among equally fast partitions, the slowest devices get as few layers as possible.
    Args: column: index of the width in problem.bits. seconds_D: seconds of one layer on each
    device.
    """
    each = problem.layer_bytes[column] + problem.cache_bytes
    D = problem.devices
    best: tuple[float, list[int], int, int] | None = None
    for first, last in itertools.product(range(D), repeat=2):
        if first == last and D > 1:
            continue  # one stage has both: a device alone is the case below
        room_D = problem.memory * (1 + SLACK)
        room_D[first] -= problem.first_bytes
        room_D[last] -= problem.last_bytes
        most_D = np.where(room_D < 0, 0, problem.layers)
        if each > 0:
            most_D = np.minimum(np.floor(np.maximum(room_D, 0) / each), most_D).astype(int)
        if (room_D[[first, last]] < 0).any():
            continue
        found = _spread(problem.layers, most_D, seconds_D)
        if found is None or not all(found[1][d] for d in (first, last)):
            continue
        if best is None or found[0] < best[0]:
            best = (*found, first, last)
    if best is None:
        return _alone(problem, each, seconds_D)
    _, counts, first, last = best
    between = [d for d in range(D) if d not in (first, last) and counts[d]]
    order = [first] if first == last else [first, *between, last]
    edges = np.cumsum([0, *(counts[d] for d in order)]).tolist()
    return [(d, edges[k], edges[k + 1]) for k, d in enumerate(order)]


def _alone(problem: Problem, each: float, seconds_D: np.ndarray) -> list[Stage] | None:
    need = each * problem.layers + problem.first_bytes + problem.last_bytes
    able = [d for d in range(problem.devices) if need <= problem.memory[d] * (1 + SLACK)]
    if not able:
        return None
    return [(min(able, key=lambda d: seconds_D[d]), 0, problem.layers)]


def _spread(
    layers: int, most_D: np.ndarray, seconds_D: np.ndarray
) -> tuple[float, list[int]] | None:
    """(slowest stage, layers of each device): the smallest bottleneck that holds all layers."""
    limits = sorted({float(k * s) for s in seconds_D for k in range(1, layers + 1)})

    def able(limit: float) -> np.ndarray:
        free_D = np.full(len(seconds_D), np.inf)  # layers that take no time
        fit_D = np.divide(limit, seconds_D, out=free_D, where=seconds_D > 0)
        return np.minimum(most_D, np.floor(fit_D * (1 + 1e-12))).astype(int)

    if int(able(limits[-1]).sum()) < layers:
        return None
    at = bisect.bisect_left(range(len(limits)), layers, key=lambda k: int(able(limits[k]).sum()))
    counts = able(limits[at])
    spare = int(counts.sum()) - layers
    for d in np.argsort(-seconds_D, kind="stable"):
        less = min(spare, max(int(counts[d]) - 1, 0))
        counts[d] -= less
        spare -= less
    return (limits[at], counts.tolist()) if spare == 0 else None


def simple(problem: Problem) -> Iterator[tuple[list[Stage], list[int]]]:
    """Yields (stages, bits) of both partitions at every width; they may break memory or quality."""
    for column, width in enumerate(problem.bits):
        bits = [width] * problem.layers
        yield even_split(problem), bits
        for table in problem.decode_s.values():
            stages = partition(problem, column, table[:, column])
            if stages is not None:
                yield stages, bits
