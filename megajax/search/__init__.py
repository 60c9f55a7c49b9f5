"""Searches over plain numbers: no models, no arrays of a device."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "assign": ("Assignment",),
        "partition": ("balance",),
        "program": ("Program", "Solution"),
    },
)
