"""Ops under a mesh: tensor and sequence parallelism, and weights gathered for use.

Forward of one sublayer: all-gather the sequence over tensor, column-parallel products, row-parallel
products as partial sums, one reduce-scatter. The backward pass mirrors it because every type says
what it is: `reduced` inputs get partial gradients, `unreduced` results are added before they
travel. XLA inserts the collectives (Megatron sections 3 of arXiv 1909.08053 and 2205.05198;
MegaScale section 3.2), or, with `overlap`, the products of parallel/collective_matmul.py bring
their own, hidden (Flux, arXiv 2406.06858); those are exported here.

Legend: B rows, S positions, D model width, V table rows.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import reshard

from megajax.core.layout import Layout
from megajax.layers import attend as attend_
from megajax.layers import ops as ops_
from megajax.layers.mask import Context
from megajax.layers.mlp import MlpConfig
from megajax.layers.ops import Ops, join
from megajax.parallel import context as context_
from megajax.parallel import expert
from megajax.parallel import overlap as overlap_
from megajax.parallel.collective_matmul import GATHER, REDUCE, SCATTER
from megajax.parallel.collective_matmul import all_gather_matmul as all_gather_matmul
from megajax.parallel.collective_matmul import matmul_all_reduce as matmul_all_reduce
from megajax.parallel.collective_matmul import matmul_reduce_scatter as matmul_reduce_scatter
from megajax.parallel.context import ContextSpec
from megajax.parallel.heads import vector, width
from megajax.parallel.overlap import Implementation, Overlap
from pallas_kernels import tuned
from pallas_kernels.attention import tiling

Array = jax.Array
TENSOR = ("tensor",)


def ops(
    layout: Layout,
    attention: str = "auto",
    context: ContextSpec = ContextSpec(),
    overlap: Overlap = "xla",
) -> Ops:
    """Returns the Ops that put collectives around local compute, or into it.

    attention: 'xla', 'cudnn', 'varlen', or 'auto' (`choose_attention`). context: how queries meet
    the keys of other devices where the sequence is cut. overlap: of `up` and `down`
    (`choose_overlap`), and of `expert` (parallel/expert.py).
    Raises: UserError for an overlap that cannot run on this mesh.
    """
    overlap_.refuse_fused(overlap, layout.mesh.abstract_mesh.abstract_device)
    return Ops(
        gather=functools.partial(gather, layout),
        whole=functools.partial(whole, layout),
        up=functools.partial(up, layout, overlap=overlap),
        down=functools.partial(down, layout, overlap=overlap),
        lookup=functools.partial(lookup, layout),
        vector=functools.partial(vector, layout),
        attend=functools.partial(attend, layout, attention=attention, context=context),
        score=functools.partial(expert.score, layout, whole),
        expert=functools.partial(expert.expert, layout, whole, context=context, overlap=overlap),
    )


def gather(layout: Layout, x_BSD: Array) -> Array:
    """Residual stream -> block: an all-gather over tensor whose transpose is a reduce-scatter."""
    return reshard(x_BSD, layout.act("batch", "seq", None, reduced=TENSOR))


def whole(layout: Layout, w: nnx.Param, dtype: Any, beside: tuple[str, ...] = ()) -> Array:
    """Cast, then gather over the ZeRO axes: the compute dtype travels, forward and backward.

    Copies on other nodes (hybrid sharding) are made `reduced` first, so that the backward pass
    reduce-scatters inside the node and all-reduces only the shard between nodes. beside: axes that
    hold copies too and that cut what the weight meets (tensor, on the residual stream).
    """
    axes, x = w.get_metadata("axes"), vector(layout, w).astype(dtype)
    target = layout.whole(*axes)
    target = target.update(reduced=target.reduced | set(layout.live(beside)))
    cut, copied = _zero_axes(layout, *axes)
    copied += layout.live(beside)
    if cut and copied:
        x = reshard(x, layout.shared(*axes).update(reduced=set(copied)))
    return reshard(x, target)


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
) -> tuple[Array, ...]:
    """Column-parallel products that share one gather."""
    D, R = x_BSD.shape[-1], layout.ways(TENSOR)
    shape = (_rows(layout, x_BSD), D, tuple(width(layout, w) // D // R for w in weights))
    how = choose_overlap(layout, overlap, GATHER, shape, x_BSD.dtype, matmul)
    if how != "xla":
        words = [w.get_metadata("axes") for w in weights]
        return jax.shard_map(
            functools.partial(up_inside, implementation=how),
            mesh=layout.mesh,
            in_specs=(
                layout.act("batch", "seq", None, residual=True),
                tuple(layout.whole(*axes) for axes in words),
            ),
            out_specs=tuple(layout.act("batch", "seq", *axes[1:]) for axes in words),
        )(x_BSD, tuple(whole(layout, w, x_BSD.dtype) for w in weights))
    x_BSD = gather(layout, x_BSD)

    def product(w: nnx.Param) -> Array:
        spec = layout.act("batch", "seq", *w.get_metadata("axes")[1:])
        return matmul(x_BSD, whole(layout, w, x_BSD.dtype), out_sharding=spec)

    return tuple(product(w) for w in weights)


def down(
    layout: Layout,
    products: Sequence[tuple[Array, nnx.Param]],
    residual_BSD: Array | None,
    matmul: Callable,
    bias: Array | None = None,
    drop: Callable | None = None,
    *,
    overlap: Overlap = "xla",
) -> Array:
    """Row-parallel products, added as partial sums, then one scatter to the residual stream.

    In decoding, whose few positions are not cut, they are added on all ranks.
    """
    (first, w), R = products[0], layout.ways(TENSOR)
    D = w[...].shape[-1]
    shape = (_rows(layout, first), D, tuple(w[...].size // D // R for _, w in products))
    op = SCATTER if _is_cut(layout) else REDUCE
    how = choose_overlap(layout, overlap, op, shape, first.dtype, matmul)
    if how != "xla":
        words = [w.get_metadata("axes") for _, w in products]
        y_BSD = jax.shard_map(
            functools.partial(down_inside, op=op, implementation=how),
            mesh=layout.mesh,
            in_specs=(
                tuple(layout.act("batch", "seq", *axes[:-1]) for axes in words),
                tuple(layout.whole(*axes) for axes in words),
            ),
            out_specs=layout.act("batch", "seq", None, residual=True),
        )(tuple(x for x, _ in products), tuple(whole(layout, w, x.dtype) for x, w in products))
        return join(y_BSD, residual_BSD, bias, drop)
    partial = layout.act("batch", "seq", None, unreduced=TENSOR)
    terms = (
        matmul(x, whole(layout, w, x.dtype), contract=w[...].ndim - 1, out_sharding=partial)
        for x, w in products
    )
    y_BSD = functools.reduce(operator.add, terms)  # not sum(): it starts from a plain 0
    y_BSD = reshard(y_BSD, layout.act("batch", "seq", None, residual=True))
    return join(y_BSD, residual_BSD, bias, drop)


def _is_cut(layout: Layout) -> bool:
    """Whether tensor cuts the sequence of the residual stream; in decoding it does not."""
    return "tensor" in layout.rules.residual["seq"]


def _rows(layout: Layout, x: Array) -> int:
    """Rows of a product inside a block on one device."""
    rules = layout.rules.act
    return x.shape[0] * x.shape[1] // layout.ways(rules["batch"] + rules["seq"])


def choose_overlap(
    layout: Layout,
    wanted: Overlap,
    op: str,
    shape: overlap_.Shape,
    dtype: Any,
    matmul: Callable = ops_.matmul,
) -> Implementation:
    """Returns how a product of this shape on one device brings its collective.

    'xla' is the plain path, with the collectives that types imply.
    Raises: NotImplementedError where what is wanted cannot run.
    """
    R = layout.ways(TENSOR)
    # What is not cut has nothing to gather, and too few rows to hide a ring's hops behind.
    plain = not _is_cut(layout) and (op != REDUCE or wanted == "ring")
    if wanted == "xla" or R == 1 or plain:
        return "xla"
    if matmul is not ops_.matmul:
        if wanted == "auto":
            return "xla"
        raise NotImplementedError(
            f"overlap={wanted!r} knows plain products only, this block has its own matmul; use "
            "'auto' or 'xla' (--overlap=auto)"
        )
    device = layout.mesh.abstract_mesh.abstract_device
    return overlap_.choose(op, None if wanted == "auto" else wanted, shape, R, dtype, device)


def explain_overlap(
    layout: Layout, wanted: Overlap, tokens: int, mlp: MlpConfig, dtype: str
) -> str:
    """Returns what an MLP's two products do, and why. tokens: of a whole batch of rows."""
    if wanted != "auto":
        return f"{wanted} (asked for)"
    R = layout.ways(TENSOR)
    rows = tokens // layout.ways(layout.rules.act["batch"] + layout.rules.act["seq"])
    one, ups = mlp.hidden // R, 2 if mlp.activation == "swiglu" else 1
    device = layout.mesh.abstract_mesh.abstract_device
    found = (
        overlap_.best(op, (rows, mlp.width, (one,) * count), R, dtype, device)
        for op, count in ((GATHER, ups), (SCATTER, 1))
    )
    return ", ".join(
        f"MLP {end} {how} ({why})" for end, (how, why) in zip(("up", "down"), found, strict=True)
    )


def up_inside(
    x_BSD: Array, weights: Sequence[Array], *, implementation: Implementation
) -> tuple[Array, ...]:
    """`up` on local arrays. weights: (D, ...) each."""
    flat = [w.reshape(w.shape[0], -1) for w in weights]
    ys = all_gather_matmul(x_BSD, flat, axis="tensor", implementation=implementation)
    return tuple(y.reshape(*y.shape[:-1], *w.shape[1:]) for y, w in zip(ys, weights, strict=True))


def down_inside(
    xs: Sequence[Array], weights: Sequence[Array], *, implementation: Implementation, op=SCATTER
) -> Array:
    """`down`'s products and their scatter, or sum, on local arrays. weights: (..., D) each."""
    flat_xs = [x.reshape(*x.shape[:2], -1) for x in xs]
    flat_ws = [w.reshape(-1, w.shape[-1]) for w in weights]
    function = matmul_reduce_scatter if op == SCATTER else matmul_all_reduce
    return function(flat_xs, flat_ws, axis="tensor", implementation=implementation)


def lookup(layout: Layout, pairs: Sequence[tuple[nnx.Param, Array]], dtype: Any) -> Array:
    """Each tensor rank looks up the rows it has; the partial sums are scattered together.

    Written by hand because the transposed gather of `table[ids]` all-reduces the whole table's
    gradient (measured on the H100 target); here it is reduce-scattered by transposition.
    """
    rows = layout.act("batch", "seq")
    out = layout.act("batch", "seq", None, residual=True)
    cut_seq = "tensor" in layout.rules.residual.get("seq", ())
    tables = [table for table, _ in pairs]
    width_axes, copied_axes = _zero_axes(layout)
    ranks = layout.live(TENSOR)

    def own_rows(w_VD: Array, ids_BS: Array) -> Array:
        if copied_axes:  # here, so that copies are summed after the scatter, on the shard
            w_VD = lax.pcast(w_VD, copied_axes, to="varying")
        if width_axes:
            w_VD = lax.all_gather(w_VD, width_axes, axis=1, tiled=True)
        row_BS = ids_BS - lax.axis_index(ranks) * w_VD.shape[0] if ranks else ids_BS
        here_BS = (row_BS >= 0) & (row_BS < w_VD.shape[0])
        return jnp.where(here_BS[..., None], w_VD[jnp.where(here_BS, row_BS, 0)], 0)

    def local(*arrays: Array) -> Array:
        looked_up = map(own_rows, arrays[: len(pairs)], arrays[len(pairs) :])
        total = functools.reduce(operator.add, looked_up)
        if not ranks:
            return total
        if cut_seq:
            return lax.psum_scatter(total, ranks, scatter_dimension=1, tiled=True)
        return lax.psum(total, ranks)

    specs = [layout.stored(*t.get_metadata("axes")) for t in tables]
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
) -> Array:
    """This device's rows and heads, in a shard_map: a kernel sees plain local arrays.

    Where the sequence is cut, parallel.context brings queries and keys together.
    """
    packed = packed_shape(q_BSHK, k_BMGK, query, memory)
    kernel, _ = choose_attention(layout, attention, q_BSHK.dtype, context, packed)
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
        functools.partial(local_attention(layout, kernel, context), window=window),
        mesh=layout.mesh,
        in_specs=(heads, kv, kv, rows, rows),
        out_specs=heads,
        check_vma=kernel == "xla",
    )(q_BSHK, k_BMGK, v_BMGK, places(query), None if memory is None else places(memory))


def local_attention(
    layout: Layout, kernel: attend_.Implementation, context: ContextSpec
) -> Callable[..., Array]:
    """Returns the attention of one device's arrays, inside a shard_map over the whole mesh."""
    cut = layout.live(layout.rules.act.get("seq", ()))

    def attend(
        q: Array, k: Array, v: Array, query: Context, memory: Context | None, window: int | None
    ) -> Array:
        if cut:
            return context_.attend(context.kind, cut[0], q, k, v, query, window, kernel)
        return attend_.attend(q, k, v, query, memory, window, kernel)

    return attend


def packed_shape(
    q_BSHK: Array, k_BMGK: Array, query: Context, memory: Context | None
) -> tuple[int, int, int] | None:
    """What `choose_attention` is told of rows that hold segments; None for others."""
    if memory is not None or query.segments_BS is None:
        return None
    _, S, H, K = q_BSHK.shape
    return K, H // k_BMGK.shape[2], S


def choose_attention(
    layout: Layout,
    wanted: str,
    dtype: Any,
    context: ContextSpec = ContextSpec(),
    packed: tuple[int, int, int] | None = None,
) -> tuple[attend_.Implementation, str]:
    """Returns (the attention kernel, why).

    'auto' takes cuDNN for 16-bit types on GPUs, which computes all pairs of a packed row under a
    mask, until a table of tuned tiles (scripts/tune.py, which also compares results) says that ours
    was right and fast on this kind of GPU: packed rows then take 'varlen'.

    Args: wanted: 'auto' or a kernel's name. packed: (head width, query heads of a key-value head,
      tokens of a row) where rows hold segments; None: one sequence each, or a cache.
    """
    cut = layout.live(layout.rules.act.get("seq", ()))
    if context.kind == "ring" and cut:
        return "xla", "a ring joins its blocks itself"
    if wanted != "auto":
        return wanted, "asked for"  # type: ignore[return-value]
    if layout.mesh.devices.flat[0].platform == "cpu":
        return "xla", "auto: cuDNN needs a GPU"
    if jnp.dtype(dtype).itemsize != 2:
        return "xla", "auto: cuDNN needs a 16-bit type"
    if packed is not None and not (cut and context.kind == "gather"):
        width, group, tokens = packed
        row = tuned.find(tiling.FORWARD, tiling.key(dtype, width, group, tokens, None))
        if row is not None and row["key"]["width"] == width and row["fastest"] == "hopper":
            if row["median_us"] <= row["rivals"].get("cudnn", math.inf):
                return "varlen", "auto: packed rows, measured on this kind of GPU"
            return "cudnn", "auto: measured to be faster on this kind of GPU"
    return "cudnn", "auto: fused, 16-bit type on a GPU"
