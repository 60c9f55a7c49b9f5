"""LLM-PQ (arXiv 2403.01136): partition, bits and micro-batches for serving on unlike devices."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "costs": ("Workload",),
        "hosts": ("RayRuntime", "cluster_devices"),
        "planning": ("plan",),
        "presets": ("PRESETS",),
        "problem": ("Placement", "Problem"),
        "runtime": ("Runtime",),
        "solver": ("solve",),
        "stages": ("StageError",),
    },
)
