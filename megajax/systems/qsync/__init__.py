"""QSync (arXiv 2407.02327): one training job on unlike GPUs, each kind with its own precisions."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "allocator": ("allocate", "Precisions"),
        "divergence": ("check_collectives",),
        "graph": ("Node", "Graph", "replay"),
        "programs": ("check_programs", "check_sequences", "sequence"),
        "rounding": ("Statistics", "Variance", "statistics", "variance", "indicator"),
    },
)
