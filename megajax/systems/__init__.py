"""Compositions: parts of the library put together for one purpose."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "prune_export": ("to_tiles",),
        "pruning": (
            "prune",
            "Pruner",
        ),
    },
)
