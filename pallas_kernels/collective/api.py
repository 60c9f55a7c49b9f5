"""Products with their collective inside, for code inside a shard_map over `axis`.

Flux (arXiv 2406.06858): one kernel in which tiles wait for the rows that they need (all-gather), or
rows leave when their tiles are done (reduce-scatter, all-reduce). No gradients here: a caller makes
the rule, as the backward pass of each is made of the others.

'fused' is the Mosaic GPU kernel, for one node of Hopper GPUs; 'xla' plain collectives around whole
products, on any device, the specification. `None` picks the kernel only if a row of
pallas_kernels/tuned that was measured over a real link says so, on a mesh without other axes. No
other communication may run at the same time as the kernel (clique.py): a caller that requests
'fused' must see to that.

Legend: R ranks of the axis, m rows of all ranks, K contracted, N columns. Leading dimensions are
rows too, which every rank has for itself.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh

from pallas_kernels import arguments, dispatch, tuned
from pallas_kernels.collective import clique, fusions, reference
from pallas_kernels.collective.all_gather_gemm import all_gather_gemm
from pallas_kernels.collective.gemm_all_reduce import gemm_all_reduce
from pallas_kernels.collective.gemm_reduce_scatter import gemm_reduce_scatter
from pallas_kernels.hopper import fused
from pallas_kernels.hopper.activations import ACTIVATIONS, Activation, Spec
from pallas_kernels.hopper.cards import resident_blocks
from pallas_kernels.hopper.memory import varying_as
from pallas_kernels.hopper.peers import RemotePeer

Array = jax.Array
Implementation = Literal["xla", "fused"]
DTYPES = ("bfloat16", "float16", "float32")
GATHER, SCATTER, REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
MULTIPLE = {GATHER: 64, SCATTER: 128, REDUCE: 128}  # of N: what TMA and the sums' vectors take


def all_gather_matmul(
    x: Array,
    w: Array | Sequence[Array],
    *,
    axis: str,
    bias: Array | Sequence[Array | None] | None = None,
    activation: Activation | None = None,
    return_gathered: bool = False,
    transpose_w: bool = False,
    implementation: Implementation | None = None,
) -> Any:
    """activation(all_gather(x) w + bias), for one weight or for several that share the gather.

    Args:
      x: (..., m/R, K) bf16|f16|f32, this rank's rows. w: (K, N) of x's type, or several; (N, K)
        with transpose_w, which spares the copy that w.T would be.
      bias: (N,), any floating type; for several weights one or None each.
      activation: None, 'gelu' (exact), 'gelu_tanh', 'silu'; in float32.
      return_gathered: also return x of all ranks, (..., m, K).
      implementation: 'fused': bf16 and f16, K and N multiples of 64, 2 to 8 ranks; m/R that is a
        multiple of 8, at least the tile's rows, and no leading dimensions spare copies.
    Returns: (..., m, N) in x's type, or a tuple of them; with return_gathered (that, gathered x).
    Raises: ValueError for what breaks the above; NotImplementedError, with all reasons, where
      'fused' cannot run.
    """
    weights = tuple(w) if isinstance(w, Sequence) else (w,)
    biases = tuple(bias) if isinstance(bias, Sequence) else (bias,) * len(weights)
    if activation not in ACTIVATIONS:
        raise ValueError(f"{GATHER}: activation={activation!r}; there are {ACTIVATIONS}")
    ranks_of(GATHER, axis)
    _check(GATHER, (x,) * len(weights), weights, biases, transpose_w)
    rows, widths = math.prod(x.shape[:-1]), [w.shape[1 - transpose_w] for w in weights]
    if _choose(GATHER, implementation, axis, rows, (x,), widths) == "fused":
        spec = Spec(activation, x.dtype.name)
        static = {"spec": spec, "keep": return_gathered, "turned": transpose_w}
        ys, gathered = fused_gather(x, weights, biases, axis=axis, **static)
    else:
        weights = _upright(weights, transpose_w)
        ys, gathered = reference.all_gather_matmul(x, weights, biases, axis, activation)
    products = ys if isinstance(w, Sequence) else ys[0]
    return (products, gathered) if return_gathered else products


def matmul_reduce_scatter(
    x: Array | Sequence[Array],
    w: Array | Sequence[Array],
    *,
    axis: str,
    bias: Array | None = None,
    residual: Array | None = None,
    acc_dtype: Any = jnp.float32,
    transpose_w: bool = False,
    implementation: Implementation | None = None,
) -> Array:
    """reduce_scatter(x w) + bias + residual, the rows of this rank.

    Args:
      x: (..., m, K) bf16|f16|f32, R divides m. w: (K, N) of x's type, or (N, K) with transpose_w.
        Or as many of both, whose products are added and share the scatter.
      bias: (N,), any floating type, the same on all ranks; added once. residual: (..., m/R, N) of
        x's type.
      acc_dtype: the type in which partial sums cross ranks; bfloat16 halves those bytes and loses
        bits.
      implementation: 'fused': as in all_gather_matmul, but N a multiple of 128. The same bits in
        every run.
    Returns: (..., m/R, N) in x's type, summed and added in float32.
    Raises: as all_gather_matmul.
    """
    R = ranks_of(SCATTER, axis)
    acc = arguments.dtype_name(SCATTER, "acc_dtype", acc_dtype, DTYPES)
    xs, ws = ((tuple(a) if isinstance(a, Sequence) else (a,)) for a in (x, w))
    _check(SCATTER, xs, ws, (bias,) * len(ws), transpose_w, residual)
    m = xs[0].shape[-2]
    if m % R:
        raise ValueError(
            f"{SCATTER}: x has {m} rows, which the {R} ranks of {axis!r} must divide; nearest: "
            f"{m // R * R}, {m // R * R + R}"
        )
    rows, widths = math.prod(xs[0].shape[:-1]) // R, [ws[0].shape[1 - transpose_w]]
    _check_residual(SCATTER, residual, (*xs[0].shape[:-2], m // R, *widths))
    if _choose(SCATTER, implementation, axis, rows, xs, widths) == "fused":
        static = {"axis": axis, "acc": acc, "turned": transpose_w}
        return fused_scatter(xs, ws, bias, residual, **static)
    ws = _upright(ws, transpose_w)
    return reference.matmul_reduce_scatter(xs, ws, bias, residual, axis, acc)


def matmul_all_reduce(
    x: Array,
    w: Array,
    *,
    axis: str,
    bias: Array | None = None,
    residual: Array | None = None,
    acc_dtype: Any = jnp.float32,
    transpose_w: bool = False,
    implementation: Implementation | None = None,
) -> Array:
    """all_reduce(x w) + bias + residual, for the few rows of decoding; the same on every rank.

    Args: as matmul_reduce_scatter, for one pair and any m; residual: (..., m, N), the same on all
      ranks.
    Returns: (..., m, N) in x's type; the same bits on every rank and in every run with 'fused'.
    Raises: as all_gather_matmul.
    """
    ranks_of(REDUCE, axis)
    acc = arguments.dtype_name(REDUCE, "acc_dtype", acc_dtype, DTYPES)
    _check(REDUCE, (x,), (w,), (bias,), transpose_w, residual)
    rows, widths = math.prod(x.shape[:-1]), [w.shape[1 - transpose_w]]
    _check_residual(REDUCE, residual, (*x.shape[:-1], *widths))
    if _choose(REDUCE, implementation, axis, rows, (x,), widths) == "fused":
        static = {"axis": axis, "acc": acc, "turned": transpose_w}
        return fused_reduce(x, w, bias, residual, **static)
    (w,) = _upright((w,), transpose_w)
    return reference.matmul_all_reduce(x, w, bias, residual, axis, acc)


def ranks_of(op: str, axis: str | tuple[str, ...]) -> int:
    """Returns the ranks of the axis.

    Raises: ValueError outside a shard_map over it.
    """
    try:
        return lax.axis_size(axis)
    except NameError as error:
        names = jax.sharding.get_abstract_mesh().manual_axes
        raise ValueError(
            f"{op}: axis={axis!r} must be an axis of the jax.shard_map around this call; there "
            f"{'are ' + ', '.join(map(repr, names)) if names else 'is none'}"
        ) from error


def check_each(op: str, **groups: Sequence[Any]) -> None:
    """Refuses members of groups that are neither arrays nor None.

    Raises: ValueError.
    """
    for name, members in groups.items():
        for member in members:
            arguments.check_arrays(op, **{name: member})


def reasons(
    op: str,
    contracted: Sequence[int],
    widths: Sequence[int],
    ranks: int,
    dtype: Any,
    mesh: AbstractMesh | None = None,
) -> tuple[str, ...]:
    """Returns the reasons why the kernel of `op` cannot run; none: it can.

    op: 'all_gather_matmul', 'matmul_reduce_scatter', 'matmul_all_reduce'. contracted: K of each x.
    widths: N of each w. mesh: the mesh that the program is for; None: the one that it is traced
      under.
    """
    return limits(MULTIPLE[op], contracted, widths, ranks, dtype, mesh)


def device_reasons(device: Any) -> tuple[str, ...]:
    """Returns the reasons why no fused kernel can run on a mesh's device, whatever the shape.

    device: jax.sharding.AbstractDevice or jax.Device; None: this process's.
    """
    device = device or jax.local_devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return (f"needs Hopper GPUs, found {device.platform}",)
    kind = device.device_kind
    return () if dispatch.is_hopper(kind) else (f"{dispatch.NEEDS}, found {kind}",)


def limits(
    multiple: int,
    contracted: Sequence[int],
    widths: Sequence[int],
    ranks: int,
    dtype: Any,
    mesh: AbstractMesh | None = None,
) -> tuple[str, ...]:
    """Returns `reasons` of any fused kernel; the columns of w must be a multiple of `multiple`."""
    mesh = mesh or jax.sharding.get_abstract_mesh()
    missing = list(device_reasons(mesh.abstract_device))
    if jnp.dtype(dtype).name not in DTYPES[:2]:
        missing.append(f"needs bfloat16 or float16, found {jnp.dtype(dtype).name}")
    if not 2 <= ranks <= clique.NODE:
        missing.append(f"needs 2 to {clique.NODE} ranks, those of a node, found {ranks}")
    else:
        missing += clique.out_of_reach(mesh.shape)
    missing += [
        f"needs a multiple of 64 columns of x, found {K}" for K in contracted if K < 64 or K % 64
    ]
    missing += [
        f"needs a multiple of {multiple} columns of w, found {N}"
        for N in widths
        if N < multiple or N % multiple
    ]
    return tuple(missing)


def key(op: str, ranks: int, rows: int, K: int, N: int) -> tuned.Key:
    """Returns the key of a table's row; rows: one rank's x (gather) or result (scatter, reduce)."""
    return {"ranks": ranks, "rows": rows, "K": K, "N": N}


def _choose(
    op: str, implementation: str | None, axis: str, rows: int, xs: tuple, widths: Sequence[int]
) -> str:
    ranks, contracted = lax.axis_size(axis), [x.shape[-1] for x in xs]
    why = reasons(op, contracted, widths, ranks, xs[0].dtype) + (() if rows else ("finds no rows",))
    row = tuned.find(op, key(op, ranks, rows, sum(contracted), sum(widths)))
    if implementation is None:
        why += clique.concurrent(jax.sharding.get_abstract_mesh().shape, (axis,))
    return dispatch.choose_fused(op, implementation, why, row)


def _check(
    op: str, xs: tuple, weights: tuple, biases: tuple, turned: bool, residual: Array | None = None
) -> None:
    if not weights or not len(xs) == len(weights) == len(biases):
        raise ValueError(
            f"{op}: {len(xs)} x, {len(weights)} weights, {len(biases)} biases; as many of each"
        )
    check_each(op, x=xs, w=weights, bias=biases, residual=(residual,))
    like = xs[0]
    if like.dtype.name not in DTYPES or like.ndim < 2:
        raise ValueError(f"{op}: x {like.dtype}{like.shape} must be (..., rows, K), of {DTYPES}")
    for x, w, bias in zip(xs, weights, biases, strict=True):
        if (x.dtype, x.shape[:-1]) != (like.dtype, like.shape[:-1]):
            raise ValueError(f"{op}: x {x.dtype}{x.shape} and {like.dtype}{like.shape} are unlike")
        K, N = (w.shape[::-1] if turned else w.shape) if w.ndim == 2 else (None, None)
        if K != x.shape[-1] or w.dtype != x.dtype:
            form = f"(N, {x.shape[-1]})" if turned else f"({x.shape[-1]}, N)"
            raise ValueError(f"{op}: w {w.dtype}{w.shape} must be {form} in x's type, {x.dtype}")
        if op == SCATTER and w.shape[1 - turned] != weights[0].shape[1 - turned]:
            raise ValueError(f"{op}: w {w.shape} and {weights[0].shape} must have the same N")
        if bias is not None and (
            bias.shape != (N,) or not jnp.issubdtype(bias.dtype, jnp.floating)
        ):
            raise ValueError(
                f"{op}: bias {bias.dtype}{bias.shape} must be floating, ({N},): w's columns"
            )
    if residual is not None and residual.dtype != like.dtype:
        raise ValueError(f"{op}: residual {residual.dtype} must be of x's type, {like.dtype}")


def _check_residual(op: str, residual: Array | None, shape: tuple[int, ...]) -> None:
    if residual is not None and residual.shape != shape:
        raise ValueError(f"{op}: residual {residual.shape} must be like the result, {shape}")


def _upright(weights: tuple, turned: bool) -> tuple:
    return tuple(w.T for w in weights) if turned else weights


# ---- the kernels' arrays: pages of whole tiles


def _fusion(
    op: str, ranks: int, rows: int, K: int, widths: list[int], out_dtype: Any
) -> fused.Fusion:
    """Returns the fusion of the nearest row of a table, else the heuristic's."""
    if tile := tuned.tile(tuned.find(op, key(op, ranks, rows, K, sum(widths)))):
        return fusions.load(tile)
    return fusions.heuristic(op, ranks, rows, K, widths, out_dtype, resident_blocks())


def _pages(x: Array, pages: int, height: int) -> Array:
    """(rows of all pages, columns) -> (pages, height, columns), zeros below."""
    x = x.reshape(pages, -1, x.shape[-1])
    return jnp.pad(x, ((0, 0), (0, height - x.shape[1]), (0, 0)))


def _padded(rows: int, fusion: fused.Fusion) -> tuple[int, int]:
    """Returns (live rows of a page as the kernels count them, its height)."""
    live = -(-rows // 8) * 8
    return live, max(live, fusion.tile.block_m)


def fused_gather(x, weights, biases, *, axis, spec, keep, turned=False):
    """`all_gather_matmul` by the kernel; the caller has checked and chosen.

    Returns: (products of all weights, gathered x, of use with `keep` only).
    """
    x, weights, biases = dispatch.alike((x, weights, biases))
    R, K, lead = lax.axis_size(axis), x.shape[-1], x.shape[:-2]
    rows = x.size // K
    widths = [w.shape[1 - turned] for w in weights]
    fusion = _fusion(GATHER, R, rows, K, widths, x.dtype)
    live, height = _padded(rows, fusion)
    bias = None
    if any(b is not None for b in biases):
        padded_widths = [-(-N // fusion.tile.block_n) * fusion.tile.block_n for N in widths]
        filled = [
            jnp.zeros(N, jnp.float32) if b is None else b.astype(jnp.float32)
            for N, b in zip(widths, biases, strict=True)
        ]
        padded = [jnp.pad(b, (0, n - b.size)) for b, n in zip(filled, padded_widths, strict=True)]
        bias = jnp.concatenate(padded)[None]
    ys, gathered = all_gather_gemm(
        _pages(x, 1, height),
        tuple(w[None] for w in weights),
        bias,
        rows=live,
        peers=RemotePeer(R, axis),
        fusion=fusion,
        spec=spec,
        keep=keep,
        turned=turned,
        blocks=resident_blocks(),
    )

    def unpage(y: Array) -> Array:
        y = y[:, :rows].reshape(R, *lead, x.shape[-2], y.shape[-1])
        return jnp.moveaxis(y, 0, -3).reshape(*lead, R * x.shape[-2], y.shape[-1])

    return varying_as(x, (tuple(map(unpage, ys)), unpage(gathered)))


def fused_scatter(xs, ws, bias, residual, *, axis, acc, turned=False):
    """`matmul_reduce_scatter` by the kernel; the caller has checked and chosen."""
    xs, ws, bias, residual = dispatch.alike((xs, ws, bias, residual))
    R, (*lead, m, _), N = lax.axis_size(axis), xs[0].shape, ws[0].shape[1 - turned]
    rows = xs[0].size // xs[0].shape[-1] // R
    fusion = _fusion(SCATTER, R, rows, sum(x.shape[-1] for x in xs), [N], acc)
    live, height = _padded(rows, fusion)
    owners = (jnp.moveaxis(x.reshape(*lead, R, m // R, x.shape[-1]), -3, 0) for x in xs)
    y, *_ = gemm_reduce_scatter(
        tuple(_pages(x, R, height) for x in owners),
        tuple(w[None] for w in ws),
        None if bias is None else bias.astype(jnp.float32)[None],
        None if residual is None else _pages(residual, 1, height),
        rows=live,
        peers=RemotePeer(R, axis),
        fusion=fusion,
        spec=Spec(None, acc),
        turned=turned,
        blocks=resident_blocks(),
    )
    return varying_as(xs[0], y[0, :rows].reshape(*lead, m // R, N))


def fused_reduce(x, w, bias, residual, *, axis, acc, turned=False):
    """`matmul_all_reduce` by the kernel; the caller has checked and chosen."""
    x, w, bias, residual = dispatch.alike((x, w, bias, residual))
    R, K, N = lax.axis_size(axis), x.shape[-1], w.shape[1 - turned]
    rows = x.size // K
    fusion = _fusion(REDUCE, R, rows, K, [N], acc)
    live, height = _padded(rows, fusion)
    y = gemm_all_reduce(
        _pages(x, 1, height),
        w[None],
        None if bias is None else bias.astype(jnp.float32)[None],
        None if residual is None else _pages(residual, 1, height),
        rows=live,
        peers=RemotePeer(R, axis),
        fusion=fusion,
        spec=Spec(None, acc),
        turned=turned,
        blocks=resident_blocks(),
    )
    y = y[0, :rows].reshape(*x.shape[:-1], N)
    # The same on all ranks, which is what a kernel's result is taken for unless it is cast.
    others = tuple(a for a in jax.typeof(x).mat.varying if a != axis)
    return lax.pcast(y, others, to="varying") if others else y
