"""An expert layer's two products with the tokens' way in them, and their gradients.

One layer's two halves as COMET (arXiv 2502.19811) cuts it, so that each can hide its communication:
rows are sorted by source rank (expert_rows.py), sums cross ranks in float32 unless told otherwise.
The backward pass of one half is made of the other (expert_vjp.py). For code inside a shard_map over
the axes, checked or not, whatever other axes the mesh has.

Implementations: 'xla', plain collectives before or after whole grouped products; 'ring', rank by
rank (expert_ring.py); 'fused', one kernel a half (pallas_kernels/expert). None lets
expert_overlap.py choose.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from megajax.core.errors import UserError, did_you_mean
from megajax.parallel import expert_overlap, expert_rows, expert_vjp, overlap
from megajax.parallel.expert_overlap import COMBINE, DISPATCH
from megajax.parallel.expert_rows import Dispatch, Routing
from megajax.parallel.overlap import Implementation
from pallas_kernels.dispatch import alike
from pallas_kernels.hopper.activations import activate

Array = jax.Array
Activation = Literal["gelu", "gelu_tanh", "silu", "swiglu"]
ACTIVATIONS = (None, *get_args(Activation))  # the kernels' and 'swiglu', of two products


def dispatch_grouped_matmul(
    x: Array,
    w: Array | Sequence[Array],
    routing: Routing,
    *,
    expert_axis: str,
    tensor_axis: str | None = None,
    activation: Activation | None = None,
    capacity: int | None = None,
    implementation: Implementation | None = None,
    acc_dtype: Any = jnp.float32,
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
      implementation: 'xla', plain collectives around whole products; 'ring', rank by rank, a hop
        beside each rank's rows (expert_ring.py); 'fused', one kernel; None: chosen by shape and
        device.
      acc_dtype: in which a token's gradient crosses ranks; bfloat16 halves those bytes.
    Returns: (h, Dispatch). h: (rows, f) in x's type, a tuple for several weights without 'swiglu';
      rows = R t k, the worst case, at most E capacity, R the ranks of both axes. The rows of an
      expert lie together, sorted by the rank they came from, the own one first, then in rotation;
      past the splits h is 0 and its gradient goes nowhere, NaN too.
    Differentiable in x and w; a token's gradient is added up in acc_dtype and rounded once.
    Raises: UserError for what breaks the above; ValueError for an unknown implementation;
      NotImplementedError with the reason where the one asked for cannot run.
    """
    weights = tuple(w) if isinstance(w, Sequence) else (w,)
    _check_dispatch(x, weights, routing, activation, capacity)
    acc = overlap.sum_dtype(DISPATCH, acc_dtype)
    axes = (expert_axis, tensor_axis)
    if expert_axis == tensor_axis:
        raise UserError(
            f"expert_axis and tensor_axis must be two axes, found {axes}; nearest: None"
        )
    tokens = (x.shape[0], routing.expert_index.shape[1], x.shape[1])
    word = expert_overlap.choose(DISPATCH, implementation, tokens, weights, axes)
    products, dispatch = first_half(x, weights, routing, axes, word, acc, capacity)
    if activation == "swiglu":
        gate_NF, up_NF = (z.astype(jnp.float32) for z in products)
        return (activate("silu", gate_NF) * up_NF).astype(x.dtype), dispatch
    if activation is not None:
        products = tuple(activate(activation, z.astype(jnp.float32)) for z in products)
        products = tuple(z.astype(x.dtype) for z in products)
    return (products if isinstance(w, Sequence) else products[0]), dispatch


def grouped_matmul_combine(
    h: Array,
    w: Array,
    dispatch: Dispatch,
    *,
    weights: Array,
    implementation: Implementation | None = None,
    acc_dtype: Any = jnp.float32,
) -> Array:
    """Every token's weighted sum of its experts' answers: COMET's layer 1 (section 3).

    Args: h: (rows, f) as `dispatch_grouped_matmul` sorted them; what lies past the splits does not
      matter. w: (E, f, d) of h's type. dispatch: the one that came with h. weights: float32 (t, k).
      implementation: as in dispatch_grouped_matmul; only 'xla' takes the dispatch of 'xla', which
      may have sent tokens to those alone who need them. acc_dtype: in which sums cross ranks.
    Returns: y (t, d) in h's type for this rank's tokens; without a tensor_axis, the part of this
      rank's columns. Weights multiply answers in float32, in which choices and ranks are added up;
      only 'fused' does not round the answers to h's type before. Dropped choices, and those of no
      expert, add nothing.
    Differentiable in h, w and weights. The same bits in every run.
    Raises: as dispatch_grouped_matmul.
    """
    acc = overlap.sum_dtype(COMBINE, acc_dtype)
    rows, experts = dispatch.order_N.shape[0], dispatch.splits_RE.shape[1]
    if h.ndim != 2 or w.ndim != 3 or h.shape != (rows, w.shape[1]) or h.dtype != w.dtype:
        raise UserError(
            f"h {h.dtype}{h.shape} and w {w.dtype}{w.shape} must be (rows, f) and (E, f, d) of one "
            f"type with the {rows} rows of the dispatch"
        )
    if w.shape[0] != experts:
        raise UserError(f"w {w.shape} must be (E, f, d) of the {experts} experts of the dispatch")
    if weights.dtype != jnp.float32 or weights.shape != dispatch.choices:
        raise UserError(
            f"weights {weights.dtype}{weights.shape} must be float32 (t, k) = {dispatch.choices}"
        )
    if dispatch.lanes is not None and implementation in ("ring", "fused"):
        raise UserError(
            f"{COMBINE}: implementation={implementation!r} takes what a dispatch by 'ring' or "
            "'fused' gave; this one, by 'xla', sent its tokens in lanes"
        )
    tokens = (*dispatch.choices, w.shape[2])
    word = expert_overlap.choose(COMBINE, implementation, tokens, (w,), dispatch.axes)
    if dispatch.lanes is not None:
        word = "xla"
    return second_half(h, w, weights, dispatch, word, acc)


def first_half(
    x: Array,
    weights: tuple[Array, ...],
    routing: Routing,
    axes: tuple[str, str | None],
    implementation: Implementation,
    acc_dtype: str = "float32",
    capacity: int | None = None,
) -> tuple[tuple[Array, ...], Dispatch]:
    """`dispatch_grouped_matmul` without an activation; the caller has checked and chosen."""
    experts = weights[0].shape[0]
    dispatch = expert_rows.make_dispatch(
        routing.expert_index, experts, axes, capacity, implementation
    )
    static = expert_vjp.Static(implementation, acc_dtype)
    return expert_vjp.first_products(*alike((x, weights, dispatch)), static), dispatch


def second_half(
    h: Array,
    w: Array,
    weights: Array,
    dispatch: Dispatch,
    implementation: Implementation,
    acc_dtype: str = "float32",
) -> Array:
    """`grouped_matmul_combine`; the caller has checked and chosen."""
    static = expert_vjp.Static(implementation, acc_dtype)
    return expert_vjp.second_product(*alike((h, w, weights, dispatch)), static)


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
    if capacity is not None and (not isinstance(capacity, Integral) or capacity < 1):
        raise UserError(
            f"capacity={capacity} must be a whole number, at least 1, or None; nearest: "
            f"{max(1, round(capacity))}"
        )
