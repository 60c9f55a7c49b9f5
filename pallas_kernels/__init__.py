"""Pallas (Mosaic GPU) kernels for Hopper, and how to compile for it without one.

Imports jax, numpy and absl only; knows nothing of megajax.
"""

from pallas_kernels.attention.api import packed_attention as packed_attention
from pallas_kernels.attention.api import varlen_attention as varlen_attention
from pallas_kernels.collective.api import all_gather_matmul as all_gather_matmul
from pallas_kernels.collective.api import matmul_all_reduce as matmul_all_reduce
from pallas_kernels.collective.api import matmul_reduce_scatter as matmul_reduce_scatter
from pallas_kernels.gemm.api import fused_gemm as fused_gemm
from pallas_kernels.grouped.api import grouped_matmul as grouped_matmul
from pallas_kernels.norm.api import fused_layer_norm as fused_layer_norm
from pallas_kernels.norm.api import norm_unpack as norm_unpack
from pallas_kernels.packing.api import PackedTokens as PackedTokens
from pallas_kernels.packing.api import PackInfo as PackInfo
from pallas_kernels.packing.api import bucket as bucket
from pallas_kernels.packing.api import pack as pack
from pallas_kernels.packing.api import unpack as unpack
from pallas_kernels.paged.api import paged_attention as paged_attention
from pallas_kernels.quant_gemm.api import pack_weight as pack_weight
from pallas_kernels.quant_gemm.api import quant_matmul as quant_matmul
from pallas_kernels.quantize.api import dequantize_add as dequantize_add
from pallas_kernels.quantize.api import hadamard_quantize as hadamard_quantize
from pallas_kernels.quantize.api import reduce_hadamard as reduce_hadamard
from pallas_kernels.quantize.api import reduce_requantize as reduce_requantize
from pallas_kernels.quantize.api import subtract_quantize as subtract_quantize
from pallas_kernels.tile_sparse.api import tile_sparse_matmul as tile_sparse_matmul
from pallas_kernels.tile_sparse.api import values_of as values_of
from pallas_kernels.tile_sparse.api import with_values as with_values
from pallas_kernels.tile_sparse.format import TileSparse as TileSparse
