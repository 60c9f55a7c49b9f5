"""What data parallelism sends in a planned step: the codec's bytes by level, seconds as estimates.

For steps with an exchange of their own (--wire, --shard.zero=optimizer); what others gather and
scatter stands among a plan's collectives.
"""

from typing import Any

from megajax.core.hardware import Cluster
from megajax.cost import traffic
from megajax.cost.estimate import transfer_seconds
from megajax.cost.roofline import Roofline
from megajax.cost.step import StepShape


def figures(step: StepShape, cluster: Cluster) -> dict[str, Any]:
    """Returns what JSON tells of the exchange: rows by level and axes, the time of quantizing."""
    model = Roofline()
    found: dict[tuple, float] = {}
    for m in traffic.messages(step):
        one = traffic.Transfer(m.kind, m.axes, m.nbytes, m.count, 0.0, m.level)
        seconds = transfer_seconds(one, step, cluster, model, 1.0)[0]
        key = m.level, m.kind, m.axes
        found[key] = found.get(key, 0.0) + seconds
    return {
        "label": "estimate",
        "rows": [
            {
                "level": row.level,
                "collective": row.kind,
                "axes": "+".join(row.axes),
                "bits": row.bits,
                "bytes": row.nbytes,
                "estimate_s": found[row.level, row.kind, row.axes],
            }
            for row in traffic.rows(step)
        ],
        "quantize_bytes": traffic.coded_bytes(step),
        "estimate_quantize_s": model.op_time(traffic.coding_op(step), cluster.card)[0],
    }


def seconds(found: dict[str, Any]) -> float:
    """Returns the estimate of a whole exchange, quantizing included."""
    return sum(row["estimate_s"] for row in found["rows"]) + found["estimate_quantize_s"]
