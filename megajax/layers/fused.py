"""Seams of a block filled with fused kernels, for arrays that lie on one device.

ByteTransformer (arXiv 2210.03052) section 3.2: bias, residual and LayerNorm in one pass over the
tokens, bias and GELU at the end of their GEMM. Each kernel runs where it can and its plain JAX
reference elsewhere. Under a mesh they belong inside a shard_map.

Legend: B rows, S positions, D model width, F feed-forward width.
"""

from collections.abc import Callable

import jax

import pallas_kernels
from megajax.layers import ops
from megajax.layers.mlp import Mlp
from megajax.layers.norm import Norm
from pallas_kernels import fused_layer_norm
from pallas_kernels.dispatch import Implementation


def settle(
    norm: Norm,
    y_BSD: jax.Array,
    residual_BSD: jax.Array,
    bias: jax.Array,
    drop: Callable | None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """norm(residual + drop(y + bias)) as one kernel; with dropout, which lies between, as many."""
    if drop is not None:
        return ops.settle(norm, y_BSD, residual_BSD, bias, drop)
    return fused_layer_norm(
        y_BSD,
        residual=residual_BSD,
        bias=bias,
        scale=norm.scale[...],
        offset=norm.shift[...] if norm.kind == "layer" else None,
        kind=norm.kind,
        eps=norm.eps,
        implementation=implementation,
    )[0]


def has_gemm() -> bool:
    """Whether there is a GEMM with an epilogue, which `expand` needs."""
    return hasattr(pallas_kernels, "fused_gemm")


def expand(
    mlp: Mlp,
    x_BSD: jax.Array,
    up: Callable,
    matmul: Callable,
    implementation: Implementation | None = None,
) -> jax.Array:
    """activation(x w + bias), hidden_BSF, as one GEMM; a gated layer, which has two, as many."""
    if mlp.cfg.activation == "swiglu":
        return ops.expand(mlp, x_BSD, up, matmul)
    bias = mlp.up_bias[...] if mlp.cfg.bias else None

    def product(x_BSD: jax.Array, w_DF: jax.Array) -> jax.Array:
        gemm = getattr(pallas_kernels, "fused_gemm")  # noqa: B009
        options = {"activation": mlp.cfg.activation, "implementation": implementation}
        return gemm(x_BSD, w_DF, bias=bias, **options)

    return up(x_BSD, mlp.inputs, product)[0]
