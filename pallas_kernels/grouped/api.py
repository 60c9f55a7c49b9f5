"""A product of groups of rows with weights of their own, differentiable.

The experts of a mixture: rows sorted by expert meet their expert's weights (MegaBlocks, arXiv
2211.15841; COMET, arXiv 2502.19811, section 2, layer 0 and layer 1). XLA's `lax.ragged_dot` makes a
masked copy of the rows for each group on a GPU, and multiplies them all: G times the FLOPs.

Legend: M rows, G groups, K contracted, N columns.
Not here: second derivatives, fusion with an activation, 8-bit operands.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.grouped import reference

Array = jax.Array
DTYPES = ("bfloat16", "float16", "float32")
OP = "grouped_matmul"


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
      group_sizes: integers (G,), none negative, traced. Their sum may be below M: rows at or past
        it give 0 and get the gradient 0, and what lies in them, NaN too, reaches nothing.
        Groups may be empty, their gradient is exactly 0; rows past M are cut off.
      implementation: see `dispatch`. Under a mesh inside a shard_map only.
    Returns: y_MN in lhs's type; differentiable in lhs and rhs.
    Raises: ValueError for shapes and types that break the above; NotImplementedError with all
      reasons where the implementation asked for cannot run.
    """
    _check(lhs_MK, rhs_GKN, group_sizes, transpose_rhs)
    plan = _plan(transpose_rhs, implementation)
    return _grouped(*dispatch.alike((lhs_MK, rhs_GKN, group_sizes)), plan)


class Plan(NamedTuple):
    """What is static: how the passes run."""

    choice: str
    transpose: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped(lhs_MK: Array, rhs: Array, sizes_G: Array, plan: Plan) -> Array:
    return reference.product(lhs_MK, rhs, sizes_G, transpose=plan.transpose)


def _forward(lhs_MK, rhs, sizes_G, plan):
    return _grouped(lhs_MK, rhs, sizes_G, plan), (lhs_MK, rhs, sizes_G)


def _backward(plan, saved, dy_MN):
    lhs_MK, rhs, sizes_G = saved
    dlhs_MK = reference.product(dy_MN, rhs, sizes_G, transpose=not plan.transpose)
    pair = (dy_MN, lhs_MK) if plan.transpose else (lhs_MK, dy_MN)
    return dlhs_MK, reference.weights(*pair, sizes_G), None


_grouped.defvjp(_forward, _backward)


def _plan(transpose: bool, implementation: str | None) -> Plan:
    reasons = ("there is only the reference in this release",)
    return Plan(dispatch.choose(OP, implementation, reasons), transpose)


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
    if sizes.shape != rhs.shape[:1] or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"{OP}: group_sizes {sizes.dtype}{sizes.shape} must be integers ({rhs.shape[0]},): one "
            "for each group of rhs"
        )
