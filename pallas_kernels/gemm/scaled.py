"""fused_gemm of 8-bit operands: checks, choice, dispatch. Mathematics: reference.scaled.

Scales come with the values, one for each row of x and each column of w: quantized is x = values *
scale. Not here: gradients (an 8-bit operand has none), scales of blocks of K, what quantizes.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, dispatch
from pallas_kernels.gemm import hopper, reference
from pallas_kernels.gemm.reference import Scales
from pallas_kernels.hopper.activations import Activation, Spec

Array = jax.Array
DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")
RESULTS = ("bfloat16", "float16", "float32")
OP = "fused_gemm"


class Static(NamedTuple):
    """What is static: who computes, the mathematics, the tile."""

    implementation: str
    spec: Spec
    tile: hopper.Tile


def fits(x_xK: Array, w_KN: Array) -> bool:
    """Whether an operand has 8 bits, so that the product is one of this module."""
    return x_xK.dtype.name in DTYPES or w_KN.dtype.name in DTYPES


def product(
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
    _check(x_xK, w_KN, scales)
    x_MK, N = x_xK.reshape(-1, x_xK.shape[-1]), w_KN.shape[1]
    M, K = x_MK.shape
    residual_MN = None if residual_xN is None else residual_xN.reshape(M, N)
    x_M = None if scales.x_M is None else scales.x_M.reshape(M)
    spec = Spec(activation, out_dtype)
    reasons = [] if M * K * N else [f"needs something to compute, found M={M}, N={N}, K={K}"]
    static = Static(
        dispatch.choose(OP, implementation, reasons, [None]),  # scripts/tune.py times none yet
        spec,
        hopper.heuristic_scaled(M, N, K, spec=spec, residual=residual_xN is not None),
    )
    with arguments.reverse_only(OP):
        y_MN = _run(
            *dispatch.alike((x_MK, w_KN, scales._replace(x_M=x_M), bias_N, residual_MN)), static
        )
    return y_MN.reshape(*x_xK.shape[:-1], N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _run(x_MK, w_KN, scales, bias_N, residual_MN, static: Static) -> Array:
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


_run.defvjp(_refuse, _refuse)


def _check(x: Array, w: Array, scales: Scales) -> None:
    types = x.dtype.name, w.dtype.name
    if not set(types) <= set(DTYPES) or ("int8" in types and types[0] != types[1]):
        raise ValueError(
            f"{OP}: x {types[0]} and w {types[1]} must both be int8, or both float8 "
            "(float8_e4m3fn, float8_e5m2)"
        )
    wanted = (
        ("x_scale", scales.x_M, x.shape[:-1], "x's rows"),
        ("w_scale", scales.w_N, w.shape[1:], "w's columns"),
    )
    for name, scale, shape, rows in wanted:
        if scale is None:
            continue
        if scale.shape != shape or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise ValueError(
                f"{OP}: {name} {scale.dtype}{scale.shape} must be floating, {shape}: {rows}"
            )
