"""Mesh-aware execution: the rule tables, and Ops with communication in them."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "collective_matmul": ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"),
        "context": ("ContextSpec",),
        "expert_matmul": ("dispatch_grouped_matmul", "grouped_matmul_combine"),
        "pipeline": ("Pipeline", "PipelineConfig"),
        "sharding": ("ShardSpec", "layout"),
    },
)
