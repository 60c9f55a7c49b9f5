"""Ops under a mesh: tensor and sequence parallelism, and weights gathered for use.

Forward of one sublayer: all-gather the sequence over tensor, column-parallel products, row-parallel
products as partial sums, one reduce-scatter. The backward pass mirrors it because every type says
what it is: `reduced` inputs get partial gradients, `unreduced` results are added before they
travel. XLA inserts the collectives (Megatron sections 3 of arXiv 1909.08053 and 2205.05198;
MegaScale section 3.2), or, with `overlap`, the products of parallel/collective_matmul.py bring
their own, hidden (Flux, arXiv 2406.06858). Those, and every product with a packed weight, run in a
shard_map. `ops` builds the Ops of code under an Explicit mesh, `local_ops` those of code that is
inside a shard_map already, such as pipeline stages; both use the functions `inside_...`.

Legend: B rows, S positions, D model width, V table rows. Of images: B images, H rows, W columns, C
channels.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec, reshard
from jax.sharding import PartitionSpec as P

from megajax.core.layout import Layout, Words
from megajax.core.packed import RANK, LowRank, PackedWeight
from megajax.core.tree import Tree, is_words
from megajax.layers import ops as ops_
from megajax.layers.attention import Context
from megajax.layers.dispatch import Dispatch, ExpertWeights
from megajax.layers.joined import merged, split
from megajax.layers.losses import VocabCut
from megajax.layers.mlp import ACTIVATIONS, MlpConfig
from megajax.layers.ops import Codec, LowPrecision, Ops, coded, convolution, join
from megajax.layers.param import Weight, any_packed, name_of, of_each, words_of
from megajax.parallel import context as context_
from megajax.parallel import expert as expert_
from megajax.parallel import overlap as overlap_
from megajax.parallel.context import ContextSpec
from megajax.parallel.overlap import GATHER, REDUCE, SCATTER, Implementation, Overlap
from pallas_kernels.collective import reference as plain

# ---- heads
#
# Key-value heads that are fewer than the tensor ranks: every rank stores all and uses one.
#
# A stored parameter has the model's own shape on every mesh, so checkpoints and exports do not
# depend on it. Where `Rules.copies` repeats a word, a parameter enters its products as if each
# entry were there once for every rank that shares it; what follows (projection, attention, cache)
# then sees one head a rank. The gradients of the copies are added where they came from: outside a
# shard_map by the transposition of `share`, inside by the pipeline's sum over axes that hold
# copies. Source: Megatron-LM's and vLLM's replication of key-value heads.


TENSOR, TENSOR_AXES = "tensor", ("tensor",)


def share(layout: Layout, words: Words, tree: Tree) -> Tree:
    """Cuts `Layout.stored` to `Layout.shared`; each rank cuts its part out of its own memory.

    tree: an array, or arrays that all begin with dimensions of these words.
    """
    if all(layout.copies(word) == 1 for word in words):
        return tree
    # With the axes over which the type of the parameter says that its gradient is a partial sum.
    reduced = jax.typeof(jax.tree.leaves(tree)[0]).sharding.spec.reduced
    spec = layout.stored(*words).update(reduced=reduced)
    if spec.reduced:
        return jax.tree.map(functools.partial(_share_partial, layout, words, spec), tree)
    return jax.shard_map(
        functools.partial(share_inside, layout, words),
        mesh=layout.mesh,
        in_specs=spec,
        out_specs=layout.shared(*words),
    )(tree)


def share_inside(layout: Layout, words: Words, tree: Tree) -> Tree:
    """`share` on local arrays, inside a shard_map over the whole mesh."""
    for dim, word in enumerate(words):
        if (copies := layout.copies(word)) > 1:
            rank = lax.axis_index(TENSOR) // copies
            tree = jax.tree.map(
                lambda x, dim=dim, rank=rank: lax.dynamic_slice_in_dim(x, rank, 1, dim), tree
            )
    return tree


def _share_partial(layout: Layout, words: Words, spec: PartitionSpec, x: jax.Array) -> jax.Array:
    """`share` of an array whose gradient is a partial sum by its type, `spec`. jax 0.11.2 does not
    put such a gradient into a slice, so the transposition is written out."""
    cut = functools.partial(share_inside, layout, words)
    summed = PartitionSpec(*spec.partitions, unreduced=spec.reduced)
    shared = layout.shared(*words)
    piece_shape = layout.named(layout.stored(*words)).shard_shape(x.shape)

    def add(dy: jax.Array) -> jax.Array:
        dx = jax.linear_transpose(cut, jax.ShapeDtypeStruct(piece_shape, dy.dtype))(dy)[0]
        return lax.psum(dx, TENSOR)

    def everywhere(local: Callable, in_spec: PartitionSpec, out_spec: PartitionSpec) -> Callable:
        # The checker refuses partial sums inside.
        return jax.shard_map(
            local, mesh=layout.mesh, in_specs=(in_spec,), out_specs=out_spec, check_vma=False
        )

    @jax.custom_vjp
    def through(x: jax.Array) -> jax.Array:
        return everywhere(cut, spec, shared.update(reduced=spec.reduced))(x)

    def backward(_: None, dy: jax.Array) -> tuple[jax.Array]:
        return (everywhere(add, shared.update(unreduced=spec.reduced), summed)(dy),)

    through.defvjp(lambda x: (through(x), None), backward)
    return through(x)


def vector(layout: Layout, w: nnx.Param) -> jax.Array:
    """Returns a bias as what it is added to has it."""
    return share(layout, w.get_metadata("axes"), w[...])


def width(layout: Layout, w: nnx.Param) -> int:
    """Returns the elements of a weight that one tensor rank uses."""
    value = w.get_value()
    value = value.base if isinstance(value, LowRank) else value
    if isinstance(value, PackedWeight):
        return value.size
    copies = math.prod(layout.copies(word) for word in w.get_metadata("axes"))
    return value.size * copies // layout.ways((TENSOR,))


# ---- inside
#
# One rank's part of a block, on local arrays: for code inside a shard_map over the whole mesh.
#
# `ops` puts a shard_map around each of these; `local_ops` calls them in one. `inside_up` and
# `inside_down` are the two ends of a sublayer with their collective before or after the products,
# or in them (`choose_overlap`). Weights are gathered over the axes that share their gradient; they
# are arrays or packed, in the inputs' type.
#
# Legend: B rows, S positions, D model width, F any hidden width, V table rows.


Array = jax.Array


def piece_of(layout: Layout, w: nnx.Param) -> Weight:
    """Returns a parameter as the products of this tensor rank take it, inside a shard_map.

    If several ranks share a stored piece of key-value heads (`Rules.copies`), each takes its part
    of it. w: a parameter whose value is this rank's stored piece, not cut by ZeRO.
    """
    if isinstance(w.get_value(), LowRank):
        return of_each(functools.partial(piece_of, layout), w)
    return inside_piece(share_inside(layout, words_of(w), w.get_value()))


def inside_piece(w: Weight) -> Weight:
    """Returns a local weight, not cut by ZeRO, as products take it: an array as it is, a packed
    weight without the dimension of its pieces, of which this rank has one."""
    if isinstance(w, LowRank):
        return dataclasses.replace(w, base=inside_piece(w.base))
    return w.piece() if isinstance(w, PackedWeight) else w


def inside_up(
    x_BSD: Array,
    weights: Sequence[Weight],
    matmul: Callable,
    implementation: Implementation,
    cut: bool = True,
    names: Sequence[str | None] | None = None,
) -> tuple[Array, ...]:
    """Column-parallel products that share one gather. weights: (D, ...) each.

    cut: whether tensor cuts the positions of x; otherwise nothing is gathered. names: of the
    parameters, for `matmul`; None: the weights are parts of several.
    """
    if implementation == "xla":
        x_BSD = plain.gather(x_BSD, TENSOR) if cut else x_BSD
        named = zip(weights, names or [None] * len(weights), strict=True)
        return tuple(matmul(x_BSD, w, name=name) for w, name in named)
    from megajax.parallel import collective_matmul  # with the kernels of 'fused'

    return collective_matmul.up(x_BSD, tuple(weights), TENSOR, implementation)


def inside_down(
    xs: Sequence[Array],
    weights: Sequence[Weight],
    matmul: Callable,
    implementation: Implementation,
    cut: bool = True,
    names: Sequence[str | None] | None = None,
) -> Array:
    """Row-parallel products, added as partial sums, then scattered over the positions.

    weights: (..., D) each. cut: as of `up`; otherwise the sum is that of all ranks on each of them.
    names: as of `up`.
    """
    if implementation == "xla":
        named = zip(xs, weights, names or [None] * len(weights), strict=True)
        terms = (matmul(x, w, contract=w.ndim - 1, name=name) for x, w, name in named)
        return add_up(functools.reduce(operator.add, terms), cut)
    from megajax.parallel import collective_matmul

    return collective_matmul.down(tuple(xs), tuple(weights), TENSOR, implementation, cut)


def add_up(y_BSD: Array, cut: bool) -> Array:
    """The sum over the tensor ranks: with a cut sequence, this rank's positions of it."""
    return plain.scatter(y_BSD, TENSOR) if cut else plain.total(y_BSD, TENSOR)


def inside_rows(w_VD: Array, ids_BS: Array, axes: tuple[str, ...]) -> Array:
    """The rows of a table that `axes` cut: those that this device has, 0 for others."""
    row_BS = ids_BS - lax.axis_index(axes) * w_VD.shape[0] if axes else ids_BS
    here_BS = (row_BS >= 0) & (row_BS < w_VD.shape[0])
    return jnp.where(here_BS[..., None], w_VD[jnp.where(here_BS, row_BS, 0)], 0)


# ---- which collective


def choose_overlap(
    layout: Layout,
    asked: Overlap,
    op: str,
    shape: Callable[[], overlap_.Shape],
    dtype: Any,
    matmul: Callable = ops_.matmul,
    weights: Sequence[Weight] = (),
) -> Implementation:
    """Returns how a product brings its collective. shape(): of the product on one device.

    'xla' is the plain path, where the collective is not part of the product. It is what 'auto'
    takes where a weight is packed: nothing is known of how long a packed product takes.
    Raises: NotImplementedError where the overlap that is asked for cannot run.
    """
    # What is not cut has nothing to gather, and too few rows to hide a ring's hops behind.
    alone = not layout.cuts_sequence and (op != REDUCE or asked == "ring")
    if asked == "xla" or alone or not layout.live(TENSOR_AXES):
        return "xla"
    packed = any_packed(weights)
    if asked == "auto" and (packed or matmul is not ops_.matmul):
        return "xla"
    if matmul is not ops_.matmul:
        raise NotImplementedError(
            f"overlap={asked!r} knows plain products only, this block has its own matmul; use "
            "'auto' or 'xla' (--overlap=auto)"
        )
    if packed and asked == "fused":
        raise NotImplementedError(
            f"overlap='fused': the kernel of {op} multiplies arrays, and a weight here is packed; "
            "use 'ring', 'xla' or 'auto' (--overlap=ring)"
        )
    implementation = None if asked == "auto" else asked
    mesh = layout.mesh.abstract_mesh
    return overlap_.choose(op, implementation, shape(), TENSOR, dtype, mesh)


def explain_overlap(layout: Layout, asked: Overlap, tokens: int, mlp: MlpConfig, dtype: str) -> str:
    """Returns how the two products of an MLP overlap with their collectives, and why.

    tokens: the tokens of a batch on all devices together.
    """
    if asked != "auto":
        return f"{asked} (asked for)"
    R = layout.ways((TENSOR,))
    inside_rows = tokens // layout.ways(layout.rules.act["batch"] + layout.rules.act["seq"])
    one, ups = mlp.hidden // R, 1 + ACTIVATIONS[mlp.activation].is_gated
    mesh = layout.mesh.abstract_mesh
    choices = (
        overlap_.best(op, (inside_rows, mlp.width, (one,) * count), TENSOR, dtype, mesh)
        for op, count in ((GATHER, ups), (SCATTER, 1))
    )
    return ", ".join(
        f"MLP {end} {how} ({why})" for end, (how, why) in zip(("up", "down"), choices, strict=True)
    )


# ---- tensor


def ops(
    layout: Layout,
    attention: str = "auto",
    context: ContextSpec = ContextSpec(),
    overlap: Overlap = "xla",
    codec: Codec | None = None,
    segments: int | None = None,
    matmul: Callable = ops_.matmul,
) -> Ops:
    """Returns the Ops that put collectives around local compute, or into it.

    attention: 'xla', 'cudnn', 'varlen', or 'auto' (`context.choose_attention`). context: how
    queries meet the keys of other devices where the sequence is cut. overlap: of `up` and `down`
    (`choose_overlap`), and of `expert` (parallel/expert.py). codec: how weights travel to
    where they are used; what `lookup` and `score` read travels as it is. segments: of a row, on
    average over a device's rows, for which cuDNN's attention has room (layers/attention.py).
    matmul: the local product; with LowPrecision, whose products no ring and no fused kernel knows,
    `up` and `down` do not overlap.
    Raises: UserError for an overlap that cannot run on this mesh.
    """
    overlap_.refuse_fused(overlap, layout.mesh.abstract_mesh.abstract_device)
    overlap_.refuse_mesh(overlap, layout.mesh.shape)
    used = functools.partial(whole, codec=codec)
    products = overlap if matmul is ops_.matmul else "xla"
    return Ops(
        matmul=matmul,
        gather=functools.partial(gather, layout),
        whole=functools.partial(used, layout),
        up=functools.partial(up, layout, overlap=products, use=used),
        down=functools.partial(down, layout, overlap=products, use=used),
        lookup=functools.partial(lookup, layout),
        spread=functools.partial(spread, layout),
        place=functools.partial(place, layout),
        vector=functools.partial(vector, layout),
        attend=functools.partial(
            attend, layout, attention=attention, context=context, segments=segments
        ),
        score=functools.partial(expert_.score, layout, whole),
        expert=functools.partial(expert_.expert, layout, used, context=context, overlap=overlap),
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
    return reshard(x_BSD, layout.act("batch", "seq", None, reduced=TENSOR_AXES))


def whole(
    layout: Layout,
    w: nnx.Param,
    dtype: Any,
    copied_over: tuple[str, ...] = (),
    codec: Codec | None = None,
) -> Weight:
    """Cast, then gather over the ZeRO axes: the compute dtype travels, forward and backward.

    Copies on other nodes (hybrid sharding) are made `reduced` first, so that the backward pass
    reduce-scatters inside the node and all-reduces only the shard between nodes.

    copied_over: axes that hold copies too and that cut the activation which the weight multiplies
    (tensor, on the residual stream). codec: of the message forward. A packed weight, of which every
    rank stores its whole pieces, is not gathered.
    """
    if isinstance(w.get_value(), LowRank):
        return of_each(lambda part: whole(layout, part, dtype, copied_over), w)
    axes = words_of(w)
    copied_over = copied_over or _copied(layout, axes)
    target = layout.whole(*axes)
    target = target.update(reduced=target.reduced | set(layout.live(copied_over)))
    cut, copied = layout.zero_axes(*axes)
    copied += layout.live(copied_over)

    def gathered(x: Array) -> Array:
        if cut and copied:
            x = reshard(x, layout.shared(*axes).update(reduced=set(copied)))
        return reshard(x, target)

    x = share(layout, axes, w.get_value())
    if isinstance(x, PackedWeight):
        return jax.tree.map(gathered, x.astype(dtype))
    return gathered(x.astype(dtype)) if codec is None else coded(codec, x, dtype, gathered)


def up(
    layout: Layout,
    x_BSD: Array,
    weights: Sequence[nnx.Param],
    matmul: Callable,
    *,
    overlap: Overlap = "xla",
    use: Callable = whole,
) -> tuple[Array, ...]:
    """Column-parallel products that share one gather."""
    values, D = [w.get_value() for w in weights], x_BSD.shape[-1]

    def shape() -> overlap_.Shape:
        return _rows(layout, x_BSD), D, tuple(width(layout, w) // D for w in weights)

    how = choose_overlap(layout, overlap, GATHER, shape, x_BSD.dtype, matmul, values)
    outs = tuple(layout.act("batch", "seq", *w.get_metadata("axes")[1:]) for w in weights)
    used = tuple(use(layout, w, x_BSD.dtype) for w in weights)
    names = [name_of(w) for w in weights]
    if how != "xla" or any_packed(values) or _is_local(matmul, names):
        return jax.shard_map(
            lambda x, ws: inside_up(
                x, tuple(map(inside_piece, ws)), matmul, how, layout.cuts_sequence, names
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
    use: Callable = whole,
) -> Array:
    """Row-parallel products, added as partial sums, then one scatter to the residual stream.

    In decoding, whose few positions are not cut, they are added on all ranks.
    """
    xs, weights = zip(*products, strict=True)
    values = [w.get_value() for w in weights]
    D = values[0].shape[-1]

    def shape() -> overlap_.Shape:
        return _rows(layout, xs[0]), D, tuple(width(layout, w) // D for w in weights)

    op = SCATTER if layout.cuts_sequence else REDUCE
    how = choose_overlap(layout, overlap, op, shape, xs[0].dtype, matmul, values)
    used = tuple(use(layout, w, x.dtype) for x, w in products)
    names = [name_of(w) for w in weights]
    if how != "xla" or any_packed(values) or _is_local(matmul, names):
        words = [w.get_metadata("axes") for w in weights]
        y_BSD = jax.shard_map(
            lambda xs, ws: inside_down(
                xs, tuple(map(inside_piece, ws)), matmul, how, layout.cuts_sequence, names
            ),
            mesh=layout.mesh,
            in_specs=(
                tuple(layout.act("batch", "seq", *axes[:-1]) for axes in words),
                _specs(layout, weights),
            ),
            out_specs=layout.act("batch", "seq", None, residual=True),
        )(xs, used)
        return join(y_BSD, residual_BSD, bias, drop)
    partial = layout.act("batch", "seq", None, unreduced=TENSOR_AXES)
    terms = (
        matmul(x, w, contract=w.ndim - 1, out_sharding=partial, name=name)
        for x, w, name in zip(xs, used, names, strict=True)
    )
    y_BSD = functools.reduce(operator.add, terms)  # not sum(): it starts from a plain 0
    y_BSD = reshard(y_BSD, layout.act("batch", "seq", None, residual=True))
    return join(y_BSD, residual_BSD, bias, drop)


def _is_local(matmul: Callable, names: Sequence[str | None]) -> bool:
    """Tells whether a product of these parameters takes local arrays alone."""
    return isinstance(matmul, LowPrecision) and matmul.takes(names)


def _specs(layout: Layout, weights: Sequence[nnx.Param]) -> tuple:
    """How weights lie that `whole` returned."""
    words = tuple(words_of(w) for w in weights)

    def spec(axes: Words) -> PartitionSpec:
        used = layout.whole(*axes)
        return used.update(reduced=used.reduced | set(layout.live(_copied(layout, axes))))

    return jax.tree.map(spec, words, is_leaf=is_words)


def _copied(layout: Layout, words: Words) -> tuple[str, ...]:
    """Returns the axes that hold copies of an adapter's matrix although they cut what it multiplies
    or makes; none of another parameter."""
    is_cut = any(TENSOR in layout.rules.act.get(word or "", ()) for word in words)
    return TENSOR_AXES if RANK in words and not is_cut else ()


def _rows(layout: Layout, x: Array) -> int:
    """Rows of a product inside a block on one device."""
    rules = layout.rules.act
    return x.shape[0] * x.shape[1] // layout.ways(rules["batch"] + rules["seq"])


def lookup(layout: Layout, pairs: Sequence[tuple[nnx.Param, Array]], dtype: Any) -> Array:
    """Each tensor rank looks up the rows it has; the partial sums are scattered together.

    Written by hand because the transposed gather of `table[ids]` all-reduces the whole table's
    gradient (measured on the H100 target); here it is reduce-scattered by transposition.
    """
    rows, cut_seq = layout.act("batch", "seq"), layout.cuts_sequence
    out = layout.act("batch", "seq", None, residual=True)
    width_axes, copied_axes = layout.zero_axes()
    tables = [table for table, _ in pairs]
    stored = [layout.stored(*t.get_metadata("axes")) for t in tables]
    specs = [
        spec.update(reduced=jax.typeof(t[...]).sharding.spec.reduced)
        for spec, t in zip(stored, tables, strict=True)
    ]
    # A table that says so itself comes back as partial sums; of others the copies are summed here.
    said = set().union(*(spec.reduced for spec in specs))
    copied_axes = tuple(a for a in copied_axes if a not in said)
    ranks = layout.live(TENSOR_AXES)

    def own_rows(w_VD: Array, ids_BS: Array) -> Array:
        if copied_axes:  # here, so that copies are summed after the scatter, on the shard
            w_VD = lax.pcast(w_VD, copied_axes, to="varying")
        if width_axes:
            w_VD = lax.all_gather(w_VD, width_axes, axis=1, tiled=True)
        return inside_rows(w_VD, ids_BS, ranks)

    def local(*arrays: Array) -> Array:
        looked_up = map(own_rows, arrays[: len(pairs)], arrays[len(pairs) :])
        total = functools.reduce(operator.add, looked_up)
        if not ranks:
            return total
        return add_up(total, cut_seq)

    # Without a cut sequence the result is equal over context, which the checker cannot see through
    # an all-gather; nothing differentiates that case (decoding).
    return jax.shard_map(
        local,
        mesh=layout.mesh,
        in_specs=(*specs, *[rows] * len(pairs)),
        out_specs=out,
        check_vma=cut_seq,
    )(*[t[...].astype(dtype) for t in tables], *[reshard(ids, rows) for _, ids in pairs])


def spread(layout: Layout, x: Array) -> Array:
    """Cuts rows as the residual stream is cut. Each rank has them already."""
    return reshard(x, layout.act("batch", "seq", *[None] * (x.ndim - 2), residual=True))


def place(layout: Layout, x_BSD: Array, features_BQD: Array, places_BS: Array) -> Array:
    """Gathers the features of a row, and each rank places those of its tokens; backward, their
    gradients are reduce-scattered."""
    stream = layout.act("batch", "seq", None, residual=True)
    return jax.shard_map(
        functools.partial(local_place, layout),
        mesh=layout.mesh,
        in_specs=(stream, stream, layout.act("batch", "seq", residual=True)),
        out_specs=stream,
    )(x_BSD, features_BQD, spread(layout, places_BS))


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
    return_lse: bool = False,
) -> Any:
    """This device's rows and heads, in a shard_map: a kernel sees plain local arrays.

    Where the sequence is cut, parallel.context brings queries and keys together.
    """
    rows = layout.act("batch", "seq")

    def places(context: Context) -> Context:
        segments = context.segments_BS
        return Context(
            reshard(context.positions_BS, rows),
            None if segments is None else reshard(segments, rows),
            causal=context.causal,
        )

    query, memory = places(query), None if memory is None else places(memory)
    heads = layout.act("batch", "seq", "heads", None)
    kv = layout.act("batch", "seq", "kv_heads", None)
    packed = context_.packed_shape(q_BSHK, k_BMGK, query, memory)
    kernel, _ = context_.choose_attention(
        layout, attention, q_BSHK.dtype, context, packed, return_lse
    )
    run = context_.attention_of(layout, kernel, context, segments, return_lse)
    # A custom kernel does not say over which axes its result varies, so the check is XLA's only.
    # All live axes cut an operand, so nothing rests on it (tests/parallel/test_tensor.py).
    return jax.shard_map(
        functools.partial(run, window=window),
        mesh=layout.mesh,
        in_specs=(heads, kv, kv, rows, rows),
        out_specs=(heads, layout.act("batch", "seq", "heads")) if return_lse else heads,
        check_vma=kernel == "xla",
    )(q_BSHK, k_BMGK, v_BMGK, query, memory)


# ---- local
#
# Ops for code that is already inside a shard_map over the whole mesh: the same communication as
# tensor.py's, written out, on local arrays.
#
# The pipeline runs so: its stages do different things, and types that say `unreduced` do not mix
# with a manual axis (jax 0.11.2). Differentiate this code with check_vma=False; then the gradient
# of a local array is that of the SUM over all devices of what they return, which makes every
# collective its neighbour's transpose. Weights arrive whole, in the compute dtype; vectors and
# routers in float32, so that the default `Ops.score` serves.
#
# Legend: B rows, S positions, D model width, V table rows. Of images: B images, H rows, W columns,
# C channels.


def local_ops(
    layout: Layout,
    attention: str = "auto",
    context: ContextSpec = ContextSpec(),
    overlap: Overlap = "xla",
    segments: int | None = None,
    matmul: Callable = ops_.matmul,
) -> Ops:
    """Returns the Ops of local code. attention, context, overlap, segments, matmul: as in
    tensor.ops."""
    products = overlap if matmul is ops_.matmul else "xla"
    return Ops(
        matmul=matmul,
        gather=functools.partial(local_gather, layout),
        up=functools.partial(local_up, layout, overlap=products),
        down=functools.partial(local_down, layout, overlap=products),
        lookup=functools.partial(local_lookup, layout),
        spread=functools.partial(local_spread, layout),
        place=lambda x_BSD, features_BQD, places_BS: local_place(
            layout, x_BSD, features_BQD, local_spread(layout, places_BS)
        ),
        attend=functools.partial(
            local_attend, layout, attention=attention, context=context, segments=segments
        ),
        show=functools.partial(local_show, layout),
        vector=functools.partial(piece_of, layout),
        over_heads=lambda sums: lax.psum(sums, TENSOR) if layout.live((TENSOR,)) else sums,
        vocab=VocabCut(layout.live(layout.rules.stored["vocab"])),
        expert=functools.partial(local_expert, layout, context=context, overlap=overlap),
        total=functools.partial(local_total, layout),
        convolve=functools.partial(local_convolve, layout),
    )


def local_convolve(
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


def local_gather(layout: Layout, x_BSD: Array) -> Array:
    """Residual stream -> block: a sequence that tensor cuts is gathered."""
    if not layout.cuts_sequence:
        return x_BSD
    return lax.all_gather(x_BSD, TENSOR, axis=1, tiled=True)


def local_up(
    layout: Layout,
    x_BSD: Array,
    weights: Sequence[nnx.Param],
    matmul: Callable,
    *,
    overlap: Overlap,
) -> tuple[Array, ...]:
    """Column-parallel products that share one gather."""
    used = tuple(piece_of(layout, w).astype(x_BSD.dtype) for w in weights)
    (B, S, D), cut, ones = x_BSD.shape, layout.cuts_sequence, merged(used)

    def shape() -> overlap_.Shape:
        rows = B * S * (layout.ways((TENSOR,)) if cut else 1)
        return rows, D, tuple(w.size // D for w in ones)

    how = choose_overlap(layout, overlap, GATHER, shape, x_BSD.dtype, matmul, ones)
    names = [name_of(w) for w in weights] if len(ones) == len(weights) else None
    return split(inside_up(x_BSD, ones, matmul, how, cut, names), used)


def local_down(
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
    used = tuple(piece_of(layout, w).astype(x.dtype) for x, w in products)
    (B, S, *_), D = xs[0].shape, used[0].shape[-1]
    cut = layout.cuts_sequence

    def shape() -> overlap_.Shape:
        return B * S, D, tuple(w.size // D for w in used)

    op = SCATTER if cut else REDUCE
    how = choose_overlap(layout, overlap, op, shape, xs[0].dtype, matmul, used)
    names = [name_of(w) for _, w in products]
    return join(inside_down(xs, used, matmul, how, cut, names), residual_BSD, bias, drop)


def local_lookup(layout: Layout, pairs: Sequence[tuple[nnx.Param, Array]], dtype: Any) -> Array:
    """Each device looks up the rows that it has; the partial sums are scattered together."""
    return _summed(layout, _own_rows(layout, pairs, dtype))


def _own_rows(layout: Layout, pairs: Sequence[tuple[nnx.Param, Array]], dtype: Any) -> Array:
    """The rows of the tables that this device has, their sum; 0 for an id below 0."""

    def rows(table: nnx.Param, ids_BS: Array) -> Array:
        axes = layout.live(layout.rules.stored[table.get_metadata("axes")[0]])
        return inside_rows(table[...].astype(dtype), ids_BS, axes)

    return functools.reduce(operator.add, itertools.starmap(rows, pairs))


def _summed(layout: Layout, total_BSD: Array) -> Array:
    """Adds up partial sums over the axes that cut the vocabulary, to the residual stream."""
    cut = layout.cuts_sequence
    axes = layout.live(layout.rules.stored["vocab"])
    others = [a for a in axes if a != TENSOR or not cut]
    total_BSD = lax.psum(total_BSD, others) if others else total_BSD
    if not cut:
        return total_BSD
    return lax.psum_scatter(total_BSD, TENSOR, scatter_dimension=1, tiled=True)


def local_spread(layout: Layout, x: Array) -> Array:
    """This rank's places of rows that every tensor rank has."""
    if not layout.cuts_sequence:
        return x
    size = x.shape[1] // layout.ways((TENSOR,))
    return lax.dynamic_slice_in_dim(x, lax.axis_index(TENSOR) * size, size, 1)


def local_place(layout: Layout, x_BSD: Array, features_BQD: Array, places_BS: Array) -> Array:
    """Places features at this device's tokens; places_BS: of these."""
    if layout.live(TENSOR_AXES):
        features_BQD = local_gather(layout, features_BQD)
    return ops_.place(x_BSD, features_BQD, places_BS)


def local_show(
    layout: Layout,
    pairs: Sequence[tuple[nnx.Param, Array]],
    features_BQD: Array,
    places_BS: Array,
    dtype: Any,
) -> Array:
    """Each device adds the features that it has to its partial sum of the embedding.

    features_BQD: where tensor ranks share a row's features, this rank's, in the order of the ranks;
    where they share the rows, those of this rank's rows. Zeros where another stage has them.
    """
    (B, S), (rows, Q, D), rank = places_BS.shape, features_BQD.shape, lax.axis_index(TENSOR)
    shown_BS = places_BS >= 0
    pairs = [(table, jnp.where(shown_BS, -1, ids_BS)) for table, ids_BS in pairs]
    total_BSD = _own_rows(layout, pairs, dtype)
    if rows < B:
        places_RS = lax.dynamic_slice_in_dim(places_BS, rank * rows, rows)
        zeros_RSD = jnp.zeros((rows, S, D), dtype)
        placed_RSD = ops_.place(zeros_RSD, features_BQD, places_RS)
        zeros_BSD = jnp.zeros((B, S, D), dtype)
        placed_BSD = lax.dynamic_update_slice_in_dim(zeros_BSD, placed_RSD, rank * rows, 0)
    else:
        place_BS = places_BS - rank * Q
        here_BS = shown_BS & (place_BS >= 0) & (place_BS < Q)
        place_BS = jnp.where(here_BS, place_BS, -1)
        placed_BSD = ops_.place(jnp.zeros((B, S, D), dtype), features_BQD, place_BS)
    return _summed(layout, total_BSD + placed_BSD)


def local_attend(
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
    return_lse: bool = False,
) -> Any:
    """This device's rows and heads."""
    packed = context_.packed_shape(q_BSHK, k_BMGK, query, memory)
    kernel, _ = context_.choose_attention(
        layout, attention, q_BSHK.dtype, context, packed, return_lse
    )
    attend_local = context_.attention_of(layout, kernel, context, segments, return_lse)
    return attend_local(q_BSHK, k_BMGK, v_BMGK, query, memory, window)


def local_expert(
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


def local_total(layout: Layout, sums: Any) -> Any:
    """Adds up over all axes that cut the tokens of the residual stream."""
    axes = layout.live(layout.rules.residual["batch"] + layout.rules.residual["seq"])
    return lax.psum(sums, axes) if axes else sums
