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

hidden: dropless by the two halves of expert_matmul.py, which bring their communication, as a ring
    or in one kernel (`choose_overlap`; COMET, arXiv 2502.19811). Plain dropless is not made of
    them: its sums travel in the compute dtype, half the bytes, over tensor
    and expert one after the other, of which only the second may leave a node, and cost/traffic.py
    counts it so.

Legend: B rows, S positions, D model width, E experts, A active experts a token, N slots of an
expert for all rows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import reshard

from megajax.core.layout import Layout
from megajax.layers import dispatch as dispatch_
from megajax.layers import ops
from megajax.layers.dispatch import ExpertWeights
from megajax.layers.mlp import ACTIVATIONS, MlpConfig
from megajax.layers.moe import MoeConfig
from megajax.layers.ops import matmul
from megajax.layers.param import name_of
from megajax.parallel.context import ContextSpec
from megajax.parallel.overlap import COMBINE, DISPATCH, Implementation, Overlap

Array = jax.Array
TENSOR, EXPERT = ("tensor",), ("expert",)


def score(
    layout: Layout, use: Callable, x_BSD: Array, w_DE: nnx.Param, dtype: Any = "float32"
) -> Array:
    """The router's product where the tokens are: no token travels, the gradient is summed once.

    use: parallel.tensor.whole.
    """
    copies = TENSOR if layout.cuts_sequence else ()
    return matmul(x_BSD.astype(dtype), use(layout, w_DE, dtype, copies), name=name_of(w_DE))


def expert(
    layout: Layout,
    use: Callable,
    x_BSD: Array,
    dispatch: dispatch_.Dispatch,
    params: ExpertWeights,
    slots_of: Callable[[int], int | None],
    grouped: Callable,
    *,
    context: ContextSpec,
    overlap: Overlap = "xla",
) -> tuple[Array, Array | None]:
    """`layers.dispatch.expert` under a mesh.

    use: tensor.whole. context: gives the order of the tokens in a row. overlap: see
    `choose_overlap`.
    """
    weights = params.map(lambda w: use(layout, w, x_BSD.dtype))
    specs = params.map(lambda w: layout.whole(*w.get_metadata("axes")))
    tokens = layout.act("batch", "seq", None, residual=True)
    slots = slots_of(x_BSD.shape[1])
    inside = functools.partial(
        exchange, layout, slots=slots, grouped=grouped, context=context, overlap=overlap
    )
    # Without a cut sequence (decoding) the result is equal over context and tensor, which the
    # checker cannot see through a gather; nothing differentiates that case.
    return jax.shard_map(
        lambda x, d, inputs, down, biases: inside(
            x, d, ExpertWeights(inputs, down, params.activate, biases)
        ),
        mesh=layout.mesh,
        in_specs=(tokens, tokens, specs.inputs, specs.down, specs.biases),
        out_specs=(tokens, None if slots is None else tokens),
        check_vma=layout.cuts_sequence,
    )(
        reshard(x_BSD, tokens),
        reshard(dispatch, tokens),
        weights.inputs,
        weights.down,
        weights.biases,
    )


def exchange(
    layout: Layout,
    x_BSD: Array,
    dispatch: dispatch_.Dispatch,
    weights: ExpertWeights,
    slots: int | None,
    grouped: Callable,
    context: ContextSpec,
    overlap: Overlap = "xla",
) -> tuple[Array, Array | None]:
    """`expert`, for code inside a shard_map over the whole mesh.

    Args: x_BSD, dispatch: this device's part of the residual stream. weights: of its experts, whole
      over the ZeRO axes. slots: Q of a whole row; None: dropless. context: gives the order of the
      tokens in a row. overlap: see `choose_overlap`.
    Returns: as layers.dispatch.expert.
    """
    if slots is not None:
        return _slotted(layout, x_BSD, dispatch, weights, slots, context)
    tokens = math.prod(x_BSD.shape[:2]), dispatch.experts_BSA.shape[2], x_BSD.shape[2]
    word = choose_overlap(layout, overlap, tokens, weights, x_BSD.dtype.name, grouped)
    if word == "xla":
        return _dropless(layout, x_BSD, dispatch, weights, grouped), None
    return _hidden(layout, x_BSD, dispatch, weights, word), None


def choose_overlap(
    layout: Layout,
    overlap: Overlap,
    tokens: tuple[int, int, int],
    weights: ExpertWeights,
    dtype: str,
    grouped: Callable = ops.grouped,
) -> Implementation:
    """Returns how a layer's tokens meet its experts; 'xla' is `_dropless`.

    Args: tokens: (T, A, D) of a rank. weights: of a rank.
    Raises: NotImplementedError where the overlap that is asked for cannot run.
    """
    if overlap == "xla" or not layout.cuts_sequence or layout.ways(EXPERT + TENSOR) == 1:
        return "xla"
    if weights.biases:
        if overlap == "auto":
            return "xla"
        raise NotImplementedError(
            f"overlap={overlap!r} adds no biases of experts, and these have some; use 'auto' or "
            "'xla' (--overlap=auto)"
        )
    if grouped is not ops.grouped:
        if overlap == "auto":
            return "xla"
        raise NotImplementedError(
            f"overlap={overlap!r} knows plain products only, these experts have their own; use "
            "'auto' or 'xla' (--overlap=auto)"
        )
    from megajax.parallel import expert_matmul  # with the kernels of 'fused'

    E, widths = weights.down.shape[0], tuple(w.shape[2] for w in weights.inputs)
    halves = _halves(layout, tokens, E, widths, dtype)
    implementation = None if overlap == "auto" else overlap
    return expert_matmul.choose_all(
        halves, implementation, _axes(layout), layout.mesh.abstract_mesh
    )


def explain_overlap(
    layout: Layout, overlap: Overlap, tokens: int, moe: MoeConfig, mlp: MlpConfig, dtype: str
) -> str:
    """Returns how tokens reach experts, and why. tokens: the tokens of a batch on all devices
    together.

    mlp: the shape of one expert.
    """
    if moe.mode == "capacity":
        return "xla (fixed slots travel in all-to-alls)"
    if overlap != "auto":
        return f"{overlap} (asked for)"
    if mlp.bias:
        return "xla (auto: the experts have biases)"
    from megajax.parallel import expert_matmul

    rules = layout.rules.residual
    each = tokens // layout.ways(rules["batch"] + rules["seq"]), moe.top_k, mlp.width
    widths = (mlp.hidden // layout.ways(TENSOR),) * (1 + ACTIVATIONS[mlp.activation].is_gated)
    halves = _halves(layout, each, moe.experts // layout.ways(EXPERT), widths, dtype)
    choice = expert_matmul.best(halves, _axes(layout), layout.mesh.abstract_mesh)
    return "{} ({})".format(*choice)


def _halves(
    layout: Layout, tokens: tuple[int, int, int], E: int, widths: tuple[int, ...], dtype: str
) -> dict[str, Any]:
    """Returns {op: expert_matmul.Layer} of the first products, and of the second one, whose width
    is widths[0]."""
    from megajax.parallel import expert_matmul

    sizes, axes = layout.mesh.shape, _axes(layout)
    return {
        op: expert_matmul.describe(sizes, tokens, E, hidden, axes, dtype)
        for op, hidden in ((DISPATCH, widths), (COMBINE, widths[:1]))
    }


def _axes(layout: Layout) -> tuple[str, str | None]:
    return EXPERT[0], TENSOR[0] if layout.live(TENSOR) else None


def _hidden(
    layout: Layout,
    x_BSD: Array,
    dispatch: dispatch_.Dispatch,
    weights: ExpertWeights,
    implementation: Implementation,
) -> Array:
    """Dropless by the two halves that bring their communication."""
    from megajax.parallel.expert_matmul import Routing, first_half, second_half

    T, A = math.prod(x_BSD.shape[:2]), dispatch.experts_BSA.shape[2]
    chosen = Routing(dispatch.experts_BSA.reshape(T, A), dispatch.weights_BSA.reshape(T, A))
    x_TD = x_BSD.reshape(T, -1)
    hs, sent = first_half(x_TD, tuple(weights.inputs), chosen, _axes(layout), implementation)
    h = weights.activate(hs)
    y_TD = second_half(h, weights.down, chosen.weight, sent, implementation)
    if not layout.live(EXPERT):
        # The halves took an axis of one rank, over which shard_map's checker now sees y vary.
        y_TD = lax.psum(y_TD, EXPERT)
    return y_TD.reshape(x_BSD.shape)


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
    if layout.cuts_sequence:
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
    if layout.cuts_sequence:
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
    x, d, has_slot = x_BSD, dispatch, kept_BSA
    if layout.cuts_sequence:
        x, d, has_slot = _gather(layout, (x, d, has_slot), TENSOR, 1)
    places = dispatch_.queue(d.experts_BSA)  # in this piece of the row: no gap before the first
    E = weights.down.shape[0] * layout.ways(axes)
    room = min(slots, x.shape[1])
    x_END, index = dispatch_.fill(x, d.experts_BSA, has_slot, places, room, E)
    if axes:
        x_END = lax.all_to_all(x_END, axes, split_axis=0, concat_axis=1, tiled=True)
    y_END = dispatch_.answer(x_END, weights)
    if axes:
        y_END = lax.all_to_all(y_END, axes, split_axis=1, concat_axis=0, tiled=True)
    return _scatter(layout, dispatch_.drain(y_END, index, d, has_slot)), kept_BSA
