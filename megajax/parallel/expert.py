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
of its own around it. A kernel that overlaps the exchange with the grouped matmuls (COMET, arXiv
2502.19811) takes the seam `Ops.expert`.

Legend: B rows, S positions, D model width, E experts, A active experts a token, N slots of an
expert for all rows.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import reshard

from megajax.core.layout import Layout
from megajax.layers import dispatch as dispatch_
from megajax.layers.dispatch import Dispatch, ExpertWeights
from megajax.layers.ops import matmul
from megajax.parallel.context import ContextSpec

Array = jax.Array
TENSOR, EXPERT = ("tensor",), ("expert",)


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
    dispatch: Dispatch,
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
    dispatch: Dispatch,
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
    layout: Layout, x_BSD: Array, dispatch: Dispatch, weights: ExpertWeights, grouped: Callable
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
    dispatch: Dispatch,
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
