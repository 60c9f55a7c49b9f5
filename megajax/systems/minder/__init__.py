"""Minder (arXiv 2411.01791): which machine of a training job is about to stop it."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "alert": ("Alert",),
        "detector": ("Detector",),
        "settings": ("Settings",),
    },
)
