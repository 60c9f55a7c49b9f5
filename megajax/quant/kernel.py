"""QuantKernel: a quantized matrix as a model's parameter, by which `Ops.matmul` multiplies.

Legend: K inputs and N outputs of the matrix.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp

from megajax.core.packed import PackedWeight
from megajax.quant.qtensor import QTensor
from pallas_kernels import quant_matmul

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantKernel(PackedWeight):
    """A quantized matrix.

    weight: QTensor of (K, N) with groups along K; its arrays have two more leading dimensions,
    layers and pieces. scale: float32 (..., K), by which inputs are divided (AWQ); None: 1. order:
    int32 (..., K), index of the input that each row multiplies (for GPTQ's desc_act, in which the
    rows of a group are not neighbours); None: rows are in the order of the inputs.
    """

    weight: QTensor
    scale: Array | None = None
    order: Array | None = None

    def astype(self, dtype: Any) -> Self:
        """Returns itself: codes are multiplied with inputs of any floating type."""
        return self

    def matmul(
        self,
        x: Array,
        contract: int = 1,
        *,
        bias: Array | None = None,
        activation: Any = None,
    ) -> Array:
        """See PackedWeight.matmul; computed by pallas_kernels.quant_matmul."""
        lead, out = x.shape[: x.ndim - contract], self.shape[contract:]
        K, _ = self.weight.shape
        x_xK = x.reshape(*lead, K)
        if self.order is not None:
            x_xK = jnp.take(x_xK, self.order, axis=-1)
        if self.scale is not None:
            scale_xK = self.scale.astype(x.dtype).reshape((1,) * len(lead) + (K,))
            x_xK = x_xK / scale_xK
        fmt = self.weight.format
        y_xN = quant_matmul(
            x_xK,
            self.weight.values,
            self.weight.scales,
            bits=fmt.width,
            group=fmt.group_of(K),
            zeros=self.weight.zeros,
            bias=bias,
            activation=activation,
        )
        return y_xN.reshape(*lead, *out)
