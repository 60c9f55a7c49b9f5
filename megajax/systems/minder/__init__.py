"""Minder (arXiv 2411.01791): names the machine of a training job that is about to stop the job."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "detector": ("Alert", "Detector"),
        "settings": ("Settings",),
    },
)
