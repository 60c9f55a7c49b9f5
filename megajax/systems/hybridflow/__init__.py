"""HybridFlow (arXiv 2409.19256): reinforcement learning of language models as a dataflow.

One controller calls models (actor, critic, reference, rewards) that are SPMD programs on pools of
devices; the actor's weights go between a training and a generation layout (parallel/reshard.py).
"""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "batch": ("DataBatch",),
        "pool": ("ResourcePool", "WorkerGroup", "register", "register_protocol"),
        "command": ("run",),
        "config": ("HybridFlowConfig", "nano", "tiny"),
        "controller": (
            "Models",
            "token_rewards",
            "with_references",
            "with_tokens",
        ),
    },
)
