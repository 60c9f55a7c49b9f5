"""Every placement of a small problem, tried: what the planner's answers are compared with."""

import itertools

import numpy as np

from megajax.systems.llm_pq import Problem

# (order of devices, where stages end, bits, micro-batches, seconds)
Plan = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, int], float]


def problem(seed: int, *, layers=5, devices=3, bits=(4, 8, 16), alike=False, **changes) -> Problem:
    """Returns a random problem; changes: members that are to be others."""
    rng = np.random.default_rng(seed)
    B = len(bits)
    omega = np.sort(rng.uniform(0, 1, (1 if alike else layers, B)), 1)[:, ::-1]
    speed = rng.uniform(0.5, 3, (devices, 1))

    def times(growth: float) -> dict[int, np.ndarray]:
        width = speed * rng.uniform(1, 2, (devices, B))
        return {size: width * (0.3 + growth * size) for size in (1, 2, 4)}

    members = {
        "bits": bits,
        "omega": np.broadcast_to(omega, (layers, B)),
        "prefill_s": times(0.9),
        "decode_s": times(0.2),
        "prefill_hop_s": {1: 0.2, 2: 0.3, 4: 3.5},
        "decode_hop_s": {1: 0.1, 2: 0.9, 4: 0.2},
        "layer_bytes": np.array(bits) / 4,
        "cache_bytes": 0.5,
        "first_bytes": 1.0,
        "last_bytes": 1.7,
        "memory": rng.uniform(0.25, 1.3, devices) * layers * 12 / devices / 2,
        "requests": 4,
        "new_tokens": int(rng.integers(1, 9)),
    }
    return Problem(**(members | changes))


def best(p: Problem, quality: float | None) -> Plan | None:
    """Returns a fastest placement, or None when none keeps memory and quality."""
    L, D, B = len(p.omega), len(p.memory), len(p.bits)
    picks = np.array(list(itertools.product(range(B), repeat=L)))
    omega = sum(p.omega[i, picks[:, i]] for i in range(L))
    good = np.ones(len(picks), bool) if quality is None else omega <= quality * (1 + 1e-9)
    layer_bytes = np.asarray(p.layer_bytes)[picks] + p.cache_bytes
    fastest: Plan | None = None
    for count in range(1, min(D, L) + 1):
        for order in itertools.permutations(range(D), count):
            for inner in itertools.combinations(range(1, L), count - 1):
                edges = (0, *inner, L)
                spans = list(itertools.pairwise(edges))
                legal = good.copy()
                for k, (d, (a, b)) in enumerate(zip(order, spans, strict=True)):
                    held = layer_bytes[:, a:b].sum(1)
                    held = held + p.first_bytes * (k == 0) + p.last_bytes * (k == count - 1)
                    legal &= held <= p.memory[d] * (1 + 1e-9)
                if not legal.any():
                    continue
                for pair in itertools.product(p.prefill_s, p.decode_s):
                    seconds = np.where(legal, _seconds(p, order, spans, picks, pair), np.inf)
                    at = int(seconds.argmin())
                    if fastest is None or seconds[at] < fastest[-1]:
                        widths = tuple(p.bits[b] for b in picks[at])
                        fastest = (order, edges[1:], widths, pair, float(seconds[at]))
    return fastest


def _seconds(p: Problem, order, spans, picks, pair) -> np.ndarray:
    def places(table, hop):
        stages = [table[d][picks[:, a:b]].sum(1) for d, (a, b) in zip(order, spans, strict=True)]
        return np.stack(stages + [np.full(len(picks), hop)] * (len(order) - 1))

    prefill, decode = pair
    each = places(p.prefill_s[prefill], p.prefill_hop_s[prefill])
    total = each.sum(0) + (np.ceil(p.requests / prefill) - 1) * each.max(0)
    if p.new_tokens > 1:
        m, each = np.ceil(p.requests / decode), places(p.decode_s[decode], p.decode_hop_s[decode])
        lap = np.maximum(each.sum(0), m * each.max(0))
        total = total + (p.new_tokens - 2) * lap + each.sum(0) + (m - 1) * each.max(0)
    return total
