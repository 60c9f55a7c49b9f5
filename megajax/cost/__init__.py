"""Pure arithmetic about programs and machines: FLOPs, and what a compiled module will do."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "base": ("CostModel", "Op", "Workload"),
        "estimate": ("Estimate",),
        "flops": ("mfu",),
        "kernels": ("Attention", "Embedding", "Experts", "Matmul", "Rowwise"),
        "operators": ("product", "rowwise"),
        "program": ("records",),
        "record": ("OpRecord", "Tree"),
        "roofline": ("Roofline",),
        "step": ("StepShape",),
        "transformer": ("Routed", "Stack"),
    },
)
