"""A matrix product with bias, activation and residual in one kernel, differentiable.

Source: ByteTransformer (arXiv 2210.03052) section 3.2, which puts bias and GELU into the product's
epilogue; on Hopper as a persistent, warp-specialised kernel (hopper.py).

Legend: x any leading dimensions, M their product, K contracted, N columns.
Not here: second derivatives, several products with one input.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, dispatch, tuned
from pallas_kernels.gemm import hopper, reference
from pallas_kernels.gemm.reference import Scales
from pallas_kernels.hopper.activations import ACTIVATIONS, Activation, Spec

Array = jax.Array
DTYPES = ("bfloat16", "float16", "float32")
DTYPES_8 = ("int8", "float8_e4m3fn", "float8_e5m2")
OP = "fused_gemm"


def fused_gemm(
    x_xK: Array,
    w_KN: Array,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    residual: Array | None = None,
    x_scale: Array | None = None,
    w_scale: Array | None = None,
    out_dtype: jnp.dtype | str | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Array:
    """activation(x w + bias) + residual, summed and computed in float32, rounded once.

    The backward pass keeps x, w and, with an activation, z = x w + bias in x's type: reading it
    back costs less time than computing the product again from K of a few hundred on. A remat policy
    around the call drops it as any other intermediate.

    8-bit operands have scales, and no gradients: z = (x w) x_scale[:, None] w_scale + bias. int8 is
    summed in int32, float8 in float32. The kernel reads w transposed; a w that was made by
    transposing an array inside the same program is not copied.

    Args:
      x_xK: bf16|f16|f32, or int8|float8_e4m3fn|float8_e5m2. w_KN: the same type, or the other
        float8.
      bias: (N,), any floating type. activation: None, 'gelu' (exact), 'gelu_tanh', 'silu'.
      residual: (x, N), of the result's type.
      x_scale: (x), any floating type, one for each row; None: 1. w_scale: (N,), one for each
        column. Both are for 8-bit operands only.
      out_dtype: bf16|f16|f32; None: x's, and bf16 of 8-bit operands.
      implementation: see `dispatch`. 'hopper' takes bf16 and f16; M that is a multiple of 8, and
        N and K of 64, spare it copies of its operands. Under a mesh it runs inside a shard_map
        only.
    Returns: y_xN in out_dtype; differentiable in all arrays.
    Raises: ValueError for shapes, types and words that break the above; NotImplementedError with
      all reasons where the implementation asked for cannot run.
    """
    arguments.check_arrays(
        OP, x=x_xK, w=w_KN, bias=bias, residual=residual, x_scale=x_scale, w_scale=w_scale
    )
    if out_dtype is not None:
        out_dtype = arguments.dtype_name(OP, "out_dtype", out_dtype, DTYPES)
    small = has_8_bits(x_xK, w_KN)
    out_dtype = out_dtype or ("bfloat16" if small else x_xK.dtype.name)
    _check(x_xK, w_KN, bias, activation, residual, out_dtype)
    bias_N = None if bias is None else bias.astype(jnp.float32)
    if small:
        return _scaled(
            x_xK,
            w_KN,
            Scales(x_scale, w_scale),
            bias_N,
            residual,
            activation=activation,
            out_dtype=out_dtype,
            implementation=implementation,
        )
    if x_scale is not None or w_scale is not None:
        raise ValueError(f"{OP}: x_scale and w_scale are for 8-bit operands; x is {x_xK.dtype}")
    static = _static(x_xK, w_KN, bias, activation, residual, out_dtype, implementation)
    with arguments.reverse_only(OP):
        return _fused(*dispatch.alike((x_xK, w_KN, bias_N, residual)), static)


class Static(NamedTuple):
    """What is static: how the passes run, the mathematics, the tiles of y, dx and dw."""

    forward: str
    backward: str
    activation: Activation | None
    bias: bool
    residual: bool
    out_dtype: str
    tile: hopper.Tile
    tile_dx: hopper.Tile
    tile_dw: hopper.Tile


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fused(x_xK, w_KN, bias_N, residual_xN, static: Static) -> Array:
    return _product(x_xK, w_KN, bias_N, residual_xN, static, keep=False)[0]


def _product(x_xK, w_KN, bias_N, residual_xN, static, keep):
    spec = Spec(static.activation, static.out_dtype, keep)
    tile = hopper.fitted(static.tile, spec, residual_xN is not None)
    return dispatch.run(
        static.forward,
        functools.partial(hopper.forward, spec=spec, tile=tile),
        functools.partial(reference.forward, spec=spec),
        x_xK,
        w_KN,
        bias_N,
        residual_xN,
        op=OP,
    )


def _forward(x_xK, w_KN, bias_N, residual_xN, static):
    keep = static.activation is not None
    y_xN, z_xN = _product(x_xK, w_KN, bias_N, residual_xN, static, keep)
    return y_xN, (x_xK, w_KN, z_xN)


def _backward(static, saved, dy_xN):
    x_xK, w_KN, z_xN = saved
    dz_xN = dy_xN.astype(jnp.float32)
    if z_xN is not None:
        activate = functools.partial(reference.activate, static.activation)
        (dz_xN,) = jax.vjp(activate, z_xN.astype(jnp.float32))[1](dz_xN)
    dbias_N = dz_xN.sum(range(dz_xN.ndim - 1)) if static.bias else None
    dx_xK, dw_KN = dispatch.run(
        static.backward,
        functools.partial(hopper.backward, tile_dx=static.tile_dx, tile_dw=static.tile_dw),
        reference.backward,
        x_xK,
        w_KN,
        dz_xN.astype(x_xK.dtype),
        op=OP,
    )
    return dx_xK, dw_KN, dbias_N, dy_xN if static.residual else None


_fused.defvjp(_forward, _backward)


def key(
    dtype: Any, kind: str, activation: str | None, residual: bool, M: int, N: int, K: int
) -> tuned.Key:
    """Returns the key of a table's row. kind: 'forward', 'dx' (dz w^T) or 'dw' (x^T dz)."""
    words = {"dtype": jnp.dtype(dtype).name, "kind": kind, "activation": activation or "none"}
    return words | {"residual": residual, "M": M, "N": N, "K": K}


def _static(
    x_xK: Array,
    w_KN: Array,
    bias_N: Array | None,
    activation: Activation | None,
    residual_xN: Array | None,
    out_dtype: str,
    implementation: str | None,
) -> Static:
    """Everything static, from shapes and types."""
    M, (K, N) = x_xK.size // max(x_xK.shape[-1], 1), w_KN.shape
    residual = residual_xN is not None
    reasons = []
    if x_xK.dtype.name == "float32":
        reasons.append("needs bfloat16 or float16, found float32")
    if not M * K * N:
        reasons.append(f"needs something to compute, found M={M}, N={N}, K={K}")
    dtype = x_xK.dtype
    keys = (
        key(dtype, "forward", activation, residual, M, N, K),
        key(dtype, "dx", None, False, M, K, N),
        key(dtype, "dw", None, False, K, N, M),
    )
    spec = Spec(activation, out_dtype, activation is not None)
    guesses = (
        hopper.heuristic(M, N, K, spec=spec, residual=residual),
        hopper.heuristic(M, K, N),
        hopper.heuristic(K, N, M),
    )
    rows = [tuned.find(OP, k) for k in keys]
    tile, tile_dx, tile_dw = (
        hopper.Tile(**tile) if (tile := tuned.tile(row)) else guess
        for row, guess in zip(rows, guesses, strict=True)
    )
    forward, backward = (
        dispatch.choose(OP, implementation, reasons, measured) for measured in (rows[:1], rows[1:])
    )
    bias = bias_N is not None
    return Static(forward, backward, activation, bias, residual, out_dtype, tile, tile_dx, tile_dw)


def _check(
    x: Array,
    w: Array,
    bias: Array | None,
    activation: str | None,
    residual: Array | None,
    out_dtype: str,
) -> None:
    if x.ndim < 1 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"{OP}: x {x.shape} and w {w.shape} must be (..., K) and (K, N)")
    if not has_8_bits(x, w) and (x.dtype.name not in DTYPES or w.dtype != x.dtype):
        raise ValueError(
            f"{OP}: x {x.dtype} and w {w.dtype} must have one type of "
            f"{', '.join(DTYPES + DTYPES_8)}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"{OP}: activation={activation!r}; there are {ACTIVATIONS}")
    N = w.shape[1]
    if bias is not None and (bias.shape != (N,) or not jnp.issubdtype(bias.dtype, jnp.floating)):
        raise ValueError(
            f"{OP}: bias {bias.dtype}{bias.shape} must be floating, ({N},): w's columns"
        )
    shape = (*x.shape[:-1], N)
    if residual is not None and (residual.shape, residual.dtype.name) != (shape, out_dtype):
        raise ValueError(
            f"{OP}: residual {residual.dtype}{residual.shape} must be like the result, "
            f"{out_dtype}{shape}"
        )


# ---- operands of 8 bits
#
# Scales come with the values, one for each row of x and each column of w: quantized is x = values *
# scale. Not here: gradients (an 8-bit operand has none), scales of blocks of K, what quantizes.


class ScaledStatic(NamedTuple):
    """What is static: who computes, the mathematics, the tile."""

    implementation: str
    spec: Spec
    tile: hopper.Tile


def has_8_bits(x_xK: Array, w_KN: Array) -> bool:
    """Whether an operand has 8 bits, so that the product has scales and no gradients."""
    return x_xK.dtype.name in DTYPES_8 or w_KN.dtype.name in DTYPES_8


def _scaled(
    x_xK: Array,
    w_KN: Array,
    scales: Scales,
    bias_N: Array | None,
    residual_xN: Array | None,
    *,
    activation: Activation | None,
    out_dtype: str,
    implementation: dispatch.Implementation | None,
) -> Array:
    """Returns fused_gemm of checked arguments. scales: (x's rows), (N,)."""
    types = x_xK.dtype.name, w_KN.dtype.name
    if not set(types) <= set(DTYPES_8) or ("int8" in types and types[0] != types[1]):
        raise ValueError(
            f"{OP}: x {types[0]} and w {types[1]} must both be int8, or both float8 "
            "(float8_e4m3fn, float8_e5m2)"
        )
    expected = (
        ("x_scale", scales.x_M, x_xK.shape[:-1], "x's rows"),
        ("w_scale", scales.w_N, w_KN.shape[1:], "w's columns"),
    )
    for name, scale, shape, rows in expected:
        if scale is None:
            continue
        if scale.shape != shape or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise ValueError(
                f"{OP}: {name} {scale.dtype}{scale.shape} must be floating, {shape}: {rows}"
            )
    x_MK, N = x_xK.reshape(-1, x_xK.shape[-1]), w_KN.shape[1]
    M, K = x_MK.shape
    residual_MN = None if residual_xN is None else residual_xN.reshape(M, N)
    x_M = None if scales.x_M is None else scales.x_M.reshape(M)
    spec = Spec(activation, out_dtype)
    reasons = [] if M * K * N else [f"needs something to compute, found M={M}, N={N}, K={K}"]
    static = ScaledStatic(
        dispatch.choose(OP, implementation, reasons, [None]),  # scripts/tune.py times none yet
        spec,
        hopper.heuristic_scaled(M, N, K, spec=spec, residual=residual_xN is not None),
    )
    with arguments.reverse_only(OP):
        y_MN = _scaled_product(
            *dispatch.alike((x_MK, w_KN, scales._replace(x_M=x_M), bias_N, residual_MN)), static
        )
    return y_MN.reshape(*x_xK.shape[:-1], N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _scaled_product(x_MK, w_KN, scales, bias_N, residual_MN, static: ScaledStatic) -> Array:
    return dispatch.run(
        static.implementation,
        functools.partial(hopper.multiply_scaled, spec=static.spec, tile=static.tile),
        functools.partial(reference.scaled, spec=static.spec),
        x_MK,
        w_KN,
        scales,
        bias_N,
        residual_MN,
        op=OP,
    )


def _refuse(x_MK, w_KN, scales, bias_N, residual_MN, static):
    raise NotImplementedError(
        f"{OP}: a product of {x_MK.dtype} and {w_KN.dtype} has no gradients; multiply 16-bit "
        "operands where there are some, or stop them (jax.lax.stop_gradient) before the call"
    )


_scaled_product.defvjp(_refuse, _refuse)
