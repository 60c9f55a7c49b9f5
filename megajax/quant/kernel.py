"""QuantKernel: a quantized matrix as a model's parameter, by which `Ops.matmul` multiplies.

Legend: K inputs and N outputs of the matrix.
"""

import dataclasses
from collections.abc import Sequence
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

    def join(self, others: Sequence[PackedWeight]) -> PackedWeight | None:
        """See PackedWeight.join. Not for weights with a scale or an order of their inputs."""
        every = [self, *(w for w in others if isinstance(w, QuantKernel))]
        alike = all(
            w.scale is None
            and w.order is None
            and w.weight.format == self.weight.format
            and (w.weight.zeros is None) == (self.weight.zeros is None)
            and w.weight.dtype == self.weight.dtype
            for w in every
        )
        if len(every) <= len(others) or not alike:
            return None
        K, columns = self.weight.shape[0], sum(w.weight.shape[1] for w in every)

        def side_by_side(name: str) -> Any:
            arrays = [getattr(w.weight, name) for w in every]
            if arrays[0] is None:
                return None
            return jax.device_put(jnp.concatenate(arrays, -1), arrays[0].sharding)

        arrays = {name: side_by_side(name) for name in ("values", "scales", "zeros")}
        weight = dataclasses.replace(self.weight, shape=(K, columns), **arrays)
        return QuantKernel((K, columns), weight)

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
            scale_xK = self.scale.reshape((1,) * len(lead) + (K,))
            x_xK = (x_xK.astype(jnp.float32) / scale_xK).astype(x.dtype)  # rounds once
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
