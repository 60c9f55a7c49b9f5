"""Tile-wise sparse weights in a model: packed tiles in the place of a block's matrix.

A leaf of the parameters becomes a `SparseKernel`: the packed tiles of a pruned matrix (Tile-Wise
sparsity, arXiv 2008.13006) and the shape that the block knows it by. Leaves that are arrays stay
dense, so a model may be sparse in part. systems/prune_export.py packs.
"""

import dataclasses
from typing import Any, Self

import jax

from megajax.core.packed import PackedWeight
from pallas_kernels import TileSparse, tile_sparse_matmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseKernel(PackedWeight):
    """weight: a stack of (K, N): the pieces, before them the layers.

    Differentiate by the values of the tiles (pallas_kernels.tile_sparse.api.values_of): the
    integers of a pattern have no gradient.
    """

    weight: TileSparse

    def astype(self, dtype: Any) -> Self:
        """Returns it with other values, the same pattern."""
        weight = self.weight.replace(values=self.weight.values.astype(dtype))
        return dataclasses.replace(self, weight=weight)

    def matmul(
        self,
        x: jax.Array,
        contract: int = 1,
        *,
        bias: jax.Array | None = None,
        activation: Any = None,
    ) -> jax.Array:
        """See PackedWeight.matmul; tile_sparse_matmul takes what it ships for this device."""
        lead, out = x.shape[: x.ndim - contract], self.shape[contract:]
        x_xK = x.reshape(*lead, self.weight.shape[0])
        y_xN = tile_sparse_matmul(x_xK, self.weight, bias=bias, activation=activation)
        return y_xN.reshape(*lead, *out)
