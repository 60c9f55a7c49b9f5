"""The product of floating-point activations and weights of 2, 3, 4 or 8 bits, differentiable.

Source: weight-only quantization with a scale for each group along K, the form of weights by GPTQ
(arXiv 2210.17323) and AWQ (arXiv 2306.00978). On Hopper the codes are dequantized in registers on
their way to the tensor cores (hopper.py), so that bits / 16 of a bf16 weight's bytes are read.

Legend: x any leading dimensions, M their product, K contracted, N columns, G groups of K, P bytes
of a column's codes.
Not here: quantization itself (megajax/quant), quantized activations (fused_gemm takes 8-bit
operands), forward mode and second derivatives through the kernel.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import arguments, dispatch, tuned
from pallas_kernels.hopper.activations import ACTIVATIONS, Activation
from pallas_kernels.quant_gemm import hopper, reference
from pallas_kernels.quant_gemm.reference import BITS, Spec
from pallas_kernels.quantize.reference import code_bytes, groups_of

Array = jax.Array
DTYPES = ("bfloat16", "float16", "float32")
OP = "quant_matmul"


def pack_weight(codes_KN: Array, *, bits: int) -> Array:
    """Packs the codes of a weight into bytes, as `quant_matmul` takes them.

    Each column is packed along K in pieces of whole bytes, low bits first. With 4 bits, byte p
    holds code 2p in its low half and code 2p + 1 in its high half; with 3 bits, 8 codes fill 3
    bytes. The bytes are those of `megajax.quant.QTensor.values` in a format with axis=0.

    Args:
      codes_KN: integers of any type: -2^(bits - 1) .. 2^(bits - 1) - 1, or 0 .. 2^bits - 1 for
        weights with zero points. Values are checked where they are known.
      bits: 2, 3, 4 or 8.
    Returns: uint8 (P, N), P = K * bits / 8, rounded up to whole pieces.
    Raises: ValueError for other bits, shapes, types and values.
    """
    arguments.check_arrays("pack_weight", ("codes",), codes=codes_KN)
    _check_bits("pack_weight", bits)
    if codes_KN.ndim != 2 or not jnp.issubdtype(codes_KN.dtype, jnp.integer):
        raise ValueError(
            f"pack_weight: codes {codes_KN.dtype}{codes_KN.shape} must be integers (K, N): K what "
            "the product contracts, N its columns"
        )
    if codes_KN.size and not isinstance(codes_KN, jax.core.Tracer):
        low, high, half = int(codes_KN.min()), int(codes_KN.max()), 2 ** (bits - 1)
        if not (-half <= low <= high < half or 0 <= low <= high < 2 * half):
            raise ValueError(
                f"pack_weight: codes of {bits} bits are {-half} to {half - 1}, or 0 to "
                f"{2 * half - 1} for weights with zero points; these are {low} to {high}"
            )
    return reference.pack(jnp.asarray(codes_KN).astype(jnp.uint8), bits)


def quant_matmul(
    x_MK: Array,
    packed: Array,
    scales_GN: Array,
    *,
    bits: int,
    group: int | None,
    zeros: Array | None = None,
    bias: Array | None = None,
    activation: Activation | None = None,
    implementation: dispatch.Implementation | None = None,
) -> Array:
    """Returns activation(x w + bias) for a weight w in `bits` bits.

    `group` neighbours along K in a column share a scale. With g the group of k,

        w[k, n] = code[k, n] * scales[g, n]                    codes -Q .. Q, Q = 2^(bits - 1) - 1
        w[k, n] = zeros[g, n] + code[k, n] * scales[g, n]      codes 0 .. 2^bits - 1

    in float32. The second form is used if `zeros` are given. w is rounded to x's type, the product
    is summed in float32 and the result is rounded once. (For codes of 4 bits without zeros, groups
    of multiples of 64 and tiles of up to 64 tokens, the Hopper kernel multiplies by the codes and
    scales the float32 sums of each group, so it rounds no weight. For more tokens, or groups of 32,
    and bf16 activations it scales in bf16 with a scale of two parts, which seldom gives w's
    neighbour: where code * scale is within 2^-15 of itself of the middle between two numbers.)

    `zeros` are numbers, not codes. Files of GPTQ and AWQ have an integer zero point z for each
    group, with w = (code - z) * scale. It becomes

        zeros = -z * scale

    The gradients of x, scales, zeros and bias are computed in plain JAX, which dequantizes the
    whole weight. Codes have no gradient.

    Args:
      x_MK: bf16|f16|f32, (..., K). packed: uint8 (P, N), of `pack_weight`.
      scales_GN: any floating type, G = K / group rounded up; the last group may be short.
      bits: 2, 3, 4 or 8. group: codes of a group, at least 1; None, or K or more: one group.
      zeros: (G, N), any floating type; None: none. bias: (N,), any floating type.
      activation: None, 'gelu' (exact), 'gelu_tanh' or 'silu'.
      implementation: see `dispatch`. 'hopper' takes bf16 and f16.
    Returns: y_xN in x's type; differentiable in x, scales, zeros and bias.
    Raises: ValueError for other shapes, types and words; NotImplementedError, with all reasons, if
      the requested implementation cannot run.
    """
    needed = "x", "packed", "scales"
    arguments.check_arrays(
        OP, needed, x=x_MK, packed=packed, scales=scales_GN, zeros=zeros, bias=bias
    )
    _check(x_MK, packed, bits)
    K, N = x_MK.shape[-1], packed.shape[1]
    group = max(K, 1) if group is None else arguments.integer(OP, "group", group, 1)
    weight = Weight(packed, scales_GN, zeros)
    _check_scales(weight, groups_of(K, group), (K, group))
    if activation not in ACTIVATIONS:
        raise ValueError(f"{OP}: activation={activation!r}; there are {ACTIVATIONS}")
    if bias is not None and (bias.shape != (N,) or not jnp.issubdtype(bias.dtype, jnp.floating)):
        raise ValueError(
            f"{OP}: bias {bias.dtype}{bias.shape} must be floating, ({N},): the weight's columns"
        )
    spec = Spec(bits, min(group, max(K, 1)), zeros is None, activation)
    static = _static(x_MK, N, spec, implementation)
    x_MK, weight, bias = dispatch.alike((x_MK, weight, bias))
    if static.implementation == "reference":
        return _product(x_MK, weight, bias, static)
    with arguments.reverse_only(OP):
        return _run(x_MK, weight, bias, static)


class Weight(NamedTuple):
    """A quantized weight: packed_PN, scales_GN, zeros_GN or None."""

    packed: Any
    scales: Array
    zeros: Array | None


class Static(NamedTuple):
    """The static arguments: implementation, specification of the product, tile."""

    implementation: str
    spec: Spec
    tile: hopper.Tile


def _product(x_xK: Array, weight: Weight, bias_N: Array | None, static: Static) -> Array:
    return dispatch.run(
        static.implementation,
        functools.partial(hopper.forward, spec=static.spec, tile=static.tile),
        functools.partial(reference.forward, spec=static.spec),
        x_xK,
        *weight,
        bias_N,
        op=OP,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _run(x_xK, weight, bias_N, static: Static) -> Array:
    return _product(x_xK, weight, bias_N, static)


def _forward(x_xK, weight, bias_N, static):
    return _product(x_xK, weight, bias_N, static), (x_xK, weight, bias_N)


def _backward(static, saved, dy_xN):
    x_xK, weight, bias_N = saved

    def product(x_xK, scales_GN, zeros_GN, bias_N):
        return reference.forward(x_xK, weight.packed, scales_GN, zeros_GN, bias_N, spec=static.spec)

    _, pull = jax.vjp(product, x_xK, weight.scales, weight.zeros, bias_N)
    dx_xK, dscales_GN, dzeros_GN, dbias_N = pull(dy_xN)
    none = np.zeros(weight.packed.shape, jax.dtypes.float0)
    return dx_xK, Weight(none, dscales_GN, dzeros_GN), dbias_N


_run.defvjp(_forward, _backward)


def key(dtype: Any, spec: Spec, M: int, N: int, K: int) -> tuned.Key:
    """Returns the key of a product in the tuning tables."""
    # Bits and groups are words: their kernels are other programs, of tiles of other sizes.
    words = {"dtype": jnp.dtype(dtype).name, "bits": str(spec.bits), "group": str(spec.group)}
    words |= {"zeros": not spec.signed, "activation": spec.activation or "none"}
    return words | {"M": M, "N": N, "K": K}


def _static(x_xK: Array, N: int, spec: Spec, implementation: str | None) -> Static:
    M, K = x_xK.size // max(x_xK.shape[-1], 1), x_xK.shape[-1]
    reasons = hopper.misfits(x_xK.dtype, M, N, K, spec)
    row = tuned.find(OP, key(x_xK.dtype, spec, M, N, K))
    guess = hopper.heuristic(M, N, K, spec, x_xK.dtype)
    tile = hopper.Tile(**fields) if (fields := tuned.tile(row)) else guess
    return Static(dispatch.choose(OP, implementation, reasons, [row]), spec, tile)


def _check_bits(op: str, bits: Any) -> None:
    if not isinstance(bits, int | np.integer) or bits not in BITS:
        raise ValueError(f"{op}: bits={bits!r} must be one of {', '.join(map(str, BITS))}")


def _check(x: Array, packed: Array, bits: Any) -> None:
    _check_bits(OP, bits)
    if x.ndim < 1 or x.dtype.name not in DTYPES:
        raise ValueError(f"{OP}: x {x.dtype}{x.shape} must be (..., K) of {', '.join(DTYPES)}")
    if packed.ndim != 2 or packed.dtype != jnp.uint8:
        raise ValueError(
            f"{OP}: packed {packed.dtype}{packed.shape} must be uint8 (P, N), as pack_weight "
            "returns it"
        )
    K = x.shape[-1]
    if packed.shape[0] != code_bytes(K, bits):
        raise ValueError(
            f"{OP}: packed {packed.shape} must have {code_bytes(K, bits)} rows: the bytes of K={K} "
            f"codes of {bits} bits; x {x.shape} has K in its last dimension"
        )


def _check_scales(weight: Weight, groups: int, sizes: tuple[int, int]) -> None:
    shape, (K, group) = (groups, weight.packed.shape[1]), sizes
    for name, x in (("scales", weight.scales), ("zeros", weight.zeros)):
        if x is not None and (x.shape != shape or not jnp.issubdtype(x.dtype, jnp.floating)):
            hint = (
                "; write zeros=-z * scales of integer zero points z"
                if name == "zeros" and jnp.issubdtype(x.dtype, jnp.integer)
                else ""
            )
            raise ValueError(
                f"{OP}: {name} {x.dtype}{x.shape} must be floating, {shape}: K={K} in groups of "
                f"{group}, and the weight's columns{hint}"
            )
