"""Products with the collective of tensor parallelism in them, and their gradients.

`all_gather_matmul` is the way into a block, `matmul_reduce_scatter` the way out, and the backward
pass of one is made of the other: dx of a gathered product is a product that is scattered, dx of a
scattered one a product that gathers, and that one gather serves dw as well (Megatron, arXiv
2205.05198; Flux, arXiv 2406.06858, section 3). For code inside a shard_map over `axis`, checked or
not, whatever other axes the mesh has.

Implementations: 'xla', plain collectives before or after whole products; 'ring', chunk by chunk
(parallel/ring.py); 'fused', one kernel. None lets parallel/overlap.py choose. In all of them
products accumulate in float32, partial sums cross ranks in float32, and results are rounded once.

Legend: R ranks of the axis, m rows of all ranks together, k contracted, n columns. Leading
dimensions of activations are rows too, which every rank has for itself: (..., m, k).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from megajax.core.errors import did_you_mean
from megajax.parallel import collective_vjp, overlap
from megajax.parallel.collective_vjp import Arrays, Static
from megajax.parallel.overlap import Implementation
from pallas_kernels import arguments, dispatch
from pallas_kernels.collective import api as kernels
from pallas_kernels.collective import reference as plain
from pallas_kernels.hopper.activations import ACTIVATIONS

Array = jax.Array
DTYPES = ("bfloat16", "float16", "float32")
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


def all_gather_matmul(
    x: Array,
    w: Array | Sequence[Array],
    *,
    axis: str,
    bias: Array | Sequence[Array | None] | None = None,
    activation: str | None = None,
    implementation: Implementation | None = None,
    return_gathered: bool = False,
    acc_dtype: Any = jnp.float32,
    both_ways: bool = False,
) -> Any:
    """activation(all_gather(x) w + bias), for one weight or for several that share the gather.

    The backward pass gathers x again, beside dz w^T, unless return_gathered keeps it; the sum of
    dx over ranks is scattered beside dw.

    Args:
      x: (..., m/R, k) bf16|f16|f32, this rank's rows. w: (k, n/R), or several of any widths.
      bias: (n/R,), any floating type; for several weights one or None each.
      activation: None, 'gelu' (exact), 'gelu_tanh', 'silu', of each product; 'swiglu' of two
        weights, silu(x w_0) * (x w_1).
      implementation: 'xla', 'ring', 'fused', None: chosen by shape and device.
      return_gathered: also return x of all ranks, (..., m, k), and keep it for the backward pass.
      acc_dtype: in which dx crosses ranks before it is complete; bfloat16 halves those bytes.
      both_ways: a ring turns in both directions, half of the rows each.
    Returns: (..., m, n/R) in x's type; a tuple of them for several weights, except with 'swiglu';
      with return_gathered (that, gathered x).
    Raises: ValueError for shapes, types and words that break the above; NotImplementedError with
      the reason where the implementation asked for cannot run.
    """
    single = not isinstance(w, Sequence)
    ws = (w,) if single else tuple(w)
    biases = tuple(bias) if isinstance(bias, Sequence) else (bias,)
    biases = (None,) * len(ws) if bias is None else biases
    R = kernels.ranks_of(GATHER, axis)
    _check(GATHER, (x,) * len(ws), ws, biases)
    words = (*ACTIVATIONS, "swiglu")
    if activation not in words:
        near = did_you_mean(str(activation), [a for a in words if a])
        raise ValueError(f"{GATHER}: activation={activation!r}; there are {words}.{near}")
    if activation == "swiglu" and [w.shape for w in ws] != [ws[0].shape] * 2:
        shapes = [w.shape for w in ws]
        raise ValueError(f"{GATHER}: 'swiglu' takes weights (gate, up) of one shape, got {shapes}")
    acc = overlap.sum_dtype(GATHER, acc_dtype)
    shape = (math.prod(x.shape[:-1]) * R, x.shape[-1], tuple(w.shape[1] for w in ws))
    word = overlap.choose(GATHER, implementation, shape, axis, x.dtype)
    static = Static(axis, word, acc, both_ways, activation, keep=return_gathered)
    ys, gathered = run_gather(x, ws, biases, static)
    found = ys[0] if single or activation == "swiglu" else ys
    return (found, gathered) if return_gathered else found


def matmul_reduce_scatter(
    x: Array | Sequence[Array],
    w: Array | Sequence[Array],
    *,
    axis: str,
    bias: Array | None = None,
    residual: Array | None = None,
    implementation: Implementation | None = None,
    acc_dtype: Any = jnp.float32,
    both_ways: bool = False,
) -> Array:
    """reduce_scatter(x w) + bias + residual; several pairs of x and w are added and share it.

    The backward pass gathers dy once, for dx chunk by chunk and for dw.

    Args:
      x: (..., m, k/R) bf16|f16|f32, m divisible by R. w: (k/R, n). Or as many of both.
      bias: (n,), any floating type, the same on all ranks; added once, by the rows' owner.
      residual: (..., m/R, n) of x's type.
      implementation, both_ways: as in all_gather_matmul.
      acc_dtype: in which partial sums cross ranks; bfloat16 halves those bytes.
    Returns: (..., m/R, n) in x's type, summed and added in float32.
    Raises: as all_gather_matmul.
    """
    R = kernels.ranks_of(SCATTER, axis)
    xs, ws = _pairs(SCATTER, x, w)
    _check(SCATTER, xs, ws, (bias,) * len(ws))
    acc = overlap.sum_dtype(SCATTER, acc_dtype)
    (*lead, m, _), n = xs[0].shape, ws[0].shape[1]
    if m % R:
        raise ValueError(
            f"{SCATTER}: x has {m} rows, which must be divisible by the {R} ranks of {axis!r}; "
            f"nearest: {m // R * R}, {m // R * R + R}"
        )
    _check_residual(SCATTER, residual, (*lead, m // R, n), xs[0].dtype)
    shape = (math.prod(lead) * m, n, tuple(x.shape[-1] for x in xs))
    word = overlap.choose(SCATTER, implementation, shape, axis, xs[0].dtype)
    static = Static(axis, word, acc, both_ways, residual=residual is not None)
    return run_scatter(xs, ws, bias, residual, static)


def matmul_all_reduce(
    x: Array | Sequence[Array],
    w: Array | Sequence[Array],
    *,
    axis: str,
    bias: Array | None = None,
    residual: Array | None = None,
    implementation: Implementation | None = None,
    acc_dtype: Any = jnp.float32,
) -> Array:
    """all_reduce(x w) + bias + residual, for rows that are too few to be cut, as in decoding.

    Args: as matmul_reduce_scatter, for any m; residual: (..., m, n), the same on all ranks.
      implementation: 'xla', 'fused'; no 'ring': so few rows leave nothing to hide its hops behind.
        None: 'xla', or 'fused' where it was measured.
    Returns: (..., m, n) in x's type, the same on all ranks. Its gradient is what each rank has: no
      kernel is needed, and 'fused' takes that of 'xla'.
    Raises: as all_gather_matmul.
    """
    kernels.ranks_of(REDUCE, axis)
    xs, ws = _pairs(REDUCE, x, w)
    _check(REDUCE, xs, ws, (bias,) * len(ws))
    acc = overlap.sum_dtype(REDUCE, acc_dtype)
    rows, n = xs[0].shape[:-1], ws[0].shape[1]
    _check_residual(REDUCE, residual, (*rows, n), xs[0].dtype)
    shape = (math.prod(rows), n, tuple(x.shape[-1] for x in xs))
    word = overlap.choose(REDUCE, implementation, shape, axis, xs[0].dtype)
    return run_reduce(xs, ws, bias, residual, Static(axis, word, acc, False))


def run_gather(
    x: Array, ws: Arrays, biases: tuple[Array | None, ...], static: Static
) -> tuple[Arrays, Array | None]:
    """`all_gather_matmul` of several weights; the caller has checked and chosen."""
    with arguments.reverse_only(GATHER):
        return collective_vjp.gather_matmul(*_varying(static.axis, (x, ws, biases)), static)


def run_scatter(
    xs: Arrays, ws: Arrays, bias: Array | None, residual: Array | None, static: Static
) -> Array:
    """`matmul_reduce_scatter` of several pairs; the caller has checked and chosen."""
    with arguments.reverse_only(SCATTER):
        arrays = _varying(static.axis, (xs, ws, bias, residual))
        return collective_vjp.matmul_scatter(*arrays, static)


def run_reduce(
    xs: Arrays, ws: Arrays, bias: Array | None, residual: Array | None, static: Static
) -> Array:
    """`matmul_all_reduce` of several pairs; the caller has checked and chosen."""
    function = _fused_sums if static.implementation == "fused" else _all_sums
    with arguments.reverse_only(REDUCE):
        return function((xs, ws, bias, residual), static.axis, static.acc_dtype)


def _all_sums(operands: tuple[Any, ...], axis: str, acc: str) -> Array:
    """matmul_all_reduce of (xs, ws, bias, residual), by XLA."""
    xs, ws, bias, residual = operands
    xs, ws = _varying(axis, (xs, ws))
    part = collective_vjp.product(xs, ws).astype(acc)
    return collective_vjp.finish(
        plain.total(part, axis).astype(jnp.float32), bias, residual, xs[0].dtype
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _fused_sums(operands: tuple[Any, ...], axis: str, acc: str) -> Array:
    xs, ws, bias, residual = operands
    x, w = jnp.concatenate(xs, -1), jnp.concatenate(ws, 0)
    return kernels.fused_reduce(x, w, bias, residual, axis=axis, acc=acc)


def _fused_forward(operands: tuple[Any, ...], axis: str, acc: str) -> tuple[Array, tuple[Any, ...]]:
    return _fused_sums(operands, axis, acc), operands


def _fused_backward(axis: str, acc: str, operands: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    return jax.vjp(lambda operands: _all_sums(operands, axis, acc), operands)[1](dy)


_fused_sums.defvjp(_fused_forward, _fused_backward)


def _varying(axis: str, arrays: Any) -> Any:
    """Casts all to vary over `axis` and over whatever any of them varies over.

    The gradient of what is copied over an axis is then summed over it, once. Where shard_map does
    not check, nothing is known and nothing changes: its caller sums.
    """
    found = {a for x in jax.tree.leaves(arrays) for a in jax.typeof(x).mat.varying} | {axis}
    return jax.tree.map(lambda x: dispatch.vary(x, found), arrays)


def _pairs(op: str, x: Any, w: Any) -> tuple[Arrays, Arrays]:
    xs, ws = (tuple(a) if isinstance(a, Sequence) else (a,) for a in (x, w))
    kernels.check_each(op, x=xs, w=ws)
    if len(xs) != len(ws) or not xs:
        raise ValueError(f"{op}: {len(xs)} inputs and {len(ws)} weights; as many of both")
    if any(x.shape[:-1] != xs[0].shape[:-1] for x in xs) or len({w.shape[-1:] for w in ws}) > 1:
        shapes = [a.shape for a in (*xs, *ws)]
        raise ValueError(f"{op}: inputs must share rows, and weights columns, found {shapes}")
    return xs, ws


def _check(op: str, xs: Arrays, ws: Arrays, biases: tuple) -> None:
    kernels.check_each(op, x=xs, w=ws, bias=biases)
    if len(biases) != len(ws) or not ws:
        raise ValueError(f"{op}: {len(ws)} weights and {len(biases)} biases; one or None each")
    for x, w, bias in zip(xs, ws, biases, strict=True):
        if x.ndim < 2 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
            raise ValueError(f"{op}: x {x.shape} and w {w.shape} must be (..., m, k) and (k, n)")
        if x.dtype.name not in DTYPES or w.dtype != xs[0].dtype or x.dtype != xs[0].dtype:
            raise ValueError(
                f"{op}: x {x.dtype} and w {w.dtype} must have one type of {', '.join(DTYPES)}"
            )
        n = w.shape[1]
        if bias is not None and (
            bias.shape != (n,) or not jnp.issubdtype(bias.dtype, jnp.floating)
        ):
            raise ValueError(
                f"{op}: bias {bias.dtype}{bias.shape} must be floating, ({n},): w's columns"
            )


def _check_residual(op: str, residual: Array | None, shape: tuple, dtype: Any) -> None:
    arguments.check_arrays(op, residual=residual)
    if residual is not None and (residual.shape, residual.dtype) != (shape, dtype):
        raise ValueError(
            f"{op}: residual {residual.dtype}{residual.shape} must be like the result, "
            f"{dtype}{shape}"
        )
