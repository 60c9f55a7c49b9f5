"""Ops for code that is already inside a shard_map over the whole mesh: the same communication as
tensor.py's, written out, on local arrays.

The pipeline runs so: its stages do different things, and types that say `unreduced` do not mix with
a manual axis (jax 0.11.2). Differentiate this code with check_vma=False; then the gradient of a
local array is that of the SUM over all devices of what they return, which makes every collective
its neighbour's transpose. Weights arrive whole, in the compute dtype; vectors and routers in
float32, so that the default `Ops.score` serves.

Legend: B rows, S positions, D model width, V table rows. Of images: B images, H rows, W columns, C
channels.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax import lax

from megajax.core.layout import Layout
from megajax.layers.dispatch import Dispatch, ExpertWeights
from megajax.layers.joined import merged, split
from megajax.layers.losses import VocabCut
from megajax.layers.mask import Context
from megajax.layers.ops import Ops, convolution, join
from megajax.layers.weight import name_of
from megajax.parallel import attention as attention_
from megajax.parallel import expert as expert_
from megajax.parallel import inside
from megajax.parallel.collective_matmul import GATHER, REDUCE, SCATTER
from megajax.parallel.context import ContextSpec
from megajax.parallel.overlap import Overlap

Array = jax.Array
TENSOR = "tensor"


def ops(
    layout: Layout,
    attention: str = "auto",
    context: ContextSpec = ContextSpec(),
    overlap: Overlap = "xla",
    segments: int | None = None,
) -> Ops:
    """Returns the Ops of local code. attention, context, overlap, segments: as in tensor.ops."""
    return Ops(
        gather=functools.partial(gather, layout),
        up=functools.partial(up, layout, overlap=overlap),
        down=functools.partial(down, layout, overlap=overlap),
        lookup=functools.partial(lookup, layout),
        attend=functools.partial(
            attend, layout, attention=attention, context=context, segments=segments
        ),
        vector=functools.partial(inside.own, layout),
        vocab=VocabCut(layout.live(layout.rules.stored["vocab"])),
        expert=functools.partial(expert, layout, context=context, overlap=overlap),
        total=functools.partial(total, layout),
        convolve=functools.partial(convolve, layout),
    )


def convolve(
    layout: Layout,
    x_BHWC: Array,
    w: nnx.Param,
    strides: Sequence[int] = (1, 1),
    padding: Any = "SAME",
) -> Array:
    """Each device's own images, with a kernel that is whole over all axes but `tensor`; its output
    channels are computed on every rank."""
    words, value = w.get_metadata("axes"), w.get_value().astype(x_BHWC.dtype)
    for dim, word in enumerate(words):
        if axes := layout.live(layout.rules.act.get(word or "", ())):
            value = lax.all_gather(value, axes, axis=dim, tiled=True)
    return convolution(x_BHWC, value, strides, padding)


def gather(layout: Layout, x_BSD: Array) -> Array:
    """Residual stream -> block: a sequence that tensor cuts is gathered."""
    if not inside.is_cut(layout):
        return x_BSD
    return lax.all_gather(x_BSD, TENSOR, axis=1, tiled=True)


def up(
    layout: Layout,
    x_BSD: Array,
    weights: Sequence[nnx.Param],
    matmul: Callable,
    *,
    overlap: Overlap,
) -> tuple[Array, ...]:
    """Column-parallel products that share one gather."""
    used = tuple(inside.own(layout, w).astype(x_BSD.dtype) for w in weights)
    (B, S, D), cut, ones = x_BSD.shape, inside.is_cut(layout), merged(used)
    shape = (B * S * (layout.ways((TENSOR,)) if cut else 1), D, tuple(w.size // D for w in ones))
    how = inside.choose_overlap(layout, overlap, GATHER, shape, x_BSD.dtype, matmul, ones)
    names = [name_of(w) for w in weights] if len(ones) == len(weights) else None
    return split(inside.up(x_BSD, ones, matmul, how, cut, names), used)


def down(
    layout: Layout,
    products: Sequence[tuple[Array, nnx.Param]],
    residual_BSD: Array | None,
    matmul: Callable,
    bias: Array | None = None,
    drop: Callable | None = None,
    *,
    overlap: Overlap,
) -> Array:
    """Row-parallel products, added as partial sums, then one scatter to the residual stream; where
    tensor does not cut the sequence, every rank has the sum of all."""
    xs = tuple(x for x, _ in products)
    used = tuple(inside.own(layout, w).astype(x.dtype) for x, w in products)
    (B, S, *_), D = xs[0].shape, used[0].shape[-1]
    shape = (B * S, D, tuple(w.size // D for w in used))
    cut = inside.is_cut(layout)
    op = SCATTER if cut else REDUCE
    how = inside.choose_overlap(layout, overlap, op, shape, xs[0].dtype, matmul, used)
    names = [name_of(w) for _, w in products]
    return join(inside.down(xs, used, matmul, how, cut, names), residual_BSD, bias, drop)


def lookup(layout: Layout, pairs: Sequence[tuple[nnx.Param, Array]], dtype: Any) -> Array:
    """Each device looks up the rows that it has; the partial sums are scattered together."""

    def own_rows(table: nnx.Param, ids_BS: Array) -> Array:
        axes = layout.live(layout.rules.stored[table.get_metadata("axes")[0]])
        return inside.rows(table[...].astype(dtype), ids_BS, axes)

    total_BSD = functools.reduce(operator.add, (own_rows(*pair) for pair in pairs))
    cut = inside.is_cut(layout)
    axes = layout.live(layout.rules.stored["vocab"])
    others = [a for a in axes if a != TENSOR or not cut]
    total_BSD = lax.psum(total_BSD, others) if others else total_BSD
    if not cut:
        return total_BSD
    return lax.psum_scatter(total_BSD, TENSOR, scatter_dimension=1, tiled=True)


def attend(
    layout: Layout,
    q_BSHK: Array,
    k_BMGK: Array,
    v_BMGK: Array,
    query: Context,
    memory: Context | None = None,
    window: int | None = None,
    *,
    attention: str,
    context: ContextSpec,
    segments: int | None = None,
) -> Array:
    """This device's rows and heads."""
    packed = attention_.packed_shape(q_BSHK, k_BMGK, query, memory)
    kernel, _ = attention_.choose_attention(layout, attention, q_BSHK.dtype, context, packed)
    here = attention_.attention_of(layout, kernel, context, segments)
    return here(q_BSHK, k_BMGK, v_BMGK, query, memory, window)


def expert(
    layout: Layout,
    x_BSD: Array,
    dispatch: Dispatch,
    params: ExpertWeights,
    slots_of: Callable[[int], int | None],
    grouped: Callable,
    *,
    context: ContextSpec,
    overlap: Overlap,
) -> tuple[Array, Array | None]:
    """This device's tokens, at the experts wherever they are."""
    weights = params.map(lambda w: w[...].astype(x_BSD.dtype))
    slots = slots_of(x_BSD.shape[1] * layout.ways(layout.rules.residual["seq"]))
    return expert_.exchange(layout, x_BSD, dispatch, weights, slots, grouped, context, overlap)


def total(layout: Layout, sums: Any) -> Any:
    """Adds up over all axes that cut the tokens of the residual stream."""
    axes = layout.live(layout.rules.residual["batch"] + layout.rules.residual["seq"])
    return lax.psum(sums, axes) if axes else sums
