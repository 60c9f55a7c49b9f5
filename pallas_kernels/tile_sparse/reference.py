"""The product with a tile-sparse weight, and its gradients, in plain JAX: specification and oracle.

The slots are put into a dense weight of the packed columns, and one dense product follows: on a GPU
many small products are slower than that, and gathering the kept rows of x for each tile copies x
many times. So pruned columns cost nothing here, and pruned chunks cost their product.

Legend: M rows (leading dimensions of x, flattened or not: written x), K contracted, P packed
columns, S slots.
"""

import jax

from pallas_kernels.gemm import reference
from pallas_kernels.hopper.activations import Spec
from pallas_kernels.tile_sparse.format import Pattern

Array = jax.Array


def dense(slots_Skn: Array, pattern: Pattern) -> Array:
    """w_KP: the slots where they belong, 0 elsewhere."""
    return pattern.spread(slots_Skn)[: pattern.shape[0]]


def forward(
    x_xK: Array, slots_Skn: Array, bias_P: Array | None, pattern: Pattern, *, spec: Spec
) -> tuple[Array, Array | None]:
    """(activate(z), z if kept, in x's type) with z = x w + bias, in float32; both (..., P)."""
    w_KP = dense(slots_Skn, pattern)
    return reference.forward(x_xK, w_KP, bias_P, None, spec=spec)


def backward(x_xK: Array, slots_Skn: Array, dz_xP: Array, pattern: Pattern) -> tuple[Array, Array]:
    """(dz w^T, the slots of x^T dz, 0 where the mask does not keep), summed in float32."""
    w_KP = dense(slots_Skn, pattern)
    dx_xK, dw_KP = reference.backward(x_xK, w_KP, dz_xP)
    return dx_xK, pattern.collect(dw_KP)


def gradient(dz_xP: Array, slots_Skn: Array, pattern: Pattern) -> Array:
    """dx_xK = dz w^T alone."""
    w_KP = dense(slots_Skn, pattern)
    dims = (((dz_xP.ndim - 1,), (1,)), ((), ()))
    return jax.lax.dot_general(dz_xP, w_KP, dims)
