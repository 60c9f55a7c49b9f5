"""Numbers in few bits: formats, arrays that are stored in them, codecs of what is sent."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "codecs": ("Codec", "codec"),
        "feedback": ("Feedback",),
        "formats": ("Format",),
        "qtensor": ("QTensor", "dequantize", "quantize"),
        "transforms": ("hadamard",),
    },
)
