"""Pure arithmetic about programs and machines: FLOPs, and what a compiled module will do."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "base": (
            "CostModel",
            "Op",
            "Workload",
            "mfu",
            "Routed",
            "Stack",
        ),
        "estimate": ("Estimate",),
        "kernels": ("Attention", "Embedding", "Experts", "Matmul", "Rowwise"),
        "program": ("records",),
        "record": (
            "OpRecord",
            "Tree",
            "product",
            "rowwise",
        ),
        "roofline": ("Roofline",),
        "step": ("StepShape",),
    },
)
