"""A product of groups of rows with weights of their own, differentiable.

The experts of a mixture: rows sorted by expert meet their expert's weights (MegaBlocks, arXiv
2211.15841; COMET, arXiv 2502.19811, section 2, layer 0 and layer 1).

Legend: M rows, G groups, K contracted, N columns.
Not here: second derivatives, fusion with an activation, 8-bit operands.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, dispatch, tuned
from pallas_kernels.grouped import hopper, hopper_weights, library, reference

Array = jax.Array
DTYPES = ("bfloat16", "float16", "float32")
OP = hopper.OP


def grouped_matmul(
    lhs_MK: Array,
    rhs_GKN: Array,
    group_sizes: Array,
    *,
    transpose_rhs: bool = False,
    implementation: dispatch.Implementation | None = None,
) -> Array:
    """Row i of the first group_sizes[0] rows times rhs[0], of the next group_sizes[1] rhs[1], ...

    Summed in float32, rounded once. The backward pass keeps lhs and rhs; the gradient of rhs sums
    over the rows of each group in one fixed order.

    Args:
      lhs_MK: bf16|f16|f32, rows sorted by group. rhs_GKN: the same type; with transpose_rhs
        (G, N, K), read as it lies.
      group_sizes: int32 (G,), NumPy's integers or a list, none negative, traced. Their sum may
        be below M: rows at or past it give 0 and get the gradient 0, and what lies in them, NaN
        too, reaches nothing.
        Groups may be empty, their gradient is exactly 0; rows past M are cut off. Inf and NaN stay
        in their row, and in the rhs gradient of their group.
      implementation: see `dispatch`. 'hopper' takes bf16 and f16; M that is a multiple of 8, and K
        and N of 64, spare it copies of its operands. Under a mesh inside a shard_map only.
    Returns: y_MN in lhs's type; differentiable in lhs and rhs.
    Raises: ValueError for shapes and types that break the above; NotImplementedError with all
      reasons where the implementation asked for cannot run.
    """
    arguments.check_arrays(OP, lhs=lhs_MK, rhs=rhs_GKN)
    sizes_G = jnp.asarray(arguments.integers(OP, "group_sizes", group_sizes, ndim=1))
    _check(lhs_MK, rhs_GKN, sizes_G, transpose_rhs)
    static = _static(lhs_MK, rhs_GKN, transpose_rhs, implementation)
    with arguments.reverse_only(OP):
        return _grouped(*dispatch.alike((lhs_MK, rhs_GKN, sizes_G)), static)


class Static(NamedTuple):
    """What is static: how the passes run, how rhs is stored, the tiles of y, dlhs and drhs."""

    forward: str
    backward: str
    transpose: bool
    tile: hopper.Tile
    tile_lhs: hopper.Tile
    tile_rhs: hopper.Tile


def _product(choice: str, tile: hopper.Tile, transpose: bool, *args: Array) -> Array:
    return dispatch.run(
        choice,
        functools.partial(hopper.product, transpose=transpose, tile=tile),
        functools.partial(reference.product, transpose=transpose),
        *args,
        op=OP,
        library=functools.partial(library.product, transpose=transpose),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(lhs_MK: Array, rhs: Array, sizes_G: Array, static: Static) -> Array:
    return _product(static.forward, static.tile, static.transpose, lhs_MK, rhs, sizes_G)


def _forward(lhs_MK, rhs, sizes_G, static):
    return _grouped(lhs_MK, rhs, sizes_G, static), (lhs_MK, rhs, sizes_G)


def _backward(static, saved, dy_MN):
    lhs_MK, rhs, sizes_G = saved
    dlhs_MK = _product(static.backward, static.tile_lhs, not static.transpose, dy_MN, rhs, sizes_G)
    drhs = dispatch.run(
        static.backward,
        functools.partial(hopper_weights.weights, tile=static.tile_rhs),
        reference.weights,
        *((dy_MN, lhs_MK) if static.transpose else (lhs_MK, dy_MN)),
        sizes_G,
        op=OP,
        library=library.weights,
    )
    return dlhs_MK, drhs, None


_grouped.defvjp(_forward, _backward)


def key(dtype: Any, kind: str, G: int, M: int, N: int, K: int) -> tuned.Key:
    """Returns the key of a table's row. kind: 'forward', 'transposed' (rhs), 'weights' (a^T b)."""
    return {"dtype": jnp.dtype(dtype).name, "kind": kind, "G": G, "M": M, "N": N, "K": K}


def _static(lhs: Array, rhs: Array, transpose: bool, implementation: str | None) -> Static:
    """Everything static, from shapes and types."""
    (M, K), G, N = lhs.shape, rhs.shape[0], rhs.shape[1 if transpose else 2]
    reasons = []
    if lhs.dtype.name == "float32":
        reasons.append("needs bfloat16 or float16, found float32")
    if not M * K * N:
        reasons.append(f"needs something to compute, found M={M}, K={K}, N={N}")
    kind, turned = ("transposed", "forward") if transpose else ("forward", "transposed")
    jobs = (
        (hopper.heuristic, kind, N, K),
        (hopper.heuristic, turned, K, N),
        (hopper_weights.heuristic, "weights", *((K, N) if transpose else (N, K))),
    )
    rows = [tuned.find(OP, key(lhs.dtype, kind, G, M, n, k)) for _, kind, n, k in jobs]
    tile, tile_lhs, tile_rhs = (
        hopper.Tile(**tile)
        if (tile := tuned.tile(row))
        else heuristic(max(M, 1), max(n, 1), max(k, 1), G)
        for row, (heuristic, _, n, k) in zip(rows, jobs, strict=True)
    )
    forward, backward = (
        dispatch.choose(OP, implementation, reasons, measured) for measured in (rows[:1], rows[1:])
    )
    return Static(forward, backward, transpose, tile, tile_lhs, tile_rhs)


def _check(lhs: Array, rhs: Array, sizes: Array, transpose: bool) -> None:
    stored = "(G, N, K)" if transpose else "(G, K, N)"
    if (
        lhs.ndim != 2
        or rhs.ndim != 3
        or lhs.shape[1] != rhs.shape[2 if transpose else 1]
        or not rhs.shape[0]
    ):
        raise ValueError(
            f"{OP}: lhs {lhs.shape} and rhs {rhs.shape} must be (M, K) and {stored}, with at least "
            f"one group (transpose_rhs={transpose})"
        )
    if lhs.dtype.name not in DTYPES or rhs.dtype != lhs.dtype:
        raise ValueError(
            f"{OP}: lhs {lhs.dtype} and rhs {rhs.dtype} must have one type of {', '.join(DTYPES)}"
        )
    if sizes.shape != rhs.shape[:1]:
        raise ValueError(
            f"{OP}: group_sizes {sizes.shape} must be ({rhs.shape[0]},): one for each group of rhs"
        )
    known = arguments.concrete(sizes)
    if known is not None and (known < 0).any():
        raise ValueError(f"{OP}: group_sizes must be 0 or more, the least is {known.min()}")
