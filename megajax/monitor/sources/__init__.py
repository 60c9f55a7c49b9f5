"""Where the metrics of machines come from: a Prometheus server, files, the records of a run.

Each gives Samples (megajax/monitor/samples.py) under the names of the table in convert.py.
"""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "convert": ("canonical",),
        "files": (
            "read",
            "from_records",
        ),
        "http_query": ("Refused", "Unavailable"),
        "server": ("prometheus",),
    },
)
