"""Simulates a placement event by event: every micro-batch through every stage and link.

The simulation does not use the formula that the planner minimises (problem.py:timed), so it checks
it. Stages and links process one micro-batch at a time, first come first served. Decoding starts
after all prompts. A micro-batch begins its next token when its previous one has left the last
stage.

Here the times of micro-batches may differ, and those of decoding may grow with every token; the
formula leaves both out.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

from megajax.systems.llm_pq.problem import Placement, Problem, Times

# (micro-batch, round) -> seconds on each stage and link in the order of the pipeline.
Seconds = Callable[[int, int], Sequence[float]]


def run(seconds: Seconds, batches: int, rounds: int) -> float:
    """Returns the seconds until the last micro-batch has left the last stage for the last time.

    All micro-batches wait before the first stage at time 0, in their order, and pass through the
    pipeline `rounds` times.
    """
    first = list(seconds(0, 0))
    free = [0.0] * len(first)  # when each stage and link is free again
    # (time of arrival, order of arrival, micro-batch, round, place): the earliest is served first.
    waiting = [(0.0, k, k, 0, 0) for k in range(batches)]
    arrivals, end = batches, 0.0
    while waiting:
        arrived, _, batch, lap, place = heapq.heappop(waiting)
        left = max(arrived, free[place]) + seconds(batch, lap)[place]
        free[place] = left
        place += 1
        if place == len(free):
            end = max(end, left)
            lap, place = lap + 1, 0
            if lap == rounds:
                continue
        heapq.heappush(waiting, (left, arrivals, batch, lap, place))
        arrivals += 1
    return end


def simulate(problem: Problem, placement: Placement) -> Times:
    """Returns the simulated times of a placement; every micro-batch counts as a full one."""

    def places(table: np.ndarray, hop: float) -> list[float]:
        column = {b: k for k, b in enumerate(problem.bits)}
        found: list[float] = []
        for device, start, stop in placement.stages:
            found += [hop] if found else []
            found.append(sum(table[device, column[b]] for b in placement.bits[start:stop]))
        return found

    def phase(table: np.ndarray, hop: float, size: int, rounds: int) -> float:
        each = places(table, hop)
        return run(lambda _batch, _round: each, problem.batches(size), rounds)

    prefill, decode = placement.prefill_batch, placement.decode_batch
    prefill_s = phase(problem.prefill_s[prefill], problem.prefill_hop_s[prefill], prefill, 1)
    decode_s = 0.0
    if problem.new_tokens > 1:
        decode_s = phase(
            problem.decode_s[decode], problem.decode_hop_s[decode], decode, problem.new_tokens - 1
        )
    whole = prefill_s + decode_s
    tokens = problem.requests * problem.new_tokens
    return Times(prefill_s, decode_s, tokens / whole if whole else float("inf"))
