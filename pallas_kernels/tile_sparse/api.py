"""A product with a weight of which only tiles are kept, differentiable.

Tile-Wise Sparsity (arXiv 2008.13006): a pattern that is regular inside a tile, so that dense tensor
cores multiply it, and irregular over the network, so that importance decides what stays.

Legend: M rows (leading dimensions, written x), K contracted, N columns, P packed columns, S slots.
Not here: how a mask is chosen; second derivatives; 2:4 sparsity inside tiles (TVW, arXiv
2402.10876), whose instructions Pallas has for Blackwell only.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.gemm.reference import ACTIVATIONS, Activation, Spec, activate
from pallas_kernels.tile_sparse import reference
from pallas_kernels.tile_sparse.format import Pattern, TileSparse

Array = jax.Array
DTYPES = ("bfloat16", "float16", "float32")
OP = "tile_sparse_matmul"


def tile_sparse_matmul(
    x_MK: Array,
    weight: TileSparse,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Array:
    """activation(x w + bias), of w only what its mask keeps.

    Summed in float32, rounded once. The backward pass keeps x, the values and, with an activation,
    x w + bias in x's type. Its sums have one fixed order: gradients are the same each time.

    Args:
      x_MK: bf16|f16|f32 (..., K). weight: values of the same type. bias: floating (N,).
      activation: 'gelu' (exact), 'gelu_tanh', 'silu' or None.
      implementation: see `dispatch`. 'hopper' takes bf16 and f16, tiles of 64, 128, 192 or 256
        columns and chunks of 32 or 64 rows. Under a mesh inside a shard_map only.
    Returns: y (..., N) in x's type; differentiable in x, bias and weight.values, whose gradient is
      exactly 0 where the mask does not keep. A residual (TEW) is one more dense product.
    Raises: ValueError for shapes and types that break the above; NotImplementedError with all
      reasons where the implementation asked for cannot run.
    """
    _check(x_MK, weight, bias, activation)
    plan = _plan(x_MK, weight, activation, implementation)
    x_MK, values, bias, pattern = dispatch.alike((x_MK, weight.values, bias, weight.pattern))
    weight = TileSparse(values, pattern)
    if weight.capacity.residual:
        plan = dataclasses.replace(plan, activation=None, out_dtype="float32")
        z_xN = pattern.unpack_columns(_packed(x_MK, weight.slots, None, pattern, plan))
        z_xN += jnp.matmul(x_MK, weight.residual_dense(), preferred_element_type=jnp.float32)
        return _finish(z_xN, bias, activation).astype(x_MK.dtype)
    bias_P = None if bias is None else pattern.pack_columns(bias.astype(jnp.float32))
    y_xN = pattern.unpack_columns(_packed(x_MK, values, bias_P, pattern, plan))
    if not pattern.gathered or bias is None:
        return y_xN
    # Pruned columns are in no tile.
    empty_xN = _finish(jnp.zeros((1,) * x_MK.ndim), bias, activation).astype(x_MK.dtype)
    pruned_xN = (pattern.places == pattern.columns.size).reshape(empty_xN.shape)
    return jnp.where(pruned_xN, empty_xN, y_xN)


def _finish(z_xN: Array, bias_N: Array | None, activation: Activation | None) -> Array:
    """activation(z + bias), in float32."""
    if bias_N is not None:
        z_xN = z_xN + bias_N.astype(jnp.float32).reshape((1,) * (z_xN.ndim - 1) + bias_N.shape)
    return activate(activation, z_xN)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static: how the passes run and the mathematics."""

    forward: str
    backward: str
    activation: Activation | None
    out_dtype: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _packed(x_xK: Array, slots_Skn: Array, bias_P, pattern: Pattern, plan: Plan) -> Array:
    return _product(x_xK, slots_Skn, bias_P, pattern, plan, keep=False)[0]


def _product(x_xK, slots_Skn, bias_P, pattern, plan, keep):
    spec = Spec(plan.activation, plan.out_dtype, keep)
    return reference.forward(x_xK, slots_Skn, bias_P, pattern, spec=spec)


def _forward(x_xK, slots_Skn, bias_P, pattern, plan):
    keep = plan.activation is not None
    y_xP, z_xP = _product(x_xK, slots_Skn, bias_P, pattern, plan, keep)
    return y_xP, (x_xK, slots_Skn, bias_P is not None, z_xP, pattern)


def _backward(plan, saved, dy_xP):
    x_xK, slots_Skn, biased, z_xP, pattern = saved
    dz_xP = dy_xP.astype(jnp.float32)
    if z_xP is not None:
        slope = functools.partial(activate, plan.activation)
        (dz_xP,) = jax.vjp(slope, z_xP.astype(jnp.float32))[1](dz_xP)
    dbias_P = dz_xP.sum(range(dz_xP.ndim - 1)) if biased else None
    dx_xK, dslots_Skn = reference.backward(x_xK, slots_Skn, dz_xP.astype(x_xK.dtype), pattern)
    return dx_xK, dslots_Skn, dbias_P, None


_packed.defvjp(_forward, _backward)


def _plan(
    x: Array, weight: TileSparse, activation: Activation | None, implementation: str | None
) -> Plan:
    """Everything static, from shapes and types."""
    reasons = ("there is no kernel yet",)
    choice = dispatch.choose(OP, implementation, reasons)
    return Plan(choice, choice, activation, x.dtype.name)


def _check(x: Array, weight: TileSparse, bias: Array | None, activation: str | None) -> None:
    K, N = weight.shape
    if x.ndim < 1 or x.shape[-1] != K:
        raise ValueError(f"{OP}: x {x.shape} and weight {weight.shape} must be (..., K) and (K, N)")
    if x.dtype.name not in DTYPES or weight.dtype != x.dtype:
        raise ValueError(
            f"{OP}: x {x.dtype} and weight {weight.dtype} must have one type of {', '.join(DTYPES)}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"{OP}: activation={activation!r}; there are {ACTIVATIONS}")
    if bias is not None and (bias.shape != (N,) or not jnp.issubdtype(bias.dtype, jnp.floating)):
        raise ValueError(
            f"{OP}: bias {bias.dtype}{bias.shape} must be floating, ({N},): the weight's columns"
        )
