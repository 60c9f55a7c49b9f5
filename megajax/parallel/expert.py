"""Expert parallelism: tokens meet experts that live on other devices of the mesh axis `expert`.

The tokens of a batch are cut over the axes of the residual stream, `expert` among them; expert e
rests on position e // (E / size) of `expert`, its width cut over tensor. Two exchanges:

dropless: tokens are gathered over tensor and expert, every device computes what its experts add to
    each of them, and one reduce-scatter over both axes brings the sums home. Nothing is lost
    whatever the routing, the program is the same on every backend (`lax.ragged_all_to_all` does not
    run on CPUs) and each token travels once, not once an expert: expert - 1 rows a token against
    the 2 top_k of an all-to-all there and back. It is the better one while expert <= 2 top_k.
capacity: each expert has a fixed number of slots a row, so a plain all-to-all takes the slots to
    the experts and another one takes the answers back; tensor is gathered before and scattered
    after, as around any MLP.

`exchange` is either of them on local arrays, as pipeline stages call it; `expert` puts a shard_map
of its own around it.

`dispatch_grouped_matmul` and `grouped_matmul_combine` are one layer's two halves as COMET (arXiv
2502.19811) cuts it, so that a kernel can overlap each with its communication: rows are sorted by
source rank (expert_rows.py), and sums cross ranks in float32. The dropless exchange is not made of
them: its sums travel in the compute dtype, half the bytes, over tensor and expert one after the
other, of which only the second may leave a node, and cost/traffic.py counts it so.

Legend: B rows, S positions, D model width, E experts, A active experts a token, N slots of an
expert for all rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import reshard

from megajax.core.errors import UserError, did_you_mean
from megajax.core.layout import Layout
from megajax.layers import dispatch as dispatch_
from megajax.layers.dispatch import ExpertWeights
from megajax.layers.ops import matmul
from megajax.parallel import expert_rows
from megajax.parallel.context import ContextSpec
from megajax.parallel.expert_rows import Dispatch, Routing
from pallas_kernels import grouped_matmul
from pallas_kernels.gemm.reference import activate

Array = jax.Array
TENSOR, EXPERT = ("tensor",), ("expert",)
Activation = Literal["gelu", "gelu_tanh", "silu", "swiglu"]
ACTIVATIONS = (None, "gelu", "gelu_tanh", "silu", "swiglu")


def dispatch_grouped_matmul(
    x: Array,
    w: Array | Sequence[Array],
    routing: Routing,
    *,
    expert_axis: str,
    tensor_axis: str | None = None,
    activation: Activation | None = None,
    capacity: int | None = None,
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
    Returns: (h, Dispatch). h: (rows, f) in x's type, a tuple for several weights without 'swiglu';
      rows = R t k, the worst case, at most E capacity, R the ranks of both axes. The rows of an
      expert lie together, sorted by the rank they came from, the own one first, then in rotation;
      past the splits h is 0 and its gradient goes nowhere, NaN too.
    Differentiable in x and w; a token's gradient is added up in float32 and rounded once.
    Raises: UserError for what breaks the above.
    """
    weights = tuple(w) if isinstance(w, Sequence) else (w,)
    _check_dispatch(x, weights, routing, activation, capacity)
    axes = (expert_axis, tensor_axis)
    dispatch = expert_rows.plan(routing.expert_index, weights[0].shape[0], axes, capacity)
    x_ND = expert_rows.spread(x, dispatch)
    products = tuple(grouped_matmul(x_ND, w_EDF, dispatch.sizes_E) for w_EDF in weights)
    if activation == "swiglu":
        gate_NF, up_NF = (z.astype(jnp.float32) for z in products)
        return (activate("silu", gate_NF) * up_NF).astype(x.dtype), dispatch
    if activation is not None:
        products = tuple(activate(activation, z.astype(jnp.float32)) for z in products)
        products = tuple(z.astype(x.dtype) for z in products)
    return (products if isinstance(w, Sequence) else products[0]), dispatch


def grouped_matmul_combine(h: Array, w: Array, dispatch: Dispatch, *, weights: Array) -> Array:
    """Every token's weighted sum of its experts' answers: COMET's layer 1 (section 3).

    Args: h: (rows, f) as `dispatch_grouped_matmul` sorted them; what lies past the splits does not
      matter. w: (E, f, d) of h's type. dispatch: the one that came with h. weights: float32 (t, k).
    Returns: y (t, d) in h's type for this rank's tokens; without a tensor_axis, the part of this
      rank's columns. The rows are rounded to h's type; weights multiply them in float32, in which
      choices and ranks are added up. Dropped choices, and those of no expert, add nothing.
    Differentiable in h, w and weights. The same bits in every run.
    Raises: UserError for what breaks the above.
    """
    rows = dispatch.order_N.shape[0]
    if h.ndim != 2 or w.ndim != 3 or h.shape != (rows, w.shape[1]) or h.dtype != w.dtype:
        raise UserError(
            f"h {h.dtype}{h.shape} and w {w.dtype}{w.shape} must be (rows, f) and (E, f, d) of one "
            f"type with the {rows} rows of the dispatch"
        )
    if weights.dtype != jnp.float32 or weights.shape != dispatch.choices:
        raise UserError(
            f"weights {weights.dtype}{weights.shape} must be float32 (t, k) = {dispatch.choices}"
        )
    y_ND = grouped_matmul(h, w, dispatch.sizes_E)
    return expert_rows.collect(y_ND, weights, dispatch)


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
    if capacity is not None and capacity < 1:
        raise UserError(f"capacity={capacity} must be at least 1, or None; nearest: 1")


def score(
    layout: Layout, whole: Callable, x_BSD: Array, w_DE: nnx.Param, dtype: Any = "float32"
) -> Array:
    """The router's product where the tokens are: no token travels, the gradient is summed once.

    whole: parallel.tensor.whole.
    """
    beside = TENSOR if _cut(layout) else ()
    return matmul(x_BSD.astype(dtype), whole(layout, w_DE, dtype, beside))


def expert(
    layout: Layout,
    whole: Callable,
    x_BSD: Array,
    dispatch: dispatch_.Dispatch,
    params: ExpertWeights,
    slots_of: Callable[[int], int | None],
    grouped: Callable,
    *,
    context: ContextSpec,
) -> tuple[Array, Array | None]:
    """What `layers.dispatch.expert` computes, under a mesh. context: whose order the rows have."""
    weights = params.map(lambda w: whole(layout, w, x_BSD.dtype))
    specs = params.map(lambda w: layout.whole(*w.get_metadata("axes")))
    tokens = layout.act("batch", "seq", None, residual=True)
    slots = slots_of(x_BSD.shape[1])
    inside = functools.partial(exchange, layout, slots=slots, grouped=grouped, context=context)
    # Without a cut sequence (decoding) the result is equal over context and tensor, which the
    # checker cannot see through a gather; nothing differentiates that case.
    return jax.shard_map(
        lambda x, d, inputs, down: inside(x, d, ExpertWeights(inputs, down, params.activate)),
        mesh=layout.mesh,
        in_specs=(tokens, tokens, specs.inputs, specs.down),
        out_specs=(tokens, None if slots is None else tokens),
        check_vma=_cut(layout),
    )(reshard(x_BSD, tokens), reshard(dispatch, tokens), weights.inputs, weights.down)


def exchange(
    layout: Layout,
    x_BSD: Array,
    dispatch: dispatch_.Dispatch,
    weights: ExpertWeights,
    slots: int | None,
    grouped: Callable,
    context: ContextSpec,
) -> tuple[Array, Array | None]:
    """What `expert` computes, for code inside a shard_map over the whole mesh.

    Args: x_BSD, dispatch: this device's part of the residual stream. weights: of its experts, whole
      over the ZeRO axes. slots: Q of a whole row; None: dropless. context: whose order rows have.
    Returns: as layers.dispatch.expert.
    """
    if slots is None:
        return _dropless(layout, x_BSD, dispatch, weights, grouped), None
    return _slotted(layout, x_BSD, dispatch, weights, slots, context)


def _cut(layout: Layout) -> bool:
    """Whether the residual stream is cut along the sequence over tensor."""
    return "tensor" in layout.rules.residual.get("seq", ())


def _gather(layout: Layout, tree: Any, axes: tuple[str, ...], dim: int) -> Any:
    """All-gathers every leaf along one of its dimensions."""
    axes = layout.live(axes)
    if not axes:
        return tree
    return jax.tree.map(lambda a: lax.all_gather(a, axes, axis=dim, tiled=True), tree)


def _scatter(layout: Layout, y_BSD: Array) -> Array:
    """Adds the parts of the width that tensor cuts, back on the residual stream."""
    axes = layout.live(TENSOR)
    if not axes:
        return y_BSD
    if _cut(layout):
        return lax.psum_scatter(y_BSD, axes, scatter_dimension=1, tiled=True)
    return lax.psum(y_BSD, axes)


def _dropless(
    layout: Layout,
    x_BSD: Array,
    dispatch: dispatch_.Dispatch,
    weights: ExpertWeights,
    grouped: Callable,
) -> Array:
    axes = layout.live(EXPERT)
    if _cut(layout):
        x_BSD, dispatch = _gather(layout, (x_BSD, dispatch), TENSOR, 1)
    x_BSD, dispatch = _gather(layout, (x_BSD, dispatch), axes, 0)
    first = lax.axis_index(axes) * weights.down.shape[0] if axes else 0
    y_BSD = dispatch_.dropless(x_BSD, dispatch, weights, grouped, first)
    if axes:
        y_BSD = lax.psum_scatter(y_BSD, axes, scatter_dimension=0, tiled=True)
    return _scatter(layout, y_BSD)


def _slotted(
    layout: Layout,
    x_BSD: Array,
    dispatch: dispatch_.Dispatch,
    weights: ExpertWeights,
    slots: int,
    context: ContextSpec,
) -> tuple[Array, Array]:
    axes = layout.live(EXPERT)
    along = layout.live(layout.rules.residual.get("seq", ()))
    S = x_BSD.shape[1]
    # A row's slots are given out over all of its positions, wherever they are, first come first.
    experts_BSA = _gather(layout, dispatch.experts_BSA, along, 1)
    order_S = context.order_of(experts_BSA.shape[1], layout.ways(layout.rules.act["seq"]))
    if order_S is None:
        kept_BSA = dispatch_.queue(experts_BSA) < slots
    else:
        kept_BSA = (dispatch_.queue(experts_BSA[:, np.argsort(order_S)]) < slots)[:, order_S]
    if along:
        kept_BSA = lax.dynamic_slice_in_dim(kept_BSA, lax.axis_index(along) * S, S, 1)
    x, d, kept = x_BSD, dispatch, kept_BSA
    if _cut(layout):
        x, d, kept = _gather(layout, (x, d, kept), TENSOR, 1)
    places = dispatch_.queue(d.experts_BSA)  # in this piece of the row: no gap before the first
    E = weights.down.shape[0] * layout.ways(axes)
    room = min(slots, x.shape[1])
    x_END, index = dispatch_.fill(x, d.experts_BSA, kept, places, room, E)
    if axes:
        x_END = lax.all_to_all(x_END, axes, split_axis=0, concat_axis=1, tiled=True)
    y_END = dispatch_.answer(x_END, weights)
    if axes:
        y_END = lax.all_to_all(y_END, axes, split_axis=1, concat_axis=0, tiled=True)
    return _scatter(layout, dispatch_.drain(y_END, index, d, kept)), kept_BSA
