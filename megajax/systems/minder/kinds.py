"""The fault type that explains an alert: that whose signature is nearest to a machine's scores.

What each type does to which metrics stands in monitor/fleet/kinds.py. Only its names and shares are
Minder's (NSDI 2025, arXiv 2411.01791, table 1): signs and sizes are ASSUMED, because the paper's
table of probabilities is not public. Simulated jobs are drawn from that table too, so the types of
their alerts say nothing of how well the types of real faults are told. Whether a machine is named
does not depend on its type.
"""

import functools
from collections.abc import Mapping

from megajax.monitor.fleet.kinds import GROUPS, KINDS

# Metrics of real exporters (monitor/sources/names.py) that the simulator does not have.
ALSO = {"disk": ("disk_busy", "disk_throughput")}
LEAST = 0.45  # (chosen) cosine below which no type is near


def nearest(scores: Mapping[str, float]) -> str:
    """Returns the type whose signature has the largest cosine with the scores of a machine.

    scores: {metric: score with its sign} of all metrics that are measured; 'unknown' where no type
    is near, as with metrics that the table does not have. A group of metrics of which none is
    measured counts against a type that moves it: without it, one common metric would make types
    alike.
    """
    length = sum(s * s for s in scores.values()) ** 0.5
    best, name = LEAST, "unknown"
    for kind in KINDS:
        signature = _signature(kind, frozenset(scores))
        shared = sum(s * signature.get(m, 0.0) for m, s in scores.items())
        own = sum(w * w for w in signature.values()) ** 0.5
        if length and shared / (length * own) > best:
            best, name = shared / (length * own), kind
    return name


@functools.lru_cache(256)
def _signature(kind: str, measured: frozenset[str]) -> Mapping[str, float]:
    """Returns {metric: signed weight}. The weight of a group, the probability that it moves times
    the median size, is that of the length of all its measured metrics; an unmeasured group stands
    there by its own name."""
    found: dict[str, float] = {}
    for effect in KINDS[kind].effects:
        sign = 1.0 if effect.target == "high" else -1.0
        weight = sign * effect.probability * (effect.low * effect.high) ** 0.5
        group = (*GROUPS[effect.group], *ALSO.get(effect.group, ()))
        members = [m for m in group if m in measured] or [f"({effect.group})"]
        for metric in members:
            found[metric] = found.get(metric, 0.0) + weight / len(members) ** 0.5
    return found
