"""A product with a weight of which only tiles are kept, differentiable.

Tile-Wise Sparsity (arXiv 2008.13006): a pattern that is regular inside a tile, so that dense tensor
cores multiply it, and irregular over the network, so that importance decides what stays.

Legend: M rows (leading dimensions, written x), K contracted, N columns, P packed columns, S slots.
Not here: how a mask is chosen; second derivatives; 2:4 sparsity inside tiles (TVW, arXiv
2402.10876), whose instructions Pallas has for Blackwell only.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, dispatch, tuned
from pallas_kernels.hopper.activations import ACTIVATIONS, Activation, Spec, activate
from pallas_kernels.hopper.cards import SMS
from pallas_kernels.hopper.tiles import Tile
from pallas_kernels.tile_sparse import hopper, hopper_weights, reference
from pallas_kernels.tile_sparse.format import Pattern, TileSparse

Array = jax.Array
DTYPES = ("bfloat16", "float16", "float32")
OP = hopper.OP


def tile_sparse_matmul(
    x_MK: Array,
    weight: TileSparse,
    *,
    bias: Array | None = None,
    activation: Activation | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Array:
    """activation(x w + bias), with only the weights that the mask of w keeps.

    Summed in float32, rounded once. The backward pass keeps x, the values and, with an activation,
    x w + bias in x's type. Its sums have one fixed order: gradients are the same each time.

    Args:
      x_MK: bf16|f16|f32 (..., K). weight: values of the same type. bias: floating (N,).
      activation: 'gelu' (exact), 'gelu_tanh', 'silu' or None.
      implementation: see `dispatch`. 'hopper' takes bf16 and f16, tiles of 64, 128 or 256
        columns and chunks of 8, 16, 32 or 64 rows. Under a mesh inside a shard_map only.
    Returns: y (..., N) in x's type; differentiable in x, bias and weight.values, whose gradient is
      exactly 0 where the mask does not keep. A residual (TEW) is one more dense product.
    Raises: ValueError for shapes and types that break the above; NotImplementedError with all
      reasons where the implementation asked for cannot run.
    """
    arguments.check_arrays(OP, x=x_MK, bias=bias)
    _check(x_MK, weight, bias, activation)
    static = _static(x_MK, weight, activation, implementation)
    with arguments.reverse_only(OP):
        x_MK, values, bias, pattern = dispatch.alike((x_MK, weight.values, bias, weight.pattern))
        weight = TileSparse(values, pattern)
        if weight.capacity.residual:
            z_xN = pattern.unpack_columns(_packed(x_MK, weight.slots, None, pattern, static))
            z_xN += jnp.matmul(x_MK, weight.residual_dense(), preferred_element_type=jnp.float32)
            return _finish(z_xN, bias, activation).astype(x_MK.dtype)
        bias_P = None if bias is None else pattern.pack_columns(bias.astype(jnp.float32))
        y_xN = pattern.unpack_columns(_packed(x_MK, values, bias_P, pattern, static))
        if not pattern.gathered or bias is None:
            return y_xN
        # Pruned columns are in no tile.
        empty_xN = _finish(jnp.zeros((1,) * x_MK.ndim), bias, activation).astype(x_MK.dtype)
        pruned_xN = (pattern.places == pattern.columns.size).reshape(empty_xN.shape)
        return jnp.where(pruned_xN, empty_xN, y_xN)


def values_of(tree: Any) -> Any:
    """Returns a tree with the values in the place of each TileSparse.

    jax.grad and optimizers take it; they refuse the integers of a pattern:

        grads = jax.grad(lambda values: loss(with_values(params, values)))(values_of(params))
    """
    return jax.tree.map(lambda x: x.values if _is_sparse(x) else x, tree, is_leaf=_is_sparse)


def with_values(tree: Any, values: Any) -> Any:
    """Returns the tree with other values: `values` is as values_of returns it.

    Raises: ValueError where the shape of a TileSparse's values differs.
    """
    return jax.tree.map(
        lambda x, new: x.replace(values=new) if _is_sparse(x) else new,
        tree,
        values,
        is_leaf=_is_sparse,
    )


def _is_sparse(x: Any) -> bool:
    return isinstance(x, TileSparse)


def _finish(z_xN: Array, bias_N: Array | None, activation: Activation | None) -> Array:
    """activation(z + bias), in float32."""
    if bias_N is not None:
        z_xN = z_xN + bias_N.astype(jnp.float32).reshape((1,) * (z_xN.ndim - 1) + bias_N.shape)
    return activate(activation, z_xN)


@dataclasses.dataclass(frozen=True)
class Static:
    """What is static: how the passes run, the mathematics, the tiles of y, dx and dw."""

    forward: str
    backward: str
    activation: Activation | None
    out_dtype: str
    tile: hopper.Tile
    tile_dx: hopper.Tile
    tile_dw: hopper_weights.Tile


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _packed(x_xK: Array, slots_Skn: Array, bias_P, pattern: Pattern, static: Static) -> Array:
    return _product(x_xK, slots_Skn, bias_P, pattern, static, keep=False)[0]


def _product(x_xK, slots_Skn, bias_P, pattern, static, keep):
    spec = Spec(static.activation, static.out_dtype, keep)
    shape = hopper.shape_of(pattern, False)
    tile = hopper.fitted(static.tile, shape, spec)
    return dispatch.run(
        static.forward,
        functools.partial(hopper.forward, spec=spec, tile=tile),
        functools.partial(reference.forward, spec=spec),
        x_xK,
        slots_Skn,
        bias_P,
        pattern,
        op=OP,
    )


def _forward(x_xK, slots_Skn, bias_P, pattern, static):
    keep = static.activation is not None
    y_xP, z_xP = _product(x_xK, slots_Skn, bias_P, pattern, static, keep)
    return y_xP, (x_xK, slots_Skn, bias_P is not None, z_xP, pattern)


def hopper_gradients(
    x_xK: jax.Array,
    slots_Skn: jax.Array,
    dz_xP: jax.Array,
    pattern: Pattern,
    *,
    tile_dx: Tile,
    tile_dw: Tile,
    interpret: bool = False,
    blocks: int = SMS,
) -> tuple[jax.Array, jax.Array]:
    """Returns what reference.backward does, by both kernels, for bf16 and f16.

    blocks: thread blocks, one an SM. A result of 8 or 16 columns is too narrow for wgmma: with such
    chunks dx is one dense product.
    """
    static = {"interpret": interpret, "blocks": blocks}
    if pattern.together > 1:
        dx_xK = reference.gradient(dz_xP, slots_Skn, pattern)
    else:
        dx_xK = hopper.gradient(dz_xP, slots_Skn, pattern, tile=tile_dx, **static)
    return dx_xK, hopper_weights.weights(x_xK, dz_xP, pattern, tile=tile_dw, **static)


def _backward(static, saved, dy_xP):
    x_xK, slots_Skn, biased, z_xP, pattern = saved
    dz_xP = dy_xP.astype(jnp.float32)
    if z_xP is not None:
        slope = functools.partial(activate, static.activation)
        (dz_xP,) = jax.vjp(slope, z_xP.astype(jnp.float32))[1](dz_xP)
    dbias_P = dz_xP.sum(range(dz_xP.ndim - 1)) if biased else None
    dx_xK, dslots_Skn = dispatch.run(
        static.backward,
        functools.partial(hopper_gradients, tile_dx=static.tile_dx, tile_dw=static.tile_dw),
        reference.backward,
        x_xK,
        slots_Skn,
        dz_xP.astype(x_xK.dtype),
        pattern,
        op=OP,
    )
    return dx_xK, dslots_Skn, dbias_P, None


_packed.defvjp(_forward, _backward)


def key(dtype: Any, kind: str, activation: str | None, pattern: Pattern, M: int) -> tuned.Key:
    """Returns the key of a table's row. kind: 'forward', 'dx' (dz w^T) or 'dw' (x^T dz)."""
    words = {"dtype": jnp.dtype(dtype).name, "kind": kind, "activation": activation or "none"}
    words["format"] = f"{pattern.tile}x{pattern.chunk}"
    return words | {
        "M": M,
        "K": pattern.shape[0],
        "P": pattern.columns.size,
        "slots": pattern.chunks.size,
    }


def _static(
    x: Array, weight: TileSparse, activation: Activation | None, implementation: str | None
) -> Static:
    """Everything static, from shapes and types."""
    pattern, M = weight.pattern, x.size // max(x.shape[-1], 1)
    reasons = _reasons(x, pattern)
    out_dtype = "float32" if weight.capacity.residual else x.dtype.name
    if weight.capacity.residual:
        activation = None
    spec = Spec(activation, out_dtype, activation is not None)
    rows = [
        tuned.find(OP, key(x.dtype, kind, word, pattern, M))
        for kind, word in (("forward", activation), ("dx", None), ("dw", None))
    ]
    (C, T), S = pattern.grid, pattern.chunks.size
    if reasons:  # no tile fits what the kernels do not take
        tile = tile_dx = tile_dw = Tile(128, 128)
    else:
        of_y, of_dx = (hopper.shape_of(pattern, transpose) for transpose in (False, True))
        tile = _tile(rows[0], pattern) or hopper.heuristic(M, of_y, T, S, spec)
        plain = Spec(None, x.dtype.name)
        tile_dx = _tile(rows[1], pattern) or hopper.heuristic(M, of_dx, C, S, plain)
        tile_dw = _tile(rows[2], pattern) or hopper_weights.heuristic(M, pattern)
    forward, backward = (
        dispatch.choose(OP, implementation, reasons, measured)
        for measured in (rows[:1], rows[1 if pattern.together == 1 else 2 :])
    )
    return Static(forward, backward, activation, out_dtype, tile, tile_dx, tile_dw)


def _tile(row: dict | None, pattern: Pattern) -> Tile | None:
    """Returns the measured tile, None without one; its columns are the format's."""
    tile = tuned.tile(row)
    fields: dict[str, Any] = {"block_n": pattern.tile}
    return Tile(**(fields | tile)) if tile else None


def _reasons(x: Array, pattern: Pattern) -> list[str]:
    """Returns the reasons why the kernels cannot take these inputs."""
    reasons = []
    if x.dtype.name == "float32":
        reasons.append("needs bfloat16 or float16, found float32")
    if pattern.tile not in hopper.TILES:
        reasons.append(f"needs tiles of {hopper.TILES} columns, found {pattern.tile}")
    if pattern.chunk not in hopper.CHUNKS:
        reasons.append(f"needs chunks of {hopper.CHUNKS} rows, found {pattern.chunk}")
    sizes = x.size * pattern.columns.size * pattern.chunks.size
    if not sizes:
        reasons.append(f"needs something to compute, found x {x.shape}, weight {pattern.shape}")
    return reasons


def _check(x: Array, weight: TileSparse, bias: Array | None, activation: str | None) -> None:
    if not isinstance(weight, TileSparse):
        raise ValueError(
            f"{OP}: weight must be a TileSparse, got {type(weight).__name__}; "
            "TileSparse.from_dense(w, mask) makes one"
        )
    K, N = weight.shape
    if x.ndim < 1 or x.shape[-1] != K:
        raise ValueError(f"{OP}: x {x.shape} and weight {weight.shape} must be (..., K) and (K, N)")
    if x.dtype.name not in DTYPES or weight.dtype != x.dtype:
        raise ValueError(
            f"{OP}: x {x.dtype} and weight {weight.dtype} must have one type of {', '.join(DTYPES)}"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"{OP}: activation={activation!r}; there are {ACTIVATIONS}")
    if bias is not None and (bias.shape != (N,) or not jnp.issubdtype(bias.dtype, jnp.floating)):
        raise ValueError(
            f"{OP}: bias {bias.dtype}{bias.shape} must be floating, ({N},): the weight's columns"
        )
