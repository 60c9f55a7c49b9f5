"""Seams of a block filled with fused kernels, for arrays that lie on one device.

ByteTransformer (arXiv 2210.03052) section 3.2: bias, residual and LayerNorm in one pass over the
tokens; bias and GELU in the product's epilogue. Each kernel runs where it can and its plain JAX
reference elsewhere. Under a mesh they belong inside a shard_map.

Legend: B rows, S positions, D model width, F feed-forward width.
"""

from collections.abc import Callable
from typing import Any

import jax

from megajax.core.packed import PackedWeight
from megajax.layers import ops
from megajax.layers.mlp import ACTIVATIONS, Mlp
from megajax.layers.norm import Norm
from megajax.layers.param import Weight
from pallas_kernels import fused_gemm, fused_layer_norm
from pallas_kernels.dispatch import Implementation


def settle(
    norm: Norm,
    y_BSD: jax.Array,
    residual_BSD: jax.Array,
    bias: jax.Array,
    drop: Callable | None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns norm(residual + drop(y + bias)), (B, S, D), computed by one kernel.

    Dropout lies between the bias and the residual, where the kernel has no place for it: if `drop`
    is not None, `ops.settle` computes the result as separate operations instead.
    """
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


def expand(
    mlp: Mlp,
    x_BSD: jax.Array,
    up: Callable,
    matmul: Callable,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Returns activation(x w + bias), hidden_BSF, computed by one GEMM with its epilogue.

    A gated layer has two products, whose results are multiplied; `ops.expand` computes it instead.
    """
    if ACTIVATIONS[mlp.cfg.activation].is_gated:
        return ops.expand(mlp, x_BSD, up, matmul)
    bias = mlp.up_bias[...] if mlp.cfg.bias else None

    def product(x_BSD: jax.Array, w: Weight, name: str | None = None) -> jax.Array:
        after: Any = {"bias": bias, "activation": mlp.cfg.activation}
        if isinstance(w, PackedWeight):
            return w.matmul(x_BSD, **after)
        return fused_gemm(x_BSD, w, implementation=implementation, **after)

    return up(x_BSD, mlp.inputs, product)[0]
