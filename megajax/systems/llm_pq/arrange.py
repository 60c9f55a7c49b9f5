"""Turns counts into the arrangement with the least loss: order of devices, width of each layer.

Counts say how many layers of each width every device has. If a device follows a set of other
devices, its layers are known, whatever the order inside the set. So the least loss is a shortest
path over sets of devices (Held and Karp), and the widths inside a stage are an assignment problem.
The result is exact. There are at most 2^stages sets, and far fewer if devices and counts are equal.
When the time for that ends, an order that the memory holds is taken instead of the best one.

Legend: D devices, B widths in bits, I layers of a stage.
"""

import itertools
import math
import time
from collections.abc import Callable

import numpy as np

from megajax.systems.llm_pq.problem import SLACK, Problem, Stage


def arrange(
    problem: Problem, counts_DB: np.ndarray, deadline: float = math.inf
) -> tuple[list[Stage], list[int]] | None:
    """Returns (stages, bits) with the least sum of omega; None: no order fits the memory.

    Args: counts_DB: layers of each width on each device, as many in all as the model has. deadline:
      of time.monotonic(); from then on the sum of omega is not the least.
    """
    devices = [int(d) for d in np.flatnonzero(counts_DB.sum(1))]
    sizes = counts_DB.sum(1)
    room_D = problem.memory * (1 + SLACK) - counts_DB @ (problem.layer_bytes + problem.cache_bytes)
    known: dict[tuple, tuple[float, list[int]]] = {}
    twin = _twins(problem, counts_DB, devices)

    def stage(start: int, d: int) -> tuple[float, list[int]]:
        key = (start, counts_DB[d].tobytes())
        if key not in known:
            known[key] = widths(problem.omega[start : start + sizes[d]], counts_DB[d])
        return known[key]

    order = _shortest(problem, devices, sizes, room_D, twin, stage, deadline)
    if order is None:
        return None
    found: list[Stage] = []
    bits: list[int] = []
    start = 0
    for d in order:
        found.append((d, start, start + int(sizes[d])))
        bits += [problem.bits[b] for b in stage(start, d)[1]]
        start += int(sizes[d])
    return found, bits


def _shortest(
    problem: Problem,
    devices: list[int],
    sizes: np.ndarray,
    room_D: np.ndarray,
    twin: list[int | None],
    stage: Callable[[int, int], tuple[float, list[int]]],
    deadline: float,
) -> list[int] | None:
    """Returns the devices in the order with the least sum of omega."""
    every = (1 << len(devices)) - 1
    least: dict[int, tuple[float, int, int]] = {0: (0.0, -1, 0)}  # set: (omega, last, set before)
    start_of, edge = {0: 0}, [0]
    while edge:  # sets of one more device each
        further: dict[int, None] = {}
        for done in edge:
            if time.monotonic() > deadline:
                return _any_order(problem, devices, room_D)
            for k, d in enumerate(devices):
                before = twin[k]
                if done >> k & 1 or (before is not None and not done >> before & 1):
                    continue
                more = done | 1 << k
                need = problem.first_bytes * (done == 0) + problem.last_bytes * (more == every)
                if need > room_D[d]:
                    continue
                omega = least[done][0] + stage(start_of[done], d)[0]
                if more not in least or omega < least[more][0]:
                    least[more] = (omega, k, done)
                    start_of[more] = start_of[done] + int(sizes[d])
                    further[more] = None
        edge = list(further)
    if every not in least:
        return None
    order: list[int] = []
    done = every
    while done:
        _, k, done = least[done]
        order.insert(0, devices[k])
    return order


def _any_order(problem: Problem, devices: list[int], room_D: np.ndarray) -> list[int] | None:
    """Returns an order of the devices whose first and last hold what the ends need."""
    if (room_D[devices] < 0).any():
        return None
    if len(devices) == 1:
        return devices if room_D[devices[0]] >= problem.first_bytes + problem.last_bytes else None
    for first, last in itertools.permutations(devices, 2):
        if room_D[first] >= problem.first_bytes and room_D[last] >= problem.last_bytes:
            return [first, *(d for d in devices if d not in (first, last)), last]
    return None


def _twins(problem: Problem, counts_DB: np.ndarray, devices: list[int]) -> list[int | None]:
    """Returns for each device the last one before it with the same memory and the same counts.

    Their order does not matter, so the later one never comes first.
    """
    found: list[int | None] = []
    last: dict[tuple, int] = {}
    for k, d in enumerate(devices):
        key = (float(problem.memory[d]), counts_DB[d].tobytes())
        found.append(last.get(key))
        last[key] = k
    return found


def widths(omega_IB: np.ndarray, counts_B: np.ndarray) -> tuple[float, list[int]]:
    """Returns (least sum of omega, index of the width of each layer) of one stage."""
    from scipy.optimize import linear_sum_assignment  # a third of a second

    slots = np.repeat(np.arange(len(counts_B)), counts_B)
    cost = omega_IB[:, slots]
    if (counts_B > 0).sum() == 1:
        picked = slots
    else:
        rows, columns = linear_sum_assignment(cost)
        picked = slots[columns[np.argsort(rows)]]
    return float(omega_IB[np.arange(len(picked)), picked].sum()), picked.tolist()
