"""RMSNorm and LayerNorm with float32 statistics."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from megajax.core.layout import Layout
from megajax.layers import param

NormKind = Literal["rms", "layer", "rms_plus_one"]


class Norm(nnx.Module):
    """Normalises the last dimension, then scales (and shifts, for LayerNorm).

    The scale is whole on every device: its gradient is a few kilobytes. Of the kind rms_plus_one it
    is stored as its distance from 1 (Gemma), which weight decay then makes smaller.
    """

    def __init__(self, kind: NormKind, width: int, eps: float, layout: Layout | None):
        """Makes the parameters: scale 1, shift 0."""
        self.kind, self.eps = kind, eps
        first = 0.0 if kind == "rms_plus_one" else 1.0
        self.scale = param.constant(layout, (width,), (None,), first)
        if kind == "layer":
            self.shift = param.constant(layout, (width,), (None,), 0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x normalised, in x's dtype."""
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + self.eps)
        scale = param.broadcast(self.scale, y, y.dtype)
        y = y * (1 + scale if self.kind == "rms_plus_one" else scale)
        if self.kind == "layer":
            y = y + param.broadcast(self.shift, y, y.dtype)
        return y.astype(x.dtype)
