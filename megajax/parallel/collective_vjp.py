"""The two collective matmuls as differentiable functions: values, and the rules of gradients.

Each is the other's backward pass (see collective_matmul.py, which checks what comes here). Where
whole products lie on both sides of a collective, as around a weight's gradient, the collective
is left whole too, and XLA's scheduler puts it beside them.

Legend: as in collective_matmul.py; z is an activation's input.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from megajax.parallel import ring
from megajax.parallel.overlap import Implementation
from pallas_kernels.collective import api as kernels
from pallas_kernels.collective import reference as plain
from pallas_kernels.hopper.activations import Spec, activate

Array = jax.Array
Arrays = tuple[Array, ...]


class Static(NamedTuple):
    """What is static of a call.

    both_ways: see ring.py. keep: the gathered input is a result. residual: there is one to add.
    """

    axis: str
    implementation: Implementation
    acc_dtype: str
    both_ways: bool
    activation: str | None = None
    keep: bool = False
    residual: bool = False


# ---- gather, then multiply


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def gather_matmul(
    x: Array, ws: Arrays, biases: tuple, static: Static
) -> tuple[Arrays, Array | None]:
    """Returns (the products of gathered x, one or, with 'swiglu', joined; gathered x if kept)."""
    return _gather_run(x, ws, biases, static, keep_z=False)[:2]


def _gather_run(
    x: Array, ws: Arrays, biases: tuple, static: Static, keep_z: bool
) -> tuple[Arrays, Array | None, Arrays]:
    """Returns (ys, gathered x if it is a result, the activation's inputs if asked)."""
    if static.implementation == "fused":
        return _gather_fused(x, ws, biases, static, keep_z)

    def work(x: Array) -> Arrays:
        # Float32 for what is still to be done; a chunk that is done is written as it will stay.
        done = [b is None and static.activation is None for b in biases]
        dtypes = [x.dtype if d else jnp.float32 for d in done]
        zs = tuple(map(_add_bias, map(functools.partial(_dot, x), ws, dtypes), biases))
        found = _activate(static.activation, zs) + (zs if keep_z else ())
        return tuple(a.astype(x.dtype) for a in found) + ((x,) if static.keep else ())

    found = _gathered(x, work, static)
    found, gathered = (found[:-1], found[-1]) if static.keep else (found, None)
    results = 1 if static.activation == "swiglu" else len(ws)
    return found[:results], gathered, found[results:]


def _gather_fused(
    x: Array, ws: Arrays, biases: tuple, static: Static, keep_z: bool
) -> tuple[Arrays, Array | None, Arrays]:
    """Does what _gather_run does, where activations outside the kernel read rounded products."""
    inside: Any = None if keep_z or static.activation == "swiglu" else static.activation
    spec = Spec(inside, x.dtype.name)
    zs, gathered = kernels.fused_gather(x, ws, biases, axis=static.axis, spec=spec, keep=True)
    ys = zs
    if inside != static.activation:
        wide = tuple(z.astype(jnp.float32) for z in zs)
        ys = tuple(y.astype(x.dtype) for y in _activate(static.activation, wide))
    return ys, gathered if static.keep else None, zs if keep_z else ()


def _gather_forward(x: Any, ws: Any, biases: Any, static: Static) -> tuple:
    wanted = any(w.perturbed for w in ws)
    x, ws, biases = custom_vjp_primal_tree_values((x, ws, biases))
    keep_z = static.activation is not None
    ys, gathered, zs = _gather_run(x, ws, biases, static, keep_z)
    kept = gathered if static.keep else x
    return (ys, gathered), (kept if wanted else None, ws, biases, zs)


def _gather_backward(static: Static, saved: tuple, cotangents: tuple) -> tuple:
    """dz w^T is scattered beside x^T dz, and x gathered again beside dz w^T: whole products."""
    x, ws, biases, zs = saved
    dys, dgathered = cotangents
    dys = _instantiated(dys)
    dtype = ws[0].dtype
    dzs = tuple(dy.astype(jnp.float32) for dy in dys)
    if static.activation is not None:
        function = functools.partial(_activate, static.activation)
        (dzs,) = jax.vjp(function, tuple(z.astype(jnp.float32) for z in zs))[1](dzs)
    dbiases = tuple(map(_bias_gradient, biases, dzs))
    dzs = tuple(dz.astype(dtype) for dz in dzs)
    w_Ts = tuple(w.T for w in ws)
    if x is None:  # no weight wants a gradient, so nothing else is there to work beside the scatter
        dx, dws = _scattered(dzs, w_Ts, static), (None,) * len(ws)
    else:
        x = x if static.keep else plain.gather(x, static.axis)
        dx = _psum_scatter(product(dzs, w_Ts), static)
        dws = tuple(map(functools.partial(_weight_gradient, x), dzs, ws))
    if dgathered is not None and not isinstance(dgathered, SymbolicZero):
        dx += _psum_scatter(dgathered.astype(jnp.float32), static)
    return dx.astype(dtype), dws, dbiases


gather_matmul.defvjp(_gather_forward, _gather_backward, symbolic_zeros=True)


# ---- multiply, then scatter


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def matmul_scatter(
    xs: Arrays, ws: Arrays, bias: Array | None, residual: Array | None, static: Static
) -> Array:
    """Returns this rank's rows of the sum of all products, bias and residual added."""
    return _scatter_run(xs, ws, bias, residual, static)


def _scatter_run(xs, ws, bias, residual, static):
    if static.implementation == "fused":
        return _scatter_fused(xs, ws, bias, residual, static)
    return finish(_scattered(xs, ws, static), bias, residual, xs[0].dtype)


def _scatter_fused(
    xs: Arrays, ws: Arrays, bias: Array | None, residual: Array | None, static: Static
) -> Array:
    acc = static.acc_dtype
    return kernels.fused_scatter(xs, ws, bias, residual, axis=static.axis, acc=acc)


def _scatter_forward(xs: Any, ws: Any, bias: Any, residual: Any, static: Static) -> tuple:
    wanted = any(w.perturbed for w in ws)
    xs, ws, bias, residual = custom_vjp_primal_tree_values((xs, ws, bias, residual))
    y = _scatter_run(xs, ws, bias, residual, static)
    return y, (xs if wanted else None, ws, bias)


def _scatter_backward(static: Static, saved: tuple, dy: Any) -> tuple:
    """dy is gathered once, beside dx = dy w^T; then it is whole, for dw = x^T dy."""
    xs, ws, bias = saved
    (dy,) = _instantiated((dy,))

    def work(dy: Array) -> Arrays:
        dxs = tuple(_dot(dy, w.T, dy.dtype) for w in ws)
        return dxs if xs is None else (*dxs, dy)

    if static.implementation == "fused":
        none, spec = (None,) * len(ws), Spec(None, dy.dtype.name)
        dxs, whole = kernels.fused_gather(
            dy, ws, none, axis=static.axis, spec=spec, keep=True, turned=True
        )
        found = (*dxs, whole)
    else:
        found = _gathered(dy, work, static)
    dxs, dws = found[: len(ws)], (None,) * len(ws)
    if xs is not None:
        dws = tuple(_weight_gradient(x, found[-1], w) for x, w in zip(xs, ws, strict=True))
    return dxs, dws, _bias_gradient(bias, dy), dy if static.residual else None


matmul_scatter.defvjp(_scatter_forward, _scatter_backward, symbolic_zeros=True)


# ---- the collectives


def _gathered(x: Array, work: Callable[[Array], Arrays], static: Static) -> Arrays:
    """Returns work(x of all ranks)."""
    if static.implementation == "ring" and x.size:
        return ring.all_gather(x, work, static.axis, static.both_ways)
    return work(plain.gather(x, static.axis))


def _scattered(xs: Arrays, ws: Arrays, static: Static) -> Array:
    """Returns this rank's rows of the sum over ranks of all x w, float32 (fused: x's)."""
    if static.implementation == "ring" and xs[0].size:
        dtype = jnp.dtype(static.acc_dtype)
        work = lambda *xs: product(xs, ws)  # noqa: E731
        return ring.reduce_scatter(xs, work, static.axis, static.both_ways, dtype)
    if static.implementation == "fused":
        return _scatter_fused(xs, ws, None, None, static)
    return _psum_scatter(product(xs, ws), static)


def _psum_scatter(part: Array, static: Static) -> Array:
    return plain.scatter(part.astype(static.acc_dtype), static.axis).astype(jnp.float32)


# ---- what one rank computes


def _dot(x: Array, w: Array, dtype: Any = jnp.float32) -> Array:
    """x w, accumulated in float32 whatever the result's type."""
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, w, dims, preferred_element_type=dtype)


@jax.custom_vjp
def product(xs: Arrays, ws: Arrays) -> Array:
    """The sum of all x w, float32; its gradients are products in the inputs' type."""
    return functools.reduce(operator.add, map(_dot, xs, ws))


def _product_backward(saved: tuple[Arrays, Arrays], dy: Array) -> tuple[Arrays, Arrays]:
    xs, ws = saved
    dy = dy.astype(xs[0].dtype)
    dxs = tuple(_dot(dy, w.T, dy.dtype) for w in ws)
    return dxs, tuple(_weight_gradient(x, dy, w) for x, w in zip(xs, ws, strict=True))


product.defvjp(lambda xs, ws: (product(xs, ws), (xs, ws)), _product_backward)


def _weight_gradient(x: Array, dy: Array, w: Array) -> Array:
    """x^T dy over all rows, in w's type."""
    rows = tuple(range(x.ndim - 1))
    dims = ((rows, rows), ((), ()))
    return lax.dot_general(x, dy, dims, preferred_element_type=jnp.float32).astype(w.dtype)


def _add_bias(y: Array, bias: Array | None) -> Array:
    if bias is None:
        return y
    return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + bias.shape)


def _bias_gradient(bias: Array | None, dy: Array) -> Array | None:
    if bias is None:
        return None
    return dy.astype(jnp.float32).sum(range(dy.ndim - 1)).astype(bias.dtype)


def finish(y: Array, bias: Array | None, residual: Array | None, dtype: Any) -> Array:
    """The end of a float32 sum: one rounding, after bias and residual."""
    y = _add_bias(y, bias)
    return (y if residual is None else y + residual.astype(y.dtype)).astype(dtype)


def _activate(kind: Any, zs: Arrays) -> Arrays:
    if kind == "swiglu":
        return (activate("silu", zs[0]) * zs[1],)
    return tuple(activate(kind, z) for z in zs)


def _instantiated(cotangents: Arrays) -> Arrays:
    """Zeros where a result was not used."""
    zeros = lambda d: jnp.zeros(d.aval.shape, d.aval.dtype)  # noqa: E731
    return tuple(zeros(d) if isinstance(d, SymbolicZero) else d for d in cotangents)
