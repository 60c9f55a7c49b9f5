"""Names the fault type of an alert: the one whose signature is nearest to the machine's scores.

monitor/fleet/faults.py says how each type changes which metrics. Only its names and shares come
from Minder (NSDI 2025, arXiv 2411.01791, table 1). Signs and sizes are ASSUMED, because the paper's
table of probabilities is not public. Simulated jobs are drawn from the same table, so the types of
their alerts do not show how well the types of real faults are recognised. Whether a machine is
named does not depend on its type.
"""

import functools
from collections.abc import Mapping

from megajax.monitor.fleet.faults import GROUPS, KINDS

# Metrics of real exporters (monitor/sources/convert.py) that the simulator does not have.
ALSO = {"disk": ("disk_busy", "disk_throughput")}
LEAST = 0.45  # (chosen) cosine below which no type is near


def nearest(scores: Mapping[str, float]) -> str:
    """Returns the fault type whose signature has the largest cosine with a machine's scores.

    'unknown' if no type is near, for example with metrics that the table does not have. If a type
    changes a group of metrics of which none is measured, this counts against the type; otherwise
    types would look equal that share one measured metric.
    Args: scores: {metric: signed score} of all metrics that are measured.
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
    """Returns {metric: signed weight} of a fault type.

    The weight of a group of metrics is the probability that it changes times the median size. It is
    divided among the group's measured metrics so that their length is the weight. A group without a
    measured metric has one entry, named after the group.
    """
    found: dict[str, float] = {}
    for effect in KINDS[kind].effects:
        sign = 1.0 if effect.target == "high" else -1.0
        weight = sign * effect.probability * (effect.low * effect.high) ** 0.5
        group = (*GROUPS[effect.group], *ALSO.get(effect.group, ()))
        members = [m for m in group if m in measured] or [f"({effect.group})"]
        for metric in members:
            found[metric] = found.get(metric, 0.0) + weight / len(members) ** 0.5
    return found
