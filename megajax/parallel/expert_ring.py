"""An expert layer's two exchanges as rings of permutes, each beside one source's grouped product.

Tokens go round all ranks, and each rank multiplies the rows that a rank's tokens give its experts
while the next rank's are on their way; sums go round to their owners, and each rank adds what its
experts answer to one owner's tokens while the sum of the others is on its way. So XLA, which leaves
an all-gather before a grouped product exposed, has a product for every hop: the order of COMET
(arXiv 2502.19811, section 3.1, rows by source rank) at the grain of a rank. Steps are locked as in
parallel/ring.py. A token passes every rank, also those that need none of it: R - 1 hops, where an
all-to-all would send it min(A, R) times.

For code inside a shard_map over the axes; nothing here is differentiable (parallel/expert_vjp.py).

Legend: as in expert_rows.py; C choices of one rank, at most; K, F columns.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.layers import dispatch as dispatch_
from megajax.parallel import ring
from megajax.parallel.expert_rows import Dispatch, live
from pallas_kernels import grouped_matmul

Array = jax.Array
Arrays = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Sources:
    """This rank's rows, source by source, each source's in the order of its experts.

    row_N: rows by source, then C that are none. place_N: the inverse. first_R: where a source's
    begin.
    """

    dispatch: Dispatch
    row_N: Array
    place_N: Array
    first_R: Array

    def rows(self, source: int | Array) -> tuple[Array, Array]:
        """Returns (row_C of h, past N where there is none; the token of the source behind it)."""
        dispatch, (T, A) = self.dispatch, self.dispatch.choices
        N = dispatch.order_N.shape[0]
        C = min(T * A, N)
        row_C = lax.dynamic_slice_in_dim(self.row_N, self.first_R[source], C)
        step_C = jnp.arange(C, dtype=jnp.int32)
        row_C = jnp.where(step_C < dispatch.splits_RE[source].sum(), row_C, N + step_C)
        token_C = dispatch.order_N[jnp.minimum(row_C, N - 1)] // A - source * T
        return row_C, jnp.clip(token_C, 0, T - 1)

    def choices(self, owner: int | Array) -> tuple[Array, Array]:
        """Returns (where among `rows` the choices of an owner's tokens are, whether they are)."""
        dispatch, (T, _) = self.dispatch, self.dispatch.choices
        N = dispatch.order_N.shape[0]
        row_TA = lax.dynamic_slice_in_dim(dispatch.index_PA, owner * T, T)
        here_TA = row_TA < N
        place_TA = self.place_N[jnp.where(here_TA, row_TA, 0)] - self.first_R[owner]
        return jnp.where(here_TA, place_TA, 0), here_TA


def sources(dispatch: Dispatch) -> Sources:
    """Returns where each source's rows are. dispatch: gathered."""
    (T, A), R = dispatch.choices, dispatch.splits_RE.shape[0]
    N = dispatch.order_N.shape[0]
    each_R = dispatch.splits_RE.sum(1, dtype=jnp.int32)
    row_N = jnp.arange(N, dtype=jnp.int32)
    from_N = jnp.where(row_N < each_R.sum(), dispatch.order_N // (T * A), R)
    order_N = jnp.argsort(from_N, stable=True).astype(jnp.int32)
    place_N = jnp.zeros_like(order_N).at[order_N].set(row_N, unique_indices=True)
    spare_C = jnp.full(min(T * A, N), N, jnp.int32)
    return Sources(
        dispatch, jnp.concatenate([order_N, spare_C]), place_N, jnp.cumsum(each_R) - each_R
    )


def spread(
    x_TK: Array, ws: Arrays, dispatch: Dispatch, turned: bool, keep: bool
) -> tuple[Arrays, Array | None]:
    """Returns (each token at its experts' products with each w, (N, F); x_PK of all ranks if kept).

    turned: ws are stored (E, F, K). Rows past the splits are 0.
    """
    axes = live(dispatch.axes)
    R, rank, T = lax.axis_size(axes), lax.axis_index(axes), x_TK.shape[0]
    found, N = sources(dispatch), dispatch.order_N.shape[0]
    widths = (w.shape[1 if turned else 2] for w in ws)
    hs = tuple(jnp.zeros((N, width), x_TK.dtype) for width in widths)
    outs = hs, (jnp.zeros((R * T, x_TK.shape[1]), x_TK.dtype) if keep else None)

    def step(s: int | Array, state: tuple[Array, Any], last: bool = False) -> tuple[Array, Any]:
        x_TK, (hs, whole) = state
        coming = x_TK if last else ring.hop(axes)(x_TK, -1)
        source = (rank + s) % R
        row_C, token_C = found.rows(source)
        x_CK, sizes_E = x_TK[token_C], dispatch.splits_RE[source]
        ys = (grouped_matmul(x_CK, w, sizes_E, transpose_rhs=turned) for w in ws)
        # Rows that are none have places past the end, all different: they are not written.
        put = {"mode": "drop", "unique_indices": True}
        hs = tuple(h.at[row_C].set(y, **put) for h, y in zip(hs, ys, strict=True))
        if whole is not None:
            whole = lax.dynamic_update_slice_in_dim(whole, x_TK, source * T, axis=0)
        return lax.optimization_barrier((coming, (hs, whole)))

    if R == 1:
        return step(0, (x_TK, outs), last=True)[1]
    state = ring.turn(R - 1, step, step(0, (x_TK, outs)))
    return step(R - 1, state, last=True)[1]


def collect(
    hs: Arrays, ws: Arrays, weight_PA: Array | None, dispatch: Dispatch, acc_dtype: Any
) -> Array:
    """Returns float32 (T, D): of own tokens the weighted sums of h w over choices and ranks.

    weight_PA: float32, of all ranks' choices; None: 1. acc_dtype: of the sums that travel.
    """
    axes = live(dispatch.axes)
    R, rank, (T, A) = lax.axis_size(axes), lax.axis_index(axes), dispatch.choices
    found, N = sources(dispatch), dispatch.order_N.shape[0]

    def work(hs: Arrays, owner: int | Array) -> Array:
        row_C, _ = found.rows(owner)
        row_C, sizes_E = jnp.minimum(row_C, N - 1), dispatch.splits_RE[owner]
        ys = (grouped_matmul(h[row_C], w, sizes_E) for h, w in zip(hs, ws, strict=True))
        y_CD = sum((y.astype(jnp.float32) for y in ys), jnp.zeros((), jnp.float32))
        place_TA, here_TA = found.choices(owner)
        weight_TA = jnp.ones((T, A), jnp.float32)
        if weight_PA is not None:
            weight_TA = lax.dynamic_slice_in_dim(weight_PA, owner * T, T)
        weight_TA = jnp.where(here_TA, weight_TA, 0.0)
        return dispatch_.combine(y_CD, *(a[None] for a in (place_TA, weight_TA, here_TA)))[0]

    def step(s: int | Array, state: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
        total_TD, hs = state
        coming = ring.hop(axes)(total_TD.astype(acc_dtype), 1)
        part_TD = work(hs, (rank - s - 1) % R)
        coming, part_TD, hs = lax.optimization_barrier((coming, part_TD, hs))
        return coming.astype(jnp.float32) + part_TD, hs

    first = work(hs, (rank - 1) % R)
    if R == 1:
        return first
    return ring.turn(R, step, lax.optimization_barrier((first, hs)))[0]
