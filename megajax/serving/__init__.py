"""Generation: cached decoding and sampling."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "generate": ("Generator",),
        "sampling": ("SamplingConfig", "sample"),
    },
)
