"""Plans of equal MEASURED held-out loss: ours beside PipeEdge's partition, for a trained model.

The cluster of a preset is scaled down to the trained model: all devices keep their speeds and
their shares of the memory, whose sum has room for the same share of the weights beside caches,
embedding and head. Omega is what rounding one layer alone costs on text that is learnt. A rival has
one width. Several budgets of the sum of omega are tried, the loss
of each plan is measured, and the fastest plan whose measured loss is at most the rival's is
compared. Tokens a second are SIMULATED with the cost model's assumed efficiencies; the losses are
measured.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.reports.llm_pq_quality import (
    OURS,
    Subject,
    in_each_width,
    in_widths,
    measured_alone,
)
from megajax.core.errors import UserError
from megajax.core.hardware import MixedCluster
from megajax.core.tree import Tree
from megajax.quant.quantized_model import matrices
from megajax.systems.llm_pq import PRESETS, Problem, solve
from megajax.systems.llm_pq.costs import CONTEXT_BYTES, USABLE, Workload, problem_of
from megajax.systems.llm_pq.problem import Placement
from megajax.systems.llm_pq.quality import loss_of
from megajax.systems.llm_pq.rivals import Rival, rivals

STEP = 4.0  # (chosen) from one budget of omega to the next, until one loses more or less
CLOSE = 1.1  # (chosen) of budgets between which no other is tried
TRIES = 8  # (chosen) budgets for a rival's loss
NOISE = 1e-3  # (chosen) nats that losses may differ by and count as equal: 8 bits change as much
COMPARED = ("uniform", "pipeedge", "pipeedge_tuned")


def scaled_down(cluster: MixedCluster, large: Workload, small: Workload) -> MixedCluster:
    """Returns the cluster whose memory is as tight, in sum, for the small model."""
    theirs, ours = problem_of(large, cluster), problem_of(small, cluster)
    taken = theirs.layers * theirs.cache_bytes + theirs.first_bytes + theirs.last_bytes
    room = (theirs.memory.sum() - taken) / theirs.layers
    share = min(max(room, theirs.layer_bytes.min()) / theirs.layer_bytes.max(), 1.0)
    layer = ours.cache_bytes + share * ours.layer_bytes.max()
    total = ours.layers * layer + ours.first_bytes + ours.last_bytes
    cards = tuple(
        dataclasses.replace(card, memory_bytes=int((m + CONTEXT_BYTES) / USABLE) + 1)
        for card, m in zip(cluster.cards, total * theirs.memory / theirs.memory.sum(), strict=True)
    )
    return dataclasses.replace(cluster, cards=cards)


def rows(
    given: Subject, cases: Sequence[str], methods: Sequence[str], time_limit_s: float
) -> Iterator[dict[str, Any]]:
    """Yields a row for each case, way of rounding and rival."""
    for method in methods:
        params = in_each_width(given, OURS[method])
        omega = measured_alone(given, params)
        measure = measurer(given, params)
        for case in cases:
            workload, cluster = PRESETS[case]
            small = dataclasses.replace(
                workload, name=given.name, stack=given.cfg.stack, vocab=given.cfg.padded_vocab,
                positions=0, omega=omega,
            )  # fmt: skip
            problem = problem_of(small, scaled_down(cluster, workload, small))
            about = {"model": given.name, "case": case, "cluster": cluster.name, "method": method}
            known: dict[tuple[int, ...], list[dict[str, Any]]] = {}
            for rival in rivals(problem):
                if rival.name not in COMPARED or rival.omega == 0:
                    continue
                if rival.bits not in known:
                    known[rival.bits] = tried(problem, rival, measure, time_limit_s)
                yield about | compared(rival, measure(rival.bits), known[rival.bits])


def measurer(given: Subject, params: Mapping[int, Tree]) -> Callable[[Sequence[int]], float]:
    """Returns what measures the change of the held-out loss of given widths, each once."""
    names = matrices(given.cfg.axes)
    known: dict[tuple[int, ...], float] = {}

    def measure(bits: Sequence[int]) -> float:
        if (key := tuple(bits)) not in known:
            mixed = in_widths(params, names, key)
            known[key] = loss_of(mixed, given.cfg, given.judged) - given.dense
        return known[key]

    return measure


def tried(
    problem: Problem, rival: Rival, measure: Callable[[Sequence[int]], float], time_limit_s: float
) -> list[dict[str, Any]]:
    """Returns our plans with their measured losses.

    Budgets of the sum of omega begin at the rival's and grow while the loss is no larger than the
    rival's, or shrink until it is; then they halve the range in between.
    """
    found, wanted, budget = [], measure(rival.bits) + NOISE, rival.omega
    low, high, none = 0.0, math.inf, 0.0  # budgets that lose no more, lose more, have no plan
    for _ in range(TRIES):
        try:
            placement = solve(problem, quality=budget, time_limit_s=time_limit_s)
        except UserError:
            none = budget
        else:
            change = measure(placement.bits)
            found.append(_plan(placement, change) | {"budget": budget})
            print(f"    sum of omega {budget:.4g}: {change:+.4f} nats, "
                  f"{placement.tokens_per_s:.0f} tokens/s", flush=True)  # fmt: skip
            low, high = (budget, high) if change <= wanted else (low, budget)
        bottom = max(low, none)
        if bottom > 0 and high < math.inf:
            if high < CLOSE * bottom:
                break
            budget = (bottom * high) ** 0.5
        else:
            budget = bottom * STEP if bottom > 0 else high / STEP
    return found


def _plan(placement: Placement, change: float) -> dict[str, Any]:
    return {
        "stages": [list(s) for s in placement.stages], "bits": list(placement.bits),
        "prefill_batch": placement.prefill_batch, "decode_batch": placement.decode_batch,
        "omega": placement.omega, "gap": placement.gap, "loss_change": change,
        "tokens_per_s": placement.tokens_per_s,
    }  # fmt: skip


def compared(rival: Rival, change: float, plans: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a rival beside the fastest plan that loses no more."""
    good = [plan for plan in plans if plan["loss_change"] <= change + NOISE]
    ours = max(good, key=lambda plan: plan["tokens_per_s"], default=None)
    theirs = rival.times.tokens_per_s
    return {
        "rival": rival.name, "rival_bits": sorted(set(rival.bits)), "rival_loss_change": change,
        "rival_tokens_per_s": theirs, "tried": list(plans), "ours": ours,
        "mean_bits": None if ours is None else float(np.mean(ours["bits"])),
        "loss_change": None if ours is None else ours["loss_change"],
        "tokens_per_s": None if ours is None else ours["tokens_per_s"],
        "speedup": None if ours is None else ours["tokens_per_s"] / theirs,
    }  # fmt: skip


def told(row: Mapping[str, Any]) -> str:
    """Returns a row for the console."""
    theirs = (
        f"  {row['case']}, {row['method']}, {row['rival']} at {row['rival_bits'][0]} bits: "
        f"{row['rival_loss_change']:+.4f} nats, {row['rival_tokens_per_s']:.0f} tokens/s; "
    )
    if row["ours"] is None:
        return theirs + "no plan of ours loses as little"
    return theirs + (
        f"ours {row['loss_change']:+.4f} nats, {row['tokens_per_s']:.0f} tokens/s: "
        f"{row['speedup']:.2f}x (simulated)"
    )
