"""Pallas (Mosaic GPU) kernels for Hopper, and how to compile for it without one.

Imports jax, numpy and absl only; knows nothing of megajax.
"""

from pallas_kernels.attention.api import packed_attention as packed_attention
from pallas_kernels.attention.api import varlen_attention as varlen_attention
