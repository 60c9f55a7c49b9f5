"""Saving and loading: run checkpoints through Orbax, and Hugging Face folders (hf), GGUF (gguf)."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "lease": ("Attempt", "SupersededError"),
        "manager": ("CheckpointManager",),
        "planner": ("PlanCache",),
        "sealing": ("SaveHandle",),
        "store": ("CheckpointError", "SaveError"),
        "trust": ("DamagedError", "UnreadableError"),
    },
)
