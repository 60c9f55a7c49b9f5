"""The products with plain collectives around them: the specification, on any device.

Products accumulate in float32, partial sums cross ranks in `acc_dtype`, results are rounded once.

Legend: as in api.py.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.activations import Activation, activate

Array = jax.Array


def product(x: Array, w: Array) -> Array:
    """(..., K) x (K, N), float32."""
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, w, dims, preferred_element_type=jnp.float32)


def gather(x: Array, axis: str) -> Array:
    """The rows (last dimension but one) of all ranks; one rank, or nothing, needs no collective."""
    R = lax.axis_size(axis)
    if R == 1 or not x.size:
        return jnp.concatenate([x] * R, x.ndim - 2)
    return lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True)


def scatter(x: Array, axis: str) -> Array:
    """This rank's rows of the sum over ranks; one rank, or nothing, needs no collective."""
    R = lax.axis_size(axis)
    if R == 1 or not x.size:
        return x[..., : x.shape[-2] // R, :]
    return lax.psum_scatter(x, axis, scatter_dimension=x.ndim - 2, tiled=True)


def total(x: Array, axis: str) -> Array:
    """Returns the sum over ranks.

    Over one rank it is x. If shard_map checks replication, XLA removes that all-reduce instead.
    """
    alone = lax.axis_size(axis) == 1 and axis not in jax.typeof(x).mat.varying
    return x if alone else lax.psum(x, axis)


def all_gather_matmul(
    x: Array,
    weights: tuple[Array, ...],
    biases: tuple[Array | None, ...],
    axis: str,
    activation: Activation | None,
) -> tuple[tuple[Array, ...], Array]:
    """(activation(all_gather(x) w + bias) for each w, the gathered x)."""
    gathered = gather(x, axis)
    ys = (
        activate(activation, _add(product(gathered, w), bias)).astype(x.dtype)
        for w, bias in zip(weights, biases, strict=True)
    )
    return tuple(ys), gathered


def matmul_reduce_scatter(
    xs: tuple[Array, ...],
    ws: tuple[Array, ...],
    bias: Array | None,
    residual: Array | None,
    axis: str,
    acc_dtype: Any,
) -> Array:
    """reduce_scatter(the sum of all x w) + bias + residual."""
    part = functools.reduce(jnp.add, map(product, xs, ws)).astype(acc_dtype)
    return _finish(scatter(part, axis), bias, residual, xs[0].dtype)


def matmul_all_reduce(
    x: Array, w: Array, bias: Array | None, residual: Array | None, axis: str, acc_dtype: Any
) -> Array:
    """all_reduce(x w) + bias + residual."""
    part = product(x, w).astype(acc_dtype)
    return _finish(total(part, axis), bias, residual, x.dtype)


def _add(y: Array, bias: Array | None) -> Array:
    if bias is None:
        return y
    return y + bias.astype(jnp.float32).reshape((1,) * (y.ndim - 1) + bias.shape)


def _finish(y: Array, bias: Array | None, residual: Array | None, dtype: Any) -> Array:
    y = _add(y.astype(jnp.float32), bias)
    return (y if residual is None else y + residual.astype(jnp.float32)).astype(dtype)
