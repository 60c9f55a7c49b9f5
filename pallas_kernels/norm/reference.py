"""norm(x + bias + residual) in plain JAX, with a backward pass that keeps little.

Autodiff would keep several float32 copies of the activations; this keeps h in its own type and two
statistics a row. With n = (h - mean) r, r = 1 / sqrt(variance + eps) and g = dy scale:
dh = r (g - mean(g) - n mean(g n)), the mean of g left out for RMSNorm.

Legend: x any leading dimensions, 1 one, D model width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch

Array = jax.Array


def forward(
    x_xD: Array,
    residual_xD: Array | None,
    bias_D: Array | None,
    scale_D: Array,
    offset_D: Array | None,
    *,
    kind: str,
    eps: float,
) -> tuple[Array, Array]:
    """Returns (y_xD, h_xD) in x's type."""
    arrays = dispatch.alike((x_xD, residual_xD, bias_D, scale_D, offset_D))
    return _norm(*arrays, kind == "layer", eps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _norm(x_xD, residual_xD, bias_D, scale_D, offset_D, centred, eps):
    return _forward(x_xD, residual_xD, bias_D, scale_D, offset_D, centred, eps)[0]


def _forward(x_xD, residual_xD, bias_D, scale_D, offset_D, centred, eps):
    exact_xD = x_xD.astype(jnp.float32)
    if bias_D is not None:
        exact_xD += _row(bias_D, x_xD)
    if residual_xD is not None:
        exact_xD += residual_xD.astype(jnp.float32)
    mean_x1 = exact_xD.mean(-1, keepdims=True) if centred else jnp.zeros(())
    centred_xD = exact_xD - mean_x1
    rate_x1 = jax.lax.rsqrt((centred_xD**2).mean(-1, keepdims=True) + eps)
    y_xD = centred_xD * rate_x1 * _row(scale_D, x_xD)
    if offset_D is not None:
        y_xD += _row(offset_D, x_xD)
    h_xD = exact_xD.astype(x_xD.dtype)
    given = None if residual_xD is None else ()  # in the structure: values may be traced
    saved = (h_xD, mean_x1, rate_x1, scale_D, bias_D, offset_D, given)
    return (y_xD.astype(x_xD.dtype), h_xD), saved


def _backward(centred, eps, saved, cotangents):
    h_xD, mean_x1, rate_x1, scale_D, bias_D, offset_D, given = saved
    dy_xD, dh_xD = (x.astype(jnp.float32) for x in cotangents)
    unit_xD = (h_xD.astype(jnp.float32) - mean_x1) * rate_x1
    g_xD = dy_xD * _row(scale_D, h_xD)
    correction_xD = unit_xD * (g_xD * unit_xD).mean(-1, keepdims=True)
    if centred:
        correction_xD += g_xD.mean(-1, keepdims=True)
    dx_xD = dh_xD + rate_x1 * (g_xD - correction_xD)
    dx = dx_xD.astype(h_xD.dtype)
    return (
        dx,
        None if given is None else dx,
        _sum(dx_xD, bias_D),
        _sum(dy_xD * unit_xD, scale_D),
        _sum(dy_xD, offset_D),
    )


_norm.defvjp(_forward, _backward)


def _row(value_D: Array, like_xD: Array) -> Array:
    return value_D.astype(jnp.float32).reshape((1,) * (like_xD.ndim - 1) + (-1,))


def _sum(gradient_xD: Array, like_D: Any) -> Array | None:
    """Over the leading dimensions, in float32 until the end."""
    if like_D is None:
        return None
    return gradient_xD.sum(tuple(range(gradient_xD.ndim - 1))).astype(like_D.dtype)
