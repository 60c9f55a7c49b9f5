"""Pallas (Mosaic GPU) kernels for Hopper, and how to compile for it without one.

Imports jax, numpy and absl only; knows nothing of megajax.
"""

from pallas_kernels.lazy import public

__getattr__, __dir__, __all__ = public(
    __name__,
    {
        "attention.api": ("packed_attention", "varlen_attention"),
        "collective.api": ("all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter"),
        "gemm.api": ("fused_gemm",),
        "grouped.api": ("grouped_matmul",),
        "norm.api": ("fused_layer_norm", "norm_unpack"),
        "packing.api": ("PackedTokens", "PackInfo", "bucket", "pack", "unpack"),
        "paged.api": ("paged_attention",),
        "quant_gemm.api": ("pack_weight", "quant_matmul"),
        "quantize.api": (
            "dequantize_add",
            "hadamard_quantize",
            "reduce_hadamard",
            "reduce_requantize",
            "subtract_quantize",
        ),
        "tile_sparse.api": ("tile_sparse_matmul", "values_of", "with_values"),
        "tile_sparse.format": ("TileSparse",),
    },
)
