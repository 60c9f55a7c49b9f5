"""Both halves of an expert layer as differentiable functions: values, and rules of gradients.

Each is the other's backward pass (see expert.py, which checks what comes here). With g the second
half's gradient at its rows before the router's weight: g w^T is wanted times the weight (dh) and
times h (the weight's own gradient), so neither the answers nor the tokens' rows must be kept.
'xla' keeps the rows of the first half; the others send the tokens again, beside dh w^T, and scatter
dx beside the weights' gradient: whole products, which hide it.

Legend: as in expert_rows.py; F width of an expert on this rank, one of several first products.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.parallel import expert_ring, expert_rows
from megajax.parallel.expert_rows import Dispatch
from megajax.parallel.overlap import Implementation
from pallas_kernels import grouped_matmul
from pallas_kernels.expert import api as kernels
from pallas_kernels.hopper.activations import Spec

Array = jax.Array
Arrays = tuple[Array, ...]


class Static(NamedTuple):
    """What is static of a call. acc_dtype: of sums that cross ranks."""

    implementation: Implementation
    acc_dtype: str


# ---- tokens to their experts' first products


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def first_products(x_TD: Array, ws: Arrays, dispatch: Dispatch, static: Static) -> Arrays:
    """Returns h_NF of every w: each token at its experts; 0 past the splits."""
    return _spread(x_TD, ws, dispatch, static)[0]


def _first_forward(x_TD, ws, dispatch, static):
    keep = static.implementation == "xla"
    hs, x_ND = _spread(x_TD, ws, dispatch, static, keep=keep)
    return hs, (x_ND if keep else x_TD, ws, dispatch)


def _first_backward(static, saved, dhs):
    x, ws, dispatch = saved
    x_ND = x
    if static.implementation != "xla":
        # Locked: XLA would join this gather with those of the forward pass, beside nothing.
        x, dhs = lax.optimization_barrier((x, dhs))
        x_ND = _rows(x, dispatch)
    # The weights' gradient stands beside the scatter, which then needs no ring.
    whole = static._replace(implementation="xla") if static.implementation == "ring" else static
    dx_TD = _collect(dhs, ws, None, dispatch, whole, turned=True).astype(x.dtype)
    dws = tuple(_weight_gradient(x_ND, dh, w, dispatch) for dh, w in zip(dhs, ws, strict=True))
    return dx_TD, dws, None


first_products.defvjp(_first_forward, _first_backward)


# ---- the second products, home to their tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def second_product(
    h_NF: Array, w: Array, weight_TA: Array, dispatch: Dispatch, static: Static
) -> Array:
    """Returns y_TD: of each own token the weighted sum of its answers h w on all ranks."""
    return _collect((h_NF,), (w,), weight_TA, dispatch, static).astype(h_NF.dtype)


def _second_forward(h_NF, w, weight_TA, dispatch, static):
    y_TD = second_product(h_NF, w, weight_TA, dispatch, static)
    return y_TD, (h_NF, w, weight_TA, dispatch)


def _second_backward(static, saved, dy_TD):
    h_NF, w, weight_TA, dispatch = saved
    weight_PA = expert_rows.weights_of(weight_TA, dispatch)
    weight_N1 = weight_PA.reshape(-1)[dispatch.order_N][:, None]
    (g_NF,), dy_ND = _spread(dy_TD, (w,), dispatch, static, turned=True, keep=True)
    assert dy_ND is not None
    g_NF = g_NF.astype(jnp.float32)
    dweight_N = (g_NF * h_NF.astype(jnp.float32)).sum(1)
    dweight_TA = expert_rows.weights_home(dweight_N, dispatch)
    # Past the splits lie choices that are not here, whose tokens may hold anything.
    dh_NF = jnp.where(_came(dispatch), g_NF * weight_N1, 0.0).astype(h_NF.dtype)
    dy_ND = (dy_ND.astype(jnp.float32) * weight_N1).astype(dy_ND.dtype)
    return dh_NF, _weight_gradient(h_NF, dy_ND, w, dispatch), dweight_TA, None


second_product.defvjp(_second_forward, _second_backward)


# ---- the ways there and back


def _spread(
    x_TD: Array,
    ws: Arrays,
    dispatch: Dispatch,
    static: Static,
    *,
    turned: bool = False,
    keep: bool = False,
) -> tuple[Arrays, Array | None]:
    """Returns (x w of every row with each w; the rows x_ND, if kept). turned: w^T."""
    if static.implementation == "fused":
        assert dispatch.routes is not None
        hs, x_ND = kernels.fused_dispatch(
            x_TD, ws, dispatch.routes, axis=expert_rows.live(dispatch.axes),
            spec=Spec(None, x_TD.dtype.name), turned=turned,
        )  # fmt: skip
        return hs, x_ND if keep else None
    if static.implementation == "ring":
        hs, x_PD = expert_ring.spread(x_TD, ws, dispatch, turned, keep)
        return hs, None if x_PD is None else x_PD[dispatch.source_N]
    x_ND = _rows(x_TD, dispatch)
    return tuple(_product(x_ND, w, dispatch, turned) for w in ws), x_ND


def _collect(
    hs: Arrays,
    ws: Arrays,
    weight_TA: Array | None,
    dispatch: Dispatch,
    static: Static,
    turned: bool = False,
) -> Array:
    """Returns (T, D): of own tokens the weighted sums of all h w, float32 (fused: h's type).

    weight_TA: None: 1. turned: w^T.
    """
    if static.implementation == "fused":
        routes = dispatch.routes
        assert routes is not None
        weight_TA = jnp.ones(dispatch.choices, jnp.float32) if weight_TA is None else weight_TA
        # A choice's weight is that of all its expert's parts.
        parts = routes.expert_TA.shape[1] // weight_TA.shape[1]
        return kernels.fused_combine(
            hs, ws, routes, jnp.repeat(weight_TA, parts, axis=1),
            axis=expert_rows.live(dispatch.axes), acc=static.acc_dtype, turned=turned,
        )  # fmt: skip
    weight_PA = None if weight_TA is None else expert_rows.weights_of(weight_TA, dispatch)
    if static.implementation == "ring":
        return expert_ring.collect(hs, ws, weight_PA, dispatch, jnp.dtype(static.acc_dtype))
    parts = (
        _product(h, w, dispatch, turned).astype(jnp.float32) for h, w in zip(hs, ws, strict=True)
    )
    weight_N = None if weight_PA is None else weight_PA.reshape(-1)[dispatch.order_N]
    y_ND = functools.reduce(operator.add, parts)
    return expert_rows.add_up(y_ND, weight_N, dispatch, jnp.dtype(static.acc_dtype))


def _rows(x_TD: Array, dispatch: Dispatch) -> Array:
    return expert_rows.arrive(x_TD, dispatch)[dispatch.source_N]


def _product(x_N: Array, w: Array, dispatch: Dispatch, turned: bool) -> Array:
    return grouped_matmul(x_N, w, dispatch.sizes_E, transpose_rhs=turned)


def _weight_gradient(x_N: Array, dy_N: Array, w: Array, dispatch: Dispatch) -> Array:
    """x^T dy, expert by expert. The product itself is nobody's, and no program has it."""
    _, pull = jax.vjp(lambda w: grouped_matmul(x_N, w, dispatch.sizes_E), w)
    return pull(dy_N)[0]


def _came(dispatch: Dispatch) -> Array:
    """True (N, 1) for rows within the splits."""
    return jnp.arange(dispatch.order_N.shape[0])[:, None] < dispatch.splits_RE.sum()
