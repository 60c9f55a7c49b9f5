"""Samples from the records of a run (megajax/monitor/records.py), as a driver receives them.

A machine is a host, a metric the name of a record. The ranks and devices of a host are its devices:
their mean and extremes count (convert.py). Times are those of the hosts' clocks. Texts are no
metrics.
"""

import math
from collections.abc import Mapping, Sequence

from megajax.monitor.records import Record
from megajax.monitor.samples import Samples
from megajax.monitor.sources.convert import canonical


def from_records(records: Sequence[Record], offset_s: Mapping[str, float] | None = None) -> Samples:
    """Returns the numbers of records as samples.

    offset_s: by host, how many seconds its clock is ahead; it is taken away.
    """
    ahead = offset_s or {}

    def metric(r: Record) -> str:
        places = (("rank", r.rank), ("device", r.device))
        labels = ",".join(f'{name}="{number}"' for name, number in places if number is not None)
        return f"{r.name}{{{labels}}}" if labels else r.name

    return canonical(
        Samples.of(
            (r.time - ahead.get(r.host, 0.0), r.host, metric(r), float(r.value))
            for r in records
            if isinstance(r.value, int | float) and math.isfinite(r.time)
        )
    )
