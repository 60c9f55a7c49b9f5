"""Saving and loading: run checkpoints through Orbax, Hugging Face folders, safetensors."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "integrity": ("DamagedError", "UnreadableError"),
        "lease": ("Attempt", "SupersededError"),
        "manager": ("CheckpointManager",),
        "planner": ("PlanCache",),
        "storage": ("SaveError", "SaveHandle"),
        "store": ("CheckpointError",),
    },
)
