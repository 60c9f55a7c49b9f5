"""The serving engine: requests in, tokens out, over paged keys and values."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "constraint": ("StructuredOutputsParams",),
        "engine": (
            "Engine",
            "Output",
        ),
        "params": ("SamplingParams",),
        "scheduler": (
            "Scheduler",
            "PagePool",
        ),
    },
)
