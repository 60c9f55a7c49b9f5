"""Sums over the inputs of a product on calibration text, as GPTQ, AWQ and indicators need them.

    h = sum over tokens of x x^T,   total = sum of x,   absolute = sum of |x|,   count = tokens

If a weight changes by dW, the squared error of the product over these tokens is
sum_n dW_n^T h dW_n, so the inputs themselves are not needed.

Legend: T tokens, K inputs of a product, N its outputs.
"""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Sums over tokens, float32: count (), h_KK, total_K and absolute_K, see the module's text."""

    count: Array
    h_KK: Array
    total_K: Array
    absolute_K: Array

    @classmethod
    def empty(cls, inputs: int) -> Self:
        """Returns the sums over no tokens, for a product with so many inputs."""
        zeros_K = jnp.zeros(inputs, jnp.float32)
        return cls(
            jnp.zeros((), jnp.float32), jnp.zeros((inputs,) * 2, jnp.float32), zeros_K, zeros_K
        )

    @classmethod
    def of(cls, x_xK: Array) -> Self:
        """Returns the sums over the rows of x (any leading dimensions, K), in float32."""
        x_TK = x_xK.reshape(-1, x_xK.shape[-1]).astype(jnp.float32)
        h_KK = jnp.matmul(x_TK.T, x_TK, precision="highest")
        return cls(jnp.float32(len(x_TK)), h_KK, x_TK.sum(0), jnp.abs(x_TK).sum(0))

    def __add__(self, other: Self) -> Self:
        """Returns the sums over the tokens of both."""
        return jax.tree.map(jnp.add, self, other)

    @property
    def inputs(self) -> int:
        """K, the number of inputs."""
        return self.total_K.shape[-1]

    @property
    def variance_K(self) -> Array:
        """The variance of each input over the tokens."""
        count = jnp.maximum(self.count, 1)
        square_K = jnp.diagonal(self.h_KK) / count
        return jnp.maximum(square_K - (self.total_K / count) ** 2, 0)

    def error(self, change_KN: Array) -> Array:
        """Returns the squared error of the product, summed over tokens and outputs, ()."""
        change_KN = change_KN.astype(jnp.float32)
        return jnp.sum(jnp.matmul(self.h_KK, change_KN, precision="highest") * change_KN)


def statistics_of(inputs_TK: Array | Statistics, inputs: int, op: str) -> Statistics:
    """Returns the Statistics of the inputs of a product.

    Args: inputs_TK: the inputs (T, K), or their Statistics. inputs: K of the product. op: the name
      for messages.
    Raises: UserError if K differs, there is no token, or a number is not finite.
    """
    statistics = inputs_TK if isinstance(inputs_TK, Statistics) else None
    if statistics is None:
        if getattr(inputs_TK, "ndim", 0) < 2:
            raise UserError(f"{op}: the inputs must have the shape (tokens, {inputs})")
        statistics = Statistics.of(jnp.asarray(inputs_TK))
    if statistics.inputs != inputs:
        raise UserError(
            f"{op}: the weight has {inputs} rows, and the calibration is of {statistics.inputs} "
            "inputs; they must be as many"
        )
    if not statistics.count > 0:
        raise UserError(f"{op}: the calibration has no token; it must have one at least")
    if not jnp.isfinite(statistics.h_KK).all():
        raise UserError(
            f"{op}: the calibration's inputs, or the sums of their products, are not all finite"
        )
    return statistics
