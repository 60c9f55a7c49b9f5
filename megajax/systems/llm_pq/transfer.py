"""The heuristic of LLM-PQ, "bitwidth transfer" (arXiv 2403.01136): fast, legal, not optimal.

The heuristic starts from the widths with the least loss of quality ("adabits") and makes one change
after another. In a change, either the slowest device (the straggler) gives a layer to a faster one
(a pioneer), which may store another layer in fewer bits to make room; or the straggler stores one
of its layers in fewer bits while another device uses more, so that the quality holds. The change
that shortens the run most is made, until none does.

The paper lists the changes that it tries (16 bits of a pioneer against two straggler layers of 8,
...). Here all changes with one moved layer and up to one layer of another width are tried.

Legend: D devices, B widths in bits.
"""

from collections.abc import Iterator

import numpy as np

from megajax.systems.llm_pq.arrange import widths
from megajax.systems.llm_pq.problem import SLACK, Problem
from megajax.systems.llm_pq.search import CLOSE, Pair, Search

TRIED = 3  # (chosen) pairs of micro-batch sizes: those whose start is fastest
STEPS = 400  # (chosen) changes at most


def counts_seconds(problem: Problem, counts_DB: np.ndarray, pair: Pair) -> float:
    """Returns the time of problem.timed, which only the counts decide."""
    prefill, decode = pair
    used = counts_DB.sum(1) > 0
    links = int(used.sum()) - 1

    def spent(table: np.ndarray, hop: float) -> tuple[float, float]:
        each = (counts_DB * table).sum(1)
        return float(each.sum()) + links * hop, max(float(each.max()), hop if links else 0.0)

    total, slowest = spent(problem.prefill_s[prefill], problem.prefill_hop_s[prefill])
    seconds = total + (problem.batches(prefill) - 1) * slowest
    if problem.new_tokens > 1:
        m = problem.batches(decode)
        total, slowest = spent(problem.decode_s[decode], problem.decode_hop_s[decode])
        seconds += (problem.new_tokens - 2) * max(total, m * slowest) + total + (m - 1) * slowest
    return seconds


def transfer(search: Search, counts_DB: np.ndarray) -> None:
    """Improves the counts for the most promising pairs, and offers what it finds."""
    starts = sorted(search.bounds, key=lambda p: counts_seconds(search.problem, counts_DB, p))
    for pair in starts[:TRIED]:
        search.offer_counts(counts_DB, pair)
        climb(search, counts_DB.copy(), pair)


def climb(search: Search, counts_DB: np.ndarray, pair: Pair) -> None:
    """Makes the best change until none is left."""
    problem = search.problem
    now = counts_seconds(problem, counts_DB, pair)
    totals: dict[bytes, float] = {}

    def may_keep(counts: np.ndarray) -> bool:
        """Whether the best widths of layers, wherever they stand, keep the quality."""
        if search.quality is None:
            return True
        all_B = counts.sum(0)
        key = all_B.tobytes()
        if key not in totals:
            totals[key] = widths(problem.omega, all_B)[0]
        return totals[key] <= search.quality * (1 + SLACK)

    for _ in range(STEPS):
        if search.left <= 0:
            return
        straggler = int(_busy(problem, counts_DB, pair).argmax())
        better = []
        for change in _changes(counts_DB, straggler):
            seconds = counts_seconds(problem, change, pair)
            if seconds < now * (1 - CLOSE) and _fits(problem, change):
                better.append((seconds, change))
        for seconds, change in sorted(better, key=lambda item: item[0]):
            if search.left <= 0:
                return
            excess = search.offer_counts(change, pair) if may_keep(change) else 1.0
            if excess is not None and excess <= 0:
                counts_DB, now = change, seconds
                break
        else:
            return


def _busy(problem: Problem, counts_DB: np.ndarray, pair: Pair) -> np.ndarray:
    """Seconds that each device works in the whole run."""
    prefill, decode = pair
    rounds = max(problem.new_tokens - 1, 0) * problem.batches(decode)
    table = problem.prefill_s[prefill] * problem.batches(prefill)
    return (counts_DB * (table + problem.decode_s[decode] * rounds)).sum(1)


def _fits(problem: Problem, counts_DB: np.ndarray) -> bool:
    """Whether every device has room for its layers; the ends of the pipeline left out."""
    held = counts_DB @ (problem.layer_bytes + problem.cache_bytes)
    return bool((held <= problem.memory * (1 + SLACK)).all())


def _changes(counts_DB: np.ndarray, straggler: int) -> Iterator[np.ndarray]:
    """A layer leaves the straggler or changes its width there; then one layer may change too."""
    D, B = counts_DB.shape
    firsts = []
    for b in np.flatnonzero(counts_DB[straggler]):
        for device in range(D):
            for width in range(B):
                if (device, width) != (straggler, b):
                    first = counts_DB.copy()
                    first[straggler, b] -= 1
                    first[device, width] += 1
                    firsts.append(first)
    for first in firsts:
        yield first
        for device, b in zip(*np.nonzero(first), strict=True):
            for width in range(B):
                if width != b:
                    second = first.copy()
                    second[device, b] -= 1
                    second[device, width] += 1
                    yield second
