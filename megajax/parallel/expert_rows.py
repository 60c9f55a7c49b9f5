"""Which rows an expert's rank computes, and how tokens travel to them and sums back.

The rows of a rank's experts are grouped by expert, and inside an expert sorted by the rank that the
token came from, the own rank first and then in rotation (COMET, arXiv 2502.19811, section 3.1;
Flux's repository, AgScatterSortOp), so that a kernel can begin with what is here. A token travels
once to a rank, however many of its experts are there, in one of two ways:

gather: an all-gather there, a reduce-scatter back; R - 1 tokens a token. While R <= 2 A.
lanes: an all-to-all of the tokens that a rank needs, at most min(A, R) a token. On GPUs
    `lax.ragged_all_to_all` sends those alone; CPUs, which have none, send full lanes.

Tensor ranks hold columns of the same experts: what has come to one goes to all of them. Every
rank knows everyone's choices (A integers a token), so nothing is agreed on besides. `arrive` and
`add_up` are each other's transposes; nothing here has a rule of gradients, which is
parallel/expert_vjp.py's business.

Legend: T tokens of a rank, A choices a token, D model width, R ranks that hold tokens, G ranks of
the expert axis, E experts of a rank, N rows of a rank's experts (the worst case), Q slots of a lane
(the worst case), P tokens that have come to a rank: R T, or R Q.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.layers import dispatch as dispatch_
from megajax.parallel.overlap import Implementation
from pallas_kernels.expert.api import Routes, cut, route

Array = jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The experts that each token of a rank uses.

    expert_index: integers (T, A), of all experts of the model; the same one may come twice. A
    choice outside 0 .. experts - 1 is none: it adds nothing and is not dropped (padding: -1).
    weight: float32 (T, A), of the answers; any sign.
    """

    expert_index: Array
    weight: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lanes:
    """The all-to-all's slots, both ways; slots past the counts hold anything.

    token_GQ: own token in each slot to a rank. place_GT: its slot, Q: it does not go. sent_G,
    received_G: slots in use.
    """

    token_GQ: Array
    place_GT: Array
    sent_G: Array
    received_G: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Origin of the rows of this rank's experts, and destination of their answers.

    order_N: int32, the choice behind each row: (rank, token, place among the token's choices) as
      one number. source_N: int32, the row's token among those that have come.
    index_PA: int32, the inverse: the row of each choice of the tokens that have come; N: not here.
    splits_RE: int32, rows of each expert from each rank, ranks in the order of the mesh: tensor
      fastest. dropped: int32 (), this rank's tokens' choices beyond `capacity`.
    lanes: None: gathered. axes: names of the expert and the tensor axis; the latter may be None.
    routes: the same rows for the fused kernels (pallas_kernels/expert), where they run; over the
      ranks of both axes, each choice as one of every tensor rank's part of its expert.
    """

    order_N: Array
    source_N: Array
    index_PA: Array
    splits_RE: Array
    dropped: Array
    lanes: Lanes | None
    routes: Routes | None
    axes: tuple[str, str | None] = dataclasses.field(metadata={"static": True})

    @property
    def sizes_E(self) -> Array:
        """Rows of each expert; rows past their sum are nobody's."""
        return self.splits_RE.sum(0, dtype=jnp.int32)

    @property
    def choices(self) -> tuple[int, int]:
        """(T, A) of the tokens that this rank sent."""
        P, A = self.index_PA.shape
        return (P // len(self.splits_RE) if self.lanes is None else self.lanes.place_GT.shape[1], A)


def sort_rows(expert_N: Array, source_N: Array, rank: Array, ranks: int) -> Array:
    """Returns the stable order of rows by (expert, distance of the source after `rank`), (N,).

    expert_N, source_N: int32; rows that are not to be computed have an expert past the last.
    Source: Flux's repository, AgScatterSortOp; COMET section 3.1.
    """
    distance_N = (source_N - rank) % ranks
    return jnp.argsort(expert_N * ranks + distance_N, stable=True).astype(jnp.int32)


def make_dispatch(
    expert_TA: Array,
    experts: int,
    axes: tuple[str, str | None],
    capacity: int | None,
    implementation: Implementation = "xla",
) -> Dispatch:
    """Returns the Dispatch of this rank, for code inside a shard_map.

    Args: expert_TA: this rank's choices. experts: of a rank. axes: as in Dispatch. capacity: rows
      that an expert takes, first come first in the order of rank, token and choice; None: all.
      implementation: 'ring' and 'fused' have no lanes, also where these would send less.
    """
    T, A = expert_TA.shape
    every = live(axes)
    R, rank, groups = lax.axis_size(every), lax.axis_index(every), lax.axis_size(axes[0])
    expert_PA = lax.all_gather(expert_TA.astype(jnp.int32), every, axis=0, tiled=True)
    valid_PA = (expert_PA >= 0) & (expert_PA < experts * groups)
    kept_PA, N = valid_PA, R * T * A
    if capacity is not None:
        kept_PA &= dispatch_.queue(expert_PA[None])[0] < capacity
        N = min(N, experts * capacity)
    home_PA = jnp.where(kept_PA, expert_PA // experts, groups)
    here_PA = home_PA == lax.axis_index(axes[0])
    own_PA = jnp.where(here_PA, expert_PA % experts, experts)  # rows of other ranks go last
    from_N = jnp.arange(R * T * A, dtype=jnp.int32) // (T * A)
    order_N = sort_rows(own_PA.reshape(-1), from_N, rank, R)
    index_PA = jnp.where(here_PA, jnp.argsort(order_N).reshape(R * T, A).astype(jnp.int32), N)
    hot_RE = own_PA.reshape(R, T * A)[:, :, None] == jnp.arange(experts)[None, None]
    order_N = order_N[:N]
    source_N, lanes = order_N // A, None
    if groups > 2 * A and implementation == "xla":
        Q = T if capacity is None else min(T, experts * capacity)
        lanes = _lanes(home_PA.reshape(R, T, A), Q, axes)
        slot_RT, token_RQ = _slots(here_PA.reshape(R, T, A).any(2), Q)
        source_N = from_N[order_N] * Q + slot_RT.reshape(-1)[source_N]
        # The tokens in slots past a lane's count have no choice here.
        index_RTA = index_PA.reshape(R, T, A)
        index_PA = jnp.take_along_axis(index_RTA, token_RQ[:, :, None], axis=1).reshape(R * Q, A)
    routes = None
    if implementation == "fused":
        own_TA = lax.dynamic_slice_in_dim(jnp.where(kept_PA, expert_PA, -1), rank * T, T)
        parts_TA = cut(own_TA, experts=experts, parts=R // groups)
        routes = route(parts_TA, experts=experts, axis=every, rows=N)
    lost_PA = valid_PA & ~kept_PA
    return Dispatch(
        order_N, source_N, index_PA,
        splits_RE=hot_RE.sum(1, dtype=jnp.int32),
        dropped=lax.dynamic_slice_in_dim(lost_PA, rank * T, T).sum(dtype=jnp.int32),
        lanes=lanes, routes=routes, axes=axes,
    )  # fmt: skip


def live(axes: tuple[str, str | None]) -> tuple[str, ...]:
    """The axes that are there."""
    return tuple(axis for axis in axes if axis is not None)


def _slots(goes_RT: Array, Q: int) -> tuple[Array, Array]:
    """Returns (slot_RT, Q where nothing goes; token_RQ): tokens that go, in their order."""
    slot_RT = jnp.where(goes_RT, jnp.cumsum(goes_RT, axis=1, dtype=jnp.int32) - 1, Q)
    return slot_RT, jnp.argsort(~goes_RT, axis=1, stable=True)[:, :Q].astype(jnp.int32)


def _lanes(home_RTA: Array, Q: int, axes: tuple[str, str | None]) -> Lanes:
    """The lanes between this rank and those with the same tensor position."""
    R, T, A = home_RTA.shape
    me, groups = lax.axis_index(axes[0]), lax.axis_size(axes[0])
    home_TA = lax.dynamic_index_in_dim(home_RTA, lax.axis_index(live(axes)), keepdims=False)
    goes_GT = (home_TA[None] == jnp.arange(groups)[:, None, None]).any(2)
    place_GT, token_GQ = _slots(goes_GT, Q)
    beside = lax.axis_index(axes[1]) if axes[1] is not None else 0
    home_GTA = home_RTA.reshape(groups, R // groups, T, A)
    home_GTA = lax.dynamic_index_in_dim(home_GTA, beside, axis=1, keepdims=False)
    comes_GT = (home_GTA == me).any(2)
    counts = (x.sum(1, dtype=jnp.int32) for x in (goes_GT, comes_GT))
    return Lanes(token_GQ, place_GT, *counts)


def weights_of(weight_TA: Array, dispatch: Dispatch) -> Array:
    """Returns weight_PA of all ranks' tokens, which is little beside the tokens."""
    return lax.all_gather(weight_TA, live(dispatch.axes), axis=0, tiled=True)


def weights_home(weight_N: Array, dispatch: Dispatch) -> Array:
    """Returns weight_TA: what this rank's rows, and all others', say of own choices, added up."""
    came_N = jnp.arange(len(weight_N)) < dispatch.splits_RE.sum()
    total, A = dispatch.splits_RE.shape[0] * dispatch.choices[0], dispatch.choices[1]
    weight_P = jnp.zeros(total * A, weight_N.dtype)
    weight_P = weight_P.at[dispatch.order_N].set(
        jnp.where(came_N, weight_N, 0.0), unique_indices=True
    )
    weight_PA = weight_P.reshape(total, A)
    return lax.psum_scatter(weight_PA, live(dispatch.axes), scatter_dimension=0, tiled=True)


def add_up(y_ND: Array, weight_N: Array | None, dispatch: Dispatch, acc_dtype: Any) -> Array:
    """Returns float32 (T, D): own tokens' weighted sums over choices and ranks, and home they go.

    weight_N: float32, of each row; None: 1. acc_dtype: of what crosses ranks. What lies in rows
    past the splits does not matter.
    """
    here_PA = dispatch.index_PA < len(y_ND)
    index_PA = jnp.where(here_PA, dispatch.index_PA, 0)
    weight_PA = jnp.where(here_PA, 1.0 if weight_N is None else weight_N[index_PA], 0.0)
    found = (index_PA, weight_PA, here_PA)
    y_PD = dispatch_.combine(y_ND.astype(jnp.float32), *(a[None] for a in found))[0]
    return _back(y_PD.astype(acc_dtype), dispatch)


def arrive(x_TD: Array, dispatch: Dispatch) -> Array:
    """Returns x_PD: the tokens that come to this rank, of which rows are made by source_N."""
    expert, tensor = dispatch.axes
    lanes = dispatch.lanes
    if lanes is None:
        return lax.all_gather(x_TD, live(dispatch.axes), axis=0, tiled=True)
    x_GQD = _exchange(x_TD[lanes.token_GQ], lanes.sent_G, lanes.received_G, expert)
    if tensor is not None:
        x_GQD = lax.all_gather(x_GQD, tensor, axis=1, tiled=True)
    return x_GQD.reshape(-1, x_TD.shape[-1])


def _back(y_PD: Array, dispatch: Dispatch) -> Array:
    """Returns y_TD, what all ranks found for own tokens, added in the order of the ranks."""
    expert, tensor = dispatch.axes
    lanes = dispatch.lanes
    if lanes is None:
        every = live(dispatch.axes)
        y_TD = lax.psum_scatter(y_PD, every, scatter_dimension=0, tiled=True)
        return y_TD.astype(jnp.float32)
    G, Q = lanes.token_GQ.shape
    y_GQD = y_PD.reshape(G, -1, y_PD.shape[-1])
    if tensor is not None:
        y_GQD = lax.psum_scatter(y_GQD, tensor, scatter_dimension=1, tiled=True)
    y_GQD = _exchange(y_GQD, lanes.received_G, lanes.sent_G, expert)
    went_GT1 = (lanes.place_GT < Q)[:, :, None]
    place_GT1 = jnp.where(went_GT1, lanes.place_GT[:, :, None], 0)
    y_GTD = jnp.take_along_axis(y_GQD, place_GT1, axis=1).astype(jnp.float32)
    return jnp.where(went_GT1, y_GTD, 0.0).sum(0)


def _exchange(x_GQD: Array, sent_G: Array, received_G: Array, axis: str) -> Array:
    """Lane g of every rank to rank g; only the slots in use arrive for certain."""
    G, Q, D = x_GQD.shape

    def padded(x_GQD: Array, *_: Any) -> Array:
        return lax.all_to_all(x_GQD, axis, split_axis=0, concat_axis=0, tiled=True)

    def ragged(x_GQD: Array, sent_G: Array, received_G: Array) -> Array:
        lane_G = Q * jnp.arange(G, dtype=jnp.int32)
        mine_G = jnp.full(G, Q * lax.axis_index(axis), jnp.int32)
        x_PD = x_GQD.reshape(G * Q, D)
        y_PD = lax.ragged_all_to_all(
            x_PD, jnp.zeros_like(x_PD), lane_G, sent_G, mine_G, received_G, axis_name=axis
        )
        return y_PD.reshape(G, Q, D)

    return lax.platform_dependent(x_GQD, sent_G, received_G, cuda=ragged, default=padded)
