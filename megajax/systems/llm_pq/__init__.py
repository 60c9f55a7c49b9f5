"""LLM-PQ (arXiv 2403.01136): plans and runs a pipeline of unlike devices that serves a model."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "planning": (
            "plan",
            "Workload",
            "PRESETS",
        ),
        "problem": ("Placement", "Problem"),
        "runtime": (
            "Runtime",
            "RayRuntime",
            "cluster_devices",
        ),
        "solver": ("solve",),
        "stages": ("StageError",),
    },
)
