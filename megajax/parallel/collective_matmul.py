"""Products with the collective of tensor parallelism in them, and their gradients.

`all_gather_matmul` is the way into a block, `matmul_reduce_scatter` the way out, and the backward
pass of one is made of the other: dx of a gathered product is a product that is scattered, dx of a
scattered one a product that gathers, and that one gather serves dw as well (Megatron, arXiv
2205.05198; Flux, arXiv 2406.06858, section 3). For code inside a shard_map over `axis`, checked or
not, whatever other axes the mesh has.

Implementations: 'xla', plain collectives before or after whole products; 'ring', chunk by chunk;
'fused', one kernel. None lets parallel/overlap.py choose. In all
of them products accumulate in float32, partial sums cross ranks in float32, and results are rounded
once.

Legend: R ranks of the axis, m rows of all ranks together, k contracted, n columns. Leading
dimensions of activations are rows too, which every rank has for itself: (..., m, k).
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values

from megajax.core.errors import did_you_mean
from megajax.layers import ops
from megajax.layers.param import Weight, any_packed
from megajax.parallel import overlap
from megajax.parallel.overlap import GATHER, REDUCE, SCATTER, Implementation
from pallas_kernels import arguments, dispatch
from pallas_kernels.collective import api as kernels
from pallas_kernels.collective import reference as plain
from pallas_kernels.hopper.activations import ACTIVATIONS, Spec, activate

# ---- ring
#
# Collective matmuls as rings of permutes, each beside one chunk's product: overlap by XLA alone.
#
# XLA gives a product that waits for a gather, or a scatter that waits for a product, nothing to run
# beside the collective. Cut into one chunk a rank, each step's permute has a chunk's product as
# company. XLA's scheduler would still issue several permutes early and leave them exposed, so each
# step is locked: a barrier lets nothing of the next step begin before the permute and the product
# of this one are done (compiled for H100: every permute is in flight over exactly one product).
#
# Both functions are for code inside a shard_map over `axis`. They have no gradients; those are in
# the section `collective vjp`. Source: looped collective einsum (Wang et al., ASPLOS
# 2023), the medium-grained overlap that Flux (arXiv 2406.06858) section 2 compares with.
#
# Legend: R ranks of the axis, N columns; arrays are (..., rows, columns), rows are cut.


Array = jax.Array
Arrays = tuple[Array, ...]

# Rings of more ranks turn in a loop: written out, the program and the time to compile it grow with
# the ranks (chosen: one NVLink node of 8).
UNROLLED = 8


def compiler_options(both_ways: bool) -> dict[str, Any]:
    """Returns what to compile a GPU program of rings with: jax.jit(compiler_options=...).

    XLA flies one permute at a time unless told. Rings of one direction need nothing: the locks keep
    the products of two steps apart, which else takes xla_gpu_dot_merger_threshold_mb=0.
    """
    return {"xla_gpu_experimental_parallel_collective_overlap_limit": 2} if both_ways else {}


def all_gather(x: Array, work: Callable[[Array], Arrays], axis: str, both_ways: bool) -> Arrays:
    """Returns work(x of all ranks, one below the other), chunk by chunk, own chunk first.

    work: (..., chunk, K) -> arrays (..., chunk, N), row by row. both_ways: half of each chunk goes
    up the ring and half down, where there are rows for it.
    """
    R, rank, m = lax.axis_size(axis), lax.axis_index(axis), x.shape[-2]
    if R == 1:
        return work(x)
    cuts = _cuts(m, both_ways)

    def step(s: int | Array, state: tuple[Arrays, Arrays], last: bool = False) -> tuple:
        chunks, outs = state
        coming = chunks if last else tuple(map(hop(axis), chunks, (-1, 1)))
        results = work(jnp.concatenate(chunks, -2))
        outs = outs or tuple(
            lax.empty((*y.shape[:-2], R * m, y.shape[-1]), y.dtype) for y in results
        )
        for (first, size), direction in zip(cuts, (1, -1), strict=False):
            row = (rank + direction * s) % R * m + first
            pieces = (lax.slice_in_dim(y, first, first + size, axis=-2) for y in results)
            outs = tuple(map(lambda o, y: _put(o, y, row), outs, pieces))  # noqa: B023
        return lax.optimization_barrier((coming, outs))

    state = step(0, (tuple(_rows(x, *cut) for cut in cuts), ()))
    return step(R - 1, run_steps(R - 1, step, state), last=True)[1]


def reduce_scatter(
    xs: Arrays, work: Callable[..., Array], axis: str, both_ways: bool, acc_dtype: jnp.dtype
) -> Array:
    """Returns this rank's rows of the sum over ranks of work(*xs), own chunk last, in float32.

    Args: xs: (..., R chunk, K) each. work: their rows (..., chunk, K) -> float32 (..., chunk, N).
      both_ways: half of each chunk's rows travels up the ring and half down. acc_dtype: of what
      travels.
    """
    R, rank, m = lax.axis_size(axis), lax.axis_index(axis), xs[0].shape[-2] // lax.axis_size(axis)
    if R == 1:
        return work(*xs)
    cuts = _cuts(m, both_ways)

    def rows(x: Array, s: int | Array) -> Array:
        """Returns the rows of the chunks whose sums still travel R - 1 - s hops to their owners."""
        owners = ((rank - s - 1) % R, (rank + s + 1) % R)
        pieces = ((o * m + first, n) for o, (first, n) in zip(owners, cuts, strict=False))
        return jnp.concatenate([_rows(x, *piece) for piece in pieces], -2)

    def step(s: int | Array, state: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
        total, xs = state
        leaving = (_rows(total.astype(acc_dtype), *cut) for cut in cuts)
        coming = tuple(map(hop(axis), leaving, (1, -1)))
        part = work(*(rows(x, s) for x in xs))
        # xs too: were they outside, XLA would join the products of two steps into one.
        coming, part, xs = lax.optimization_barrier((coming, part, xs))
        return jnp.concatenate(coming, -2).astype(part.dtype) + part, xs

    state = lax.optimization_barrier((work(*(rows(x, 0) for x in xs)), xs))
    return run_steps(R, step, state)[0]


def run_steps[State](end: int, step: Callable[[int, State], State], state: State) -> State:
    """Steps 1 to end - 1."""
    if end > UNROLLED:
        return lax.fori_loop(1, end, step, state)
    for s in range(1, end):
        state = step(s, state)
    return state


def _cuts(m: int, both_ways: bool) -> list[tuple[int, int]]:
    """Returns (first row, rows) of what goes each way; one row goes one way."""
    half = (m + 1) // 2 if both_ways else m
    return [(0, half), (half, m - half)] if half < m else [(0, m)]


def hop(axis: str | tuple[str, ...]) -> Callable[[Array, int], Array]:
    """Returns (array, by how many ranks it moves) -> what comes from the neighbour.

    axis: one, or several in any order, the last fastest; `ppermute` takes the mesh's order only.
    """
    names = (axis,) if isinstance(axis, str) else axis
    mesh, R = jax.sharding.get_abstract_mesh(), lax.axis_size(axis)
    sorted_ = tuple(sorted(names, key=mesh.axis_names.index))
    places = np.arange(R).reshape([mesh.shape[name] for name in sorted_])
    place_R = places.transpose([sorted_.index(name) for name in names]).ravel().tolist()

    def move(x: Array, by: int) -> Array:
        pairs = [(place_R[r], place_R[(r + by) % R]) for r in range(R)]
        return lax.ppermute(x, sorted_, pairs)

    return move


def _rows(x: Array, first: int | Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, first, size, axis=x.ndim - 2)


def _put(out: Array, y: Array, first: int | Array) -> Array:
    return lax.dynamic_update_slice_in_dim(out, y, first, axis=out.ndim - 2)


# ---- collective vjp
#
# The two collective matmuls as differentiable functions: values, and the rules of gradients.
#
# Each is the other's backward pass (see collective_matmul.py, which checks what comes here). Where
# whole products lie on both sides of a collective, as around a weight's gradient, the collective is
# left whole too, and XLA's scheduler puts it beside them.
#
# Legend: as in collective_matmul.py; z is an activation's input.


class Static(NamedTuple):
    """The static arguments of a call.

    both_ways: a ring sends half of each chunk in each direction. keep: the gathered input is a
    result. residual: a residual is added.
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
        results = _activate(static.activation, zs) + (zs if keep_z else ())
        return tuple(a.astype(x.dtype) for a in results) + ((x,) if static.keep else ())

    products = _gathered(x, work, static)
    products, gathered = (products[:-1], products[-1]) if static.keep else (products, None)
    count = 1 if static.activation == "swiglu" else len(ws)
    return products[:count], gathered, products[count:]


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
    has_gradient = any(w.perturbed for w in ws)
    x, ws, biases = custom_vjp_primal_tree_values((x, ws, biases))
    keep_z = static.activation is not None
    ys, gathered, zs = _gather_run(x, ws, biases, static, keep_z)
    stored = gathered if static.keep else x
    return (ys, gathered), (stored if has_gradient else None, ws, biases, zs)


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
    has_gradient = any(w.perturbed for w in ws)
    xs, ws, bias, residual = custom_vjp_primal_tree_values((xs, ws, bias, residual))
    y = _scatter_run(xs, ws, bias, residual, static)
    return y, (xs if has_gradient else None, ws, bias)


def _scatter_backward(static: Static, saved: tuple, dy: Any) -> tuple:
    """dy is gathered once, beside dx = dy w^T; then it is whole, for dw = x^T dy."""
    xs, ws, bias = saved
    (dy,) = _instantiated((dy,))

    def work(dy: Array) -> Arrays:
        dxs = tuple(_dot(dy, w.T, dy.dtype) for w in ws)
        return dxs if xs is None else (*dxs, dy)

    if static.implementation == "fused":
        none, spec = (None,) * len(ws), Spec(None, dy.dtype.name)
        dxs, gathered_dy = kernels.fused_gather(
            dy, ws, none, axis=static.axis, spec=spec, keep=True, turned=True
        )
        products = (*dxs, gathered_dy)
    else:
        products = _gathered(dy, work, static)
    dxs, dws = products[: len(ws)], (None,) * len(ws)
    if xs is not None:
        dws = tuple(_weight_gradient(x, products[-1], w) for x, w in zip(xs, ws, strict=True))
    return dxs, dws, _bias_gradient(bias, dy), dy if static.residual else None


matmul_scatter.defvjp(_scatter_forward, _scatter_backward, symbolic_zeros=True)


# ---- the collectives


def _gathered(x: Array, work: Callable[[Array], Arrays], static: Static) -> Arrays:
    """Returns work(x of all ranks)."""
    if static.implementation == "ring" and x.size:
        return all_gather(x, work, static.axis, static.both_ways)
    return work(plain.gather(x, static.axis))


def _scattered(xs: Arrays, ws: Arrays, static: Static) -> Array:
    """Returns this rank's rows of the sum over ranks of all x w, float32 (fused: x's)."""
    if static.implementation == "ring" and xs[0].size:
        dtype = jnp.dtype(static.acc_dtype)
        work = lambda *xs: product(xs, ws)  # noqa: E731
        return reduce_scatter(xs, work, static.axis, static.both_ways, dtype)
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


# ---- collective matmul


DTYPES = ("bfloat16", "float16", "float32")


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
    result = ys[0] if single or activation == "swiglu" else ys
    return (result, gathered) if return_gathered else result


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
        return gather_matmul(*_varying(static.axis, (x, ws, biases)), static)


def run_scatter(
    xs: Arrays, ws: Arrays, bias: Array | None, residual: Array | None, static: Static
) -> Array:
    """`matmul_reduce_scatter` of several pairs; the caller has checked and chosen."""
    with arguments.reverse_only(SCATTER):
        arrays = _varying(static.axis, (xs, ws, bias, residual))
        return matmul_scatter(*arrays, static)


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
    part = product(xs, ws).astype(acc)
    return finish(plain.total(part, axis).astype(jnp.float32), bias, residual, xs[0].dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _fused_sums(operands: tuple[Any, ...], axis: str, acc: str) -> Array:
    xs, ws, bias, residual = operands
    x, w = jnp.concatenate(xs, -1), jnp.concatenate(ws, 0)
    return kernels.fused_reduce(x, w, bias, residual, axis=axis, acc=acc)


_fused_sums.defvjp(
    lambda operands, axis, acc: (_fused_sums(operands, axis, acc), operands),
    lambda axis, acc, operands, dy: jax.vjp(lambda o: _all_sums(o, axis, acc), operands)[1](dy),
)


def _varying(axis: str, arrays: Any) -> Any:
    """Casts all to vary over `axis` and over whatever any of them varies over.

    The gradient of what is copied over an axis is then summed over it, once. Where shard_map does
    not check, nothing is known and nothing changes: its caller sums.
    """
    axes = {a for x in jax.tree.leaves(arrays) for a in jax.typeof(x).mat.varying} | {axis}
    return jax.tree.map(lambda x: dispatch.vary(x, axes), arrays)


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


# ---- the two ends of a sublayer
#
# Products that parallel/tensor.py has checked and chosen an implementation for, 'ring' or 'fused'.
# Their weights have any shape, or are packed: those run as rings of their own products. Sums cross
# ranks in float32, and rings turn in one direction.
#
# Legend: B rows, S positions, D model width.


def up(
    x_BSD: Array, weights: tuple[Weight, ...], axis: str, implementation: Implementation
) -> Arrays:
    """Returns the products of gathered x with weights (D, ...), which share the gather."""
    if any_packed(weights):
        ys = _packed_up(*dispatch.alike((x_BSD, weights)), axis)
    else:
        arrays: Any = weights
        flat = tuple(w.reshape(w.shape[0], -1) for w in arrays)
        static = Static(axis, implementation, "float32", both_ways=False)
        ys, _ = run_gather(x_BSD, flat, (None,) * len(flat), static)
    return tuple(y.reshape(*y.shape[:-1], *w.shape[1:]) for y, w in zip(ys, weights, strict=True))


def down(
    xs: Arrays,
    weights: tuple[Weight, ...],
    axis: str,
    implementation: Implementation,
    scatters: bool,
) -> Array:
    """Returns the sum over pairs and ranks of x w, w (..., D): this rank's positions of it, or all
    of it on every rank."""
    if any_packed(weights):
        return _packed_down(*dispatch.alike((xs, weights)), axis)
    arrays: Any = weights
    flat_xs = tuple(x.reshape(*x.shape[:2], -1) for x in xs)
    flat_ws = tuple(w.reshape(-1, w.shape[-1]) for w in arrays)
    function = run_scatter if scatters else run_reduce
    static = Static(axis, implementation, "float32", both_ways=False)
    return function(flat_xs, flat_ws, None, None, static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _packed_up(x_BSD: Array, weights: tuple[Weight, ...], axis: str) -> Arrays:
    return all_gather(x_BSD, lambda x: _products(x, weights), axis, both_ways=False)


def _packed_up_backward(axis: str, saved: tuple, dys: Arrays) -> tuple:
    """Whole products, as of arrays (`_gather_backward`): dx is scattered beside dw."""
    x_BSD, weights = saved
    dx, dweights = jax.vjp(_products, plain.gather(x_BSD, axis), weights)[1](dys)
    return plain.scatter(dx.astype(jnp.float32), axis).astype(dx.dtype), dweights


_packed_up.defvjp(
    lambda x_BSD, weights, axis: (_packed_up(x_BSD, weights, axis), (x_BSD, weights)),
    _packed_up_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _packed_down(xs: Arrays, weights: tuple[Weight, ...], axis: str) -> Array:
    flat = tuple(x.reshape(*x.shape[:2], -1) for x in xs)
    work = lambda *xs: _sum(xs, weights).astype(jnp.float32)  # noqa: E731
    y_BSD = reduce_scatter(flat, work, axis, False, jnp.dtype("float32"))
    return y_BSD.astype(xs[0].dtype)


def _packed_down_backward(axis: str, saved: tuple, dy_BSD: Array) -> tuple:
    xs, weights = saved
    return jax.vjp(_sum, xs, weights)[1](plain.gather(dy_BSD, axis))


_packed_down.defvjp(
    lambda xs, weights, axis: (_packed_down(xs, weights, axis), (xs, weights)),
    _packed_down_backward,
)


def _products(x_BSD: Array, weights: tuple[Weight, ...]) -> Arrays:
    return tuple(ops.matmul(x_BSD, w).reshape(*x_BSD.shape[:2], -1) for w in weights)


def _sum(xs: Arrays, weights: tuple[Weight, ...]) -> Array:
    used = ((x.reshape(*x.shape[:2], *w.shape[:-1]), w) for x, w in zip(xs, weights, strict=True))
    terms = (ops.matmul(x, w, contract=w.ndim - 1) for x, w in used)
    return functools.reduce(operator.add, terms)
