"""norm(x + bias + residual) in plain JAX, with a backward pass that keeps little.

Autodiff would keep several float32 copies of the activations; this keeps h in its own type and two
statistics a row. With n = (h - mean) r, r = 1 / sqrt(variance + eps) and g = dy scale:
dh = r (g - mean(g) - n mean(g n)), the mean of g left out for RMSNorm. Computed in float32, and in
float64 where x is.

Legend: x any leading dimensions (T packed tokens when y is unpacked), 1 one, D model width, B
sequences, S padded length.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.packing import reference as packing

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static. centred: LayerNorm, else RMSNorm. bias, offset: whether there is one.

    writes: h is a result of its own, not x. length: S, where y is unpacked; None: it is not.
    """

    centred: bool
    eps: float
    bias: bool
    offset: bool
    writes: bool
    length: int | None = None


def flops(centred: bool, backward: bool, added: bool, bias: bool) -> int:
    """Returns the operations of an element, one for each that the formulas below have.

    added: a residual, backward a gradient of h. bias: is added too.
    """
    norm = (13 if backward else 8) if centred else (10 if backward else 5)
    return norm + added + bias


def forward(
    x_xD: Array,
    residual_xD: Array | None,
    bias_D: Array | None,
    scale_D: Array,
    offset_D: Array | None,
    cu_seqlens: Array | None,
    *,
    spec: Spec,
) -> tuple[Array, Array, Array, Array]:
    """Returns (y_xD, or y_BSD when it is unpacked; h_xD in x's type; mean_x1, rate_x1 float32).

    Unpacked, h is 0 in the dead tail, whatever x holds there; where not spec.writes it is x.
    """
    exact_xD = _wide(x_xD)
    if bias_D is not None:
        exact_xD += _row(bias_D, x_xD)
    if residual_xD is not None:
        exact_xD += _wide(residual_xD)
    if cu_seqlens is not None:
        live_T1 = (jnp.arange(x_xD.shape[0], dtype=jnp.int32) < cu_seqlens[-1])[:, None]
        exact_xD = jnp.where(live_T1, exact_xD, 0.0)
    centred_xD = exact_xD - exact_xD.mean(-1, keepdims=True) if spec.centred else exact_xD
    rate_x1 = jax.lax.rsqrt((centred_xD**2).mean(-1, keepdims=True) + spec.eps)
    mean_x1 = exact_xD.mean(-1, keepdims=True) if spec.centred else jnp.zeros_like(rate_x1)
    y_xD = centred_xD * rate_x1 * _row(scale_D, x_xD)
    if offset_D is not None:
        y_xD += _row(offset_D, x_xD)
    y = y_xD.astype(x_xD.dtype)
    if cu_seqlens is not None and spec.length is not None:
        y = packing.unpack(y, cu_seqlens, spec.length)
    return y, exact_xD.astype(x_xD.dtype) if spec.writes else x_xD, mean_x1, rate_x1


def backward(
    h_xD: Array,
    mean_x1: Array,
    rate_x1: Array,
    scale_D: Array,
    dy_xD: Array,
    dh_xD: Array | None,
    *,
    spec: Spec,
) -> tuple[Array, Array | None, Array, Array | None]:
    """Returns (dx_xD; dbias_D or None, dscale_D, doffset_D or None, float32).

    dh_xD: None where only y is used.
    """
    dy_xD = _wide(dy_xD)
    unit_xD = (_wide(h_xD) - mean_x1) * rate_x1
    g_xD = dy_xD * _row(scale_D, h_xD)
    correction_xD = unit_xD * (g_xD * unit_xD).mean(-1, keepdims=True)
    if spec.centred:
        correction_xD += g_xD.mean(-1, keepdims=True)
    dx_xD = rate_x1 * (g_xD - correction_xD)
    if dh_xD is not None:
        dx_xD += _wide(dh_xD)
    dscale_D, doffset_D, dbias_D = sums(h_xD, mean_x1, rate_x1, dy_xD, dx_xD, spec)
    return dx_xD.astype(h_xD.dtype), dbias_D, dscale_D, doffset_D


def sums(
    h_xD: Array, mean_x1: Array, rate_x1: Array, dy_xD: Array, dx_xD: Array, spec: Spec
) -> tuple[Array, Array | None, Array | None]:
    """Returns (dscale_D, doffset_D or None, dbias_D or None), float32."""
    rows = tuple(range(h_xD.ndim - 1))
    dy_xD = _wide(dy_xD)
    unit_xD = (_wide(h_xD) - mean_x1) * rate_x1
    return (
        (dy_xD * unit_xD).sum(rows),
        dy_xD.sum(rows) if spec.offset else None,
        _wide(dx_xD).sum(rows) if spec.bias else None,
    )


def _row(value_D: Array, like_xD: Array) -> Array:
    return value_D.astype(_wide(like_xD).dtype).reshape((1,) * (like_xD.ndim - 1) + (-1,))


def _wide(x: Array) -> Array:
    """Converts x to the type of computation: float32, or float64 if x is of it."""
    return x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
