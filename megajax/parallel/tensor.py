"""Ops under a mesh: tensor and sequence parallelism, and weights gathered for use.

Forward of one sublayer: all-gather the sequence over tensor, column-parallel products, row-parallel
products as partial sums, one reduce-scatter. The backward pass mirrors it because every type says
what it is: `reduced` inputs get partial gradients, `unreduced` results are added before they
travel. XLA inserts the collectives (Megatron sections 3 of arXiv 1909.08053 and 2205.05198;
MegaScale section 3.2), or, with `overlap`, the products of parallel/collective_matmul.py bring
their own, hidden (Flux, arXiv 2406.06858); those are exported here. Both, and every product with a
packed weight, run parallel/inside.py in a shard_map.

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
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from megajax.core.layout import Layout
from megajax.core.packed import PackedWeight
from megajax.layers.mask import Context
from megajax.layers.ops import Codec, Ops, coded, convolution, join
from megajax.layers.weight import Weight, any_packed, name_of, words_of
from megajax.parallel import attention as attention_
from megajax.parallel import expert, inside
from megajax.parallel import overlap as overlap_
from megajax.parallel.collective_matmul import GATHER, REDUCE, SCATTER
from megajax.parallel.collective_matmul import all_gather_matmul as all_gather_matmul
from megajax.parallel.collective_matmul import matmul_all_reduce as matmul_all_reduce
from megajax.parallel.collective_matmul import matmul_reduce_scatter as matmul_reduce_scatter
from megajax.parallel.context import ContextSpec
from megajax.parallel.heads import rest, share, vector, width
from megajax.parallel.overlap import Overlap

Array = jax.Array
TENSOR = ("tensor",)


def ops(
    layout: Layout,
    attention: str = "auto",
    context: ContextSpec = ContextSpec(),
    overlap: Overlap = "xla",
    codec: Codec | None = None,
    segments: int | None = None,
) -> Ops:
    """Returns the Ops that put collectives around local compute, or into it.

    attention: 'xla', 'cudnn', 'varlen', or 'auto' (`attention.choose_attention`). context: how
    queries meet the keys of other devices where the sequence is cut. overlap: of `up` and `down`
    (`inside.choose_overlap`), and of `expert` (parallel/expert.py). codec: how weights travel to
    where they are used; what `lookup` and `score` read travels as it is. segments: of a row, on
    average over a device's rows, for which cuDNN's attention has room (layers/attend.py).
    Raises: UserError for an overlap that cannot run on this mesh.
    """
    overlap_.refuse_fused(overlap, layout.mesh.abstract_mesh.abstract_device)
    overlap_.refuse_mesh(overlap, layout.mesh.shape)
    used = functools.partial(whole, codec=codec)
    return Ops(
        gather=functools.partial(gather, layout),
        whole=functools.partial(used, layout),
        up=functools.partial(up, layout, overlap=overlap, whole=used),
        down=functools.partial(down, layout, overlap=overlap, whole=used),
        lookup=functools.partial(lookup, layout),
        vector=functools.partial(vector, layout),
        attend=functools.partial(
            attend, layout, attention=attention, context=context, segments=segments
        ),
        score=functools.partial(expert.score, layout, whole),
        expert=functools.partial(expert.expert, layout, used, context=context, overlap=overlap),
        convolve=convolve,
    )


def convolve(
    x_BHWC: Array, w: nnx.Param, strides: Sequence[int] = (1, 1), padding: Any = "SAME"
) -> Array:
    """Each device's own images, with the whole kernel: jax 0.11.2 has no rule for a convolution
    whose kernel's type says `reduced`, so the gradient is summed over all ranks."""
    value = w.get_value().astype(x_BHWC.dtype)
    return convolution(x_BHWC, reshard(value, P(*[None] * value.ndim)), strides, padding)


def gather(layout: Layout, x_BSD: Array) -> Array:
    """Residual stream -> block: an all-gather over tensor whose transpose is a reduce-scatter."""
    return reshard(x_BSD, layout.act("batch", "seq", None, reduced=TENSOR))


def whole(
    layout: Layout,
    w: nnx.Param,
    dtype: Any,
    beside: tuple[str, ...] = (),
    codec: Codec | None = None,
) -> Weight:
    """Cast, then gather over the ZeRO axes: the compute dtype travels, forward and backward.

    Copies on other nodes (hybrid sharding) are made `reduced` first, so that the backward pass
    reduce-scatters inside the node and all-reduces only the shard between nodes. beside: axes that
    hold copies too and that cut what the weight meets (tensor, on the residual stream). codec: of
    what travels forward instead. A packed weight, whose pieces rest whole, is not gathered.
    """
    axes = words_of(w)
    target = layout.whole(*axes)
    target = target.update(reduced=target.reduced | set(layout.live(beside)))
    cut, copied = _zero_axes(layout, *axes)
    copied += layout.live(beside)

    def gathered(x: Array) -> Array:
        if cut and copied:
            x = reshard(x, layout.shared(*axes).update(reduced=set(copied)))
        return reshard(x, target)

    x = share(layout, axes, w.get_value())
    if isinstance(x, PackedWeight):
        return jax.tree.map(gathered, x.astype(dtype))
    return gathered(x.astype(dtype)) if codec is None else coded(codec, x, dtype, gathered)


def _zero_axes(layout: Layout, *words: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns (axes that cut the width of a stored weight, axes that hold copies of it)."""
    partial = layout.live(layout.partial(*words))
    cut = tuple(a for a in partial if a in layout.rules.stored.get("embed", ()))
    return cut, tuple(a for a in partial if a not in cut)


def up(
    layout: Layout,
    x_BSD: Array,
    weights: Sequence[nnx.Param],
    matmul: Callable,
    *,
    overlap: Overlap = "xla",
    whole: Callable = whole,
) -> tuple[Array, ...]:
    """Column-parallel products that share one gather."""
    values, D = [w.get_value() for w in weights], x_BSD.shape[-1]
    shape = (_rows(layout, x_BSD), D, tuple(width(layout, w) // D for w in weights))
    how = inside.choose_overlap(layout, overlap, GATHER, shape, x_BSD.dtype, matmul, values)
    outs = tuple(layout.act("batch", "seq", *w.get_metadata("axes")[1:]) for w in weights)
    used = tuple(whole(layout, w, x_BSD.dtype) for w in weights)
    names = [name_of(w) for w in weights]
    if how != "xla" or any_packed(values):
        return jax.shard_map(
            lambda x, ws: inside.up(
                x, tuple(map(inside.piece, ws)), matmul, how, inside.is_cut(layout), names
            ),
            mesh=layout.mesh,
            in_specs=(layout.act("batch", "seq", None, residual=True), _specs(layout, weights)),
            out_specs=outs,
        )(x_BSD, used)
    x_BSD = gather(layout, x_BSD)
    return tuple(
        matmul(x_BSD, w, out_sharding=o, name=name)
        for w, o, name in zip(used, outs, names, strict=True)
    )


def down(
    layout: Layout,
    products: Sequence[tuple[Array, nnx.Param]],
    residual_BSD: Array | None,
    matmul: Callable,
    bias: Array | None = None,
    drop: Callable | None = None,
    *,
    overlap: Overlap = "xla",
    whole: Callable = whole,
) -> Array:
    """Row-parallel products, added as partial sums, then one scatter to the residual stream.

    In decoding, whose few positions are not cut, they are added on all ranks.
    """
    xs, weights = zip(*products, strict=True)
    values = [w.get_value() for w in weights]
    D = values[0].shape[-1]
    shape = (_rows(layout, xs[0]), D, tuple(width(layout, w) // D for w in weights))
    op = SCATTER if inside.is_cut(layout) else REDUCE
    how = inside.choose_overlap(layout, overlap, op, shape, xs[0].dtype, matmul, values)
    used = tuple(whole(layout, w, x.dtype) for x, w in products)
    names = [name_of(w) for w in weights]
    if how != "xla" or any_packed(values):
        words = [w.get_metadata("axes") for w in weights]
        y_BSD = jax.shard_map(
            lambda xs, ws: inside.down(
                xs, tuple(map(inside.piece, ws)), matmul, how, inside.is_cut(layout), names
            ),
            mesh=layout.mesh,
            in_specs=(
                tuple(layout.act("batch", "seq", *axes[:-1]) for axes in words),
                _specs(layout, weights),
            ),
            out_specs=layout.act("batch", "seq", None, residual=True),
        )(xs, used)
        return join(y_BSD, residual_BSD, bias, drop)
    partial = layout.act("batch", "seq", None, unreduced=TENSOR)
    terms = (
        matmul(x, w, contract=w.ndim - 1, out_sharding=partial, name=name)
        for x, w, name in zip(xs, used, names, strict=True)
    )
    y_BSD = functools.reduce(operator.add, terms)  # not sum(): it starts from a plain 0
    y_BSD = reshard(y_BSD, layout.act("batch", "seq", None, residual=True))
    return join(y_BSD, residual_BSD, bias, drop)


def _specs(layout: Layout, weights: Sequence[nnx.Param]) -> tuple:
    """How weights lie that `whole` returned."""
    return tuple(layout.whole(*words_of(w)) for w in weights)


def _rows(layout: Layout, x: Array) -> int:
    """Rows of a product inside a block on one device."""
    rules = layout.rules.act
    return x.shape[0] * x.shape[1] // layout.ways(rules["batch"] + rules["seq"])


def lookup(layout: Layout, pairs: Sequence[tuple[nnx.Param, Array]], dtype: Any) -> Array:
    """Each tensor rank looks up the rows it has; the partial sums are scattered together.

    Written by hand because the transposed gather of `table[ids]` all-reduces the whole table's
    gradient (measured on the H100 target); here it is reduce-scattered by transposition.
    """
    rows = layout.act("batch", "seq")
    out = layout.act("batch", "seq", None, residual=True)
    cut_seq = inside.is_cut(layout)
    tables = [table for table, _ in pairs]
    width_axes, copied_axes = _zero_axes(layout)
    specs = [rest(layout, t.get_metadata("axes"), t[...]) for t in tables]
    # A table that says so itself comes back as partial sums; of others the copies are summed here.
    copied_axes = tuple(a for a in copied_axes if all(a not in s.reduced for s in specs))
    ranks = layout.live(TENSOR)

    def own_rows(w_VD: Array, ids_BS: Array) -> Array:
        if copied_axes:  # here, so that copies are summed after the scatter, on the shard
            w_VD = lax.pcast(w_VD, copied_axes, to="varying")
        if width_axes:
            w_VD = lax.all_gather(w_VD, width_axes, axis=1, tiled=True)
        return inside.rows(w_VD, ids_BS, ranks)

    def local(*arrays: Array) -> Array:
        looked_up = map(own_rows, arrays[: len(pairs)], arrays[len(pairs) :])
        total = functools.reduce(operator.add, looked_up)
        if not ranks:
            return total
        return inside.add_up(total, cut_seq)

    # Without a cut sequence the result is equal over context, which the checker cannot see through
    # an all-gather; nothing differentiates that case (decoding).
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(*specs, *[rows] * len(pairs)),
        out_specs=out,
        check_vma=cut_seq,
    )(*[t[...].astype(dtype) for t in tables], *[reshard(ids, rows) for _, ids in pairs])


def attend(
    layout: Layout,
    q_BSHK: Array,
    k_BMGK: Array,
    v_BMGK: Array,
    query: Context,
    memory: Context | None = None,
    window: int | None = None,
    *,
    attention: str = "auto",
    context: ContextSpec = ContextSpec(),
    segments: int | None = None,
) -> Array:
    """This device's rows and heads, in a shard_map: a kernel sees plain local arrays.

    Where the sequence is cut, parallel.context brings queries and keys together.
    """
    packed = attention_.packed_shape(q_BSHK, k_BMGK, query, memory)
    kernel, _ = attention_.choose_attention(layout, attention, q_BSHK.dtype, context, packed)
    rows = layout.act("batch", "seq")

    def places(context: Context) -> Context:
        segments = context.segments_BS
        return Context(
            reshard(context.positions_BS, rows),
            None if segments is None else reshard(segments, rows),
            causal=context.causal,
        )

    heads = layout.act("batch", "seq", "heads", None)
    kv = layout.act("batch", "seq", "kv_heads", None)
    # A custom kernel does not say over which axes its result varies, so the check is XLA's only.
    # All live axes cut an operand, so nothing rests on it (tests/parallel/test_tensor.py).
    return jax.shard_map(
        functools.partial(
            attention_.attention_of(layout, kernel, context, segments), window=window
        ),
        mesh=layout.mesh,
        in_specs=(heads, kv, kv, rows, rows),
        out_specs=heads,
        check_vma=kernel == "xla",
    )(q_BSHK, k_BMGK, v_BMGK, places(query), None if memory is None else places(memory))
