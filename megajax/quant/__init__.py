"""Numbers in few bits: formats, quantized arrays and models, products, codecs for collectives."""

from megajax.core.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "activation_aware": ("awq",),
        "codecs": (
            "Codec",
            "codec",
            "Feedback",
        ),
        "formats": ("Format",),
        "indicators": ("sensitivity",),
        "compensated": ("gptq",),
        "precisions": ("Precisions",),
        "products": ("matmul",),
        "qtensor": (
            "QTensor",
            "dequantize",
            "quantize",
            "hadamard",
        ),
        "quantized_model": ("quantize_model",),
        "statistics": ("Statistics",),
    },
)
