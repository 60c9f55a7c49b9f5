"""The experts' products with plain collectives around them: the specification, on any device.

Products accumulate in float32, answers cross ranks in `acc_dtype`, choices are weighted and added
in float32, results are rounded once.

Legend: as in routes.py; K contracted, F and D columns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.expert.routes import Routes
from pallas_kernels.grouped import reference as grouped
from pallas_kernels.hopper.activations import Activation, activate
from pallas_kernels.hopper.peers import Axis

Array = jax.Array


def gather_rows(x_TK: Array, routes: Routes, axis: Axis) -> Array:
    """x_NK, every token at the rows of its experts; 0 past the rows that came."""
    A = routes.dest_TA.shape[1]
    x_PK = lax.all_gather(x_TK, axis, axis=0, tiled=True)
    came_N1 = jnp.arange(routes.rows)[:, None] < routes.sizes_E.sum()
    return jnp.where(came_N1, x_PK[routes.choice_N // A], jnp.zeros((), x_TK.dtype))


def dispatch_grouped_matmul(
    x_TK: Array,
    weights: tuple[Array, ...],
    routes: Routes,
    axis: Axis,
    activation: Activation | None,
    turned: bool,
) -> tuple[tuple[Array, ...], Array]:
    """(activation(rows of experts times each w), those rows)."""
    x_NK = gather_rows(x_TK, routes, axis)
    ys = (product(x_NK, w, routes, turned) for w in weights)
    return tuple(activate(activation, y).astype(x_TK.dtype) for y in ys), x_NK


def grouped_matmul_combine(
    hs: tuple[Array, ...],
    ws: tuple[Array, ...],
    routes: Routes,
    weight_TA: Array,
    axis: Axis,
    acc_dtype: Any,
    turned: bool,
) -> Array:
    """y_TD, of each token the weighted sum of its answers, of which each is a sum of products."""
    products = (product(h, w, routes, turned) for h, w in zip(hs, ws, strict=True))
    y_ND = functools.reduce(jnp.add, products).astype(acc_dtype)
    (T, A), R = weight_TA.shape, routes.ranks
    came_N = jnp.arange(routes.rows) < routes.sizes_E.sum()
    to_N = jnp.where(came_N, routes.choice_N, R * T * A)
    y_PD = jnp.zeros((R * T * A, y_ND.shape[1]), acc_dtype).at[to_N].set(y_ND, mode="drop")
    y_SD = lax.psum_scatter(y_PD, axis, scatter_dimension=0, tiled=True)
    weight_TA1 = jnp.where(routes.dest_TA >= 0, weight_TA, 0.0)[:, :, None]
    y_TAD = y_SD.reshape(T, A, -1).astype(jnp.float32)
    return (weight_TA1 * y_TAD).sum(1).astype(hs[0].dtype)


def product(x_NK: Array, w: Array, routes: Routes, turned: bool) -> Array:
    """float32 (N, F): each row times its expert's w (K, F), stored (F, K) where turned."""
    x_NK, w = x_NK.astype(jnp.float32), w.astype(jnp.float32)
    return grouped.product(x_NK, w, routes.sizes_E, transpose=turned)
