"""The product with its epilogue, and its gradients, in plain JAX: the specification and the oracle.

Legend: M rows (leading dimensions of x, flattened or not: written x), K contracted, N columns.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.activations import Spec, activate

Array = jax.Array


def forward(
    x_xK: Array, w_KN: Array, bias_N: Array | None, residual_xN: Array | None, *, spec: Spec
) -> tuple[Array, Array | None]:
    """(activate(z) + residual, z if kept, in x's type) with z = x w + bias, all in float32."""
    z_xN = jax.lax.dot_general(
        x_xK, w_KN, (((x_xK.ndim - 1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return finish(z_xN, bias_N, residual_xN, spec=spec, dtype=x_xK.dtype)


class Scales(NamedTuple):
    """The divisors of each row of x and each column of w, whose values have 8 bits; None: 1."""

    x_M: Array | None = None
    w_N: Array | None = None


def scaled(
    x_MK: Array,
    w_KN: Array,
    scales: Scales,
    bias_N: Array | None = None,
    residual_MN: Array | None = None,
    *,
    spec: Spec,
) -> Array:
    """activate(z) + residual with z = (x w) scales + bias, of 8-bit x and w.

    int8 is summed in int32, which is exact for K below 2^17; float8 (e4m3 or e5m2, whose products
    float32 holds exactly) in float32. The sum is then float32.
    """
    integral = jnp.issubdtype(x_MK.dtype, jnp.integer)
    # bfloat16 holds each float8, and every device multiplies it.
    x_MK, w_KN = (x if integral else x.astype(jnp.bfloat16) for x in (x_MK, w_KN))
    sums_MN = jnp.dot(x_MK, w_KN, preferred_element_type=jnp.int32 if integral else jnp.float32)
    z_MN = scale(sums_MN, scales)
    return finish(z_MN, bias_N, residual_MN, spec=spec, dtype=z_MN.dtype)[0]


def scale(sums_MN: Array, scales: Scales) -> Array:
    """Sums in float32, times their rows' and columns' scales, in this order."""
    z_MN = sums_MN.astype(jnp.float32)
    if scales.x_M is not None:
        z_MN *= scales.x_M.astype(jnp.float32)[:, None]
    if scales.w_N is not None:
        z_MN *= scales.w_N.astype(jnp.float32)[None, :]
    return z_MN


def finish(
    z_xN: Array, bias_N: Array | None, residual_xN: Array | None, *, spec: Spec, dtype: Any
) -> tuple[Array, Array | None]:
    """Returns the epilogue of sums in float32. dtype: z's."""
    if bias_N is not None:
        z_xN += bias_N.astype(jnp.float32).reshape((1,) * (z_xN.ndim - 1) + bias_N.shape)
    y_xN = activate(spec.activation, z_xN)
    if residual_xN is not None:
        y_xN += residual_xN.astype(jnp.float32)
    return y_xN.astype(spec.out_dtype), z_xN.astype(dtype) if spec.keep else None


def backward(x_xK: Array, w_KN: Array, dz_xN: Array) -> tuple[Array, Array]:
    """(dz w^T, x^T dz) in the types of x and w, accumulated in float32.

    By the rule of the product itself, which knows how to sum over dimensions that a mesh cuts; the
    product is not computed.
    """

    def product(x_xK: Array, w_KN: Array) -> Array:
        dims = (((x_xK.ndim - 1,), (0,)), ((), ()))
        return jax.lax.dot_general(x_xK, w_KN, dims, preferred_element_type=dz_xN.dtype)

    return jax.vjp(product, x_xK, w_KN)[1](dz_xN)
