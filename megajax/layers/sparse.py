"""A block's products with tile-wise sparse weights, in the seams where dense ones are.

A leaf of the parameters becomes a `SparseKernel`: the packed tiles of a pruned matrix (Tile-Wise
sparsity, arXiv 2008.13006) and the shape that the block knows it by. Leaves that are arrays stay
dense, so a model may be sparse in part. On one device; systems/prune_export.py packs.

Legend: B rows, S positions, D model width, F any hidden width.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from megajax.layers import ops
from megajax.layers.mlp import Mlp
from pallas_kernels import TileSparse, tile_sparse_matmul
from pallas_kernels.dispatch import Implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseKernel:
    """weight: (K, N), or a stack of such, one a layer. shape: static, of one layer's dense kernel:
    (D, ...) of an input's, (..., D) of an output's."""

    weight: TileSparse
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def product(self, x: jax.Array, **options: Any) -> jax.Array:
        """x's last dims times the kernel. options: of tile_sparse_matmul."""
        K, N = self.weight.shape
        contract = 1 if self.shape[0] == K else len(self.shape) - 1
        lead, out = x.shape[: x.ndim - contract], self.shape[contract:]
        weight = self.weight.replace(values=self.weight.values.astype(x.dtype))
        return tile_sparse_matmul(x.reshape(*lead, K), weight, **options).reshape(*lead, *out)


def sparse_ops(base: ops.Ops, implementation: Implementation | None = None) -> ops.Ops:
    """Returns local ops whose `up`, `down` and `expand` take sparse leaves too.

    implementation: of tile_sparse_matmul; None: what it ships for this device.
    """

    def multiply(x: jax.Array, w: nnx.Param, matmul: Callable, contract: int | None) -> jax.Array:
        kernel = w.get_value()
        if isinstance(kernel, SparseKernel):
            return kernel.product(x, implementation=implementation)
        return matmul(x, ops.whole(w, x.dtype), contract=contract or kernel.ndim - 1)

    def up(x_BSD: jax.Array, weights: Sequence[nnx.Param], matmul: Callable) -> tuple:
        return tuple(multiply(x_BSD, w, matmul, 1) for w in weights)

    def down(
        products: Sequence[tuple[jax.Array, nnx.Param]],
        residual_BSD: jax.Array | None,
        matmul: Callable,
        bias: jax.Array | None = None,
        drop: Callable | None = None,
    ) -> jax.Array:
        terms = (multiply(x, w, matmul, None) for x, w in products)
        return ops.join(functools.reduce(operator.add, terms), residual_BSD, bias, drop)

    def expand(mlp: Mlp, x_BSD: jax.Array, _: Callable, matmul: Callable) -> jax.Array:
        kernel = mlp.inputs[-1].get_value()
        if mlp.cfg.activation == "swiglu" or not isinstance(kernel, SparseKernel):
            return base.expand(mlp, x_BSD, up, matmul)
        bias = mlp.up_bias[...] if mlp.cfg.bias else None
        options = {"activation": mlp.cfg.activation, "implementation": implementation}
        return kernel.product(x_BSD, bias=bias, **options)

    return dataclasses.replace(base, up=up, down=down, expand=expand)
