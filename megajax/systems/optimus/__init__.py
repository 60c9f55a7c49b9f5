"""Optimus (arXiv 2408.03505): an encoder's work in the bubbles of a decoder's pipeline."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "planner": ("Plan", "plan", "rivals", "simulate"),
        "problem": ("Degrees", "Job"),
    },
)
