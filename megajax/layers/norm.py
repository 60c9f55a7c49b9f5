"""RMSNorm and LayerNorm with float32 statistics."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.layout import Layout
from megajax.layers import param


class Norm(nnx.Module):
    """Normalises the last dimension, then scales (and shifts, for LayerNorm).

    The scale is whole on every device: its gradient is a few kilobytes.
    """

    def __init__(
        self, kind: Literal["rms", "layer"], width: int, eps: float, layout: Layout | None
    ):
        """Makes the parameters: scale 1, shift 0."""
        self.kind, self.eps = kind, eps
        self.scale = param.constant(layout, (width,), (None,), 1.0)
        if kind == "layer":
            self.shift = param.constant(layout, (width,), (None,), 0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x normalised, in x's dtype."""
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + self.eps)
        y = y * param.broadcast(self.scale, y, y.dtype)
        if self.kind == "layer":
            y = y + param.broadcast(self.shift, y, y.dtype)
        return y.astype(x.dtype)
