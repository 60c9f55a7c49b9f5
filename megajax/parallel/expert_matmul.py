"""An expert layer's two products with the tokens' way in them, and their gradients.

One layer's two halves as COMET (arXiv 2502.19811) cuts it, so that each can hide its communication:
rows are sorted by source rank, and sums cross ranks in float32 unless told otherwise. The backward
pass of one half is made of the other. For code inside a shard_map over the axes, checked or not,
whatever other axes the mesh has.

Implementations: 'xla', plain collectives before or after whole grouped products; 'ring', rank by
rank; 'fused', one kernel a half (pallas_kernels/expert). None lets `choose` decide.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh

from megajax.core.errors import UserError, did_you_mean
from megajax.core.hardware import DeviceCard, find_card
from megajax.cost import traffic
from megajax.layers import dispatch as dispatch_
from megajax.parallel import collective_matmul, overlap
from megajax.parallel.overlap import COMBINE, DISPATCH, Implementation
from pallas_kernels import grouped_matmul, tuned
from pallas_kernels.collective import clique
from pallas_kernels.dispatch import alike
from pallas_kernels.expert import api as kernels
from pallas_kernels.expert import fusions
from pallas_kernels.expert.api import Routes, cut, route
from pallas_kernels.hopper.activations import Spec, activate

# ---- expert rows
#
# Which rows an expert's rank computes, and how tokens travel to them and sums back.
#
# The rows of a rank's experts are grouped by expert, and inside an expert sorted by the rank that
# the token came from, the own rank first and then in rotation (COMET, arXiv 2502.19811, section
# 3.1; Flux's repository, AgScatterSortOp), so that a kernel can begin with what is here. A token
# travels once to a rank, however many of its experts are there, in one of two ways:
#
# gather: an all-gather there, a reduce-scatter back; R - 1 tokens a token. While R <= 2 A.
# lanes: an all-to-all of the tokens that a rank needs, at most min(A, R) a token. On GPUs
#     `lax.ragged_all_to_all` sends those alone; CPUs, which have none, send full lanes.
#
# Tensor ranks hold columns of the same experts: what has come to one goes to all of them. Every
# rank knows everyone's choices (A integers a token), so nothing is agreed on besides. `arrive` and
# `add_up` are each other's transposes; nothing here has a rule of gradients, which is
# parallel/expert_matmul.py's business.
#
# Legend: T tokens of a rank, A choices a token, D model width, R ranks that hold tokens, G ranks of
# the expert axis, E experts of a rank, N rows of a rank's experts (the worst case), Q slots of a
# lane (the worst case), P tokens that have come to a rank: R T, or R Q.


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
        """Rows of each expert. Rows past their sum belong to no expert."""
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
        order_N,
        source_N,
        index_PA,
        splits_RE=hot_RE.sum(1, dtype=jnp.int32),
        dropped=lax.dynamic_slice_in_dim(lost_PA, rank * T, T).sum(dtype=jnp.int32),
        lanes=lanes,
        routes=routes,
        axes=axes,
    )


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
    tensor_rank = lax.axis_index(axes[1]) if axes[1] is not None else 0
    home_GTA = home_RTA.reshape(groups, R // groups, T, A)
    home_GTA = lax.dynamic_index_in_dim(home_GTA, tensor_rank, axis=1, keepdims=False)
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
    parts = (index_PA, weight_PA, here_PA)
    y_PD = dispatch_.combine(y_ND.astype(jnp.float32), *(a[None] for a in parts))[0]
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


# ---- expert overlap
#
# Which implementation of an expert layer's two halves runs, and why; see overlap.py.
#
# A row that was measured across real ranks of this kind of GPU decides; without one, the cost model
# (cost/traffic.py) compares a ring with plain XLA, and only a clear gain counts; the fused kernels
# are taken where they were measured, never by simulation, and never where another axis of the mesh
# may communicate beside them (pallas_kernels/collective/clique.py). Where experts lie on several
# nodes XLA's collectives are left alone: a ring would send every token over the slow links as often
# as there are ranks behind them.
#
# The fused kernels send a token once for each of its A choices and each of the R / G tensor ranks
# that cut an expert, and bring as many float32 answers back; XLA sends it to R - 1 ranks and their
# float32 sums back. So cut experts are fused where that is asked for, never by choice: the tables'
# rival is plain XLA for whole experts, which has R / G times as many tokens for as many rows.
#
# Legend: R ranks that hold tokens, G ranks of the expert axis.


HALVES = (DISPATCH, COMBINE)


class Layer(NamedTuple):
    """An expert layer on one rank; hidden: columns of each first product, or depth of the second.

    tokens: of a rank, top choices each, width wide. experts: of a rank. reached: other ranks that
    plain XLA sends a token to.
    """

    tokens: int
    top: int
    width: int
    experts: int
    hidden: tuple[int, ...]
    ranks: int
    groups: int
    dtype: str
    reached: int

    @property
    def rows(self) -> int:
        """Rows that one source has at a rank's experts, if all sources have as many."""
        return self.tokens * self.top // self.groups


def choose(
    op: str,
    implementation: str | None,
    tokens: tuple[int, int, int],
    weights: Sequence[jax.Array],
    axes: tuple[str, str | None],
) -> Implementation:
    """Returns what runs, inside a shard_map. None is chosen here, its reason in the log once.

    Args: op: of HALVES. tokens: (T, A, D) of a rank. weights: the products of this op, (E, K, N).
    Raises: ValueError for an unknown word; NotImplementedError where 'fused' cannot run.
    """
    mesh, (E, dtype) = jax.sharding.get_abstract_mesh(), (weights[0].shape[0], weights[0].dtype)
    hidden = tuple(w.shape[2 if op == DISPATCH else 1] for w in weights)
    layer = describe(mesh.shape, tokens, E, hidden, axes, dtype.name, lanes=True)
    return choose_all({op: layer}, implementation, axes, mesh)


def choose_all(
    halves: Mapping[str, Layer],
    implementation: str | None,
    axes: tuple[str, str | None],
    mesh: AbstractMesh,
) -> Implementation:
    """Does what `choose` does, for one half or both; only here are choices checked and made."""
    name = " and ".join(halves)
    if implementation not in overlap.IMPLEMENTATIONS:
        words = overlap.IMPLEMENTATIONS
        raise ValueError(f"{name}: implementation={implementation!r}; there are {words}")
    if implementation == "fused":
        for op, layer in halves.items():
            if why := fused_reasons(op, layer, mesh):
                raise NotImplementedError(
                    f"{op}: implementation='fused' cannot run here: {'; '.join(why)}; use 'ring', "
                    "'xla', or None to let it choose (--overlap=auto)"
                )
    if implementation is not None:
        return implementation  # type: ignore[return-value]
    word, why = best(halves, axes, mesh)
    layer = next(iter(halves.values()))
    overlap.log_once(name, tuple(layer), layer.ranks, word, why)
    return word


def describe(
    sizes: Any,
    tokens: tuple[int, int, int],
    experts: int,
    hidden: tuple[int, ...],
    axes: tuple[str, str | None],
    dtype: str,
    lanes: bool = False,
) -> Layer:
    """Returns the Layer on a mesh of these {axis: size}. lanes: plain XLA may send in lanes."""
    groups = sizes[axes[0]]
    tensor_ranks = sizes[axes[1]] if axes[1] is not None else 1
    reached = groups * tensor_ranks - 1
    if lanes and groups > 2 * tokens[1]:
        reached = min(reached, tensor_ranks * tokens[1])
    return Layer(*tokens, experts, hidden, groups * tensor_ranks, groups, dtype, reached)


def fused_reasons(op: str, layer: Layer, mesh: AbstractMesh) -> tuple[str, ...]:
    """Returns what keeps the kernel of `op`, or that of its backward pass, from running."""
    wide, deep = [layer.width] * len(layer.hidden), list(layer.hidden)
    other = COMBINE if op == DISPATCH else DISPATCH
    reasons = []
    for which in (op, other):
        contracted, widths = (wide, deep) if which == DISPATCH else (deep, wide)
        why = kernels.reasons(which, contracted, widths, layer.ranks, layer.dtype, mesh)
        reasons += [reason for reason in why if reason not in reasons]
    return tuple(reasons)


def crosses_nodes(sizes: Any, axes: tuple[str, str | None]) -> bool:
    """Whether ranks that exchange tokens may lie on several nodes.

    Devices are numbered node by node, the last axis of a mesh fastest.
    """
    names = list(sizes)
    cut = [names.index(axis) for axis in axes if axis is not None and sizes[axis] > 1]
    block = math.prod(sizes[name] for name in names[min(cut, default=len(names)) :])
    return block > clique.NODE or clique.NODE % block > 0


def best(
    halves: Mapping[str, Layer], axes: tuple[str, str | None], mesh: AbstractMesh
) -> tuple[Implementation, str]:
    """Returns (what to take for one half or for both, why)."""
    layer, device = next(iter(halves.values())), mesh.abstract_device
    if layer.ranks == 1:
        return "xla", "one rank: nothing travels"
    if device is None or device.platform == "cpu":
        return "xla", "a CPU has nothing to hide"
    if crosses_nodes(mesh.shape, axes):
        return "xla", "experts on several nodes: XLA's collectives"
    if word := measured(halves, axes, mesh):
        return word, overlap.MEASURED
    card = find_card(device.device_kind, "bfloat16")
    if card is None or not device.num_cores:
        return "xla", f"nothing is known of {layer.ranks} x {device.device_kind}"
    times = [simulate(op, half, card, device.num_cores) for op, half in halves.items()]
    plain, ring = sum(pair[0] for pair in times), sum(pair[1] for pair in times)
    turns = sum(2 if op == COMBINE else 1 for op in halves)
    counted = ring + turns * layer.ranks * traffic.STEP_S  # steps twice, as overlap.py does
    gains = layer.rows >= overlap.ROWS and counted <= overlap.GAIN * plain
    return "ring" if gains else "xla", (
        "simulated, not measured, so only a clear gain counts: forward and backward "
        f"{ring * 1e6:.0f} us as a ring, {plain * 1e6:.0f} us as plain XLA"
    )


def measured(
    halves: Mapping[str, Layer], axes: tuple[str, str | None], mesh: AbstractMesh
) -> Implementation | None:
    """Returns what was the fastest for all of these; None where not all of them were measured.

    Tables are of experts that are whole on a rank.
    """
    if any(half.ranks > half.groups for half in halves.values()):
        return None
    device = mesh.abstract_device
    words = {overlap.measured(op, key(op, layer), device) for op, layer in halves.items()}
    (word,) = words if len(words) == 1 else (None,)
    if word == "fused":
        names = [axis for axis in axes if axis is not None]
        reasons = [why for op, half in halves.items() for why in fused_reasons(op, half, mesh)]
        return None if reasons or clique.concurrent(mesh.shape, names) else word
    return word


def key(op: str, layer: Layer) -> tuned.Key:
    """Returns the key of a table's row, as the kernels look it up (cut experts: `routes.cut`)."""
    hidden = sum(layer.hidden)
    choices = layer.tokens * layer.top * (layer.ranks // layer.groups)
    K, N = (layer.width, hidden) if op == DISPATCH else (hidden, layer.width)
    return fusions.key(op, layer.ranks, choices, layer.experts, K, N)


def simulate(op: str, layer: Layer, card: DeviceCard, cores: int) -> tuple[float, float]:
    """Returns the cost model's seconds of (plain XLA, the ring), for balanced experts."""
    rank = traffic.Rank(card, cores, layer.ranks, layer.dtype)
    half = traffic.ExpertHalf(
        layer.tokens, layer.top, layer.width, layer.experts, layer.hidden, layer.rows, layer.reached
    )
    return (traffic.expert_dispatch if op == DISPATCH else traffic.expert_combine)(rank, half)


# ---- expert ring
#
# An expert layer's two exchanges as rings of permutes, each beside one source's grouped product.
#
# Tokens go round all ranks, and each rank multiplies the rows that a rank's tokens give its experts
# while the next rank's are on their way; sums go round to their owners, and each rank adds what its
# experts answer to one owner's tokens while the sum of the others is on its way. So XLA, which
# leaves an all-gather before a grouped product exposed, has a product for every hop: the order of
# COMET (arXiv 2502.19811, section 3.1, rows by source rank) at the grain of a rank. Steps are
# locked as in parallel/collective_matmul.py. A token passes every rank, also those that need none
# of it: R - 1 hops, where an all-to-all would send it min(A, R) times.
#
# For code inside a shard_map over the axes; nothing here is differentiable
# (parallel/expert_matmul.py).
#
# Legend: as of expert rows; C choices of one rank, at most; K, F columns.


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
    by_source, N = sources(dispatch), dispatch.order_N.shape[0]
    widths = (w.shape[1 if turned else 2] for w in ws)
    hs = tuple(jnp.zeros((N, width), x_TK.dtype) for width in widths)
    outs = hs, (jnp.zeros((R * T, x_TK.shape[1]), x_TK.dtype) if keep else None)

    def step(s: int | Array, state: tuple[Array, Any], last: bool = False) -> tuple[Array, Any]:
        x_TK, (hs, all_x) = state
        coming = x_TK if last else collective_matmul.hop(axes)(x_TK, -1)
        source = (rank + s) % R
        row_C, token_C = by_source.rows(source)
        x_CK, sizes_E = x_TK[token_C], dispatch.splits_RE[source]
        ys = (grouped_matmul(x_CK, w, sizes_E, transpose_rhs=turned) for w in ws)
        # Rows that are none have places past the end, all different: they are not written.
        put = {"mode": "drop", "unique_indices": True}
        hs = tuple(h.at[row_C].set(y, **put) for h, y in zip(hs, ys, strict=True))
        if all_x is not None:
            all_x = lax.dynamic_update_slice_in_dim(all_x, x_TK, source * T, axis=0)
        return lax.optimization_barrier((coming, (hs, all_x)))

    if R == 1:
        return step(0, (x_TK, outs), last=True)[1]
    state = collective_matmul.run_steps(R - 1, step, step(0, (x_TK, outs)))
    return step(R - 1, state, last=True)[1]


def collect(
    hs: Arrays, ws: Arrays, weight_PA: Array | None, dispatch: Dispatch, acc_dtype: Any
) -> Array:
    """Returns float32 (T, D): of own tokens the weighted sums of h w over choices and ranks.

    weight_PA: float32, of all ranks' choices; None: 1. acc_dtype: of the sums that travel.
    """
    axes = live(dispatch.axes)
    R, rank, (T, A) = lax.axis_size(axes), lax.axis_index(axes), dispatch.choices
    by_source, N = sources(dispatch), dispatch.order_N.shape[0]

    def work(hs: Arrays, owner: int | Array) -> Array:
        row_C, _ = by_source.rows(owner)
        row_C, sizes_E = jnp.minimum(row_C, N - 1), dispatch.splits_RE[owner]
        ys = (grouped_matmul(h[row_C], w, sizes_E) for h, w in zip(hs, ws, strict=True))
        y_CD = sum((y.astype(jnp.float32) for y in ys), jnp.zeros((), jnp.float32))
        place_TA, here_TA = by_source.choices(owner)
        weight_TA = jnp.ones((T, A), jnp.float32)
        if weight_PA is not None:
            weight_TA = lax.dynamic_slice_in_dim(weight_PA, owner * T, T)
        weight_TA = jnp.where(here_TA, weight_TA, 0.0)
        return dispatch_.combine(y_CD, *(a[None] for a in (place_TA, weight_TA, here_TA)))[0]

    def step(s: int | Array, state: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
        total_TD, hs = state
        coming = collective_matmul.hop(axes)(total_TD.astype(acc_dtype), 1)
        part_TD = work(hs, (rank - s - 1) % R)
        coming, part_TD, hs = lax.optimization_barrier((coming, part_TD, hs))
        return coming.astype(jnp.float32) + part_TD, hs

    first = work(hs, (rank - 1) % R)
    if R == 1:
        return first
    return collective_matmul.run_steps(R, step, lax.optimization_barrier((first, hs)))[0]


# ---- expert vjp
#
# Both halves of an expert layer as differentiable functions: values, and rules of gradients.
#
# Each is the other's backward pass (see expert.py, which checks what comes here). With g the second
# half's gradient at its rows before the router's weight: g w^T is wanted times the weight (dh) and
# times h (the weight's own gradient), so neither the answers nor the tokens' rows must be kept.
# 'xla' keeps the rows of the first half; the others send the tokens again, beside dh w^T, and
# scatter dx beside the weights' gradient: whole products, which hide it.
#
# Legend: as of expert rows; F width of an expert on this rank, one of several first products.


class Static(NamedTuple):
    """The static arguments of a call. acc_dtype: of sums that cross ranks."""

    implementation: Implementation
    acc_dtype: str


# ---- tokens to their experts' first products


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def first_products(x_TD: Array, ws: Arrays, dispatch: Dispatch, static: Static) -> Arrays:
    """Returns h_NF of every w: each token at its experts; 0 past the splits."""
    return _spread(x_TD, ws, dispatch, static)[0]


def _first_forward(x_TD, ws, dispatch, static):
    keep = static.implementation == "xla"
    hs, x_ND = _spread(x_TD, ws, dispatch, static, keep=keep)
    return hs, (x_ND if keep else x_TD, ws, dispatch)


def _first_backward(static, saved, dhs):
    x, ws, dispatch = saved
    x_ND = x
    if static.implementation != "xla":
        # Locked: XLA would join this gather with those of the forward pass, beside nothing.
        x, dhs = lax.optimization_barrier((x, dhs))
        x_ND = _rows(x, dispatch)
    # The weights' gradient stands beside the scatter, which then needs no ring.
    plain = static._replace(implementation="xla") if static.implementation == "ring" else static
    dx_TD = _collect(dhs, ws, None, dispatch, plain, turned=True).astype(x.dtype)
    dws = tuple(_weight_gradient(x_ND, dh, w, dispatch) for dh, w in zip(dhs, ws, strict=True))
    return dx_TD, dws, None


first_products.defvjp(_first_forward, _first_backward)


# ---- the second products, home to their tokens


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def second_product(
    h_NF: Array, w: Array, weight_TA: Array, dispatch: Dispatch, static: Static
) -> Array:
    """Returns y_TD: of each own token the weighted sum of its answers h w on all ranks."""
    return _collect((h_NF,), (w,), weight_TA, dispatch, static).astype(h_NF.dtype)


def _second_forward(h_NF, w, weight_TA, dispatch, static):
    y_TD = second_product(h_NF, w, weight_TA, dispatch, static)
    return y_TD, (h_NF, w, weight_TA, dispatch)


def _second_backward(static, saved, dy_TD):
    h_NF, w, weight_TA, dispatch = saved
    weight_PA = weights_of(weight_TA, dispatch)
    weight_N1 = weight_PA.reshape(-1)[dispatch.order_N][:, None]
    (g_NF,), dy_ND = _spread(dy_TD, (w,), dispatch, static, turned=True, keep=True)
    assert dy_ND is not None
    g_NF = g_NF.astype(jnp.float32)
    dweight_N = (g_NF * h_NF.astype(jnp.float32)).sum(1)
    dweight_TA = weights_home(dweight_N, dispatch)
    # Past the splits lie choices that are not here, whose tokens may hold anything.
    dh_NF = jnp.where(_came(dispatch), g_NF * weight_N1, 0.0).astype(h_NF.dtype)
    dy_ND = (dy_ND.astype(jnp.float32) * weight_N1).astype(dy_ND.dtype)
    return dh_NF, _weight_gradient(h_NF, dy_ND, w, dispatch), dweight_TA, None


second_product.defvjp(_second_forward, _second_backward)


# ---- how rows reach their experts, and answers their tokens


def _spread(
    x_TD: Array,
    ws: Arrays,
    dispatch: Dispatch,
    static: Static,
    *,
    turned: bool = False,
    keep: bool = False,
) -> tuple[Arrays, Array | None]:
    """Returns (x w of every row with each w; the rows x_ND, if kept). turned: w^T."""
    if static.implementation == "fused":
        assert dispatch.routes is not None
        hs, x_ND = kernels.fused_dispatch(
            x_TD,
            ws,
            dispatch.routes,
            axis=live(dispatch.axes),
            spec=Spec(None, x_TD.dtype.name),
            turned=turned,
        )
        return hs, x_ND if keep else None
    if static.implementation == "ring":
        hs, x_PD = spread(x_TD, ws, dispatch, turned, keep)
        return hs, None if x_PD is None else x_PD[dispatch.source_N]
    x_ND = _rows(x_TD, dispatch)
    return tuple(_product(x_ND, w, dispatch, turned) for w in ws), x_ND


def _collect(
    hs: Arrays,
    ws: Arrays,
    weight_TA: Array | None,
    dispatch: Dispatch,
    static: Static,
    turned: bool = False,
) -> Array:
    """Returns (T, D): of own tokens the weighted sums of all h w, float32 (fused: h's type).

    weight_TA: None: 1. turned: w^T.
    """
    if static.implementation == "fused":
        routes = dispatch.routes
        assert routes is not None
        weight_TA = jnp.ones(dispatch.choices, jnp.float32) if weight_TA is None else weight_TA
        # A choice's weight is that of all its expert's parts.
        parts = routes.expert_TA.shape[1] // weight_TA.shape[1]
        return kernels.fused_combine(
            hs,
            ws,
            routes,
            jnp.repeat(weight_TA, parts, axis=1),
            axis=live(dispatch.axes),
            acc=static.acc_dtype,
            turned=turned,
        )
    weight_PA = None if weight_TA is None else weights_of(weight_TA, dispatch)
    if static.implementation == "ring":
        return collect(hs, ws, weight_PA, dispatch, jnp.dtype(static.acc_dtype))
    parts = (
        _product(h, w, dispatch, turned).astype(jnp.float32) for h, w in zip(hs, ws, strict=True)
    )
    weight_N = None if weight_PA is None else weight_PA.reshape(-1)[dispatch.order_N]
    y_ND = functools.reduce(operator.add, parts)
    return add_up(y_ND, weight_N, dispatch, jnp.dtype(static.acc_dtype))


def _rows(x_TD: Array, dispatch: Dispatch) -> Array:
    return arrive(x_TD, dispatch)[dispatch.source_N]


def _product(x_N: Array, w: Array, dispatch: Dispatch, turned: bool) -> Array:
    return grouped_matmul(x_N, w, dispatch.sizes_E, transpose_rhs=turned)


def _weight_gradient(x_N: Array, dy_N: Array, w: Array, dispatch: Dispatch) -> Array:
    """Returns x^T dy of each expert. The product of the forward pass has no use here, so XLA
    removes it."""
    _, pull = jax.vjp(lambda w: grouped_matmul(x_N, w, dispatch.sizes_E), w)
    return pull(dy_N)[0]


def _came(dispatch: Dispatch) -> Array:
    """True (N, 1) for rows within the splits."""
    return jnp.arange(dispatch.order_N.shape[0])[:, None] < dispatch.splits_RE.sum()


# ---- expert matmul


Activation = Literal["gelu", "gelu_tanh", "silu", "swiglu"]
ACTIVATIONS = (None, *get_args(Activation))  # the kernels' and 'swiglu', of two products


def dispatch_grouped_matmul(
    x: Array,
    w: Array | Sequence[Array],
    routing: Routing,
    *,
    expert_axis: str,
    tensor_axis: str | None = None,
    activation: Activation | None = None,
    capacity: int | None = None,
    implementation: Implementation | None = None,
    acc_dtype: Any = jnp.float32,
) -> tuple[Any, Dispatch]:
    """Every token at its experts' first products: COMET's layer 0 (arXiv 2502.19811, section 3).

    For code inside a shard_map over the axes. Expert e rests on position e // E of expert_axis.

    Args:
      x: (t, d) bf16|f16|f32, this rank's tokens, t at least 1. w: (E, d, f) of x's type, this
        rank's experts and columns; or several, which share the way of the tokens (gate and up).
      routing: of these tokens to k experts each; see Routing. A rank may have no token for anyone:
        all of its choices are -1.
      tensor_axis: cuts x's rows too, as it does the residual stream, and w's columns: tokens are
        gathered over it, and `grouped_matmul_combine` adds up over it and scatters. None: every
        rank of an axis that cuts w's columns has the same tokens, and the caller adds y up.
      activation: in float32; 'swiglu' of (gate, up) is silu(gate) * up, one h.
      capacity: rows that an expert takes of all ranks' tokens, first come first in the order of
        rank, token and choice; None: all that choose it.
      implementation: 'xla', plain collectives around whole products; 'ring', rank by rank, a hop
        beside each rank's rows; 'fused', one kernel; None: chosen by shape and
        device.
      acc_dtype: in which a token's gradient crosses ranks; bfloat16 halves those bytes.
    Returns: (h, Dispatch). h: (rows, f) in x's type, a tuple for several weights without 'swiglu';
      rows = R t k, the worst case, at most E capacity, R the ranks of both axes. The rows of an
      expert lie together, sorted by the rank they came from, the own one first, then in rotation;
      past the splits h is 0 and its gradient goes nowhere, NaN too.
    Differentiable in x and w; a token's gradient is added up in acc_dtype and rounded once.
    Raises: UserError for what breaks the above; ValueError for an unknown implementation;
      NotImplementedError with the reason where the one asked for cannot run.
    """
    weights = tuple(w) if isinstance(w, Sequence) else (w,)
    _check_dispatch(x, weights, routing, activation, capacity)
    acc = overlap.sum_dtype(DISPATCH, acc_dtype)
    axes = (expert_axis, tensor_axis)
    if expert_axis == tensor_axis:
        raise UserError(
            f"expert_axis and tensor_axis must be two axes, found {axes}; nearest: None"
        )
    tokens = (x.shape[0], routing.expert_index.shape[1], x.shape[1])
    word = choose(DISPATCH, implementation, tokens, weights, axes)
    products, dispatch = first_half(x, weights, routing, axes, word, acc, capacity)
    if activation == "swiglu":
        gate_NF, up_NF = (z.astype(jnp.float32) for z in products)
        return (activate("silu", gate_NF) * up_NF).astype(x.dtype), dispatch
    if activation is not None:
        products = tuple(activate(activation, z.astype(jnp.float32)) for z in products)
        products = tuple(z.astype(x.dtype) for z in products)
    return (products if isinstance(w, Sequence) else products[0]), dispatch


def grouped_matmul_combine(
    h: Array,
    w: Array,
    dispatch: Dispatch,
    *,
    weights: Array,
    implementation: Implementation | None = None,
    acc_dtype: Any = jnp.float32,
) -> Array:
    """Every token's weighted sum of its experts' answers: COMET's layer 1 (section 3).

    Args: h: (rows, f) as `dispatch_grouped_matmul` sorted them; what lies past the splits does not
      matter. w: (E, f, d) of h's type. dispatch: the one that came with h. weights: float32 (t, k).
      implementation: as in dispatch_grouped_matmul; only 'xla' takes the dispatch of 'xla', which
      may have sent tokens to those alone who need them. acc_dtype: in which sums cross ranks.
    Returns: y (t, d) in h's type for this rank's tokens; without a tensor_axis, the part of this
      rank's columns. Weights multiply answers in float32, in which choices and ranks are added up;
      only 'fused' does not round the answers to h's type before. Dropped choices, and those of no
      expert, add nothing.
    Differentiable in h, w and weights. The same bits in every run.
    Raises: as dispatch_grouped_matmul.
    """
    acc = overlap.sum_dtype(COMBINE, acc_dtype)
    rows, experts = dispatch.order_N.shape[0], dispatch.splits_RE.shape[1]
    if h.ndim != 2 or w.ndim != 3 or h.shape != (rows, w.shape[1]) or h.dtype != w.dtype:
        raise UserError(
            f"h {h.dtype}{h.shape} and w {w.dtype}{w.shape} must be (rows, f) and (E, f, d) of one "
            f"type with the {rows} rows of the dispatch"
        )
    if w.shape[0] != experts:
        raise UserError(f"w {w.shape} must be (E, f, d) of the {experts} experts of the dispatch")
    if weights.dtype != jnp.float32 or weights.shape != dispatch.choices:
        raise UserError(
            f"weights {weights.dtype}{weights.shape} must be float32 (t, k) = {dispatch.choices}"
        )
    if dispatch.lanes is not None and implementation in ("ring", "fused"):
        raise UserError(
            f"{COMBINE}: implementation={implementation!r} takes what a dispatch by 'ring' or "
            "'fused' gave; this one, by 'xla', sent its tokens in lanes"
        )
    tokens = (*dispatch.choices, w.shape[2])
    word = choose(COMBINE, implementation, tokens, (w,), dispatch.axes)
    if dispatch.lanes is not None:
        word = "xla"
    return second_half(h, w, weights, dispatch, word, acc)


def first_half(
    x: Array,
    weights: tuple[Array, ...],
    routing: Routing,
    axes: tuple[str, str | None],
    implementation: Implementation,
    acc_dtype: str = "float32",
    capacity: int | None = None,
) -> tuple[tuple[Array, ...], Dispatch]:
    """`dispatch_grouped_matmul` without an activation; the caller has checked and chosen."""
    experts = weights[0].shape[0]
    dispatch = make_dispatch(routing.expert_index, experts, axes, capacity, implementation)
    static = Static(implementation, acc_dtype)
    return first_products(*alike((x, weights, dispatch)), static), dispatch


def second_half(
    h: Array,
    w: Array,
    weights: Array,
    dispatch: Dispatch,
    implementation: Implementation,
    acc_dtype: str = "float32",
) -> Array:
    """`grouped_matmul_combine`; the caller has checked and chosen."""
    static = Static(implementation, acc_dtype)
    return second_product(*alike((h, w, weights, dispatch)), static)


def _check_dispatch(
    x: Array,
    weights: tuple[Array, ...],
    routing: Routing,
    activation: str | None,
    capacity: int | None,
) -> None:
    shapes = {w.shape for w in weights}
    experts = weights[0].shape[0] if weights and weights[0].ndim == 3 else 0
    if x.ndim != 2 or not x.shape[0] or not experts or len(shapes) != 1:
        raise UserError(
            f"x {x.shape} and w {sorted(shapes)} must be (t, d) with a token and (E, d, f) with an "
            "expert, the same for several w"
        )
    if weights[0].shape[1] != x.shape[1] or any(w.dtype != x.dtype for w in weights):
        raise UserError(
            f"x {x.dtype}{x.shape} and w {[f'{w.dtype}{w.shape}' for w in weights]} must have one "
            "type and one d"
        )
    chosen, weight = routing.expert_index, routing.weight
    if chosen.ndim != 2 or chosen.shape[0] != x.shape[0] or not chosen.shape[1]:
        raise UserError(f"expert_index {chosen.shape} must be (t={x.shape[0]}, k) with k above 0")
    if not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise UserError(f"expert_index {chosen.dtype} must be integers; nearest: int32")
    if weight.shape != chosen.shape or weight.dtype != jnp.float32:
        raise UserError(f"weight {weight.dtype}{weight.shape} must be float32 {chosen.shape}")
    if activation not in ACTIVATIONS:
        raise UserError(
            f"activation={activation!r}; there are {ACTIVATIONS}."
            f"{did_you_mean(str(activation), [a for a in ACTIVATIONS if a])}"
        )
    if activation == "swiglu" and len(weights) != 2:
        raise UserError(f"activation='swiglu' takes w=[gate, up], got {len(weights)} weights")
    if capacity is not None and (not isinstance(capacity, Integral) or capacity < 1):
        raise UserError(
            f"capacity={capacity} must be a whole number, at least 1, or None; nearest: "
            f"{max(1, round(capacity))}"
        )
