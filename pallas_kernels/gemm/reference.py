"""The product with its epilogue, and its gradients, in plain JAX: the specification and the oracle.

Legend: M rows (leading dimensions of x, flattened or not: written x), K contracted, N columns.
"""

from typing import Any

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


def finish(
    z_xN: Array, bias_N: Array | None, residual_xN: Array | None, *, spec: Spec, dtype: Any
) -> tuple[Array, Array | None]:
    """The epilogue of sums in float32. dtype: of z."""
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
