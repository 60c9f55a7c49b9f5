"""One rank's part of a block, on local arrays: for code inside a shard_map over the whole mesh.

parallel/tensor.py puts a shard_map around each of these; parallel/local.py runs in one and calls
them. `up` and `down` are the two ends of a sublayer with their collective before or after the
products, or in them (`choose_overlap`). Weights are whole over the axes that share their gradient,
arrays or packed, in the inputs' type.

Legend: B rows, S positions, D model width, F any hidden width, V table rows.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from megajax.core.layout import Layout
from megajax.core.packed import PackedWeight
from megajax.layers import ops as ops_
from megajax.layers.mlp import MlpConfig
from megajax.layers.weight import Weight, any_packed, words_of
from megajax.parallel import collective_matmul
from megajax.parallel import overlap as overlap_
from megajax.parallel.collective_matmul import (
    GATHER,
    REDUCE,
    SCATTER,
    Static,
    run_gather,
    run_reduce,
    run_scatter,
)
from megajax.parallel.heads import share_inside
from megajax.parallel.overlap import Implementation, Overlap
from pallas_kernels.collective import reference as plain
from pallas_kernels.dispatch import alike

Array = jax.Array
TENSOR = "tensor"


def own(layout: Layout, w: nnx.Param) -> Weight:
    """Returns what this rank uses of a parameter that it stores."""
    return piece(share_inside(layout, words_of(w), w.get_value()))


def piece(w: Weight) -> Weight:
    """Returns a weight that is whole over the ZeRO axes as products take it."""
    return w.piece() if isinstance(w, PackedWeight) else w


def up(
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
    if any_packed(weights):
        ys = _ring_up(*alike((x_BSD, tuple(weights))))
    else:
        arrays: Any = weights
        flat = [w.reshape(w.shape[0], -1) for w in arrays]
        none = (None,) * len(flat)
        ys, _ = run_gather(x_BSD, tuple(flat), none, _static(implementation))
    return tuple(y.reshape(*y.shape[:-1], *w.shape[1:]) for y, w in zip(ys, weights, strict=True))


def down(
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
    if any_packed(weights):
        return _ring_down(*alike((tuple(xs), tuple(weights))))
    arrays: Any = weights
    flat_xs = tuple(x.reshape(*x.shape[:2], -1) for x in xs)
    flat_ws = tuple(w.reshape(-1, w.shape[-1]) for w in arrays)
    function = run_scatter if cut else run_reduce
    return function(flat_xs, flat_ws, None, None, _static(implementation))


def _static(implementation: Implementation) -> Static:
    """Sums cross ranks in float32, rings turn in one direction."""
    return Static(TENSOR, implementation, "float32", both_ways=False)


def add_up(y_BSD: Array, cut: bool) -> Array:
    """The sum over the tensor ranks: with a cut sequence, this rank's positions of it."""
    return plain.scatter(y_BSD, TENSOR) if cut else plain.total(y_BSD, TENSOR)


def rows(w_VD: Array, ids_BS: Array, axes: tuple[str, ...]) -> Array:
    """The rows of a table that `axes` cut: those that this device has, 0 for others."""
    row_BS = ids_BS - lax.axis_index(axes) * w_VD.shape[0] if axes else ids_BS
    here_BS = (row_BS >= 0) & (row_BS < w_VD.shape[0])
    return jnp.where(here_BS[..., None], w_VD[jnp.where(here_BS, row_BS, 0)], 0)


# ---- rings of weights that are no arrays: their own products, chunk by chunk


@jax.custom_vjp
def _ring_up(x_BSD: Array, weights: tuple[Weight, ...]) -> tuple[Array, ...]:
    return collective_matmul.all_gather(
        x_BSD, lambda x: _products(x, weights), TENSOR, both_ways=False
    )


def _ring_up_backward(saved: tuple, dys: tuple[Array, ...]) -> tuple:
    """Whole products, as of arrays (collective_vjp.py): dx is scattered beside dw."""
    x_BSD, weights = saved
    dx, dweights = jax.vjp(_products, plain.gather(x_BSD, TENSOR), weights)[1](dys)
    return plain.scatter(dx.astype(jnp.float32), TENSOR).astype(dx.dtype), dweights


_ring_up.defvjp(lambda x, weights: (_ring_up(x, weights), (x, weights)), _ring_up_backward)


@jax.custom_vjp
def _ring_down(xs: tuple[Array, ...], weights: tuple[Weight, ...]) -> Array:
    flat = tuple(x.reshape(*x.shape[:2], -1) for x in xs)
    work = lambda *xs: _sum(xs, weights).astype(jnp.float32)  # noqa: E731
    y_BSD = collective_matmul.reduce_scatter(flat, work, TENSOR, False, jnp.dtype("float32"))
    return y_BSD.astype(xs[0].dtype)


def _ring_down_backward(saved: tuple, dy_BSD: Array) -> tuple:
    xs, weights = saved
    return jax.vjp(_sum, xs, weights)[1](plain.gather(dy_BSD, TENSOR))


_ring_down.defvjp(lambda xs, weights: (_ring_down(xs, weights), (xs, weights)), _ring_down_backward)


def _products(x_BSD: Array, weights: tuple[Weight, ...]) -> tuple[Array, ...]:
    return tuple(ops_.matmul(x_BSD, w).reshape(*x_BSD.shape[:2], -1) for w in weights)


def _sum(xs: tuple[Array, ...], weights: tuple[Weight, ...]) -> Array:
    used = ((x.reshape(*x.shape[:2], *w.shape[:-1]), w) for x, w in zip(xs, weights, strict=True))
    terms = (ops_.matmul(x, w, contract=w.ndim - 1) for x, w in used)
    return functools.reduce(operator.add, terms)


# ---- which collective


def is_cut(layout: Layout) -> bool:
    """Whether tensor cuts the sequence of the residual stream; in decoding it does not."""
    return TENSOR in layout.rules.residual["seq"]


def choose_overlap(
    layout: Layout,
    wanted: Overlap,
    op: str,
    shape: overlap_.Shape,
    dtype: Any,
    matmul: Callable = ops_.matmul,
    weights: Sequence[Weight] = (),
) -> Implementation:
    """Returns how a product of this shape on one device brings its collective.

    'xla' is the plain path, where the collective is not part of the product. It is what 'auto'
    takes where a weight is packed: nothing is known of how long a packed product takes.
    Raises: NotImplementedError where what is wanted cannot run.
    """
    packed = any_packed(weights)
    R = layout.ways((TENSOR,))
    # What is not cut has nothing to gather, and too few rows to hide a ring's hops behind.
    alone = not is_cut(layout) and (op != REDUCE or wanted == "ring")
    if wanted == "xla" or R == 1 or alone:
        return "xla"
    if wanted == "auto" and (packed or matmul is not ops_.matmul):
        return "xla"
    if matmul is not ops_.matmul:
        raise NotImplementedError(
            f"overlap={wanted!r} knows plain products only, this block has its own matmul; use "
            "'auto' or 'xla' (--overlap=auto)"
        )
    if packed and wanted == "fused":
        raise NotImplementedError(
            f"overlap='fused': the kernel of {op} multiplies arrays, and a weight here is packed; "
            "use 'ring', 'xla' or 'auto' (--overlap=ring)"
        )
    implementation = None if wanted == "auto" else wanted
    mesh = layout.mesh.abstract_mesh
    return overlap_.choose(op, implementation, shape, TENSOR, dtype, mesh)


def explain_overlap(
    layout: Layout, wanted: Overlap, tokens: int, mlp: MlpConfig, dtype: str
) -> str:
    """Returns what an MLP's two products do, and why. tokens: of a whole batch of rows."""
    if wanted != "auto":
        return f"{wanted} (asked for)"
    R = layout.ways((TENSOR,))
    rows = tokens // layout.ways(layout.rules.act["batch"] + layout.rules.act["seq"])
    one, ups = mlp.hidden // R, 2 if mlp.activation == "swiglu" else 1
    mesh = layout.mesh.abstract_mesh
    found = (
        overlap_.best(op, (rows, mlp.width, (one,) * count), TENSOR, dtype, mesh)
        for op, count in ((GATHER, ups), (SCATTER, 1))
    )
    return ", ".join(
        f"MLP {end} {how} ({why})" for end, (how, why) in zip(("up", "down"), found, strict=True)
    )
