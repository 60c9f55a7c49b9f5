"""A mixture's products with their communication inside; for code inside a shard_map over `axis`.

Expert e of the model lives on rank e // E of the axis. `route` says where every choice of a token
goes; `dispatch_grouped_matmul` takes tokens to their experts' first products, and
`grouped_matmul_combine` the second products back to the tokens, weighted and added up (COMET, arXiv
2502.19811, section 3: layer 0 and layer 1). Implementations: 'fused', one kernel each (Hopper GPUs
that reach each other's memory, and nothing beside it: collective/clique.py); 'xla', plain
collectives, on any device, the specification. `None` picks the kernel only if a row of
pallas_kernels/tuned that was measured over a real link says so, on a mesh without other axes.

No gradients here, but each is what the other's gradient needs, its weights read transposed
(`transpose_w`). With x_NK the rows that a dispatch keeps and g any answers' gradient:

    h, x_NK = dispatch(x, w, return_rows=True)
    dw = x_NK^T dh by groups; dx = combine(dh, w, ones, transpose_w=True)
    y = combine(h, w, weights)
    g_NF, dy_ND = dispatch(dy, w, transpose_w=True, return_rows=True)
    dh = weight_N g_NF; dw = h^T (weight_N dy_ND) by groups; the weight behind row n (its choice is
    routes.choice_N) gets sum(g_NF[n] h[n])

with several first products (gate and up), whose gradients `combine` adds: lists of h and w.

`axis` may be several axes. Experts over one axis whose columns a second one cuts run over both:
`route` is given each choice as one of every part of its expert (`cut`), weights are repeated as
often, side by side. A token then travels to every part of each of its experts, A P rows of P parts,
where a gather sends it once to each of the R - 1 other ranks, and as many float32 answers come
back: few choices over few parts suit this, not one expert's columns over a node.

Legend: R ranks of the axis, T tokens of a rank, A choices a token, E experts of a rank, N rows of a
rank's experts at most (static), K contracted, F and D columns.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from pallas_kernels import arguments, dispatch, tuned
from pallas_kernels.collective import clique
from pallas_kernels.collective.api import DTYPES, check_each, limits, ranks_of
from pallas_kernels.expert import fusions, reference, tables
from pallas_kernels.expert.dispatch_gemm import dispatch_gemm
from pallas_kernels.expert.fusions import COMBINE, DISPATCH
from pallas_kernels.expert.gemm_combine import gemm_combine
from pallas_kernels.expert.product import ExpertFusion, height
from pallas_kernels.expert.routes import Routes as Routes
from pallas_kernels.expert.routes import cut as cut
from pallas_kernels.expert.routes import route as route
from pallas_kernels.hopper.activations import ACTIVATIONS, Activation, Spec
from pallas_kernels.hopper.cards import resident_blocks
from pallas_kernels.hopper.memory import varying_as
from pallas_kernels.hopper.peers import Axis, RemotePeer

Array = jax.Array
Implementation = Literal["xla", "fused"]
MULTIPLE = {DISPATCH: 64, COMBINE: 128}  # of columns: what TMA and the sums' vectors take


def dispatch_grouped_matmul(
    x: Array,
    w: Array | Sequence[Array],
    routes: Routes,
    *,
    axis: Axis,
    activation: Activation | None = None,
    return_rows: bool = False,
    transpose_w: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """activation(x w) of every token and each of its experts, where the experts are.

    Args:
      x: (T, K) bf16|f16|f32, this rank's tokens. w: (E, K, F) of x's type, this rank's experts; or
        several, which share the dispatch (gate and up); (E, F, K) with transpose_w.
      routes: those of these tokens, with the same T and E.
      activation: None, 'gelu' (exact), 'gelu_tanh', 'silu'; in float32.
      return_rows: also return x_NK, the tokens as the experts' rows; past the rows that came
        ANYTHING with 'fused', NaN too, which a product by groups does not look at.
      implementation: 'fused': bf16 and f16, K and F multiples of 64, 2 to 8 ranks.
    Returns: h (N, F) in x's type, or a tuple of them; rows as in Routes, 0 past those that came.
      With return_rows (that, x_NK).
    Raises: ValueError for what breaks the above; NotImplementedError, with all reasons, where
      'fused' cannot run.
    """
    weights = tuple(w) if isinstance(w, Sequence) else (w,)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{DISPATCH}: activation={activation!r}; there are {ACTIVATIONS}")
    _check(DISPATCH, (x,) * len(weights), weights, routes, transpose_w)
    ranks_of(DISPATCH, axis)
    if x.shape[0] != routes.dest_TA.shape[0]:
        raise ValueError(f"{DISPATCH}: x has {x.shape[0]} tokens, routes {len(routes.dest_TA)}")
    if _choose(DISPATCH, implementation, axis, (x,), weights, routes, transpose_w) == "fused":
        spec = Spec(activation, x.dtype.name)
        ys, x_NK = fused_dispatch(x, weights, routes, axis=axis, spec=spec, turned=transpose_w)
    else:
        x, weights, routes = dispatch.alike((x, weights, routes))
        ys, x_NK = reference.dispatch_grouped_matmul(
            x, weights, routes, axis, activation, transpose_w
        )
    products = ys if isinstance(w, Sequence) else ys[0]
    return (products, x_NK) if return_rows else products


def grouped_matmul_combine(
    h: Array | Sequence[Array],
    w: Array | Sequence[Array],
    routes: Routes,
    weights: Array,
    *,
    axis: Axis,
    acc_dtype: Any = jnp.float32,
    transpose_w: bool = False,
    implementation: Implementation | None = None,
) -> Array:
    """Returns for every token the sum over its choices of weight times answer (a row's h w).

    Args:
      h: (N, F) bf16|f16|f32, rows as in Routes; what lies past those that came does not matter.
        w: (E, F, D) of h's type; (E, D, F) with transpose_w. Or as many of both, whose products are
        added: the gradient of several first products.
      weights: float32 (T, A), any sign; of choices that go nowhere they do not matter.
      acc_dtype: bf16|f16|f32, in which answers cross ranks; bf16 halves those bytes and loses
        bits.
      implementation: 'fused': as in dispatch_grouped_matmul, but D a multiple of 128. The same bits
        in every run.
    Returns: y (T, D) in h's type, weighted and added in float32; 0 for a token without a choice.
    Raises: as dispatch_grouped_matmul.
    """
    hs, ws = (tuple(a) if isinstance(a, Sequence) else (a,) for a in (h, w))
    _check(COMBINE, hs, ws, routes, transpose_w)
    ranks_of(COMBINE, axis)
    acc = arguments.dtype_name(COMBINE, "acc_dtype", acc_dtype, DTYPES)
    arguments.check_arrays(COMBINE, weights=weights)
    if hs[0].shape[0] != routes.rows:
        raise ValueError(f"{COMBINE}: h has {hs[0].shape[0]} rows, routes {routes.rows}")
    if weights.dtype != jnp.float32 or weights.shape != routes.dest_TA.shape:
        raise ValueError(
            f"{COMBINE}: weights {weights.dtype}{weights.shape} must be float32 "
            f"{routes.dest_TA.shape}, as the routes' choices"
        )
    if _choose(COMBINE, implementation, axis, hs, ws, routes, transpose_w) == "fused":
        return fused_combine(hs, ws, routes, weights, axis=axis, acc=acc, turned=transpose_w)
    hs, ws, routes, weights = dispatch.alike((hs, ws, routes, weights))
    return reference.grouped_matmul_combine(hs, ws, routes, weights, axis, acc, transpose_w)


def reasons(
    op: str,
    contracted: Sequence[int],
    widths: Sequence[int],
    ranks: int,
    dtype: Any,
    mesh: AbstractMesh | None = None,
) -> tuple[str, ...]:
    """Returns the reasons why the kernel of `op` cannot run; none: it can.

    op: DISPATCH or COMBINE. contracted: K of each x or h. widths: columns of each w. mesh: what the
    program is for; None: the one that it is traced under.
    """
    return limits(MULTIPLE[op], contracted, widths, ranks, dtype, mesh)


def _choose(
    op: str,
    implementation: str | None,
    axis: Axis,
    xs: tuple,
    ws: tuple,
    routes: Routes,
    turned: bool,
) -> str:
    contracted, widths = [x.shape[1] for x in xs], [w.shape[2 - turned] for w in ws]
    why = reasons(op, contracted, widths, routes.ranks, xs[0].dtype)
    why += () if routes.rows else ("finds no rows",)
    if implementation is None:
        axes = (axis,) if isinstance(axis, str) else axis
        why += clique.concurrent(jax.sharding.get_abstract_mesh().shape, axes)
    row = tuned.find(op, _key(op, routes, sum(contracted), sum(widths)))
    return dispatch.choose_fused(op, implementation, why, row)


def _check(op: str, xs: tuple, weights: tuple, routes: Routes, turned: bool) -> None:
    if not isinstance(routes, Routes):
        raise ValueError(f"{op}: routes must be what route() returned, got {type(routes).__name__}")
    check_each(op, **{"x" if op == DISPATCH else "h": xs}, w=weights)
    if not weights or len(xs) != len(weights):
        raise ValueError(f"{op}: {len(xs)} rows, {len(weights)} weights; as many of each")
    like = xs[0]
    for x, w in zip(xs, weights, strict=True):
        if x.dtype.name not in DTYPES or x.ndim != 2 or x.dtype != like.dtype:
            raise ValueError(f"{op}: {x.dtype}{x.shape} must be (rows, K), all of one of {DTYPES}")
        E, K, N = (
            (w.shape[0], *(w.shape[:0:-1] if turned else w.shape[1:]))
            if w.ndim == 3
            else (None, None, None)
        )
        if (E, K) != (routes.experts, x.shape[1]) or w.dtype != x.dtype:
            form = f"N, {x.shape[1]}" if turned else f"{x.shape[1]}, N"
            raise ValueError(
                f"{op}: w {w.dtype}{w.shape} must be ({routes.experts}, {form}) of {x.dtype}"
            )
        if op == COMBINE and N != weights[0].shape[2 - turned]:
            raise ValueError(f"{op}: w {w.shape} and {weights[0].shape} must have the same columns")


# ---- the kernels' arrays


def _key(op: str, routes: Routes, K: int, N: int) -> tuned.Key:
    choices = routes.expert_TA.size
    return fusions.key(op, routes.ranks, choices, routes.experts, K, N)


def _fusion(op: str, routes: Routes, K: int, widths: list[int], out_dtype: Any) -> ExpertFusion:
    """Returns the fusion of the nearest row of a table, else the heuristic's."""
    if tile := tuned.tile(tuned.find(op, _key(op, routes, K, sum(widths)))):
        return fusions.load(tile)
    choices = routes.expert_TA.size
    return fusions.heuristic(
        op, routes.ranks, choices, routes.experts, K, widths, out_dtype, resident_blocks()
    )


def _page(tree: Any) -> Any:
    """Returns arrays as the one page of a rank."""
    return jax.tree.map(lambda a: a[None], tree)


def fused_dispatch(x, weights, routes, *, axis, spec, turned=False):
    """`dispatch_grouped_matmul` by the kernel; the caller has checked and chosen.

    Returns: (h of all weights, x_NK).
    """
    x, weights, routes = dispatch.alike((x, weights, routes))
    widths = [w.shape[2 - turned] for w in weights]
    fusion = _fusion(DISPATCH, routes, x.shape[1], widths, x.dtype)
    tile, chunk = fusion.tile, fusion.chunk
    work = tables.dispatch(
        routes, chunk=chunk, block=tile.block_m * tile.cluster, staged=fusion.rotated
    )
    ys, rows = dispatch_gemm(
        *_page((x, weights, work)),
        rows=routes.rows,
        flags=tables.flags(routes, chunk),
        peers=RemotePeer(routes.ranks, axis),
        fusion=fusion,
        spec=spec,
        turned=turned,
        blocks=resident_blocks(),
    )
    return varying_as(x, (tuple(y[0] for y in ys), rows[0, : routes.rows]))


def fused_combine(hs, ws, routes, weights, *, axis, acc, turned=False):
    """`grouped_matmul_combine` by the kernel; the caller has checked and chosen."""
    hs, ws, routes, weights = dispatch.alike((hs, ws, routes, weights))
    widths, K = [ws[0].shape[2 - turned]], sum(h.shape[1] for h in hs)
    fusion = _fusion(COMBINE, routes, K, widths, acc)
    work = tables.combine(
        routes, chunk=fusion.chunk, block=fusion.tile.block_m * fusion.tile.cluster
    )
    below = height(routes.rows, fusion.tile) - routes.rows
    hs = tuple(jnp.pad(h, ((0, below), (0, 0))) for h in hs)
    y, _ = gemm_combine(
        *_page((hs, ws, work, tables.places(routes), weights)),
        peers=RemotePeer(routes.ranks, axis),
        fusion=fusion,
        spec=Spec(None, acc),
        turned=turned,
        blocks=resident_blocks(),
    )
    return varying_as(hs[0], y[0])
