"""The grouped product and its gradient of the weights in plain JAX: specification and oracle.

Both go through the rows step by step (hopper/visits.py), so they compute what the groups need and
keep nothing that grows with their number: XLA's ragged_dot makes a copy of the rows for each group.

Legend: M rows, G groups, K contracted, N columns; of `weights`, K and N are the widths of a and b.
"""

import contextlib

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import visits

Array = jax.Array
ROWS = 128  # of a step (chosen: products large enough for a CPU's cores, few wasted rows)


def product(a_MK: Array, b: Array, sizes_G: Array, *, transpose: bool, size: int = ROWS) -> Array:
    """y_MN, row by row a times its group's b (K, N), of (G, K, N), or transposed (G, N, K).

    Summed in float32, in a's type; rows at or past sum(sizes_G) are 0, whatever lies in a. size:
    rows of a step.
    """
    M, N = a_MK.shape[0], b.shape[1 if transpose else 2]
    empty_MN = like(jnp.zeros((M, N), a_MK.dtype), a_MK)
    if not a_MK.size * N:
        return empty_MN
    steps, rows = _steps(a_MK, sizes_G, size)
    contract = (((1,), (1 if transpose else 0,)), ((), ()))

    def step(i: Array, y_MN: Array) -> Array:
        group, _, lo, hi = steps.table[i]
        at, live_R1 = rows(lo, hi)
        b_KN = lax.dynamic_index_in_dim(b, group, keepdims=False)
        a_RK = lax.dynamic_slice_in_dim(a_MK, at, live_R1.shape[0])
        y_RN = lax.dot_general(a_RK, b_KN, contract, preferred_element_type=jnp.float32)
        before_RN = lax.dynamic_slice_in_dim(y_MN, at, live_R1.shape[0])
        y_RN = jnp.where(live_R1, y_RN.astype(y_MN.dtype), before_RN)
        return lax.dynamic_update_slice_in_dim(y_MN, y_RN, at, 0)

    with _named(a_MK, sizes_G, size):
        return lax.fori_loop(0, steps.count, step, empty_MN)


def weights(a_MK: Array, b_MN: Array, sizes_G: Array, *, size: int = ROWS) -> Array:
    """w_GKN, of each group's rows a^T b; exactly 0 for a group without rows.

    Summed in float32, in a's type; rows at or past sum(sizes_G) count nothing, whatever lies there.
    size: rows of a step.
    """
    (M, K), N, G = a_MK.shape, b_MN.shape[1], sizes_G.shape[0]
    empty_GKN = like(jnp.zeros((G, K, N), a_MK.dtype), a_MK)
    if not M * K * N:
        return empty_GKN
    steps, rows = _steps(a_MK, sizes_G, size)

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        w_GKN, sum_KN, last = carry
        group, _, lo, hi = steps.table[i]
        at, live_R1 = rows(lo, hi)
        a_RK, b_RN = (
            jnp.where(live_R1, lax.dynamic_slice_in_dim(x, at, live_R1.shape[0]), 0)
            for x in (a_MK, b_MN)
        )
        more_KN = lax.dot_general(
            a_RK, b_RN, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        sum_KN = jnp.where(group == last, sum_KN, 0.0) + more_KN
        w_GKN = lax.dynamic_update_index_in_dim(w_GKN, sum_KN.astype(w_GKN.dtype), group, 0)
        return w_GKN, sum_KN, group

    first = like((jnp.zeros((K, N), jnp.float32), jnp.int32(0)), a_MK)
    with _named(a_MK, sizes_G, size):
        return lax.fori_loop(0, steps.count, step, (empty_GKN, *first))[0]


def _named(a_MK: Array, sizes_G: Array, size: int) -> contextlib.AbstractContextManager:
    """Writes the most steps that the loop can have into the name of the compiled program.

    Each group but the first may begin within the rows of a step.
    """
    M = a_MK.shape[0]
    return jax.named_scope(f"at_most_{-(-M // min(size, M)) + sizes_G.shape[0] - 1}_turns")


def _steps(a_MK: Array, sizes_G: Array, size: int):
    """Returns (the visits, a function of one: the start of its R rows, which of them it visits)."""
    M = a_MK.shape[0]
    R = min(size, M)

    def rows(lo: Array, hi: Array) -> tuple[Array, Array]:
        at = jnp.minimum(lo, M - R)
        row_R1 = at + jnp.arange(R, dtype=jnp.int32)[:, None]
        return at, (lo <= row_R1) & (row_R1 < hi)

    return visits.visits(sizes_G, M, R, 1), rows


def like(new, old: Array):
    """Returns `new` varying over the mesh axes over which `old` does, as a loop's start must."""
    axes = tuple(jax.typeof(old).mat.varying)
    return jax.tree.map(lambda x: lax.pcast(x, axes, to="varying"), new) if axes else new
