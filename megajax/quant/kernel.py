"""A quantized matrix in the place of a block's: what the model multiplies by.

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
    """weight: of the matrix (K, N), groups along K; its arrays are stacks: layers, pieces.

    scale: float32 (..., K) of the matrix's rows, by which inputs are divided (AWQ); None: 1.
    order: int32 (..., K), the input that each row multiplies (GPTQ's desc_act, which stores rows of
    one group apart); None: the inputs in their order.
    """

    weight: QTensor
    scale: Array | None = None
    order: Array | None = None

    def astype(self, dtype: Any) -> Self:
        """Returns it as it is: codes meet inputs of any floating type."""
        return self

    def matmul(
        self,
        x: Array,
        contract: int = 1,
        *,
        bias: Array | None = None,
        activation: Any = None,
    ) -> Array:
        """See PackedWeight.matmul; quant_matmul takes what it ships for this device."""
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
