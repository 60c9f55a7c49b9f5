"""LayerNorm and RMSNorm of x + bias + residual in one pass, which may also unpack the result.

ByteTransformer (arXiv 2210.03052) section 3.2 fuses the sum with the norm for BERT, and the last
norm of a network with unpacking to padded rows; RMSNorm: arXiv 1910.07467.

Legend: x any leading dimensions, T packed tokens, D model width, B sequences, S padded length.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from pallas_kernels import arguments, dispatch, tuned
from pallas_kernels.norm import hopper, reference
from pallas_kernels.norm.reference import Spec
from pallas_kernels.packing import reference as packing
from pallas_kernels.packing.api import PackInfo, check_info

Array = jax.Array
KINDS = ("layer", "rms")
DTYPES = ("bfloat16", "float16", "float32")  # that the Hopper kernels take


def fused_layer_norm(
    x_xD: Array,
    *,
    residual: Array | None = None,
    bias: Array | None = None,
    scale: Array,
    offset: Array | None = None,
    kind: str = "layer",
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> tuple[Array, Array]:
    """norm(h) * scale + offset with h = x + bias + residual; statistics in float32 (float64 of it).

    'layer': (h - mean) / sqrt(variance + eps). 'rms': h / sqrt(mean(h ** 2) + eps).

    Args: x_xD, residual: one floating type and shape. bias, scale, offset: (D,), any floating type.
      eps: above 0. implementation: see `dispatch`. 'hopper' takes bf16, f16 and f32, rows of whole
      16 bytes, D up to what fits in a thread block (norm/README.md); under a mesh it runs inside a
      shard_map only.
    Returns: (y_xD, h_xD), both in x's type; h is rounded to it after the statistics were taken of
      the float32 sum. Both differentiable.
    Raises: ValueError for shapes, types, kind and eps that break the above; NotImplementedError,
      with all reasons, where the implementation asked for cannot run.
    """
    _check("fused_layer_norm", x_xD, residual, bias, scale, offset, kind, eps)
    writes = residual is not None or bias is not None
    spec = Spec(kind == "layer", float(eps), bias is not None, offset is not None, writes)
    arrays = dispatch.alike((x_xD, residual, bias, scale, offset, None))
    with arguments.reverse_only("fused_layer_norm"):
        return _norm(*arrays, spec, implementation)


def norm_unpack(
    x_TD: Array,
    info: PackInfo,
    *,
    residual: Array | None = None,
    bias: Array | None = None,
    scale: Array,
    offset: Array | None = None,
    kind: str = "layer",
    eps: float = 1e-5,
    implementation: dispatch.Implementation | None = None,
) -> Array:
    """`unpack(fused_layer_norm(x, ...)[0], info)` in one pass: the last norm of a packed network.

    Args: x_TD, residual: packed tokens; those of the dead tail are never used and get gradient 0.
      info: the result of `pack`. The other arguments are as in `fused_layer_norm`.
    Returns: y_BSD in x's type, 0 where it pads.
    Raises: as `fused_layer_norm`, and ValueError when x does not have the capacity's tokens.
    """
    check_info("norm_unpack", info)
    _check("norm_unpack", x_TD, residual, bias, scale, offset, kind, eps)
    if x_TD.ndim != 2 or x_TD.shape[0] != info.capacity:
        raise ValueError(
            f"norm_unpack: x {x_TD.shape} must be (T, D) with T = capacity = {info.capacity}"
        )
    spec = Spec(
        kind == "layer", float(eps), bias is not None, offset is not None, False, info.length
    )
    arrays = dispatch.alike((x_TD, residual, bias, scale, offset, info.cu_seqlens))
    with arguments.reverse_only("norm_unpack"):
        return _norm(*arrays, spec, implementation)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _norm(x_xD, residual_xD, bias_D, scale_D, offset_D, cu_seqlens, spec, implementation):
    return _run(x_xD, residual_xD, bias_D, scale_D, offset_D, cu_seqlens, spec, implementation)[:2]


def _run(x_xD, residual_xD, bias_D, scale_D, offset_D, cu_seqlens, spec, implementation):
    problem = hopper.forward_problem(x_xD, residual_xD, bias_D, scale_D, offset_D, spec)
    added = residual_xD is not None
    choice, tile = _choose("fused_layer_norm", implementation, problem, spec, added)
    return dispatch.run(
        choice,
        functools.partial(hopper.forward, spec=spec, tile=tile),
        functools.partial(reference.forward, spec=spec),
        x_xD,
        residual_xD,
        bias_D,
        scale_D,
        offset_D,
        cu_seqlens,
        op="fused_layer_norm",
    )


def _forward(*args):
    *primals, spec, implementation = args
    arrays = [None if p is None else p.value for p in primals]
    x_xD, residual_xD, bias_D, scale_D, offset_D, cu_seqlens = arrays
    if spec.length is not None:  # what is kept must not hold the garbage of the dead tail
        spec = dataclasses.replace(spec, writes=True)
    y, h_xD, mean_x1, rate_x1 = _run(
        x_xD, residual_xD, bias_D, scale_D, offset_D, cu_seqlens, spec, implementation
    )
    residual_mark = None if residual_xD is None else ()  # in the structure: values may be traced
    saved = (h_xD, mean_x1, rate_x1, scale_D, bias_D, offset_D, cu_seqlens, residual_mark)
    return (y, h_xD), saved


def _backward(spec, implementation, saved, cotangents):
    h_xD, mean_x1, rate_x1, scale_D, bias_D, offset_D, cu_seqlens, residual_mark = saved
    dy, dh_xD = cotangents
    if isinstance(dh_xD, SymbolicZero):
        dh_xD = None
    if isinstance(dy, SymbolicZero):
        dy = dispatch.alike((jnp.zeros(h_xD.shape, h_xD.dtype), h_xD))[0]
    elif cu_seqlens is not None:
        dy = packing.pack(dy, cu_seqlens, h_xD.shape[0])
    problem = hopper.backward_problem(h_xD, scale_D, dh_xD, spec)
    added = dh_xD is not None
    choice, tile = _choose("fused_layer_norm_backward", implementation, problem, spec, added)
    dx_xD, dbias_D, dscale_D, doffset_D = dispatch.run(
        choice,
        functools.partial(hopper.backward, spec=spec, tile=tile),
        functools.partial(reference.backward, spec=spec),
        h_xD,
        mean_x1,
        rate_x1,
        scale_D,
        dy,
        dh_xD,
        op="fused_layer_norm",
    )
    return (
        dx_xD,
        None if residual_mark is None else dx_xD,
        None if bias_D is None else dbias_D.astype(bias_D.dtype),
        dscale_D.astype(scale_D.dtype),
        None if offset_D is None else doffset_D.astype(offset_D.dtype),
        None if cu_seqlens is None else np.zeros(cu_seqlens.shape, jax.dtypes.float0),
    )


# Symbolic zeros: most callers use y only, and a sum with zeros would read as much as dy does.
_norm.defvjp(_forward, _backward, symbolic_zeros=True)


def key(problem: hopper.Problem, spec: Spec, added: bool) -> dict[str, str | bool | int]:
    """Returns the key of a table's row. added: with a residual, or backward a gradient of h."""
    return {
        "dtype": jnp.dtype(problem.dtype).name,
        "centred": spec.centred,
        "added": added,
        "unpacks": spec.length is not None,
        "width": problem.width,
        "rows": problem.rows,
    }


def _choose(
    op: str, implementation: str | None, problem: hopper.Problem, spec: Spec, added: bool
) -> tuple[str, hopper.Tile]:
    """Returns what runs, and the kernel's tile."""
    row = tuned.find(op, key(problem, spec, added))
    measured = tuned.tile(row)
    tile = hopper.fit(problem, hopper.Tile(**measured) if measured else None)
    reasons = hopper.misfits(problem, tile)
    if jnp.dtype(problem.dtype).name not in DTYPES:
        reasons.append(f"needs one of {', '.join(DTYPES)}, found {problem.dtype}")
    return dispatch.choose(op, implementation, reasons, [row]), tile


def _check(op: str, x, residual, bias, scale, offset, kind: str, eps: float) -> None:
    arguments.check_arrays(op, x=x, residual=residual, bias=bias, scale=scale, offset=offset)
    D = x.shape[-1] if x.ndim else 0
    if not jnp.issubdtype(x.dtype, jnp.floating) or not D:
        raise ValueError(f"{op}: x {x.dtype}{x.shape} must be floating, with a last dimension")
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"{op}: residual {residual.dtype}{residual.shape} must be like x, {x.dtype}{x.shape}"
        )
    for name, value in (("bias", bias), ("scale", scale), ("offset", offset)):
        if value is None and name != "scale":
            continue
        actual = f"{name} {value.dtype}{value.shape}" if value is not None else f"{name}=None"
        if value is None or value.shape != (D,) or not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"{op}: {actual} must be floating, ({D},), x's last dimension")
    if kind not in KINDS:
        raise ValueError(f"{op}: kind={kind!r}; there are {KINDS}")
    arguments.positive(op, "eps", eps, "the default: equal inputs have no variance")
